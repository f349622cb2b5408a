"""One draw: tensors that keep a spec's promises, ordinary or at their nasty ends, from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.carried import state_labels
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.reference import const_values, reference
from linalg_dsl.testing.extremes import Extremes, apply
from linalg_dsl.testing.subject import Subject
from linalg_dsl.testing.watch import CALLS, spent

COTANGENTS = ("all", "output", "final state", "last token")
"""Which results the loss looks at."""


@dataclass(frozen=True)
class Shape:
    """B, T, H, K, V; ``lengths`` packs sequences into a batch of one with T their sum."""

    B: int = 2
    T: int = 40
    H: int = 2
    K: int = 5
    V: int = 4
    lengths: tuple[int, ...] | None = None

    @property
    def N(self) -> int:
        """Number of sequences."""
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def offsets(self) -> list[int] | None:
        """``cu_seqlens`` of packed sequences."""
        if self.lengths is None:
            return None
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    def __str__(self) -> str:
        packed = "" if self.lengths is None else f" packed {list(self.lengths)}"
        return f"B {self.B} T {self.T} H {self.H} K {self.K} V {self.V}{packed}"


@dataclass(frozen=True)
class Case:
    """Inputs of one call, in the type under test: tensors by name, states by label, cotangents by result."""

    spec: RecurrenceSpec
    shape: Shape
    dtype: torch.dtype
    seed: int
    extremes: Extremes
    cotangents: str
    tensors: dict[str, Tensor]
    states: dict[str, Tensor]
    consts: Mapping[str, float]
    heads: Mapping[str, int]
    with_state: bool = True

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def labels(self) -> tuple[str, ...]:
        """What the results are called: ``o``, then the final states."""
        return ("o", *state_labels(self.spec, "final state"))

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The cotangent of every result, in its type."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        found = {}
        for name, shape in result_shapes(self).items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float64)
            if self.cotangents == "output" and name != "o":
                weight = weight * 0
            if self.cotangents == "final state" and name == "o":
                weight = weight * 0
            if self.cotangents == "last token":
                if name == "o" and self.shape.lengths is None:
                    weight[:, :-1] = 0
                elif name != "o":
                    weight = weight * 0
            found[name] = weight.to(self.dtype if name == "o" else self.state_dtype)
        return found

    def is_seen(self, label: str) -> bool:
        """Whether the loss looks at this result."""
        return self.cotangents == "all" or (label == "o") == (self.cotangents != "final state")

    def with_tensors(self, **changed: Tensor) -> Case:
        """The same case with other inputs."""
        return replace(self, tensors={**self.tensors, **changed})

    def __str__(self) -> str:
        few = "".join(f" {n}: {h} heads" for n, h in self.heads.items())
        state = "" if self.with_state else ", no initial state"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.shape}{few}, {kind}, {self.extremes}, loss on {self.cotangents}{state}"


def result_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """The shapes of output and final states."""
    sizes = axis_sizes(case.spec, case.shape, case.consts)
    dims = output_dims(case.spec)
    s = case.shape
    shapes: dict[str, tuple[int, ...]] = {"o": (s.B, s.T, s.H, *(sizes[d] for d in dims))}
    carried = [*(x.dims for x in case.spec.states), *(i.dims for i in case.spec.shifted)]
    for label, axes in zip(case.labels[1:], carried, strict=True):
        shapes[label] = (s.N, s.H, *(sizes[str(d)] if isinstance(d, str) else d for d in axes))
    return shapes


def output_dims(spec: RecurrenceSpec) -> tuple[str, ...]:
    """The axes of the output at one token and head, as strings (a number is its digits)."""
    rows, columns = spec.outputs[0].value.shape
    if rows == 1:
        return () if columns == 1 else (str(columns),)
    return (str(rows),) if columns == 1 else (str(rows), str(columns))


def axis_sizes(spec: RecurrenceSpec, shape: Shape, consts: Mapping[str, float]) -> dict[str, int]:
    """The size of every axis by name; of an axis that is a number, by its digits."""
    sizes: dict[str, float] = {"K": shape.K, "V": shape.V}
    sizes |= const_values(spec, {"K": shape.K, "V": shape.V}, consts)
    found = {n: int(x) for n, x in sizes.items() if x == int(x)}
    return found | {str(n): n for n in range(1, 65)}


def make_case(
    subject: Subject,
    shape: Shape,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    extremes: Extremes | None = None,
    cotangents: str = "all",
    heads: Mapping[str, int] | None = None,
    with_state: bool = True,
) -> Case:
    """A case for a subject. Numbers depend on ``seed``, the shape and ``extremes``, never on the device.

    States are normal numbers; where some state is a vector or a scalar (a normaliser, a running maximum),
    they are what a few other tokens make of the declared start.
    """
    spec = subject.spec
    kind = dtype or subject.dtypes[0]
    ends = extremes or Extremes()
    s = shape
    few = dict(heads or {})
    with torch.no_grad():
        tensors = draw(
            spec, s.B, s.T, s.H, s.K, s.V, seed=seed, gates=ends.drawn, heads=few, consts=subject.consts
        )
        tensors = apply(spec, tensors, ends, seed)
        if subject.suit is not None:
            tensors = dict(subject.suit(tensors))
        rounded = {n: x.to(kind) for n, x in tensors.items()}
        wide = torch.float64 if kind == torch.float64 else torch.float32
        states = [x.to(wide) for x in _states(subject, shape, seed)]
    with_state = with_state and subject.initial_state
    return Case(
        spec,
        shape,
        kind,
        seed,
        ends,
        cotangents if subject.final_state else "output",
        rounded,
        dict(zip(state_labels(spec, "initial_state"), states, strict=True)) if with_state else {},
        dict(subject.consts),
        few,
        with_state,
    )


def _states(subject: Subject, shape: Shape, seed: int) -> Sequence[Tensor]:
    spec, s = subject.spec, shape
    if all(len(x.dims) == 2 for x in spec.states) and not subject.consts:
        return draw_state(spec, s.N, s.H, s.K, s.V, seed=seed)
    tensors = draw(spec, max(s.N, 1), 5, s.H, s.K, s.V, seed=seed + 2, consts=subject.consts)
    if subject.suit is not None:
        tensors = dict(subject.suit(tensors))
    _, last = reference(spec, tensors, output_final_state=True, consts=subject.consts)
    found = [last] if isinstance(last, Tensor) else list(last)
    return [x[: s.N] for x in found]


def sequences(case: Case) -> list[tuple[int, int, int]]:
    """(row, begin, end) of every sequence."""
    offsets = case.shape.offsets
    if offsets is None:
        return [(b, 0, case.shape.T) for b in range(case.shape.B)]
    return [(0, begin, end) for begin, end in pairwise(offsets)]


def arguments(subject: Subject, case: Case, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keywords of a call with these leaves (inputs and states by name), on the subject's device."""
    names = [d.name for d in case.spec.inputs]
    keywords: dict[str, Any] = {n: leaves[n] for n in names}
    if case.states:
        states = tuple(leaves[n] for n in case.states)
        keywords["initial_state"] = states[0] if len(states) == 1 else states
    if subject.final_state:
        keywords["output_final_state"] = True
    if case.shape.lengths is not None:
        keywords["cu_seqlens"] = torch.tensor(case.shape.offsets, dtype=torch.int64, device=subject.device)
    return keywords | dict(case.consts)


