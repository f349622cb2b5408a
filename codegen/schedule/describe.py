"""The schedule of one call in words: kernels in order, their sizes, what they move, and why it is so.

The sizes come from the functions that the launchers use (``table``), with the limits of a target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from linalg_dsl.codegen.launch_sizes import Launches, LaunchSizes, sizes_of
from linalg_dsl.codegen.schedule.alone import lone_transform
from linalg_dsl.codegen.schedule.call_shape import (
    DTYPES,
    Call,
    CallShape,
    boundary_bytes,
    is_crowded,
    is_exact,
    plan_class,
    score_count,
    state_count,
    summed_axis,
    tensor_bytes,
    value_names,
)
from linalg_dsl.codegen.schedule.choice import Levels, Place, choose_levels
from linalg_dsl.codegen.schedule.descriptors import are_possible, capabilities, how_tiles_are_loaded
from linalg_dsl.codegen.schedule.facts import BOUNDARY
from linalg_dsl.codegen.schedule.kernel_plan import (
    SEGMENT,
    BoundaryProducts,
    Kernel,
    KernelPlan,
    is_transform,
    tile_kinds,
)
from linalg_dsl.codegen.schedule.levels import choose_combine, combine_time
from linalg_dsl.codegen.schedule.predict import Prediction, predict_prep, predict_walk
from linalg_dsl.codegen.schedule.table import (
    choose_chunk,
    choose_prep,
    choose_walk,
    next_power,
)
from linalg_dsl.codegen.schedule.two_level import Summary, TwoLevel, first_walk
from linalg_dsl.codegen.targets import Target, find_target
from linalg_dsl.errors import ArgumentError
from linalg_dsl.planner.ops import OPS

MANY = 1 << 30
SCAN = "super_scan"
NOTHING = LaunchSizes()


@dataclass(frozen=True, slots=True)
class KernelSchedule:
    """One launch. ``block``: of the split axis, or of K and V in a prep; ``read`` and ``written`` in bytes.

    ``again``: bytes that the blocks of a walk beyond the first read once more, usually from the cache.
    """

    kernel: Kernel
    programs: int
    blocks: int
    block: int
    warps: int
    stages: int
    read: int
    again: int
    written: int
    reasons: tuple[str, ...]
    prediction: Prediction
    over: str = "sequences"
    state: int = 0
    """Bytes of a walk's states that a program keeps on chip."""

    @property
    def name(self) -> str:
        return self.kernel.name


@dataclass(frozen=True, slots=True)
class ScanSchedule:
    """The launch that combines the maps of super-chunks; ``each`` of a sequence, one after the other."""

    programs: int
    block: int
    warps: int
    each: int
    update: str
    prediction: Prediction

    @property
    def name(self) -> str:
        return SCAN

    @property
    def purpose(self) -> str:
        pieces = _plural(self.each, "super-chunk")
        return f"the state at each of {pieces} of a sequence, one after the other: {self.update}"


@dataclass(frozen=True, slots=True)
class CallSchedule:
    """Every launch of a call, in order."""

    shape: CallShape
    levels: Levels
    forward: tuple[KernelSchedule | ScanSchedule, ...]
    backward: tuple[KernelSchedule | ScanSchedule, ...]

    @property
    def predictions(self) -> tuple[tuple[str, str, Prediction], ...]:
        """(forward or backward, kernel, prediction) of every launch."""
        pairs = (("forward", self.forward), ("backward", self.backward))
        return tuple((phase, x.name, x.prediction) for phase, launches in pairs for x in launches)


def schedule_call(plan: KernelPlan, call: Call, target: Target) -> CallSchedule:
    """What the launcher of a dense call does on a target. Raises ``ArgumentError`` for an unknown dtype."""
    chosen = call.chunk_size or _table_chunk(plan, call.K, call.V, call.dtype, target)
    shape = CallShape(call.B, call.T, call.H, call.K, call.V, call.dtype, chosen, summed_axis(plan))
    if call.tokens is not None and call.tokens < chosen:
        shape = replace(shape, tokens=call.tokens)
    levels = choose_levels(
        plan, place_of(shape, target), call.schedule, call.super_chunk, invariant=call.invariant
    )
    two, stage = levels.two_level, plan.plan.name
    if two is not None:
        shape = replace(shape, pieces=levels.pieces)

    def launches(phase: str, kernels: Sequence[Kernel]) -> Iterator[KernelSchedule | ScanSchedule]:
        first = None if two is None else first_walk(kernels, "forward" if phase == "forward" else "reverse")
        for kernel in kernels:
            if two is not None and kernel is first:
                yield from _level_schedules(two, two.before(phase), shape, target, stage, call.launch)
            asked = sizes_of(call.launch, stage, kernel.name, kernel.family)
            yield kernel_schedule(plan, kernel, shape, target, invariant=call.invariant, asked=asked)

    return CallSchedule(
        shape,
        levels,
        tuple(launches("forward", plan.forward)),
        tuple(launches("backward", plan.backward)) if plan.backward else (),
    )


