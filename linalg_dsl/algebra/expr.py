"""Expression nodes and the constructors that keep them in one form.

Everything is a matrix with symbolic dimensions: a scalar is 1 x 1, a vector ``[K]`` is a column
K x 1, its transpose a row 1 x K. Nodes are frozen; spans take no part in equality. Build nodes
with the lower-case constructors below, which check shapes (``ShapeError``) and keep these
invariants:

1. sums, products and elementwise products are flat and have at least two operands;
2. the numbers of a product are folded into one leading ``Number`` (absent when it is 1), also those
   that stood in a quotient or an elementwise product; those of a sum into one term;
3. a transpose stands only on symbols, elementwise calls, powers and quotients of non-scalars;
4. in a sum of square matrices every scalar term is a multiple of ``Identity``; in a sum of
   vectors or K x V matrices a scalar term stands for itself in every element;
5. a scalar made of vectors (k^T q) that would not conform where it stands among the factors of a
   product stands before them: S (k^T q) is the product k^T, q, S.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeVar

from linalg_dsl.source import Span

Dim = str | int
Shape = tuple[Dim, Dim]
SCALAR: Shape = (1, 1)

ELEMENTWISE_FUNCTIONS = (
    "exp", "log", "sigmoid", "logsigmoid", "softplus", "tanh", "silu", "relu", "elu",
    "sqrt", "rsqrt", "abs", "sign",
)  # fmt: skip
"""One argument, applied to every element."""
MULTI_FUNCTIONS = ("min", "max", "clamp")
"""Elementwise of several arguments of one shape (scalars broadcast): min(x, y), clamp(x, lo, hi)."""
REDUCTIONS = ("sum", "dot", "l2norm", "softmax")
"""sum(x) and dot(x, y) give a scalar; l2norm(x) = x / sqrt(x.x + 1e-6) and softmax(x) a vector."""
FUNCTIONS = ELEMENTWISE_FUNCTIONS + MULTI_FUNCTIONS + REDUCTIONS
L2NORM_EPS = 1e-6
RESET = -1e30
"""Stands for a log gate of -inf where that meets a factor: exp gives 0 of both, but the derivative by the
factor is 0 times the gate, which must not be NaN."""


class ShapeError(Exception):
    """Shapes that do not fit; ``operands`` are the positions of the two that clash."""

    def __init__(self, message: str, operands: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.operands = operands


@dataclass(frozen=True, slots=True)
class Expr:
    """Base of all nodes."""

    span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def shape(self) -> Shape:
        raise NotImplementedError

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()

    @property
    def is_scalar(self) -> bool:
        return self.shape == SCALAR


@dataclass(frozen=True, slots=True)
class Number(Expr):
    value: Fraction

    @property
    def shape(self) -> Shape:
        return SCALAR


@dataclass(frozen=True, slots=True)
class Symbol(Expr):
    """A declared name. ``time`` 0 is t, -1 is t-1, None has no time index (param, const, dimension).

    ``row`` picks one row of an [n, D] input (then the shape is the column D x 1) or one entry of an
    [n] input, counted from 0; None takes the whole. Text counts from 1: ``k_{t,1}`` is row 0. A text is
    the index of the ``Iterate`` around: its first substep picks row 0.
    """

    name: str
    dims: Shape
    time: int | None = 0
    row: int | str | None = None

    @property
    def shape(self) -> Shape:
        return self.dims


@dataclass(frozen=True, slots=True)
class Identity(Expr):
    dim: Dim

    @property
    def shape(self) -> Shape:
        return (self.dim, self.dim)


@dataclass(frozen=True, slots=True)
class Sum(Expr):
    terms: tuple[Expr, ...]

    @property
    def shape(self) -> Shape:
        return next((t.shape for t in self.terms if not t.is_scalar), SCALAR)

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.terms


@dataclass(frozen=True, slots=True)
class Product(Expr):
    """A matrix product, scalars allowed at any place."""

    factors: tuple[Expr, ...]

    @property
    def shape(self) -> Shape:
        shape = SCALAR
        for factor in self.factors:
            shape = _product_shape(shape, factor.shape)
        return shape

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.factors


@dataclass(frozen=True, slots=True)
class Hadamard(Expr):
    """An elementwise product of operands of one shape."""

    factors: tuple[Expr, ...]

    @property
    def shape(self) -> Shape:
        return self.factors[0].shape

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.factors


@dataclass(frozen=True, slots=True)
class Quotient(Expr):
    """Elementwise: the denominator is a scalar or has the numerator's shape."""

    numerator: Expr
    denominator: Expr

    @property
    def shape(self) -> Shape:
        return self.numerator.shape

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.numerator, self.denominator)


