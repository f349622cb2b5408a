"""Expressions of one token with states in them, as plan nodes: what a step-by-step class computes.

Matrices are applied, never formed: ``(I - b k kᵀ) S`` becomes S and k times (kᵀ S). A chain of factors is
cut where it is one wide (an outer product), then where it is a few rows wide (a sum of outer products);
what is left is a matrix or vector with square matrices on its sides, which are applied to it one by one,
sum by sum. Only a declared square input, or an elementwise product with one, is a value of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from linalg_dsl.algebra.expr import (
    Call,
    Diag,
    Dim,
    Expr,
    Hadamard,
    Identity,
    Product,
    Quotient,
    Sum,
    Symbol,
    Transpose,
    is_square,
    transpose,
)
from linalg_dsl.algebra.normalise import Normaliser
from linalg_dsl.algebra.rules import is_small, split_inner_products
from linalg_dsl.algebra.traverse import symbols
from linalg_dsl.errors import InternalError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.elementwise import TokenExpressions
from linalg_dsl.planner.ops import KEYS, VALUES, Axes, ordered
from linalg_dsl.planner.plan import PlanBuilder

MOST_ROWS = 8
"""A product over more rows than this is one product of matrices; over fewer, a sum of outer products."""

Present = Callable[[str], int]
"""The node of a state after the token."""
Before = Mapping[tuple[str, int | str | None], str]
"""The state that holds a shifted input, or a row of it, as it was at the token before."""


@dataclass(frozen=True, slots=True)
class Value:
    """A node read as a matrix: the axes that are its rows and its columns, "" where there is one.

    The node may lack either: it is then the same along it.
    """

    node: int
    row: str
    col: str

    @property
    def transposed(self) -> Value:
        return Value(self.node, self.col, self.row)


def family(dim: Dim) -> Axes:
    """The names that an axis of this dimension may go by: K, L, M; V, W, Y; n, n', n''."""
    for names in (KEYS, VALUES):
        if dim == names[0]:
            return names
    return (str(dim), f"{dim}'", f"{dim}''")


def dimension(axis: str) -> str:
    """K of K, L, M; V of V, W, Y; n of n, n', n''."""
    for names in (KEYS, VALUES):
        if axis in names:
            return names[0]
    return axis.rstrip("'")


def state_axes(dims: Sequence[Dim]) -> Axes:
    """The axes of a state or output with these dimensions: a square one has its columns by another name."""
    if len(dims) == 2 and dims[0] == dims[1] != 1:
        return ordered(family(dims[0])[:2])
    return ordered(str(d) for d in dims if d != 1)


