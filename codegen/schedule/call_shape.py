"""The sizes of a call as a schedule sees them, and what its values and states take in memory."""

from __future__ import annotations

from dataclasses import dataclass

from linalg_dsl.codegen.launch_sizes import Launches
from linalg_dsl.codegen.schedule.alone import FEW
from linalg_dsl.codegen.schedule.kernel_plan import SEGMENT, Kernel, KernelPlan, kept_states
from linalg_dsl.codegen.schedule.table import keep_every_state, narrow_operands
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.plan import ChunkPlan

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked of a dense call: its sizes, and the options of ``linalg_dsl.compile``.

    ``tokens``: the most of a chunk that the plan's precision allows, None for any number.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: str = "bfloat16"
    chunk_size: int | None = None
    invariant: bool = False
    schedule: str = "walk"
    super_chunk: int | None = None
    launch: Launches = ()
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CallShape:
    """Sizes of a dense call; ``dtype`` is that of the output and of everything with an axis K or V."""

    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: str
    chunk: int
    summed: str = "K"
    """The axis that the first walk sums over (``summed_axis``)."""
    pieces: int = 0
    """On two levels the super-chunks of all sequences, else 0."""
    tokens: int = 0
    """The tokens of a chunk where they are fewer than the rows of its tiles, else 0."""

    @property
    def chunks(self) -> int:
        return self.B * -(-self.T // (self.tokens or self.chunk))

    @property
    def operand_bytes(self) -> int:
        """Of the operands of products: float16 calls use tf32, whose range holds every cotangent."""
        return 2 if narrow_operands(self.dtype == "bfloat16", {"K": self.K, "V": self.V}[self.summed]) else 4

    def count(self, axes: Axes, per_head: bool = False) -> int:
        """Entries of a value: of all tokens, of all chunks, or one per head (params)."""
        sizes = {"K": self.K, "V": self.V}
        if axes == ("t", "s"):
            return self.chunks * self.H * self.chunk * self.chunk
        lead = 1 if per_head else self.B * self.T if "t" in axes else self.chunks
        out = lead * self.H
        for axis in axes:
            out *= sizes.get(axis, 1)
        return out


def summed_axis(plan: KernelPlan) -> str:
    """The axis that the first walk sums over: keys of few channels along it need precise products."""
    first = next(k for k in plan.forward if k.family == "walk")
    return "K" if first.split == "V" else "V"


def is_crowded(plan: ChunkPlan) -> bool:
    """Whether the last prep has many tiles at once: of many erases, or of decays along both axes."""
    decays = {n.axes for n in plan.nodes if n.op == "total" and n.axes}
    return plan_class(plan)[1] > FEW or len(decays) > 1


def score_count(plan: ChunkPlan) -> int:
    """The most scores with a decay per channel that one loop of a prep sums up."""
    joint = (n for n in plan.nodes if n.op == "decayed_scores")
    return max((len(str(n.attr("pairs")).split(",")) for n in joint), default=0)


def state_count(plan: ChunkPlan) -> int:
    """How many states a plan carries."""
    return sum(direction == "forward" for _, direction, _, _ in plan.carries)


def plan_class(plan: ChunkPlan) -> tuple[str, int]:
    """(kind of decay, number of erases), by the ops that stand for them."""
    gates = {
        plan.nodes[n.args[-1]].axes
        for n in plan.nodes
        if n.op in ("from_start", "to_end", "total", "pairs_decay", "decayed_scores", "decay_adjoints")
    }
    decay = "channel" if any(len(axes) == 2 for axes in gates) else "scalar" if gates else "none"
    return decay, max((int(str(n.attr("r"))) for n in plan.nodes if n.op == "ut_transform"), default=0)


def tensor_bytes(plan: KernelPlan, n: int, shape: CallShape) -> int:
    """What a value takes in memory between kernels; a const is handed over as a number."""
    node = plan.plan.nodes[n]
    if node.op == "const":
        return 0
    for b in plan.buffers:
        if b.node == n:
            return shape.count(b.axes) * (shape.operand_bytes if b.element == "compute" else 4)
    wide = bool({"K", "V"} & set(node.axes))
    return shape.count(node.axes, node.op == "param") * (DTYPES[shape.dtype] if wide else 4)


def is_exact(kernel: Kernel, shape: CallShape) -> bool:
    boundary = kernel.boundary
    assert boundary is not None
    return boundary.exact or keep_every_state(shape.chunks, shape.H, shape.K, shape.V)


def boundary_bytes(kernel: Kernel, shape: CallShape) -> int:
    """What the two walks of a boundary term hand over beside buffers: states, and numbers along its axis."""
    if kernel.boundary is None:
        return 0
    state = shape.H * shape.K * shape.V * shape.operand_bytes
    if is_exact(kernel, shape):
        return shape.chunks * state * kept_states(kernel.boundary)
    return (shape.chunks // SEGMENT + shape.B) * state + 2 * shape.count((kernel.boundary.axis,)) * 4


def value_names(plan: KernelPlan) -> dict[int, str]:
    """What listings call a value: a result or buffer by that name, anything else by its label."""
    names = {i: n.label for i, n in enumerate(plan.plan.nodes) if n.label}
    names |= {b.node: b.name for b in plan.buffers}
    return {**{n: name for name, n in plan.results}, **names}
