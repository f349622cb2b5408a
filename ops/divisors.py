"""What a recurrence divides by: states that are sums of what is positive, and the inputs that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from linalg_dsl.algebra.expr import Call, Expr, Number, Power, Quotient, Sum, Symbol
from linalg_dsl.algebra.traverse import walk
from linalg_dsl.language.spec import RecurrenceSpec


@dataclass(frozen=True, slots=True)
class Divisors:
    """``states`` stand in a term of a denominator; ``inputs`` make such a term as they stand.

    A normaliser n_tᵀ q_t is far from 0 where features have positive products, which neither an arbitrary n
    nor arbitrary q and k have: near 0 the quotient has no digits in any type.
    """

    states: frozenset[str]
    inputs: frozenset[str]


@cache
def divisors(spec: RecurrenceSpec) -> Divisors:
    """Of all equations; of an input only what no function stands around.

    Squares do not count, nor what stands in a function (``max(abs(n_tᵀ q_t), 1)``).
    """
    own = {s.name for s in spec.states}
    plain = {d.name for d in spec.inputs if d.kind == "plain" and d.dims}
    states: set[str] = set()
    inputs: set[str] = set()
    for equation in (*spec.updates, *spec.outputs):
        for term in _denominator_terms(equation.value):
            names = [s.name for s in _as_they_stand(term)]
            once = {n for n in names if names.count(n) == 1}  # x twice is a square of it
            if once & own:
                states |= once & own
                inputs |= once & plain
    if inputs:
        for equation in spec.updates:
            if equation.target in states:
                inputs |= {s.name for s in _as_they_stand(equation.value)} & plain
    return Divisors(frozenset(states), frozenset(inputs))


def _denominator_terms(expr: Expr) -> Iterator[Expr]:
    for node in walk(expr):
        divisor: Expr | None = None
        if isinstance(node, Quotient):
            divisor = node.denominator
        elif isinstance(node, Power) and isinstance(node.exponent, Number) and node.exponent.value < 0:
            divisor = node.base
        if divisor is not None:
            yield from divisor.terms if isinstance(divisor, Sum) else (divisor,)


def _as_they_stand(expr: Expr) -> Iterator[Symbol]:
    """The symbols that no function and no other power stands around."""
    if isinstance(expr, Symbol):
        yield expr
    elif not isinstance(expr, Call | Power):
        for child in expr.children:
            yield from _as_they_stand(child)
