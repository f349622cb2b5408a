"""What a lowered plan tells about its values: who uses them, what they depend on, what they sum over."""

from __future__ import annotations

from collections.abc import Collection

from linalg_dsl.codegen.schedule.kernel_plan import Axis, BoundaryTerm, Direction
from linalg_dsl.planner.ops import OPS, contracted_axes
from linalg_dsl.planner.plan import ChunkPlan

BOUNDARY = ("boundary_gate", "boundary_product")
"""What two walks form together: no kernel computes it by itself."""
LEAVES = ("input", "param", "const", "number", "cotangent")
FORWARD, REVERSE, COTANGENT = 1, 2, 4
CARRIES = FORWARD | REVERSE
"""Bits of ``PlanFacts.depends``."""
_SIZES = {"t": 1.0, "s": 32.0, "K": 128.0, "V": 128.0}
"""Nominal extents per token, to compare bytes; only their order matters."""
_PER_CHUNK = 1 / 32


class PlanFacts:
    """``carry``: leaf and next value of every state, by direction; ``depends``: bits of what a value is of;
    ``walk_ops``: what a walk may form again; ``boundaries``: the boundary term of each axis that has one."""

    def __init__(self, plan: ChunkPlan, boundaries: tuple[BoundaryTerm, ...]) -> None:
        self.nodes = plan.nodes
        self.boundaries: dict[Axis, BoundaryTerm] = {b.axis: b for b in boundaries}
        self.carry: dict[Direction, tuple[tuple[int, int], ...]] = {}
        for _, name, leaf, after in plan.carries:
            direction: Direction = "forward" if name == "forward" else "reverse"
            self.carry[direction] = (*self.carry.get(direction, ()), (leaf, after))
        self.depends = self.dependencies()
        self.users = self._users()
        self.walk_ops = self._walk_ops()

    def dependencies(self, memory: Collection[int] = ()) -> list[int]:
        """The bits of every value; what lies in ``memory`` depends on nothing."""
        out: list[int] = []
        for n, node in enumerate(self.nodes):
            bits = 0
            if n in memory:
                out.append(bits)
                continue
            if node.op == "carry":
                bits = FORWARD if node.attr("direction") == "forward" else REVERSE
            elif node.op == "cotangent":
                bits = COTANGENT
            for a in node.args:
                bits |= out[a]
            out.append(bits)
        return out

    def _users(self) -> list[list[int]]:
        users: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for a in node.args:
                users[a].append(i)
        return users

    def _walk_ops(self) -> frozenset[str]:
        """What a walk may form again. Without decay and erase a score costs less than its bytes."""
        ops = {n for n, info in OPS.items() if info.kind in ("elementwise", "shape")}
        ops |= {"apply", "apply_t", "write"}
        used = {n.op for n in self.nodes}
        if not used & {"from_start", "ut_transform"}:
            ops |= {"score", "mask"}
        return frozenset(ops)

    def token_value(self, n: int) -> bool:
        return "t" in self.nodes[n].axes

    def is_leaf(self, n: int) -> bool:
        return self.nodes[n].op in LEAVES

    def contracts(self, n: int) -> frozenset[str]:
        node = self.nodes[n]
        return contracted_axes(node.op, tuple(self.nodes[a].axes for a in node.args), dict(node.attrs))

    def size(self, n: int) -> float:
        axes = self.nodes[n].axes
        total = 1.0 if "t" in axes else _PER_CHUNK
        for axis in axes:
            total *= _SIZES[axis]
        return total if self.nodes[n].op != "number" else 0.0

    def elementwise(self, n: int) -> bool:
        return OPS[self.nodes[n].op].kind in ("elementwise", "shape")

    def state(self, n: int) -> bool:
        return self.nodes[n].axes == ("K", "V")
