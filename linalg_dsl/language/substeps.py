"""Loops of substeps in the Python front.

The body of ``for j in substeps(n)`` is run twice on symbols. What the second pass makes of a value of the
first pass is the substep: the value that crosses from one pass to the other is the state between two
substeps, and matching the second pass against the first shows where the loop began. Nodes are numbered as
they are made, so it is known in which pass each was made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from linalg_dsl.errors import DslError
from linalg_dsl.language import syntax as syn
from linalg_dsl.source import Span


@dataclass(slots=True)
class Traversal:
    """One ``for j in substeps(n)``: the node numbers at its beginning, between its passes, at its end."""

    count: str | int
    span: Span | None
    begin: int
    between: int | None = None
    end: int | None = None

    @property
    def is_open(self) -> bool:
        return self.end is None

    def made(self, node: syn.Node) -> int:
        """0 before the loop, 1 in the first pass, 2 in the second, 3 after it."""
        marks = (self.begin, self.between or 0, self.end or 0)
        return sum(node.serial >= mark for mark in marks)


LOOPS: ContextVar[list[Traversal] | None] = ContextVar("linalg_dsl_loops", default=None)
"""The loops so far of the function that is being run; None outside of one."""


class SubstepIndex:
    """The ``j`` of ``for j in substeps(n)``: good for picking rows, ``k[j]``."""

    __slots__ = ("loop",)

    def __init__(self, loop: Traversal) -> None:
        self.loop = loop

    def __repr__(self) -> str:
        return "<index of substeps>"


def passes(count: str | int, span: Span | None) -> Iterator[SubstepIndex]:
    """Runs the body twice."""
    loops = LOOPS.get()
    if loops is None:
        hint = "substeps belong to a function under `recurrence`"
        raise DslError.single("E903", "substeps outside a recurrence", span, hint)
    if any(loop.is_open for loop in loops):
        hint = "one loop, run to its end, at a time"
        raise DslError.single("E903", "a loop of substeps inside a loop", span, hint)
    loop = Traversal(count, span, syn.next_serial())
    loops.append(loop)
    yield SubstepIndex(loop)
    loop.between = syn.next_serial()
    yield SubstepIndex(loop)
    loop.end = syn.next_serial()


@dataclass(frozen=True, slots=True)
class Unfolded:
    """An update as a start and loops: (loop, substep, the node of the substep that is the state before)."""

    start: syn.Node
    loops: tuple[tuple[Traversal, syn.Node, syn.Node], ...] = ()


def unfold(node: syn.Node, loops: list[Traversal], states: Collection[int]) -> Unfolded:
    """The loops that an update ends with, and what stands before the first one.

    ``states`` are the nodes, by identity, that are the present of other states.

    Raises DslError (E903) where a loop does something else than one substep of one state.
    """
    found: list[tuple[Traversal, syn.Node, syn.Node]] = []
    for loop in reversed(loops):
        if loop.made(node) == 2:
            before = _crossing(node, loop, states)
            start = _Match(loop, before).start(node)
            found.append((loop, node, before))
            node = start
        elif any(loop.made(n) in (1, 2) for n in nodes_of(node, states)):
            hint = "substeps end the update of a state; what follows belongs above the loop or in the output"
            message = "a value made by substeps is used after them"
            raise DslError.single("E903", message, node.span or loop.span, hint)
    return Unfolded(node, tuple(reversed(found)))


def _crossing(node: syn.Node, loop: Traversal, states: Collection[int]) -> syn.Node:
    """The value of the first pass that the second one uses."""
    inside = nodes_of(node, states, lambda n: loop.made(n) == 2)
    crossing = {id(n): n for n in inside if loop.made(n) == 1}
    if len(crossing) == 1:
        return next(iter(crossing.values()))
    what = "uses nothing of the substep before" if not crossing else "carries more than one value"
    hint = "each pass makes the state from the state before: `S = S - ...`"
    raise DslError.single("E903", f"a loop of substeps {what}", node.span or loop.span, hint)


class _Match:
    """The second pass against the first: equal but for the state before, which is thus found."""

    def __init__(self, loop: Traversal, before: syn.Node) -> None:
        self.loop = loop
        self.before = before
        self.found: syn.Node | None = None
        self.done: set[tuple[int, int]] = set()

    def start(self, node: syn.Node) -> syn.Node:
        if not self.agree(node, self.before) or self.found is None:
            hint = "every pass of a loop does the same"
            raise DslError.single(
                "E903", "the passes of a loop of substeps differ", node.span or self.loop.span, hint
            )
        return self.found

    def agree(self, second: syn.Node, first: syn.Node) -> bool:
        if second is self.before:
            self.found = self.found or first
            return self.found is first
        if second is first or (id(second), id(first)) in self.done:
            return True
        self.done.add((id(second), id(first)))
        two, one = syn.children(second), syn.children(first)
        return (
            syn.head(second) == syn.head(first)
            and len(two) == len(one)
            and all(self.agree(a, b) for a, b in zip(two, one, strict=True))
        )


def nodes_of(
    node: syn.Node, stops: Collection[int], enter: Callable[[syn.Node], bool] = lambda _: True
) -> Iterator[syn.Node]:
    """The node and all below it; not what lies in ``stops``, nor below a node that is not to be entered.

    Numbers and names are left out, rows of a substep aside: it says nothing where they were written.
    """
    todo, seen = [node], {id(node)}
    while todo:
        one = todo.pop()
        if not _is_leaf(one):
            yield one
        if enter(one):
            fresh = [c for c in syn.children(one) if id(c) not in seen and id(c) not in stops]
            seen.update(map(id, fresh))
            todo += fresh


def _is_leaf(node: syn.Node) -> bool:
    match node:
        case syn.Num():
            return True
        case syn.Ref(_, index):
            return index is None or index.row != syn.INDEX
        case _:
            return False
