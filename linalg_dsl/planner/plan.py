"""``ChunkPlan``: the chunk equations as a DAG of chunk-level ops, and the builder that makes one.

Nodes are numbered in an order in which operands come first; equal nodes are one node. A plan is
immutable, prints itself, and compares by value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import OPS, OTHER, Axes, ordered

AttrValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Node:
    """One op: ``args`` are the numbers of its operands, ``attrs`` sorted (name, value) pairs.

    ``axes`` of a solve are those of its picks, ("t", D). ``label`` names the value in listings and
    in generated code (``q``, ``z_1``, ``g_ql``) and takes no part in equality.
    """

    op: str
    args: tuple[int, ...]
    attrs: tuple[tuple[str, AttrValue], ...]
    axes: Axes
    label: str = field(default="", compare=False)

    def attr(self, name: str) -> AttrValue:
        return dict(self.attrs)[name]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk of the forward, or of the backward (then it holds the forward nodes that it uses).

    ``carries``: (state name, direction, node of the carry leaf, node of its next value). Direction
    ``forward`` hands S_0 on to S_C; ``reverse`` hands dS_C back to dS_0.
    ``outputs``: (name, node): the outputs of a forward plan; of a backward plan the gradients
    ``d_<name>`` of inputs and params (a param's is the sum over all chunks, sequences of the head).
    """

    name: str
    nodes: tuple[Node, ...]
    carries: tuple[tuple[str, str, int, int], ...]
    outputs: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        lines = [f"plan {self.name}"]
        for i, node in enumerate(self.nodes):
            args = ", ".join(f"%{a}" for a in node.args)
            attrs = " ".join(f"{k}={v}" for k, v in node.attrs)
            head = f"  %{i} : [{', '.join(node.axes)}] = {node.op}({args})"
            lines.append(" ".join(x for x in (head, attrs, f"# {node.label}" if node.label else "") if x))
        for name, direction, leaf, after in self.carries:
            lines.append(f"  carry {name} {direction}: %{leaf} -> %{after}")
        for name, result in self.outputs:
            lines.append(f"  output {name} = %{result}")
        return "\n".join(lines)

    def live(self, roots: Iterable[int], given: Collection[int] = ()) -> frozenset[int]:
        """All nodes that the roots reach; ``given`` ones are reached, and nothing through them."""
        seen: set[int] = set()
        todo = list(roots)
        while todo:
            i = todo.pop()
            if i not in seen:
                seen.add(i)
                if i not in given:
                    todo.extend(self.nodes[i].args)
        return frozenset(seen)

    @property
    def roots(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.outputs) + tuple(c[3] for c in self.carries)


