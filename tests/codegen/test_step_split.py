"""Which axis of the states step kernels split, and what each program then has."""

from __future__ import annotations

import pytest
import step_cases
from step_cases import TEXTS

from linalg_dsl.codegen.schedule.step_split import StepSchedule, needs_states, node_shares, schedule
from linalg_dsl.planner.plan import PlanBuilder
from linalg_dsl.planner.step_form import step_form
from linalg_dsl.planner.step_plan import step_backward, verify_step

SPLITS = {
    "two_sided": None, "dense_both": None, "substeps": None, "count": None, "undecayed_erase": "V",
    "dense": "V", "oja_with_skip": "K", "mamba1": "V", "hgrn": "V", "mdn": "V", "mlstm": "V", "slots": "V",
}  # fmt: skip


def scheduled(name: str) -> StepSchedule:
    plan = step_cases.case(name).form.plan
    return schedule(plan, step_backward(plan))


@pytest.mark.parametrize("name", SPLITS)
def test_an_axis_is_split_that_no_state_sums_over(name: str) -> None:
    assert scheduled(name).split == SPLITS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_every_gradient_is_a_block_or_a_partial_sum(name: str) -> None:
    made = scheduled(name)
    verify_step(made.forward)
    verify_step(made.backward)
    if made.split is None:
        return
    shares = node_shares(made.backward.nodes, made.split)
    for result, node in made.backward.outputs:
        has_axis = made.split in made.backward.nodes[node].axes
        assert shares[node] == ("split" if has_axis else "partial"), result
        assert (result in made.partial_gradients) == (not has_axis)


CELL = """recurrence cell
input x : [V]
param R, A : [V, V]
state h : [V]
h_t = tanh(x_t + Rᵀ h_{t-1} + A h_{t-1})
o_t = h_t
"""


def test_products_of_vectors_are_summed_behind_the_kernel() -> None:
    from linalg_dsl.language.parser import parse

    plan = step_form(parse(CELL)).plan
    made = schedule(plan, step_backward(plan))
    assert set(made.products) == {"d_R", "d_A"}
    assert len(made.factors) == 4
    assert str(made).endswith("; d_R, d_A summed over tokens behind the kernel")
    # a matrix of which only a diagonal is used, or that meets a state in every entry, is no such product
    assert not scheduled("mamba1").products


def test_a_whole_term_beside_a_partial_sum_stands_in_the_first_block_only() -> None:
    made = scheduled("oja_with_skip")
    assert made.partial_output
    first = [n for n in made.forward.nodes if n.op == "first"]
    assert [n.axes for n in first] == [("V",)]
    # so the skip's own gradient is counted once
    assert any(n.op == "first" for n in made.backward.nodes)


def test_an_output_that_every_block_has_is_written_once() -> None:
    made = scheduled("normalised_linear_attention")
    assert (made.split, made.partial_output) == ("V", False)
    from linalg_dsl.language.parser import parse

    text = "recurrence r\ninput k : [K]\ninput v : [V]\nstate S : [K, V]\nstate n : [K]\n"
    text += "n_t = n_{t-1} + k_t\nS_t = S_{t-1} + n_t v_tᵀ\no_t = n_t\n"
    plan = step_form(parse(text)).plan
    both = schedule(plan, step_backward(plan))
    assert both.forward.nodes[dict(both.forward.outputs)["o"]].op == ("first" if both.split == "V" else "add")


def test_a_function_of_a_partial_sum_cannot_be_split() -> None:
    b = PlanBuilder()
    x = b.add_node("input", (), ("K",), "x", name="x")
    total = b.sum(x, "K")
    made = [b.unary("exp", total), b.mul(total, total), b.mul(total, x), b.mul(total, b.number(2))]
    shares = node_shares(b.nodes, "K")
    assert [shares[x], shares[total]] == ["split", "partial"]
    assert [shares[i] for i in made] == [None, None, None, "partial"]


def test_states_are_saved_only_where_a_gradient_reads_them() -> None:
    assert needs_states(scheduled("undecayed_erase").backward)
    from linalg_dsl.language.parser import parse

    text = "recurrence r\ninput x : [K]\ninput y : [K]\nstate h : [K]\nh_t = h_{t-1} + x_t\no_t = h_t + y_t\n"
    plan = step_form(parse(text)).plan
    assert not needs_states(step_backward(plan))


def test_the_schedule_says_what_a_program_owns() -> None:
    assert str(scheduled("undecayed_erase")) == (
        "step: one program per sequence and head and block of V; partial sums of d_b, d_k, d_q"
    )
    assert str(scheduled("two_sided")) == (
        "step: one program per sequence and head: no axis of the states can be split"
    )
