"""Which walks load their tiles by tensor descriptors that the host makes, for the copies of the hardware (TMA).

Every walk can: its text then has both ways, and the launcher takes the pointers where a call cannot have
descriptors. ``launch={"bwd_forward_k": {"tma": 1}}`` asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from linalg_dsl.codegen.schedule.kernel_plan import Kernel
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