class PlanBuilder:
    """Adds nodes, checks their axes, and gives equal nodes one number.

    Numbers are folded where it saves work: 0 + x, 1 x, 0 x; so zero rows of W and constant entries of
    Sigma cost nothing.
    """

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes: list[Node] = list(nodes)
        self._index: dict[Node, int] = {n: i for i, n in enumerate(nodes)}

    def add_node(
        self, op: str, args: Sequence[int], axes: Axes, label: str = "", /, **attrs: AttrValue
    ) -> int:
        if op not in OPS:
            raise InternalError(f"unknown op {op!r}")
        node = Node(op, tuple(args), tuple(sorted(attrs.items())), axes, label)
        found = self._index.get(node)
        if found is None:
            found = self._index[node] = len(self.nodes)
            self.nodes.append(node)
        return found

    def axes(self, i: int) -> Axes:
        return self.nodes[i].axes

    def label(self, i: int, label: str) -> int:
        """Names a value for listings and generated code (the first name stays)."""
        node = self.nodes[i]
        if not node.label:
            self.nodes[i] = Node(node.op, node.args, node.attrs, node.axes, label)
        return i

    # -- leaves -------------------------------------------------------------------------------
    def number(self, value: float) -> int:
        return self.add_node("number", (), (), value=float(value))

    def value_of(self, i: int) -> float | None:
        """The value of a number node, else None."""
        node = self.nodes[i]
        return float(node.attr("value")) if node.op == "number" else None  # type: ignore[arg-type]

    # -- elementwise --------------------------------------------------------------------------
    def add(self, a: int, b: int) -> int:
        for x, y in ((a, b), (b, a)):
            if self.value_of(x) == 0:
                return y
        if (p := self.value_of(a)) is not None and (q := self.value_of(b)) is not None:
            return self.number(p + q)
        return self.add_node("add", (a, b), self._broadcast(a, b))

    def mul(self, a: int, b: int) -> int:
        for x, y in ((a, b), (b, a)):
            if self.value_of(x) == 0:
                return x
            if self.value_of(x) == 1:
                return y
        if (p := self.value_of(a)) is not None and (q := self.value_of(b)) is not None:
            return self.number(p * q)
        return self.add_node("mul", (a, b), self._broadcast(a, b))

    def find_product(self, a: int, b: int) -> int | None:
        """The product of these two in this order, if it is a value already."""
        return self._index.get(Node("mul", (a, b), (), self._broadcast(a, b)))

    def unary(self, fn: str, a: int, **attrs: AttrValue) -> int:
        return self.add_node("unary", (a,), self.axes(a), fn=fn, **attrs)

    def negate(self, a: int) -> int:
        return self.mul(self.number(-1), a)

    def binary(self, op: str, a: int, b: int) -> int:
        """maximum, minimum, compare."""
        return self.add_node(op, (a, b), self._broadcast(a, b))

    # -- shape --------------------------------------------------------------------------------
    def sum(self, a: int, axis: str) -> int:
        if axis not in self.axes(a):
            raise InternalError(f"sum over {axis} of a value with axes {self.axes(a)}")
        return self.add_node("sum", (a,), tuple(x for x in self.axes(a) if x != axis), axis=axis)

    def amax(self, a: int, axis: str) -> int:
        return self.add_node("amax", (a,), tuple(x for x in self.axes(a) if x != axis), axis=axis)

    def tokens(self, a: int) -> int:
        return a if "t" in self.axes(a) else self.add_node("tokens", (a,), ("t", *self.axes(a)))

    def expand(self, a: int, axes: Axes) -> int:
        """The adjoint of a sum: repeats a value along the axes that it lacks."""
        for axis in axes:
            if axis not in self.axes(a):
                have = tuple(x for x in axes if x == axis or x in self.axes(a))
                a = self.tokens(a) if axis == "t" else self.add_node("expand", (a,), have, axis=axis)
        return a

    def sum_to(self, a: int, axes: Axes) -> int:
        """The adjoint of a broadcast from ``axes``: sums over the axes that were missing."""
        for axis in self.axes(a):
            if axis not in axes:
                a = self.sum(a, axis)
        return a

    def swap(self, a: int, axis: str, other: str) -> int:
        """The value with the names of two axes exchanged (a transpose, or a new name)."""
        names = {axis: other, other: axis}
        have = self.axes(a)
        if axis == other or not set(have) & set(names):
            return a
        axes = ordered(names.get(x, x) for x in have)
        return self.add_node("swap", (a,), axes, axis=min(axis, other), other=max(axis, other))

    def eye(self, axis: str, other: str) -> int:
        return self.add_node("eye", (), ordered((axis, other)))

    def first(self, a: int, axis: str) -> int:
        """What all blocks of ``axis`` hold alike, as a sum over blocks."""
        return a if self.value_of(a) == 0 else self.add_node("first", (a,), self.axes(a), axis=axis)

    # -- products -----------------------------------------------------------------------------
    def score(self, x: int, y: int) -> int:
        self._same_rows(x, y)
        return self._unless_zero((x, y), "score", ("t", "s"))

    def apply(self, a: int, z: int, transposed: bool = False) -> int:
        op = "apply_t" if transposed else "apply"
        return self._unless_zero((a, z), op, self.axes(z))

    def read(self, x: int, state: int, con: str = "K") -> int:
        if self.axes(x) != ("t", con):
            raise InternalError(f"read over {con} of a value with axes {self.axes(x)}")
        return self._unless_zero((x, state), "read", ("t", OTHER[con]), con=con)

    def write(self, x: int, z: int) -> int:
        return self._unless_zero((x, z), "write", ("K", "V"))

    def contract(self, a: int, b: int, axis: str) -> int:
        """sum over ``axis`` of a b: an inner product, a product with a matrix, of two matrices."""
        for x, y in ((a, b), (b, a)):
            if axis not in self.axes(x):
                return self.mul(x, self.sum(y, axis))
        axes = ordered(x for x in (*self.axes(a), *self.axes(b)) if x != axis)
        return self.add_node("contract", (a, b), axes, axis=axis)

    def compose(self, a: int, b: int, left: bool = False, right: bool = False) -> int:
        return self._unless_zero((a, b), "compose", ("t", "s"), left=left, right=right)

    def mask(self, a: int, read: str) -> int:
        if self.nodes[a].op == "mask" and self.nodes[a].attr("read") in (read, "exclusive"):
            return a
        return self._unless_zero((a,), "mask", ("t", "s"), read=read)

    # -- decays -------------------------------------------------------------------------------
    def pairs_decay(self, w: int, read: str) -> int:
        return self.add_node("pairs_decay", (w,), ("t", "s"), read=read)

    def from_start(self, w: int, exclusive: bool) -> int:
        return self.add_node("from_start", (w,), self.axes(w), exclusive=exclusive)

    def to_end(self, w: int) -> int:
        return self.add_node("to_end", (w,), self.axes(w))

    def scale_state(self, state: int, w: int) -> int:
        return self.add_node("scale_state", (state, w), ("K", "V"))

    def weigh(self, state: int, a: int, axis: str) -> int:
        """a S, for a of no axes; S itself and 0 for the numbers 1 and 0."""
        if self.value_of(a) == 1 or self.value_of(state) == 0:
            return state
        return a if self.value_of(a) == 0 else self.add_node("weigh", (state, a), ("K", "V"), axis=axis)

    def boundary_product(self, state: int, cotangent: int, axis: str) -> int:
        return self._unless_zero((state, cotangent), "boundary_product", (axis,), axis=axis)

    def decayed_score(self, x: int, y: int, w: int, read: str) -> int:
        self._same_rows(x, y)
        return self._unless_zero((x, y), "decayed_score", ("t", "s"), w, read=read)

    def decay_apply(self, a: int, z: int, w: int, read: str, transposed: bool) -> int:
        return self._unless_zero((a, z), "decay_apply", self.axes(z), w, read=read, transposed=transposed)

    def span_sum(self, p: int, read: str) -> int:
        return self.add_node("span_sum", (p,), ("t",), read=read)

    def gate_sum(self, p: int, kind: str) -> int:
        return self.add_node("gate_sum", (p,), self.axes(p), kind=kind)

    def pair_gate(self, a: int, x: int, y: int, w: int, read: str) -> int:
        return self._unless_zero((a, x, y), "pair_gate", self.axes(w), w, read=read)

    def boundary_gate(self, state: int, cotangent: int, w: int) -> int:
        return self.add_node("boundary_gate", (state, cotangent, w), self.axes(w)[1:] or ("K",))

    def signs(self, x: int, exclusive: bool) -> int:
        return self.add_node("signs", (x,), self.axes(x), exclusive=exclusive)

    def sign_total(self, x: int) -> int:
        return self.add_node("sign_total", (x,), self.axes(x)[1:])

    # -- solve --------------------------------------------------------------------------------
    def solve(
        self,
        scores: Sequence[Sequence[int]],
        sigma: Sequence[Sequence[int]],
        written: Sequence[int],
        right: Sequence[int],
        w: int | None = None,
        transposed: bool = False,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(Z_1..Z_m, U_1..U_r); transposed: (Y_1..Y_m, X_1..X_r). ``w``: decays along their rows' axis."""
        m, r = len(written), len(right)
        args = [g for row in scores for g in row] + [x for row in sigma for x in row]
        attrs: dict[str, AttrValue] = {"m": m, "r": r}
        if w is not None:
            attrs["decayed"] = True
        axes = next(self.axes(x) for x in (*right, *written) if self.axes(x))
        op = "solve_t" if transposed else "solve"
        whole = self.add_node(op, (*args, *written, *right, *(() if w is None else (w,))), axes, **attrs)
        picks = tuple(self.add_node("pick", (whole,), axes, index=i) for i in range(m + r))
        return picks[:m], picks[m:]

    # -----------------------------------------------------------------------------------------
    def finish(
        self,
        name: str,
        carries: Iterable[tuple[str, str, int, int]],
        outputs: Iterable[tuple[str, int]],
    ) -> ChunkPlan:
        """The plan with what nothing needs removed and the rest renumbered."""
        raw = ChunkPlan(name, tuple(self.nodes), tuple(carries), tuple(outputs))
        keep = sorted(raw.live([*raw.roots, *(c[2] for c in raw.carries)]))
        renumber = {old: new for new, old in enumerate(keep)}
        nodes = tuple(
            Node(n.op, tuple(renumber[a] for a in n.args), n.attrs, n.axes, n.label)
            for n in (self.nodes[i] for i in keep)
        )
        return ChunkPlan(
            name,
            nodes,
            tuple((c, d, renumber[leaf], renumber[after]) for c, d, leaf, after in raw.carries),
            tuple((o, renumber[i]) for o, i in raw.outputs),
        )

    def _broadcast(self, a: int, b: int) -> Axes:
        have = set(self.axes(a)) | set(self.axes(b))
        if {"s"} <= have and have & {"K", "V"}:
            raise InternalError(f"cannot broadcast {self.axes(a)} with {self.axes(b)}")
        return ordered(have)

    def _same_rows(self, x: int, y: int) -> None:
        if self.axes(x) != self.axes(y) and self.value_of(x) != 0 and self.value_of(y) != 0:
            raise InternalError(f"a score of {self.axes(x)} and {self.axes(y)}")

    def _unless_zero(
        self, factors: Sequence[int], op: str, axes: Axes, *rest: int, **attrs: AttrValue
    ) -> int:
        """Bilinear ops of a zero are zero."""
        for f in factors:
            if self.value_of(f) == 0:
                return f
        return self.add_node(op, (*factors, *rest), axes, "", **attrs)
