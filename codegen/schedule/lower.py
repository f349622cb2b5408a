"""From chunk equations to the ops that kernels carry out, forward and backward in one plan.

- ``solve`` becomes T = (I - G Sigma)^-1 (UT transform) and products with it:
  U = T (R + G W), Z = W + Sigma U, so T needs G and Sigma only and can be made before the walk;
  its reversed form X = T^T (dU + Sigma^T dZ), Y = dZ + G^T X shares that T;
- ``scale_state`` becomes a product with ``total``;
- two sums over the same axis become one, and a sum with zero its other term;
- a gate's derivative takes the products that derivatives of decayed values are anyway;
- of coupled states ``weigh`` becomes a product, ``boundary_gate`` one of ``total`` and ``boundary_product``;
- a solve whose rows decay becomes products (``decayed_solve``);
- the decay ops of one gate become one op for scores and one for derivatives: they share the walk over block
  pairs and its exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from linalg_dsl.codegen.schedule.decayed_solve import spread_decays, transform
from linalg_dsl.codegen.schedule.joint_scores import JointOp, joint_ops
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder


def lower(forward: ChunkPlan, backward: ChunkPlan | None) -> ChunkPlan:
    """One plan with the outputs and carries of both (of ``forward`` alone without a backward)."""
    merged = _merged(forward, backward) if backward else forward
    return _Lowering(*spread_decays(merged, len(forward.nodes))).run()


def _merged(forward: ChunkPlan, backward: ChunkPlan) -> ChunkPlan:
    """Both plans as one, the nodes of the forward first."""
    builder = PlanBuilder(forward.nodes)
    new: list[int] = []
    for node in backward.nodes:
        args = [new[a] for a in node.args]
        new.append(builder.add_node(node.op, args, node.axes, node.label, **dict(node.attrs)))
        builder.label(new[-1], node.label)
    carries = {(name, direction): (leaf, after) for name, direction, leaf, after in forward.carries}
    carries |= {(name, d): (new[leaf], new[after]) for name, d, leaf, after in backward.carries}
    outputs = dict(forward.outputs) | {name: new[n] for name, n in backward.outputs}
    return ChunkPlan(
        forward.name,
        tuple(builder.nodes),
        tuple((*key, *value) for key, value in carries.items()),
        tuple(outputs.items()),
    )


class _Lowering:
    """``forward``: how many nodes at the beginning of the plan are the forward's."""

    def __init__(self, plan: ChunkPlan, forward: int) -> None:
        self.b = PlanBuilder()
        self.plan = plan
        self.new: dict[int, int] = {}
        self.solved: dict[int, tuple[int, ...]] = {}
        self.joint = joint_ops(plan, forward)
        self.products = {frozenset(node.args): i for i, node in enumerate(plan.nodes) if node.op == "mul"}
        self.coupled = sum(direction == "forward" for _, direction, _, _ in plan.carries) > 1

    def run(self) -> ChunkPlan:
        plan, new = self.plan, self.new
        for i in range(len(plan.nodes)):
            self._get(i)
        return self.b.finish(
            plan.name,
            [(name, direction, new[leaf], new[after]) for name, direction, leaf, after in plan.carries],
            [(name, new[n]) for name, n in plan.outputs],
        )

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
            case "pick" if node.args[0] in self.solved:
                return self.solved[node.args[0]][_int(node, "index")]
            case "scale_state":
                return b.mul(args[0], self._total(args[1]))
            case "weigh":
                return b.mul(*args)
            case "boundary_gate" if self.coupled:
                product = b.add_node("boundary_product", args[:2], node.axes, axis=node.axes[0])
                return b.mul(self._total(args[2]), product)
            case "decayed_score" | "decay_apply" | "pair_gate":
                return self._joint(i, self.joint[i])
            case "add" if (merged := self._one_sum(*args)) is not None:
                return merged
            case "add" if (alone := self._without_zero(args, node.axes)) is not None:
                return alone
            case "gate_sum" if (terms := self._of_products(i)) is not None:
                return b.add_node(node.op, [self._sum(*terms)], node.axes, **dict(node.attrs))
            case _:
                return b.add_node(node.op, args, node.axes, node.label, **dict(node.attrs))

    def _one_sum(self, first: int, second: int) -> int | None:
        """Two sums over the same axis as one: a walk that splits the axis then has one to hand over."""
        a, c = (self.b.nodes[n] for n in (first, second))
        if (a.op, a.attrs, a.axes) != ("sum", c.attrs, c.axes) or c.op != "sum":
            return None
        (x,), (y,) = a.args, c.args
        if self.b.axes(x) != self.b.axes(y):
            return None
        return self.b.add_node("sum", (self.b.add(x, y),), a.axes, **dict(a.attrs))

    def _without_zero(self, args: Sequence[int], axes: Axes) -> int | None:
        """The other of two terms one of which is zero: what a joint op leaves of a derivative."""
        for x, y in (args, args[::-1]):
            if self.b.value_of(x) == 0 and self.b.axes(y) == axes:
                return y
        return None

    def _of_products(self, i: int) -> list[int] | None:
        """The terms w d x that a gate's derivative sums over tokens, made of products w d that are values
        anyway, the derivatives of x: one product a term less, and d itself is not needed beside w d.

        d is a derivative of x decayed by w. None where the sum is not of such terms, or w d is no value.
        """
        nodes = self.plan.nodes
        whole = nodes[nodes[i].args[0]]
        if whole.op != "mul" or len(whole.axes) < 2:
            return None
        for w, total in (whole.args, whole.args[::-1]):
            if nodes[w].op not in ("from_start", "to_end") or nodes[w].axes != whole.axes:
                continue
            found: list[tuple[int, int]] = []
            todo = [total]
            while todo:
                term = nodes[todo.pop(0)]
                if term.op == "add":
                    todo[:0] = term.args
                    continue
                pairs = (term.args, term.args[::-1]) if term.op == "mul" else ()
                known = [(p, x) for d, x in pairs if (p := self.products.get(frozenset((d, w)))) is not None]
                if not known:
                    return None
                found.append(known[0])
            return [self.b.mul(self._get(p), self._get(x)) for p, x in found]
        return None

    def _total(self, w: int) -> int:
        return self.b.add_node("total", (w,), self.b.axes(w)[1:])

    def _solve(self, args: list[int], m: int, r: int, transposed: bool) -> tuple[int, ...]:
        b = self.b
        scores = [args[i * m : (i + 1) * m] for i in range(r)]
        sigma = [args[r * m + j * r : r * m + (j + 1) * r] for j in range(m)]
        z, u = args[2 * r * m : 2 * r * m + m], args[2 * r * m + m :]
        ut = transform(b, args[: 2 * r * m], m, r)
        if transposed:
            right = [self._sum(u[i], *(b.mul(sigma[j][i], z[j]) for j in range(m))) for i in range(r)]
            x = [self._sum(*(b.apply(ut[k][i], right[k], True) for k in range(r))) for i in range(r)]
            y = [self._sum(z[j], *(b.apply(scores[i][j], x[i], True) for i in range(r))) for j in range(m)]
            return (*y, *x)
        right = [self._sum(u[i], *(b.apply(scores[i][j], z[j]) for j in range(m))) for i in range(r)]
        solved = [self._sum(*(b.apply(ut[i][k], right[k]) for k in range(r))) for i in range(r)]
        full = [self._sum(z[j], *(b.mul(sigma[j][i], solved[i]) for i in range(r))) for j in range(m)]
        return (*full, *solved)

    def _joint(self, i: int, joint: JointOp) -> int:
        """The sum of all terms of a derivative where its last term stood, zero for the others."""
        result = joint.terms[i]
        axes: Axes = self.plan.nodes[joint.w].axes
        first: list[int] = []
        if joint.op == "decayed_scores":
            axes = ("t", "s")
        elif joint.stand_in(result) != i:
            return self.b.number(0)
        else:
            first = joint.cotangents
        operands = [*first, *(x for x, _ in joint.rows), *joint.cols, joint.w]
        whole = self.b.add_node(joint.op, [self._get(n) for n in operands], axes, **joint.attrs())
        return self.b.add_node("pick", (whole,), axes, index=result)

    def _sum(self, *terms: int) -> int:
        return reduce(self.b.add, terms)


def _int(node: Node, name: str) -> int:
    value = node.attr(name)
    if not isinstance(value, int):
        raise InternalError(f"attr {name} of {node.op} is not an integer")
    return value
