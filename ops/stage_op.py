"""One stage as registered torch operators: what is made of its spec, and how it is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from linalg_dsl.codegen.emit.trace import Trace
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import call_sizes, check_programs, check_widths
from linalg_dsl.ops.artefacts import Artefacts, Passes
from linalg_dsl.ops.carried import all_started, started
from linalg_dsl.ops.library import Operator, register, registered
from linalg_dsl.ops.quick import QuickStage
from linalg_dsl.ops.quick_gradients import QuickGradients
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.evaluate_form import run_states
from linalg_dsl.planner.outputs import one_or_all
from linalg_dsl.planner.step_form import StepForm

Consts = tuple[tuple[str, float], ...]
States = tuple[Tensor | None, ...]
Rounding = Callable[[Tensor], Tensor]
Method = TypeVar("Method", bound=Callable[..., Any])


def constant(method: Method) -> Method:
    """A method that torch.compile runs while tracing, as its result is the same for the same arguments."""
    return cast(Method, torch.compiler.assume_constant_result(method))  # type: ignore[no-untyped-call]


class StageOp:
    """A recurrence that is one stage: everything is made when it is first needed and kept."""

    def __init__(self, spec: RecurrenceSpec, options: CompileOptions, passes: Passes) -> None:
        self.spec = spec
        self.options = options
        self._passes = passes
        self._derived: dict[Consts, Artefacts] = {}
        self._texts: dict[tuple[str, Consts], str] = {}
        self._prepared: dict[tuple[str | float, ...], str] = {}
        self.quick = QuickStage(spec)
        self.quick_gradients = QuickGradients(spec)

    def artefacts(self, consts: Consts = ()) -> Artefacts:
        """Canonical form and plans with these consts fixed."""
        found = self._derived.get(consts)
        if found is None:
            found = self._derived[consts] = self._passes.derive(self.spec, self.options, dict(consts))
        return found

    def module_text(self, backend: str, consts: Consts = ()) -> str:
        """The whole generated module of a backend, "triton" or "torch"."""
        if backend not in ("triton", "torch"):
            raise ArgumentError(f"source text exists for triton and torch, got {backend!r}")
        found = self._texts.get((backend, consts))
        if found is None:
            text = self._passes.emit(self.artefacts(consts), backend, self.options)
            found = self._texts[backend, consts] = text
        return found

    def traced_text(self, backend: str, trace: Trace) -> str:
        """The module of a backend with the declared consts; ``trace`` takes up what its names stand for."""
        return self._passes.emit(self.artefacts(), backend, self.options, trace=trace)

    def operator(self, backend: str, consts: Consts = ()) -> Operator:
        """The registered torch operators of a backend."""
        before = None
        if backend == "triton":
            from linalg_dsl.ops.first_use import FirstUse
            from linalg_dsl.ops.selfcheck import SelfCheck

            def exact() -> ModuleType:
                return self.operator("torch", consts).module

            before = FirstUse(SelfCheck(self.spec, consts, exact, self.options.handed))
        return register(self.spec, self.module_text(backend, consts), before)

    # -- runs -----------------------------------------------------------------------------------
    def run(
        self,
        backend: str,
        consts: Consts,
        tensors: Sequence[Tensor],
        initials: States,
        cu_seqlens: Tensor | None,
        want: bool,
    ) -> tuple[Any, States]:
        """The output, of several a tuple, and the final states if ``want``.

        ``consts`` may hold more than this stage has.
        """
        own = self._own(consts)
        if backend == "triton":
            check_widths(self.spec, tensors)
            if not torch.compiler.is_compiling():  # sizes are numbers
                check_programs(self.spec, tensors, cu_seqlens)
        name = self._prepare(backend, *(word for pair in own for word in pair))
        given = dict(own)
        numbers = self.numbers(own)
        if any(s.start != 0 and x is None for s, x in zip(self.spec.states, initials, strict=True)):
            sizes = call_sizes(self.spec, tensors, cu_seqlens, given)
            sizes["H"] = max([sizes["H"], *(x.shape[1] for x in initials if x is not None)])
            initials = started(self.spec, initials, sizes, tensors[0])
        leaves = (*tensors, *initials)
        save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
        if backend == "triton" and not torch.compiler.is_compiling():
            quick = self.quick_gradients if save else self.quick
            found = quick(registered(name), leaves, numbers, want, cu_seqlens)
            if found is not None:
                return self._result(found, len(initials), want)
        operator = getattr(torch.ops.linalg_dsl, name)
        *results, _ = operator(*leaves, numbers, cu_seqlens, want, save)
        return self._result(results, len(initials), want)

    def _result(self, results: Sequence[Tensor], states: int, want: bool) -> tuple[Any, States]:
        """The outputs and the states behind them, which nobody may have asked for."""
        count = len(self.spec.outputs)
        return one_or_all(results[:count]), tuple(results[count:]) if want else (None,) * states

    def numbers(self, consts: Consts) -> list[float]:
        """Every const of the stage, NaN where it is not given."""
        given = dict(consts)
        return [given.get(c.name, math.nan) for c in self.spec.consts]

    def step_loop(
        self,
        dtype: torch.dtype,
        consts: Consts,
        tensors: Sequence[Tensor],
        initials: States,
        cu_seqlens: Tensor | None,
        want: bool,
    ) -> tuple[Any, States]:
        """The same by the step loop, in ``dtype``."""
        own = dict(self._own(consts))
        tensors = self._as_wide(tensors, initials)
        sizes = call_sizes(self.spec, tensors, cu_seqlens, own)
        o, states = reference(
            self.spec,
            self._named(tensors),
            initial_state=all_started(self.spec, initials, sizes, tensors[0]),
            output_final_state=want,
            cu_seqlens=cu_seqlens,
            consts=own,
            dtype=dtype,
        )
        if states is None:
            return o, (None,) * len(initials)
        return o, (states,) if isinstance(states, Tensor) else tuple(states)

    def short_loop(
        self,
        operand: Rounding,
        consts: Consts,
        tensors: Sequence[Tensor],
        initials: States,
        cu_seqlens: Tensor | None,
        want: bool,
    ) -> tuple[Any, States]:
        """Form (1), one token after the other, with ``operand`` applied to the factors of products.

        A stage without form (1) is run in float32.
        """
        own = self._own(consts)
        form = self.artefacts(own).form
        if isinstance(form, StepForm):  # its products have no short operands
            return self.step_loop(torch.float32, own, tensors, initials, cu_seqlens, want)
        wide = self._named(self._as_wide(tensors, initials))
        return run_states(form, wide, initials, dict(own), operand)

    # -------------------------------------------------------------------------------------------
    @constant
    def _prepare(self, backend: str, *words: str | float) -> str:
        """The name of the operator for these consts (name, value, name, value, ...), registered by now.

        torch.compile calls this while tracing and takes the result for a constant, which asks for plain
        words as arguments.
        """
        key = (backend, *words)
        found = self._prepared.get(key)
        if found is None:
            consts = tuple((str(n), float(v)) for n, v in zip(words[::2], words[1::2], strict=True))
            # consts that a module takes as numbers need no specialisation of their own
            general = self.operator(backend)
            fixed = tuple((n, v) for n, v in consts if n not in general.consts)
            chosen = self.operator(backend, fixed) if fixed else general
            found = self._prepared[key] = chosen.name
        return found

    def _as_wide(self, tensors: Sequence[Tensor], initials: States) -> Sequence[Tensor]:
        """Inputs of which one has as many heads as the states: loops take no other number of them."""
        heads = max((x.shape[1] for x in initials if x is not None), default=0)
        have = [x.shape[2 if d.timed else 0] for x, d in zip(tensors, self.spec.inputs, strict=True)]
        if heads <= max(have):
            return tensors
        i = next(i for i, d in enumerate(self.spec.inputs) if d.timed)
        return [x.repeat_interleave(heads // have[i], 2) if n == i else x for n, x in enumerate(tensors)]

    def _own(self, consts: Consts) -> Consts:
        names = [c.name for c in self.spec.consts]
        return tuple((n, v) for n, v in consts if n in names)

    def _named(self, tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {d.name: x for d, x in zip(self.spec.inputs, tensors, strict=True)}
