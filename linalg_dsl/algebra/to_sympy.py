"""SymPy's part: the logarithm of a gate, and the derivatives of the elementwise functions.

Only elementwise expressions go through SymPy, where a column counts as one commutative symbol; inner
products, norms and other reductions are opaque there. SymPy is imported at the first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

from linalg_dsl.algebra.expr import (
    ELEMENTWISE_FUNCTIONS,
    ONE,
    SCALAR,
    Call,
    Expr,
    Hadamard,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Symbol,
    add,
    call,
    divide,
    hadamard,
    mul,
    number,
    power,
)
from linalg_dsl.errors import InternalError

Positive = Callable[[Expr], bool]
VARIABLE = Symbol("x", SCALAR, None)
"""The argument in what ``unary_derivative`` returns."""


@cache
def _functions() -> SimpleNamespace:
    """SymPy, and our functions as SymPy classes that know their signs, logarithms and derivatives."""
    import sympy

    class Elementwise(sympy.Function):  # type: ignore[misc]
        nargs = 1

        def _eval_is_real(self) -> bool | None:
            return True if self.args[0].is_real else None

    class sigmoid(Elementwise):
        def _eval_is_positive(self) -> bool | None:
            return True if self.args[0].is_real else None

        def fdiff(self, argindex: int = 1) -> Any:
            return sigmoid(self.args[0]) * sigmoid(-self.args[0])

    class softplus(Elementwise):
        def _eval_is_positive(self) -> bool | None:
            return True if self.args[0].is_real else None

        def fdiff(self, argindex: int = 1) -> Any:
            return sigmoid(self.args[0])

    class logsigmoid(Elementwise):
        def _eval_is_negative(self) -> bool | None:
            return True if self.args[0].is_real else None

        def fdiff(self, argindex: int = 1) -> Any:
            return sigmoid(-self.args[0])

    class tanh(Elementwise):
        def fdiff(self, argindex: int = 1) -> Any:
            return 1 - tanh(self.args[0]) ** 2

    class silu(Elementwise):
        def fdiff(self, argindex: int = 1) -> Any:
            x = self.args[0]
            return sigmoid(x) * (1 + x * sigmoid(-x))

    class relu(Elementwise):
        def fdiff(self, argindex: int = 1) -> Any:
            return heaviside(self.args[0])

    class elu(Elementwise):
        def fdiff(self, argindex: int = 1) -> Any:
            return sympy.exp(minimum(self.args[0], 0))

    class abs(Elementwise):
        def fdiff(self, argindex: int = 1) -> Any:
            return sign(self.args[0])

    class sign(Elementwise):
        def fdiff(self, argindex: int = 1) -> Any:
            return sympy.S.Zero

    class side(Elementwise):
        def fdiff(self, argindex: int = 1) -> Any:
            return sympy.S.Zero

    class log_size(Elementwise):
        def fdiff(self, argindex: int = 1) -> Any:
            return 1 / self.args[0]

    class heaviside(Elementwise):
        def fdiff(self, argindex: int = 1) -> Any:
            return sympy.S.Zero

    class minimum(sympy.Function):  # type: ignore[misc]
        nargs = 2

    custom = [sigmoid, softplus, logsigmoid, tanh, silu, relu, elu, abs, sign, side, log_size, heaviside]
    return SimpleNamespace(
        sympy=sympy,
        minimum=minimum,
        custom=(*custom, minimum),
        classes={
            **{c.__name__: c for c in custom},
            "exp": sympy.exp,
            "log": sympy.log,
            "sqrt": sympy.sqrt,
            "rsqrt": lambda x: x ** sympy.Rational(-1, 2),
            "reciprocal": lambda x: x**-1,
        },
    )


class _Untranslatable(Exception):
    """SymPy brought in a function that we do not have."""


class _Translation:
    """To SymPy and back; remembers which expression every symbol stands for."""

    def __init__(self, positive: Positive) -> None:
        self.space = _functions()
        self.sympy = self.space.sympy
        self.positive = positive
        self.stands_for: dict[Any, Expr] = {}
        self.symbol_of: dict[Expr, Any] = {}

    def forth(self, expr: Expr) -> Any:
        match expr:
            case Number(value):
                return self.sympy.Rational(value.numerator, value.denominator)
            case Sum(terms):
                return self.sympy.Add(*(self.forth(t) for t in terms))
            case Product(factors) if sum(not f.is_scalar for f in factors) <= 1:
                return self.sympy.Mul(*(self.forth(f) for f in factors))
            case Hadamard(factors):
                return self.sympy.Mul(*(self.forth(f) for f in factors))
            case Quotient(top, bottom):
                return self.forth(top) / self.forth(bottom)
            case Power(base, exponent):
                return self.forth(base) ** self.forth(exponent)
            case Call(function, (arg,)) if function in ELEMENTWISE_FUNCTIONS:
                return self.space.classes[function](self.forth(arg))
            case _:
                return self._symbol(expr)

    def _symbol(self, expr: Expr) -> Any:
        if expr not in self.symbol_of:
            # numbered in order of appearance, so that SymPy's own ordering is the same in every run
            name = f"x{len(self.symbol_of):04d}"
            assumptions = {"positive": True} if self.positive(expr) else {"real": True}
            self.symbol_of[expr] = symbol = self.sympy.Symbol(name, **assumptions)
            self.stands_for[symbol] = expr
        return self.symbol_of[expr]

    def back(self, value: Any) -> Expr:
        s = self.sympy
        if value in self.stands_for:
            return self.stands_for[value]
        if value.is_Rational:
            return Number(Fraction(int(value.p), int(value.q)))
        if value.is_number and not value.has(*self.space.custom):
            return self._constant(value)
        if value.is_Add:
            return add(self.back(t) for t in sorted(value.args, key=self._place))
        if value.is_Mul:
            return self._product(value)
        if isinstance(value, s.exp):
            return call("exp", (self.back(value.args[0]),))
        if value.is_Pow:
            return self._power(*value.as_base_exp())
        if isinstance(value, s.log):
            return call("log", (self.back(value.args[0]),))
        if isinstance(value, self.space.minimum):
            return call("min", [self.back(a) for a in value.args])
        if isinstance(value, s.Abs):
            return call("abs", (self.back(value.args[0]),))
        name = type(value).__name__
        if self.space.classes.get(name) is not type(value):
            raise _Untranslatable(name)
        return call(name, [self.back(a) for a in value.args])

    def _constant(self, value: Any) -> Expr:
        """An irrational number: kept as a logarithm where it is one, so that nothing is rounded."""
        of = self.sympy.exp(value)
        if of.is_Rational:
            return call("log", (self.back(of),))
        return number(float(value))

    def _place(self, value: Any) -> tuple[int, str]:
        """Numbers first, then in the order in which the symbols were met."""
        met = [int(str(x)[1:]) for x in value.free_symbols]
        return (min(met) if met else -1, str(value))

    def _product(self, value: Any) -> Expr:
        top, bottom = value.as_numer_denom()
        if bottom != 1 and not bottom.is_number:
            return divide(self._factors(top), self._factors(bottom))
        return self._factors(value)

    def _factors(self, value: Any) -> Expr:
        parts = [self.back(f) for f in sorted(self.sympy.Mul.make_args(value), key=self._place)]
        vectors = [p for p in parts if not p.is_scalar]
        scalars = [p for p in parts if p.is_scalar]
        if not vectors:
            return mul(scalars)
        return mul((*scalars, hadamard(vectors) if len(vectors) > 1 else vectors[0]))

    def _power(self, base: Any, exponent: Any) -> Expr:
        of = self.back(base)
        if exponent == self.sympy.Rational(1, 2):
            return call("sqrt", (of,))
        if exponent == self.sympy.Rational(-1, 2):
            return call("rsqrt", (of,))
        if exponent == -1 and of.is_scalar:
            return divide(ONE, of)
        return power(of, self.back(exponent))


def log_form(expr: Expr, positive: Positive | None = None) -> Expr:
    """The logarithm of a positive elementwise expression, as far as possible without a ``log``.

    ``positive`` says which symbols (and opaque calls) are known to be positive; by default all, as the
    gates of a recurrence are. ``log(exp(g))`` is g, ``log(sigmoid(a)^(1/16))`` is -softplus(-a)/16; the
    logarithm of a product is spread where all factors are sure to be positive. What cannot be
    simplified stays ``log(expr)``.
    """
    t = _Translation(positive or (lambda _: True))
    s, known = t.sympy, t.space.classes
    softplus, sigmoid = known["softplus"], known["sigmoid"]

    def of_logarithm(arg: Any) -> Any:
        """log(arg) without its logarithm, where one of the stable forms fits."""
        if isinstance(arg, s.exp):
            return arg.args[0]
        if isinstance(arg, sigmoid):
            return -softplus(-arg.args[0])
        if arg.is_Add and len(arg.args) == 2 and s.S.One in arg.args:
            rest = arg - 1
            if isinstance(rest, s.exp):
                return softplus(rest.args[0])
            if isinstance(-rest, sigmoid):
                return -softplus((-rest).args[0])
        return s.log(arg)

    logarithm = s.expand_log(s.log(t.forth(expr)))
    try:
        return t.back(logarithm.replace(s.log, of_logarithm))
    except _Untranslatable:
        return call("log", (expr,))


def unary_derivative(fn: str, exponent: float | None = None) -> Expr:
    """f'(x) for a function of ``planner.ops.UNARY_FUNCTIONS``, in terms of ``Symbol("x", (1, 1), None)``.

    Built from sums, products, quotients, powers, ``min``, the elementwise functions and ``heaviside``,
    in a form that does not overflow or cancel: softplus' = sigmoid, sigmoid' = sigmoid(x) sigmoid(-x).
    ``pow`` needs its constant exponent.
    """
    t = _Translation(lambda _: False)
    x = t.forth(VARIABLE)
    if fn == "pow":
        if exponent is None:
            raise InternalError("the derivative of pow needs its exponent")
        value = x ** t.sympy.Rational(*_ratio(exponent))
    elif fn in t.space.classes:
        value = t.space.classes[fn](x)
    else:
        raise InternalError(f"no derivative is known for {fn!r}")
    return t.back(value.diff(x))


def _ratio(value: float) -> tuple[int, int]:
    if not math.isfinite(value):
        raise InternalError(f"an exponent is a finite number, got {value}")
    exact = Fraction(str(value)) if isinstance(value, float) else Fraction(value)
    return exact.numerator, exact.denominator
