"""Plans of one token: their class, what they never form, their rules, their meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import step_cases
import torch
from step_cases import TEXTS

from linalg_dsl.errors import ArgumentError, DslError, InternalError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.args import const_numbers
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.evaluate import LeafKey, leaf_key, run_chunk
from linalg_dsl.planner.plan import ChunkPlan, PlanBuilder
from linalg_dsl.planner.step_cost import step_cost
from linalg_dsl.planner.step_form import step_form
from linalg_dsl.planner.step_plan import contracted, step_backward, verify_step
from linalg_dsl.planner.step_verdict import TokenWriter

CLASSES = {
    "two_sided": "sequential", "undecayed_erase": "sequential", "dense": "sequential", "mdn": "sequential",
    "slots": "sequential", "substeps": "sequential", "mamba1": "scan", "longhorn": "scan", "hgrn": "scan",
    "rg_lru": "scan", "rwkv4": "scan", "mlstm": "scan", "s5": "scan", "count": "scan", "swapped": "scan",
    "normalised_linear_attention": "scan",
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_says_whether_a_sum_over_a_state_feeds_a_state(name: str) -> None:
    assert step_cases.case(name).form.name == CLASSES[name]


@pytest.mark.parametrize("name", TEXTS)
def test_both_plans_keep_the_rules(name: str) -> None:
    plan = step_cases.case(name).form.plan
    verify_step(plan)
    verify_step(step_backward(plan))


@pytest.mark.parametrize("name", [n for n in TEXTS if not n.startswith("dense")])
def test_no_square_matrix_is_formed(name: str) -> None:
    plan = step_backward(step_cases.case(name).form.plan)
    assert not any({"L", "M", "W", "Y"} & set(node.axes) for node in plan.nodes)


@pytest.mark.parametrize("name", TEXTS)
def test_a_plan_run_token_by_token_is_the_recurrence(name: str) -> None:
    found = step_cases.case(name)
    spec, sizes = found.spec, {"K": 3, "V": 5}
    tensors = draw(spec, 1, 4, 2, 3, 5, seed=2)
    states = draw_state(spec, 1, 2, 3, 5, seed=2)
    want, last = reference(spec, tensors, initial_state=list(states), output_final_state=True)
    wanted = last if isinstance(last, tuple) else (last,)
    plan = found.form.plan
    now = {
        s.name: x.mT if len(s.dims) == 2 and tuple(s.dims) == ("V", "K") else x
        for s, x in zip(spec.states, states, strict=True)
    }
    numbers = {"K": 3.0, "V": 5.0, **const_numbers(spec, sizes, {})}
    outputs = []
    for t in range(4):
        values: dict[LeafKey, torch.Tensor] = {}
        for node in plan.nodes:
            if node.op not in ("input", "param", "const", "carry"):
                continue
            key = leaf_key(node)
            if node.op == "const":
                values[key] = torch.tensor(numbers[key[1]], dtype=torch.float64)
            elif node.op == "carry":
                values[key] = now[key[1]]
            else:
                x = tensors[key[1]][:, t] if node.op == "input" else tensors[key[1]]
                values[key] = x if key[2] is None else x.select(2 if node.op == "input" else 1, int(key[2]))
        token = run_chunk(plan, values, {**sizes, "L": 3, "W": 5, "m": 3})
        outputs.append(token.outputs["o"].broadcast_to(want[:, 0].shape))
        now = {name: token.carries[(name, "forward")] for name in now}
    assert (torch.stack(outputs, dim=1) - want).abs().max() < 1e-12
    for state, x in zip(spec.states, wanted, strict=True):
        got = now[state.name].mT if tuple(state.dims) == ("V", "K") else now[state.name]
        assert (got - x).abs().max() < 1e-12 * max(1.0, float(x.abs().max()))


def test_scalars_multiply_vectors_and_not_matrices() -> None:
    plan = step_cases.case("two_sided").form.plan
    scaled = [n for n in plan.nodes if n.op == "mul" and len(n.axes) == 2]
    assert all(plan.nodes[a].axes != () for n in scaled for a in n.args)


def test_a_sum_of_a_product_is_one_op_only_where_nothing_else_uses_the_product() -> None:
    b = PlanBuilder()
    x, y = (b.add_node("input", (), (a,), a, name=a) for a in ("K", "V"))
    product = b.mul(b.mul(x, y), y)
    alone = contracted(b.finish("p", [], [("o", b.sum(product, "V"))]))
    assert [n.op for n in alone.nodes] == ["input", "input", "mul", "contract"]
    both = contracted(b.finish("p", [], [("o", b.sum(product, "V")), ("x", product)]))
    assert "contract" not in [n.op for n in both.nodes]


def broken(plan: ChunkPlan, at: int, **changes: object) -> ChunkPlan:
    nodes = list(plan.nodes)
    nodes[at] = replace(nodes[at], **changes)  # type: ignore[arg-type]
    return replace(plan, nodes=tuple(nodes))


def test_the_verifier_sees_wrong_axes_operands_and_ops() -> None:
    plan = step_cases.case("two_sided").form.plan
    at = next(i for i, n in enumerate(plan.nodes) if n.op == "contract")
    with pytest.raises(InternalError, match="expected"):
        verify_step(broken(plan, at, axes=("K", "V")))
    with pytest.raises(InternalError, match="does not come before"):
        verify_step(broken(plan, at, args=(at, at)))
    with pytest.raises(InternalError, match="no op of a step"):
        verify_step(broken(plan, at, op="score"))
    with pytest.raises(InternalError, match="none of a step"):
        verify_step(broken(plan, at, axes=("V", "K")))


def test_consts_of_the_update_are_fixed_and_those_of_the_output_are_not() -> None:
    text = TEXTS["hgrn"].replace("state h", "const a = 2\nconst b = 3\nstate h")
    text = text.replace("h_t = f_t", "h_t = a f_t").replace("o_t = h_t", "o_t = b h_t")
    form = step_form(parse(text), {"a": 0.5})
    assert form.consts == (("a", 0.5),)
    assert [n.attr("name") for n in form.plan.nodes if n.op == "const"] == ["b"]
    with pytest.raises(ArgumentError, match="no const"):
        step_form(parse(text), {"c": 1.0})


def test_a_state_axis_that_no_input_has_is_a_mistake() -> None:
    text = "recurrence r\ninput k : [K]\ninput g : log gate\nstate S : [K, V]\n"
    text += "S_t = exp(g_t) S_{t-1}\no_t = S_tᵀ k_t\n"
    with pytest.raises(DslError, match="no input of r has the axis V"):
        step_form(parse(text))


def test_equations_and_costs_of_a_token() -> None:
    form = step_cases.case("two_sided").form
    lines = [str(e) for e in TokenWriter(form.plan, {}, {}).run()]
    assert lines == [
        "H₁ = S_{t-1} − k ∘ b ∘ Σ_K(S_{t-1} ∘ k)",
        "S_t = H₁ − u ∘ c ∘ Σ_V(H₁ ∘ u) + k ∘ v",
        "o = Σ_K(S_t ∘ q)",
    ]
    cost = step_cost(form, form.plan, step_backward(form.plan), 64, 32)
    matrix = 64 * 32
    assert 0 <= cost.forward_flops - 12 * matrix < 100  # three products with S, three outer ones, three sums
    assert cost.state == 4 * matrix
    assert cost.forward_bytes == 2 * (2 * 64 + 2 * 32 + 32) + 2 * 2
