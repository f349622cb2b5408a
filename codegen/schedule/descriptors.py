"""Which walks load their tiles by tensor descriptors made on the host, for the hardware's copies (TMA).

Every walk can: its text then has both ways, and the launcher takes the pointers where a call cannot have
descriptors. ``launch={"bwd_forward_k": {"tma": 1}}`` asks for them, 0 in its place for pointers.
"""

from __future__ import annotations

from collections.abc import Sequence

from linalg_dsl.codegen.schedule.call_shape import CallShape
from linalg_dsl.codegen.schedule.kernel_plan import Kernel, KernelPlan, tile_kinds
from linalg_dsl.codegen.schedule.table import descriptors_pay
from linalg_dsl.codegen.targets import Target
from linalg_dsl.planner.plan import Node

DEFAULT: tuple[int, ...] = (9,)
"""Major compute capabilities where walks for which ``pays`` holds take descriptors unasked: (9,) for sm_90.
Nothing else has been measured."""
CAPABLE = (9, 10, 11, 12)
"""Major compute capabilities that have such copies."""
_MANY = 8
"""Tiles whose addresses cost a walk that meets kept states more than it gains by loading them itself."""


def pays(plan: KernelPlan, kernel: Kernel) -> bool:
    """Whether descriptors gain time, where a program also has so much of a state as ``descriptors_pay`` asks.

    Measured on an H200 in bfloat16, K = V = 128, each way at its best sizes. Walks for a gate's gradient
    that take scores: where they keep states .213 ms for .269 (gated delta rule), .150 for .175 (simple_gla)
    and .261 for .362 (comba); where they meet them .229 for .262 and .249 for .249 with the eight and nine
    tiles of the gated delta rule and of comba, .184 for .170 with the five of simple_gla. Walks of a
    backward that load nothing but [C, K] and [C, V] tiles: .085 for .088, .083 for .088, but .099 for .098
    where a reverse one splits keys. Forward walks that take scores, a transform and three tiles more: whole
    forwards .157 for .161 ms (delta rule), .172 for .180 (gated); with one more .414 for .417 (kda), without
    a transform .092 for .093 (linear attention) and .143 for .142 (simple_gla). Others were the same or up
    to five percent slower, those of coupled states, whose blocks are narrow, not measured.
    """
    if len(kernel.carries) > 1:
        return False
    kinds = tile_kinds(plan.plan.nodes, kernel)
    tiles = [axes for axes in kinds if len(axes) == 2 and "t" in axes]
    if kernel.boundary is None:
        bare = len(tiles) == len(kinds) and "ts" not in tiles
        if kernel in plan.forward:
            return tiles.count("ts") == 2 and len(tiles) < 6
        return bare and (kernel.direction, kernel.split) != ("reverse", "K")
    keeps = kernel.direction == kernel.boundary.keeper
    return "ts" in tiles and (keeps or len(tiles) >= _MANY)


def capabilities(
    plan: KernelPlan, kernel: Kernel, asked: int | None, invariant: bool = False
) -> tuple[int, ...]:
    """Where a walk takes descriptors: ``asked`` is 1 for all that can, 0 for none, None for the default.

    That is none where calls are ``invariant``: packed ones load what comes behind the whole chunks of a
    sequence by pointers, and dense ones do not.
    """
    if kernel.family != "walk" or asked == 0:
        return ()
    if asked:
        return CAPABLE
    return DEFAULT if pays(plan, kernel) and not invariant else ()


def is_tile(nodes: Sequence[Node], n: int) -> bool:
    """Whether a loaded value is a tile of a chunk: [C, K], [C, V] or [C, C]."""
    axes = nodes[n].axes
    return nodes[n].op not in ("const", "param") and len(axes) == 2 and axes[0] == "t" and axes[1] in "KVs"


def are_possible(where: Sequence[int], shape: CallShape, target: Target) -> bool:
    """Whether the launcher of a call may take descriptors on a target, where a walk has ``where``."""
    rows = all(n * shape.operand_bytes % 16 == 0 for n in (shape.K, shape.V))
    return _major(target) in where and rows and not shape.tokens


def how_tiles_are_loaded(
    plan: KernelPlan,
    kernel: Kernel,
    where: Sequence[int],
    asked: int | None,
    shape: CallShape,
    target: Target,
    block: int,
    stages: int,
) -> tuple[str, ...]:
    """For ``explain``, of walks that may load by descriptors somewhere: ``where`` are their capabilities."""
    if not where:
        return ()
    if _major(target) not in where:
        no = "no such copies" if _major(target) not in CAPABLE else "them only where asked for"
        return (f"tiles by pointers: {target.name} has {no} (TMA)",)
    if not are_possible(where, shape, target):
        return ("tiles by pointers: copies by descriptors (TMA) need full chunks and rows of whole 16 bytes",)
    if stages < 2:
        return ("tiles by pointers: a loop of one stage has no copies by descriptors (TMA)",)
    how = "tiles by descriptors made on the host (TMA); by pointers if not aligned to 16 bytes"
    if asked:
        return (how,)
    kinds = tile_kinds(plan.plan.nodes, kernel)
    own = shape.V if kernel.split == "K" else shape.K
    if not descriptors_pay(kinds, own, block, shape.operand_bytes):
        return ("tiles by pointers: the state of a program leaves registers for addresses (else TMA)",)
    count = sum(len(axes) == 2 and "t" in axes for axes in kinds)
    why = "registers are short" if "ts" in kinds else "its rounds are copies and products alone"
    return (how, f"for it the addresses of {count} tiles would take registers and instructions: {why}")


def _major(target: Target) -> int:
    return int(target.arch) // 10 if target.backend == "cuda" else 0
