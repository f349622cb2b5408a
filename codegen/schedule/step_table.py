"""Blocks, warps and groups of tokens of step kernels: a small table, limited by what a thread can hold.

The functions below are copied into every generated module (it stands alone), so they use builtins only.
``own``: elements of all states, and of params that are matrices, that go with one entry of the split axis,
or all their elements where no axis is split; ``square``: those of the square matrices that a program
multiplies the states by.
"""

from __future__ import annotations


def padded(n: int, least: int) -> int:
    """The least power of two that is at least n and ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())


def choose_step(
    own: int, cut: int, square: int, backward: bool, lanes: int, units: int
) -> tuple[int, int, int, int, int]:
    """(block of the split axis, warps, stages, tokens per group, tokens whose states stay in registers).

    ``cut``: entries of the split axis, 0 if nothing is split. Blocks are so narrow that one warp can hold
    them: its sums need no barrier, and in the forward, with a thread for one or two entries of the split
    axis, hardly an exchange. On an H200 a second warp costs more than it brings, down to one warp for each of
    the four schedulers of a multiprocessor; a thread then holds 32 elements of the states in the forward and
    16 in the backward, which has their gradients too. A wait for memory costs more than a token's
    arithmetic: the tokens of a group are loaded together, in tiles that are copied two or three rounds ahead.
    """
    if square:  # products of matrices: their operands take the memory that stages would
        return (16 if cut else 0), 8 if square > 8192 else 4, 1, 1, 1
    if not cut:
        warps, most = 1, 16 if backward else 32
        while warps < 8 and own > 32 * warps * most:
            warps *= 2
        each = own // (32 * warps)
        stages = 1 if each > 32 else 3  # params that are matrices leave no registers for more
        if backward:
            return 0, warps, stages, 1 if each > 16 else 2, 1
        return 0, warps, stages, 1 if each > 32 else 4, 1
    cut = 1 << max(0, cut - 1).bit_length()
    vectors, most = own <= 4, 16 if backward else 32
    block = min(cut, 64)
    least = 32 if vectors else 8
    while block > least and (own * block > 32 * most or lanes * (cut // block) < 2 * units):
        block //= 2
    warps = 1
    while warps < 8 and own * block > 32 * warps * (32 if backward else 64):
        warps *= 2
    if vectors:
        return block, warps, 3 if backward else 4, 8, 8
    each = max(1, own * block // (32 * warps))  # elements of the states that a thread holds
    if backward:
        group = 4 if each <= 16 else 2 if warps == 1 else 1
        return block, warps, 3, group, 4 if each <= 8 else 2 if each <= 16 else 1
    return block, warps, 3, 4 if each <= 32 else 2, 1


def choose_decode(
    own: int, whole: int, cut: int, square: int, partial: bool, lanes: int, units: int
) -> tuple[int, int, int]:
    """(block of the split axis, warps, tokens per group) where decoding is a matter of moving the states.

    Where there are several programs for each multiprocessor a thread holds 64 elements of the states, in rows
    of 256 bytes of a float32 state: 85 to 92 % of the bytes a card can move, 80 to 85 with half of both. With
    few programs it holds 32, in rows of 128 bytes, less where there are not enough programs.
    ``whole``: elements of the states without the split axis; where there are such, one program goes over all
    blocks, of which there are few then. ``partial``: each block writes a part of the output, to be added up,
    unless one block has all.
    """
    if square:  # products of matrices
        return (16 if cut else 0), 8 if square > 8192 else 4, 1
    cut = 1 << max(0, cut - 1).bit_length() if cut else 0
    many = lanes * max(1, cut // 64) >= 4 * units
    each = 64 if many and whole <= 8192 else 32
    block = min(cut, 128 if own <= 4 or whole else each)
    if partial and not many and whole + own * cut <= 16384:
        block = cut
    elif whole:
        while block > 8 and whole + own * block > 16384:
            block //= 2
    else:
        while block > 8 and (own * block > 8192 or lanes * (cut // block) < units):
            block //= 2
    held = whole + own * block if cut else max(own, whole)
    warps = 1  # a vector beside a matrix is no reason for twice as many
    while warps < (16 if whole > 8192 else 8) and held * 7 // 8 > 32 * warps * each:
        warps *= 2
    # 16 warps leave a thread 128 registers: there is no room for the loads of a second token
    return block, warps, 2 if held <= 32 * warps * 32 and warps < 16 else 1
