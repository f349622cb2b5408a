"""FLOPs and bytes per token and head, counted on the nodes of a plan.

A multiply-add is two FLOPs and triangles count in full (about half of each chunk term is masked and can be
skipped between blocks). Products are counted apart from elementwise work, since they run on different
units; forming T of a unit-triangular solve is counted apart from both. A solve is counted in the cheaper
of its two forms, T = (I - Sigma G)^-1 of size C m or T_U = (I - G Sigma)^-1 of size C r.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from linalg_dsl.planner.ops import OPS
from linalg_dsl.planner.plan import ChunkPlan, Node


@dataclass(frozen=True, slots=True)
class Flops:
    """Per token and head."""

    products: float = 0.0
    solves: float = 0.0
    elementwise: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.products + other.products,
            self.solves + other.solves,
            self.elementwise + other.elementwise,
        )

    @property
    def total(self) -> float:
        return self.products + self.solves + self.elementwise

    def __str__(self) -> str:
        parts = [f"{_thousands(self.products)} FLOP in products"]
        if self.solves:
            parts.append(f"{_thousands(self.solves)} to invert")
        return ", ".join([*parts, f"{_thousands(self.elementwise)} elementwise"])


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per token and head that must move whatever the schedule: operands, results, states."""

    read: float
    written: float
    states: float

    @property
    def total(self) -> float:
        return self.read + self.written + self.states


def flops(plan: ChunkPlan, chunk: int, key: int, value: int, at_hand: ChunkPlan | None = None) -> Flops:
    """The work of one token of a plan at chunk size ``chunk``, K = ``key``, V = ``value``.

    ``at_hand``: a forward plan whose values were all saved, so that a backward plan computes none of them.
    """
    sizes = {"t": 1.0, "s": float(chunk), "K": float(key), "V": float(value)}
    saved = shared_nodes(plan, at_hand) if at_hand else {}
    total = Flops()
    for i, node in enumerate(plan.nodes):
        if i not in saved:
            total += _node_flops(plan, i, node, sizes)
    return total


def traffic(
    plan: ChunkPlan,
    chunk: int,
    key: int,
    value: int,
    *,
    element_bytes: int = 2,
    gate_bytes: int = 4,
    state_bytes: int = 4,
    gates: frozenset[str] = frozenset(),
    saves_states: bool = False,
) -> Traffic:
    """Every input and cotangent read once, every output written once.

    ``gates`` names the inputs kept in ``gate_bytes`` (gradients alike). ``saves_states`` adds one state a
    chunk, written by a forward for its backward or read by the backward.
    """
    sizes = {"t": 1.0, "K": float(key), "V": float(value)}

    def moved(axes: tuple[str, ...], name: str) -> float:
        count = 1.0
        for axis in axes:
            count *= sizes[axis]
        return count * (gate_bytes if name in gates else element_bytes)

    read = sum(moved(n.axes, str(n.attr("name"))) for n in plan.nodes if n.op in ("input", "cotangent"))
    written = sum(
        moved(plan.nodes[i].axes, name.removeprefix("d_").partition("[")[0])
        for name, i in plan.outputs
        if "t" in plan.nodes[i].axes
    )
    states = state_bytes * key * value / chunk if saves_states else 0.0
    return Traffic(read, written, states)


def decode_flops(forward: ChunkPlan, key: int, value: int) -> float:
    """One token with the state at hand: the products with the state, the decay, and Sigma U."""
    total = 0.0
    for node in forward.nodes:
        match node.op:
            case "read" | "write":
                total += 2 * key * value
            case "scale_state" | "weigh":
                total += key * value
            case "solve":
                total += 2 * _used_sigma(forward, node) * {"K": key, "V": value}[node.axes[1]]
    return total


def state_bytes(plan: ChunkPlan, key: int, value: int, element_bytes: int = 4) -> int:
    """What the forward states take on chip, per head."""
    return sum(element_bytes * key * value for _, direction, _, _ in plan.carries if direction == "forward")


def shared_nodes(plan: ChunkPlan, other: ChunkPlan) -> dict[int, int]:
    """The nodes of ``plan`` that compute what a node of ``other`` computes, with that node's number."""
    numbers = {node: i for i, node in enumerate(other.nodes)}
    same: dict[int, int] = {}
    for i, node in enumerate(plan.nodes):
        if all(a in same for a in node.args):
            found = numbers.get(replace(node, args=tuple(same[a] for a in node.args)))
            if found is not None:
                same[i] = found
    return same


