"""Nothing in the schedule knows which axis of the state decays: plans turned over give the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import TEXTS

import linalg_dsl as ld
from linalg_dsl.codegen.schedule.cut import cut
from linalg_dsl.codegen.schedule.evaluate import run_kernels
from linalg_dsl.codegen.schedule.kernel_plan import KernelPlan
from linalg_dsl.codegen.schedule.lower import lower
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.planner.plan import AttrValue, ChunkPlan, Node

TURNED = {"K": "V", "V": "K"}
CONSTS = {"scale": 0.7, "tau": 4.0}


def turned(plan: ChunkPlan) -> ChunkPlan:
    """The same plan for the transposed state: K and V exchanged everywhere."""

    def turn(value: AttrValue) -> AttrValue:
        return TURNED.get(value, value) if isinstance(value, str) else value

    nodes = []
    for node in plan.nodes:
        axes = tuple(sorted((TURNED.get(a, a) for a in node.axes), key="tsKV".index))
        args = node.args[::-1] if node.op == "write" else node.args
        attrs = tuple((k, turn(v) if k in ("axis", "con") else v) for k, v in node.attrs)
        nodes.append(Node(node.op, args, attrs, axes, node.label))
    return replace(plan, nodes=tuple(nodes))


def shape(plan: KernelPlan) -> list[tuple[str, str | None, str | None]]:
    return [(k.family, k.direction, k.split) for k in (*plan.forward, *plan.backward)]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_plan_turned_over_gives_the_same_numbers(name: str, exact: bool) -> None:
    op = ld.compile(TEXTS[name])
    lowered = lower(op.plan.forward, op.plan.backward)
    plan, other = op.plan.kernels, cut(turned(lowered))
    tensors = draw(op.spec, 2, 21, 2, 5, 3, gates="resets", seed=1)
    (state,) = draw_state(op.spec, 2, 2, 5, 3)
    d_o, d_state = torch.randn(2, 21, 2, 3, dtype=torch.float64), torch.randn_like(state)
    names = {str(n.attr("name")) for n in plan.plan.nodes if n.op == "const"}
    consts = {n: CONSTS[n] for n in names}
    want = run_kernels(plan, tensors, state, 2, d_o, d_state, consts, exact=exact)
    got = run_kernels(other, tensors, state.mT, 2, d_o, d_state.mT, consts, exact=exact, blocks=3)
    torch.testing.assert_close(got.output, want.output)
    torch.testing.assert_close(got.final_state.mT, want.final_state)
    assert got.gradients.keys() == want.gradients.keys()
    for key, gradient in want.gradients.items():
        found = got.gradients[key]
        torch.testing.assert_close(found.mT if key == "initial_state" else found, gradient)


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda", "dplr"])
def test_a_plan_with_an_erase_turned_over_takes_the_walks_turned_over(name: str) -> None:
    plan = ld.compile(TEXTS[name]).plan
    other = cut(turned(lower(plan.forward, plan.backward)))
    want = [(family, way, split and TURNED[split]) for family, way, split in shape(plan.kernels)]
    assert shape(other) == want
