"""States in a pool: rows that a call reads and writes by slot, without a look at the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import const_numbers
from linalg_dsl.ops.carried import carried_dims, given_states, start_states, starts

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp


def call_with_pool(
    op: CompiledOp,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    pool: Any,
    slots: Tensor,
    want: bool,
) -> Any:
    """A call from rows ``slots`` [N] of the pool, and if ``want`` back into them; then the pool is returned.

    A sequence with a negative slot starts as declared, and its final state goes nowhere.
    """
    spec = op.spec
    check_slots(spec, slots)
    given = given_states(spec, pool)
    found = [x for x in given if x is not None]
    if len(found) < len(given):
        raise ArgumentError(f"{spec.name}: slots are rows of a pool, so initial_state must hold all states")
    if bad := [x for x in found if x.dim() < 2 or x.device != slots.device or x.shape[0] < 1]:
        raise ArgumentError(
            f"{spec.name}: a pool must be [P, H, ...] on {slots.device}, where slots are, got shape "
            f"{tuple(bad[0].shape)} on {bad[0].device}"
        )
    leaves = [*args, *kwargs.values(), *found]
    if want and torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        raise ArgumentError(
            f"{spec.name}: a pool is written in place, which has no gradient; hand in the states themselves, "
            "or call under torch.no_grad()"
        )
    rows = read_rows(spec, found, slots)
    initial = rows[0] if len(rows) == 1 else rows
    results = op(*args, initial_state=initial, output_final_state=want, **kwargs)
    if not want:
        return results
    o, last, *rest = results
    write_rows(found, slots, [last] if isinstance(last, Tensor) else list(last))
    return (o, pool, *rest)


def new_state(
    op: CompiledOp,
    count: int,
    heads: int,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device | str | None,
    consts: Mapping[str, float],
) -> Any:
    """Everything that is carried, before the first token, for ``count`` sequences or rows of a pool."""
    spec = op.spec
    dims = {d for axes in carried_dims(spec) for d in axes if d in ("K", "V")}
    if missing := sorted(str(d) for d in dims if d not in sizes):
        raise ArgumentError(f"{spec.name}: new_state needs the size of {', '.join(missing)}")
    values = {**sizes, **const_numbers(spec, sizes, consts), "N": count, "H": heads}
    like = torch.empty(0, device=device)
    known = {name: int(value) for name, value in values.items()}
    states = [x.to(dtype) for x in start_states(spec, known, like, op.options.state_layout)]
    return states[0] if len(states) == 1 else op.state_type(*states)


def check_slots(spec: RecurrenceSpec, slots: Any) -> None:
    """Slots are int32 or int64, one for each sequence."""
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64) or slots.dim() != 1:
        kind = f"{slots.dtype} {tuple(slots.shape)}" if isinstance(slots, Tensor) else type(slots).__name__
        raise ArgumentError(f"{spec.name}: slots must be an int32 or int64 tensor [N], got {kind}")


def read_rows(spec: RecurrenceSpec, pool: Sequence[Tensor], slots: Tensor) -> list[Tensor]:
    """The rows of every carried tensor; those of negative slots are as before the first token."""
    rows = slots.clamp(min=0)
    found = []
    for x, start in zip(pool, starts(spec), strict=True):
        there = (slots >= 0).view(-1, *[1] * (x.dim() - 1))
        found.append(torch.where(there, x.index_select(0, rows), start))
    return found


def write_rows(pool: Sequence[Tensor], slots: Tensor, states: Sequence[Tensor]) -> None:
    """Puts states into their rows, rounded to the pool's types.

    A sequence with a negative slot writes what another one writes, to the same place, so that nothing has
    to be known about the slots here; if all are negative, a row is written with itself.
    """
    if slots.shape[0] == 0:
        return
    there = slots >= 0
    lanes = torch.arange(slots.shape[0], device=slots.device)
    lanes = torch.where(there, lanes, there.to(torch.uint8).argmax())
    rows = slots.index_select(0, lanes).clamp(min=0).long()
    with torch.no_grad():
        for x, state in zip(pool, states, strict=True):
            new = state.index_select(0, lanes).to(x.dtype)
            x.index_copy_(0, rows, torch.where(there.any(), new, x.index_select(0, rows)))
