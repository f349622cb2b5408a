"""How a prep goes over the key axis in blocks, so that a chunk's [C, K] tiles never stand whole.

What sums over K (a score, a norm) is known only after a loop over the blocks; what needs it again per
channel comes in a later loop. Each phase is the values without a K axis that are due, then one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from linalg_dsl.codegen.schedule.kernel_plan import Kernel
from linalg_dsl.planner.ops import contracted_axes
from linalg_dsl.planner.plan import Node

_ONCE = ("decay_adjoints",)
"""Too dear to be formed again in a second loop."""


@dataclass(frozen=True, slots=True)
class Phase:
    """``before``: nodes without a K axis; ``inside``: what one loop over the blocks of K forms."""

    before: tuple[int, ...]
    inside: tuple[int, ...]


def phases(nodes: Sequence[Node], kernel: Kernel) -> tuple[Phase, ...] | None:
    """The phases of a prep; None where it has no K axis, or would form a dear value twice."""
    if not any("K" in nodes[n].axes for n in (*kernel.loads, *kernel.body)):
        return None
    depth: dict[int, int] = {}
    for n in kernel.body:
        depth[n] = max(
            (depth.get(a, 0) + sums_over_key(nodes, a) for a in nodes[n].args if a in depth), default=0
        )
    last = max(depth.values(), default=0)
    stored = set(kernel.stores)
    found = []
    seen: set[int] = set()
    for d in range(last + 1):
        here = [n for n in kernel.body if depth[n] == d]
        before = tuple(n for n in here if not _in_loop(nodes, n))
        sinks = [n for n in here if sums_over_key(nodes, n) or ("K" in nodes[n].axes and n in stored)]
        cone = _cone(nodes, sinks, set(kernel.body))
        inside = tuple(n for n in kernel.body if n in cone)
        if any(n in seen and nodes[n].op in _ONCE for n in inside):
            return None
        seen |= cone
        found.append(Phase(before, inside))
    return tuple(found)


def sums_over_key(nodes: Sequence[Node], n: int) -> bool:
    """Whether a value is a sum over K: complete only after all blocks."""
    node = nodes[n]
    return "K" in contracted_axes(node.op, tuple(nodes[a].axes for a in node.args), dict(node.attrs))


def _in_loop(nodes: Sequence[Node], n: int) -> bool:
    return "K" in nodes[n].axes or sums_over_key(nodes, n)


def _cone(nodes: Sequence[Node], sinks: Sequence[int], body: set[int]) -> set[int]:
    """The sinks and the values with a K axis that they are made of."""
    out: set[int] = set()
    todo = list(sinks)
    while todo:
        n = todo.pop()
        if n in out:
            continue
        out.add(n)
        todo.extend(a for a in nodes[n].args if a in body and "K" in nodes[a].axes)
    return out
