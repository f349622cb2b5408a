"""What is under test: a recurrence and a callable that claims to compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.schedule.two_level import why_one_level
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.artefacts import Artefacts
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.step_form import StepForm

Tensors = Mapping[str, Tensor]
Call = Callable[..., Any]

CHUNKS = (1, 3, 16, 64)
"""Chunk sizes that an op on the torch backend is compared at; kernels take powers of two from 16."""
KERNEL_CHUNKS = (16, 32, 64)
CHUNK_SIZE = "chunk_size="
"""What the names of such variants begin with."""


@dataclass(frozen=True)
class Subject:
    """A recurrence, and a callable that claims to compute it.

    ``call(**tensors)`` gets every declared input [B, T, H, *dims] and param [H, *dims] by its name in
    ``spec`` and returns the output [B, T, H, *dims]. Where they are declared here, further keywords are
    handed in: ``initial_state`` (the carried tensors [N, H, *dims]: the tensor itself where there is one,
    else a tuple in the order of ``spec.carried``), ``output_final_state=True`` (then ``(o, state)`` is
    returned, ``state`` a tensor or a sequence of them) and ``cu_seqlens`` (int64, [N + 1], batch 1).

    ``gradients`` names the inputs, params and ``initial_state`` whose gradients are compared, all of them
    by default, none for an empty tuple. ``dtypes`` are those it is tested in, ``sizes`` the (K, V) it can
    take, ``heads`` the head counts; None means any. ``few_kernels``: each of the types has one of the
    sizes, and heads are shared in one way (``linalg_dsl.testing.few_kernels``). ``precision`` is the type
    that its matrix products round operands to where that is shorter than the inputs' (``torch.bfloat16``).
    ``variants`` are further callables that must agree with ``call`` (other chunk sizes, other plans).
    ``bitwise`` says that the bits of a sequence do not depend on what shares its batch (true of kernels, not
    of a CPU's batched products), ``strided`` that tensors may lie in memory in any way.
    ``step(**tensors of one token, state=...)`` decodes, giving ``(o, state)``. ``suit`` may change
    drawn inputs to what the callable needs beyond the declaration.
    """

    name: str
    spec: RecurrenceSpec
    call: Call
    gradients: tuple[str, ...] | None = None
    initial_state: bool = False
    final_state: bool = False
    packed: bool = False
    grouped_heads: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    device: str = "cpu"
    sizes: tuple[tuple[int, int], ...] | None = None
    heads: tuple[int, ...] | None = None
    few_kernels: bool = False
    precision: torch.dtype | None = None
    bitwise: bool = False
    strided: bool = True
    variants: Mapping[str, Call] = field(default_factory=dict)
    consts: Mapping[str, float] = field(default_factory=dict)
    suit: Callable[[Tensors], Tensors] | None = None
    step: Call | None = None
    op: CompiledOp | None = None

    @classmethod
    def of_op(
        cls,
        op: CompiledOp,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        device: str = "cpu",
        consts: Mapping[str, float] | None = None,
        **options: Any,
    ) -> Subject:
        """A compiled op on ``device``, in float64 and float32 unless ``dtypes`` says otherwise.

        Where kernels run (the triton backend, or ``auto`` on a GPU) float32 is the default, and on a GPU
        bfloat16 too. Other chunk sizes of the same plan become ``variants``. Further keywords are fields.
        """
        kernels = op.options.backend == "triton" or (op.options.backend == "auto" and device != "cpu")
        if dtypes is None:
            dtypes = (torch.float32,) if kernels else (torch.float64, torch.float32)
            if kernels and device != "cpu":
                dtypes = (*dtypes, torch.bfloat16)
        chunks = KERNEL_CHUNKS if kernels else CHUNKS
        variants: dict[str, Call] = {}
        if op.options.backend != "reference":
            for size in chunks:
                if size != op.options.chunk_size:
                    variants[f"{CHUNK_SIZE}{size}"] = _Variant(op, (("chunk_size", size),))
        if kernels:
            variants |= _other_paths(op)
        made = cls(
            op.spec.name,
            op.spec,
            op,
            initial_state=True,
            final_state=True,
            packed=True,
            grouped_heads=True,
            dtypes=tuple(dtypes),
            device=device,
            bitwise=kernels,
            variants=variants,
            step=None if op.options.backend == "reference" else op.step,
            consts=dict(consts or {}),
            op=op,
        )
        return replace(made, **options)

    @classmethod
    def of_callable(
        cls,
        function: Call,
        spec: RecurrenceSpec,
        *,
        names: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Subject:
        """A foreign callable. ``names`` maps names of the spec, and ``initial_state``,
        ``output_final_state``, ``cu_seqlens``, to the function's keywords where they differ.

        ``fields`` are those of ``Subject``: say ``initial_state=True`` and so on for what the function
        supports. Raises ``ArgumentError`` for a name that the spec does not have.
        """
        known = {*(d.name for d in spec.inputs), "initial_state", "output_final_state", "cu_seqlens"}
        if unknown := sorted(set(names or {}) - known):
            raise ArgumentError(
                f"{spec.name} has no input {unknown[0]!r}; names maps {', '.join(sorted(known))}"
            )
        call = _Renamed(function, dict(names or {})) if names else function
        title = fields.pop("name", None) or getattr(function, "__name__", spec.name)
        return cls(title, spec, call, **fields)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The leaves whose gradients are compared; states as ``initial_state`` or ``initial_state NAME``."""
        from linalg_dsl.ops.carried import state_labels

        states = state_labels(self.spec, "initial_state") if self.initial_state else ()
        every = (*(d.name for d in self.spec.inputs), *states)
        if self.gradients is None:
            return every
        return tuple(n for n in every if n.split(" ")[0] in self.gradients or n in self.gradients)

    def with_call(self, call: Call, name: str) -> Subject:
        """The same claims about another callable."""
        return replace(self, call=call, name=f"{self.name} ({name})")


@dataclass(frozen=True)
class _Variant:
    """An op with other options, compiled when it is first called; ``carried`` takes the other way to the
    gradients of gates, which calls take whose states would fill a GiB."""

    op: CompiledOp
    options: tuple[tuple[str, Any], ...]
    carried: bool = False

    def __call__(self, **arguments: Any) -> Any:
        return _compiled(self.op, self.options, self.carried)(**arguments)


@lru_cache(maxsize=64)
def _compiled(op: CompiledOp, options: tuple[tuple[str, Any], ...], carried: bool) -> CompiledOp:
    made = op.with_options(**dict(options))
    if not carried:
        return made
    passes = replace(made.passes, emit=_Carried(made.passes.emit))
    return CompiledOp(made.spec, made.options, passes, made.stages)


CARRIED = "boundary terms carried"
"""The variant whose boundary terms are formed at every 8th chunk, of few tokens, and carried between."""
_KEEPS = "keep_every_state"


@dataclass(frozen=True)
class _Carried:
    """An emitter whose modules keep no state but every 8th, however few there are."""

    emit: Call

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        text: str = self.emit(*args, **kwargs)
        if f"def {_KEEPS}(" not in text:
            return text
        return f"{text}\n\ndef {_KEEPS}(*sizes):\n    return False\n"


def _other_paths(op: CompiledOp) -> dict[str, Call]:
    """Ways of the kernels that small calls do not take by themselves."""
    if any(isinstance(s.artefacts().form, StepForm) for s in op.stage_ops):
        return {}
    found: dict[str, Call] = {}
    if any(f"def {_KEEPS}(" in s.module_text("triton") for s in op.stage_ops):
        found[CARRIED] = _Variant(op, (("chunk_size", KERNEL_CHUNKS[0]),), True)
    if op.options.schedule == "walk" and all(_has_two_levels(s.artefacts()) for s in op.stage_ops):
        found["two levels"] = _Variant(op, (("schedule", "two_level"), ("super_chunk", 1)))
    return found


def _has_two_levels(artefacts: Artefacts) -> bool:
    return not any(why_one_level(plan) for plan in (artefacts.forward, artefacts.backward))


@dataclass(frozen=True)
class _Renamed:
    """A function whose keywords have other names."""

    function: Call
    names: Mapping[str, str]

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**{self.names.get(n, n): x for n, x in arguments.items()})
