"""Random inputs that keep the promises of a spec: for checks, tests and known-answer runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import Input, Interval, RecurrenceSpec
from linalg_dsl.ops.divisors import divisors
from linalg_dsl.ops.promises import promised_range
from linalg_dsl.ops.reference import const_values

GateKind = Literal["mild", "slow", "strong", "resets", "zero"]


def draw(
    spec: RecurrenceSpec,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    gates: GateKind = "mild",
    heads: Mapping[str, int] | None = None,
    consts: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """One tensor per input, [B, T, heads, *dims], and param, [heads, *dims], in declaration order.

    The numbers are drawn on the CPU in float64 from ``seed``, then rounded to ``dtype`` and moved, so
    that they do not depend on device or type. ``heads`` gives some names fewer heads than ``H``.

    Vectors [K] without a promise are normal numbers scaled to a length of about 1, square matrices to
    eigenvalues of at most about 1. Where products of vectors without a promise are divided by, their elements
    are positive, as those of features are (``divisors``).

    Gates, as decay per token in the log: ``mild`` log sigmoid of a normal (2, 1), over 4; ``slow`` about
    -0.002; ``strong`` a mixture of 0, -1e-7, -1, -10 and -60; ``resets`` mild, with one token in eight at
    -inf, -1e4 or -60 (in linear space at the lower end of the declared range); ``zero`` no decay. A gate
    whose range holds negative numbers has either sign; where it holds 0, ``resets`` are exactly 0.
    """
    if gates not in get_args(GateKind):
        raise ArgumentError(f"gates is one of {', '.join(get_args(GateKind))}, got {gates!r}")
    few = dict(heads or {})
    if unknown := set(few) - {i.name for i in spec.inputs}:
        raise ArgumentError(f"{spec.name} has no input {min(unknown)!r}")
    sizes: dict[str, float] = {"K": K, "V": V}
    sizes |= const_values(spec, {"K": K, "V": V}, consts or {})
    generator = torch.Generator().manual_seed(seed)
    positive = _positive_inputs(spec)
    result = {}
    for decl in spec.inputs:
        count = few.get(decl.name, H)
        lead = (B, T, count) if decl.timed else (count,)
        shape = (*lead, *(_size(spec, sizes, d) for d in decl.dims))
        value = _draw_one(decl, shape, gates, generator)
        if decl.name in positive:
            value = value.abs()
        result[decl.name] = value.to(device=device, dtype=dtype)
    return result


def draw_state(
    spec: RecurrenceSpec,
    N: int,
    H: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """What is carried into a sequence, [N, H, *dims] each, in the order of ``spec.carried``.

    States are normal numbers, those that are divided by positive; shifted inputs are as ``draw`` has them.
    """
    generator = torch.Generator().manual_seed(seed + 7919)
    sizes: dict[str, float] = {"K": K, "V": V}
    sizes |= const_values(spec, {"K": K, "V": V}, {})

    def shape(dims: tuple[Dim, ...]) -> tuple[int, ...]:
        return (N, H, *(_size(spec, sizes, d) for d in dims))

    drawn = [torch.randn(shape(s.dims), generator=generator, dtype=torch.float64) for s in spec.states]
    drawn += [_draw_one(i, shape(i.dims), "mild", generator) for i in spec.shifted]
    positive = divisors(spec).states | _positive_inputs(spec)
    named = zip(spec.carried, drawn, strict=True)
    return tuple((x.abs() if n in positive else x).to(device=device, dtype=dtype) for n, x in named)


def _positive_inputs(spec: RecurrenceSpec) -> frozenset[str]:
    free = {d.name for d in spec.inputs if d.range == Interval()}
    return divisors(spec).inputs & free


def _draw_one(decl: Input, shape: tuple[int, ...], gates: GateKind, generator: torch.Generator) -> Tensor:
    match decl.kind:
        case "log_gate":
            value = _log_decay(shape, gates, generator)
            if gates == "mild" and (decl.range.high or 0) > 0:  # some tokens grow, the state does not explode
                value = value + 0.1 * torch.rand(shape, generator=generator, dtype=torch.float64)
            return _into(value, decl.range, default_high=0.0)
        case "gate":
            return _linear_gate(decl, shape, gates, generator)
    value = _in_range(decl.range, shape, generator)
    if decl.unit:
        # a hair below 1, so that rounding to a short type keeps the promise nearly always
        value = value / value.norm(dim=-1, keepdim=True).clamp_min(1e-30) * (1 - 1e-7)
    elif decl.range == Interval() and (_is_square(decl) or (decl.timed and decl.dims[-1:] == ("K",))):
        # keys of length about 1, as models have them: an erase along longer ones makes the state explode
        value = value * value.shape[-1] ** -0.5
    return value


def _log_decay(shape: tuple[int, ...], gates: GateKind, generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    mild = torch.nn.functional.logsigmoid(normal + 2) / 4
    match gates:
        case "mild":
            return mild
        case "slow":
            return -0.002 * torch.exp(0.3 * normal)
        case "zero":
            return torch.zeros(shape, dtype=torch.float64)
        case "strong":
            return _pick((0.0, -1e-7, -1.0, -10.0, -60.0), shape, generator)
        case "resets":
            hard = _pick((-torch.inf, -1e4, -60.0), shape, generator)
            return torch.where(torch.rand(shape, generator=generator) < 1 / 8, hard, mild)


def _linear_gate(decl: Input, shape: tuple[int, ...], gates: GateKind, generator: torch.Generator) -> Tensor:
    promise = promised_range(decl)
    low = -1.0 if promise.low is None else promise.low
    high = max(1.0, low + 1.0) if promise.high is None else promise.high
    decay = torch.exp(_log_decay(shape, gates, generator))
    if low < 0 < high:  # a signed gate: the magnitude decays, the sign is free
        sign = _pick((-1.0, 1.0), shape, generator)
        return _into(torch.where(sign < 0, low, high) * decay, promise)
    # the smallest is not 0 unless 0 is promised: the logarithm has no gradient there
    end, is_open = (low, promise.low_open) if low >= 0 else (high, promise.high_open)
    decay = decay.clamp_min(1e-26 if end != 0 or is_open else 0.0)
    return _into(low + (high - low) * decay if low >= 0 else high + (low - high) * decay, promise)


def _is_square(decl: Input) -> bool:
    return len(decl.dims) == 2 and decl.dims[0] == decl.dims[1]


def _in_range(promise: Interval, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    low, high = promise.low, promise.high
    if low is None and high is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if low is not None and high is not None:
        # a margin keeps open ends open after rounding
        inner = 0.01 + 0.98 * torch.rand(shape, generator=generator, dtype=torch.float64)
        return low + (high - low) * inner
    away = 0.05 + torch.randn(shape, generator=generator, dtype=torch.float64).abs()
    if low is not None:
        return low + away
    if high is not None:
        return high - away
    return away


def _into(value: Tensor, promise: Interval, default_high: float | None = None) -> Tensor:
    """Values moved into a promised range, off its open ends by a hair."""
    low = promise.low
    high = default_high if promise.high is None else promise.high
    if low is not None:
        value = value.clamp_min(low + (1e-3 * max(abs(low), 1e-3) if promise.low_open and low != 0 else 0.0))
    if high is not None:
        value = value.clamp_max(high - (1e-2 * abs(high) if promise.high_open and high != 0 else 0.0))
    return value


def _pick(values: tuple[float, ...], shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    table = torch.tensor(values, dtype=torch.float64)
    return table[torch.randint(len(values), shape, generator=generator)]


def _size(spec: RecurrenceSpec, sizes: Mapping[str, float], dim: Dim) -> int:
    if isinstance(dim, int):
        return dim
    if dim not in sizes:
        raise ArgumentError(f"{spec.name}: nothing says how large {dim} is")
    return int(sizes[dim])