def leaves_of(subject: Subject, case: Case, gradients: bool = True) -> dict[str, Tensor]:
    """Fresh copies of all tensors of the case on the subject's device."""
    named = {**case.tensors, **case.states}
    wanted = subject.wanted if gradients else ()
    return {n: x.detach().to(subject.device, copy=True).requires_grad_(n in wanted) for n, x in named.items()}


def outcome(subject: Subject, case: Case, returned: Any) -> dict[str, Tensor]:
    """What a call returned, by label."""
    if not subject.final_state:
        return {"o": returned[0] if isinstance(returned, tuple) else returned}
    o, last = returned
    states = [last] if isinstance(last, Tensor) else list(last)
    return dict(zip(case.labels, [o, *states], strict=True))


def run(
    subject: Subject,
    case: Case,
    call: Any = None,
    gradients: bool = True,
    cotangent: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Output, final states and, as ``d NAME``, the gradients of one call, detached, on the CPU.

    A result that the loss does not look at has no cotangent. ``cotangent`` lays the others out in memory.
    """
    with spent(CALLS):
        return _run(subject, case, call, gradients, cotangent)


def _run(
    subject: Subject,
    case: Case,
    call: Any,
    gradients: bool,
    cotangent: Callable[[Tensor], Tensor] | None,
) -> dict[str, Tensor]:
    leaves = leaves_of(subject, case, gradients)
    returned = (call or subject.call)(**arguments(subject, case, leaves))
    found = outcome(subject, case, returned)
    results = {n: x.detach().cpu() for n, x in found.items()}
    wanted = [n for n in subject.wanted if n in leaves] if gradients else []
    if not wanted:
        return results
    used = [n for n in found if found[n].requires_grad and case.is_seen(n)]
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    if used:
        place = cotangent or (lambda weight: weight)
        grads = torch.autograd.grad(
            [found[n] for n in used],
            [leaves[n] for n in wanted],
            [place(case.weights[n].to(found[n])) for n in used],
            allow_unused=True,
        )
    for name, grad in zip(wanted, grads, strict=True):
        results[f"d {name}"] = torch.zeros_like(leaves[name]).cpu() if grad is None else grad.detach().cpu()
    return results
