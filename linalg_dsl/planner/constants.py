"""Consts as numbers: their values, the sizes they give, and what stays a run-time number."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction

from linalg_dsl.algebra.expr import Call, Expr, Number, Power, Product, Quotient, Sum, Symbol
from linalg_dsl.algebra.rules import BIG_DIMS, is_small
from linalg_dsl.algebra.traverse import symbols, transform
from linalg_dsl.algebra.unroll import unroll
from linalg_dsl.errors import ArgumentError, DslError, InternalError
from linalg_dsl.language.spec import RecurrenceSpec

_MATH: dict[str, Callable[..., float]] = {
    "exp": math.exp,
    "log": math.log,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x > -700 else math.exp(x),
    "logsigmoid": lambda x: -math.log1p(math.exp(-x)) if x > -700 else x,
    "softplus": lambda x: math.log1p(math.exp(x)) if x < 700 else x,
    "tanh": math.tanh,
    "silu": lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
    "relu": lambda x: max(x, 0.0),
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "abs": abs,
    "sign": lambda x: float((x > 0) - (x < 0)),
    "min": min,
    "max": max,
    "clamp": lambda x, low, high: min(max(x, low), high),
}


@dataclass(frozen=True, slots=True)
class Constants:
    """``values``: the consts that are known without K and V; ``sizes``: the small dimensions."""

    values: Mapping[str, Fraction]
    sizes: Mapping[str, int]

    def substitute(self, expr: Expr, keep: Collection[str] = ()) -> Expr:
        """Puts numbers for the known consts, but for those to keep; writes out substeps."""

        def change(node: Expr) -> Expr:
            if isinstance(node, Symbol) and node.time is None and node.is_scalar and node.name not in keep:
                value = self.values.get(node.name)
                if value is not None:
                    return Number(value, span=node.span)
                if node.name in self.sizes:
                    return Number(Fraction(self.sizes[node.name]), span=node.span)
            return node

        try:
            return unroll(transform(expr, change), self.values)
        except ZeroDivisionError:
            raise DslError.single("E961", "with the given consts this divides by zero", expr.span) from None


def find_constants(spec: RecurrenceSpec, given: Mapping[str, float]) -> Constants:
    """The values of all consts that do not depend on K or V, with those given put first.

    Raises ArgumentError on an unknown name, DslError where a dimension is no positive whole number.
    """
    names = {c.name for c in spec.consts}
    for name in given:
        if name not in names:
            raise ArgumentError(f"{spec.name} has no const {name!r}; it has {sorted(names) or 'none'}")
    values: dict[str, Fraction] = {}
    for const in spec.consts:
        if const.name in given:
            if not math.isfinite(given[const.name]):
                raise ArgumentError(
                    f"{spec.name}: the const {const.name} must be finite, got {given[const.name]}"
                )
            values[const.name] = Fraction(repr(float(given[const.name])))
            continue
        try:
            value = _value(const.value, values)
        except (ValueError, OverflowError, ZeroDivisionError):
            raise DslError.single("E961", f"the const {const.name} has no finite value", const.span) from None
        if value is not None:
            values[const.name] = value
    sizes: dict[str, int] = {}
    for declared in spec.inputs:
        for dim in declared.dims:
            if not is_small(dim) or isinstance(dim, int):
                continue
            size = values.get(dim)
            if size is None or size.denominator != 1 or not 1 <= size <= 64:
                raise DslError.single(
                    "E961",
                    f"the dimension {dim} of {declared.name} must be a whole number from 1 to 64, "
                    f"got {'no value' if size is None else f'{float(size):g}'}",
                    declared.span,
                    f"declare it, as in `const {dim} = 2`",
                )
            sizes[dim] = int(size)
    _check_rows(spec, sizes, values)
    return Constants(values, sizes)


def _check_rows(spec: RecurrenceSpec, sizes: Mapping[str, int], values: Mapping[str, Fraction]) -> None:
    declared = {i.name: i.dims[0] for i in spec.inputs if i.dims}
    equations = [unroll(e.value, values) for e in (*spec.updates, *spec.outputs)]
    for symbol in (s for value in equations for s in symbols(value)):
        dim = declared.get(symbol.name)
        if not isinstance(symbol.row, int) or dim is None:
            continue
        if dim in BIG_DIMS:
            raise InternalError(f"{spec.name}: row {symbol.row + 1} of {symbol.name} lies along {dim}")
        size = dim if isinstance(dim, int) else sizes[dim]
        if symbol.row >= size:
            raise DslError.single(
                "E961",
                f"row {symbol.row + 1} of {symbol.name} is used, but {dim} is {size}",
                symbol.span,
            )


def _value(expr: Expr, known: Mapping[str, Fraction]) -> Fraction | None:
    """Exact for rational arithmetic, else to the precision of a float; None if it needs K or V."""
    if isinstance(expr, Number):
        return expr.value
    if isinstance(expr, Symbol):
        return known.get(expr.name)
    parts = [_value(c, known) for c in expr.children]
    if any(p is None for p in parts):
        return None
    numbers = [p for p in parts if p is not None]
    match expr:
        case Sum():
            return sum(numbers, Fraction(0))
        case Product():
            return math.prod(numbers, start=Fraction(1))
        case Quotient():
            return numbers[0] / numbers[1]
        case Power():
            base, exponent = numbers
            if exponent.denominator == 1 and abs(exponent) <= 64:
                return base ** int(exponent)
            return _fraction(math.pow(base, exponent))
        case Call(function, _) if function in _MATH:
            return _fraction(_MATH[function](*(float(n) for n in numbers)))
        case _:
            return None


def _fraction(value: float) -> Fraction:
    if not math.isfinite(value):
        raise OverflowError
    return Fraction(repr(float(value)))