@dataclass(frozen=True, slots=True)
class Power(Expr):
    """Elementwise, with a scalar exponent."""

    base: Expr
    exponent: Expr

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.base, self.exponent)


@dataclass(frozen=True, slots=True)
class Transpose(Expr):
    arg: Expr

    @property
    def shape(self) -> Shape:
        rows, cols = self.arg.shape
        return (cols, rows)

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.arg,)


@dataclass(frozen=True, slots=True)
class Diag(Expr):
    """The square matrix with a column vector on its diagonal."""

    arg: Expr

    @property
    def shape(self) -> Shape:
        return (self.arg.shape[0], self.arg.shape[0])

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.arg,)


@dataclass(frozen=True, slots=True)
class Call(Expr):
    function: str
    args: tuple[Expr, ...]

    @property
    def shape(self) -> Shape:
        if self.function in ("sum", "dot"):
            return SCALAR
        return next((a.shape for a in self.args if not a.is_scalar), SCALAR)

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.args


@dataclass(frozen=True, slots=True)
class Iterate(Expr):
    """``count`` substeps of a state within one token: x := start, then count times x := body.

    In ``body`` (and nowhere else) ``Symbol(name, shape, 0)`` is x, and a row named ``index`` is that of the
    substep; ``start`` and ``count`` (a number or a const) know neither.
    """

    name: str
    index: str
    count: Expr
    start: Expr
    body: Expr

    @property
    def shape(self) -> Shape:
        return self.start.shape

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.count, self.start, self.body)


ZERO = Number(Fraction(0))
ONE = Number(Fraction(1))
AnyExpr = TypeVar("AnyExpr", bound=Expr)


def with_span(expr: AnyExpr, span: Span | None) -> AnyExpr:
    """The same node, knowing where it was written."""
    return replace(expr, span=span)


def number(value: int | float | str | Fraction) -> Number:
    """A rational number; of a float the simplest one that rounds to it (0.1 is 1/10, 1/3 is 1/3)."""
    if not isinstance(value, float):
        return Number(Fraction(value))
    simple = Fraction(value).limit_denominator(10**6)
    return Number(simple if float(simple) == value else Fraction(str(value)))


def add(operands: Iterable[Expr]) -> Expr:
    """A flat sum. Scalars beside square matrices become multiples of the identity."""
    given = tuple(operands)
    flat = [(i, t) for i, op in enumerate(given) for t in (op.terms if isinstance(op, Sum) else (op,))]
    shaped = [(i, t) for i, t in flat if not t.is_scalar]
    for i, term in shaped[1:]:
        if term.shape != shaped[0][1].shape:
            raise ShapeError(
                f"cannot add {show_shape(shaped[0][1].shape)} and {show_shape(term.shape)}",
                (shaped[0][0], i),
            )
    unit: Expr = ONE
    if shaped and is_square(shaped[0][1].shape):
        unit = Identity(shaped[0][1].shape[0])
    constant, place = Fraction(0), -1
    terms: list[Expr] = []
    for _, term in flat:
        value = _multiple_of(term, unit)
        if value is None:
            terms.append(mul((term, unit)) if term.is_scalar and unit != ONE else term)
            continue
        place = len(terms) if place < 0 else place
        constant += value
    if constant:
        terms.insert(place, mul((Number(constant), unit)))
    if not terms:
        return ZERO if unit == ONE else Product((ZERO, unit))
    return terms[0] if len(terms) == 1 else Sum(tuple(terms))


