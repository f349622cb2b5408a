"""Writes that follow their erase: W = Σ Y, so that Z = Σ (Y + U).

The delta rule writes what is missing, β k (v - Sᵀk)ᵀ: W = β v and Σ = -β share β, so Y = -v and Y + U is the
error of the prediction U. Solving for the error itself, U' = (R + Y) + G Z with Z = Σ U', leaves no product
with G outside the solve (U = T (R + G W) needs one), and nothing but U' has to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from linalg_dsl.algebra.expr import ZERO, Expr, Sum, mul, number
from linalg_dsl.algebra.factors import split_factors, total
from linalg_dsl.planner.low_rank import without

_MINUS = number(-1)


def as_residuals(
    written: Sequence[Expr], sigma: Sequence[Sequence[Expr]]
) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """(Y, one column or ``ZERO`` per erase; W - Σ Y), with as few columns left in W as this can give.

    A row of Σ gives the Y of its last erase, once those of the others are known, if all terms of its W carry
    that entry's factors.
    """
    known: dict[int, Expr] = {}
    for w, row in zip(written, sigma, strict=True):
        used = [i for i, s in enumerate(row) if s != ZERO]
        if used and used[-1] not in known and all(i in known for i in used[:-1]):
            found = _quotient(_minus(w, row, known, used[:-1]), row[used[-1]])
            if found is not None:
                known[used[-1]] = found
    rest = tuple(_minus(w, row, known, list(known)) for w, row in zip(written, sigma, strict=True))
    if sum(x != ZERO for x in rest) >= sum(x != ZERO for x in written):
        return (ZERO,) * len(sigma[0]), tuple(written)
    return tuple(known.get(i, ZERO) for i in range(len(sigma[0]))), rest


def _minus(w: Expr, row: Sequence[Expr], known: dict[int, Expr], of: Sequence[int]) -> Expr:
    taken = [mul((_MINUS, row[i], known[i])) for i in of if row[i] != ZERO and known[i] != ZERO]
    return total(_spread([w, *taken])) if taken else w


def _spread(products: Sequence[Expr]) -> list[Expr]:
    """Products with a sum among their factors as sums of products, so that equal terms can meet."""
    out = []
    for x in (t for p in products for t in (p.terms if isinstance(p, Sum) else (p,))):
        factors = split_factors(x)
        sums = [v for v in factors.vectors if isinstance(v, Sum)]
        if len(factors.vectors) == 1 and sums:
            out += [mul((factors.scalar, term)) for term in sums[0].terms]
        else:
            out.append(factors.expr)
    return out


def _quotient(w: Expr, s: Expr) -> Expr | None:
    """Y with s Y = w where every term of w has the factors of s."""
    if w == ZERO:
        return ZERO
    divisor = split_factors(s)
    if divisor.vectors or (isinstance(s, Sum) and not divisor.scalars):
        return None
    terms = []
    for term in w.terms if isinstance(w, Sum) else (w,):
        found = without(split_factors(term), divisor)
        if found is None or not found.vectors:
            return None
        terms.append(found.expr)
    return total(terms)
