from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import ALL

from linalg_dsl.algebra.expr import (
    SCALAR,
    Expr,
    Quotient,
    Symbol,
    add,
    call,
    divide,
    hadamard,
    mul,
    negate,
    number,
    power,
)
from linalg_dsl.algebra.factors import split_number
from linalg_dsl.algebra.traverse import walk
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import Interval, RecurrenceSpec
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.evaluate_tokens import evaluate
from linalg_dsl.planner.form import Recurrence
from linalg_dsl.planner.stability import (
    bounds,
    decay_is_at_most_one,
    is_positive,
    is_unit,
    log_decay_bound,
    solve_is_bounded,
)

SPEC = parse("""recurrence test
input q : [K]
input k : [K] unit
input v : [V]
input g : log gate
input f : gate [K]
input e : gate [K] in (0, 1)
input beta : scalar in (0, 2)
input x : scalar in [-1, 3]
input y : scalar
input z : scalar >= 1
S_t = S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
""")


def read(text: str) -> Expr:
    """A scalar or vector expression over the inputs above, in normal form."""
    body = SPEC_LINES + f"b_t = {text}\nS_t = S_{{t-1}} + k_t v_tᵀ\no_t = S_tᵀ (b_t k_t)\n"
    (found,) = canonicalise(parse(body)).recurrences[0].reads
    return mul((found.scale, *(f for f in found.query.children if f.is_scalar)))