class StepExpressions(TokenExpressions):
    """Adds the nodes of one token's expressions: inputs as leaves without ``t``, states as given.

    ``past`` holds the node of every state before the token; ``present`` gives the one after it; ``before``
    names the states that are inputs of the token before.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        spec: RecurrenceSpec,
        normaliser: Normaliser,
        past: Mapping[str, int],
        present: Present,
        before: Before,
    ) -> None:
        super().__init__(builder, spec)
        self.normaliser = normaliser
        self.past = past
        self.present = present
        self.before = before

    def full(self, expr: Expr) -> int:
        """The value with all axes of its shape: columns and rows alike as [D]."""
        return self.builder.expand(self(expr), state_axes(expr.shape))

    def __call__(self, expr: Expr) -> int:
        if is_square(expr.shape):
            row, col = family(expr.shape[0])[:2]
            return self._named(self._matrix(expr), row, col).node
        match expr:
            case Call(("sum" | "dot" | "l2norm" | "softmax") as function, args):
                wide = tuple(_Given(self.full(a), a.shape) for a in args)
                return self._call(function, wide)
            case _Given(node):
                return node
            case _:
                return super().__call__(expr)

    # -- leaves -------------------------------------------------------------------------------
    def _varies(self, expr: Expr) -> bool:
        if isinstance(expr, Symbol) and expr.name in self.past:
            return True
        return not isinstance(expr, _Given) and super()._varies(expr)

    def _leaf_axes(self, symbol: Symbol, timed: bool) -> Axes:
        return state_axes(symbol.shape)

    def _symbol(self, symbol: Symbol) -> int:
        if symbol.name in self.past:
            return self.past[symbol.name] if symbol.time == -1 else self.present(symbol.name)
        if symbol.time == -1:
            if (symbol.name, symbol.row) in self.before:
                return self.past[self.before[symbol.name, symbol.row]]
            raise InternalError(f"{symbol.name} of the token before is not an input of this step")
        return super()._symbol(symbol)

    # -- products -----------------------------------------------------------------------------
    def _product(self, factors: tuple[Expr, ...]) -> int:
        return self._flat(factors).node

    def _flat(self, factors: Sequence[Expr | Value], value: Value | None = None) -> Value:
        """A product whose scalars, inner products among them, may stand anywhere; then ``value``."""
        scalars, chain = split_inner_products([f for f in factors if isinstance(f, Expr)])
        if value is None and not chain and len(scalars) == 1 and isinstance(scalars[0], Product):
            return self._chain(scalars[0].factors)
        scale = self.builder.number(1)
        for scalar in scalars:
            scale = self.builder.mul(scale, self(scalar))
        items: list[Expr | Value] = [*chain] if value is None else [*chain, value]
        return self._chain(items, scale) if items else Value(scale, "", "")

    def _chain(self, items: Sequence[Expr | Value], scale: int | None = None) -> Value:
        """Factors that fit together, none of them a scalar; times ``scale``, put where it costs least."""
        b = self.builder
        if scale is None:
            scale = b.number(1)
        for i in range(1, len(items)):
            if self._inner(items, i) == 1:
                return self._outer(self._chain(items[:i]), self._chain(items[i:], scale))
        for i in range(1, len(items)):
            if _is_diagonal(items[:i]) or _is_diagonal(items[i:]):
                continue  # applied entry by entry below, never formed
            if is_small(dim := self._inner(items, i)):
                value = self._rows(items[:i], items[i:], dim)
                return replace(value, node=b.mul(scale, value.node))
        at = self._anchor(items)
        value = self._value(items[at])
        for item in reversed(items[:at]):
            value = self._apply(item, value)
        for item in items[at + 1 :]:
            turned = item.transposed if isinstance(item, Value) else transpose(item)
            value = self._apply(turned, value.transposed).transposed
        return replace(value, node=b.mul(scale, value.node))

    def _inner(self, items: Sequence[Expr | Value], i: int) -> Dim:
        return self._shape(items[i - 1])[1]

    def _shape(self, item: Expr | Value) -> tuple[Dim, Dim]:
        if isinstance(item, Expr):
            return item.shape
        rows, cols = (dimension(a) if a else 1 for a in (item.row, item.col))
        return (rows, cols)

    def _anchor(self, items: Sequence[Expr | Value]) -> int:
        """Which factor to begin with: an end that is a vector or a few rows, else one that is not square."""
        shapes = [self._shape(x) for x in items]
        first, last = shapes[0], shapes[-1]
        if first[0] == 1 or (is_small(first[0]) and first[0] != first[1]):
            return 0
        if last[1] == 1 or (is_small(last[1]) and last[0] != last[1]):
            return len(items) - 1
        return next((i for i, s in enumerate(shapes) if s[0] != s[1]), len(items) - 1)

    def _outer(self, left: Value, right: Value) -> Value:
        """Column times row; either may be a scalar."""
        col = right.col
        node = right.node
        if left.row and left.row == right.col:
            col = next(a for a in family(dimension(col)) if a != left.row)
            node = self.builder.swap(node, right.col, col)
        return Value(self.builder.mul(left.node, node), left.row, col)

    def _rows(self, left: Sequence[Expr | Value], right: Sequence[Expr | Value], dim: Dim) -> Value:
        """left right, with a small inner dimension: a sum of outer products of few rows, or a product."""
        b = self.builder
        size = self.normaliser.size(dim)
        turned = [x.transposed if isinstance(x, Value) else transpose(x) for x in reversed(left)]
        if size > MOST_ROWS or not (self._has_rows(turned) and self._has_rows(right)):
            return self._multiply(self._chain(left), self._chain(right))
        total: Value | None = None
        for j in range(size):
            term = self._outer(self._row(turned, j).transposed, self._row(right, j))
            total = term if total is None else replace(term, node=b.add(total.node, term.node))
        assert total is not None
        return total

    def _has_rows(self, items: Sequence[Expr | Value]) -> bool:
        """Whether the first factor that is not diagonal is an input's rows, or made of such."""
        for item in items:
            if isinstance(item, (Value, Product)) or any(x.name in self.past for x in symbols(item)):
                return False
            if not isinstance(item, (Diag, Identity)):
                return not is_square(item.shape)
        return False

    def _row(self, items: Sequence[Expr | Value], j: int) -> Value:
        """Row j of a product, as a row."""
        b = self.builder
        scalars: list[int] = []
        rest = list(items)
        while isinstance(rest[0], (Diag, Identity)):
            diagonal = rest.pop(0)
            if isinstance(diagonal, Diag):
                scalars.append(self(self.normaliser.pick(diagonal.arg, j)))
        first = rest.pop(0)
        assert isinstance(first, Expr)
        picked = self.normaliser.pick(first, j)
        value = self._value(picked) if picked.is_scalar else self._chain([transpose(picked), *rest])
        for scalar in scalars:
            value = replace(value, node=b.mul(scalar, value.node))
        return value

    def _apply(self, item: Expr | Value, value: Value) -> Value:
        """item value."""
        b = self.builder
        match item:
            case Value():
                return self._multiply(item, value)
            case Identity():
                return value
            case Diag(arg):
                entries = b.swap(self(arg), dimension(value.row), value.row)
                return replace(value, node=b.mul(entries, value.node))
            case Sum(terms) if is_square(item.shape):
                total = self._apply(terms[0], value)
                for term in terms[1:]:
                    more = self._named(self._apply(term, value), total.row, total.col)
                    total = replace(total, node=b.add(total.node, more.node))
                return total
            case Product(factors):
                return self._flat(factors, value)
            case _:
                return self._multiply(self._value(item), value)

    def _multiply(self, left: Value, right: Value) -> Value:
        """The product of two matrices at hand; its rows and columns go by their first names if they can."""
        b = self.builder
        middle = left.col
        if right.row != middle or right.col in (left.row, middle):
            # the columns of the right one need a name that neither has
            taken = {left.row, middle}
            col = right.col
            if col in taken:
                col = next(a for a in family(dimension(col)) if a not in taken and a != right.row)
                right = Value(b.swap(right.node, right.col, col), right.row, col)
            right = Value(b.swap(right.node, right.row, middle), middle, right.col)
        x, y = (self._with(v.node, middle) for v in (left, right))
        product = Value(b.contract(x, y, middle), left.row, right.col)
        return self._first_names(product)

    def _with(self, node: int, axis: str) -> int:
        """The value with this axis."""
        b = self.builder
        return node if axis in b.axes(node) else b.expand(node, ordered((*b.axes(node), axis)))

    def _first_names(self, value: Value) -> Value:
        """Rows and columns named as of a value: both by the first name of their dimension if that fits."""
        row, col = (dimension(a) if a else "" for a in (value.row, value.col))
        if row and row == col:
            row, col = family(row)[:2]
        return self._named(value, row, col)

    def _named(self, value: Value, row: str, col: str) -> Value:
        """The same matrix with these names for its axes."""
        b = self.builder
        node = value.node
        have = [value.row, value.col]
        for i, wanted in enumerate((row, col)):
            if have[i] != wanted:
                node = b.swap(node, have[i], wanted)
                have = [wanted if a == have[i] else have[i] if a == wanted else a for a in have]
        return Value(node, row, col)

    # -- matrices as values -------------------------------------------------------------------
    def _value(self, item: Expr | Value) -> Value:
        if isinstance(item, Value):
            return item
        if is_square(item.shape):
            return self._matrix(item)
        row, col = ("" if d == 1 else str(d) for d in item.shape)
        return Value(self(item), row, col)

    def _matrix(self, expr: Expr) -> Value:
        """A square matrix, entry by entry."""
        b = self.builder
        row, col = family(expr.shape[0])[:2]
        match expr:
            case Symbol():
                return Value(self._symbol(expr), row, col)
            case Transpose(arg):
                return self._matrix(arg).transposed
            case Identity():
                return Value(b.eye(row, col), row, col)
            case Diag(arg):
                return Value(b.mul(self(arg), b.eye(row, col)), row, col)
            case Product(factors):
                return self._named(self._flat(factors), row, col)
            case Sum(terms) | Hadamard(terms):
                join = b.add if isinstance(expr, Sum) else b.mul
                total, *rest = (self._named(self._matrix(t), row, col).node for t in terms)
                for term in rest:
                    total = join(total, term)
                return Value(total, row, col)
            case Quotient(top, bottom):
                below = self(bottom) if bottom.is_scalar else self._named(self._matrix(bottom), row, col).node
                above = self._named(self._matrix(top), row, col).node
                return Value(b.mul(above, b.unary("reciprocal", below)), row, col)
            case _:
                raise InternalError(f"{type(expr).__name__} is not a square matrix")


def _is_diagonal(items: Sequence[Expr | Value]) -> bool:
    return all(isinstance(x, (Diag, Identity)) for x in items)


@dataclass(frozen=True, slots=True)
class _Given(Expr):
    """A value at hand, in an expression."""

    node: int
    dims: tuple[Dim, Dim]

    @property
    def shape(self) -> tuple[Dim, Dim]:
        return self.dims
