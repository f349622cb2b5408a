"""What the forward and the backward of a chunk both compute, where it is worth a function of its own."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from linalg_dsl.planner.cost import shared_nodes
from linalg_dsl.planner.ops import OPS
from linalg_dsl.planner.plan import ChunkPlan

_FIXED_SPACE = "\u00a0"
_WIDTH = 104


@dataclass(frozen=True)
class SharedValues:
    """Nodes of the backward whose values a shared function hands on, by who needs them.

    ``in_forward``: the forward's numbers of nodes of the backward.
    """

    for_forward: frozenset[int]
    for_backward: frozenset[int]
    in_forward: Mapping[int, int]

    @property
    def handed(self) -> tuple[int, ...]:
        return tuple(sorted(self.for_forward | self.for_backward))


def shared_values(forward: ChunkPlan, backward: ChunkPlan) -> SharedValues | None:
    """The forward values that the backward would compute again, as far as what else is computed needs them.

    None where the forward needs a row of a solve that the backward does not have.
    """
    same = shared_nodes(backward, forward)
    there = {f: b for b, f in same.items()}
    roots = [n for _, n in backward.outputs] + [c[3] for c in backward.carries if c[1] == "reverse"]
    live = backward.live(roots)
    again = {i for i in live if _is_value(backward, i) and (i in same or _picked(backward, i) in same)}
    for_backward = {a for i in live - again for a in backward.nodes[i].args if a in again}
    for_backward |= again.intersection(roots)
    made = {i for i in backward.live(for_backward) if _is_value(backward, i)}
    made |= {i for i in same if _picked(backward, i) in made}
    needed = forward.live(forward.roots)
    own = {i for i in needed if there.get(i) not in made}
    if any(there.get(_picked(forward, i)) in made for i in own):
        return None
    for_forward = {there[a] for i in own for a in forward.nodes[i].args if there.get(a) in made}
    for_forward |= {there[i] for i in forward.roots if there.get(i) in made}
    uses_ahead = Counter(there[a] for i in own for a in forward.nodes[i].args if a in there)
    uses_back = Counter(a for i in live - again for a in backward.nodes[i].args)
    # the system of a solve is handed on with its operands
    solved = {a for i in live for a in backward.nodes[i].args if backward.nodes[i].op in ("solve", "solve_t")}
    for i in sorted((for_forward | for_backward) - solved, reverse=True):
        wanted = [for_forward] * (i in for_forward) + [for_backward] * (i in for_backward)
        if _is_cheap(backward, i, again, wanted) and max(uses_ahead[i], uses_back[i]) == 1:
            for users in wanted:
                users.remove(i)
    return SharedValues(frozenset(for_forward), frozenset(for_backward), same)


def _is_cheap(plan: ChunkPlan, i: int, values: Collection[int], wanted: Iterable[Collection[int]]) -> bool:
    """Whether a value is one elementwise product of what is handed on anyway: it is rather written again."""
    node = plan.nodes[i]
    needed = [a for a in node.args if a in values]
    return node.op == "mul" and not node.label and all(a in w for w in wanted for a in needed)


def _picked(plan: ChunkPlan, i: int) -> int:
    """The solve of which a node is a row; -1 of other nodes."""
    node = plan.nodes[i]
    return node.args[0] if node.op == "pick" else -1


def name_list(names: Sequence[str], after: str = "", indent: str = "") -> str:
    """``(a, b, c)`` and what comes after it, broken into lines that stand below each other."""
    fixed = after.replace(" ", _FIXED_SPACE)
    words = ", ".join(names) + ")" + fixed
    lines = textwrap.wrap(words, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return "(" + f"\n{indent} ".join(lines).replace(_FIXED_SPACE, " ")


def _is_value(plan: ChunkPlan, i: int) -> bool:
    """Whether something is computed; a row is cut out of its tensor."""
    node = plan.nodes[i]
    return OPS[node.op].kind != "leaf" or dict(node.attrs).get("row") is not None
