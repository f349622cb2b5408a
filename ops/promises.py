"""Declared promises (ranges, unit vectors) looked up in the data: what debug=True does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import Input, Interval, RecurrenceSpec

UNIT_SLACK = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""How far above 1 the norm of a unit vector may come by rounding its elements."""


def check_promises(spec: RecurrenceSpec, tensors: Sequence[Tensor]) -> None:
    """Raises ``ArgumentError`` for the first input that breaks its declaration, with its worst value.

    Reads the data, so it waits for the device.
    """
    for decl, x in zip(spec.inputs, tensors, strict=True):
        if x.numel() == 0:
            continue
        values = x.detach().double()
        if bool(values.isnan().any()):
            raise ArgumentError(f"{spec.name}: {decl.name} has NaN at {_where(values.isnan())}")
        promise = promised_range(decl)
        if promise.high is not None:
            top = values.max().item()
            if top > promise.high or (promise.high_open and top == promise.high):
                _broken(spec, decl, promise, top, values == top)
        if promise.low is not None:
            least = values.min().item()
            if least < promise.low or (promise.low_open and least == promise.low):
                _broken(spec, decl, promise, least, values == least)
        if decl.unit:
            norms = values.norm(dim=-1)
            worst = norms.max().item()
            if worst > 1 + UNIT_SLACK[x.dtype]:
                raise ArgumentError(
                    f"{spec.name}: {decl.name} promises unit vectors (norm at most 1), "
                    f"got norm {worst:.6g} at {_where(norms == worst)}"
                )


def promised_range(decl: Input) -> Interval:
    """The declared range; without one a log gate is at most 0 and a gate in (0, 1]."""
    if decl.range.low is not None or decl.range.high is not None:
        return decl.range
    match decl.kind:
        case "log_gate":
            return Interval(None, 0.0, True, False)
        case "gate":
            return Interval(0.0, 1.0, True, False)
        case _:
            return decl.range


def _broken(spec: RecurrenceSpec, decl: Input, promise: Interval, value: float, hits: Tensor) -> None:
    low = "-inf" if promise.low is None else f"{promise.low:g}"
    high = "inf" if promise.high is None else f"{promise.high:g}"
    left = "(" if promise.low_open or promise.low is None else "["
    right = ")" if promise.high_open or promise.high is None else "]"
    raise ArgumentError(
        f"{spec.name}: {decl.name} promises values in {left}{low}, {high}{right}, "
        f"got {value:.6g} at {_where(hits)}"
    )


def _where(hits: Tensor) -> tuple[int, ...]:
    return tuple(hits.nonzero()[0].tolist())
