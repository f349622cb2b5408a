"""The boundary terms of gate gradients: the values with operands from both directions.

Lambda_{C<-0} o S_0 o dS_C, summed over one axis, needs the state before a chunk, which the forward walk has,
and the cotangent after it, which the reverse walk has. It is carried over chunks (design: exact at every 8th
boundary and clamped between), or formed exactly at every chunk. The latter is a must where a gate is
declared in linear space: its gradient is d log(lambda) / lambda, so an error that is small beside the
other gates' is not small. Coupled states have more products of a state and a cotangent than there are
balances over a chunk: theirs are formed at every chunk (``BoundaryProducts``).
"""

from __future__ import annotations

from linalg_dsl.codegen.schedule.kernel_plan import Axis, Boundary, BoundaryProducts, BoundaryTerm, Direction
from linalg_dsl.planner.ops import contracted_axes
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder

_LOGARITHMS = ("log", "log_size")


def with_boundaries(plan: ChunkPlan) -> tuple[ChunkPlan, tuple[BoundaryTerm, ...]]:
    """Finds the boundary terms and the pairs that carry them, adding the cotangents that are missing.

    Gates that decay along one axis share their term, which is of the product of all decays.
    """
    if any(n.op == "boundary_product" for n in plan.nodes):
        return plan, _products(plan)
    sites: dict[Axis, list[int]] = {}
    for i, node in enumerate(plan.nodes):
        if node.op == "boundary_gate":
            sites.setdefault(_axis_of(node), []).append(i)
    if not sites:
        return plan, ()
    shared = {i: alike[0] for alike in sites.values() for i in alike}
    nodes = [_redirected(node, shared) for node in plan.nodes]
    builder = PlanBuilder(nodes)
    found = tuple(_boundary(builder, plan, axis, alike) for axis, alike in sites.items())
    return ChunkPlan(plan.name, tuple(builder.nodes), plan.carries, plan.outputs), found


def _products(plan: ChunkPlan) -> tuple[BoundaryProducts, ...]:
    found: dict[Axis, list[tuple[int, int, int]]] = {}
    for i, node in enumerate(plan.nodes):
        if node.op == "boundary_product":
            state, cotangent = node.args
            found.setdefault(_axis_of(node), []).append((i, state, cotangent))
    return tuple(BoundaryProducts(axis, "forward", tuple(terms)) for axis, terms in found.items())


def _boundary(builder: PlanBuilder, plan: ChunkPlan, axis: Axis, sites: list[int]) -> Boundary:
    state, cotangent, w = plan.nodes[sites[0]].args
    after = {direction: node for _, direction, _, node in plan.carries}
    total = builder.add_node("total", (w,), builder.axes(w)[1:])
    state, before = _without_decay(plan, state)
    cotangent, behind = _without_decay(plan, cotangent)
    starts = _pairs(builder, axis, writes(plan.nodes, after["reverse"]), state)
    ends = _pairs(builder, axis, writes(plan.nodes, after["forward"]), cotangent)
    exact = any(_takes_a_logarithm(plan, plan.nodes[i].args[2]) for i in sites)
    keeper: Direction = "reverse" if _needs_reverse_walk(builder.nodes, axis, starts) else "forward"
    return Boundary(sites[0], axis, keeper, exact, starts, ends, cotangent, total, (*before, *behind))


def _axis_of(node: Node) -> Axis:
    return "V" if node.axes == ("V",) else "K"


def _redirected(node: Node, shared: dict[int, int]) -> Node:
    args = tuple(shared.get(a, a) for a in node.args)
    return node if args == node.args else Node(node.op, args, node.attrs, node.axes, node.label)


def _without_decay(plan: ChunkPlan, n: int) -> tuple[int, tuple[int, ...]]:
    """(x, the decays) where n is a state x times decays of the whole chunk."""
    node = plan.nodes[n]
    if node.op == "mul":
        for x, decay in (node.args, node.args[::-1]):
            if plan.nodes[decay].op == "total":
                inner, decays = _without_decay(plan, x)
                return inner, (*decays, decay)
    return n, ()


def _pairs(
    builder: PlanBuilder, axis: Axis, written: list[tuple[int, int]], other: int
) -> tuple[tuple[int, int], ...]:
    """(x, dx) along ``axis`` for every x^T z that a state gains; ``other`` is its factor in the term."""
    if axis == "K":
        return tuple((x, builder.read(z, other, con="V")) for x, z in written)
    return tuple((z, builder.read(x, other, con="K")) for x, z in written)


def _needs_reverse_walk(nodes: list[Node], axis: Axis, pairs: tuple[tuple[int, int], ...]) -> bool:
    """Whether the values depend on a read of dS that the reverse walk of this axis has to make."""
    todo, seen = [n for pair in pairs for n in pair], set[int]()
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        node = nodes[n]
        if node.op == "read" and axis not in _contracted(nodes, node) and _is_reverse(nodes, node.args[1]):
            return True
        todo.extend(node.args)
    return False


def _is_reverse(nodes: list[Node], n: int) -> bool:
    """Whether a state is a cotangent."""
    node = nodes[n]
    if node.op == "carry":
        return node.attr("direction") == "reverse"
    return any(_is_reverse(nodes, a) for a in node.args if nodes[a].axes == node.axes)


def _contracted(nodes: list[Node], node: Node) -> frozenset[str]:
    return contracted_axes(node.op, tuple(nodes[a].axes for a in node.args), dict(node.attrs))


def _takes_a_logarithm(plan: ChunkPlan, w: int) -> bool:
    """Whether the log decay is the logarithm of something computed."""
    return any(
        plan.nodes[n].op == "unary" and plan.nodes[n].attr("fn") in _LOGARITHMS for n in plan.live([w])
    )


def writes(nodes: tuple[Node, ...], root: int) -> list[tuple[int, int]]:
    """The (x, z) of every x^T z that a new state sums up."""
    node = nodes[root]
    if node.op == "write":
        return [(node.args[0], node.args[1])]
    if node.op in ("add", "mul"):
        return [pair for a in node.args for pair in writes(nodes, a)]
    return []
