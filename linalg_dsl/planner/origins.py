"""Where a value comes from: the equation in which it is computed, and the line of the spec behind that.

``Origins`` numbers the equations of a forward plan and those of its gradients through. ``places`` finds the
equation of every value of a plan that was made of these two: a lowered one, or one that kernels carry out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from linalg_dsl.algebra.traverse import symbols
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.cost import shared_nodes
from linalg_dsl.planner.equations import Equation, Writer
from linalg_dsl.planner.ops import OPS
from linalg_dsl.planner.plan import ChunkPlan, Node

Places = dict[int, int]
"""The number of an equation, by node."""


@dataclass(frozen=True)
class Origins:
    """``lines``: of each equation the lines of the spec, as ``RecurrenceSpec.written`` has them, behind it.

    ``ahead``: how many of the equations are the forward's.
    """

    forward: ChunkPlan
    backward: ChunkPlan
    equations: tuple[Equation, ...]
    ahead: int
    forward_places: Mapping[int, int]
    backward_places: Mapping[int, int]
    forward_names: Mapping[int, str]
    backward_names: Mapping[int, str]
    lines: tuple[tuple[int, ...], ...]

    def places(self, plan: ChunkPlan) -> Places:
        """The equation of each value; a value that no equation has belongs to the one that uses it first.

        What nothing uses but the map of a state from chunk to chunk belongs to that state's next value.
        """
        found: Places = {}
        for source, known in ((self.backward, self.backward_places), (self.forward, self.forward_places)):
            found |= {i: known[j] for i, j in _same(plan, source).items() if j in known}
        users: dict[int, int] = {}
        for i, node in enumerate(plan.nodes):
            for a in node.args:
                users.setdefault(a, i)
        for i in reversed(range(len(plan.nodes))):
            if i not in found and i in users and users[i] in found and not _is_leaf(plan.nodes[i]):
                found[i] = found[users[i]]
        ends = self._next_states()
        moves: dict[int, tuple[str, str]] = {}
        for i, node in enumerate(plan.nodes):
            if node.op == "carry":
                moves[i] = (str(node.attr("name")), str(node.attr("direction")))
                continue
            of = next((moves[a] for a in node.args if a in moves), None)
            if of is not None:
                moves[i] = of
                if i not in found and of in ends:
                    found[i] = ends[of]
        return found

    def _next_states(self) -> dict[tuple[str, str], int]:
        """The equations of the states behind a chunk, and of their gradients before it."""
        known = ((self.forward, self.forward_places), (self.backward, self.backward_places))
        return {c[:2]: places[c[3]] for plan, places in known for c in plan.carries if c[3] in places}


def find_origins(
    spec: RecurrenceSpec, forward: ChunkPlan, backward: ChunkPlan, writer: type[Writer] = Writer
) -> Origins:
    """The origins of both plans' values; ``writer`` writes their equations."""
    first = writer(forward, {}, {})
    ahead = first.run()
    shared = shared_nodes(backward, forward)
    second = writer(backward, shared, first.names)
    lines = (*ahead, *second.run())
    places = _places(forward, first, ahead, 0)
    back = _places(backward, second, lines, len(ahead))
    back |= {i: places[j] for i, j in shared.items() if j in places}
    found = _lines_ahead(spec, forward, ahead)
    return Origins(
        forward=forward,
        backward=backward,
        equations=lines,
        ahead=len(ahead),
        forward_places=places,
        backward_places=back,
        forward_names=first.names,
        backward_names=second.names,
        lines=_lines_behind(spec, lines, found, backward, back),
    )


def _is_leaf(node: Node) -> bool:
    return OPS[node.op].kind == "leaf"


def _places(plan: ChunkPlan, writer: Writer, lines: Sequence[Equation], start: int) -> Places:
    """The equations of the values of one plan, which begin with number ``start``."""
    numbers = {e.left: i for i, e in enumerate(lines)}
    lines = lines[start:]
    found: Places = {}
    for i, e in enumerate(lines):
        if e.node is not None:
            found.setdefault(e.node, start + i)
    for i, node in enumerate(plan.nodes):
        if node.op == "pick" and i not in writer.known and writer.names.get(i) in numbers:
            found[i] = numbers[writer.names[i]]
    for i, e in enumerate(lines):
        todo = list(plan.nodes[e.node].args) if e.node is not None else []
        while todo:
            n = todo.pop()
            if n not in found and n not in writer.known and not _is_leaf(plan.nodes[n]):
                found[n] = start + i
                todo += plan.nodes[n].args
    return found


def _same(plan: ChunkPlan, source: ChunkPlan) -> dict[int, int]:
    """The nodes of ``plan`` that hold a value of ``source``: by name, or computed alike of such values."""
    numbers = {node: i for i, node in enumerate(source.nodes)}
    names: dict[str, int] = {}
    for i, node in enumerate(source.nodes):
        if node.label and not _is_leaf(node):
            names.setdefault(node.label, i)
    same: dict[int, int] = {}
    results = dict(source.outputs)
    carried = {c[:2]: c[3] for c in source.carries}
    ends = {n: results[name] for name, n in plan.outputs if name in results}
    ends |= {c[3]: carried[c[:2]] for c in plan.carries if c[:2] in carried}
    for i, node in enumerate(plan.nodes):
        named = names.get(node.label)
        if i in ends:
            same[i] = ends[i]
        elif named is not None and source.nodes[named].axes == node.axes:
            same[i] = named
        elif all(a in same for a in node.args):
            twin = numbers.get(replace(node, args=tuple(same[a] for a in node.args)))
            if twin is not None:
                same[i] = twin
    return same


