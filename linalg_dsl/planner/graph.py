"""The dependence graph of a plan: what waits for the state, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import OPS
from linalg_dsl.planner.plan import ChunkPlan

if TYPE_CHECKING:
    import networkx as nx

PRODUCTS = ("matmul", "solve")
"""Kinds of op that a chunk's serial chain is made of; elementwise work between them is short."""


def plan_graph(plan: ChunkPlan) -> nx.DiGraph[int]:
    """Nodes by number with attributes ``op``, ``label`` and ``kind``; edges from operand to use."""
    import networkx as nx

    graph: nx.DiGraph[int] = nx.DiGraph(name=plan.name)
    for i, node in enumerate(plan.nodes):
        kind = "matmul" if node.op in ("decayed_score", "decay_apply") else OPS[node.op].kind
        graph.add_node(i, op=node.op, label=node.label, kind=kind)
        graph.add_edges_from((a, i) for a in node.args)
    return graph


def dependence(plan: ChunkPlan) -> tuple[frozenset[str], ...]:
    """For each node the directions of the carries that it depends on.

    Empty: it can be computed for all chunks at once. ``{"forward"}`` or ``{"reverse"}``: it waits for the
    chunks before or after it. Both: it needs the states of one walk beside those of the other.
    """
    import networkx as nx

    graph = plan_graph(plan)
    found: list[set[str]] = [set() for _ in plan.nodes]
    for _, direction, leaf, _ in plan.carries:
        for i in {leaf} | nx.descendants(graph, leaf):
            found[i].add(direction)
    return tuple(frozenset(x) for x in found)


def serial_depth(plan: ChunkPlan, direction: str = "forward") -> int:
    """How many products stand one behind the other between a carried state and its next value.

    This chain is walked once per chunk whatever else runs beside it: 0 without erases, where a chunk's
    writes do not wait for its state, else 3 (read, solve, write).
    """
    import networkx as nx

    graph = plan_graph(plan)
    if not nx.is_directed_acyclic_graph(graph):
        raise InternalError(f"plan {plan.name} has a cycle")
    longest = 0
    for _, carried, leaf, after in plan.carries:
        if carried != direction:
            continue
        between = graph.subgraph(
            ({leaf} | nx.descendants(graph, leaf)) & ({after} | nx.ancestors(graph, after))
        )
        depth: dict[int, int] = {}
        for i in nx.topological_sort(between):
            before = max((depth[a] for a in between.predecessors(i)), default=0)
            depth[i] = before + (graph.nodes[i]["kind"] in PRODUCTS and graph.nodes[i]["op"] != "pick")
        longest = max(longest, depth.get(after, 0))
    return longest


def to_dot(plan: ChunkPlan) -> str:
    """The graph in Graphviz's language; leaves are boxes, what waits for a carry is filled."""
    waits = dependence(plan)
    colours = {frozenset({"forward"}): "lightblue", frozenset({"reverse"}): "lightsalmon"}
    lines = [f'digraph "{plan.name}" {{', "  node [fontname=monospace];"]
    for i, node in enumerate(plan.nodes):
        shape = "box" if OPS[node.op].kind == "leaf" else "ellipse"
        colour = colours.get(waits[i], "plum") if waits[i] else "white"
        text = f"{node.label or node.op} [{','.join(node.axes)}]"
        lines.append(f'  n{i} [label="{text}", shape={shape}, style=filled, fillcolor={colour}];')
        lines += [f"  n{a} -> n{i};" for a in node.args]
    return "\n".join([*lines, "}"])
