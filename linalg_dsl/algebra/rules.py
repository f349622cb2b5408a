"""Rewrite rules on matrix expressions: products spread over sums, diagonals gathered, words.

A *word* is a scalar times a chain of matrices without a sum in it. Every expression that is linear in
some *opened* symbols (the state) becomes a sum of words; only sums that hold an opened symbol or are
matrices are spread, so scalars and vectors such as ``1 - f_t`` stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from linalg_dsl.algebra.expr import (
    ONE,
    Call,
    Diag,
    Dim,
    Expr,
    Hadamard,
    Identity,
    Number,
    Power,
    Product,
    Quotient,
    Shape,
    Sum,
    Symbol,
    Transpose,
    add,
    diag,
    divide,
    hadamard,
    is_square,
    mul,
    number,
    power,
    show_shape,
    transpose,
)
from linalg_dsl.errors import DslError, InternalError
from linalg_dsl.source import Span

Opened = Callable[[Expr], bool]
"""Whether an expression must be spread: whether it mentions the state."""


@dataclass(frozen=True, slots=True)
class Word:
    """``coefficient * product of scalars * product of the chain`` (an empty chain is a scalar)."""

    coefficient: Fraction = Fraction(1)
    scalars: tuple[Expr, ...] = ()
    chain: tuple[Expr, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)

    def times(self, other: Word) -> Word:
        return Word(
            self.coefficient * other.coefficient,
            self.scalars + other.scalars,
            self.chain + other.chain,
            self.span if self.span is not None else other.span,
        )

    def transposed(self) -> Word:
        return replace(self, chain=tuple(transpose(x) for x in reversed(self.chain)))

    def expr(self) -> Expr:
        return mul((Number(self.coefficient), *self.scalars, *self.chain))


BIG_DIMS = ("K", "V")
MOST_WORDS = 1024
"""More terms than this in one product are a mistake: ranks are small."""


def is_matrix(shape: Shape) -> bool:
    return 1 not in shape


def is_small(dim: Dim) -> bool:
    """A number of rows, n: an axis that is unrolled."""
    return dim != 1 and dim not in BIG_DIMS


def _has_rows(expr: Expr) -> bool:
    """An [n, D] matrix (or its transpose) made elementwise, of which rows can be taken."""
    small = [is_small(d) for d in expr.shape]
    return any(small) and not all(small) and not isinstance(expr, (Product, Identity, Diag))


def gather_diagonals(expr: Expr) -> tuple[Expr, ...]:
    """The terms of a square sum, with all its diagonal ones as a single term.

    ``I - diag(f) - k kᵀ`` has the terms ``diag(1 - f)`` and ``-k kᵀ``; multiples of the identity alone
    become ``(a + b) I``.
    """
    terms = expr.terms if isinstance(expr, Sum) else (expr,)
    entries = [(t, _diagonal_entries(t)) for t in terms]
    diagonal = [(t, e) for t, e in entries if e is not None]
    rest = [t for t, e in entries if e is None]
    if not diagonal:
        return tuple(rest)
    if len(diagonal) == 1:
        gathered = diagonal[0][0]
    else:
        total = add(e for _, e in diagonal)
        dim = expr.shape[0]
        gathered = mul((total, Identity(dim))) if total.is_scalar else diag(total)
    return (gathered, *rest)


def _diagonal_entries(term: Expr) -> Expr | None:
    """The diagonal of a diagonal matrix: a column, or a scalar for a multiple of the identity."""
    match term:
        case Identity():
            return ONE
        case Diag(arg):
            return arg
        case Product(factors):
            scalars: list[Expr] = []
            columns: list[Expr] = []
            for factor in factors:
                if factor.is_scalar:
                    scalars.append(factor)
                elif isinstance(factor, Diag):
                    columns.append(factor.arg)
                elif not isinstance(factor, Identity):
                    return None
            if not columns:
                return mul(scalars)
            column = hadamard(columns) if len(columns) > 1 else columns[0]
            return mul((*scalars, column))
        case _:
            return None


def distribute(expr: Expr, opened: Opened) -> tuple[Word, ...]:
    """The words of an expression. Raises DslError on what is not linear in the opened symbols."""
    if not opened(expr) and (not is_matrix(expr.shape) or _has_rows(expr)):
        return (_closed(expr),)
    match expr:
        case Symbol() | Identity():
            return (Word(chain=(expr,), span=expr.span),)
        case Sum(terms):
            return _distribute_sum(expr, terms, opened)
        case Product():
            return distribute_product(expr, opened)
        case Hadamard(factors):
            return _distribute_hadamard(expr, factors, opened)
        case Quotient(top, bottom):
            return _distribute_quotient(expr, top, bottom, opened)
        case Transpose(arg):
            if isinstance(arg, Quotient):
                return tuple(w.transposed() for w in distribute(arg, opened))
            if isinstance(arg, Symbol):
                return (Word(chain=(expr,), span=expr.span),)
            raise _nonlinear(expr, opened)
        case Call("dot", (x, y)):
            return distribute(mul((transpose(x), y)), opened)
        case Diag(arg) if not opened(arg):
            return (Word(chain=(expr,), span=expr.span),)
        case _:
            raise _nonlinear(expr, opened)


def distribute_product(expr: Product, opened: Opened) -> tuple[Word, ...]:
    """The words of a product, its factors spread one by one, inner products set apart as scalars."""
    scalars, chain = split_inner_products(expr.factors)
    read = next((x for x in scalars if opened(x)), None) if chain else None
    if read is not None:
        raise DslError.single(
            "E952",
            "a scalar that is read from the state multiplies something else: that is low rank on both "
            "sides, which has no chunk form",
            read.span or expr.span,
        )
    spread = []
    for factor in (*scalars, *chain):
        inner = isinstance(factor, Product) and not chain  # one inner product as a whole
        spread += [distribute(f, opened) for f in (factor.children if inner else (factor,))]
    count = math.prod(len(s) for s in spread)
    if count > MOST_WORDS:
        raise DslError.single(
            "E955", f"this product spreads to {count} terms; a chunk form has at most {MOST_WORDS}", expr.span
        )
    words: tuple[Word, ...] = (Word(span=expr.span),)
    for choices in spread:
        words = tuple(w.times(s) for w in words for s in choices)
    return words


def split_inner_products(factors: Sequence[Expr]) -> tuple[list[Expr], list[Expr]]:
    """The scalars of a flat product, stretches ``rowᵀ ... column`` included, and the chain that is left.

    In ``k kᵀ (kᵀ p) k vᵀ`` the stretch in the middle stands between matrices that it does not join.
    """
    scalars: list[Expr] = []
    chain: list[Expr] = []
    stretch: list[Expr] = []
    for factor in factors:
        if factor.is_scalar:
            scalars.append(factor)
            continue
        if not stretch and chain and chain[0].shape[0] == 1 and chain[-1].shape[1] == 1:
            scalars.append(mul(chain))
            chain = []
        if stretch or (chain and chain[-1].shape[1] != factor.shape[0]):
            stretch.append(factor)
            if factor.shape[1] == 1:
                scalars.append(mul(stretch))
                stretch = []
        else:
            chain.append(factor)
    if stretch:
        raise InternalError("the factors of a product do not fit")
    if chain and chain[0].shape[0] == 1 and chain[-1].shape[1] == 1:
        scalars.append(mul(chain))
        chain = []
    return scalars, chain


def _closed(expr: Expr) -> Word:
    if isinstance(expr, Number):
        return Word(expr.value, span=expr.span)
    if expr.is_scalar:
        return Word(scalars=(expr,), span=expr.span)
    return Word(chain=(expr,), span=expr.span)


def _distribute_sum(expr: Expr, terms: tuple[Expr, ...], opened: Opened) -> tuple[Word, ...]:
    if is_square(expr.shape):
        terms = gather_diagonals(expr)
    elif not is_matrix(expr.shape):
        # one written or read vector out of all terms without the state: v - w, not v and then -w
        closed = [t for t in terms if not opened(t)]
        if len(closed) > 1:
            terms = (*(t for t in terms if opened(t)), add(closed))
    scalar = next((t for t in terms if t.is_scalar and not expr.is_scalar), None)
    if scalar is not None:
        raise DslError.single(
            "E959",
            f"a scalar is added to every element of {show_shape(expr.shape)}, which has no chunk form",
            scalar.span or expr.span,
            "write the vector that you want to add",
        )
    return tuple(replace(w, span=w.span or t.span or expr.span) for t in terms for w in distribute(t, opened))


def _distribute_hadamard(expr: Expr, factors: tuple[Expr, ...], opened: Opened) -> tuple[Word, ...]:
    """``x ∘ y`` is ``diag(x) y`` for columns, ``(a wᵀ) ∘ X`` is ``diag(a) X diag(w)`` for matrices."""
    inner = [f for f in factors if opened(f)]
    if len(inner) > 1:
        raise _nonlinear(expr, opened)
    if not is_matrix(expr.shape):
        outside = [f for f in factors if not opened(f)]
        gate = hadamard(outside) if len(outside) > 1 else outside[0]
        column = expr.shape[1] == 1
        side = Word(chain=(diag(gate if column else transpose(gate)),), span=expr.span)
        return tuple(side.times(w) if column else w.times(side) for w in distribute(inner[0], opened))
    core = inner[0] if inner else factors[0]
    words = distribute(core, opened)
    for factor in factors:
        if factor is core:
            continue
        outers = [_outer_parts(w, expr) for w in distribute(factor, opened)]
        words = tuple(
            Word(s.coefficient, s.scalars, (diag(x),), s.span).times(w).times(Word(chain=(diag(y),)))
            for s, x, y in outers
            for w in words
        )
    return words


def _outer_parts(word: Word, whole: Expr) -> tuple[Word, Expr, Expr]:
    match word.chain:
        case (x, y) if x.shape[1] == 1 and y.shape[0] == 1:
            return word, x, transpose(y)
        case _:
            raise DslError.single(
                "E959",
                "an elementwise product of matrices has a chunk form only with an outer product x yᵀ",
                word.span or whole.span,
            )


def _distribute_quotient(expr: Expr, top: Expr, bottom: Expr, opened: Opened) -> tuple[Word, ...]:
    if opened(bottom):
        raise DslError.single(
            "E957",
            "a division by something that reads the state is nonlinear in it, which has no chunk form",
            bottom.span or expr.span,
        )
    words = distribute(top, opened)
    if bottom.is_scalar:
        side = Word(scalars=(divide(ONE, bottom),), span=expr.span)
        return tuple(side.times(w) for w in words)
    if is_matrix(bottom.shape):
        raise _nonlinear(expr, opened)
    column = bottom.shape[1] == 1
    inverse = Word(chain=(diag(power(bottom if column else transpose(bottom), number(-1))),))
    return tuple(inverse.times(w) if column else w.times(inverse) for w in words)


def _nonlinear(expr: Expr, opened: Opened) -> DslError:
    kind = {
        Call: "a function of", Power: "a power of", Diag: "a diagonal matrix of",
        Hadamard: "an elementwise product with",
    }.get(type(expr), "this use of")  # fmt: skip
    if opened(expr):
        return DslError.single("E957", f"{kind} the state has no chunk form", expr.span)
    return DslError.single("E959", f"{kind} a matrix {show_shape(expr.shape)} has no chunk form", expr.span)
