"""What can be proved from the declared ranges: bounds of expressions, of decays, of the solve.

Everything here is interval arithmetic over expressions in normal form (scalars and columns); a bound
holds for every element. Promises of the declaration are taken as true.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from linalg_dsl.algebra.expr import (
    ZERO,
    Call,
    Expr,
    Hadamard,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Symbol,
    Transpose,
)
from linalg_dsl.algebra.traverse import commutative_key
from linalg_dsl.language.spec import Input, Interval, RecurrenceSpec
from linalg_dsl.planner.form import Recurrence
from linalg_dsl.planner.ops import FLOOR

INF = math.inf


@dataclass(frozen=True, slots=True)
class _Range:
    """An interval with infinite ends written as such (and then open)."""

    low: float = -INF
    high: float = INF
    low_open: bool = True
    high_open: bool = True

    def __add__(self, other: _Range) -> _Range:
        return _Range(
            self.low + other.low,
            self.high + other.high,
            self.low_open or other.low_open,
            self.high_open or other.high_open,
        )

    def __mul__(self, other: _Range) -> _Range:
        ends = [
            _end_product(x, y)
            for x in ((self.low, self.low_open), (self.high, self.high_open))
            for y in ((other.low, other.low_open), (other.high, other.high_open))
        ]
        # of equal ends the closed one counts: False sorts before True
        low = min(ends)
        high = max(ends, key=lambda e: (e[0], not e[1]))
        return _Range(low[0], high[0], low[1], high[1])

    def mapped(self, f: Callable[[float], float]) -> _Range:
        """The image under an increasing function."""
        return _Range(f(self.low), f(self.high), self.low_open, self.high_open)

    def reversed(self, f: Callable[[float], float]) -> _Range:
        """The image under a decreasing function."""
        return _Range(f(self.high), f(self.low), self.high_open, self.low_open)


def _end_product(x: tuple[float, bool], y: tuple[float, bool]) -> tuple[float, bool]:
    if x[0] == 0 or y[0] == 0:
        return 0.0, (x[1] if x[0] == 0 else True) and (y[1] if y[0] == 0 else True)
    return x[0] * y[0], x[1] or y[1]


def bounds(expr: Expr, spec: RecurrenceSpec) -> Interval:
    """A range that every element of the expression is sure to lie in; ``None`` is unbounded."""
    r = _range(expr, spec)
    low = None if r.low == -INF else r.low
    high = None if r.high == INF else r.high
    return Interval(
        low, high, r.low_open if low is not None else True, r.high_open if high is not None else True
    )


def is_positive(expr: Expr, spec: RecurrenceSpec) -> bool:
    """Whether every element is sure to be > 0."""
    r = _range(expr, spec)
    return r.low > 0 or (r.low == 0 and r.low_open)


def is_unit(expr: Expr, spec: RecurrenceSpec) -> bool:
    """Whether a column is sure to have a Euclidean norm of at most 1."""
    match expr:
        case Symbol():
            declared = _declared(expr, spec)
            return declared is not None and declared.unit
        case Call("l2norm", _) | Call("softmax", _):
            return True
        case Product(factors):
            vectors = [f for f in factors if not f.is_scalar]
            scalars = [f for f in factors if f.is_scalar]
            return (
                len(vectors) == 1 and is_unit(vectors[0], spec) and all(_within_one(s, spec) for s in scalars)
            )
        case Hadamard(factors):
            return any(
                is_unit(f, spec) and all(_within_one(g, spec) for g in factors if g is not f) for f in factors
            )
        case _:
            return False


def log_decay_bound(rec: Recurrence, spec: RecurrenceSpec) -> float | None:
    """The smallest c that is sure to give -c <= log decay <= 0 at every step, or None."""
    common = _range(rec.decay.log, spec) + _range(rec.value_decay.log, spec)
    gates = [ZERO] if rec.stack is None else [gate.log for gate in rec.stack.gates]
    own = [_range(log, spec) for log in gates]
    channels = () if rec.stack is None else rec.stack.channels
    own = [x + _range(c.log, spec) for x, c in zip(own, channels, strict=True)] if channels else own
    r = _Range(min(x.low for x in own), max(x.high for x in own)) + common
    return -r.low if r.low > -INF and r.high <= 0 else None


def decay_is_at_most_one(rec: Recurrence, spec: RecurrenceSpec) -> bool:
    """Whether no decay, of either axis or of any of several states, is sure ever to grow a state."""
    return all(_range(d.log, spec).high <= 0 for d in rec.decays)


def solve_is_bounded(rec: Recurrence, spec: RecurrenceSpec) -> bool:
    """Whether every transition is sure to be a contraction, which bounds T by |Σ|.

    Proved for one erase along its own left vector k with |k| <= 1 and a decay in [0, 1]: the decayed
    state is contracted by I + σ k kᵀ for σ in [-2, 0], and D + σ k kᵀ is a contraction for σ in [-1, 0].
    Without erases there is nothing to solve.
    """
    if rec.r == 0:
        return True
    if rec.r != 1 or rec.m != 1 or rec.stack is not None or not decay_is_at_most_one(rec, spec):
        return False
    left, erase, sigma = rec.left[0], rec.erase[0], rec.sigma[0][0]
    if commutative_key(left) != commutative_key(erase) or not is_unit(left, spec):
        return False
    r = _range(sigma, spec)
    lowest = -2.0 if rec.erase_read == "decayed" or rec.decay.kind == "none" else -1.0
    return r.low >= lowest and r.high <= 0


def _within_one(expr: Expr, spec: RecurrenceSpec) -> bool:
    r = _range(expr, spec)
    return r.low >= -1 and r.high <= 1


def _declared(symbol: Symbol, spec: RecurrenceSpec) -> Input | None:
    return next((i for i in spec.inputs if i.name == symbol.name), None)


def _range(expr: Expr, spec: RecurrenceSpec) -> _Range:
    match expr:
        case Number(value):
            return _Range(float(value), float(value), False, False)
        case Symbol():
            return _symbol(expr, spec)
        case Sum(terms):
            found = _range(terms[0], spec)
            for term in terms[1:]:
                found = found + _range(term, spec)
            return found
        case Product(factors) | Hadamard(factors):
            if isinstance(expr, Product) and sum(not f.is_scalar for f in factors) > 1:
                return _Range()  # an inner product: not in normal form
            found = _Range(1.0, 1.0, False, False)
            counts = Counter(commutative_key(f) for f in factors)
            for factor in {commutative_key(f): f for f in factors}.values():
                found = found * _power(_range(factor, spec), float(counts[commutative_key(factor)]))
            return found
        case Quotient(top, bottom):
            return _range(top, spec) * _inverse(_range(bottom, spec))
        case Power(base, Number(exponent)):
            return _power(_range(base, spec), float(exponent))
        case Power(base, exponent):
            # b^x = exp(x log b), real only for b > 0
            return (_range(exponent, spec) * _log(_range(base, spec))).mapped(_exp)
        case Transpose(arg):
            return _range(arg, spec)
        case Call(function, args):
            return _call(function, args, spec)
        case _:
            return _Range()


def _symbol(symbol: Symbol, spec: RecurrenceSpec) -> _Range:
    declared = _declared(symbol, spec)
    if declared is None:
        for const in spec.consts:
            if const.name == symbol.name:
                return _range(const.value, spec)
        return _Range(1.0, INF, False, True) if symbol.name in ("K", "V") else _Range()
    low, high = declared.range.low, declared.range.high
    low_open, high_open = declared.range.low_open, declared.range.high_open
    if declared.range == Interval():
        match declared.kind:
            case "log_gate":
                high, high_open = 0.0, False
            case "gate":
                low, high, high_open = 0.0, 1.0, False
    if declared.unit:
        if low is None or low < -1:
            low, low_open = -1.0, False
        if high is None or high > 1:
            high, high_open = 1.0, False
    return _Range(
        -INF if low is None else low,
        INF if high is None else high,
        low is None or low_open,
        high is None or high_open,
    )


def _call(function: str, args: tuple[Expr, ...], spec: RecurrenceSpec) -> _Range:
    if function == "dot":
        return _dot(args[0], args[1], spec)
    x = _range(args[0], spec)
    match function:
        case "exp":
            return x.mapped(_exp)
        case "log":
            return _log(x)
        case "sigmoid":
            return x.mapped(lambda a: 1 / (1 + _exp(-a)))
        case "logsigmoid":
            return x.mapped(lambda a: -_softplus(-a))
        case "log_size":
            return _larger(_log(_call_abs(x)), _log(_Range(FLOOR, FLOOR, False, False)))
        case "softplus":
            return x.mapped(_softplus)
        case "tanh":
            return x.mapped(math.tanh)
        case "relu":
            return _clip(x, 0.0, INF)
        case "elu":
            return x.mapped(lambda a: a if a > 0 else math.expm1(a))
        case "sqrt":
            return _power(x, 0.5)
        case "rsqrt":
            return _power(x, -0.5)
        case "silu":
            return _Range(-0.2785, max(x.high, 0.0), False, False) if x.low < 0 else _Range(0.0, INF, False)
        case "abs":
            return _call_abs(x)
        case "sign":
            low = 1.0 if x.low > 0 or (x.low == 0 and x.low_open) else 0.0 if x.low >= 0 else -1.0
            high = -1.0 if x.high < 0 or (x.high == 0 and x.high_open) else 0.0 if x.high <= 0 else 1.0
            return _Range(low, high, False, False)
        case "min":
            return _smaller(x, _range(args[1], spec))
        case "max":
            return _larger(x, _range(args[1], spec))
        case "clamp":
            return _smaller(_larger(x, _range(args[1], spec)), _range(args[2], spec))
        case "sum":
            # of one element or more
            return _Range(
                x.low if x.low >= 0 else -INF, x.high if x.high <= 0 else INF, x.low_open, x.high_open
            )
        case "l2norm":
            return _Range(-1.0, 1.0)
        case "softmax":
            return _Range(0.0, 1.0, True, False)
        case _:
            return _Range()


def _dot(x: Expr, y: Expr, spec: RecurrenceSpec) -> _Range:
    square = commutative_key(x) == commutative_key(y)
    low = 0.0 if square else -INF
    if is_unit(x, spec) and is_unit(y, spec):
        return _Range(0.0 if square else -1.0, 1.0, False, False)
    a, b = _range(x, spec), _range(y, spec)
    if (a * b).low >= 0:
        low = 0.0
    return _Range(low, INF, low == -INF, True)


def _exp(x: float) -> float:
    return INF if x > 709 else math.exp(x)


def _softplus(x: float) -> float:
    return x if x > 36 else math.log1p(_exp(x))


def _log(x: _Range) -> _Range:
    if x.low < 0:
        return _Range(high=math.log(x.high) if 0 < x.high < INF else INF, high_open=x.high_open)
    return x.mapped(lambda a: -INF if a <= 0 else INF if a == INF else math.log(a))


def _inverse(x: _Range) -> _Range:
    if x.low > 0 or (x.low == 0 and x.high > 0):
        return x.reversed(lambda a: INF if a == 0 else 1 / a)
    if x.high < 0 or (x.high == 0 and x.low < 0):
        return x.reversed(lambda a: -INF if a == 0 else 1 / a)
    return _Range()


def _power(x: _Range, exponent: float) -> _Range:
    if exponent < 0:
        return _inverse(_power(x, -exponent))
    if exponent == int(exponent) and x.low < 0:
        if int(exponent) % 2:
            return x.mapped(lambda a: _real_power(a, exponent))
        size = _call_abs(x)
        return size.mapped(lambda a: _real_power(a, exponent))
    low = _Range(max(x.low, 0.0), x.high, x.low_open and x.low >= 0, x.high_open)
    return low.mapped(lambda a: _real_power(max(a, 0.0), exponent))


def _call_abs(x: _Range) -> _Range:
    if x.low >= 0:
        return x
    if x.high <= 0:
        return x.reversed(lambda a: -a)
    return _Range(0.0, max(-x.low, x.high), False, False)


def _real_power(a: float, exponent: float) -> float:
    try:
        return math.copysign(abs(a) ** exponent, a) if int(exponent) % 2 else abs(a) ** exponent
    except OverflowError:
        return math.copysign(INF, a)


def _clip(x: _Range, low: float, high: float) -> _Range:
    end = _Range(low, high, low == -INF, high == INF)
    return _smaller(_larger(x, _Range(low, low, False, False)), _Range(end.high, end.high, True, True))


def _smaller(x: _Range, y: _Range) -> _Range:
    low = min((x.low, x.low_open), (y.low, y.low_open))
    high = min((x.high, not x.high_open), (y.high, not y.high_open))
    return _Range(low[0], high[0], low[1], not high[1])


def _larger(x: _Range, y: _Range) -> _Range:
    low = max((x.low, x.low_open), (y.low, y.low_open))
    high = max((x.high, not x.high_open), (y.high, not y.high_open))
    return _Range(low[0], high[0], low[1], not high[1])
