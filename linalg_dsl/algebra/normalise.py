"""Token expressions in their normal form: scalars and columns made of elementwise steps.

In normal form an expression has no transposes, no ``diag``, no matrices and no rows: inner products are
``dot`` calls, [n, D] inputs are taken apart into rows, and every scalar stands outside the vectors, so
that no K-wide multiplication is done where a scalar one will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from linalg_dsl.algebra.expr import (
    L2NORM_EPS,
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
    Sum,
    Symbol,
    Transpose,
    add,
    call,
    divide,
    hadamard,
    mul,
    negate,
    number,
    power,
    show_shape,
    transpose,
)
from linalg_dsl.algebra.factors import UNIT, Factors, collected, split_factors
from linalg_dsl.algebra.rules import Word, distribute_product, is_matrix, is_small, split_inner_products
from linalg_dsl.errors import DslError, InternalError


@dataclass(frozen=True, slots=True)
class Piece:
    """A chain in outer form: ``scale * diag(diagonal)``, or ``scale * column rowᵀ``, or a part of it.

    With ``column`` or ``row`` set, ``diagonal`` is empty. A piece without any of the three is a scalar
    (or a multiple of the identity), and so is a product that is zero.
    """

    scale: Factors = UNIT
    diagonal: tuple[Expr, ...] = ()
    column: tuple[Expr, ...] = ()
    row: tuple[Expr, ...] = ()

    @property
    def is_zero(self) -> bool:
        return self.scale.coefficient == 0


def _never(_: Expr) -> bool:
    return False


class Normaliser:
    """Brings token expressions to normal form; ``sizes`` gives every small dimension its number."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    # -- whole expressions ----------------------------------------------------------------------
    def normal(self, expr: Expr) -> Expr:
        """A scalar or a column in normal form; a row gives its column."""
        return self.factors(expr).expr

    def factors(self, expr: Expr) -> Factors:
        """The factors of a scalar, a column or a row."""
        if is_matrix(expr.shape) or any(is_small(d) for d in expr.shape):
            raise DslError.single(
                "E953", f"a matrix {show_shape(expr.shape)} in this place has no chunk form", expr.span
            )
        if not expr.is_scalar and expr.shape[0] == 1:
            return self.factors(flip(expr))
        match expr:
            case Number(value):
                return Factors(value)
            case Symbol():
                return split_factors(expr)
            case Sum(terms):
                return self._sum(terms)
            case Product():
                return self._product(expr)
            case Hadamard(factors):
                found = Factors()
                for factor in factors:
                    found = found * self.factors(factor)
                return found
            case Quotient(top, bottom):
                return self._quotient(top, bottom)
            case Power(base, exponent):
                return split_factors(power(self.normal(base), self.normal(exponent)))
            case Transpose(arg):
                return self.factors(flip(arg))
            case Call(function, args):
                return self._call(function, args)
            case _:
                raise InternalError(f"{type(expr).__name__} of shape {expr.shape} is not a token expression")

    def _sum(self, terms: Iterable[Expr]) -> Factors:
        return split_factors(collected([self.normal(t) for t in terms]))

    def _product(self, expr: Product) -> Factors:
        pieces = [p for w in distribute_product(expr, _never) for p in self.pieces(w)]
        if len(pieces) == 1:
            return _as_factors(pieces[0], expr)
        return self._sum([_as_factors(p, expr).expr for p in pieces])

    def _quotient(self, top: Expr, bottom: Expr) -> Factors:
        numerator, denominator = self.factors(top), self.factors(bottom)
        inverse = Factors(1 / denominator.coefficient if denominator.coefficient else Fraction(1))
        if not denominator.coefficient:
            raise DslError.single("E957", "a division by zero", bottom.span)
        for scalar in denominator.scalars:
            inverse = inverse * Factors(scalars=(divide(ONE, scalar),))
        if not denominator.vectors:
            return numerator * inverse
        below = denominator.vector
        if not numerator.vectors:  # a number over a vector: constructors allow equal shapes only
            return numerator * inverse * Factors(vectors=(power(below, number(-1)),))
        ratio = divide(numerator.vector, below)
        return Factors(numerator.coefficient, numerator.scalars, (ratio,)) * inverse

    def _call(self, function: str, args: tuple[Expr, ...]) -> Factors:
        match function, args:
            case "dot", (x, y):
                if is_small(x.shape[0]):
                    rows = range(self.size(x.shape[0]))
                    return self._sum([mul((self.pick(x, j), self.pick(y, j))) for j in rows])
                return self._dot(self.factors(x), self.factors(y))
            case "sum", (x,):
                if is_small(x.shape[0]):
                    return self._sum([self.pick(x, j) for j in range(self.size(x.shape[0]))])
                found = self.factors(x)
                if len(found.vectors) == 2:
                    return self._dot(found, Factors())
                return Factors(found.coefficient, (*found.scalars, call("sum", (found.vector,))))
            case _:
                return split_factors(call(function, [self.normal(a) for a in args]))

    def _dot(self, x: Factors, y: Factors) -> Factors:
        """Scalars in front; the elementwise factors are shared out between the two sides."""
        both = x * y
        if len(both.vectors) < 2:
            inner = call("sum", (both.vector,))
        else:
            left, right = (x, y) if x.vectors and y.vectors else (
                Factors(vectors=both.vectors[:1]), Factors(vectors=both.vectors[1:])
            )  # fmt: skip
            inner = call("dot", (left.vector, right.vector))
        return Factors(both.coefficient, (*both.scalars, inner))

    # -- chains ---------------------------------------------------------------------------------
    def pieces(self, word: Word) -> tuple[Piece, ...]:
        """A word without the state, its small axes unrolled, in outer form."""
        return tuple(self.collapse(w) for w in self.unroll(word))

    def unroll(self, word: Word) -> tuple[Word, ...]:
        """Writes products over a small axis as sums of rows: ``kᵀ v`` is ``Σ_j k_j v_jᵀ``."""
        if not any(is_small(d) for x in word.chain for d in x.shape):
            return (word,)
        open_words: list[tuple[Word, int | None]] = [
            (Word(word.coefficient, word.scalars, (), word.span), None)
        ]
        for matrix in word.chain:
            open_words = [(w.times(step), j) for w, i in open_words for step, j in self._unrolled(matrix, i)]
        return tuple(w for w, _ in open_words)

    def _unrolled(self, matrix: Expr, i: int | None) -> list[tuple[Word, int | None]]:
        rows, cols = matrix.shape
        if is_small(rows) and is_small(cols):
            if i is None:
                raise InternalError("a chain begins with a small axis")
            match matrix:
                case Identity():
                    return [(Word(), i)]
                case Diag(arg):
                    return [(_closed_word(self.pick(arg, i)), i)]
                case _:
                    raise DslError.single(
                        "E953", f"a matrix {show_shape(matrix.shape)} has no chunk form", matrix.span
                    )
        if is_small(rows):
            if i is None:
                raise InternalError("a chain begins with a small axis")
            return [(_closed_word(transpose(self.pick(matrix, i))), None)]
        if is_small(cols):
            turned = transpose(matrix)
            return [(_closed_word(self.pick(turned, j)), j) for j in range(self.size(cols))]
        return [(Word(chain=(matrix,), span=matrix.span), None)]

    def collapse(self, word: Word) -> Piece:
        """Multiplies a chain of diagonals, columns and rows out to one diagonal or outer product."""
        scale = Factors(word.coefficient)
        for scalar in word.scalars:
            scale = scale * self.factors(scalar)
        diagonal: tuple[Expr, ...] = ()
        column: tuple[Expr, ...] = ()
        row: tuple[Expr, ...] = ()
        for matrix in word.chain:
            rows, cols = matrix.shape
            if isinstance(matrix, Identity):
                continue
            if isinstance(matrix, Diag):
                entries = self.factors(matrix.arg)
                scale = scale * Factors(entries.coefficient, entries.scalars)
                if row:
                    row += entries.vectors
                else:
                    diagonal += entries.vectors
                continue
            if 1 in matrix.shape:
                found = self.factors(matrix)
                scale = scale * Factors(found.coefficient, found.scalars)
                if scale.coefficient == 0:
                    break
                if not found.vectors:
                    raise DslError.single(
                        "E959",
                        f"this vector has the same number in every element: {show_shape(matrix.shape)} of "
                        "a scalar has no chunk form",
                        matrix.span or word.span,
                    )
            if cols == 1:
                if row:
                    inner = self._dot(Factors(vectors=row), Factors(vectors=found.vectors))
                    scale, row = scale * inner, ()
                elif column:
                    raise InternalError("two columns beside each other")
                else:
                    column, diagonal = diagonal + found.vectors, ()
            elif rows == 1:
                if row:
                    raise InternalError("two rows beside each other")
                row = found.vectors
            else:
                raise DslError.single(
                    "E953",
                    f"the matrix {_name(matrix)}{show_shape(matrix.shape)} is dense: a chunk form needs one "
                    "of diagonal matrices and outer products",
                    matrix.span or word.span,
                    "a product with a dense matrix costs a matrix product per token",
                )
        if scale.coefficient == 0:
            return Piece(Factors(Fraction(0)))
        return Piece(scale, diagonal, column, row)

    # -- rows -----------------------------------------------------------------------------------
    def size(self, dim: Dim) -> int:
        return dim if isinstance(dim, int) else self.sizes[dim]

    def pick(self, expr: Expr, j: int) -> Expr:
        """Entry j of a column [n], a scalar; row j of a matrix [n, D], as a column [D]."""
        if not is_small(expr.shape[0]):
            return expr  # a scalar that stands for every row
        match expr:
            case Symbol(_, dims, _, None):
                return Symbol(expr.name, (dims[1], 1), expr.time, j, span=expr.span)
            case Sum(terms):
                return add(self.pick(t, j) for t in terms)
            case Hadamard(factors):
                return hadamard(self.pick(f, j) for f in factors)
            case Quotient(top, bottom):
                return divide(self.pick(top, j), self.pick(bottom, j))
            case Power(base, exponent):
                return power(self.pick(base, j), exponent)
            case Product(factors):
                return self._pick_product(factors, j)
            case Transpose(arg) if isinstance(arg, (Call, Power, Quotient)):
                return self.pick(flip(arg), j)
            case Call(function, args) if function not in ("l2norm", "softmax"):
                return call(function, [self.pick(a, j) for a in args])
            case Call("l2norm", (x,)):
                entries = [self.pick(x, i) for i in range(self.size(x.shape[0]))]
                square = add([*(mul((e, e)) for e in entries), number(L2NORM_EPS)])
                return mul((entries[j], call("rsqrt", (square,))))
            case Call("softmax", (x,)):
                entries = [self.pick(x, i) for i in range(self.size(x.shape[0]))]
                top = entries[0]
                for e in entries[1:]:
                    top = call("max", (top, e))
                powers = [call("exp", (add((e, negate(top))),)) for e in entries]
                return divide(powers[j], add(powers))
            case _:
                raise DslError.single("E953", "a row of this matrix has no chunk form", expr.span)

    def _pick_product(self, factors: tuple[Expr, ...], j: int) -> Expr:
        scalars, (first, *rest) = split_inner_products(factors)
        if isinstance(first, Diag):
            return mul((*scalars, self.pick(first.arg, j), self.pick(mul(rest), j)))
        if isinstance(first, Identity):
            return mul((*scalars, self.pick(mul(rest), j)))
        picked = self.pick(first, j)
        if not rest:
            return mul((*scalars, picked))
        return mul((*scalars, transpose(mul((transpose(picked), *rest)))))


