from __future__ import annotations

import pytest

from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.printer import show_expr
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.form import Decay

HEAD = """recurrence test
input q : [K]
input k : [K] unit
input v : [V]
input g : log gate
input h : log gate [K]
input f : gate [K]
input e : [K] in (0, 1)
input a, b : scalar
input c : [K]
param mu : scalar in (0, 1)
param nu : log gate
"""


def decay(gate: str) -> Decay:
    text = f"{HEAD}S_t = {gate} S_{{t-1}} + k_t v_tᵀ\no_t = S_tᵀ q_t\n"
    return canonicalise(parse(text)).recurrences[0].decay


@pytest.mark.parametrize(
    ("gate", "kind", "log"),
    [
        ("I", "none", "0"),
        ("exp(g_t)", "scalar", "g_t"),
        ("exp(g_t) exp(nu)", "scalar", "g_t + nu"),
        ("mu", "scalar", "log(mu)"),
        ("diag(f_t)", "channel", "log(f_t)"),
        ("diag(f_t) diag(exp(h_t)) mu", "channel", "log(mu) + log(f_t) + h_t"),
        ("diag(f_t^(1/16))", "channel", "1/16 log(f_t)"),
        ("diag(sqrt(sigmoid(c_t)))", "channel", "-0.5 softplus(-c_t)"),
        ("(1 - sigmoid(a_t))", "scalar", "-softplus(a_t)"),
        ("exp(-exp(a_t) softplus(b_t))", "scalar", "-exp(a_t) softplus(b_t)"),
        ("diag(1 - e_t)", "channel", "log(1 - e_t)"),
        ("diag(1 - e_t ⊙ k_t ⊙ k_t)", "channel", "log(1 - e_t ⊙ k_t^2)"),
        ("(diag(e_t) + mu I)", "channel", "log(e_t + mu)"),
        ("(diag(f_t) - diag(f_t ⊙ e_t))", "channel", "log(f_t) + log(1 - e_t)"),
        ("(diag(exp(h_t)) - mu diag(exp(h_t)))", "channel", "log(1 - mu) + h_t"),
        ("diag(0.1 + 0.9 sigmoid(c_t))", "channel", "log(0.1 + 0.9 sigmoid(c_t))"),
        ("diag(exp(h_t)) / (1 + exp(a_t))", "channel", "-softplus(a_t) + h_t"),
        ("2", "scalar", "log(2)"),
        ("0.5 exp(g_t)", "scalar", "log(0.5) + g_t"),
        ("diag(max(c_t, 0.5))", "channel", "log(max(c_t, 0.5))"),
        ("exp(-5 sigmoid(a_t))", "scalar", "-5 sigmoid(a_t)"),
    ],
)
def test_the_log_of_the_gate(gate: str, kind: str, log: str) -> None:
    found = decay(gate)
    assert found.kind == kind
    assert show_expr(found.log) == log


@pytest.mark.parametrize(
    "gate",
    [
        "a_t",
        "diag(c_t)",
        "(1 - diag(f_t))",
        "-1",
        "(exp(g_t) - 1)",
        "diag(k_t)",
        "relu(a_t)",
        "tanh(a_t)",
        "a_t^2",
    ],
)
def test_a_gate_that_may_not_be_positive_is_refused(gate: str) -> None:
    with pytest.raises(DslError) as caught:
        decay(gate)
    (mistake,) = caught.value.mistakes
    assert mistake.code == "E956"
    assert mistake.span is not None
    assert mistake.hint is not None
