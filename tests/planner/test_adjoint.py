"""Plans and their backward plans against autograd through step loops written from the definition."""

from __future__ import annotations

import pytest
import torch
from hand_written import CASES, STEPS, VALUE, Case, draw, loop, with_consts
from torch import Tensor

from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.evaluate import run_backward, run_plan


def check_close(name: str, got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape, name
    assert torch.isfinite(got).all(), f"{name} is not finite"
    worst = (got - want).abs().max().item() / max(want.abs().max().item(), 1e-3)
    assert worst < 1e-11, f"{name}: {worst:.1e}"


@pytest.mark.parametrize("gates", ["mild", "strong", "resets"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_plan_and_gradients_equal_the_step_loop(case: Case, gates: str) -> None:
    tensors = draw(case, gates, seed=3)
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    o, final = loop(case, leaves)
    d_o, d_state = torch.randn_like(o), torch.randn_like(final)
    want = dict(
        zip(leaves, torch.autograd.grad([o, final], list(leaves.values()), [d_o, d_state]), strict=True)
    )
    forward = derive(case.canonical)
    reverse = backward(forward)
    for chunk in (1, 5, 8, STEPS, 64):
        got_o, got_final = run_plan(forward, with_consts(tensors), tensors["initial_state"], chunk)
        check_close("o", got_o, o.detach())
        check_close("final state", got_final, final.detach())
        grads = run_backward(
            reverse, forward, with_consts(tensors), tensors["initial_state"], chunk, d_o, d_state
        )
        assert grads.keys() == want.keys()
        for name in want:
            check_close(f"d_{name}", grads[name], want[name])


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in ("channel_gate", "gated_delta", "low_rank")],
    ids=lambda c: c.name,
)
def test_final_state_alone_gives_the_gradients_of_everything_but_the_query(case: Case) -> None:
    tensors = draw(case, "strong", seed=5)
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    _, final = loop(case, leaves)
    d_state = torch.randn_like(final)
    want = dict(
        zip(
            leaves, torch.autograd.grad(final, list(leaves.values()), d_state, allow_unused=True), strict=True
        )
    )
    forward = derive(case.canonical)
    grads = run_backward(
        backward(forward), forward, with_consts(tensors), tensors["initial_state"], 7, d_state=d_state
    )
    for name, gradient in want.items():
        check_close(
            f"d_{name}", grads[name], torch.zeros_like(tensors[name]) if gradient is None else gradient
        )


def test_only_wanted_gradients_are_computed() -> None:
    case = next(c for c in CASES if c.name == "gated_delta")
    forward = derive(case.canonical)
    whole, part = backward(forward), backward(forward, frozenset({"v", "q"}))
    assert sorted(name for name, _ in part.outputs) == ["d_q", "d_v"]
    ops = {node.op for node in part.nodes}
    assert not ops & {"span_sum", "gate_sum", "boundary_gate"}, "gate gradients are not wanted"
    assert len(part.nodes) < len(whole.nodes)
    tensors = draw(case, "mild", seed=8)
    everything, some = (
        run_backward(
            plan, forward, with_consts(tensors), tensors["initial_state"], 6,
            torch.ones(2, STEPS, 2, VALUE, dtype=torch.float64),
        )
        for plan in (whole, part)
    )  # fmt: skip
    assert some.keys() == {"q", "v", "initial_state"}
    for name, gradient in some.items():
        assert torch.equal(gradient, everything[name])


def test_no_tokens_hand_the_state_and_its_gradient_through() -> None:
    case = next(c for c in CASES if c.name == "gated_delta")
    forward = derive(case.canonical)
    tensors = {n: x[:, :0] if n != "initial_state" else x for n, x in draw(case, "mild", seed=1).items()}
    o, final = run_plan(forward, with_consts(tensors), tensors["initial_state"], 16)
    assert o.shape == (2, 0, 2, VALUE)
    assert torch.equal(final, tensors["initial_state"])
    d_state = torch.randn_like(final)
    grads = run_backward(backward(forward), forward, with_consts(tensors), None, 16, o, d_state)
    assert torch.equal(grads["initial_state"], d_state)


def test_backward_plan_computes_one_reversed_solve_and_nothing_for_constants() -> None:
    case = next(c for c in CASES if c.name == "low_rank")
    plan = backward(derive(case.canonical))
    solves = [n for n in plan.nodes if n.op == "solve_t"]
    assert len(solves) == 1
    zero_row_and_sigma = [n for n in plan.nodes if n.op == "sum" and n.attr("axis") == "V"]
    assert not zero_row_and_sigma, "Sigma is constant, so no row sum over V is needed"


def test_backward_of_the_same_plan_is_the_same_plan() -> None:
    forward = derive(CASES[8].canonical)
    assert backward(forward) == backward(derive(CASES[8].canonical))
    assert str(backward(forward)) == str(backward(derive(CASES[8].canonical)))


def test_span_sums_of_one_kind_are_taken_once() -> None:
    plan = backward(derive(next(c for c in CASES if c.name == "gated_delta").canonical))
    kinds = [n.attrs for n in plan.nodes if n.op in ("span_sum", "gate_sum")]
    assert len(kinds) == len(set(kinds)) == 3
