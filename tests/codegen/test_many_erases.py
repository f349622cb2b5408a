"""Three and more erases a token: their transform has a prep of its own, in one tile."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TEXTS, assert_close, errors

import linalg_dsl as ld
from linalg_dsl.codegen.schedule.alone import stands_alone
from linalg_dsl.codegen.schedule.call_shape import CallShape
from linalg_dsl.codegen.schedule.describe import kernel_schedule
from linalg_dsl.codegen.targets import find_target
from linalg_dsl.ops.draw import draw, draw_state

MANY = {
    "four_rows": """
recurrence four_rows
input q, k : [K]
input e : [4, K] unit
input v : [V]
input g : log gate [K]
S_t = diag(exp(g_t)) (S_{t-1} - e_tᵀ (e_t S_{t-1})) + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
    "three_steps": """
recurrence three_steps
input q : [K]
input a, b, c : [K] unit
input v : [V]
input g : log gate
input beta, gamma : scalar in (0, 1)
S_t = exp(g_t) (I - a_t a_tᵀ) (I - gamma_t b_t b_tᵀ) (I - beta_t c_t c_tᵀ) S_{t-1} + beta_t c_t v_tᵀ
o_t = S_tᵀ q_t
""",
    "three_values": """
recurrence three_values
input q, k : [K]
input a, b, v : [V] unit
input g : log gate [V]
input h : log gate [K]
input gamma : scalar in (0, 1)
S_t = diag(exp(h_t)) S_{t-1} diag(exp(g_t)) (I - a_t a_tᵀ) (I - gamma_t b_t b_tᵀ) (I - v_t v_tᵀ) + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
}


@pytest.mark.parametrize("name", sorted(MANY))
def test_kernels_equal_the_step_loop(name: str) -> None:
    op = ld.compile(MANY[name], backend="triton", chunk_size=16)
    tensors = draw(op.spec, 1, 37, 1, 12, 7, dtype=torch.float32, gates="resets", seed=5)
    (state,) = draw_state(op.spec, 1, 1, 12, 7, dtype=torch.float32)
    assert_close(errors(op, tensors, state))


def test_long_chunks_have_a_tile_for_each_pair_of_erases() -> None:
    """One tile of four erases and 64 tokens would not fit shared memory."""
    op = ld.compile(MANY["three_steps"], backend="triton", chunk_size=64)
    assert "b_transform" not in op.source(backend="triton")
    assert "b_transform" in ld.compile(MANY["three_steps"]).source(backend="triton")
    tensors = draw(op.spec, 1, 70, 1, 5, 7, dtype=torch.float32, seed=5)
    (state,) = draw_state(op.spec, 1, 1, 5, 7, dtype=torch.float32)
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize("name", sorted(MANY))
def test_the_transform_stands_alone_and_takes_scores_from_memory(name: str) -> None:
    plan = ld.compile(MANY[name]).plan.kernels
    nodes = plan.plan.nodes
    (kernel,) = [k for k in plan.forward if any(stands_alone(nodes[n]) for n in k.body)]
    made = {nodes[n].op for n in kernel.body} - {"ut_transform", "pick", "mul", "add"}
    assert not made
    taken = [b for b in plan.buffers if b.node in kernel.loads]
    assert taken
    assert all(b.element == "float32" for b in taken)
    shape = CallShape(1, 64, 1, 64, 64, "bfloat16", 16)
    assert kernel_schedule(plan, kernel, shape, find_target("sm_90")).warps == 4


@pytest.mark.parametrize("name", ["kda", "gated_rank_two"])
def test_few_erases_share_the_prep_of_their_scores(name: str) -> None:
    plan = ld.compile(TEXTS[name]).plan.kernels
    nodes = plan.plan.nodes
    ops = {nodes[n].op for n in plan.forward[0].body}
    assert {"ut_transform"} < ops
    assert ops & {"score", "decayed_scores"}


def test_what_several_products_add_up_to_is_saved_as_their_sum() -> None:
    plan = ld.compile(MANY["four_rows"]).plan.kernels
    saved = [b for b in plan.buffers if b.saved and b.axes == ("t", "V")]
    assert len(saved) == 4
    assert all(plan.plan.nodes[b.node].op == "add" for b in saved)
