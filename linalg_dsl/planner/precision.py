"""How a chunk plan is carried out so that its digits last, and why: the one place that decides it.

What a chunk erases it takes from the state before the *chunk*, S_C = L S_0 + L̂ᵀ Z. Where the tokens of one
chunk together erase nearly all of S_0, two numbers of its size cancel, and what is left keeps the digits of
what was there; the step loop loses none. k erases of full strength along keys that point anywhere leave
(1 - 1/D)^k of the squares of D channels: as many erases as channels leave a third, many more leave nothing.
With ``FEW`` channels or more no chunk is so long that it matters (docs/precision.md has the measurements);
below, chunks have no more erases than channels.

T = (I - G Sigma)^-1 is as large as the recurrence. Short types may form it in float16, which has the digits
of tf32, where it is bounded (by |Sigma|, where every transition is proved a contraction), else in three
products of bfloat16 halves for one: 16 bits, and the range of float32. G itself is made of operands of 8 or
11 bits, by which T errs more. Also where T is bounded its entries need not fall off from the diagonal: with
keys alike and strengths near 2 they are all near 2, and the rows of U are sums of C terms of alternating
signs, whose roundings add up with C. So chunks of kernels with erases are short (``codegen.schedule.table``),
and substitution on a CPU, where float64 costs nothing beside the products, has its sums in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from linalg_dsl.planner.form import CanonicalRecurrence, Recurrence
from linalg_dsl.planner.stability import solve_is_bounded

WIDE_SOLVE = False
"""Whether plans with erases keep T in float32 between kernels, form it in three products of bfloat16 halves
for one, and take it and what it is applied to with 11 bits (tf32) into their product, in bfloat16 calls.

8 bits of both cost most of the digits where keys are alike and strengths near 2 (docs/precision.md: o off by
1.5e-1 of delta_rule, by 2.5e-2 so). It costs 2 C² bytes more a chunk and head, and a slower product of C
rows in the walks; by how much has not been measured.
"""
FEW = 16
"""From so many channels along the erased axis on no chunk erases all of a state."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The choices for one plan, and their ``reasons``, a line each.

    ``transform``: how the products that form T round their operands in calls of a short type on a GPU.
    ``solve``: how T lies in memory between kernels, and enters products: as their operands, or in float32.
    ``axis``: the axis of the state that is erased along; ``shortest``: for 1, 2, ... channels of it the most
    tokens of a chunk of float32 (beyond the last entry there is no limit; empty without erases). A chunk size
    that was asked for is not changed.
    """

    transform: Literal["fp16", "bf16x3"]
    solve: Literal["operands", "float32"]
    axis: Literal["K", "V"]
    shortest: tuple[int, ...]
    reasons: tuple[str, ...]


def precision(canonical: CanonicalRecurrence) -> Precision:
    """The choices for a recurrence in form (1)."""
    rec, spec = canonical.recurrences[0], canonical.spec
    bounded = solve_is_bounded(rec, spec)
    wide = WIDE_SOLVE and bool(rec.r)
    return Precision(
        transform="fp16" if bounded and not wide else "bf16x3",
        solve="float32" if wide else "operands",
        axis="V" if rec.axis == "V" else "K",
        shortest=tuple(max(1, d // rec.r) for d in range(1, FEW)) if rec.r else (),
        reasons=tuple(_reasons(rec, bounded, wide)),
    )


def _reasons(rec: Recurrence, bounded: bool, wide: bool) -> list[str]:
    lines = [
        "float32: operands of products keep 24 bits; in short types too sums, gates and states are float32"
    ]
    if rec.r:
        keys = "keys" if rec.axis == "K" else "values"
        lines.append(
            f"float32, fewer than {FEW} channels of {rec.axis}: a chunk has no more erases than channels, "
            "since what is left of a state is a difference of numbers of the size that it had before"
        )
        lines.append(
            "short types form T = (I − Σ G^B)⁻¹ in "
            + (
                "float16, whose digits are those of tf32: |T| ≤ |Σ| follows from the declaration"
                if bounded and not wide
                else "three products of bfloat16 halves for one, and keep it in float32"
                if wide
                else "three products of bfloat16 halves for one: no bound of T follows from the declaration"
            )
        )
        lines.append(
            f"substitution on a CPU has its sums in float64: where {keys} are alike, as many terms as a "
            "chunk has tokens may cancel"
        )
    if any(d.kind != "none" for d in rec.decays):
        lines.append(
            "gradients of gates are added up from the pairs whose interval holds the token; boundary terms "
            "are formed of both states at every chunk (at every 8th, and carried between, where that takes "
            "more than 1 GiB)"
        )
    return lines
