"""Kernel plans run in float64 give what the chunk plans give, and every rule of the level can be broken."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TEXTS
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.codegen.schedule.evaluate import run_kernels
from linalg_dsl.codegen.schedule.kernel_plan import KernelPlan
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.evaluate import run_backward, run_plan

CONSTS = {"scale": 0.7, "tau": 4.0}


def compiled(name: str) -> tuple[CompiledOp, KernelPlan]:
    op = ld.compile(TEXTS[name])
    return op, op.plan.kernels


def worst(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-12))


def compare(name: str, T: int, chunk: int, gates: GateKind, *, exact: bool, segment: int = 2) -> None:
    op, kernels = compiled(name)
    tensors = draw(op.spec, 2, T, 2, 5, 3, gates=gates, seed=1)
    (state,) = draw_state(op.spec, 2, 2, 5, 3)
    d_o, d_state = torch.randn(2, T, 2, 3, dtype=torch.float64), torch.randn_like(state)
    names = {str(n.attr("name")) for n in kernels.plan.nodes if n.op == "const"}
    consts = {n: CONSTS[n] for n in names}
    o, final = run_plan(op.plan.forward, {**tensors, **consts}, state, chunk)
    wanted = run_backward(
        op.plan.backward, op.plan.forward, {**tensors, **consts}, state, chunk, d_o, d_state
    )
    got = run_kernels(kernels, tensors, state, chunk, d_o, d_state, consts, exact=exact, segment=segment)
    errors = {"o": worst(got.output, o), "state": worst(got.final_state, final)}
    assert got.gradients.keys() == wanted.keys()
    errors |= {n: worst(got.gradients[n], w) for n, w in wanted.items()}
    assert all(e < 1e-10 for e in errors.values()), errors


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_kernels_equal_the_chunk_plans(name: str) -> None:
    compare(name, 13, 4, "resets", exact=True)


@pytest.mark.parametrize("gates", ["mild", "strong"])
@pytest.mark.parametrize("name", ["simple_gla", "kda", "gated_delta_rule", "gated_rank_two", "two_writes"])
def test_the_carried_boundary_term_equals_the_exact_one(name: str, gates: GateKind) -> None:
    for segment in (1, 2, 8):
        compare(name, 22, 2, gates, exact=False, segment=segment)


@pytest.mark.parametrize("T", [1, 4, 5])
def test_lengths_around_the_chunk(T: int) -> None:
    compare("gated_delta_rule", T, 4, "mild", exact=True)
    compare("gated_delta_rule", T, 4, "mild", exact=False)


def test_no_tokens_hand_the_states_on() -> None:
    op, kernels = compiled("kda")
    tensors = draw(op.spec, 2, 0, 2, 5, 3)
    (state,) = draw_state(op.spec, 2, 2, 5, 3)
    got = run_kernels(kernels, tensors, state, d_state=2 * state, consts=CONSTS)
    assert torch.equal(got.final_state, state)
    assert torch.equal(got.gradients["initial_state"], 2 * state)
    assert got.output.shape == (2, 0, 2, 3)


@pytest.mark.parametrize("name", ["gla", "delta_rule"])
def test_into_how_many_blocks_a_walk_is_cut_changes_nothing(name: str) -> None:
    op, kernels = compiled(name)
    tensors = draw(op.spec, 1, 9, 2, 5, 3)
    d_o = torch.randn(1, 9, 2, 3, dtype=torch.float64)
    runs = [
        run_kernels(kernels, tensors, None, 4, d_o, consts=CONSTS, blocks=blocks, exact=exact)
        for blocks in (1, 2, 5)
        for exact in (True, False)
    ]
    for run in runs[1:]:
        assert worst(run.output, runs[0].output) < 1e-12
        assert all(worst(run.gradients[n], g) < 1e-10 for n, g in runs[0].gradients.items())
