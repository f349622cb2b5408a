"""Blocks, warps and stages of step kernels: a small table, limited by what a thread can hold.

The functions below are copied into every generated module (it stands alone), so they use builtins only.
``own``: elements of all states that go with one entry of the split axis, or all their elements where no
axis is split.
"""

from __future__ import annotations


def padded(n: int, least: int) -> int:
    """The least power of two that is at least n and ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())


def choose_step(own: int, cut: int, backward: bool, lanes: int, units: int) -> tuple[int, int, int]:
    """(block of the split axis of ``cut`` entries, warps, stages); ``cut`` 0: nothing is split.

    One warp with an entry of the split axis per thread where that fits: sums over the other axis then need
    no exchange. A thread holds 64 elements of the states, 32 in the backward, which has their gradients too.
    """
    most = 32 if backward else 64
    if not cut:
        warps = 1
        while warps < 8 and own > 32 * warps * most:
            warps *= 2
        return 0, warps, 2
    cut = 1 << max(0, cut - 1).bit_length()
    block = min(cut, 64 if own <= 4 else 32)
    while block > 16 and lanes * (cut // block) < units:
        block //= 2
    warps = 1
    while warps < 8 and own * block > 32 * warps * most:
        warps *= 2
    return block, warps, 4 if own * block <= 4096 else 3


def choose_interval(length: int, lanes: int, elements: int) -> int:
    """Tokens between two saved states.

    The backward keeps the states of that many tokens per program: more take memory there, fewer at the saved
    states. 32, or 16 where a GiB would not hold them.
    """
    return 16 if 4 * 32 * lanes * elements > 1 << 30 else 32