def _multiple_of(term: Expr, unit: Expr) -> Fraction | None:
    """c of a term c or c I, else None."""
    match term:
        case Number(value):
            return value
        case Identity() if term == unit:
            return Fraction(1)
        case Product((Number(value), Identity() as identity)) if identity == unit:
            return value
        case _:
            return None


def negate(operand: Expr) -> Expr:
    return mul((number(-1), operand))


def mul(operands: Iterable[Expr]) -> Expr:
    """A flat matrix product; numbers are folded to the front, -(a + b) is -a - b."""
    coefficient = Fraction(1)
    front: list[Expr] = []
    factors: list[Expr] = []
    shape = SCALAR
    for i, op in enumerate(operands):
        try:
            after = _product_shape(shape, op.shape)
        except ShapeError as err:
            raise ShapeError(str(err), (max(i - 1, 0), i)) from None
        value, groups, core = _split(op)
        coefficient *= value
        if shape[1] == 1:
            factors.extend(f for group in groups for f in group)
        else:
            front.extend(f for group in groups if len(group) > 1 for f in group)
            factors.extend(group[0] for group in groups if len(group) == 1)
        factors.extend(core)
        shape = after
    factors = front + factors
    if not factors:
        return Number(coefficient)
    if coefficient == -1 and len(factors) == 1 and isinstance(factors[0], Sum):
        return add(negate(t) for t in factors[0].terms)
    if coefficient != 1:
        factors.insert(0, Number(coefficient))
    return factors[0] if len(factors) == 1 else Product(tuple(factors))


def _split(operand: Expr) -> tuple[Fraction, list[list[Expr]], list[Expr]]:
    """The number, the leading scalars (a single factor, or a group such as k^T, q), and the rest."""
    value = Fraction(1)
    groups: list[list[Expr]] = []
    rest: list[Expr] = []
    shape = SCALAR
    for factor in operand.factors if isinstance(operand, Product) else (operand,):
        if isinstance(factor, Number):
            value *= factor.value
            continue
        shape = _product_shape(shape, factor.shape)
        rest.append(factor)
        if shape == SCALAR:
            groups.append(rest)
            rest = []
    return value, groups, rest


def hadamard(operands: Iterable[Expr]) -> Expr:
    given = tuple(operands)
    if all(op.is_scalar for op in given):
        return mul(given)
    first = given[0].shape
    for i, op in enumerate(given[1:], 1):
        if op.shape != first:
            raise ShapeError(
                f"an elementwise product needs equal shapes, got {show_shape(first)} and "
                f"{show_shape(op.shape)}",
                (i - 1, i),
            )
    coefficient = Fraction(1)
    factors: list[Expr] = []
    for op in given:
        value, bare = _without_number(op)
        coefficient *= value
        factors.extend(bare.factors if isinstance(bare, Hadamard) else (bare,))
    product = factors[0] if len(factors) == 1 else Hadamard(tuple(factors))
    return product if coefficient == 1 else mul((Number(coefficient), product))


def divide(numerator: Expr, denominator: Expr) -> Expr:
    if not denominator.is_scalar and denominator.shape != numerator.shape:
        raise ShapeError(
            f"cannot divide {show_shape(numerator.shape)} by {show_shape(denominator.shape)}", (0, 1)
        )
    above, numerator = _without_number(numerator)
    below, denominator = _without_number(denominator)
    if below == 0:
        raise ZeroDivisionError("division by zero")
    quotient = numerator if denominator == ONE else Quotient(numerator, denominator)
    return quotient if above == below else mul((Number(above / below), quotient))


