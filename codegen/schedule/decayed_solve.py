"""Solves whose rows decay along their own axis, and products of what they give, for kernels.

With D(A) z for ``decay_apply(A, z, w)`` the solve is U = D(T) (R + D(G) W), Z = W + Sigma U, for the T of the
same solve without decay. A walk has no room for decayed products, and it needs none: intervals add up, so

    D(A) D(B) = D(A B)        D(A) (f z) = D(A f) z        D(A) (Lambda_{t<-0} o y) = Lambda_{t<-0} o (A y)

for f a number per token, and what comes from a state always has the last form. So every decayed product of
something that a walk makes is spread here into decayed products of local values, which a prep makes before,
and plain products. Transposed the same holds, with Lambda_{C<-t} in place of Lambda_{t<-0}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder


def spread_decays(plan: ChunkPlan, forward: int) -> tuple[ChunkPlan, int]:
    """The plan without decayed solves, and how many of its nodes are the forward's (``forward`` before)."""
    if not any(_is_decayed_solve(n) or n.op == "decay_apply" for n in plan.nodes):
        return plan, forward
    return _Spread(plan, forward).run()


def _is_decayed_solve(node: Node) -> bool:
    return node.op in ("solve", "solve_t") and bool(dict(node.attrs).get("decayed"))


@dataclass(frozen=True, slots=True)
class _Product:
    """D(A) z, or its transpose: ``exclusive`` if the interval of a row ends before it."""

    a: int
    z: int
    exclusive: bool
    strict: bool


@dataclass(frozen=True, slots=True)
class _Edge:
    """A y, decayed from the chunk's start or to its end."""

    a: int
    y: int
    exclusive: bool


