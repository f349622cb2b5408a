from __future__ import annotations

import pytest

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
        ("(1 - diag(f_t))", "channel", "log_size(1 - f_t)"),
        ("relu(a_t)", "scalar", "log_size(relu(a_t))"),
        ("a_t^2", "scalar", "log_size(a_t^2)"),
    ],
)
def test_the_log_of_the_gate(gate: str, kind: str, log: str) -> None:
    found = decay(gate)
    assert found.kind == kind
    assert show_expr(found.log) == log
    assert not found.signed


@pytest.mark.parametrize(
    ("gate", "log", "signed"),
    [
        ("a_t", "log_size(a_t)", ["a_t"]),
        ("diag(c_t) exp(g_t)", "g_t + log_size(c_t)", ["c_t"]),
        ("-1", "0", ["-1"]),
        ("-0.5", "log(0.5)", ["-0.5"]),
        ("(exp(g_t) - 1)", "log_size(exp(g_t) - 1)", ["exp(g_t) - 1"]),
        ("diag(k_t) tanh(a_t) mu", "log_size(tanh(a_t)) + log(mu) + log_size(k_t)", ["tanh(a_t)", "k_t"]),
    ],
)
def test_a_gate_that_may_be_negative_has_a_size_and_a_sign(gate: str, log: str, signed: list[str]) -> None:
    found = decay(gate)
    assert show_expr(found.log) == log
    assert [show_expr(x) for x in found.signed] == signed
