"""Registers emitted modules as torch operators: forward, backward, fake kernels, autograd.

An emitted module has ``forward`` and ``backward`` over whole sequences (one contract for every
backend). Each module becomes two operators, ``linalg_dsl::<name>_<hash8>`` and its ``_backward``.
A state is an optional argument ``initial_<i>`` and a result of its own, in the order of the module's
``STATES``. Of several outputs a module gives a tuple, the operator each as a result.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.cache import load_module, module_key
from linalg_dsl.codegen.emit.names import Names, ascii_identifier
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import axis_sizes, check_offsets_data, const_numbers
from linalg_dsl.ops.launched import Use
from linalg_dsl.planner.outputs import each, one_or_all

NAMESPACE = "linalg_dsl"
_ARGUMENTS = ("consts", "cu_seqlens", "output_final_state", "save", "residuals", "saved", "d_o")
_LOCK = threading.RLock()
_REGISTERED: dict[str, Operator] = {}
BeforeCall = Callable[[ModuleType, tuple[Tensor, ...], Tensor | None, Use], None]


@dataclass(frozen=True)
class Operator:
    """A registered pair of operators: ``torch.ops.linalg_dsl.<name>`` and ``<name>_backward``."""

    name: str
    key: str
    module: ModuleType
    consts: tuple[str, ...]
    numbers: ModuleNumbers


def registered(name: str) -> Operator:
    """The operators that are registered under this name."""
    return _REGISTERED[name]


class ModuleNumbers:
    """The numbers that a module takes as its CONSTS, which depend on sizes and on what a call gives."""

    def __init__(self, spec: RecurrenceSpec, names: Sequence[str]) -> None:
        self.spec = spec
        self.names = tuple(names)
        self._found: dict[tuple[object, ...], tuple[float, ...]] = {}

    def __call__(self, tensors: Sequence[Tensor], given: Sequence[float]) -> tuple[float, ...]:
        """``given`` has every const of the spec, NaN where not given."""
        dims = axis_sizes(self.spec, tensors)
        key = (*dims.items(), *(None if math.isnan(x) else x for x in given))
        found = self._found.get(key)
        if found is None:
            named = {c.name: x for c, x in zip(self.spec.consts, given, strict=True) if not math.isnan(x)}
            values = const_numbers(self.spec, dims, named)
            for axis, size in dims.items():
                if values.get(axis, size) != size:
                    raise ArgumentError(f"{self.spec.name}: axis {axis} is {size}, expected {values[axis]:g}")
            scope = {**{axis: float(size) for axis, size in dims.items()}, **values}
            found = self._found[key] = tuple(scope[c] for c in self.names)
        return found


def register(spec: RecurrenceSpec, text: str, before_call: BeforeCall | None = None) -> Operator:
    """Loads the module with this text and registers its operators; once per text in a process.

    ``before_call`` is called before a forward on real data, with the module, the tensors, the offsets of a
    packed batch and what else decides which kernels run.
    """
    base = ascii_identifier(spec.name)[:60]
    key = module_key(text)
    name = f"{base}_{key[:8]}"
    with _LOCK:
        found = _REGISTERED.get(name)
        if found is None:
            module = load_module(base, text)
            if tuple(module.INPUTS) != tuple(d.name for d in spec.inputs):
                raise InternalError(f"module {name} takes {module.INPUTS}")
            if tuple(module.STATES) != tuple(s.name for s in spec.states):
                raise InternalError(f"module {name} has the states {module.STATES}")
            made = _Registration(spec, name, module, before_call)
            made.run()
            found = _REGISTERED[name] = Operator(name, key, module, tuple(module.CONSTS), made.numbers)
        if found.key != key:
            raise InternalError(f"two modules share the name {name}")
        return found


class _Registration:
    """The functions behind one pair of operators."""

    def __init__(
        self, spec: RecurrenceSpec, name: str, module: ModuleType, before_call: BeforeCall | None
    ) -> None:
        self.spec = spec
        self.name = name
        self.module = module
        self.before_call = before_call
        self.count = len(spec.inputs)
        self.states = len(spec.states)
        self.outputs = len(spec.outputs)
        self.numbers = ModuleNumbers(spec, module.CONSTS)
        initials = [f"initial_{i}" for i in range(self.states)]
        finals = [f"d_final_{i}" for i in range(self.states)]
        cotangents = ["d_o"] if self.outputs == 1 else [f"d_o_{i}" for i in range(self.outputs)]
        names = Names(reserved=(*_ARGUMENTS, *cotangents, *initials, *finals))
        self.names = [names.unique(d.name) for d in spec.inputs]
        self.initials = ", ".join(f"Tensor? {n}" for n in initials)
        self.cotangents = ", ".join([*(f"Tensor {n}" for n in cotangents), *(f"Tensor? {n}" for n in finals)])

    def run(self) -> None:
        tensors = ", ".join(f"Tensor {n}" for n in self.names)
        results = ", ".join(["Tensor"] * (self.outputs + self.states))
        common = f"{tensors}, {self.initials}, float[] consts, Tensor? cu_seqlens"
        forward = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}",
            self.forward,
            mutates_args=(),
            schema=f"({common}, bool output_final_state, bool save) -> ({results}, Tensor[])",
        )
        backward = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}_backward",
            self.backward,
            mutates_args=(),
            schema=f"({common}, bool saved, Tensor[] residuals, {self.cotangents}) -> Tensor[]",
        )
        forward.register_fake(self.forward_fake)
        backward.register_fake(self.backward_fake)
        forward.register_autograd(self.differentiate, setup_context=self.keep)
        backward.register_autograd(self.refuse, setup_context=lambda ctx, inputs, output: None)

    # -- forward ------------------------------------------------------------------------------
    def forward(self, *args: Any) -> tuple[Any, ...]:
        return self._forward(args, dry=False)

    def forward_fake(self, *args: Any) -> tuple[Any, ...]:
        return self._forward(args, dry=True)

    def _forward(self, args: tuple[Any, ...], dry: bool) -> tuple[Any, ...]:
        """The outputs, one tensor per state, the list of residuals."""
        tensors, initials, (consts, offsets, output_final_state, save) = self._split(args)
        if not dry:
            initial = any(x is not None for x in initials)
            self._look(tensors, offsets, Use(initial, output_final_state, save))
        with plain_types(tensors[0]):
            numbers = self._consts(tensors, consts, dry)
            o, states, residuals = self.module.forward(
                tensors, initials, numbers, offsets, output_final_state, save, dry
            )
        if states is None:
            # an operator cannot return "no tensor": an empty one stands for a state that nobody wants
            states = tuple(tensors[0].new_empty((0,), dtype=torch.float32) for _ in range(self.states))
        return *each(o), *states, list(residuals)

    # -- backward -----------------------------------------------------------------------------
    def backward(self, *args: Any) -> list[Tensor]:
        return self._backward(args, dry=False)

    def backward_fake(self, *args: Any) -> list[Tensor]:
        return self._backward(args, dry=True)

    def _backward(self, args: tuple[Any, ...], dry: bool) -> list[Tensor]:
        """Gradients of all tensors, then those of the initial states that there are."""
        tensors, initials, (consts, offsets, saved, residuals, *rest) = self._split(args)
        d_outputs, d_finals = rest[: self.outputs], rest[self.outputs :]
        with plain_types(tensors[0]):
            shared = (tensors, initials, self._consts(tensors, consts, dry), offsets)
            if not saved:
                _, _, residuals = self.module.forward(*shared, False, True, dry)
            grads, d_initials = self.module.backward(
                *shared,
                list(residuals),
                one_or_all([d.contiguous() for d in d_outputs]),
                tuple(None if d is None else d.contiguous() for d in d_finals),
                dry,
            )
        given = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, tensors, strict=True)]
        return [*given, *(d for d in d_initials if d is not None)]

    # -- autograd -----------------------------------------------------------------------------
    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        consts, offsets, output_final_state, save = inputs[self.count + self.states :]
        optional = (*inputs[self.count : self.count + self.states], offsets)
        ctx.consts = list(consts)
        ctx.saved = save
        ctx.want_states = output_final_state
        ctx.has = tuple(x is not None for x in optional)
        ctx.save_for_backward(*inputs[: self.count], *(x for x in optional if x is not None), *output[-1])

    def differentiate(self, ctx: Any, *given_cotangents: Any) -> tuple[Any, ...]:
        d_outputs, rest = given_cotangents[: self.outputs], given_cotangents[self.outputs :]
        d_states: tuple[Tensor | None, ...] = rest[: self.states]
        if not ctx.want_states:
            d_states = (None,) * self.states
        saved = list(ctx.saved_tensors)
        tensors, saved = saved[: self.count], saved[self.count :]
        *initials, offsets = [saved.pop(0) if has else None for has in ctx.has]
        operator = getattr(torch.ops.linalg_dsl, f"{self.name}_backward")
        grads = operator(*tensors, *initials, ctx.consts, offsets, ctx.saved, saved, *d_outputs, *d_states)
        given = iter(grads[self.count :])
        d_initials = [next(given) if has else None for has in ctx.has[:-1]]
        # an empty list counts as a list of tensors, whose gradient is a list too
        d_consts: list[Tensor] | None = None if ctx.consts else []
        return (*grads[: self.count], *d_initials, d_consts, None, None, None)

    def refuse(self, ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{self.spec.name}: the compiled backward has no derivative of its own; "
            "use op.reference(...) for second derivatives"
        )

    # -----------------------------------------------------------------------------------------
    def _split(
        self, args: tuple[Any, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...], tuple[Any, ...]]:
        """The tensors, the initial states, and the rest."""
        tensors = tuple(x.contiguous() for x in args[: self.count])
        initials = args[self.count : self.count + self.states]
        rest = args[self.count + self.states :]
        return tensors, tuple(None if x is None else x.contiguous() for x in initials), rest

    def _consts(self, tensors: tuple[Tensor, ...], given: Sequence[float], dry: bool) -> tuple[float, ...]:
        """The numbers that the module takes; ``given`` has every const of the spec, NaN where not given."""
        if dry:  # sizes may be symbols, and nothing is computed
            return tuple(0.0 for _ in self.module.CONSTS)
        return self.numbers(tensors, given)

    def _look(self, tensors: tuple[Tensor, ...], offsets: Tensor | None, use: Use) -> None:
        if offsets is not None and offsets.device.type == "cpu":
            length = next(x.shape[1] for x, d in zip(tensors, self.spec.inputs, strict=True) if d.timed)
            check_offsets_data(self.spec.name, offsets, length)
        if self.before_call is not None:
            self.before_call(self.module, tensors, offsets, use)


@contextlib.contextmanager
def plain_types(x: Tensor) -> Iterator[None]:
    """Runs a module in the types it chose itself, on the device of its tensors."""
    with contextlib.ExitStack() as stack:
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if kind == "cuda" and x.device.index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(x.device))
        yield
