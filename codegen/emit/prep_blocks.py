"""How a prep goes over K and V in blocks, so that a chunk's [C, K] and [C, V] tiles never stand whole.

What sums over an axis (a score, a norm) is known only after a loop over its blocks; what needs it again
per channel comes in a later loop. Each phase is the values without a wide axis that are due, then one loop
for each axis.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from linalg_dsl.codegen.schedule.kernel_plan import Axis, Kernel
from linalg_dsl.planner.ops import contracted_axes
from linalg_dsl.planner.plan import Node

WIDE: tuple[Axis, ...] = ("V", "K")
_ONCE = ("decay_adjoints",)
"""Too dear to be formed again in a second loop."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop over the blocks of an axis: what it forms, and the scores that are picked behind it."""

    axis: Axis
    inside: tuple[int, ...]
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """``before``: nodes without a wide axis; ``loops``: what the loops over blocks of the axes form."""

    before: tuple[int, ...]
    loops: tuple[Loop, ...]


def phases(nodes: Sequence[Node], kernel: Kernel) -> tuple[Phase, ...] | None:
    """The phases of a prep; None where it would form a dear value twice."""
    depth: dict[int, int] = {}
    for n in kernel.body:
        known = (a for a in nodes[n].args if a in depth)
        depth[n] = max((depth[a] + bool(summed_axes(nodes, a)) for a in known), default=0)
    stored = set(kernel.stores)
    found = []
    seen: set[int] = set()
    picked: set[int] = set()
    for d in range(max(depth.values(), default=0) + 1):
        here = [n for n in kernel.body if depth[n] == d]
        before = tuple(
            n for n in here if n not in picked and not any(in_loop(nodes, n, axis) for axis in WIDE)
        )
        loops: list[Loop] = []
        for axis in WIDE:
            sinks = [
                n for n in here if axis in summed_axes(nodes, n) or (axis in nodes[n].axes and n in stored)
            ]
            for part in _parts(nodes, sinks):
                cone = _cone(nodes, part, set(kernel.body), axis)
                if any(n in seen and nodes[n].op in _ONCE for n in cone):
                    return None
                seen |= cone
                behind = _picks(nodes, kernel, part) if len(part) < len(sinks) else ()
                picked |= set(behind)
                if cone:
                    loops.append(Loop(axis, tuple(n for n in kernel.body if n in cone), behind))
        found.append(Phase(before, tuple(loops)))
    return tuple(found)


def _parts(nodes: Sequence[Node], sinks: Sequence[int]) -> list[list[int]]:
    """What one loop forms together: every joint op of scores has its own; its sums stay in registers."""
    scores = [n for n in sinks if nodes[n].op == "decayed_scores"]
    first = [n for n in sinks if n not in scores[1:]]
    return [first, *([n] for n in scores[1:])]


def _picks(nodes: Sequence[Node], kernel: Kernel, sums: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in kernel.body if nodes[n].op == "pick" and nodes[n].args[0] in sums)


def summed_axes(nodes: Sequence[Node], n: int) -> frozenset[str]:
    """The wide axes that a value is a sum over: it is complete only after all their blocks."""
    node = nodes[n]
    return contracted_axes(node.op, tuple(nodes[a].axes for a in node.args), dict(node.attrs))


def in_loop(nodes: Sequence[Node], n: int, axis: Axis) -> bool:
    """Whether a value is formed in loops over the blocks of ``axis``."""
    return axis in nodes[n].axes or axis in summed_axes(nodes, n)


def joint_last(nodes: Sequence[Node], inside: Sequence[int]) -> tuple[int, ...]:
    """The values of a loop, those made of derivatives of scores last: fewer then wait in registers."""
    of = dependents(nodes, inside, [n for n in inside if nodes[n].op in _ONCE])
    return (*(n for n in inside if n not in of), *(n for n in inside if n in of))


def dependents(nodes: Sequence[Node], inside: Sequence[int], roots: Sequence[int]) -> set[int]:
    """The roots and what is made of them."""
    found = set(roots)
    for n in sorted(inside):
        if found & set(nodes[n].args):
            found.add(n)
    return found


def short_of_registers(node: Node) -> bool:
    """Whether a loop with this node should keep nothing through its blocks that each can form.

    So do derivatives of several scores, or of rows with the shorter interval, which have another decay beside
    the columns'. Those of one score of inclusive rows fit (what ptxas says for sm_90, docs/measurements.md).
    """
    if node.op != "decay_adjoints":
        return False
    return "," in str(node.attr("pairs")) or "exclusive" in str(node.attr("reads"))


def taken_in(
    nodes: Sequence[Node], kernel: Kernel, joint: int, formed: Container[int]
) -> dict[int, tuple[tuple[int, ...], int]]:
    """Of every pick of a joint op (the other terms of the sum that it is part of, the node of that sum).

    A joint op sums up over levels, and so can begin with terms that are at hand before: those ``formed``.
    """
    of = dependents(nodes, kernel.body, [joint])
    found = {}
    for pick in (n for n in kernel.body if nodes[n].op == "pick" and nodes[n].args == (joint,)):
        terms: list[int] = []
        last = pick
        while last not in kernel.stores:
            users = [n for n in kernel.body if last in nodes[n].args]
            if len(users) != 1 or nodes[users[0]].op != "add":
                break
            (other,) = [a for a in nodes[users[0]].args if a != last] or (last,)
            nothing = nodes[other].op == "number" and nodes[other].attr("value") == 0
            at_hand = other in formed and nodes[other].axes == nodes[pick].axes
            if other in of or not (nothing or at_hand):
                break
            terms += [] if nothing else [other]
            last = users[0]
        found[pick] = tuple(terms), last
    return found


def _cone(nodes: Sequence[Node], sinks: Sequence[int], body: set[int], axis: Axis) -> set[int]:
    """The sinks and the values along ``axis`` that they are made of."""
    out: set[int] = set()
    todo = list(sinks)
    while todo:
        n = todo.pop()
        if n in out:
            continue
        out.add(n)
        todo.extend(a for a in nodes[n].args if a in body and axis in nodes[a].axes)
    return out
