"""From chunk equations to the ops that kernels carry out, forward and backward in one plan.

- ``solve`` becomes T = (I - G Sigma)^-1 (UT transform) and products with it:
  U = T (R + G W), Z = W + Sigma U, so T needs G and Sigma only and can be made before the walk;
  its reversed form X = T^T (dU + Sigma^T dZ), Y = dZ + G^T X shares that T;
- ``scale_state`` becomes a product with ``total``;
- the three derivatives of one decayed score become one ``decay_adjoint``: they share the walk over
  block pairs.
"""

from __future__ import annotations

from functools import reduce

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder


def lower(forward: ChunkPlan, backward: ChunkPlan | None) -> ChunkPlan:
    """One plan with the outputs and carries of both (of ``forward`` alone without a backward)."""
    builder = PlanBuilder()
    carries: dict[tuple[str, str], tuple[str, str, int, int]] = {}
    outputs: dict[str, int] = {}
    for plan in (forward, backward) if backward else (forward,):
        new = _Lowering(builder, plan).run()
        for name, direction, leaf, after in plan.carries:
            carries[name, direction] = (name, direction, new[leaf], new[after])
        for name, node in plan.outputs:
            outputs[name] = new[node]
    return builder.finish(forward.name, carries.values(), outputs.items())


class _Lowering:
    def __init__(self, builder: PlanBuilder, plan: ChunkPlan) -> None:
        self.b = builder
        self.plan = plan
        self.new: dict[int, int] = {}
        self.solved: dict[int, tuple[int, ...]] = {}
        self.factors = _score_factors(plan)

    def run(self) -> dict[int, int]:
        for i, node in enumerate(self.plan.nodes):
            self.new[i] = self.b.label(self._node(i, node), node.label)
        return self.new

    def _node(self, i: int, node: Node) -> int:
        b = self.b
        args = [self.new[a] for a in node.args]
        match node.op:
            case "solve" | "solve_t":
                self.solved[i] = self._solve(args, _int(node, "m"), _int(node, "r"), node.op == "solve_t")
                return self.solved[i][0]
            case "pick":
                return self.solved[node.args[0]][_int(node, "index")]
            case "scale_state":
                return b.mul(args[0], b.add_node("total", (args[1],), b.axes(args[1])[1:]))
            case "decay_apply" | "pair_gate":
                return self._derivative(node, args)
            case _:
                return b.add_node(node.op, args, node.axes, node.label, **dict(node.attrs))

    def _solve(self, args: list[int], m: int, r: int, transposed: bool) -> tuple[int, ...]:
        b = self.b
        scores = [args[i * m : (i + 1) * m] for i in range(r)]
        sigma = [args[r * m + j * r : r * m + (j + 1) * r] for j in range(m)]
        z, u = args[2 * r * m : 2 * r * m + m], args[2 * r * m + m :]
        whole = b.add_node("ut_transform", args[: 2 * r * m], ("t", "s"), m=m, r=r)
        ut = [
            [b.label(b.add_node("pick", (whole,), ("t", "s"), index=i * r + k), f"ut_{i + 1}{k + 1}")
             for k in range(r)]
            for i in range(r)
        ]  # fmt: skip
        if transposed:
            right = [self._sum(u[i], *(b.mul(sigma[j][i], z[j]) for j in range(m))) for i in range(r)]
            x = [self._sum(*(b.apply(ut[k][i], right[k], True) for k in range(r))) for i in range(r)]
            y = [self._sum(z[j], *(b.apply(scores[i][j], x[i], True) for i in range(r))) for j in range(m)]
            return (*y, *x)
        right = [self._sum(u[i], *(b.apply(scores[i][j], z[j]) for j in range(m))) for i in range(r)]
        solved = [self._sum(*(b.apply(ut[i][k], right[k]) for k in range(r))) for i in range(r)]
        full = [self._sum(z[j], *(b.mul(sigma[j][i], solved[i]) for i in range(r))) for j in range(m)]
        return (*full, *solved)

    def _derivative(self, node: Node, args: list[int]) -> int:
        b = self.b
        read = node.attr("read")
        x, y = self.factors[node.args[0], node.args[-1], read]
        joint = b.add_node(
            "decay_adjoint", (args[0], self.new[x], self.new[y], args[-1]), ("t", "K"), read=read
        )
        index = 2 if node.op == "pair_gate" else int(bool(node.attr("transposed")))
        return b.add_node("pick", (joint,), ("t", "K"), index=index)

    def _sum(self, *terms: int) -> int:
        return reduce(self.b.add, terms)


def _score_factors(plan: ChunkPlan) -> dict[tuple[int, int, object], tuple[int, int]]:
    """For each (A, w, read) of a decayed score's derivatives: the score's x and y.

    Where only one of them is wanted the other factor is not in the plan; any value of that shape
    does, since its derivative is not read.
    """
    found: dict[tuple[int, int, object], dict[str, int]] = {}
    for node in plan.nodes:
        if node.op == "pair_gate":
            a, x, y, w = node.args
            found.setdefault((a, w, node.attr("read")), {}).update(x=x, y=y)
        elif node.op == "decay_apply":
            a, z, w = node.args
            side = "x" if node.attr("transposed") else "y"
            found.setdefault((a, w, node.attr("read")), {}).setdefault(side, z)
    return {key: (xy.get("x", xy.get("y", -1)), xy.get("y", xy.get("x", -1))) for key, xy in found.items()}


def _int(node: Node, name: str) -> int:
    value = node.attr(name)
    if not isinstance(value, int):
        raise InternalError(f"attr {name} of {node.op} is not an integer")
    return value
