"""Which values of a walk leave a trace in its state for good where they are not finite.

A sum with NaN is NaN and so is a product, of matrices too, whatever the other factor; inf stays inf or
becomes NaN. So what is not finite in a value that is added to the state, by sums and products alone, is in
the state from there to the end, and one look at the last state tells of a whole walk. Not seen is an operand
that is finite in float32 and infinite in bfloat16, above 3.39e38, where the state takes it scaled down.
"""

from __future__ import annotations

from collections.abc import Sequence

from linalg_dsl.codegen.schedule.kernel_plan import Kernel
from linalg_dsl.planner.plan import Node

_WHOLE = ("add", "mul", "read", "write")
"""Ops whose result is not finite where an operand is not."""
_TILE = ("apply", "apply_t")
"""The same of the second operand; the first is a triangle, of which entries may be left out."""


def leaves_trace(nodes: Sequence[Node], kernel: Kernel) -> frozenset[int]:
    """The values, computed or loaded, of which a program's state shows at the end whether all were finite.

    None where the state itself does not hand on what it has.
    """
    inside = set(kernel.body)
    found: set[int] = set()
    todo = [after for _, after in kernel.carries]
    while todo:
        n = todo.pop()
        if n in found:
            continue
        found.add(n)
        if n in inside and nodes[n].op in _WHOLE:
            todo += nodes[n].args
        elif n in inside and nodes[n].op in _TILE:
            todo.append(nodes[n].args[1])
    return frozenset(found) if all(leaf in found for leaf, _ in kernel.carries) else frozenset()
