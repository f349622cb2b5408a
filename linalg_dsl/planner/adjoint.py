"""The backward plan of a chunk: a reversed sweep over the forward plan with one rule per op."""

from __future__ import annotations

from functools import reduce

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.adjoint_rules import RULES, Pick
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder

LAZY = frozenset({"mul", "unary", "maximum", "minimum", "sum"})
"""Ops whose rule may get a cotangent that lacks axes of the result (being the same along them): what they
hand on has every axis that it must be summed over. For all others the sweep repeats it first."""

SPAN_SUMS = ("span_sum", "gate_sum")
"""Linear ops dear enough that contributions which went through them are added before, not after."""


def gradient_name(leaf: Node) -> str:
    """The output of a backward plan that is the gradient of an input or param: ``d_k``, ``d_k[0]``."""
    row = dict(leaf.attrs).get("row")
    return f"d_{leaf.attr('name')}" + ("" if row is None else f"[{row}]")


def backward(forward: ChunkPlan, wanted: frozenset[str] | None = None) -> ChunkPlan:
    """The plan that gives the gradients of one chunk.

    Leaves beyond those of ``forward``: ``cotangent`` (name of an output) and ``carry`` (name of a state,
    direction ``reverse``: the gradient of the state after the chunk, dS_C). Outputs: ``d_<name>`` of each
    input and param, ``d_<name>[<row>]`` of each row that is used, with the axes of the leaf; a param's is
    the sum over the tokens of the chunk. ``wanted`` restricts them to these names (None: all). A leaf that
    no output depends on has no gradient here: it is zero. The forward nodes that gradients need are part
    of the plan, and so is the forward carry, which hands S_0 on when chunks are replayed.
    """
    b = PlanBuilder(forward.nodes)
    sweep = _Sweep(b, wanted)
    for name, node in forward.outputs:
        sweep.add(node, b.add_node("cotangent", (), b.axes(node), f"d_{name}", name=name))
    reverse: dict[str, int] = {}
    for state, _, leaf, after in forward.carries:
        attrs = {"name": state, "direction": "reverse"}
        reverse[state] = b.add_node("carry", (), b.axes(leaf), f"d_{state.lower()}_next", **attrs)
        sweep.add(after, reverse[state])
    for node in reversed(range(len(forward.nodes))):
        sweep.visit(node)
    carries = list(forward.carries)
    for state, _, leaf, _ in forward.carries:
        before = sweep.whole(leaf)
        before = b.number(0) if before is None else b.label(before, f"d_{state.lower()}")
        carries.append((state, "reverse", reverse[state], before))
    return b.finish(f"{forward.name}_backward", carries, sweep.gradients(forward))


def _adds_up(x: Node, y: Node) -> bool:
    """Whether x + y is one sum over spans."""
    return x.op == y.op and x.op in SPAN_SUMS and x.attrs == y.attrs and x.axes == y.axes


def _label(leaf: Node) -> str:
    """The gradient's name as an identifier: ``d_k``, ``d_k_0``."""
    return gradient_name(leaf).replace("[", "_").rstrip("]")


class _Sweep:
    """Cotangents of the forward nodes, added up as they come in."""

    def __init__(self, builder: PlanBuilder, wanted: frozenset[str] | None) -> None:
        self.b = builder
        self.wanted = wanted
        self.found: dict[tuple[int, int], list[int]] = {}
        self.needed = self._needed()

    def _needed(self) -> list[bool]:
        """Which forward nodes depend on a leaf that wants a gradient."""
        needed: list[bool] = []
        for node in self.b.nodes:
            match node.op:
                case "input" | "param":
                    needed.append(self.wanted is None or node.attr("name") in self.wanted)
                case "carry":
                    needed.append(True)
                case _:
                    needed.append(any(needed[a] for a in node.args))
        return needed

    def whole(self, node: int) -> int | None:
        """The cotangent of a node, with all its axes."""
        found = self.cotangent(node)
        return None if found is None else self.b.expand(found, self.b.axes(node))

    def gradients(self, forward: ChunkPlan) -> list[tuple[str, int]]:
        """The wanted outputs, in the order in which the forward plan meets the leaves."""
        named = []
        for i, node in enumerate(forward.nodes):
            if node.op in ("input", "param") and (gradient := self.whole(i)) is not None:
                named.append((gradient_name(node), self.b.label(gradient, _label(node))))
        return named

    def add(self, node: int, cotangent: int, index: int = 0) -> None:
        b = self.b
        if not self.needed[node] or b.value_of(cotangent) == 0:
            return
        parts = self.found.setdefault((node, index), [])
        cotangent = b.sum_to(cotangent, b.axes(node))
        like = b.nodes[cotangent]
        for at, part in enumerate(parts):
            if _adds_up(b.nodes[part], like):
                whole = b.add(b.nodes[part].args[0], like.args[0])
                parts[at] = b.add_node(like.op, (whole,), like.axes, **dict(like.attrs))
                return
            if like.op not in SPAN_SUMS and b.nodes[part].op not in SPAN_SUMS:
                parts[at] = b.add(part, cotangent)
                return
        parts.append(cotangent)

    def cotangent(self, node: int, index: int = 0) -> int | None:
        """The sum of what came in."""
        parts = self.found.get((node, index))
        return reduce(self.b.add, parts) if parts else None

    def visit(self, node: int) -> None:
        """Hands the cotangents of a node on to its operands."""
        b = self.b
        this = b.nodes[node]
        results = 1
        if this.op == "solve":
            results = int(str(this.attr("m"))) + int(str(this.attr("r")))
        cotangents = [self.cotangent(node, i) for i in range(results)]
        for d in cotangents:
            if d is not None and this.label:
                b.label(d, f"d_{this.label}")
        if not this.args or not any(d is not None for d in cotangents):
            return
        rule = RULES.get(this.op)
        if rule is None:
            raise InternalError(f"op {this.op!r} has no adjoint rule")
        if not self._may_be_lazy(this):
            cotangents = [d if d is None else b.expand(d, this.axes) for d in cotangents]
        for operand, part in zip(this.args, rule(b, node, cotangents), strict=True):
            match part:
                case None:
                    continue
                case Pick(index, cotangent):
                    self.add(operand, cotangent, index)
                case cotangent:
                    self.add(operand, cotangent)

    def _may_be_lazy(self, node: Node) -> bool:
        if node.op == "add":
            return all(self.b.axes(a) == node.axes for a in node.args)
        return node.op in LAZY
