"""What a call carries: states and shifted inputs as handed in, checked; ``ops/states.py`` packs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec, State
from linalg_dsl.ops.layout import stored_dims
from linalg_dsl.ops.states import state_fields

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def state_labels(spec: RecurrenceSpec, label: str) -> tuple[str, ...]:
    """What a report calls the carried tensors: the label, with a name where there are several."""
    return (label,) if len(spec.carried) == 1 else tuple(f"{label} {name}" for name in spec.carried)


def carried_dims(spec: RecurrenceSpec) -> tuple[tuple[Dim, ...], ...]:
    """The axes of every carried tensor, in the order of ``spec.carried``."""
    return (*(s.dims for s in spec.states), *(i.dims for i in spec.shifted))


def starts(spec: RecurrenceSpec) -> tuple[float, ...]:
    """What every carried tensor holds before the first token."""
    return (*(s.start for s in spec.states), *(0.0 for _ in spec.shifted))


def given_states(
    spec: RecurrenceSpec, given: Any, argument: str = "initial_state"
) -> tuple[Tensor | None, ...]:
    """One tensor or None per carried tensor from ``argument``: a tensor, a sequence, a mapping by name.

    Raises ``ArgumentError`` that says what was expected and what came. Shapes: ``check_states``.
    """
    names = spec.carried
    if given is None:
        return (None,) * len(names)
    where = f"{spec.name}: {argument}"
    if isinstance(given, Mapping):
        if unknown := [str(n) for n in given if n not in names]:
            raise ArgumentError(f"{where} has {unknown[0]!r}, which is no state; they are {', '.join(names)}")
        found = [given.get(n) for n in names]
    elif isinstance(given, Tensor) or not isinstance(given, Sequence):
        if len(names) > 1:
            raise ArgumentError(
                f"{where} must hold one tensor each of {', '.join(names)}, got a {type(given).__name__}"
            )
        found = [given]
    else:
        fields = getattr(given, "_fields", None)
        expected = state_fields(spec)
        if fields is not None and tuple(fields) != expected:
            raise ArgumentError(f"{where} has the fields {', '.join(fields)}, expected {', '.join(expected)}")
        if len(given) != len(names):
            raise ArgumentError(f"{where} must hold one tensor each of {', '.join(names)}, got {len(given)}")
        found = list(given)
    for name, x in zip(names, found, strict=True):
        if x is None:
            continue
        own = where if len(names) == 1 else f"{where}: {name}"
        if not isinstance(x, Tensor) or x.dtype not in FLOATING:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(f"{own} must be a floating-point tensor, got {kind}")
        if x.layout != torch.strided:
            raise ArgumentError(f"{own} must be a dense tensor, got layout {x.layout}")
    return tuple(found)


def check_states(
    spec: RecurrenceSpec,
    states: Sequence[Tensor | None],
    sizes: Mapping[str, int],
    like: Tensor,
    argument: str = "initial_state",
    layout: str | None = None,
) -> None:
    """Shapes [N, H, *dims], the axes as ``layout`` has them, and devices of carried tensors handed in."""
    for name, declared, state in zip(spec.carried, carried_dims(spec), states, strict=True):
        if state is None:
            continue
        dims = stored_dims(declared, layout)
        where = f"{spec.name}: {argument}"
        if len(spec.carried) > 1:
            where += f": {name}"
        expected = (sizes["N"], sizes["H"], *(_size(d, sizes) for d in dims))
        if tuple(state.shape) != expected:
            raise ArgumentError(
                f"{where} must be [{', '.join(['N', 'H', *map(str, dims)])}] = {expected}, "
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
    return _filled(decl.dims, decl.start, sizes, like)


def start_states(
    spec: RecurrenceSpec, sizes: Mapping[str, int], like: Tensor, layout: str | None = None
) -> list[Tensor]:
    """All that is carried before the first token, the axes as ``layout`` has them."""
    pairs = zip(carried_dims(spec), starts(spec), strict=True)
    return [_filled(stored_dims(dims, layout), start, sizes, like) for dims, start in pairs]


def all_started(
    spec: RecurrenceSpec, given: Sequence[Tensor | None], sizes: Mapping[str, int], like: Tensor
) -> list[Tensor] | None:
    """Everything that is carried, what is not given at its start; None where nothing is given."""
    if all(x is None for x in given):
        return None
    parts = zip(carried_dims(spec), starts(spec), given, strict=True)
    return [_filled(dims, start, sizes, like) if x is None else x for dims, start, x in parts]


def _filled(dims: tuple[Dim, ...], value: float, sizes: Mapping[str, int], like: Tensor) -> Tensor:
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    return like.new_full((sizes["N"], sizes["H"], *(_size(d, sizes) for d in dims)), value, dtype=kind)


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else sizes.get(dim, -1)
