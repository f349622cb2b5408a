"""What a spec promises by its form alone: which inputs it is linear in, and how it scales with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product

from linalg_dsl.algebra.expr import (
    Call,
    Diag,
    Expr,
    Hadamard,
    Identity,
    Iterate,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Symbol,
    Transpose,
)
from linalg_dsl.language.spec import Input, RecurrenceSpec

Degree = Fraction | None
"""Of what: None where the expression is not homogeneous."""
ZERO, ONE = Fraction(0), Fraction(1)
WEIGHTS = (ZERO, ONE, Fraction(2), Fraction(-1))
"""What is tried as the degree of a state in an input."""
MOST = 7
"""Inputs beyond which subsets are no longer listed."""


class _Inhomogeneous(Exception):
    pass


def degree(expr: Expr, weights: Mapping[str, Fraction], linear: bool) -> Degree:
    """The degree in which the expression scales where each name scales with its weight.

    ``linear`` admits only what is linear in the names of weight 1: no quotient by them, no function of them.
    """
    try:
        return _degree(expr, weights, linear)
    except _Inhomogeneous:
        return None


def _degree(expr: Expr, weights: Mapping[str, Fraction], linear: bool) -> Fraction:
    def of(e: Expr) -> Fraction:
        return _degree(e, weights, linear)

    match expr:
        case Number() | Identity():
            return ZERO
        case Symbol(name=name):
            return weights.get(name, ZERO)
        case Sum(terms):
            return _same([of(t) for t in terms])
        case Product(factors) | Hadamard(factors):
            return sum((of(f) for f in factors), ZERO)
        case Quotient(numerator, denominator):
            below = of(denominator)
            if linear and below:
                raise _Inhomogeneous
            return of(numerator) - below
        case Power(base, exponent):
            found = of(base)
            if not found:
                return _same([of(exponent), ZERO])
            if linear or not isinstance(exponent, Number):
                raise _Inhomogeneous
            return found * exponent.value
        case Transpose(arg) | Diag(arg):
            return of(arg)
        case Call(function, args):
            return _call(function, [of(a) for a in args], linear)
        case Iterate(name, _, _, start, body):
            inner = {**weights, name: of(start)}
            return _same([of(start), _degree(body, inner, linear)])
        case _:
            raise _Inhomogeneous


def _call(function: str, args: Sequence[Fraction], linear: bool) -> Fraction:
    if function == "dot":
        return sum(args, ZERO)
    if function == "sum":
        return args[0]
    if not any(args):
        return ZERO
    if linear:
        raise _Inhomogeneous
    match function:
        case "abs" | "relu":
            return args[0]
        case "min" | "max" | "clamp":
            return _same(args)
        case "sqrt":
            return args[0] / 2
        case "rsqrt":
            return -args[0] / 2
        case _:
            raise _Inhomogeneous


def _same(degrees: Sequence[Fraction]) -> Fraction:
    if len(set(degrees)) != 1:
        raise _Inhomogeneous
    return degrees[0]


@dataclass(frozen=True)
class Scaling:
    """Scaling each named input by c^weight scales the states by c^weight and the output by c^output."""

    inputs: tuple[tuple[str, Fraction], ...]
    states: tuple[tuple[str, Fraction], ...]
    output: Fraction

    def __str__(self) -> str:
        scaled = ", ".join(f"c^{w} {n}" for n, w in (*self.inputs, *self.states) if w)
        return f"{scaled} give c^{self.output} times the output"


@lru_cache(maxsize=256)
def linear_in(spec: RecurrenceSpec) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(inputs, states) in which the output is jointly linear, with as many inputs as there can be.

    The states are linear in those inputs and in their own past. None where there are no such inputs.
    """
    candidates = [d.name for d in spec.inputs if d.kind == "plain" and _is_free(d)][:MOST]
    states = [s.name for s in spec.states]
    # most states first, then as many inputs as there can be
    for kept in _subsets(states):
        for some in _subsets(candidates):
            if some and _closed(spec, dict.fromkeys((*some, *kept), ONE), kept, linear=True) == ONE:
                return some, kept
    return None


@lru_cache(maxsize=256)
def scalings(spec: RecurrenceSpec) -> tuple[Scaling, ...]:
    """How the recurrence scales with each of its inputs alone, where it does."""
    found = []
    states = [s.name for s in spec.states]
    for decl in spec.inputs:
        if decl.kind != "plain" or not _shrinks(decl):
            continue
        for powers in product(WEIGHTS if len(states) <= 3 else WEIGHTS[:2], repeat=len(states)):
            weights = dict(zip(states, powers, strict=True)) | {decl.name: ONE}
            total = _closed(spec, weights, tuple(states), linear=False)
            if total is not None and all(
                not w or s.start == 0 for s, w in zip(spec.states, powers, strict=True)
            ):
                found.append(Scaling(((decl.name, ONE),), tuple(zip(states, powers, strict=True)), total))
                break
    return tuple(found)


def _closed(
    spec: RecurrenceSpec, weights: Mapping[str, Fraction], kept: Sequence[str], linear: bool
) -> Degree:
    """The degree of the output where every state keeps its weight from token to token."""
    for equation, state in zip(spec.updates, spec.states, strict=True):
        if linear and state.name in kept and state.start != 0:
            return None
        if degree(equation.value, weights, linear) != weights.get(state.name, ZERO):
            return None
    return degree(spec.outputs[0].value, weights, linear)


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """From all to none."""
    for count in range(len(names), -1, -1):
        yield from combinations(names, count)


def _is_free(decl: Input) -> bool:
    """Whether sums of two draws keep the promises."""
    return not decl.unit and decl.range.low is None and decl.range.high is None


def _shrinks(decl: Input) -> bool:
    """Whether a number and a fourth of it keep the promises alike."""
    low, high = decl.range.low, decl.range.high
    return (low is None or low <= 0) and (high is None or high >= 0)
