"""Calls on distributed tensors, sharded over batch and heads: every rank runs its own part.

A recurrence has no product between sequences or heads, so nothing is exchanged: local tensors go through
the op as any others do, and autograd through them. What a dimension of the mesh does is read off the
inputs: it splits the batch, the heads, or nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BATCH, HEADS = "batch", "heads"


def is_sharded(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one of them is a DTensor; nothing is imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


@dataclass(frozen=True)
class _Argument:
    """A tensor of the call: its axis of the batch (None: it has none) and of the heads."""

    name: str
    value: DTensor
    batch: int | None
    heads: int


def run_sharded(
    spec: RecurrenceSpec,
    tensors: Sequence[Tensor],
    initials: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    run: Callable[[list[Tensor], list[Tensor | None], Tensor | None], tuple[Tensor, Sequence[Tensor | None]]],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Output and final states as DTensors; ``run`` is the op on tensors of this rank.

    Timed inputs are sharded over axis 0 (batch) or 2 (heads) or replicated, states over 0 or 1, params over
    their heads. Raises ``ArgumentError`` for an argument with another placement or on another mesh, for
    heads that do not divide evenly, and for a packed batch that is sharded over its one row.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    arguments = [
        _Argument(d.name, _distributed(spec, d.name, x), 0 if d.timed else None, 2 if d.timed else 0)
        for d, x in zip(spec.inputs, tensors, strict=True)
    ]
    states = [
        None if x is None else _Argument(f"initial_state {n}", _distributed(spec, n, x), 0, 1)
        for n, x in zip(spec.carried, initials, strict=True)
    ]
    every = [*arguments, *(s for s in states if s is not None)]
    mesh = arguments[0].value.device_mesh
    for argument in every:
        if argument.value.device_mesh != mesh:
            raise ArgumentError(f"{spec.name}: {argument.name} is on another device mesh than the others")
    splits = [_split_of(spec, every, i) for i in range(mesh.ndim)]
    if cu_seqlens is not None and BATCH in splits:
        raise ArgumentError(f"{spec.name}: with cu_seqlens the batch is one row, which cannot be sharded")
    parts = 1
    for i, split in enumerate(splits):
        parts *= mesh.size(i) if split == HEADS else 1
    for argument in every:
        have = argument.value.shape[argument.heads]
        if have != 1 and have % parts:
            raise ArgumentError(
                f"{spec.name}: {argument.name} has {have} heads, which do not divide over {parts} shards"
            )
    heads = max(a.value.shape[a.heads] for a in arguments)
    if heads % parts:
        raise ArgumentError(f"{spec.name}: one head does not divide over {parts} shards")

    def local(argument: _Argument) -> Tensor:
        whole = argument.value.shape[argument.heads] == 1  # one head that all share
        placements: list[Any] = []
        gradients: list[Any] = []
        for split in splits:
            axis = None
            if split == BATCH:
                axis = argument.batch
            elif split == HEADS and not whole:
                axis = argument.heads
            placements.append(Replicate() if axis is None else Shard(axis))
            # every shard has its own share of the gradient of what they all see
            gradients.append(placements[-1] if axis is not None or split is None else Partial())
        x: Tensor = argument.value.redistribute(mesh, placements).to_local(grad_placements=gradients)
        return x

    offsets = cu_seqlens.to_local() if isinstance(cu_seqlens, DTensor) else cu_seqlens
    o, lasts = run([local(a) for a in arguments], [None if s is None else local(s) for s in states], offsets)
    timed = next(a.value for a, d in zip(arguments, spec.inputs, strict=True) if d.timed)
    count = timed.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1

    def whole(x: Tensor, heads_axis: int, lead: Mapping[int, int]) -> Tensor:
        shape = torch.Size(lead.get(i, n) for i, n in enumerate(x.shape))
        axes = {BATCH: 0, HEADS: heads_axis}
        placements = [Replicate() if s is None else Shard(axes[s]) for s in splits]
        stride = torch.empty(shape, device="meta").stride()
        made: Tensor = DTensor.from_local(
            x.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return made

    output = whole(o, 2, {0: timed.shape[0], 2: heads})
    return output, tuple(None if x is None else whole(x, 1, {0: count, 1: heads}) for x in lasts)


def _distributed(spec: RecurrenceSpec, name: str, x: Tensor) -> DTensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):
        raise ArgumentError(
            f"{spec.name}: {name} is a plain tensor, expected a DTensor like the others; "
            "distribute_tensor(x, mesh, ...) makes one"
        )
    return x


def _split_of(spec: RecurrenceSpec, arguments: Sequence[_Argument], dimension: int) -> str | None:
    """What a dimension of the mesh splits; all arguments that it splits must agree."""
    found: str | None = None
    by = ""
    for argument in arguments:
        placement = argument.value.placements[dimension]
        if placement.is_replicate():
            continue
        axis = getattr(placement, "dim", None) if placement.is_shard() else None
        split = {argument.batch: BATCH, argument.heads: HEADS}.get(axis) if axis is not None else None
        if split is None:
            raise ArgumentError(
                f"{spec.name}: {argument.name} has the placement {placement} on dimension {dimension} of the "
                "mesh; expected a shard over the batch or the heads, or a replica"
            )
        if found is not None and split != found:
            raise ArgumentError(
                f"{spec.name}: dimension {dimension} of the mesh splits the {found} of {by} and the {split} "
                f"of {argument.name}"
            )
        found, by = split, argument.name
    return found
