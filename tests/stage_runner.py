"""Runs the stages of a recurrence one after the other with the step loop: the meaning of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.ops.reference import _Step, const_values, dimension_sizes, reference
from linalg_dsl.planner.stages import PerToken, Shift, Stage, Stages, TokenStep

RunStage = Callable[..., tuple[Tensor, Any]]


def run_stages(
    stages: Stages,
    tensors: Mapping[str, Tensor],
    initial: Sequence[Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    consts: Mapping[str, float] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The output and everything that is carried on, as ``reference`` gives it for the whole."""
    spec = stages.spec
    values = dict(tensors)
    carried = dict(zip(spec.carried, initial, strict=True)) if initial is not None else {}
    finals: dict[str, Tensor] = {}
    timed = {i.name for i in spec.inputs if i.timed}
    heads = max(x.shape[2 if n in timed else 0] for n, x in tensors.items())
    sizes = dimension_sizes(spec, tensors, consts)
    numbers = const_values(spec, sizes, consts or {})
    for step in stages.steps:
        match step:
            case Shift():
                values[step.name], last = shifted(
                    values[step.of], carried.get(step.first), step, cu_seqlens, heads
                )
                if step.carries:
                    finals[step.first] = last
                timed.add(step.name)
            case PerToken():
                like = next(x for n, x in values.items() if n in timed)
                values[step.name] = values[step.of].expand(*like.shape[:2], *values[step.of].shape)
                timed.add(step.name)
            case TokenStep():
                values[step.name] = _tokens(step, values, timed, {**sizes, **numbers}, heads)
                if step.timed:
                    timed.add(step.name)
            case Stage():
                given = [carried[n] for n in step.states] if initial is not None else None
                inputs = zip(step.spec.inputs, step.arguments, strict=True)
                arguments = {d.name: values[a] for d, a in inputs}
                first = next(d.name for d in step.spec.inputs if d.timed)
                arguments[first] = _spread(arguments[first], heads, 2)
                own = {c.name for c in step.spec.consts}
                o, last_states = reference(
                    step.spec,
                    arguments,
                    initial_state=given,
                    output_final_state=True,
                    cu_seqlens=cu_seqlens,
                    consts={n: v for n, v in (consts or {}).items() if n in own},
                )
                values |= dict(zip(step.results, o if isinstance(o, tuple) else (o,), strict=True))
                timed |= set(step.results)
                listed = [last_states] if isinstance(last_states, Tensor) else list(last_states)
                if step.keeps:
                    finals |= dict(zip(step.states, listed, strict=True))
    return values[stages.output], [finals[n] for n in spec.carried]


def _spread(x: Tensor, heads: int, axis: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[axis], dim=axis)


def shifted(
    x: Tensor, first: Tensor | None, step: Shift, cu_seqlens: Tensor | None, heads: int
) -> tuple[Tensor, Tensor]:
    """Every token's predecessor, and the last token of every sequence."""
    x = _spread(x, heads, 2)
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    count = x.shape[0] if cu_seqlens is None else len(bounds) - 1
    start = torch.full((count, *x.shape[2:]), step.start, dtype=x.dtype) if first is None else first
    pieces, last = [], []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        own = start if cu_seqlens is None else start[n : n + 1]
        piece = torch.cat([own[:, None], x[:, begin:end]], dim=1)
        pieces.append(piece[:, :-1])
        last.append(piece[:, -1])
    return torch.cat(pieces, 1), torch.cat(last)


def _tokens(
    step: TokenStep,
    values: Mapping[str, Tensor],
    timed: set[str],
    numbers: Mapping[str, float],
    heads: int,
) -> Tensor:
    now = {n: torch.tensor(float(v), dtype=torch.float64) for n, v in numbers.items()}
    for name, x in values.items():
        wide = _spread(x, heads, 2 if name in timed else 0)
        for _ in range(2 - (wide.dim() - (3 if name in timed else 1))):
            wide = wide.unsqueeze(-1)
        now[name] = wide
    value = _Step(now, {}, {n: int(v) for n, v in numbers.items()}).evaluate(step.value)
    for _ in range(2 - len(step.dims)):
        value = value.squeeze(-1)
    length = next(x for n, x in values.items() if n in timed)
    lead = (*length.shape[:2], heads) if step.timed else (heads,)
    return value.expand(*lead, *value.shape[value.dim() - len(step.dims) :]) if not step.timed else value
