"""The nasty ends of what a declaration allows: strong and absent gates, alike and absent keys, range ends.

Every change keeps the promises of the declaration: an end that a range leaves out is approached, not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from linalg_dsl.algebra.expr import Expr, Product
from linalg_dsl.algebra.traverse import symbols, walk
from linalg_dsl.language.spec import Input, Interval, RecurrenceSpec
from linalg_dsl.ops.draw import GateKind
from linalg_dsl.ops.promises import promised_range

GATES = (
    "mild", "zero", "tiny", "slow", "strong", "all strong", "very strong", "resets", "all resets",
    "alternating", "growth",
)  # fmt: skip
KEYS = ("normal", "identical", "nearly identical", "orthogonal", "zero", "large", "denormal")
SCALARS = ("inside", "low end", "high end", "ends", "one")
VALUES = ("normal", "large", "denormal", "mixed sizes")
_DRAWN: dict[str, GateKind] = {"slow": "slow", "strong": "strong", "resets": "resets", "zero": "zero"}
_LEVELS = {"tiny": -1e-7, "all strong": -60.0, "very strong": -1e4, "all resets": -torch.inf}
LARGE = 1e3
DENORMAL = 1e-40


@dataclass(frozen=True)
class Extremes:
    """Which end each kind of input is drawn at; the defaults are ordinary numbers.

    ``gates`` (all decays): 0, -1e-7, about -.002, a mixture up to -60, -60 throughout, -1e4, one token in
    eight at -inf, all at -inf, every other token at -inf, the most growth that is declared. ``keys`` (all
    vectors [K] and [n, K]): alike at all tokens, alike up to 1e-3, one axis per token, 0, a thousand times
    longer, denormal. ``scalars`` (those with a range): its ends. ``values`` (all [V]).
    """

    gates: str = "mild"
    keys: str = "normal"
    scalars: str = "inside"
    values: str = "normal"

    @property
    def drawn(self) -> GateKind:
        """What ``draw`` is asked for before the ends are applied."""
        return _DRAWN.get(self.gates, "mild")

    @property
    def ordinary(self) -> bool:
        return self == Extremes()

    def __str__(self) -> str:
        return f"gates {self.gates}, keys {self.keys}, scalars {self.scalars}, values {self.values}"


def applicable(spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """Which ends the spec's declarations leave any choice of."""
    decays = [d for d in spec.inputs if d.kind in ("log_gate", "gate")]
    plain = [d for d in spec.inputs if d.kind == "plain"]
    found: dict[str, tuple[str, ...]] = {}
    if decays:
        grows = any(d.kind == "log_gate" and (d.range.high or 0) > 0 for d in decays)
        found["gates"] = GATES if grows else GATES[:-1]
    if any(d.dims[-1:] == ("K",) and d.timed for d in plain):
        found["keys"] = KEYS
    if any(_ranged(d) for d in plain):
        found["scalars"] = SCALARS
    if any(d.dims[-1:] == ("V",) and d.timed for d in plain):
        found["values"] = VALUES
    return found


def apply(
    spec: RecurrenceSpec, tensors: Mapping[str, Tensor], extremes: Extremes, seed: int
) -> dict[str, Tensor]:
    """Ordinary draws moved to the chosen ends.

    What a past state is multiplied by is not made longer: the state would grow out of every type.
    """
    held = transition_inputs(spec)
    generator = torch.Generator().manual_seed(seed + 101)
    found = {}
    for decl in spec.inputs:
        x = tensors[decl.name]
        if decl.kind in ("log_gate", "gate"):
            x = _gate(decl, x, extremes.gates)
        elif _ranged(decl):
            x = _scalar(decl, x, extremes.scalars, generator)
        elif decl.name in held and (extremes.keys == "large" or extremes.values in ("large", "mixed sizes")):
            pass
        elif decl.timed and decl.dims[-1:] == ("K",):
            x = _key(decl, x, extremes.keys, generator)
        elif decl.timed and decl.dims[-1:] == ("V",):
            x = _value(x, extremes.values, generator)
        found[decl.name] = x
    return found