SPEC_LINES = """recurrence test
input q : [K]
input k : [K] unit
input v : [V]
input g : log gate
input beta : scalar in (0, 2)
input x : scalar in [-1, 3]
input y : scalar
input z : scalar >= 1
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exp(g_t)", Interval(0, 1, True, False)),
        ("sigmoid(y_t)", Interval(0, 1)),
        ("2 sigmoid(y_t)", Interval(0, 2)),
        ("softplus(y_t)", Interval(0, None)),
        ("-softplus(y_t) / 16", Interval(None, 0)),
        ("tanh(y_t)", Interval(-1, 1)),
        ("(1 - beta_t)", Interval(-1, 1)),
        ("x_t^2", Interval(0, 9, False, False)),
        ("x_t^3", Interval(-1, 27, False, False)),
        ("abs(x_t)", Interval(0, 3, False, False)),
        ("relu(x_t)", Interval(0, 3, False, False)),
        ("min(x_t, beta_t)", Interval(-1, 2, False, True)),
        ("max(x_t, beta_t)", Interval(0, 3, True, False)),
        ("clamp(y_t, 0, 1)", Interval(0, 1, False, False)),
        ("sqrt(z_t)", Interval(1, None, False)),
        ("rsqrt(z_t)", Interval(0, 1, True, False)),
        ("(1 / z_t)", Interval(0, 1, True, False)),
        ("(1 / x_t)", Interval()),
        ("log(z_t)", Interval(0, None, False)),
        ("x_t beta_t", Interval(-2, 6)),
        ("k_tᵀ k_t", Interval(0, 1, False, False)),
        ("q_tᵀ q_t", Interval(0, None, False)),
        ("q_tᵀ k_t", Interval()),
        ("sign(z_t)", Interval(1, 1, False, False)),
        ("z_t^x_t", Interval(0, None)),
        ("elu(y_t)", Interval(-1, None)),
    ],
)
def test_bounds(text: str, expected: Interval) -> None:
    found = bounds(read(text), SPEC)
    assert (found.low, found.high) == (expected.low, expected.high)
    if expected.low is not None:
        assert found.low_open == expected.low_open
    if expected.high is not None:
        assert found.high_open == expected.high_open


LEAVES = [Symbol(n, SCALAR) for n in ("beta", "x", "y", "z", "g")]
UNARY = ("exp", "sigmoid", "logsigmoid", "softplus", "tanh", "silu", "relu", "elu", "abs", "sign")


def _grown(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.one_of(
        st.builds(lambda f, x: call(f, (x,)), st.sampled_from(UNARY), inner),
        st.builds(lambda x, y: add((x, y)), inner, inner),
        st.builds(lambda x, y: add((x, negate(y))), inner, inner),
        st.builds(lambda x, y: mul((x, y)), inner, inner),
        st.builds(lambda x, y: divide(x, y), inner, inner.filter(lambda e: split_number(e)[0] != 0)),
        st.builds(lambda f, x, y: call(f, (x, y)), st.sampled_from(("min", "max")), inner, inner),
        st.builds(lambda x, e: power(x, number(e)), inner, st.sampled_from((2, 3))),
    )


EXPRESSIONS = st.recursive(
    st.one_of(st.sampled_from(LEAVES), st.integers(-2, 3).map(number)), _grown, max_leaves=6
)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, st.integers(0, 2**31))
def test_bounds_hold_for_values_in_the_declared_ranges(expr: Expr, seed: int) -> None:
    r = torch.rand(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    values = {
        "beta": 2 * r[0], "x": 4 * r[1] - 1, "y": 20 * r[2] - 10, "z": 1 + 5 * r[3], "g": -5 * r[4],
    }  # fmt: skip
    for name, ends in (("x", (-1.0, 3.0)), ("z", (1.0, 1.0)), ("g", (0.0, 0.0))):
        values[name][0], values[name][1] = ends
    result = evaluate(expr, lambda s: values[s.name]).expand(64)
    meant = result.isfinite()
    for node in walk(expr):  # nothing is promised about a division by zero
        if isinstance(node, Quotient):
            meant = meant & (evaluate(node.denominator, lambda s: values[s.name]) != 0)
    result = result[meant]
    found = bounds(expr, SPEC)
    slack = 1e-9 * (1 + result.abs())
    assert found.low is None or (result >= found.low - slack).all()
    assert found.high is None or (result <= found.high + slack).all()


def test_positive() -> None:
    assert is_positive(read("exp(g_t)"), SPEC)
    assert is_positive(read("sigmoid(y_t)^(1/16)"), SPEC)
    assert not is_positive(read("relu(y_t)"), SPEC)
    e, f = Symbol("e", ("K", 1)), Symbol("f", ("K", 1))
    assert is_positive(f, SPEC)
    assert is_positive(add((number(1), negate(e))), SPEC)
    assert not is_positive(add((number(1), negate(f))), SPEC)


def test_unit() -> None:
    k, q, e = (Symbol(n, ("K", 1)) for n in "kqe")
    assert is_unit(k, SPEC)
    assert is_unit(call("l2norm", (q,)), SPEC)
    assert is_unit(hadamard((e, k)), SPEC)
    assert is_unit(mul((call("tanh", (Symbol("y", SCALAR),)), k)), SPEC)
    assert not is_unit(q, SPEC)
    assert not is_unit(mul((Symbol("beta", SCALAR), k)), SPEC)
    assert not is_unit(hadamard((q, k)), SPEC)


def _form(lines: str) -> tuple[Recurrence, RecurrenceSpec]:
    spec = parse(f"recurrence test\n{lines}\no_t = S_tᵀ q_t\n")
    return canonicalise(spec).recurrences[0], spec


INPUTS = "input q, p : [K]\ninput k : [K] unit\ninput v : [V]\n"


@pytest.mark.parametrize(
    ("lines", "bounded"),
    [
        ("input beta : scalar in (0, 2)\nS_t = (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ", True),
        ("input beta : scalar in (0, 3)\nS_t = (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ", False),
        ("input beta : scalar\nS_t = (I - 2 sigmoid(beta_t) k_t k_tᵀ) S_{t-1} + k_t v_tᵀ", True),
        ("input beta : scalar in (0, 2)\nS_t = (I + beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ", False),
        ("input beta : scalar in (0, 2)\nS_t = (I - beta_t p_t p_tᵀ) S_{t-1} + beta_t p_t v_tᵀ", False),
        (
            "input beta : scalar in (0, 2)\np̂_t = l2norm(p_t)\n"
            "S_t = (I - beta_t p̂_t p̂_tᵀ) S_{t-1} + beta_t p̂_t v_tᵀ",
            True,
        ),
        ("input beta : scalar in (0, 2)\nS_t = (I - beta_t k_t p_tᵀ) S_{t-1} + beta_t k_t v_tᵀ", False),
        (
            "input g : log gate\ninput beta : scalar in (0, 2)\n"
            "S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ",
            True,
        ),
        (
            "input g : log gate in (-inf, 2]\ninput beta : scalar in (0, 2)\n"
            "S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ",
            False,
        ),
        (
            "input g : log gate\ninput beta : scalar in (0, 2)\n"
            "S_t = (exp(g_t) I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ",
            False,
        ),
        (
            "input g : log gate\ninput beta : scalar in (0, 1)\n"
            "S_t = (exp(g_t) I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ",
            True,
        ),
        ("S_t = S_{t-1} + k_t v_tᵀ", True),
        ("S_t = (I + p_t k_tᵀ) S_{t-1} + k_t v_tᵀ", False),
    ],
)
def test_solve_is_bounded(lines: str, bounded: bool) -> None:
    assert solve_is_bounded(*_form(INPUTS + lines)) is bounded


def test_a_bounded_solve_has_contractions_only() -> None:
    """The proved cases, numerically: the transition never grows a state."""
    torch.manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(200, 6, dtype=torch.float64), dim=-1) * torch.rand(200, 1)
    decay = torch.diag_embed(torch.rand(200, 6, dtype=torch.float64))
    outer = k.unsqueeze(-1) * k.unsqueeze(-2)
    beta = torch.rand(200, 1, 1, dtype=torch.float64)
    erase_decayed = (torch.eye(6, dtype=torch.float64) - 2 * beta * outer) @ decay
    assert torch.linalg.matrix_norm(erase_decayed, 2).max() <= 1 + 1e-12
    assert torch.linalg.matrix_norm(decay - beta * outer, 2).max() <= 1 + 1e-12


def test_log_decay_bound() -> None:
    assert log_decay_bound(*_form(INPUTS + "S_t = S_{t-1} + k_t v_tᵀ")) == 0.0
    assert log_decay_bound(*_form(INPUTS + "input g : log gate\nS_t = exp(g_t) S_{t-1} + k_t v_tᵀ")) is None
    safe = INPUTS + "input a : [K]\nS_t = diag(exp(-5 sigmoid(a_t))) S_{t-1} + k_t v_tᵀ"
    assert log_decay_bound(*_form(safe)) == 5.0
    wide = INPUTS + "input g : log gate in [-3, 1]\nS_t = exp(g_t) S_{t-1} + k_t v_tᵀ"
    assert log_decay_bound(*_form(wide)) is None
    half = INPUTS + "S_t = 0.5 S_{t-1} + k_t v_tᵀ"
    assert log_decay_bound(*_form(half)) == pytest.approx(math.log(2))


def test_decay_is_at_most_one() -> None:
    for name, expected in (
        ("gla", True),
        ("retnet", True),
        ("sigmoid_gla", True),
        ("linear_attention", True),
    ):
        spec = parse(ALL[name].text(name))
        assert decay_is_at_most_one(canonicalise(spec).recurrences[0], spec) is expected
    growing = INPUTS + "input g : scalar\nS_t = exp(g_t) S_{t-1} + k_t v_tᵀ"
    assert not decay_is_at_most_one(*_form(growing))
