"""The boundary term of a gate gradient: the one value with operands from both directions.

Lambda_{C<-0} o sum_V S_0 o dS_C needs the state before a chunk, which the forward walk has, and the
cotangent after it, which the reverse walk has. It is carried over chunks (design: exact at every 8th
boundary and clamped between), or formed exactly at every chunk. The latter is a must where a gate is
declared in linear space: its gradient is d log(lambda) / lambda, so an error that is small beside the
other gates' is not small.
"""

from __future__ import annotations

from linalg_dsl.codegen.schedule.kernel_plan import Boundary
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder


def with_boundary(plan: ChunkPlan) -> tuple[ChunkPlan, Boundary | None]:
    """Finds the boundary term and the pairs that carry it, adding the cotangents that are missing."""
    sites = [i for i, n in enumerate(plan.nodes) if n.op == "boundary_gate"]
    if not sites:
        return plan, None
    if len(sites) > 1:
        raise InternalError("one decay per state until several states are supported")
    builder = PlanBuilder(plan.nodes)
    state, cotangent, w = plan.nodes[sites[0]].args
    after = {direction: node for _, direction, _, node in plan.carries}
    total = builder.add_node("total", (w,), builder.axes(w)[1:])
    starts = tuple((x, builder.read(z, state, con="V")) for x, z in writes(plan.nodes, after["reverse"]))
    ends = tuple((x, builder.read(z, cotangent, con="V")) for x, z in writes(plan.nodes, after["forward"]))
    whole = ChunkPlan(plan.name, tuple(builder.nodes), plan.carries, plan.outputs)
    return whole, Boundary(sites[0], _takes_a_logarithm(plan, w), starts, ends, total)


def _takes_a_logarithm(plan: ChunkPlan, w: int) -> bool:
    """Whether the log decay is the logarithm of something computed."""
    return any(plan.nodes[n].op == "unary" and plan.nodes[n].attr("fn") == "log" for n in plan.live([w]))


def writes(nodes: tuple[Node, ...], root: int) -> list[tuple[int, int]]:
    """The (x, z) of every x^T z that a new state sums up."""
    node = nodes[root]
    if node.op == "write":
        return [(node.args[0], node.args[1])]
    if node.op in ("add", "mul"):
        return [pair for a in node.args for pair in writes(nodes, a)]
    return []
