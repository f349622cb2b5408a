"""The verifier takes what the planner makes, and refuses changes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hand_written import CASES, Case

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder
from linalg_dsl.planner.verify import verify


def plan_of(name: str) -> ChunkPlan:
    return derive(next(c for c in CASES if c.name == name).canonical)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_plans_of_the_planner_are_sound(case: Case) -> None:
    forward = derive(case.canonical)
    verify(forward)
    verify(backward(forward))
    verify(backward(forward, frozenset({case.inputs.split()[0]})))


def changed(plan: ChunkPlan, i: int, node: Node) -> ChunkPlan:
    return replace(plan, nodes=(*plan.nodes[:i], node, *plan.nodes[i + 1 :]))


@pytest.mark.parametrize("name", ["gated_delta", "low_rank", "bonus", "preludes"])
def test_a_changed_axis_is_refused_at_every_node(name: str) -> None:
    for plan in (plan_of(name), backward(plan_of(name))):
        for i, node in enumerate(plan.nodes):
            if node.op in ("input", "param", "cotangent"):
                continue  # what these are, only a declaration says
            for axes in {("t", "K"), ("t", "V"), ("t",), ("t", "s"), ("K", "V"), ()} - {node.axes}:
                with pytest.raises(InternalError):
                    verify(changed(plan, i, replace(node, axes=axes)))


@pytest.mark.parametrize("name", ["gated_delta", "low_rank", "bonus", "preludes"])
def test_a_missing_or_spare_operand_or_attribute_is_refused_at_every_node(name: str) -> None:
    for plan in (plan_of(name), backward(plan_of(name))):
        for i, node in enumerate(plan.nodes):
            broken = [replace(node, attrs=(*node.attrs, ("zeal", 1)))]
            broken += [replace(node, args=node.args[:-1]), replace(node, args=(*node.args, 0))] * bool(i)
            broken += [replace(node, attrs=node.attrs[1:])] * bool(node.attrs and node.attrs[0][0] != "row")
            for wrong in broken:
                if wrong != node:
                    with pytest.raises(InternalError):
                        verify(changed(plan, i, wrong))


def test_an_operand_after_its_use_is_refused() -> None:
    plan = plan_of("linear")
    last = len(plan.nodes) - 1
    with pytest.raises(InternalError, match="does not come before"):
        verify(changed(plan, last, replace(plan.nodes[last], args=(last, last))))


@pytest.mark.parametrize(
    ("op", "attrs", "message"),
    [
        ("unary", {"fn": "cosh"}, "unknown function"),
        ("unary", {"fn": "pow"}, "attributes"),
        ("from_start", {"exclusive": "yes"}, "exclusive"),
        ("invented", {}, "unknown op"),
    ],
)
def test_unknown_ops_functions_and_values_are_named(op: str, attrs: dict[str, str], message: str) -> None:
    b = PlanBuilder()
    x = b.add_node("input", (), ("t",), name="x", row=None)
    plan = b.finish("p", [], [("o", b.unary("exp", x))])
    wrong = Node(op, (0,), tuple(sorted(attrs.items())), ("t",))
    with pytest.raises(InternalError, match=message):
        verify(changed(plan, 1, wrong))


def test_frame_of_a_plan() -> None:
    plan = plan_of("gated_delta")
    reverse = backward(plan)
    with pytest.raises(InternalError, match="nothing needs"):
        verify(replace(plan, outputs=()))
    with pytest.raises(InternalError, match="two outputs"):
        verify(replace(plan, outputs=plan.outputs * 2))
    with pytest.raises(InternalError, match="handed nothing"):
        verify(replace(reverse, carries=reverse.carries[:1]))
    with pytest.raises(InternalError, match="not the forward carry"):
        verify(replace(plan, carries=(("X", *plan.carries[0][1:]),)))
    b = PlanBuilder()
    x = b.add_node("input", (), ("t",), name="x", row=None)
    with pytest.raises(InternalError, match="forward plan and holds span_sum"):
        verify(b.finish("p", [], [("o", b.span_sum(b.pairs_decay(x, "inclusive"), "inclusive"))]))


def test_equal_nodes_are_refused() -> None:
    plan = plan_of("linear")
    twice = replace(plan, nodes=(plan.nodes[0], *plan.nodes), outputs=(*plan.outputs, ("x", 0)))
    with pytest.raises(InternalError):
        verify(twice)