def _without_number(operand: Expr) -> tuple[Fraction, Expr]:
    """c and x of c x."""
    match operand:
        case Number(value):
            return value, ONE
        case Product((Number(value), *rest)):
            return value, rest[0] if len(rest) == 1 else Product(tuple(rest))
        case _:
            return Fraction(1), operand


def power(base: Expr, exponent: Expr) -> Expr:
    """Elementwise; a whole power of a number (up to the 64th) is a number."""
    if not exponent.is_scalar:
        raise ShapeError(f"an exponent is a scalar, got {show_shape(exponent.shape)}", (1,))
    if is_square(base.shape):
        raise ShapeError("a power of a square matrix is not elementwise; write the product", (0,))
    match base, exponent:
        case Number(value), Number(n) if n.denominator == 1 and abs(n) <= 64:
            return Number(value ** int(n))
        case _:
            return base if exponent == ONE else Power(base, exponent)


def transpose(operand: Expr) -> Expr:
    if operand.is_scalar:
        return operand
    match operand:
        case Transpose(arg):
            return arg
        case Identity() | Diag():
            return operand
        case Sum(terms):
            return add(transpose(t) for t in terms)
        case Product():
            value, groups, core = _split(operand)
            scalars = [f for group in groups for f in group]
            return mul((Number(value), *scalars, *(transpose(f) for f in reversed(core))))
        case Hadamard(factors):
            return hadamard(transpose(f) for f in factors)
        case _:
            return Transpose(operand)


def diag(operand: Expr) -> Expr:
    if operand.is_scalar or operand.shape[1] != 1:
        raise ShapeError(f"diag takes a vector, got {show_shape(operand.shape)}", (0,))
    return Diag(operand)


def outer(x: Expr, y: Expr) -> Expr:
    for i, v in enumerate((x, y)):
        if v.shape[1] != 1:
            raise ShapeError(f"outer takes two vectors, got {show_shape(v.shape)}", (i,))
    return mul((x, transpose(y)))


def call(function: str, args: Iterable[Expr]) -> Expr:
    given = tuple(args)
    arity = {"min": 2, "max": 2, "clamp": 3, "dot": 2}.get(function, 1)
    if len(given) != arity:
        raise ShapeError(f"{function} takes {arity} argument{'s' * (arity > 1)}, got {len(given)}")
    shapes = {a.shape for a in given if not a.is_scalar}
    if len(shapes) > 1:
        raise ShapeError(f"{function} takes arguments of one shape", (0, 1))
    shape = next(iter(shapes), SCALAR)
    if shape != SCALAR and is_square(shape):
        raise ShapeError(f"{function} is elementwise and not defined for a square matrix", (0,))
    if function in REDUCTIONS and (shape == SCALAR or shape[1] != 1):
        raise ShapeError(f"{function} takes a vector, got {show_shape(shape)}", (0,))
    return Call(function, given)


def iterate(name: str, index: str, count: Expr, start: Expr, body: Expr) -> Expr:
    if start.shape != body.shape:
        raise ShapeError(f"a substep makes {show_shape(body.shape)} of {show_shape(start.shape)}", (1, 2))
    return Iterate(name, index, count, start, body)


def is_square(shape: Shape) -> bool:
    return shape[0] == shape[1] and shape[0] != 1


def show_shape(shape: Shape) -> str:
    """``scalar``, ``[K]`` for a column, ``[K]ᵀ`` for a row, ``[K, V]``."""
    rows, cols = shape
    if shape == SCALAR:
        return "a scalar"
    if cols == 1:
        return f"[{rows}]"
    return f"[{cols}]ᵀ" if rows == 1 else f"[{rows}, {cols}]"


def _product_shape(left: Shape, right: Shape) -> Shape:
    if left == SCALAR:
        return right
    if right == SCALAR:
        return left
    if left[1] != right[0]:
        raise ShapeError(f"cannot multiply {show_shape(left)} by {show_shape(right)}")
    return (left[0], right[1])
