"""Ops that have a prep of their own: the transform of many erases.

T of r erases is r x r blocks [C, C], and so are the scores that it is made of: in the registers of one
program with everything else they spill. From three erases on, a prep leaves the scores in memory, the next
one forms T as one tile, and a third makes what takes T.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from linalg_dsl.codegen.schedule.facts import PlanFacts
from linalg_dsl.codegen.schedule.kernel_plan import Kernel
from linalg_dsl.planner.plan import Node

FEW = 2
"""So many erases leave room for everything else."""


def stands_alone(node: Node) -> bool:
    """Whether a node is the transform of many erases."""
    return node.op == "ut_transform" and int(str(node.attr("r"))) > FEW


def transforms(nodes: Sequence[Node], n: int) -> bool:
    """Whether a node is a block of such a transform."""
    return nodes[n].op == "pick" and stands_alone(nodes[nodes[n].args[0]])


def operands(facts: PlanFacts, transform: int) -> list[int]:
    """What another prep has to make for a transform: scores, and coefficients that sum over K or V."""
    out = []
    for a in dict.fromkeys(facts.nodes[transform].args):
        node = facts.nodes[a]
        axes = {x for n in _cone(facts, [a]) for x in facts.nodes[n].axes}
        if node.axes == ("t", "s") or (not facts.is_leaf(a) and axes & {"K", "V"}):
            out.append(a)
    return out


def split_prep(
    facts: PlanFacts, wanted: Sequence[int], memory: Collection[int]
) -> list[tuple[list[int], frozenset[int]]]:
    """What a prep makes, one prep after the other, with what each takes from memory in any case."""
    cone = _cone(facts, wanted, memory)
    alone = [n for n in cone if stands_alone(facts.nodes[n])]
    if not alone:
        return [(list(wanted), frozenset())]
    blocks = {n for n in cone if transforms(facts.nodes, n)}
    given = frozenset(n for t in alone for n in operands(facts, t))
    after = {n for n in wanted if n not in blocks and blocks & set(_cone(facts, [n], memory))}
    first = (set(wanted) - blocks - after) | (given - set(memory))
    parts = ((first, frozenset[int]()), (blocks, given), (after, frozenset[int]()))
    return [(sorted(made), taken) for made, taken in parts if made]


def _cone(facts: PlanFacts, roots: Iterable[int], memory: Collection[int] = ()) -> list[int]:
    """The roots and what they are made of, down to what lies in memory."""
    seen: dict[int, None] = {}
    todo = list(roots)
    while todo:
        n = todo.pop()
        if n not in seen and n not in memory:
            seen[n] = None
            todo.extend(facts.nodes[n].args)
    return list(seen)


def lone_transform(nodes: Sequence[Node], kernel: Kernel) -> int:
    """Of how many blocks of C rows the tile of a kernel is that forms such a transform; 0 without one."""
    for n in kernel.body:
        if stands_alone(nodes[n]):
            return 1 << (int(str(nodes[n].attr("r"))) - 1).bit_length()
    return 0