def schedule_lines(
    plan: KernelPlan,
    *,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    dtype: str = "bfloat16",
    target: str = "sm_90",
    chunk_size: int | None = None,
    invariant: bool = False,
    schedule: str = "walk",
    super_chunk: int | None = None,
    launch: Launches = (),
    tokens: int | None = None,
) -> tuple[str, ...]:
    """The launches of a dense call of this shape: programs, blocks, warps, stages, bytes, reasons.

    ``chunk_size``, ``invariant``, ``schedule`` and ``super_chunk`` as given to ``linalg_dsl.compile``,
    ``launch`` as its options hold it; ``tokens`` as for ``Call``. Raises ``ArgumentError`` for an unknown
    dtype or target.
    """
    place = find_target(target)
    call = Call(B, T, H, K, V, dtype, chunk_size, invariant, schedule, super_chunk, launch, tokens)
    found = schedule_call(plan, call, place)
    shape, names = found.shape, value_names(plan)
    lines = [
        f"on {place.name}, {place.units} multiprocessors, {place.shared // 1024} KB of shared memory for a "
        f"program; B = {B}, T = {T}, H = {H}, K = {K}, V = {V}, {dtype}",
        f"chunks of {shape.chunk} tokens: {_chunk_reason(plan, shape, place, chunk_size)}",
        *([f"{shape.tokens} of them filled: no more erases than channels"] if shape.tokens else []),
        found.levels.line,
    ]
    for phase, launches in (("forward", found.forward), ("backward", found.backward)):
        if launches:
            time = sum(x.prediction.microseconds for x in launches)
            count = f"{len(launches)} launch{'es' if len(launches) > 1 else ''}"
            lines.append(f"{phase}: {count}, about {time:.3g} us by the model")
        for x in launches:
            lines += _scan_lines(x) if isinstance(x, ScanSchedule) else _kernel_lines(x, names)
    two = found.levels.two_level
    if two is not None:
        lines.append(f"kept of super-chunks: {_megabytes(_level_bytes(two, shape))}, their states and maps")
    return (*lines, *_memory_lines(plan, shape))


def chosen_chunk(plan: KernelPlan, *, K: int, V: int, dtype: str, target: str = "sm_90") -> int:
    """The chunk size that the launcher takes where none is given; raises as ``schedule_lines`` does."""
    return _table_chunk(plan, K, V, dtype, find_target(target))


def _table_chunk(plan: KernelPlan, key: int, value: int, dtype: str, target: Target) -> int:
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    shape = CallShape(1, 1, 1, key, value, dtype, 1, summed_axis(plan))
    return choose_chunk(*plan_class(plan.plan), key, value, shape.operand_bytes, target.shared)


