"""What is known of an expression while it is read: its algebra, the states in it, where they are joined.

States are followed by name, in pairs: wherever two of them (or one with itself) meet other than in a
sum, the place is marked. Which marks are mistakes depends on how the states feed each other, so they are
judged (``linearity.py``) when all updates are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from linalg_dsl.algebra.expr import Expr, Shape
from linalg_dsl.source import Span

Pair = tuple[str, str]
"""Two names of states in alphabetical order; one state with itself is a pair, too."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The first place where the states of a pair meet other than in a sum.

    ``how`` is a function's name, ``/`` (a state below the line), ``^``, or empty for a product.
    """

    term: Expr
    span: Span | None
    how: str


@dataclass(frozen=True, slots=True)
class Value:
    """An expression and what is known of it.

    ``unit``: a scalar that stands for a multiple of I of unknown size. ``states``: the states that it
    depends on, at t or t-1. ``joined``: where they meet. ``is_shifted``: it holds an input of the token
    before. ``depth`` and ``size`` count with all bindings substituted.
    """

    expr: Expr
    unit: bool = False
    states: frozenset[str] = frozenset()
    joined: Mapping[Pair, Joined] = field(default_factory=dict)
    is_shifted: bool = False
    depth: int = 1
    size: int = 1

    @property
    def shape(self) -> Shape:
        return self.expr.shape


def join(out: Expr, parts: Sequence[Value], unit: bool = False) -> Value:
    """An expression made of others, which adds no place where states meet."""
    joined: dict[Pair, Joined] = {}
    for part in parts:
        for pair, place in part.joined.items():
            joined.setdefault(pair, place)
    return Value(
        out,
        unit,
        frozenset().union(*(p.states for p in parts)),
        joined,
        any(p.is_shifted for p in parts),
        1 + max(p.depth for p in parts),
        1 + sum(p.size for p in parts),
    )


def meet(value: Value, left: Iterable[str], right: Iterable[str], span: Span | None, how: str = "") -> Value:
    """The value with a mark for every pair of a left and a right state."""
    pairs = {(min(a, b), max(a, b)) for a in left for b in right} - set(value.joined)
    if not pairs:
        return value
    place = Joined(value.expr, span, how)
    return replace(value, joined={**value.joined, **dict.fromkeys(sorted(pairs), place)})


def span_of(values: Sequence[Value]) -> Span | None:
    spans = [v.expr.span for v in values if v.expr.span]
    return spans[0].cover(spans[-1]) if spans else None
