"""Scalar and vector expressions of one token, as plan nodes: preludes, coefficients, queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction

from linalg_dsl.algebra.expr import (
    ELEMENTWISE_FUNCTIONS,
    L2NORM_EPS,
    RESET,
    Call,
    Diag,
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
)
from linalg_dsl.errors import InternalError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.plan import PlanBuilder

FINITE_AT_RESETS = ("exp", "sigmoid", "tanh", "elu")
"""Functions that give a finite number at -inf, with derivative 0."""


@dataclass(frozen=True, slots=True)
class _Factor:
    """One factor of a product: a node and how it stands there."""

    node: int
    form: str  # scalar, column, row, diag


class TokenExpressions:
    """Adds the nodes of token expressions to a plan.

    A column of length D has axes ("t", "D"), a scalar ("t",); what uses only params, consts and
    numbers lacks ``t``. Outer products and states have no place here: those are the planner's.
    """

    def __init__(self, builder: PlanBuilder, spec: RecurrenceSpec) -> None:
        self.builder = builder
        self.inputs = {i.name: i for i in spec.inputs}
        self.consts = {c.name for c in spec.consts}
        self._multiplied = False

    def __call__(self, expr: Expr) -> int:
        b = self.builder
        match expr:
            case Number(value):
                return b.number(float(value))
            case Symbol():
                return self._symbol(expr)
            case Sum(terms):
                total = self(terms[0])
                for term in terms[1:]:
                    total = b.add(total, self(term))
                return total
            case Product(factors):
                with self._beside(factors):
                    return self._product(factors)
            case Hadamard(factors):
                with self._beside(factors):
                    total = self(factors[0])
                    for factor in factors[1:]:
                        total = b.mul(total, self(factor))
                    return total
            case Quotient(numerator, denominator):
                with self._beside((numerator, denominator)):
                    return b.mul(self(numerator), b.unary("reciprocal", self(denominator)))
            case Power(base, exponent):
                with self._multiplying(True):
                    return self._power(self(base), exponent)
            case Transpose(arg):
                return self(arg)  # a row is stored as its column; _product tells them apart
            case Call(function, args):
                with self._multiplying(self._multiplied and function not in FINITE_AT_RESETS):
                    return self._call(function, args)
            case _:
                raise InternalError(f"{type(expr).__name__} is not an expression of one token")

    def _beside(self, factors: tuple[Expr, ...]) -> AbstractContextManager[None]:
        """Within it log gates have a factor that may want a gradient."""
        return self._multiplying(self._multiplied or sum(self._varies(f) for f in factors) > 1)

    @contextmanager
    def _multiplying(self, multiplied: bool) -> Iterator[None]:
        before, self._multiplied = self._multiplied, multiplied
        yield
        self._multiplied = before

    def _varies(self, expr: Expr) -> bool:
        """Whether an input or param is in it."""
        if isinstance(expr, Symbol):
            return expr.name in self.inputs
        return any(self._varies(child) for child in expr.children)

    def _symbol(self, symbol: Symbol) -> int:
        b = self.builder
        if symbol.time is None and (symbol.name in self.consts or symbol.name in ("K", "V")):
            return b.add_node("const", (), (), symbol.name, name=symbol.name)
        declared = self.inputs.get(symbol.name)
        if declared is None:
            raise InternalError(f"{symbol.name} is neither an input, a param nor a const")
        op = "input" if declared.timed else "param"
        axes = self._leaf_axes(symbol, declared.timed)
        label = symbol.name if symbol.row is None else f"{symbol.name}_{symbol.row}"
        leaf = b.add_node(op, (), axes, label, name=symbol.name, row=symbol.row)
        if self._multiplied and declared.kind == "log_gate":
            return b.binary("maximum", leaf, b.number(RESET))
        return leaf

    def _leaf_axes(self, symbol: Symbol, timed: bool) -> Axes:
        axes = tuple(d for d in symbol.shape if d != 1)
        if len(axes) > 1 or any(d not in ("K", "V") for d in axes):
            raise InternalError(f"a symbol of shape {symbol.shape} is not an expression of one token")
        return (*(("t",) if timed else ()), *(str(d) for d in axes))

    def _product(self, factors: tuple[Expr, ...]) -> int:
        """Combines neighbours, inner products first, so no outer product is ever formed."""
        todo = [self._factor(f) for f in factors]
        while len(todo) > 1:
            for i in range(len(todo) - 1):
                joined = self._join(todo[i], todo[i + 1])
                if joined is not None:
                    todo[i : i + 2] = [joined]
                    break
            else:
                raise InternalError("an outer product is not an expression of one token")
        return todo[0].node

    def _factor(self, expr: Expr) -> _Factor:
        if isinstance(expr, Identity):
            return _Factor(self.builder.number(1), "scalar")
        if isinstance(expr, Diag):
            return _Factor(self(expr.arg), "diag")
        rows, cols = expr.shape
        form = "scalar" if expr.is_scalar else "column" if cols == 1 else "row" if rows == 1 else ""
        if not form:
            raise InternalError(f"a {rows} x {cols} matrix is not an expression of one token")
        return _Factor(self(expr), form)

    def _join(self, x: _Factor, y: _Factor) -> _Factor | None:
        b = self.builder
        match x.form, y.form:
            case "scalar", form:
                return _Factor(b.mul(x.node, y.node), form)
            case form, "scalar":
                return _Factor(b.mul(x.node, y.node), form)
            case "row", "column":
                product = b.mul(x.node, y.node)
                return _Factor(b.sum(product, b.axes(product)[-1]), "scalar")
            case ("diag", form) | (form, "diag") if (x.form, y.form) != ("column", "diag"):
                return _Factor(b.mul(x.node, y.node), form)
            case _:
                return None

    def _power(self, base: int, exponent: Expr) -> int:
        b = self.builder
        if not isinstance(exponent, Number):
            return b.unary("exp", b.mul(self(exponent), b.unary("log", base)))
        match exponent.value:
            case 2:
                return b.mul(base, base)
            case -1:
                return b.unary("reciprocal", base)
            case value if value == Fraction(1, 2):
                return b.unary("sqrt", base)
            case value if value == Fraction(-1, 2):
                return b.unary("rsqrt", base)
            case value:
                return b.unary("pow", base, exponent=float(value))

    def _call(self, function: str, args: tuple[Expr, ...]) -> int:
        b = self.builder
        x = self(args[0])
        match function:
            case _ if function in (*ELEMENTWISE_FUNCTIONS, "log_size"):
                return b.unary(function, x)
            case "min":
                return b.binary("minimum", x, self(args[1]))
            case "max":
                return b.binary("maximum", x, self(args[1]))
            case "clamp":
                return b.binary("minimum", b.binary("maximum", x, self(args[1])), self(args[2]))
            case "sum":
                return b.sum(x, b.axes(x)[-1])
            case "dot":
                product = b.mul(x, self(args[1]))
                return b.sum(product, b.axes(product)[-1])
            case "l2norm":
                square = b.sum(b.mul(x, x), b.axes(x)[-1])
                return b.mul(x, b.unary("rsqrt", b.add(square, b.number(L2NORM_EPS))))
            case "softmax":
                axis = b.axes(x)[-1]
                shifted = b.unary("exp", b.add(x, b.negate(b.amax(x, axis))))
                return b.mul(shifted, b.unary("reciprocal", b.sum(shifted, axis)))
            case _:
                raise InternalError(f"unknown function {function}")
