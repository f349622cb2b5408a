"""Which axis of the states a step kernel may split into blocks, one program each.

A program computes its block of every value that has the split axis and all of every value that has not.
A sum over the split axis is then known in part only: it may go to an output (or to a gradient), whose parts
are added outside, through ops that are linear in it with whole factors, but not into a state or a function.

``whole``    every program has the value
``split``    a program has its block of it
``partial``  the value is the sum over the programs of what each has

In the backward the gradient of what is ``whole`` is ``partial``, since every program sends its share; so
that nothing is counted once per program, whole terms of outputs stand in the first block only (op ``first``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.adjoint import gradient_name
from linalg_dsl.planner.ops import OPS
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder
from linalg_dsl.planner.step_plan import step_backward

Share = Literal["whole", "split", "partial"]
_NOMINAL = 64.0
"""Nominal size of an axis, to compare how much memory the partial results of two ways take."""
STEP_KERNELS = ("forward", "backward")
"""The names of the two kernels that go token after token."""


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """The plans of a step as its kernels carry them out; ``split`` is None where one program has all.

    ``partial_output``, ``partial_gradients``: those of which every program writes a partial sum.
    ``products``: gradients of params that are a product of a column and a row at every token, with the nodes
    of both. Kernels write these, and the sum over the tokens is formed behind them: inside, a matrix would be
    held beside every param in the registers of one program.
    """

    split: str | None
    forward: ChunkPlan
    backward: ChunkPlan
    partial_output: bool = False
    partial_gradients: frozenset[str] = frozenset()
    products: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        per = "one program per sequence and head"
        how = (
            f"{per} and block of {self.split}" if self.split else f"{per}: no axis of the states can be split"
        )
        partial = [name for name, _ in self.forward.outputs if self.partial_output]
        partial += sorted(self.partial_gradients)
        parts = [f"partial sums of {', '.join(partial)}"] if partial else []
        parts += [f"{', '.join(self.products)} summed over tokens behind the kernel"] if self.products else []
        return "; ".join([f"step: {how}", *parts])

    @property
    def factors(self) -> tuple[int, ...]:
        """The columns and rows of the products, each once."""
        return tuple(dict.fromkeys(n for pair in self.products.values() for n in pair))


def schedule(forward: ChunkPlan, backward: ChunkPlan) -> StepSchedule:
    """The split with the fewest partial results; none where no axis can be split."""
    found: list[tuple[float, int, StepSchedule]] = []
    state_axes = {a for _, _, leaf, _ in forward.carries for a in forward.nodes[leaf].axes}
    for rank, axis in enumerate(a for a in ("V", "K") if a in state_axes):
        made = _split(forward, axis)
        if made is not None:
            found.append((_cost(made), rank, made))
    if not found:
        return StepSchedule(None, forward, backward, products=_products(backward, None))
    return min(found, key=lambda f: f[:2])[2]


def _split(forward: ChunkPlan, axis: str) -> StepSchedule | None:
    prepared = _with_first(forward, axis)
    if prepared is None:
        return None
    backward = step_backward(prepared)
    shares = node_shares(backward.nodes, axis)
    for name, direction, _, after in backward.carries:
        if direction == "reverse" and shares[after] == "whole" and backward.nodes[after].op != "number":
            raise InternalError(f"the gradient of {name} is counted once per block of {axis}")
    partial = set()
    for name, node in backward.outputs:
        if shares[node] is None or shares[node] == "whole":
            raise InternalError(f"the gradient {name} cannot be split over {axis}")
        if shares[node] == "partial":
            partial.add(name)
    products = _products(backward, axis)
    partial -= set(products)
    return StepSchedule(axis, prepared, backward, _sums_output(prepared, axis), frozenset(partial), products)


def _products(backward: ChunkPlan, axis: str | None) -> dict[str, tuple[int, int]]:
    """The gradients of params that are products of two vectors of which no program has a part of a sum."""
    nodes = backward.nodes
    shares: Sequence[Share | None] = [None] * len(nodes) if axis is None else node_shares(nodes, axis)
    params = {gradient_name(n) for n in nodes if n.op == "param" and n.attr("row") is None}
    found = {}
    for name, i in backward.outputs:
        if name not in params or nodes[i].op != "mul" or len(nodes[i].axes) != 2:
            continue
        by_axes = {nodes[a].axes: a for a in nodes[i].args if shares[a] != "partial"}
        x, y = (by_axes.get((a,)) for a in nodes[i].axes)
        if x is not None and y is not None:
            found[name] = (x, y)
    return found


def decode_schedule(forward: ChunkPlan) -> StepSchedule:
    """The split of a kernel that decodes: without partial outputs if there is such a one.

    There is no backward: in its place stands the forward plan once more.
    """
    state_axes = {a for _, _, leaf, _ in forward.carries for a in forward.nodes[leaf].axes}
    found: StepSchedule | None = None
    for axis in (a for a in ("V", "K") if a in state_axes):
        prepared = _with_first(forward, axis)
        if prepared is None:
            continue
        partial = _sums_output(prepared, axis)
        if not partial:
            return StepSchedule(axis, prepared, prepared)
        found = found or StepSchedule(axis, prepared, prepared, partial)
    return found or StepSchedule(None, forward, forward)


def _sums_output(prepared: ChunkPlan, axis: str) -> bool:
    """Whether every program has a partial sum of an output; of one that is whole the others then have 0."""
    shares, nodes = node_shares(prepared.nodes, axis), prepared.nodes
    return any(shares[i] == "partial" and nodes[i].op != "first" for _, i in prepared.outputs)


def _cost(made: StepSchedule) -> float:
    """Nominal elements of partial results per token."""
    nodes = [made.backward.nodes[i] for name, i in made.backward.outputs if name in made.partial_gradients]
    nodes += [made.forward.nodes[i] for _, i in made.forward.outputs if made.partial_output]
    return sum(_NOMINAL ** len(node.axes) for node in nodes)


def node_shares(nodes: Sequence[Node], axis: str) -> list[Share | None]:
    """The share of every node; None where no program can compute its share from those of the operands."""
    shares: list[Share | None] = []
    for node in nodes:
        shares.append(_share(node, [shares[a] for a in node.args], nodes, axis))
    return shares


def _share(node: Node, given: Sequence[Share | None], nodes: Sequence[Node], axis: str) -> Share | None:
    own: Share = "split" if axis in node.axes else "whole"
    if OPS[node.op].kind == "leaf":
        reverse = node.op == "carry" and node.attr("direction") == "reverse"
        return "partial" if reverse and own == "whole" else own
    if any(s is None for s in given):
        return None
    partial = [s == "partial" for s in given]
    match node.op:
        case "add":
            if not any(partial):
                return own
            return "partial" if all(partial) and own == "whole" else None
        case "mul" | "contract":
            summed = node.op == "contract" and node.attr("axis") == axis
            if summed:
                return None if any(partial) else "partial"
            if not any(partial):
                return own
            others = [s for s in given if s != "partial"]
            return "partial" if others == ["whole"] else None
        case "sum":
            if node.attr("axis") == axis:
                return None if partial[0] else "partial"
            return given[0]
        case "expand":
            return (None if partial[0] else "split") if node.attr("axis") == axis else given[0]
        case "first":
            return "partial" if given[0] == "whole" else None
        case "swap":
            names = {str(node.attr("axis")), str(node.attr("other"))}
            touched = names & set(nodes[node.args[0]].axes)
            return None if axis in names and touched else given[0]
        case "amax":
            return None if partial[0] or node.attr("axis") == axis else own
        case _:  # functions, max, min, comparisons
            return None if any(partial) else own


def _with_first(forward: ChunkPlan, axis: str) -> ChunkPlan | None:
    """The plan with whole terms beside partial ones in the first block only; None if it cannot be split."""
    b = PlanBuilder()
    made: list[int] = []
    shares: list[Share | None] = []

    def share_of(i: int) -> Share | None:
        while len(shares) < len(b.nodes):
            node = b.nodes[len(shares)]
            shares.append(_share(node, [shares[a] for a in node.args], b.nodes, axis))
        return shares[i]

    for node in forward.nodes:
        args = [made[a] for a in node.args]
        if node.op == "add":
            kinds = [share_of(a) for a in args]
            if "partial" in kinds and "whole" in kinds and axis not in node.axes:
                args = [b.first(a, axis) if k == "whole" else a for a, k in zip(args, kinds, strict=True)]
        made.append(b.add_node(node.op, args, node.axes, node.label, **dict(node.attrs)))
        if share_of(made[-1]) is None:
            return None
    outputs = []
    for name, i in forward.outputs:
        whole = share_of(made[i]) == "whole"
        outputs.append((name, b.first(made[i], axis) if whole else made[i]))
    carries = [(n, d, made[leaf], made[after]) for n, d, leaf, after in forward.carries]
    if any(share_of(after) == "partial" for _, _, _, after in carries):
        return None
    return b.finish(forward.name, carries, outputs)


def needs_states(backward: ChunkPlan) -> bool:
    """Whether the gradients read a state, so that the states before every token are needed."""
    roots = [i for _, i in backward.outputs]
    roots += [after for _, direction, _, after in backward.carries if direction == "reverse"]
    forward = {leaf for _, direction, leaf, _ in backward.carries if direction == "forward"}
    return bool(backward.live(roots) & forward)