def kernel_schedule(
    plan: KernelPlan,
    kernel: Kernel,
    shape: CallShape,
    target: Target,
    *,
    invariant: bool = False,
    asked: LaunchSizes = NOTHING,
) -> KernelSchedule:
    """Sizes and reasons of one launch, as the launcher chooses them where they are not ``asked`` for."""
    reads = {n: tensor_bytes(plan, n, shape) for n in kernel.loads}
    kept = boundary_bytes(kernel, shape)
    keeps = kernel.boundary is not None and kernel.direction == kernel.boundary.keeper
    written = sum(tensor_bytes(plan, n, shape) for n in kernel.stores) + (kept if keeps else 0)
    read = sum(reads.values()) + (0 if keeps else kept)
    if kernel.family == "prep":
        decay, rank = plan_class(plan.plan)
        wide = sum(axes != "ts" for axes in tile_kinds(plan.plan.nodes, kernel))
        warps, block = choose_prep(
            shape.chunk, decay, kernel in plan.backward, shape.operand_bytes, score_count(plan.plan),
            is_crowded(plan.plan), state_count(plan.plan), lone_transform(plan.plan.nodes, kernel), wide,
            target.backend == "cuda" and int(target.arch) >= 100, rank=rank,
        )  # fmt: skip
        block, warps = asked.block or block, asked.warps or warps
        reasons = (*_prep_reasons(plan, kernel, shape, warps, block), *_asked_reasons(asked))
        prediction = predict_prep(plan.plan.nodes, kernel, place_of(shape, target), read + written)
        return KernelSchedule(
            kernel, shape.chunks * shape.H, 1, block, warps, 1, read, 0, written, reasons, prediction
        )
    own, split = (shape.K, shape.V) if kernel.split == "V" else (shape.V, shape.K)
    lanes = (shape.pieces or shape.B) * shape.H
    loads = tile_kinds(plan.plan.nodes, kernel)
    tiles = capabilities(plan, kernel, asked.tma, invariant)
    described = are_possible(tiles, shape, target)

    def choose(lanes: int, shared: int) -> tuple[int, int, int]:
        sizes = (shape.chunk, shape.operand_bytes, shared, lanes, target.units, len(kernel.carries))
        return choose_walk(loads, own, split, *sizes, described)

    filled = MANY if invariant else lanes
    block, warps, stages = choose(filled, target.shared)
    block = min(asked.block or block, next_power(split))
    warps, stages = asked.warps or warps, asked.stages or stages
    blocks = -(-split // block)
    whole = sum(b for n, b in reads.items() if kernel.split not in plan.plan.nodes[n].axes)
    widest, filling = choose(MANY, MANY), choose(filled, MANY)
    sizes = (
        []
        if asked.block
        else [_block_reason(block, widest[0], filling[0], split, own, lanes * blocks, target)]
    )
    sizes += [] if asked.stages else [_stage_reason(stages, filling[2], lanes * blocks > target.units)]
    state = len(kernel.carries) * own * block * 4
    reasons = (
        *_walk_reasons(plan, kernel, state),
        *sizes,
        *_asked_reasons(asked),
        *how_tiles_are_loaded(plan, kernel, tiles, asked.tma, shape, target, block, stages),
        *_boundary_reasons(kernel, shape),
    )
    each = -(-shape.chunks // (shape.pieces or shape.B or 1))
    prediction = predict_walk(
        plan.plan.nodes, kernel, place_of(shape, target), each, block, lanes * blocks, read + written
    )
    return KernelSchedule(
        kernel, lanes * blocks, blocks, block, warps, stages, read, whole * (blocks - 1), written, reasons,
        prediction, "super-chunks" if shape.pieces else "sequences", state,
    )  # fmt: skip


def place_of(shape: CallShape, target: Target) -> Place:
    return Place(shape.B, shape.T, shape.H, shape.K, shape.V, shape.chunk, shape.operand_bytes, target)


def _level_bytes(two: TwoLevel, shape: CallShape) -> int:
    sizes = {"K": shape.K, "V": shape.V, 1: 1}
    maps = sum(sizes[s.rows] * sizes[s.columns] for s in (two.matrix, two.factors) if s is not None)
    return 4 * shape.pieces * shape.H * (shape.K * shape.V + maps)


def _level_schedules(
    two: TwoLevel,
    summaries: Sequence[Summary],
    shape: CallShape,
    target: Target,
    stage: str,
    launch: Launches,
) -> Iterator[KernelSchedule | ScanSchedule]:
    """The launches that come before the first walk of a phase, and the scan."""
    sizes = {"K": shape.K, "V": shape.V, 1: 1}
    for summary in summaries:
        own = replace(shape, K=sizes[summary.rows], V=sizes[summary.columns])
        asked = replace(sizes_of(launch, stage, summary.kernel.name, "walk"), tma=None)
        found = kernel_schedule(two.plan, summary.kernel, own, target, asked=asked)
        written = 4 * shape.pieces * shape.H * own.K * own.V
        yield replace(found, written=written, reasons=(summary.purpose, *_asked_reasons(asked)))
    matrix = two.erased is not None
    erased, other = (shape.V, shape.K) if two.erased == "V" else (shape.K, shape.V)
    _, block, warps = choose_combine(erased, other, target.shared, matrix)
    asked = sizes_of(launch, stage, SCAN, "scan")
    block, warps = asked.block or block, asked.warps or warps
    programs = shape.B * shape.H * -(-(other if matrix else shape.K * shape.V) // block)
    each = shape.pieces // max(1, shape.B)
    time = Prediction(combine_time(each, erased, matrix), 0, 0, "chain")
    update = two.reversed_update if two.reverse in summaries else two.update
    yield ScanSchedule(programs, block, warps, each, update, time)


# -- reasons --------------------------------------------------------------------------------------------
def _chunk_reason(plan: KernelPlan, shape: CallShape, target: Target, given: int | None) -> str:
    if given is not None:
        return "as asked for"
    decay, rank = plan_class(plan.plan)
    if shape.chunk == choose_chunk("none", 0, 16, 16, 2, MANY):
        return "no erase and at most one decay per token, so a large one costs little inside"
    why = []
    if rank:
        why.append(f"{'an erase' if rank == 1 else f'{rank} erases'} (its solve grows with the square)")
    if decay == "channel":
        why.append("a decay per channel (anchored blocks in the registers of a prep)")
    if shape.operand_bytes > 2:
        why.append(f"products take operands of {shape.operand_bytes} bytes")
    if choose_chunk(decay, rank, 16, 16, shape.operand_bytes, MANY) > shape.chunk:
        limit = f"{target.shared // 1024} KB"
        why.append(f"tiles of [chunk, {max(shape.K, shape.V)}] have to fit registers and {limit}")
    return "; ".join(why)


def _prep_reasons(
    plan: KernelPlan, kernel: Kernel, shape: CallShape, warps: int, block: int
) -> tuple[str, ...]:
    nodes = plan.plan.nodes
    after = any(n.op in ("read", *BOUNDARY) for n in (nodes[a] for a in kernel.loads))
    first = (
        "what is left once the walks have read the states: every chunk by itself"
        if after
        else "needs no state: every chunk by itself"
    )
    tall = [n for n in kernel.body if nodes[n].op in ("ut_transform", "decayed_scores", "decay_adjoints")]
    what = {
        "ut_transform": "forms T of the solve before the walk, by masked doubling",
        "decayed_scores": "scores with a decay per channel, anchored at the start of the chunk, "
        "or block pair by block pair at an anchor of their own where a decay is too steep for that",
        "decay_adjoints": "derivatives of such scores at the same anchors",
    }
    return (
        first,
        *(what[nodes[n].op] for n in tall),
        f"{_plural(warps, 'warp')} for {shape.chunk} tokens; {block} columns at a time, so that no "
        f"[{shape.chunk}, {max(shape.K, shape.V)}] tile stands whole in registers",
    )


def _walk_reasons(plan: KernelPlan, kernel: Kernel, state: int) -> tuple[str, ...]:
    nodes, split = plan.plan.nodes, kernel.split
    own = "K" if split == "V" else "V"
    forward = kernel.direction == "forward"
    names = [name for name, direction, _, _ in plan.plan.carries if direction == kernel.direction]
    names = names if len(names) > 1 else ["S"]
    what = " and ".join(n if forward else f"d{n}" for n in names)
    order, verbs = "first to last" if forward else "last to first", ("goes", "stays")
    verbs = ("go side by side", "stay") if len(names) > 1 else verbs
    out = [
        f"{what} {verbs[0]} from chunk to chunk, {order}, and {verbs[1]} on chip "
        f"({_kilobytes(state)} per program)",
        f"{split} is split: products with {what} sum over {own}, so a program owns all of {own}",
    ]
    given = [
        n for n in kernel.loads if nodes[n].axes == ("t", own) and nodes[n].op not in ("input", "cotangent")
    ]
    solves = any(is_transform(nodes, n) for n in kernel.loads)
    if given and not solves and any(n.op == "ut_transform" for n in nodes):
        named = value_names(plan)
        out.append(f"with {_listed(named[n] for n in given)} at hand its state is a plain linear recurrence")
    return tuple(out)


def _block_reason(
    block: int, widest: int, filling: int, split: int, own: int, programs: int, target: Target
) -> str:
    if block < filling:
        return f"blocks of {block}: wider ones do not fit {target.shared // 1024} KB of shared memory"
    if block < widest:
        return f"blocks of {block}, for {programs} programs on {target.units} multiprocessors"
    if block >= next_power(split):
        return f"one block: a program holds all {split}"
    return f"blocks of {block}, the widest whose state with all of {own} stays in registers"


def _asked_reasons(asked: LaunchSizes) -> tuple[str, ...]:
    return (f"{asked}: as asked for",) if asked != NOTHING else ()


def _stage_reason(stages: int, most: int, crowded: bool) -> str:
    if stages == most:
        return f"{_plural(stages, 'stage')}: the loads of a chunk run ahead of its products"
    room = "with two programs on a multiprocessor" if crowded else "for one program"
    return f"{_plural(stages, 'stage')}, as many as shared memory allows {room}"


def _boundary_reasons(kernel: Kernel, shape: CallShape) -> tuple[str, ...]:
    boundary = kernel.boundary
    if boundary is None:
        return ()
    if is_exact(kernel, shape):
        kept = shape.operand_bytes * shape.chunks * shape.H * shape.K * shape.V
        why = (
            "coupled states have more such terms than balances over a chunk"
            if isinstance(boundary, BoundaryProducts)
            else "its gate is in linear space"
            if boundary.exact
            else f"all states take {_megabytes(kept)}, less than a GiB"
        )
        how = f"at every chunk: {why}"
    else:
        how = f"at every {SEGMENT}th chunk, carried and bounded (Cauchy-Schwarz) between"
    if kernel.direction == boundary.keeper:
        what = "S" if kernel.direction == "forward" else "dS"
        return (f"keeps {what} for the gate gradient's boundary term, formed {how}",)
    over = "V" if boundary.axis == "K" else "K"
    if isinstance(boundary, BoundaryProducts):
        count = _plural(len(boundary.terms), "boundary term")
        return (f"forms the {count} Σ_{over} S_0 ∘ dS_C of the gates' gradients exactly {how}",)
    return (f"forms the gate gradient's boundary term Σ_{over} S_0 ∘ dS_C exactly {how}",)


# -- text -----------------------------------------------------------------------------------------------
def _scan_lines(found: ScanSchedule) -> list[str]:
    return [
        f"{found.name}: {_plural(found.programs, 'program')} (sequences × heads × blocks of {found.block}), "
        f"{_plural(found.warps, 'warp')}, about {found.prediction.microseconds:.3g} us by the model",
        f"  {found.purpose}",
    ]


def _kernel_lines(found: KernelSchedule, names: dict[int, str]) -> list[str]:
    kernel = found.kernel
    if kernel.family == "prep":
        what = f"prep, {_plural(found.programs, 'program')} (chunks × heads), blocks of {found.block}"
    else:
        blocks = f" × {found.blocks} blocks of {found.block}" if found.blocks > 1 else ""
        what = (
            f"{kernel.direction} walk, {kernel.split} split, {_plural(found.programs, 'program')} "
            f"({found.over} × heads{blocks})"
        )
    loop = f", {_plural(found.stages, 'stage')}" if kernel.family == "walk" else ""
    again = f" (and {_megabytes(found.again)} again for its other blocks)" if found.again else ""
    reads = _listed(names[n] for n in kernel.loads if n in names)
    writes = _listed(names[n] for n in kernel.stores if n in names) or "the state"
    return [
        f"{kernel.name}: {what}, {_plural(found.warps, 'warp')}{loop}",
        f"  reads {_megabytes(found.read)}{again}: {reads}",
        f"  writes {_megabytes(found.written)}: {writes}",
        f"  {found.prediction}",
        *(f"  {reason}" for reason in found.reasons),
    ]


def _memory_lines(plan: KernelPlan, shape: CallShape) -> list[str]:
    saved = [b for b in plan.buffers if b.saved]
    between = sum(tensor_bytes(plan, b.node, shape) for b in saved)
    rest = sum(tensor_bytes(plan, b.node, shape) for b in plan.buffers if not b.saved)
    lines = []
    if plan.backward:
        kept = f": {_listed(b.name for b in saved)}" if saved else "; it reads the inputs again"
        lines.append(f"saved for the backward beside its inputs: {_megabytes(between)}{kept}")
        again = _formed_again(plan)
        if again:
            lines.append(f"formed again, which moves fewer bytes than saving: {_listed(again)}")
    lines.append(f"temporary: {_megabytes(rest)}")
    return lines


def _formed_again(plan: KernelPlan) -> list[str]:
    """Named token values and scores that a forward kernel computes and a backward one computes again."""
    ahead = {n for k in plan.forward for n in k.body}
    names = value_names(plan)
    found = {
        n for k in plan.backward for n in k.body if n in ahead and OPS[plan.plan.nodes[n].op].kind != "leaf"
    }
    return [names[n] for n in sorted(found) if n in names and plan.plan.nodes[n].axes != ("K", "V")]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _megabytes(count: int) -> str:
    size = count / 1e6
    return f"{size:,.0f} MB" if size >= 100 else f"{size:.3g} MB"


def _kilobytes(count: int) -> str:
    return f"{count / 1024:.3g} KB"
