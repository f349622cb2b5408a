"""One level or two for a call: what the launcher chooses, with the model's times and the reason."""

from __future__ import annotations

from dataclasses import dataclass

from linalg_dsl.codegen.schedule.kernel_plan import KernelPlan, tile_kinds
from linalg_dsl.codegen.schedule.levels import (
    clearly_faster,
    invariant_super_chunk,
    super_chunk_length,
    two_level_times,
)
from linalg_dsl.codegen.schedule.table import choose_walk
from linalg_dsl.codegen.schedule.two_level import TwoLevel, first_walk, products, two_level, why_one_level
from linalg_dsl.codegen.targets import Target

ANY = 1 << 20
"""A number of sequences x heads that fills every card."""


@dataclass(frozen=True, slots=True)
class Place:
    """Sizes of a dense call on a target; ``chunk`` tokens, operands of ``operand_bytes``."""

    B: int
    T: int
    H: int
    K: int
    V: int
    chunk: int
    operand_bytes: int
    target: Target

    @property
    def chunks(self) -> int:
        """Of one sequence."""
        return -(-self.T // self.chunk)

    def sizes(self, split: str | None) -> tuple[int, int]:
        """(the axis that a walk owns, the one that it splits)."""
        return (self.K, self.V) if split == "V" else (self.V, self.K)


@dataclass(frozen=True, slots=True)
class Levels:
    """``length``: chunks of a super-chunk, 0 on one level; ``pieces``: what walks go over, in all sequences.

    ``one`` and ``two``: microseconds of the forward's walk on one level and of all that stands for it on two,
    by the model (0 where there is no second level). ``two_level``: the plan of two levels, where taken.
    """

    length: int
    pieces: int
    one: float
    two: float
    reason: str
    two_level: TwoLevel | None = None

    @property
    def line(self) -> str:
        if not self.length:
            return f"one level, walks over whole sequences: {self.reason}"
        return f"two levels, super-chunks of {self.length} chunks, {self.pieces} in all: {self.reason}"


def choose_levels(
    plan: KernelPlan, place: Place, schedule: str, super_chunk: int | None, *, invariant: bool
) -> Levels:
    """As the launcher of a dense call chooses; the arguments are those of ``linalg_dsl.compile``."""
    if reason := why_one_level(plan.plan):
        return Levels(0, place.B, 0.0, 0.0, reason)
    found = two_level(plan)
    walk = first_walk(plan.forward, "forward")
    own, split = place.sizes(walk.split)
    loads = tile_kinds(plan.plan.nodes, walk)
    target, lanes = place.target, place.B * place.H
    common = (place.chunk, place.operand_bytes, target.shared)
    wide = choose_walk(loads, own, split, *common, ANY, target.units)[0]
    filling = super_chunk_length(place.chunks, lanes, -(-split // wide), target.units)
    length = super_chunk or (invariant_super_chunk(place.chunk) if invariant else filling)
    one, two = two_level_times(
        loads, products(plan.plan.nodes, walk), products(plan.plan.nodes, found.forward.kernel),
        None if found.matrix is None else products(found.plan.plan.nodes, found.matrix.kernel),
        found.factors is not None, own, split, *common, target.units, target.bandwidth, place.chunks, lanes,
        length,
    )  # fmt: skip
    times = f"the model, which is not measured, has {two:.0f} us for it against {one:.0f} us on one level"
    pieces = place.B * -(-place.chunks // length)
    if schedule == "two_level":
        why = "as asked for" if super_chunk else "they fill one wave of programs"
        if invariant and not super_chunk:
            why = "a length that looks at nothing but K, V, dtype and device"
        return Levels(length, pieces, one, two, f"{why}; {times}", found)
    if schedule == "walk":
        return Levels(0, place.B, one, two, f"as asked for; two_level: {times}")
    if invariant:
        return Levels(0, place.B, one, two, "the plan may look at nothing but K, V, dtype and device")
    if 2 * length > place.chunks:
        why = f"a sequence has {place.chunks} chunks only"
        if length >= place.chunks > 1:
            why = (
                f"{-(-split // wide) * lanes} programs for {target.units} multiprocessors are a wave as it is"
            )
        return Levels(0, place.B, one, two, why)
    if clearly_faster(one, two):
        return Levels(length, pieces, one, two, times, found)
    return Levels(0, place.B, one, two, f"two_level is not clearly faster: {times}")
