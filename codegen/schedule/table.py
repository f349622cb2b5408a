"""Block sizes, warps and stages: a small table per class and shape, limited by shared memory.

The functions below are copied into every generated module (it stands alone), so they use builtins
only. ``loads`` describes the tiles that a walk reads in its loop, as axes such as "to" or "ts", and in
capitals states that it writes there.
"""

from __future__ import annotations


def next_power(n: int) -> int:
    """The least power of two that is at least n and 16, the least extent of a product."""
    return max(16, 1 << max(0, n - 1).bit_length())


def narrow_operands(bfloat16: bool, key: int) -> bool:
    """Whether operands of products are bfloat16, else float32 (products then in tf32 or ieee).

    float16 cannot hold every cotangent; tf32 has its mantissa and float32's range. Keys of a few channels
    are nearly parallel: what they erase and write cancels, in the gate's gradient above all, where bfloat16
    operands then err by 2e-2 (K = 16, V = 256); and small heads cost little either way.
    """
    return bfloat16 and key >= 32


def choose_chunk(decay: str, rank: int, key: int, value: int, operand_bytes: int, shared: int) -> int:
    """The chunk size: 64 without erase and with at most a scalar decay, else 32; less for wide heads.

    ``rank`` erases take rank x rank [C, C] blocks of the solve and as many scores: 16 from three on. A
    chunk's tiles of a prep live in registers: [C, K] and [C, V] ones, 32 x 128 in float32 each.
    """
    width = next_power(max(key, value))
    chunk = 64 if not rank and decay != "channel" and operand_bytes == 2 else 32
    while chunk > 16 and (chunk * width > 64 * 128 or chunk * width * operand_bytes * 4 > shared):
        chunk //= 2
    if rank > 2 or ((rank or decay == "channel") and width > 128):
        chunk = 16
    return chunk


def shortest_chunk(chunk: int, channels: int, most: tuple[int, ...]) -> int:
    """The tokens of a chunk with tiles of ``chunk`` rows: at most ``most[n - 1]`` at so few channels n."""
    return min(chunk, most[channels - 1]) if channels <= len(most) else chunk


