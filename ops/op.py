"""The compiled recurrence: what a user calls."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linalg_dsl.codegen.emit.signature import output_like
from linalg_dsl.codegen.extract import part_of
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import RESERVED, BoundCall, bind, check_widths
from linalg_dsl.ops.artefacts import Artefacts, Stages
from linalg_dsl.ops.carried import all_started, started
from linalg_dsl.ops.library import Operator, register
from linalg_dsl.ops.plan_view import Plan
from linalg_dsl.ops.promises import check_promises
from linalg_dsl.ops.reference import reference
from linalg_dsl.ops.states import pack_states

if TYPE_CHECKING:
    from linalg_dsl.ops.check import CheckReport

Consts = tuple[tuple[str, float], ...]
Method = TypeVar("Method", bound=Callable[..., Any])


def _constant(method: Method) -> Method:
    """A method that torch.compile runs while tracing, as its result is the same for the same arguments."""
    return cast(Method, torch.compiler.assume_constant_result(method))  # type: ignore[no-untyped-call]


class CompiledOp:
    """A recurrence as a torch operator, with gradients for every input, param and the initial state.

    Call it with the declared tensors by order or by name: inputs [B, T, h, *dims], params [h, *dims],
    where every head count h divides the largest, H. Further keywords: the spec's consts;
    ``initial_state`` [N, H, K, V]; ``output_final_state``; ``cu_seqlens`` [N + 1] for N sequences packed
    into a batch of one (``cu_seqlens_cpu``, the same on the CPU, spares a wait where one is needed;
    ``max_seqlen`` is a hint). The output is [B, T, H, V] in the type of v, and with
    ``output_final_state`` the state [N, H, K, V] in float32 (float64 for float64 inputs) comes second.
    Several states go in as a sequence, a named tuple or a mapping, and come out as a named tuple.
    """

    def __init__(self, spec: RecurrenceSpec, options: CompileOptions, stages: Stages) -> None:
        if clash := RESERVED & {*(x.name for x in spec.inputs), *(x.name for x in spec.consts)}:
            raise ArgumentError(f"{spec.name}: {min(clash)} is a keyword of every call; choose another name")
        self.spec = spec
        self.options = options
        self._stages = stages
        self._derived: dict[Consts, Artefacts] = {}
        self._texts: dict[tuple[str, Consts], str] = {}
        self._prepared: dict[tuple[str | float, ...], str] = {}
        self.__name__ = self.__qualname__ = spec.name
        self.__doc__ = spec.doc or type(self).__doc__

    # -- the call -----------------------------------------------------------------------------
    @overload
    def __call__(
        self,
        *args: Tensor,
        initial_state: Any = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        max_seqlen: int | None = None,
        **kwargs: Tensor | float,
    ) -> Any: ...

    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(
        self,
        *args: Tensor,
        initial_state: Any = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Any:
        call = bind(self.spec, args, kwargs, initial_state, cu_seqlens)
        _check_hints(self.spec.name, cu_seqlens, cu_seqlens_cpu, max_seqlen)
        if not torch.compiler.is_compiling():
            if self.options.debug:
                check_promises(self.spec, call.tensors)
            if forward_ad._current_level >= 0:
                _refuse_tangents(self.spec.name, (*call.tensors, *call.initials))
        kind = call.tensors[0].device.type
        backend = self.backend_for(kind, any(x.dtype == torch.float64 for x in call.tensors))
        if backend == "reference":
            return self._by_reference(call, output_final_state, cu_seqlens)
        if backend == "triton":
            check_widths(self.spec, call.tensors)
        if backend == "torch" and kind != "cpu" and cu_seqlens_cpu is not None:
            cu_seqlens = cu_seqlens_cpu
        name = self._prepare(backend, *(word for pair in call.consts for word in pair))
        given = dict(call.consts)
        consts = [given.get(c.name, math.nan) for c in self.spec.consts]
        initials = started(self.spec, call.initials, call.sizes, call.tensors[0])
        leaves = (*call.tensors, *initials)
        save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
        operator = getattr(torch.ops.linalg_dsl, name)
        o, *states, _ = operator(*leaves, consts, cu_seqlens, output_final_state, save)
        return (o, pack_states(self.spec, states)) if output_final_state else o

    def step(self, *args: Tensor, **kwargs: Any) -> Any:
        """One decode step; not supported yet."""
        raise ArgumentError(
            f"{self.spec.name}: step is not supported yet; call the op with initial_state and T = 1"
        )

    def reference(
        self,
        *args: Tensor,
        initial_state: Any = None,
        output_final_state: Any = False,
        cu_seqlens: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The step-by-step loop of the spec on the same arguments: any dtype, differentiable twice, slow."""
        call = bind(self.spec, args, kwargs, initial_state, cu_seqlens)
        o, states = self._step_loop(call, output_final_state, cu_seqlens, dtype)
        return (o, pack_states(self.spec, states)) if output_final_state else o

    def check(self, **kwargs: Any) -> CheckReport:
        """Errors of output, final state and every gradient against the float64 reference.

        Takes the keywords of ``linalg_dsl.ops.check.run_check``: B, T, H, K, V, dtype, device, gates, seed.
        """
        from linalg_dsl.ops.check import run_check

        return run_check(self, **kwargs)

    # -- what it was made of ------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        """The derivation and the chunk plans, printable; ``plan.explain(B=, T=, H=, K=, V=)``."""
        return Plan(self.artefacts(()), self.options.chunk_size)

    def artefacts(self, consts: Consts = ()) -> Artefacts:
        """Canonical form and chunk plans with these consts fixed."""
        found = self._derived.get(consts)
        if found is None:
            found = self._derived[consts] = self._stages.derive(self.spec, self.options, dict(consts))
        return found

    def source(self, which: str = "module", backend: str | None = None) -> str:
        """The generated text: "forward" or "backward" with all they call, or the whole "module".

        ``backend`` is "triton" or "torch"; by default what a call would use where tensors are on this
        machine's best device.
        """
        if which not in ("forward", "backward", "module"):
            raise ArgumentError(f"source is of forward, backward or module, got {which!r}")
        text = self.module_text(backend or self._default_backend())
        return text if which == "module" else part_of(text, which)

    def module_text(self, backend: str, consts: Consts = ()) -> str:
        """The whole generated module of a backend, "triton" or "torch"."""
        if backend not in ("triton", "torch"):
            raise ArgumentError(f"source text exists for triton and torch, got {backend!r}")
        found = self._texts.get((backend, consts))
        if found is None:
            text = self._stages.emit(self.artefacts(consts), backend, self.options)
            found = self._texts[backend, consts] = text
        return found

    def export(self, path: str | os.PathLike[str], backend: str | None = None) -> Path:
        """Writes one file that needs only torch (and triton): the module and a function to call it."""
        from linalg_dsl.codegen.emit.standalone import standalone_text

        chosen = backend or self._default_backend()
        target = Path(path)
        text = standalone_text(self.spec, self.module_text(chosen), self.operator(chosen).consts)
        target.write_text(text, encoding="utf-8")
        return target

    def operator(self, backend: str, consts: Consts = ()) -> Operator:
        """The registered torch operators of a backend."""
        before = None
        if backend == "triton":
            from linalg_dsl.ops.selfcheck import SelfCheck

            before = SelfCheck(self.spec, consts, lambda: self.operator("torch", consts).module)
        return register(self.spec, self.module_text(backend, consts), before)

    # -----------------------------------------------------------------------------------------
    @_constant
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

    def _named(self, call: BoundCall) -> dict[str, Tensor]:
        return {d.name: x for d, x in zip(self.spec.inputs, call.tensors, strict=True)}

    def _by_reference(self, call: BoundCall, output_final_state: bool, cu_seqlens: Tensor | None) -> Any:
        o, states = self._step_loop(call, output_final_state, cu_seqlens)
        o = o.to(call.tensors[output_like(self.spec)].dtype)
        return (o, pack_states(self.spec, states)) if output_final_state else o

    def _step_loop(
        self,
        call: BoundCall,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        given = all_started(self.spec, call.initials, call.sizes, call.tensors[0])
        o, states = reference(
            self.spec,
            self._named(call),
            initial_state=given,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            consts=dict(call.consts),
            dtype=dtype,
        )
        return o, (states,) if isinstance(states, Tensor) else tuple(states or ())

    @_constant
    def backend_for(self, device: str, double: bool) -> str:
        """The backend of a call with tensors on this type of device, in float64 or not."""
        wanted = self.options.backend
        if wanted == "auto":
            wanted = "triton" if device == "cuda" else "torch"
            if wanted == "triton" and double:
                reason = f"{self.spec.name}: float64 has no Triton kernels; the torch backend runs instead"
                if self.options.strict:
                    raise ArgumentError(f"{reason}, which strict=True forbids")
                warnings.warn(reason, stacklevel=3)
                wanted = "torch"
        elif wanted == "triton":
            if double:
                raise ArgumentError(
                    f"{self.spec.name}: the triton backend takes float16, bfloat16 and float32, got float64"
                )
            if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
                raise ArgumentError(
                    f"{self.spec.name}: the triton backend needs tensors on a GPU, got {device} "
                    "(with TRITON_INTERPRET=1 its interpreter takes CPU tensors)"
                )
        return wanted

    def _default_backend(self) -> str:
        wanted = self.options.backend
        return wanted if wanted in ("triton", "torch") else "triton" if torch.cuda.is_available() else "torch"

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledOp, (self.spec, self.options, self._stages)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledOp:
        return self  # it never changes

    def __repr__(self) -> str:
        inputs = ", ".join(d.name for d in self.spec.inputs)
        return f"<linalg_dsl op {self.spec.name}({inputs}), backend {self.options.backend}>"


def _refuse_tangents(name: str, tensors: Iterable[Tensor | None]) -> None:
    """Forward-mode derivatives would be lost in silence."""
    unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
    if any(x is not None and unpack(x).tangent is not None for x in tensors):
        raise RuntimeError(f"{name}: forward-mode derivatives are not supported; use op.reference(...)")


def _check_hints(name: str, cu_seqlens: Any, cu_seqlens_cpu: Any, max_seqlen: Any) -> None:
    if cu_seqlens_cpu is not None:
        if cu_seqlens is None:
            raise ArgumentError(f"{name}: cu_seqlens_cpu needs cu_seqlens, of which it is a copy")
        if not isinstance(cu_seqlens_cpu, Tensor) or cu_seqlens_cpu.device.type != "cpu":
            raise ArgumentError(f"{name}: cu_seqlens_cpu must be a tensor on the CPU")
        if cu_seqlens_cpu.shape != cu_seqlens.shape:
            raise ArgumentError(
                f"{name}: cu_seqlens_cpu has shape {tuple(cu_seqlens_cpu.shape)}, "
                f"cu_seqlens {tuple(cu_seqlens.shape)}"
            )
    if max_seqlen is not None and not isinstance(max_seqlen, int):
        raise ArgumentError(f"{name}: max_seqlen must be an int, got {type(max_seqlen).__name__}")
