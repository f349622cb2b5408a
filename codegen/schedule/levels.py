"""When two levels pay, and how long super-chunks are: a model of the time of walks, by class and shape.

The functions below are copied into generated modules with two levels (they stand alone), so they use builtins
only, and those of the table. A walk is described by ``products``: how many products of sizes
[C, own, block] (with the state), [C, C, block] and [C, C, own] its step has; ``own`` is the axis it owns,
``block`` its part of the other.
"""

from __future__ import annotations

from linalg_dsl.codegen.schedule.table import choose_walk, next_power


def step_time(
    products: tuple[int, int, int],
    own: int,
    block: int,
    chunk: int,
    operand_bytes: int,
    moved: int,
    bandwidth: float,
) -> float:
    """Microseconds that a program takes for one chunk; ``moved``: bytes it loads and stores.

    A chain of dependent products, .22 us each, or their work beside a start of .38 us at 3.3 MFLOP/us and
    multiprocessor (bfloat16; half of it in tf32), or the bytes at ``bandwidth`` per us and multiprocessor.
    Fitted to walks on one H200: linear attention with blocks of 128, 64, 32, 16 takes 2.3, 1.33, 1.03, .9 us,
    the delta rule 2.9, 1.45 and (16) 1.1, its step alone without outputs 1.15.
    """
    state, inner, scores = products
    work = 2 * chunk * (state * own * block + inner * chunk * block + scores * chunk * own)
    rate = 3.3e6 if operand_bytes == 2 else 1.65e6
    return max(0.22 * (state + inner + scores), 0.38 + work / rate, moved / bandwidth)


def reached(bandwidth: float) -> float:
    """What kernels here move in a microsecond where a large copy moves ``bandwidth``, of what lies in memory.

    Of 29 kernels of eight recurrences that their bytes bind, on one H200, most reached 70 to 80 percent.
    """
    return 0.75 * bandwidth


def waves(programs: int, units: int) -> float:
    """How often the time of one program passes: where there are more than multiprocessors, two share one and
    take a quarter longer than one alone."""
    return 1.0 if programs <= units else 1.25 * -(-programs // (2 * units))


def moved_in_a_chunk(loads: tuple[str, ...], own: int, block: int, chunk: int) -> int:
    """Elements that a program loads for one chunk and stores after it."""
    sizes = {"t": chunk, "s": chunk, "o": own, "b": block}
    moved = chunk * block
    for axes in loads:
        elements = 1
        for axis in axes.lower():
            elements *= sizes[axis]
        moved += elements
    return moved


def walk_time(
    loads: tuple[str, ...],
    products: tuple[int, int, int],
    own: int,
    split: int,
    chunk: int,
    operand_bytes: int,
    shared: int,
    lanes: int,
    units: int,
    bandwidth: float,
    chunks: int,
) -> float:
    """Microseconds of a walk over ``chunks`` chunks by ``lanes`` sequences x heads, one program per unit."""
    block, _, _ = choose_walk(loads, own, split, chunk, operand_bytes, shared, lanes, units)
    programs = lanes * -(-split // block)
    moved = moved_in_a_chunk(loads, own, block, chunk)
    share = bandwidth / max(1, min(units, programs))
    step = step_time(products, own, block, chunk, operand_bytes, moved * operand_bytes, share)
    return step * chunks * waves(programs, units)


def two_level_times(
    loads: tuple[str, ...],
    walk: tuple[int, int, int],
    step: tuple[int, int, int],
    matrix: tuple[int, int, int] | None,
    factors: bool,
    own: int,
    split: int,
    chunk: int,
    operand_bytes: int,
    shared: int,
    units: int,
    bandwidth: float,
    chunks: int,
    lanes: int,
    length: int,
) -> tuple[float, float]:
    """Microseconds of the forward's first walk on one level, and of all that replaces it on two.

    ``walk``, ``step``, ``matrix``: the products of the walk, of its step alone, and of the step's linear part
    (None without erases; ``factors``: decays are multiplied up). ``chunks`` of each of ``lanes`` sequences x
    heads, ``length`` of a super-chunk.
    """
    common = (chunk, operand_bytes, shared)
    one = walk_time(loads, walk, own, split, *common, lanes, units, bandwidth, chunks)
    pieces = -(-chunks // length)
    place = (*common, lanes * pieces, units, bandwidth, length)
    two = walk_time(loads, walk, own, split, *place) + walk_time(loads, step, own, split, *place)
    if matrix is not None:
        two += walk_time(loads, matrix, own, own, *place)
    if factors:
        two += 0.3 * length
    launches = 2 + (matrix is not None) + factors
    return one, two + combine_time(pieces, own, matrix is not None) + 2.0 * launches


def clearly_faster(one: float, two: float) -> bool:
    """Whether two levels are taken unasked: where one takes half as long again. Neither is measured."""
    return one >= 1.5 * two


def super_chunk_length(chunks: int, lanes: int, blocks: int, units: int) -> int:
    """Chunks of a super-chunk so that lanes x blocks x super-chunks fill one wave.

    ``chunks`` of each of ``lanes`` equally long sequences x heads; of a packed batch those of all as of one.
    """
    pieces = max(1, units // max(1, lanes * blocks))
    return max(1, -(-chunks // pieces))


def invariant_super_chunk(chunk: int) -> int:
    """Chunks of a super-chunk where nothing but K, V, dtype and device may decide: 4096 tokens."""
    return max(1, 4096 // chunk)


def combine_time(pieces: int, own: int, matrix: bool) -> float:
    """Microseconds of the scan over the super-chunks of a sequence and head."""
    return pieces * ((1.0 + own / 64) if matrix else 0.3)


def choose_combine(own: int, other: int, shared: int, matrix: bool) -> tuple[int, int, int]:
    """(rows of the map at a time, block, warps) of the scan; without erases blocks of the whole state.

    The map is read in float32: as many of its rows as half of shared memory takes.
    """
    if not matrix:
        return 1, 256, 2
    own = next_power(own)
    block = min(next_power(other), 32 if own <= 128 else 16)
    rows = own
    while rows > 16 and rows * own * 4 > shared // 2:
        rows //= 2
    warps = 8 if rows * own > 64 * 128 else 4  # the rows of a map stand in registers
    return rows, block, warps
