"""What is printed reads as mathematics, and reads back."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Expr
from linalg_dsl.language.parser import parse
from linalg_dsl.language.printer import show_expr, show_spec
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.testing.strategies_exprs import (
    K1,
    KK,
    KV,
    V1,
    expressions,
    specs_of_one_state,
    specs_of_several_states,
)

HEAD = """recurrence r
const n = 2
const scale = 1 / sqrt(K)
input q, k_tilde, f, α : [K]
input v : [V]
input g, beta, x1 : scalar
input kk : [n, K]
input vv : [2, V]
input bb, gn : [n]
input Mk : [K, K]
input X, gx : [K, V]
input gv : [V]
param A : [K, V]
param u : [K]
param gamma : scalar
"""
SLOW = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def reread(text: str) -> Expr:
    """The expression that a text stands for, beside the state so that any shape is allowed."""
    spec = parse(HEAD + f"e_t = {text}\nS_t = S_{{t-1}} + q_t v_tᵀ\no_t = S_tᵀ q_t")
    return spec.written[0].value


@SLOW
@given(
    st.sampled_from([ex.SCALAR, K1, V1, KK, KV, (1, "K"), ("V", "K")]).flatmap(lambda s: expressions(s, 3))
)
def test_an_expression_reads_back(expr: Expr) -> None:
    assert reread(show_expr(expr)) == expr


@SLOW
@given(st.one_of(specs_of_one_state(), specs_of_several_states()))
def test_a_spec_reads_back(spec: RecurrenceSpec) -> None:
    again = parse(show_spec(spec))
    assert again == spec
    assert show_spec(again) == show_spec(spec)


@pytest.mark.parametrize(
    "text",
    [
        "exp(g_t) (I - beta_t q_t q_tᵀ)",
        "beta_t q_t v_tᵀ",
        "q_t ⊙ u",
        "(q_t ⊙ u)ᵀ",
        "(beta_t q_t) ⊙ u",
        "1 / beta_t",
        "-1 / beta_t",
        "3 / beta_t",
        "2 g_t / beta_t",
        "2 g_t (x1_t / beta_t)",
        "-(g_t + x1_t) beta_t",
        "-g_t - x1_t",
        "(g_t + x1_t) / (beta_t gamma)",
        "g_t / beta_t / x1_t",
        "g_t - 0.5 x1_t",
        "1/3 g_t",
        "q_t^2",
        "(beta_t g_t)^(1/16)",
        "0.5^(g_t)",
        "(1/3)^(g_t)",
        "2 (3^(g_t))",
        "diag(exp(α_t))",
        "clamp(g_t, -1, 0)",
        "kk_{t,1}",
        "kk_{t,2}ᵀ",
        "exp(q_t)ᵀ",
        "(q_t^2)ᵀ",
        "1e-07 g_t",
        "I + q_t uᵀ",
        "beta_t I + q_t uᵀ",
        "q_tᵀ u q_t v_tᵀ",
        "1 - f_t",
    ],
)
def test_text_in_its_printed_form_stays_as_it_is(text: str) -> None:
    assert show_expr(reread(text)) == text


def test_a_spec_prints_as_its_text() -> None:
    text = """\
# Gated delta rule.
recurrence gated_delta_rule

input q     : [K]
input k     : [K] unit
input v     : [V]
input g     : log gate
input a     : log gate [K] in (-inf, inf)
input beta  : scalar in (0, 2)
input f     : gate >= 0.5
param gamma : scalar in [0, 1)
const scale = 1 / sqrt(K)
state S : [K, V] = 0.5
output y

M_t = exp(g_t) (I - beta_t k_t k_tᵀ)
S_t = M_t S_{t-1} + beta_t k_t v_tᵀ
y_t = scale S_tᵀ q_t
"""
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("bound", "plain"),
    [
        ("R_t = g_t S_{t-1}\nS_t = R_t - f_t (R_tᵀ (beta_t f_t) - v_t)ᵀ",
         "S_t = g_t S_{t-1} - f_t ((g_t S_{t-1})ᵀ (beta_t f_t) - v_t)ᵀ"),
        ("M_t = g_t (I - beta_t q_t f_tᵀ)\nS_t = (S_{t-1}ᵀ M_tᵀ)ᵀ + f_t v_tᵀ",
         "S_t = g_t (I - beta_t q_t f_tᵀ) S_{t-1} + f_t v_tᵀ"),
        ("z_t = f_t - q_t\nS_t = S_{t-1} - z_t ((-1 z_t)ᵀ S_{t-1}) + f_t v_tᵀ",
         "S_t = S_{t-1} + (f_t - q_t) ((f_t - q_t)ᵀ S_{t-1}) + f_t v_tᵀ"),
        ("z_t = -f_t - q_t\nS_t = S_{t-1} + (g_t * (z_t / x1_t)) v_tᵀ",
         "S_t = S_{t-1} - (g_t * ((f_t + q_t) / x1_t)) v_tᵀ"),
        ("c_t = f_tᵀ q_t\nS_t = S_{t-1} + (v_t (q_t c_t)ᵀ)ᵀ",
         "S_t = S_{t-1} + (v_t (q_t (f_tᵀ q_t))ᵀ)ᵀ"),
    ],
)  # fmt: skip
def test_scalars_have_no_place_in_a_product(bound: str, plain: str) -> None:
    """With and without bindings, and read back, a recurrence is the same wherever its scalars end up."""
    first, second = (parse(HEAD + body + "\no_t = S_tᵀ q_t") for body in (bound, plain))
    assert first == second
    assert hash(first) == hash(second)
    assert parse(show_spec(first)) == first
    other = parse(HEAD + plain.replace("v_tᵀ", "2 v_tᵀ").replace("v_t)", "2 v_t)").replace("v_t (", "2 v_t (")
                  + "\no_t = S_tᵀ q_t")  # fmt: skip
    assert first != other