def choose_walk(
    loads: tuple[str, ...],
    own: int,
    split: int,
    chunk: int,
    operand_bytes: int,
    shared: int,
    lanes: int,
    units: int,
    states: int = 1,
    described: bool = False,
) -> tuple[int, int, int]:
    """(block of the split axis, warps, stages) of a walk that owns ``own`` and splits ``split``.

    Wide blocks, of 128 with chunks of 64, while the card stays full (``lanes`` sequences x heads over
    ``units`` multiprocessors); then as many stages as shared memory allows, three at most: half of it
    where there are more programs than multiprocessors, so that two run on one. Coupled ``states`` lie side
    by side with the operands of each: blocks half as wide as those of one state so large, else they spill.
    With ``described`` tiles (TMA) a walk that keeps states takes three stages and the widest block that has
    room for them, one that meets them two narrow programs in the place of a wide one.
    """
    own, split = next_power(own), next_power(split)
    wide = 128 if chunk >= 64 and shared > 200_000 else 64  # with less a wide block spills
    side_by_side = own if states == 1 else 2 * own * states
    block = min(split, wide if side_by_side <= 128 else 32 if side_by_side <= 256 else 16)
    if operand_bytes == 4:
        block = min(block, 32)
    while block > 16 and lanes * (split // block) < 0.75 * units:
        block //= 2
    # below sm_90 results of products go through shared memory to be operands: two tiles of them in float32
    turned = 8 * chunk if shared < 200_000 else 0
    while True:
        # With one stage all tiles that a chunk loads go through registers below sm_90: wide blocks spill. On
        # sm_90 they lie at constants, and of those of short chunks ptxas 12 makes wrong operands of products
        # (codegen/machine_faults.py); narrow blocks have the products of sm_80.
        wide_and_short = block > 32 and operand_bytes == 2
        least = 2 if wide_and_short and (turned or chunk < 64) else 1
        whole = shared - turned * block
        room = min(shared // 2, whole) if lanes * (split // block) > units else whole
        stages = walk_stages(loads, own, block, chunk, room // operand_bytes)
        if stages >= least or block == 16:
            break
        if (
            not (turned and least == 2)
            and walk_stages(loads, own, block, chunk, whole // operand_bytes) >= least
        ):
            stages = least
            break
        block //= 2
    twice = 2 * block  # one program in the place of two, where that leaves shared memory for three stages
    keeps = any(axes.isupper() for axes in loads)
    narrow = states == 1 and own <= 128 and operand_bytes == 2
    if narrow and described and keeps:
        for wide in (twice, block, block // 2):
            full = 64 <= wide <= split and lanes * (split // wide) >= 0.75 * units
            if full and walk_stages(loads, own, wide, chunk, (shared - turned * wide) // operand_bytes) == 3:
                block, stages = wide, 3
                break
    alone = not keeps and not (described and "ob" in loads)
    if narrow and alone and stages < 3 and block == 64 and twice <= split:
        full = lanes * (split // twice) >= 0.75 * units
        if full and walk_stages(loads, own, twice, chunk, (shared - turned * twice) // operand_bytes) == 3:
            block, stages = twice, 3
    # of one state 128 x 64 fit four warps; of two there are twice as many operands beside them
    most = 128 * 64 if states == 1 else 128 * 48
    eight = states * own * block > most or (turned > 0 and block > 16 and own > 64 and chunk >= 64)
    return block, 8 if eight else 4, max(1, stages)


def descriptors_pay(loads: tuple[str, ...], own: int, block: int, operand_bytes: int) -> bool:
    """Whether a walk that may load by descriptors does so unasked.

    Where a program has 128 x 64 numbers of a state addresses cost registers that are short. Of walks that own
    more than 128 only those that keep states spill less so, others more.
    """
    wide = next_power(own) * block >= 128 * 64
    return operand_bytes == 2 and wide and (own <= 128 or any(axes.isupper() for axes in loads))


def walk_stages(loads: tuple[str, ...], own: int, block: int, chunk: int, room: int) -> int:
    """How many stages of a walk's loads fit beside what else it holds, three at most; ``room`` in numbers."""
    sizes = {"t": chunk, "s": chunk, "o": own, "b": block}
    stage, late, fixed = 0, 0, chunk * chunk + 16  # the unit matrix, and what Triton adds for itself
    for axes in loads:
        elements = 2 if axes == "t" else 1  # gates and decays have four bytes
        for axis in axes.lower():
            elements *= sizes[axis]
        if axes.isupper():
            fixed += elements // 2
        elif "t" in axes:
            stage += elements
        else:
            late += elements  # no product takes these: one buffer less
    stages = 3
    while stages and stages * stage + (stages - 1) * late + fixed > room:
        stages -= 1
    return stages


def keep_every_state(chunks: int, heads: int, key: int, value: int) -> bool:
    """Whether the backward keeps the state at every chunk start, for a gate gradient without subtraction.

    2^28 numbers at the most, one GiB in float32; beyond, the boundary term is formed exactly at every 8th
    boundary and carried between, which errs by a few roundings of the operands more.
    """
    return 4 * chunks * heads * key * value <= 1 << 30


def choose_prep(
    chunk: int,
    decay: str,
    gradients: bool,
    operand_bytes: int,
    scores: int = 0,
    crowded: bool = False,
    states: int = 1,
    blocks: int = 0,
    tiles: int = 0,
    tensor_memory: bool = False,
    whole: bool = False,
    rank: int = 1,
) -> tuple[int, int]:
    """(warps, block of K and V) of a prep; ``gradients``: of the backward.

    One warp for every 16 tokens: a product of C rows gives no more of them work. For every 32 where operands
    are short and no decay is per channel, then in a forward with two wide ``tiles`` at most of all channels
    at once: many small programs wait for memory side by side. With more tiles, of one erase (``rank``), and
    in gradients it is one warp and 64 channels. What forms a transform alone, of ``blocks`` of
    C rows, has as many times more. Tiles with a decay per channel have channels first. In a forward one warp
    takes as many as it has registers for, without a barrier; with more than two
    ``scores`` summed up at once it is two warps. Gradients take 64 channels and four warps, whose products
    are those of the tensor cores of sm_90; so do long chunks. With operands of 4 bytes blocks are narrow, and
    with ``tensor_memory`` (sm_100), where Triton 3.7 fails to compile such products of 64 channels; where
    tiles are ``whole``, as sums over the channels ask, two warps then, whose products stay in registers.
    Coupled ``states``, three or more erases, and decays along both axes make many tiles live at once: they
    are ``crowded``.
    """
    warps = max(1, chunk // 16)
    if blocks:
        return warps * blocks, 64
    short = operand_bytes == 2 and states == 1 and decay != "channel"
    if short and (gradients or (tiles > 2 and rank == 1)):
        return 1 if chunk <= 64 else chunk // 32, 64
    if short and tiles <= 2:
        return max(1, chunk // 32), 128
    if states > 1 and gradients:
        return max(warps, 4), 32
    if decay != "channel":
        return warps, 64
    if operand_bytes == 4:
        return (max(warps, 4) if gradients else warps), 32
    if tensor_memory and gradients and whole:
        return 2, 32
    if (gradients and crowded and chunk > 16) or (tensor_memory and (gradients or chunk > 32)):
        return max(warps, 4), 32
    if gradients or chunk > 32:
        return max(warps, 4), 64
    return (2, 32) if scores > 2 and chunk == 32 else (1, 512 // chunk)