class _Spread:
    def __init__(self, plan: ChunkPlan, forward: int) -> None:
        self.plan = plan
        self.forward = forward
        self.b = PlanBuilder()
        self.new: list[int] = []
        self.solved: dict[int, tuple[int, ...]] = {}
        self.known: list[bool] = []

    def run(self) -> tuple[ChunkPlan, int]:
        plan, b, new = self.plan, self.b, self.new
        count = 0
        for i, node in enumerate(plan.nodes):
            args = [new[a] for a in node.args]
            new.append(b.label(self._node(i, node, args), node.label))
            if i < self.forward:
                count = len(b.nodes)
        whole = b.finish(
            plan.name,
            [(name, direction, new[leaf], new[after]) for name, direction, leaf, after in plan.carries],
            [(name, new[n]) for name, n in plan.outputs],
        )
        raw = ChunkPlan(plan.name, tuple(b.nodes), (), ())
        kept = raw.live([*(new[n] for _, n in plan.outputs), *(new[n] for c in plan.carries for n in c[2:])])
        return whole, sum(n < count for n in kept)

    def _node(self, i: int, node: Node, args: list[int]) -> int:
        b = self.b
        if _is_decayed_solve(node):
            self.solved[i] = self._solve(node, args)
            return self.solved[i][0]
        if node.op == "pick" and node.args[0] in self.solved:
            return self.solved[node.args[0]][int(str(node.attr("index")))]
        if node.op == "decay_apply" and i < self.forward and self._carried(args[1]):
            return self._products([(args[0], str(node.attr("read")), args[1])], args[2], transposed=False)
        return b.add_node(node.op, args, node.axes, node.label, **dict(node.attrs))

    def _carried(self, n: int) -> bool:
        """Whether a value is made of a state."""
        for node in self.b.nodes[len(self.known) :]:
            self.known.append(node.op == "carry" or any(self.known[a] for a in node.args))
        return self.known[n]

    def _solve(self, node: Node, args: list[int]) -> tuple[int, ...]:
        b = self.b
        m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
        *args, w = args
        scores = [args[i * m : (i + 1) * m] for i in range(r)]
        sigma = [args[r * m + j * r : r * m + (j + 1) * r] for j in range(m)]
        z, u = args[2 * r * m : 2 * r * m + m], args[2 * r * m + m :]
        ut = transform(b, args[: 2 * r * m], m, r)
        if node.op == "solve_t":
            right = [self._sum(u[i], *(b.mul(sigma[j][i], z[j]) for j in range(m))) for i in range(r)]
            x = [
                self._products([(ut[k][i], "inclusive", right[k]) for k in range(r)], w, transposed=True)
                for i in range(r)
            ]
            y = [
                self._sum(z[j], *(b.decay_apply(scores[i][j], x[i], w, "decayed", True) for i in range(r)))
                for j in range(m)
            ]
            return (*y, *x)
        right = [
            self._sum(u[i], *(b.decay_apply(scores[i][j], z[j], w, "decayed", False) for j in range(m)))
            for i in range(r)
        ]
        solved = [
            self._products([(ut[i][k], "inclusive", right[k]) for k in range(r)], w, transposed=False)
            for i in range(r)
        ]
        full = [self._sum(z[j], *(b.mul(sigma[j][i], solved[i]) for i in range(r))) for j in range(m)]
        return (*full, *solved)

    # -- products ---------------------------------------------------------------------------------------
    def _products(self, factors: Sequence[tuple[int, str, int]], w: int, *, transposed: bool) -> int:
        """The sum of D(A) z over the (A, read, z), spread."""
        b = self.b
        parts: list[_Product | _Edge] = []
        for a, read, z in factors:
            if self._composed(z, w, transposed):
                a = self._masked(a, read)
            outer = _Product(a, z, read == "exclusive", read != "inclusive")
            parts += self._spread(outer, z, (), w, transposed)
        sums: dict[tuple[int, bool], tuple[int, bool]] = {}
        edges: dict[bool, int] = {}
        for part in parts:
            if isinstance(part, _Edge):
                made = b.apply(part.a, part.y, transposed)
                before = edges.get(part.exclusive)
                edges[part.exclusive] = made if before is None else b.add(before, made)
            else:
                key = (part.z, part.exclusive)
                known = sums.get(key)
                a = b.add(known[0], part.a) if known else part.a
                sums[key] = (a, part.strict and (known is None or known[1]))
        terms = []
        for (z, exclusive), (a, strict) in sums.items():
            read = "exclusive" if exclusive else "decayed" if strict else "inclusive"
            terms.append(b.decay_apply(a, z, w, read, transposed))
        for exclusive, y in edges.items():
            edge = b.to_end(w) if transposed else b.from_start(w, exclusive)
            terms.append(b.mul(edge, y))
        return self._sum(*terms)

    def _spread(
        self, outer: _Product, z: int, factors: tuple[int, ...], w: int, transposed: bool
    ) -> list[_Product | _Edge]:
        """D(A) (f z) for the product of the factors f, without a decayed product of a carried value."""
        b, node = self.b, self.b.nodes[z]
        if not self._composed(z, w, transposed):
            return [_Product(outer.a, self._scaled(factors, z), outer.exclusive, outer.strict)]
        match node.op:
            case "add":
                return [p for a in node.args for p in self._spread(outer, a, factors, w, transposed)]
            case "decay_apply":
                inner, y, _ = node.args
                inner = self._masked(inner, str(node.attr("read")))
                exclusive = node.attr("read") == "exclusive"
                if transposed:
                    a = b.apply(inner, self._scaled(factors, outer.a))
                else:
                    a = b.apply(outer.a, self._scaled(factors, inner))
                strict = outer.strict or node.attr("read") != "inclusive"
                return [_Product(a, y, outer.exclusive or exclusive, strict)]
            case _:
                for f, x in (node.args, node.args[::-1]):
                    if self._is_edge(f, w, transposed):
                        return [_Edge(outer.a, self._scaled(factors, x), outer.exclusive)]
                    if "t" not in b.axes(x) or len(b.axes(x)) == 1:
                        continue
                    if len(b.axes(f)) < 2 and self._composed(x, w, transposed):
                        return self._spread(outer, x, (*factors, f), w, transposed)
        raise InternalError(f"a decayed product of {node.op} cannot be spread")

    def _composed(self, z: int, w: int, transposed: bool) -> bool:
        """Whether a value has a part with a decay of its own that meets the one of a product."""
        b, node = self.b, self.b.nodes[z]
        match node.op:
            case "add":
                return any(self._composed(a, w, transposed) for a in node.args)
            case "mul":
                pairs = (node.args, node.args[::-1])
                return any(self._is_edge(f, w, transposed) for f, _ in pairs) or any(
                    len(b.axes(f)) < 2 and self._composed(x, w, transposed) for f, x in pairs
                )
            case "decay_apply":
                meets = transposed or node.attr("read") != "exclusive"
                return node.args[2] == w and bool(node.attr("transposed")) == transposed and meets
            case _:
                return False

    def _masked(self, a: int, read: str) -> int:
        """Scores that are zero outside their read: the ops that take them look at no others."""
        return (
            a if self._triangular(a) else self.b.mask(a, "inclusive" if read == "inclusive" else "exclusive")
        )

    def _triangular(self, a: int) -> bool:
        """Whether scores are known to be zero outside their read: what masks or forms them sees to it."""
        node = self.b.nodes[a]
        if node.op in ("add", "mul", "apply"):
            known = [self._triangular(x) for x in node.args]
            return any(known) if node.op == "mul" else all(known)
        return node.op in ("mask", "decayed_score", "pairs_decay", "pick")

    def _is_edge(self, n: int, w: int, transposed: bool) -> bool:
        node = self.b.nodes[n]
        if transposed:
            return node.op == "to_end" and node.args == (w,)
        return node.op == "from_start" and node.args == (w,) and not node.attr("exclusive")

    def _scaled(self, factors: Sequence[int], x: int) -> int:
        return reduce(self.b.mul, factors, x)

    def _sum(self, *terms: int) -> int:
        return reduce(self.b.add, terms)


def transform(b: PlanBuilder, operands: Sequence[int], m: int, r: int) -> list[list[int]]:
    """The r x r blocks of T = (I - G Sigma)^-1 from the entries of G and Sigma."""
    whole = b.add_node("ut_transform", operands, ("t", "s"), m=m, r=r)
    return [
        [
            b.label(b.add_node("pick", (whole,), ("t", "s"), index=i * r + k), f"ut_{i + 1}{k + 1}")
            for k in range(r)
        ]
        for i in range(r)
    ]
