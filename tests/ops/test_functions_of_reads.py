"""An output that does more than read its state: the read keeps its chunk form, the rest steps on tokens."""

from __future__ import annotations

import pytest
import torch

import linalg_dsl
from linalg_dsl.language.parser import parse
from linalg_dsl.planner.split import split

HEAD = """recurrence reads
input q, k : [K]
input v, w : [V]
input g    : log gate
input beta : scalar in (0, 1)
S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t (v_t - w_t)ᵀ
"""
CHUNKED = {
    "w_t ⊙ silu(S_tᵀ q_t)": 1,
    "l2norm(S_tᵀ q_t)": 1,
    "softmax(S_t w_t)": 1,
    "w_tᵀ S_tᵀ q_t": 1,
    "S_tᵀ S_t w_t": 2,
    "S_tᵀ q_t / (1 + abs(w_tᵀ S_{t-1}ᵀ q_t))": 1,
}


@pytest.mark.parametrize("read", CHUNKED)
def test_what_is_done_with_a_read_is_a_step_after_chunks(read: str) -> None:
    op = linalg_dsl.compile(f"{HEAD}o_t = {read}\n", backend="torch", chunk_size=8)
    assert len(op.plan.stages) == CHUNKED[read]
    assert "scalar gate + rank 1 → chunk kernels" in str(op.plan.explain())
    assert op.check(B=1, T=21, H=2, K=5, V=4, dtype=torch.float64).ok


def test_what_has_no_chunk_form_stays_in_one_kernel() -> None:
    head = HEAD.replace("exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1}", "(k_t w_tᵀ + exp(g_t)) ⊙ S_{t-1}")
    assert split(parse(f"{head}o_t = tanh(S_tᵀ q_t)\n")).is_whole
    assert split(parse(f"{HEAD}o_t = w_t ⊙ (S_tᵀ q_t) + v_t\n")).is_whole
