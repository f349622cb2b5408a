"""Which walks load their tiles by tensor descriptors made on the host, for the hardware's copies (TMA).

Every walk can: its text then has both ways, and the launcher takes the pointers where a call cannot have
descriptors. ``launch={"bwd_forward_k": {"tma": 1}}`` asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from linalg_dsl.codegen.schedule.kernel_plan import Kernel
from linalg_dsl.codegen.targets import Target
from linalg_dsl.planner.plan import Node

DEFAULT: tuple[int, ...] = ()
"""Major compute capabilities where walks for which ``pays`` holds take descriptors unasked: (9,) for sm_90.
None does until the kernels as they are emitted have been measured both ways on a GPU."""
CAPABLE = (9, 10, 11, 12)
"""Major compute capabilities that have such copies."""


def pays(kernel: Kernel) -> bool:
    """Whether addresses cost registers that are short: where a walk over keys takes up states of gates.

    On an H200, bfloat16, K = V = 128, of the gated delta rule .213 ms for .267, of simple_gla .163 for .205
    and of comba .290 for .364, with prototypes; all other walks were within five percent or slower.
    """
    return kernel.split == "K" and kernel.direction == "forward" and kernel.boundary is not None


def capabilities(kernel: Kernel, asked: int | None) -> tuple[int, ...]:
    """Where a walk takes descriptors: ``asked`` is 1 for all that can, 0 for none, None for the default."""
    if kernel.family != "walk" or asked == 0:
        return ()
    if asked:
        return CAPABLE
    return DEFAULT if pays(kernel) else ()


def is_tile(nodes: Sequence[Node], n: int) -> bool:
    """Whether a loaded value is a tile of a chunk: [C, K], [C, V] or [C, C]."""
    axes = nodes[n].axes
    return nodes[n].op not in ("const", "param") and len(axes) == 2 and axes[0] == "t" and axes[1] in "KVs"


def how_tiles_are_loaded(kernel: Kernel, asked: int | None, stages: int, target: Target) -> tuple[str, ...]:
    """For ``explain``, where it is not by pointers whatever the device."""
    where = capabilities(kernel, asked)
    if not where:
        return ()
    major = int(target.arch) // 10 if target.backend == "cuda" else 0
    if major not in where:
        no = "no such copies" if major not in CAPABLE else "them only where asked for"
        return (f"tiles by pointers: {target.name} has {no} (TMA)",)
    if stages < 2:
        return ("tiles by pointers: a loop of one stage has no copies by descriptors (TMA)",)
    return ("tiles by descriptors made on the host (TMA); by pointers if packed or not aligned to 16 bytes",)
