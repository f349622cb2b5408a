"""From chunk equations to the ops that kernels carry out, forward and backward in one plan.

- ``solve`` becomes T = (I - G Sigma)^-1 (UT transform) and products with it:
  U = T (R + G W), Z = W + Sigma U, so T needs G and Sigma only and can be made before the walk;
  its reversed form X = T^T (dU + Sigma^T dZ), Y = dZ + G^T X shares that T;
- ``scale_state`` becomes a product with ``total``;
- the decayed scores of one gate become one op, and so do their derivatives: they share the walk over
  block pairs and its exponentials.
"""

from __future__ import annotations

from functools import reduce

from linalg_dsl.codegen.schedule.joint_scores import ScoreGroup, adjoint_groups, score_groups
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import Axes
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
        self.scores = score_groups(plan)
        self.adjoints = adjoint_groups(plan)
        self.stand_ins = {
            w: {result: n for n, result in group.terms.items()} for w, group in self.adjoints.items()
        }

    def run(self) -> dict[int, int]:
        for i in range(len(self.plan.nodes)):
            self._get(i)
        return self.new

    def _get(self, i: int) -> int:
        """The lowered value of node i; a joint op asks for operands that come later in the plan."""
        if i not in self.new:
            node = self.plan.nodes[i]
            self.new[i] = self.b.label(self._node(i, node, [self._get(a) for a in node.args]), node.label)
        return self.new[i]

    def _node(self, i: int, node: Node, args: list[int]) -> int:
        b = self.b
        match node.op:
            case "solve" | "solve_t":
                self.solved[i] = self._solve(args, _int(node, "m"), _int(node, "r"), node.op == "solve_t")
                return self.solved[i][0]
            case "pick":
                return self.solved[node.args[0]][_int(node, "index")]
            case "scale_state":
                return b.mul(args[0], b.add_node("total", (args[1],), b.axes(args[1])[1:]))
            case "decayed_score":
                return self._score(node)
            case "decay_apply" | "pair_gate":
                return self._derivative(i, node)
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

    def _score(self, node: Node) -> int:
        group = self.scores[node.args[-1]]
        x, y, _ = node.args
        joint = self._joint("decayed_scores", group, [], ("t", "s"))
        pair = (group.rows.index((x, str(node.attr("read")))), group.cols.index(y))
        return self.b.add_node("pick", (joint,), ("t", "s"), index=group.pairs.index(pair))

    def _derivative(self, i: int, node: Node) -> int:
        """The sum of all terms of a result where its last term stood, zero for the others."""
        w = node.args[-1]
        group = self.adjoints[w]
        result = group.terms[i]
        if self.stand_ins[w][result] != i:
            return self.b.number(0)
        joint = self._joint("decay_adjoints", group.scores, group.scores.cotangents, ("t", "K"))
        return self.b.add_node("pick", (joint,), ("t", "K"), index=result)

    def _joint(self, op: str, group: ScoreGroup, first: list[int], axes: Axes) -> int:
        operands = [*first, *(x for x, _ in group.rows), *group.cols, group.w]
        return self.b.add_node(op, [self._get(n) for n in operands], axes, **group.attrs())

    def _sum(self, *terms: int) -> int:
        return reduce(self.b.add, terms)


def _int(node: Node, name: str) -> int:
    value = node.attr(name)
    if not isinstance(value, int):
        raise InternalError(f"attr {name} of {node.op} is not an integer")
    return value