def _name(expr: Expr) -> str:
    return f"{expr.name} " if isinstance(expr, Symbol) else ""


def flip(expr: Expr) -> Expr:
    """The transpose, pushed through elementwise functions: a row becomes a true column."""
    match expr:
        case Transpose(arg):
            return arg
        case Symbol(name, (1, dim), time, None):
            return Symbol(name, (dim, 1), time, 0, span=expr.span)
        case Call(function, args):
            return call(function, [flip(a) for a in args])
        case Power(base, exponent):
            return power(flip(base), exponent)
        case Quotient(top, bottom):
            return divide(flip(top), flip(bottom))
        case Sum(terms):
            return add(flip(t) for t in terms)
        case Hadamard(factors):
            return hadamard(flip(f) for f in factors)
        case _:
            return transpose(expr)


def _closed_word(expr: Expr) -> Word:
    if isinstance(expr, Number):
        return Word(expr.value)
    return Word(scalars=(expr,)) if expr.is_scalar else Word(chain=(expr,))


def _as_factors(piece: Piece, expr: Expr) -> Factors:
    """A piece that is a scalar, a column or a row."""
    if piece.diagonal or (piece.column and piece.row):
        raise InternalError(f"a matrix where a vector was expected, shape {expr.shape}")
    return Factors(piece.scale.coefficient, piece.scale.scalars, piece.column or piece.row)
