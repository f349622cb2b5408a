"""Expressions in normal form as factors: a number, scalars, and vectors multiplied elementwise.

What the planner asks of them is here: sums in which equal terms are counted, factors common to all
terms, and what is left when some are struck out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from linalg_dsl.algebra.expr import ONE, Expr, Hadamard, Number, Product, Sum, add, hadamard, mul
from linalg_dsl.algebra.traverse import commutative_key


@dataclass(frozen=True, slots=True)
class Factors:
    """``coefficient * scalars * (v_1 ∘ v_2 ∘ …)``, all parts in normal form."""

    coefficient: Fraction = Fraction(1)
    scalars: tuple[Expr, ...] = ()
    vectors: tuple[Expr, ...] = ()

    def __mul__(self, other: Factors) -> Factors:
        return Factors(
            self.coefficient * other.coefficient,
            self.scalars + other.scalars,
            self.vectors + other.vectors,
        )

    @property
    def scalar(self) -> Expr:
        """The scalar part."""
        return mul((Number(self.coefficient), *self.scalars))

    @property
    def vector(self) -> Expr:
        """The vector part, a column."""
        return hadamard(self.vectors) if len(self.vectors) > 1 else self.vectors[0]

    @property
    def expr(self) -> Expr:
        return mul((self.scalar, self.vector)) if self.vectors else self.scalar


UNIT = Factors()
"""The empty product, 1."""


def total(exprs: Iterable[Expr]) -> Expr:
    """The sum, with opposite terms cancelled and equal ones (up to the order of factors) counted."""
    counts: dict[str, tuple[Fraction, Expr]] = {}
    for expr in exprs:
        for term in expr.terms if isinstance(expr, Sum) else (expr,):
            coefficient, rest = split_number(term)
            before, kept = counts.get(commutative_key(rest), (Fraction(0), rest))
            counts[commutative_key(rest)] = before + coefficient, kept
    return add(mul((Number(c), rest)) for c, rest in counts.values() if c != 0)


def split_number(expr: Expr) -> tuple[Fraction, Expr]:
    """The number in front of a term, and the term without it."""
    match expr:
        case Number(value):
            return value, ONE
        case Product((Number(value), *rest)):
            return value, mul(rest)
        case _:
            return Fraction(1), expr


def split_factors(expr: Expr) -> Factors:
    """The factors of an expression that is in normal form already."""
    match expr:
        case Number(value):
            return Factors(value)
        case Product(factors) | Hadamard(factors):
            found = Factors()
            for factor in factors:
                found = found * split_factors(factor)
            return found
        case _:
            return Factors(scalars=(expr,)) if expr.is_scalar else Factors(vectors=(expr,))


def factored(terms: Sequence[Expr]) -> tuple[Factors, Expr]:
    """A sum of terms in normal form as common factors times the rest: β k + β p is β (k + p)."""
    parts = [split_factors(t) for t in terms]
    common = common_factors(parts)
    return common, total(divided(p, common).expr for p in parts)


def collected(terms: Sequence[Expr]) -> Expr:
    """The sum of terms in normal form, with common factors taken out; 0 of none."""
    whole = total(terms)
    if not isinstance(whole, Sum):
        return whole
    common, rest = factored(whole.terms)
    return (common * split_factors(rest)).expr


def common_factors(parts: Sequence[Factors]) -> Factors:
    """The scalars and vectors that all parts have, and -1 where all are negative."""

    def shared(lists: Sequence[tuple[Expr, ...]]) -> tuple[Expr, ...]:
        counts = Counter(commutative_key(e) for e in lists[0])
        for others in lists[1:]:
            counts &= Counter(commutative_key(e) for e in others)
        return _take(lists[0], counts)[0]

    sign = Fraction(-1 if all(p.coefficient < 0 for p in parts) else 1)
    return Factors(sign, shared([p.scalars for p in parts]), shared([p.vectors for p in parts]))


def divided(factors: Factors, taken: Factors) -> Factors:
    """The factors without those of ``taken``, all of which must be there."""
    scalars, vectors = (Counter(commutative_key(e) for e in x) for x in (taken.scalars, taken.vectors))
    return Factors(
        factors.coefficient / taken.coefficient,
        _take(factors.scalars, scalars)[1],
        _take(factors.vectors, vectors)[1],
    )


def _take(exprs: Iterable[Expr], counts: Counter[str]) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """Splits expressions into those counted (each as often as counted) and the others."""
    left_over = Counter(counts)
    taken: list[Expr] = []
    kept: list[Expr] = []
    for expr in exprs:
        key = commutative_key(expr)
        (taken if left_over[key] > 0 else kept).append(expr)
        left_over[key] -= 1
    return tuple(taken), tuple(kept)
