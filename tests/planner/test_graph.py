"""What waits for the state."""

from __future__ import annotations

import pytest
from hand_written import CASES, Case

from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.graph import dependence, plan_graph, serial_depth, to_dot
from linalg_dsl.planner.plan import ChunkPlan


def waits_of(plan: ChunkPlan, label: str) -> frozenset[str]:
    return next(d for d, n in zip(dependence(plan), plan.nodes, strict=True) if n.label == label)


def plan_of(name: str) -> ChunkPlan:
    return derive(next(c for c in CASES if c.name == name).canonical)


def test_scores_wait_for_nothing_and_outputs_for_the_chunks_before() -> None:
    plan = plan_of("gated_delta")
    assert waits_of(plan, "g_b11") == waits_of(plan, "g_q11") == frozenset()
    assert waits_of(plan, "z_1") == waits_of(plan, "o") == {"forward"}
    reverse = backward(plan)
    assert waits_of(reverse, "d_u_1") == {"reverse"}
    assert waits_of(reverse, "d_g") == {"forward", "reverse"}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_writes_wait_for_the_state_only_where_something_is_erased(case: Case) -> None:
    erases = bool(case.recurrence.erase)
    plan = derive(case.canonical)
    assert serial_depth(plan) == (3 if erases else 0)
    assert serial_depth(backward(plan), "reverse") == (3 if erases else 0)


def test_without_decay_and_erase_no_value_needs_both_walks() -> None:
    reverse = backward(plan_of("linear"))
    both = [i for i, d in enumerate(dependence(reverse)) if len(d) == 2]
    assert not both


def test_the_graph_has_the_plans_edges() -> None:
    plan = plan_of("low_rank")
    graph = plan_graph(plan)
    assert set(graph.edges) == {(a, i) for i, n in enumerate(plan.nodes) for a in n.args}
    assert graph.nodes[0]["op"] == plan.nodes[0].op


def test_dot_names_every_node_and_edge() -> None:
    plan = plan_of("channel_gate")
    text = to_dot(plan)
    assert text.startswith('digraph "channel_gate" {')
    assert text.count("->") == sum(len(n.args) for n in plan.nodes)
    assert text.count("fillcolor=lightblue") == sum(d == {"forward"} for d in dependence(plan))
