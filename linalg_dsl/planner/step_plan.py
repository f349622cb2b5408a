"""The plans of one token, forward and backward, and their rules."""

from __future__ import annotations

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.ops import Axes, ordered
from linalg_dsl.planner.plan import ChunkPlan, PlanBuilder

LEAVES = frozenset({"input", "param", "const", "number", "carry", "cotangent", "eye"})
ELEMENTWISE = frozenset({"add", "mul", "maximum", "minimum", "compare"})
OPS_OF_A_STEP = LEAVES | ELEMENTWISE | {"unary", "sum", "amax", "expand", "contract", "swap", "first"}


def step_backward(forward: ChunkPlan) -> ChunkPlan:
    """The gradients of one token: as of a chunk, with a sum of products in one op."""
    return contracted(shared_products(backward(forward)))


def contracted(plan: ChunkPlan) -> ChunkPlan:
    """The same plan with ``contract`` for the sum of a product that nothing else uses."""
    uses = [0] * len(plan.nodes)
    for node in plan.nodes:
        for a in node.args:
            uses[a] += 1
    for root in plan.roots:
        uses[root] += 1
    b = PlanBuilder()
    made: list[int] = []
    for node in plan.nodes:
        args = [made[a] for a in node.args]
        if node.op == "sum":
            (inner,) = node.args
            product = plan.nodes[inner]
            axis = str(node.attr("axis"))
            both = all(axis in plan.nodes[a].axes for a in product.args)
            if product.op == "mul" and uses[inner] == 1 and both:
                x, y = (made[a] for a in product.args)
                made.append(b.label(b.contract(x, y, axis), node.label))
                continue
        made.append(b.add_node(node.op, args, node.axes, node.label, **dict(node.attrs)))
    return b.finish(
        plan.name,
        [(name, way, made[leaf], made[after]) for name, way, leaf, after in plan.carries],
        [(name, made[i]) for name, i in plan.outputs],
    )


def shared_products(plan: ChunkPlan) -> ChunkPlan:
    """The same plan with (a b) c as (a c) b where a c is a value already and nothing else takes a b.

    So the derivative of a decay takes the cotangent of the decayed state times the state before.
    """
    uses = [0] * len(plan.nodes)
    products: dict[frozenset[int], tuple[int, ...]] = {}
    for node in plan.nodes:
        for a in node.args:
            uses[a] += 1
        if node.op == "mul":
            products[frozenset(node.args)] = node.args
    for root in plan.roots:
        uses[root] += 1
    b = PlanBuilder()
    made: list[int] = []
    for node in plan.nodes:
        made.append(-1)
        for inner, c in (node.args, node.args[::-1]) if node.op == "mul" else ():
            parts = plan.nodes[inner].args if plan.nodes[inner].op == "mul" and uses[inner] == 1 else ()
            for x, y in (parts, parts[::-1]) if parts else ():
                pair = products.get(frozenset((x, c)))
                if pair is not None and made[-1] < 0:
                    made[-1] = b.label(b.mul(b.mul(*(made[i] for i in pair)), made[y]), node.label)
        if made[-1] < 0:
            args = [made[a] for a in node.args]
            made[-1] = b.add_node(node.op, args, node.axes, node.label, **dict(node.attrs))
    return b.finish(
        plan.name,
        [(name, way, made[leaf], made[after]) for name, way, leaf, after in plan.carries],
        [(name, made[i]) for name, i in plan.outputs],
    )


def verify_step(plan: ChunkPlan) -> None:
    """Raises ``InternalError`` naming the first node that breaks a rule of a one-token plan."""
    for i, node in enumerate(plan.nodes):
        where = f"plan {plan.name}, node %{i} = {node.op}"
        if node.op not in OPS_OF_A_STEP:
            raise InternalError(f"{where}: is no op of a step")
        if any(not 0 <= a < i for a in node.args):
            raise InternalError(f"{where}: an operand does not come before its use")
        if {"t", "s"} & set(node.axes) or ordered(node.axes) != node.axes:
            raise InternalError(f"{where}: axes {node.axes} are none of a step")
        axes = [plan.nodes[a].axes for a in node.args]
        expected = _result_axes(node.op, dict(node.attrs), axes, node.axes)
        if node.axes != expected:
            raise InternalError(f"{where}: has axes {node.axes}, expected {expected}")
    for name, direction, leaf, after in plan.carries:
        given, result = plan.nodes[leaf], plan.nodes[after]
        if given.op != "carry" or (given.attr("name"), given.attr("direction")) != (name, direction):
            raise InternalError(f"plan {plan.name}: %{leaf} is not the {direction} carry of {name}")
        if result.axes != given.axes and result.op != "number":
            raise InternalError(f"plan {plan.name}: {name} has axes {given.axes}, its next {result.axes}")


def _result_axes(op: str, attrs: dict[str, object], axes: list[Axes], own: Axes) -> Axes:
    if op in LEAVES:
        if axes:
            raise InternalError(f"{op} takes no operands")
        return own
    if op in ELEMENTWISE:
        (x, y) = axes
        return ordered((*x, *y))
    axis = str(attrs.get("axis"))
    match op:
        case "unary" | "first":
            return axes[0]
        case "sum" | "amax":
            return _without(axes[0], axis)
        case "contract":
            return _without(ordered((*_without(axes[0], axis), *_without(axes[1], axis), axis)), axis)
        case "expand":
            return ordered((*axes[0], axis))
        case "swap":
            names = {axis: str(attrs["other"]), str(attrs["other"]): axis}
            return ordered(names.get(a, a) for a in axes[0])
        case _:
            raise InternalError(f"no rule for {op}")


def _without(axes: Axes, axis: str) -> Axes:
    if axis not in axes:
        raise InternalError(f"an operand {axes} has no axis {axis}")
    return tuple(a for a in axes if a != axis)
