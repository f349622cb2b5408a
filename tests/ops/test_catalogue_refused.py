"""Published rules that get no kernel: the error quotes the term that is in the way and names what is near."""

from __future__ import annotations

import pytest

import linalg_dsl
from linalg_dsl.errors import DslError

HEAD = "input q, k : [K]\ninput v : [V]\ninput eta : scalar in (0, 1)\n"
REFUSED = {
    # M2RNN, arXiv 2603.14360: tanh of the state
    "m2rnn": (
        "input f : gate in (0, 1)\nparam W : [V, V]\n"
        "S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W + k_t v_tᵀ)\no_t = S_tᵀ q_t",
        "E405",
        "tanh(S_{t-1} W + k_t v_tᵀ)",
    ),
    # TTT-Linear, arXiv 2407.04620, with a norm inside the loss
    "ttt_norm": (
        "S_t = S_{t-1} - eta_t k_t (l2norm(S_{t-1}ᵀ k_t) - v_t)ᵀ\no_t = S_tᵀ q_t",
        "E405",
        "l2norm(S_{t-1}ᵀ k_t)",
    ),
    # MIRAS, arXiv 2504.13173: the gradient of an l1 loss
    "absolute_loss": (
        "S_t = S_{t-1} - eta_t k_t sign(S_{t-1}ᵀ k_t - v_t)ᵀ\no_t = S_tᵀ q_t",
        "E405",
        "sign(S_{t-1}ᵀ k_t - v_t)",
    ),
    # VLA, arXiv 2605.11196: an inverse covariance by Sherman and Morrison
    "inverse_covariance": (
        "state P : [K, K]\nstate S : [K, V]\nu_t = P_{t-1} k_t\nP_t = P_{t-1} - u_t u_tᵀ / (1 + k_tᵀ u_t)\n"
        "S_t = S_{t-1} + u_t (v_t - S_{t-1}ᵀ k_t)ᵀ / (1 + k_tᵀ u_t)\no_t = S_tᵀ q_t",
        "E405",
        "u_t u_tᵀ",
    ),
    # Atlas, arXiv 2505.23735: a step of Newton and Schulz on the momentum
    "orthogonalised_step": (
        "state M : [K, V]\nstate S : [K, V]\nM_t = M_{t-1} - k_t (S_{t-1}ᵀ k_t - v_t)ᵀ\n"
        "S_t = S_{t-1} + eta_t M_t M_tᵀ M_t\no_t = S_tᵀ q_t",
        "E405",
        "eta_t M_t M_tᵀ M_t",
    ),
    # MesaNet, arXiv 2506.05233, and Gated KalmaNet, arXiv 2511.21016: a solve at the read
    "solve_at_the_read": (
        "state H : [K, K]\nstate G : [K, V]\nH_t = eta_t H_{t-1} + k_t k_tᵀ\nG_t = eta_t G_{t-1} + k_t v_tᵀ\n"
        "o_t = G_tᵀ (H_t^(-1) q_t)",
        "E306",
        "H_t^(-1)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_without_a_kernel_is_refused_with_the_term_that_is_in_the_way(name: str) -> None:
    lines, code, term = REFUSED[name]
    with pytest.raises(DslError) as caught:
        linalg_dsl.compile(f"recurrence {name}\n{HEAD}{lines}\n")
    assert caught.value.mistakes[0].code == code
    _, quoted, carets, *_ = str(caught.value).splitlines()
    assert quoted[carets.index("^") : carets.rindex("^") + 1] == term
