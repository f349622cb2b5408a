"""States after given tokens, for prefix caching: a call cut there, its parts run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import bind
from linalg_dsl.ops.carried import carried_dims, start_states
from linalg_dsl.ops.layout import turn_all

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp


def call_at_positions(
    op: CompiledOp,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    initial_state: Any,
    positions: Sequence[Any],
    want: bool,
    offsets: Mapping[str, Any],
) -> Any:
    """(o, final states if ``want``, states at the positions), the last with an axis of positions in front.

    ``positions``: after how many tokens, the same for every sequence of a dense batch, [M, B, H, ...]; for
    packed sequences a list for each of them, and all positions in their order, [M, H, ...].
    """
    spec, layout = op.spec, op.options.state_layout
    if op.options.reverse:
        raise ArgumentError(f"{spec.name}: state_positions count from the first token, and reverse=True")
    cu_seqlens = offsets["cu_seqlens"]
    call = bind(spec, args, kwargs, initial_state, cu_seqlens, layout)
    begun = start_states(spec, call.sizes, call.tensors[0])
    initials = [s if x is None else x for x, s in zip(call.initials, begun, strict=True)]
    tensors = {d.name: x for d, x in zip(spec.inputs, call.tensors, strict=True)}
    dims = carried_dims(spec)

    def run(
        part: Mapping[str, Tensor], states: Sequence[Tensor], **packed: Any
    ) -> tuple[Tensor, list[Tensor]]:
        given = turn_all(states, dims, layout)
        o, last = op(
            **part, **dict(call.consts), **packed, output_final_state=True,
            initial_state=given[0] if len(given) == 1 else given,
        )  # fmt: skip
        lasts = turn_all((last,) if isinstance(last, Tensor) else last, dims, layout)
        return o, [x for x in lasts if x is not None]

    o, last, at = _cut(run, spec, tensors, initials, positions, cu_seqlens, offsets["cu_seqlens_cpu"])
    found = [x for x in turn_all(at, dims, layout) if x is not None]
    lasts = [x for x in turn_all(last, dims, layout) if x is not None]
    packs = [x[0] if len(x) == 1 else op.state_type(*x) for x in (lasts, found)]
    return (o, *packs) if want else (o, packs[1])


def _cut(
    run: Callable[..., tuple[Tensor, list[Tensor]]],
    spec: RecurrenceSpec,
    tensors: Mapping[str, Tensor],
    initial: Sequence[Tensor],
    positions: Sequence[Any],
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    first = next(tensors[d.name] for d in spec.inputs if d.timed)
    packed = cu_seqlens is not None
    if not packed:
        lengths = [first.shape[1]]
        lists = [[_whole(spec, p) for p in positions]]
    else:
        if cu_seqlens_cpu is None:
            raise ArgumentError(f"{spec.name}: state_positions of packed sequences need cu_seqlens_cpu")
        offsets = cu_seqlens_cpu.tolist()
        lengths = [b - a for a, b in pairwise(offsets)]
        if len(positions) != len(lengths) or any(isinstance(p, int) for p in positions):
            raise ArgumentError(
                f"{spec.name}: state_positions of {len(lengths)} packed sequences must be a list for each, "
                f"got {len(positions)} entries"
            )
        lists = [[_whole(spec, p) for p in own] for own in positions]
    for own, length in zip(lists, lengths, strict=True):
        if bad := [p for p in own if not 0 <= p <= length]:
            raise ArgumentError(f"{spec.name}: state_positions has {bad[0]} in a sequence of {length} tokens")
    cuts = [sorted({0, length, *own}) for own, length in zip(lists, lengths, strict=True)]
    rounds = max((len(c) for c in cuts), default=1) - 1
    now = list(initial)
    before: list[dict[int, list[Tensor]]] = [{0: now} for _ in cuts]
    outputs: list[Tensor] = []
    order: list[int] = []
    for r in range(max(rounds, 1)):
        spans = [(c[r], c[r + 1]) if r + 1 < len(c) else (c[-1], c[-1]) for c in cuts]
        options: dict[str, Any] = {}
        if packed:
            begins = [o + a for o, (a, _) in zip(offsets, spans, strict=False)]
            index = [t for b, (a, e) in zip(begins, spans, strict=True) for t in range(b, b + e - a)]
            order += index
            taken = _on(first, index)
            ends = [0]
            for a, e in spans:
                ends.append(ends[-1] + e - a)
            options = {"cu_seqlens": _on(first, ends), "cu_seqlens_cpu": torch.tensor(ends)}
            part = {d.name: tensors[d.name].index_select(1, taken) if d.timed else tensors[d.name]
                    for d in spec.inputs}  # fmt: skip
        else:
            ((a, e),) = spans
            part = {d.name: tensors[d.name][:, a:e] if d.timed else tensors[d.name] for d in spec.inputs}
        o, now = run(part, now, **options)
        outputs.append(o)
        for known, (_, e) in zip(before, spans, strict=True):
            known[e] = now
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    if packed and len(outputs) > 1:
        places = sorted(range(len(order)), key=order.__getitem__)
        o = o.index_select(1, _on(first, places))
    count = len(now)
    if packed:
        at = [[before[n][p][i][n] for n, own in enumerate(lists) for p in own] for i in range(count)]
    else:
        at = [[before[0][p][i] for p in lists[0]] for i in range(count)]
    return o, now, [_stacked(x, now[i], packed) for i, x in enumerate(at)]


def _whole(spec: RecurrenceSpec, p: Any) -> int:
    if isinstance(p, bool) or not isinstance(p, int):
        raise ArgumentError(
            f"{spec.name}: state_positions are whole numbers known on the host, got {type(p).__name__}"
        )
    return p


def _stacked(states: Sequence[Tensor], like: Tensor, packed: bool) -> Tensor:
    if not states:
        return like.new_empty((0, *(like.shape[1:] if packed else like.shape)))
    return torch.stack([x.to(like.dtype) for x in states])


def _on(like: Tensor, numbers: Sequence[int]) -> Tensor:
    """Numbers of the host on the device, without waiting for it."""
    x = torch.tensor(numbers, dtype=torch.int64)
    return x.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else x