def transition_inputs(spec: RecurrenceSpec) -> frozenset[str]:
    """The inputs that stand in a factor of a past state: what is erased along, gates, strengths."""
    states = {s.name for s in spec.states}
    found: set[str] = set()

    def holds(expr: Expr) -> bool:
        return any(s.name in states for s in symbols(expr))

    for equation in spec.updates:
        for node in walk(equation.value):
            if isinstance(node, Product) and any(holds(f) for f in node.factors):
                found |= {s.name for f in node.factors if not holds(f) for s in symbols(f)}
    return frozenset(found & {d.name for d in spec.inputs})


def _ranged(decl: Input) -> bool:
    return decl.kind == "plain" and (decl.range.low is not None or decl.range.high is not None)


def _gate(decl: Input, x: Tensor, kind: str) -> Tensor:
    promise = promised_range(decl)
    if kind == "growth" and decl.kind == "log_gate":
        return x if (promise.high or 0) <= 0 else torch.full_like(x, min(promise.high or 0.0, 0.7) * 0.9)
    if kind in _LEVELS:
        level = torch.full_like(x, _LEVELS[kind])
    elif kind == "alternating" and decl.timed:
        level = torch.zeros_like(x)
        level[:, ::2] = -torch.inf
    else:
        return _within(x, promise) if decl.kind == "gate" else x
    if decl.kind == "gate":
        # 0 is a reset only where it is promised: the logarithm has no gradient there
        low = promise.low if promise.low is not None else -1.0
        floor = 0.0 if low < 0 or (low == 0 and not promise.low_open) else 1e-26
        level = torch.sign(x + (x == 0)) * torch.exp(level).clamp_min(floor)
    return _within(level, promise)


def _key(decl: Input, x: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    match kind:
        case "identical" if x.shape[1]:
            return x[:, :1].expand_as(x).clone()
        case "nearly identical" if x.shape[1]:
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            moved = x[:, :1] + 1e-3 * x.shape[-1] ** -0.5 * noise
            return _unit(moved) if decl.unit else moved
        case "orthogonal":
            axes = torch.arange(x.shape[1]) % x.shape[-1]
            one = torch.nn.functional.one_hot(axes, x.shape[-1]).to(x.dtype)
            lead = one.reshape(1, -1, *(1,) * (x.dim() - 3), x.shape[-1])
            return lead.expand_as(x).clone()
        case "zero":
            return torch.zeros_like(x)
        case "large":
            return _unit(x) if decl.unit else x * LARGE
        case "denormal":
            return x * DENORMAL
        case _:
            return x


def _unit(x: Tensor) -> Tensor:
    size: Tensor = x.norm(dim=-1, keepdim=True)
    return x / size.clamp_min(1e-30) * (1 - 1e-7)


def _value(x: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    match kind:
        case "large":
            return x * LARGE
        case "denormal":
            return x * DENORMAL
        case "mixed sizes":
            powers = torch.randint(-4, 5, x.shape[:-1], generator=generator)
            return x * 10.0 ** powers.to(x.dtype)[..., None]
        case _:
            return x


def _scalar(decl: Input, x: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    promise = decl.range
    low = x.min().item() if promise.low is None and x.numel() else promise.low or 0.0
    high = x.max().item() if promise.high is None and x.numel() else promise.high or 0.0
    ends: dict[str, Callable[[], Tensor]] = {
        "low end": lambda: torch.full_like(x, low),
        "high end": lambda: torch.full_like(x, high),
        "ends": lambda: torch.where(torch.rand(x.shape, generator=generator) < 0.5, low, high).to(x),
        "one": lambda: torch.full_like(x, 1.0),
    }
    return _within(ends[kind](), promise) if kind in ends else x


def _within(x: Tensor, promise: Interval) -> Tensor:
    """Into the range; open ends are kept off by a 256th, which the shortest type can tell apart."""
    width = 1.0
    if promise.low is not None and promise.high is not None:
        width = min(1.0, promise.high - promise.low)
    if promise.low is not None:
        low = promise.low + (width / 256 if promise.low_open and promise.low != 0 else 0.0)
        x = x.clamp_min(max(low, 1e-6) if promise.low == 0 and promise.low_open else low)
    if promise.high is not None:
        high = promise.high
        x = x.clamp_max(
            high - (width / 256 * max(1.0, abs(high)) if promise.high_open and high != 0 else 0.0)
        )
    return x