# -- lines of the spec ----------------------------------------------------------------------------------
def _written(spec: RecurrenceSpec) -> tuple[tuple[str, frozenset[str]], ...]:
    """(target, the inputs that it is made of) of each line; what reads a state is made of more."""
    equations = spec.written or (*spec.updates, *spec.outputs)
    inputs = {i.name for i in spec.inputs}
    known: dict[str, frozenset[str]] = {}
    out = []
    for e in equations:
        used = {s.name for s in symbols(e.value)}
        known[e.target] = frozenset(used & inputs).union(*(known[u] for u in used if u in known))
        out.append((e.target, known[e.target]))
    return tuple(out)


def _lines_ahead(
    spec: RecurrenceSpec, forward: ChunkPlan, lines: Sequence[Equation]
) -> list[tuple[int, ...]]:
    """The lines behind the forward's equations.

    What a state's next value needs comes from that state's line, other values from the output's; a value of
    the token alone comes from the binding that is made of the same inputs, if there is one.
    """
    written = _written(spec)
    states = {s.name for s in spec.states}
    ends = {*states, *(o.target for o in spec.outputs)}
    bindings = {used: i for i, (target, used) in enumerate(written) if target not in ends and used}
    last = {target: i for i, (target, _) in enumerate(written)}
    needs: list[tuple[int, frozenset[int]]] = [
        (last[name], forward.live([after])) for name, _, _, after in forward.carries if name in last
    ]
    needs += [(last[name], forward.live([n])) for name, n in forward.outputs if name in last]
    out: list[tuple[int, ...]] = []
    for e in lines:
        if e.left.removesuffix("_t") in ends:
            out.append((last[e.left.removesuffix("_t")],))
            continue
        node = e.node if e.node is not None else 0
        behind = forward.live([node])
        leaves = {forward.nodes[i] for i in behind if _is_leaf(forward.nodes[i])}
        if not any(leaf.op == "carry" for leaf in leaves):
            used = frozenset(str(n.attr("name")) for n in leaves if n.op in ("input", "param"))
            if used in bindings:
                out.append((bindings[used],))
                continue
        out.append(next(((line,) for line, live in needs if node in live), ()))
    return out


def _lines_behind(
    spec: RecurrenceSpec,
    lines: Sequence[Equation],
    ahead: list[tuple[int, ...]],
    backward: ChunkPlan,
    places: Mapping[int, int],
) -> tuple[tuple[int, ...], ...]:
    """The lines of all equations: a gradient has those of its value, an input's those that use the input."""
    start = len(ahead)
    of = {e.left: found for e, found in zip(lines[:start], ahead, strict=True)}
    written = [
        (i, {s.name for s in symbols(e.value)})
        for i, e in enumerate(spec.written or (*spec.updates, *spec.outputs))
    ]
    gradients = {n: name for name, n in backward.outputs}
    found: list[tuple[int, ...]] = [*ahead, *([()] * (len(lines) - start))]
    for i in range(start, len(lines)):
        e = lines[i]
        value = e.left.removeprefix("d")
        name = gradients.get(e.node, "") if e.node is not None else ""
        source = name.removeprefix("d_").partition("[")[0]
        if value in of:
            found[i] = of[value]
        elif source:
            found[i] = tuple(line for line, used in written if source in used)
    for i in range(start, len(lines)):  # what has no name of its own: the lines of the gradient it is made of
        node = lines[i].node
        if not found[i] and node is not None:
            found[i] = _of_operands(spec, backward, node, found, places, start)
    return tuple(found)


def _of_operands(
    spec: RecurrenceSpec,
    plan: ChunkPlan,
    node: int,
    found: Sequence[tuple[int, ...]],
    places: Mapping[int, int],
    ahead: int,
) -> tuple[int, ...]:
    """The lines of the first gradient among what a node is made of: of the output, a state, or a value."""
    targets = [e.target for e in (spec.written or (*spec.updates, *spec.outputs))]
    states, outputs = {s.name for s in spec.states}, {o.target for o in spec.outputs}
    todo = list(reversed(plan.nodes[node].args))
    while todo:
        n = todo.pop()
        leaf = plan.nodes[n]
        if leaf.op == "cotangent":
            return tuple(i for i, target in enumerate(targets) if target in outputs)
        if leaf.op == "carry" and leaf.attr("direction") == "reverse":
            return tuple(i for i, target in enumerate(targets) if target == leaf.attr("name"))
        place = places.get(n)
        if place is not None and place >= ahead and place != places.get(node) and found[place]:
            return found[place]
        todo += reversed(leaf.args)
    return tuple(i for i, target in enumerate(targets) if target in states)
