"""The states of a call: handed in and out as one tensor, or as a named tuple of several."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.codegen.emit.standalone import state_fields
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec, State

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@cache
def state_type(spec: RecurrenceSpec) -> Any:
    """The named tuple of a spec with several states: its fields are their names, in ASCII."""
    return namedtuple("State", state_fields(spec))


def pack_states(spec: RecurrenceSpec, states: Sequence[Tensor]) -> Any:
    """What a caller sees of the final states: a tensor, or a named tuple where there are several."""
    return states[0] if len(spec.states) == 1 else state_type(spec)(*states)


def state_labels(spec: RecurrenceSpec, label: str) -> tuple[str, ...]:
    """What a report calls the states: the label, with the state's name where there are several."""
    return (label,) if len(spec.states) == 1 else tuple(f"{label} {s.name}" for s in spec.states)


def unpack_states(spec: RecurrenceSpec, given: Any) -> tuple[Tensor | None, ...]:
    """One tensor or None per state from ``initial_state``: a tensor, a sequence or a mapping by name.

    Raises ``ArgumentError`` that says what was expected and what came. Shapes: ``check_state``.
    """
    names = [s.name for s in spec.states]
    if given is None:
        return (None,) * len(names)
    where = f"{spec.name}: initial_state"
    if isinstance(given, Mapping):
        if unknown := [str(n) for n in given if n not in names]:
            raise ArgumentError(f"{where} has {unknown[0]!r}, which is no state; they are {', '.join(names)}")
        found = [given.get(n) for n in names]
    elif isinstance(given, Tensor) or not isinstance(given, Sequence):
        if len(names) > 1:
            raise ArgumentError(
                f"{where} must hold one tensor per state ({', '.join(names)}), got a {type(given).__name__}"
            )
        found = [given]
    else:
        fields = getattr(given, "_fields", None)
        if fields is not None and tuple(fields) != state_fields(spec):
            raise ArgumentError(
                f"{where} has the fields {', '.join(fields)}, expected {', '.join(state_fields(spec))}"
            )
        if len(given) != len(names):
            raise ArgumentError(
                f"{where} must hold one tensor per state ({', '.join(names)}), got {len(given)}"
            )
        found = list(given)
    for name, x in zip(names, found, strict=True):
        if x is not None and (not isinstance(x, Tensor) or x.dtype not in FLOATING):
            own = where if len(names) == 1 else f"{where}: {name}"
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(f"{own} must be a floating-point tensor, got {kind}")
    return tuple(found)


def check_states(
    spec: RecurrenceSpec, states: Sequence[Tensor | None], sizes: Mapping[str, int], like: Tensor
) -> None:
    """Shapes [N, H, *dims] and devices; axes of which nothing says how large they are may have any size."""
    for decl, state in zip(spec.states, states, strict=True):
        if state is None:
            continue
        where = f"{spec.name}: initial_state"
        if len(spec.states) > 1:
            where += f": {decl.name}"
        expected = (sizes["N"], sizes["H"], *(_size(d, sizes) for d in decl.dims))
        if tuple(state.shape) != expected:
            raise ArgumentError(
                f"{where} must be [{', '.join(['N', 'H', *map(str, decl.dims)])}] = {expected}, "
                f"got shape {tuple(state.shape)}"
            )
        if state.device != like.device:
            raise ArgumentError(f"{where} is on {state.device}, expected {like.device} like the inputs")


def started(
    spec: RecurrenceSpec, states: Sequence[Tensor | None], sizes: Mapping[str, int], like: Tensor
) -> tuple[Tensor | None, ...]:
    """The states not given, filled with their declared start: a module takes None for zero."""
    return tuple(
        start_state(decl, sizes, like) if x is None and decl.start != 0 else x
        for decl, x in zip(spec.states, states, strict=True)
    )


def start_state(decl: State, sizes: Mapping[str, int], like: Tensor) -> Tensor:
    """A state [N, H, *dims] before the first token, in float32 (float64 for float64 inputs)."""
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    shape = (sizes["N"], sizes["H"], *(_size(d, sizes) for d in decl.dims))
    return like.new_full(shape, decl.start, dtype=kind)


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else sizes.get(dim, -1)
