"""Laws of the exact values, and their agreement with floating point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linalg_dsl.algebra.exact import Atom, Value, total

x, y, p = Value.free("x"), Value.free("y"), Value.free("p", positive=True)
ONE = Value.number(1)


def evaluate(value: Value, at: Mapping[str, float]) -> float:
    terms = value.terms.items()
    return float(sum(float(c) * math.prod(_atom(a, at) ** float(e) for a, e in t) for t, c in terms))


def _atom(atom: Atom, at: Mapping[str, float]) -> float:
    match atom.kind, atom.key:
        case "free", str() as name:
            return at[name]
        case "exp", frozenset() as term:
            return math.exp(evaluate(Value({term: Fraction(1)}), at))
        case "log", Value() as inner:
            return math.log(evaluate(inner, at))
        case "base", Value() as inner:
            return evaluate(inner, at)
        case kind, _:
            raise AssertionError(kind)


@pytest.mark.parametrize(
    "zero",
    [
        (x + y).exp() - x.exp() * y.exp(),
        x.exp().log() - x,
        (p.log() * Fraction(1, 16)).exp() - p.power(Fraction(1, 16)),
        x.function("sigmoid") + (-x).function("sigmoid") - 1,
        x.function("sigmoid").power(Fraction(1, 16)) - (-(-x).function("softplus") * Fraction(1, 16)).exp(),
        (ONE - x.function("sigmoid")).log().exp() - (-x.function("softplus")).exp(),
        x.function("logsigmoid") + (-x).function("softplus"),
        x.function("tanh").power(2) + (x * 2).function("sigmoid") * (x * -2).function("sigmoid") * 4 - 1,
        (x + y).power(-1) * (x * x - y * y) - x + y,
        (x + y).function("sqrt").power(2) - x - y,
        x.exp() * (x.exp() + y.exp()).power(-1) - (ONE + (y - x).exp()).power(-1),
        (x * 2 + 2).power(-1) * 2 - (x + 1).power(-1),
    ],
)
def test_laws_hold(zero: Value) -> None:
    assert zero.is_zero()


@pytest.mark.parametrize(
    "value",
    [x, x - y, x.exp() - x, x.function("sqrt") - x, x.function("relu") - x, (x * x).function("sqrt") - x],
)
def test_what_is_not_zero_is_not_called_so(value: Value) -> None:
    assert not value.is_zero()


@pytest.mark.parametrize(
    "fn", ["exp", "log", "sigmoid", "logsigmoid", "softplus", "tanh", "silu", "sqrt", "rsqrt"]
)
def test_functions_and_derivatives_agree_with_floating_point(fn: str) -> None:
    plain = {
        "sigmoid": lambda u: 1 / (1 + math.exp(-u)),
        "logsigmoid": lambda u: -math.log1p(math.exp(-u)),
        "softplus": lambda u: math.log1p(math.exp(u)),
        "silu": lambda u: u / (1 + math.exp(-u)),
        "rsqrt": lambda u: u**-0.5,
    }
    f = plain.get(fn) or getattr(math, fn)
    inner = x * x + y + 1
    value, at, step = inner.function(fn), {"x": 0.7, "y": 0.4}, 1e-6

    def exact(moved: float) -> float:
        return float(f((0.7 + moved) ** 2 + 1.4))

    assert evaluate(value, at) == pytest.approx(exact(0.0), rel=1e-12)
    slope = (exact(step) - exact(-step)) / (2 * step)
    assert evaluate(value.derivative("x"), at) == pytest.approx(slope, rel=1e-7)


def test_a_sign_squares_to_one_and_a_size_times_its_sign_is_the_value() -> None:
    side = (x * y).function("side")
    assert side * side == ONE
    assert side == x.function("side") * y.function("side")
    assert x.function("log_size").exp() * x.function("side") == x
    assert (p.function("log_size") + y).exp() == p * y.exp()
    assert (-x).function("abs") == x.function("abs")
    assert (x + y).function("side").power(-1) == (x + y).function("side")


@pytest.mark.parametrize(("fn", "slope"), [("relu", "heaviside"), ("abs", "sign")])
def test_derivatives_of_functions_with_corners(fn: str, slope: str) -> None:
    assert (x * y).function(fn).derivative("x") == y * (x * y).function(slope)


def test_derivatives_of_maximum_and_minimum_share_out_the_whole() -> None:
    for kind in ("maximum", "minimum"):
        value = Value.opaque(kind, x, y)
        pairs = {str(value.derivative("x")), str(value.derivative("y"))}
        assert pairs == {"compare(x, y)", "compare(y, x)"}
    assert str(Value.opaque("maximum", x, y).derivative("x")) == "compare(x, y)"
    assert str(Value.opaque("minimum", x, y).derivative("x")) == "compare(y, x)"


numbers = st.integers(-3, 3).map(Value.number)
values = st.recursive(
    st.sampled_from([x, y, p]) | numbers,
    lambda inner: (
        st.tuples(inner, inner).map(lambda v: v[0] + v[1])
        | st.tuples(inner, inner).map(lambda v: v[0] * v[1])
        | inner.map(lambda v: v.exp() if len(v.terms) < 3 else v)
    ),
    max_leaves=6,
)


@given(values, values, values)
def test_ring_laws_and_the_product_rule(a: Value, b: Value, c: Value) -> None:
    assert (a + b) * c == c * b + a * c
    assert (a - a).is_zero()
    assert total([a, b, c]) == a + b + c
    assert (a * b).derivative("x") == a.derivative("x") * b + a * b.derivative("x")
    if not b.is_zero():
        assert (a * b * b.power(-1) - a).is_zero()
