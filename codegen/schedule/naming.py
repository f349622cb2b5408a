"""Names for what kernels hand to each other, where the derivation gave none.

``k_since_start`` is k decayed from the chunk's start (``k_to_previous``: to the token before),
``k_until_end`` k decayed to its end, and ``d_k_since_start`` the gradient of that: what listings and
generated code then say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from linalg_dsl.codegen.schedule.boundary import writes
from linalg_dsl.planner.plan import ChunkPlan, Node

_DECAYS: Mapping[str, str] = {"from_start": "since_start", "to_end": "until_end", "total": "decay_chunk"}


def with_names(plan: ChunkPlan) -> ChunkPlan:
    """The same plan, its decays, decayed operands and their gradients labelled."""
    nodes = list(plan.nodes)

    def label(i: int, name: str) -> None:
        if not nodes[i].label:
            nodes[i] = replace(nodes[i], label=name)

    for i, node in enumerate(nodes):
        if node.op in _DECAYS:
            exclusive = node.op == "from_start" and node.attr("exclusive")
            label(i, "to_previous" if exclusive else _DECAYS[node.op])
        elif node.op == "mul" and (name := _decayed(nodes, node)):
            label(i, name)
    for i, node in enumerate(nodes):
        if node.op == "read" and node.attr("con") == "V":
            label(i, _gradient(plan, nodes, node))
    return replace(plan, nodes=tuple(nodes))


def _decayed(nodes: Sequence[Node], node: Node) -> str:
    """The name of a named value times a decay; empty for anything else.

    ``k_since_start`` has a decay to or from a chunk boundary, ``d_a_q11`` is what the gradient ``d_g_q11`` of
    a decayed score is to the score without its decay.
    """
    for x, decay in (node.args, node.args[::-1]):
        if nodes[decay].op == "pairs_decay" and nodes[x].label.startswith("d_g_"):
            return f"d_a_{nodes[x].label.removeprefix('d_g_')}"
        wide = node.axes == ("t", "K") or nodes[decay].axes == node.axes == ("t", "V")
        if wide and nodes[decay].op in ("from_start", "to_end") and nodes[x].label:
            return f"{nodes[x].label}_{nodes[decay].label}"
    return ""


def _gradient(plan: ChunkPlan, nodes: Sequence[Node], node: Node) -> str:
    """The name of z S^T, the gradient of x where the other state has a term x^T z; empty for another read."""
    z, state = node.args
    if nodes[state].op != "carry":
        return ""
    direction = nodes[state].attr("direction")
    for _, other, _, after in plan.carries:
        for x, written in writes(plan.nodes, after) if other != direction else ():
            if written == z and nodes[x].label:
                # an input itself: this is only the part of its gradient that comes by the state
                part = "" if nodes[x].op != "input" else "_by_s" if direction == "forward" else "_by_ds"
                return f"d_{nodes[x].label}{part}"
    return ""