def _node_flops(plan: ChunkPlan, i: int, node: Node, sizes: Mapping[str, float]) -> Flops:
    chunk, key, value = sizes["s"], sizes["K"], sizes["V"]
    match node.op:
        case "score" | "apply" | "apply_t" if len(plan.nodes[node.args[1]].axes) == 1:
            return Flops(elementwise=2 * chunk)
        case "compose":
            return Flops(products=2 * chunk * chunk)
        case "score":
            return Flops(products=2 * chunk * sizes[plan.nodes[node.args[0]].axes[1]])
        case "apply" | "apply_t":
            return Flops(products=2 * chunk * sizes[node.axes[1]])
        case "read" | "write":
            return Flops(products=2 * key * value)
        case "decayed_score":
            return Flops(products=2 * chunk * sizes[plan.nodes[node.args[0]].axes[1]])
        case "decay_apply":
            return Flops(products=2 * chunk * sizes[node.axes[1]])
        case "solve" | "solve_t":
            return _solve_flops(plan, i, node, sizes)
        case "scale_state":
            return Flops(elementwise=key * value / chunk)
        case "weigh":
            return Flops(elementwise=key * value / chunk)
        case "boundary_gate" | "boundary_product":
            return Flops(elementwise=2 * key * value / chunk)
        case "pairs_decay" | "span_sum" | "from_start" | "to_end" | "gate_sum" | "signs":
            return Flops(elementwise=2 * _size(node.axes, sizes))
        case "pair_gate":
            # x o dx and y o dy are at hand with the score's other two derivatives
            return Flops(elementwise=4 * sizes[node.axes[1]])
        case "sum" | "amax":
            return Flops(elementwise=_size(plan.nodes[node.args[0]].axes, sizes))
        case "tokens" | "expand" | "mask" | "pick" | "swap":
            return Flops()
        case op if OPS[op].kind == "leaf":
            return Flops()
        case _:
            return Flops(elementwise=_size(node.axes, sizes))


def _solve_flops(plan: ChunkPlan, i: int, node: Node, sizes: Mapping[str, float]) -> Flops:
    """By T: T (W + Sigma R) with T of m x m blocks; by T_U: T_U (R + G W) with r x r blocks.

    The reversed solve uses the same T. U beside Z costs one more product with G, but only by T.
    """
    chunk, value = sizes["s"], sizes[node.axes[1]]
    m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
    picked = {int(str(n.attr("index"))) for n in plan.nodes if n.op == "pick" and n.args == (i,)}
    sigma = 2.0 * _used_sigma(plan, node) * value
    given = node.args[2 * m * r : 2 * m * r + m]
    rows = sum(_number(plan, w) != 0 for w in given)
    apply_g = 2.0 * chunk * rows * r * value
    if node.op == "solve":
        also_u = 2.0 * chunk * m * r * value if picked & set(range(m, m + r)) else 0.0
        by_t = 2 * chunk * m * m * value + sigma + 2 * chunk * m * m * r + also_u
        by_u = 2 * chunk * r * r * value + apply_g + sigma + 2 * chunk * r * r * m
        inverse_t, inverse_u = m**3 * chunk**2 / 3, r**3 * chunk**2 / 3
        return min(Flops(by_t, inverse_t), Flops(by_u, inverse_u), key=lambda f: f.total)
    by_t = 2 * chunk * m * m * value + sigma
    by_u = 2 * chunk * (r * r + m * r) * value + sigma
    return Flops(min(by_t, by_u))


def _used_sigma(plan: ChunkPlan, solve: Node) -> int:
    """Entries of Sigma that are not the number 0."""
    m, r = int(str(solve.attr("m"))), int(str(solve.attr("r")))
    return sum(_number(plan, a) != 0 for a in solve.args[m * r : 2 * m * r])


def _number(plan: ChunkPlan, i: int) -> float | None:
    node = plan.nodes[i]
    return float(str(node.attr("value"))) if node.op == "number" else None


def _size(axes: tuple[str, ...], sizes: Mapping[str, float]) -> float:
    """Elements per token; a value without the token axis is one per chunk."""
    size = 1.0 if "t" in axes else 1.0 / sizes["s"]
    for axis in axes:
        size *= sizes[axis]
    return size


def _thousands(x: float) -> str:
    return f"{x / 1000:.3g}k" if x >= 1000 else f"{x:.3g}"
