"""From the values that a traced function returned to the equations of its states.

Values are told by identity: wherever an update or the output uses the very object that was returned as
another state, it reads that state at t.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from linalg_dsl.errors import DslError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.substeps import Traversal, Unfolded, nodes_of, unfold
from linalg_dsl.language.terms import DEEPEST

DEEPEST_TRACED = 2 * DEEPEST
"""Deeper values are left as they are (the evaluator refuses them); two passes of a loop nest twice."""


class Updates:
    """The updates ``returned`` by state, as statements in feeding order."""

    def __init__(self, returned: Mapping[str, syn.Node], loops: list[Traversal], index: str) -> None:
        self.returned = returned
        self.loops = loops
        self.index = index
        """What the index of loops is called in the statements: a name that nothing else has."""
        self.owner: dict[int, str] = {}
        for name, node in returned.items():
            if not isinstance(node, syn.Ref):  # an input or a past state is what it is elsewhere
                self.owner.setdefault(id(node), name)

    def statements(self) -> Iterator[syn.Statement]:
        made = {name: self.of_state(name, node) for name, node in self.returned.items()}
        placed: set[str] = set()

        def place(name: str) -> Iterator[syn.Statement]:
            if name in placed:
                return
            placed.add(name)
            statements, needed = made[name]
            for other in needed:
                yield from place(other)
            yield from statements

        for name in self.returned:
            yield from place(name)

    def of_state(self, name: str, node: syn.Node) -> tuple[list[syn.Statement], list[str]]:
        """The equation and loops of one state, and the states whose present they read."""
        others = {i: n for i, n in self.owner.items() if n != name}
        if id(node) in others:  # one object returned for two states
            other = others[id(node)]
            return [_assign(name, syn.Ref(other, syn.Index(0), node.span))], [other]
        whole = Unfolded(node)
        if node.depth <= DEEPEST_TRACED:
            whole = unfold(node, self.loops, others.keys())
        change = _Change(others, self.index)
        statements: list[syn.Statement] = []
        if not whole.loops or not _is_past(whole.start, name):
            statements.append(_assign(name, change(whole.start)))
        for loop, step, before in whole.loops:
            within = _Change({**others, id(before): name}, self.index)
            body = (_assign(name, within(step)),)
            change.met += [n for n in within.met if n != name]
            statements.append(syn.Loop(self.index, 1, loop.count, body, loop.span))
        return statements, list(dict.fromkeys(change.met))

    def output(self, node: syn.Node) -> syn.Node:
        """The output, reading at t whatever was returned as a state."""
        unchanged = {id(n): name for name, n in self.returned.items() if _is_past(n, name)}
        present = {**unchanged, **self.owner}
        if node.depth > DEEPEST_TRACED:
            return node
        for loop in self.loops:
            if any(loop.made(n) in (1, 2) for n in nodes_of(node, present.keys())):
                hint = "what substeps make is returned as a state"
                raise DslError.single(
                    "E903", "the output uses a value made by substeps that is no state", node.span, hint
                )
        return _Change(present, self.index)(node)


class _Change:
    """Names for objects: states at t, and the index of loops."""

    def __init__(self, names: Mapping[int, str], index: str) -> None:
        self.names = names
        self.index = index
        self.met: list[str] = []
        self.done: dict[int, syn.Node] = {}

    def __call__(self, node: syn.Node) -> syn.Node:
        return node if node.depth > DEEPEST_TRACED else self.walk(node)

    def walk(self, node: syn.Node) -> syn.Node:
        if id(node) not in self.done:
            self.done[id(node)] = self.changed(node)
        return self.done[id(node)]

    def changed(self, node: syn.Node) -> syn.Node:
        name = self.names.get(id(node))
        if name is not None:
            self.met.append(name)
            return syn.Ref(name, syn.Index(0), node.span)
        match node:
            case syn.Ref(known, syn.Index(time, row)) if row == syn.INDEX:
                return syn.Ref(known, syn.Index(time, self.index), node.span)
            case _:
                return syn.rebuild(node, self.walk)


def _assign(name: str, node: syn.Node) -> syn.Assign:
    return syn.Assign(name, syn.Index(0), node, node.span)


def _is_past(node: syn.Node, state: str) -> bool:
    return isinstance(node, syn.Ref) and (node.name, node.index) == (state, syn.Index(-1))
