"""Which value of which plan a name of a generated function holds: what links code to equations."""

from __future__ import annotations

from collections.abc import Mapping

from linalg_dsl.planner.plan import ChunkPlan

Values = dict[str, tuple[ChunkPlan, int]]
"""(plan, node) by name, within one function."""
Trace = dict[str, Values]
"""The values of every function that computes some, by its name; emitters fill it where one is handed in."""


def values_of(plan: ChunkPlan, names: Mapping[int, str]) -> Values:
    """The nodes that stand under a name; of several the first, as the others are the same value."""
    found: Values = {}
    for node, name in sorted(names.items()):
        if name.isidentifier():
            found.setdefault(name, (plan, node))
    return found
