"""How a chunk plan is carried out so that its digits last, and why: the one place that decides it.

What a chunk erases it takes from the state before the *chunk*, S_C = L S_0 + L̂ᵀ Z, so where the tokens of one
chunk together erase nearly all of S_0, two numbers of its size cancel, and what is left keeps the digits of what
was there; the step loop loses none. k erases of full strength along keys that point anywhere leave (1 - 1/D)^k
of the squares of D channels: as many erases as channels leave a third, many more leave nothing. With ``FEW``
channels or more no chunk is so long that it matters; below, chunks have no more erases than channels.

T = (I - G Sigma)^-1 is as large as the recurrence. Where keys are alike its entries do not fall off: with
strengths near 2 they are all near 2, rows of U are sums of C terms of alternating signs, and their roundings add
up to C^2 u (5.5e-5 of a final state at C = 64 in float32, 1.3e-5 with the sums in float64). Only where every
transition is proved a contraction and |Sigma| <= 1 is that out of the question: then what one token writes is
erased by the next along the same key. A short type may form T in tf32 where it is bounded (by |Sigma|, for a
proved contraction), else in three products of tf32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.form import CanonicalRecurrence, Recurrence
from linalg_dsl.planner.stability import solve_is_bounded, sums_of_solve_are_short

FEW = 16
"""From so many channels along the erased axis on no chunk erases all of a state."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The choices for one plan.

    ``transform``: how the products that form T round their operands in calls of a short type on a GPU.
    ``solve``: the type in which the PyTorch module substitutes on a CPU, "own" or "float64". ``axis`` and
    ``shortest``: the axis of the state that is erased along, and for 1, 2, ... channels of it the most tokens of
    a chunk in float32 and float64 (beyond the last entry there is no limit; empty without erases).
    ``reasons``: a line for each.
    """

    transform: Literal["tf32", "tf32x3"]
    solve: Literal["own", "float64"]
    axis: Literal["K", "V"]
    shortest: tuple[int, ...]
    reasons: tuple[str, ...]


def precision(canonical: CanonicalRecurrence) -> Precision:
    """The choices for a recurrence in form (1)."""
    rec, spec = canonical.recurrences[0], canonical.spec
    bounded, tame = solve_is_bounded(rec, spec), sums_of_solve_are_short(rec, spec)
    return Precision(
        transform="tf32" if bounded else "tf32x3",
        solve="own" if tame else "float64",
        axis="V" if rec.axis == "V" else "K",
        shortest=tuple(max(1, d // rec.r) for d in range(1, FEW)) if rec.r else (),
        reasons=_reasons(rec, spec, bounded, tame),
    )


def _reasons(rec: Recurrence, spec: RecurrenceSpec, bounded: bool, tame: bool) -> tuple[str, ...]:
    lines = [
        "float32: operands of products keep their 24 bits; in any type sums, gates and states are float32",
    ]
    if rec.r:
        keys = "keys" if rec.axis == "K" else "values"
        lines.append(
            f"float32, fewer than {FEW} channels of {rec.axis}: a chunk has no more erases than channels, since "
            "what it erases is a difference of numbers of the size of the state before it"
        )
        lines.append(
            "short types form T = (I − Σ G^B)⁻¹ in "
            + ("tf32: |T| ≤ |Σ| follows from the declaration" if bounded else "three products of tf32 for one: ")
            + ("" if bounded else "no bound of T follows from the declaration")
        )
        lines.append(
            "substitution in the type of the tensors: strengths of at most 1 leave short sums"
            if tame
            else f"substitution in float64 on a CPU: where {keys} are alike and strengths pass 1, sums of as many "
            "terms as a chunk has tokens cancel"
        )
    if any(d.kind != "none" for d in rec.decays):
        lines.append(
            "gradients of gates are added up from the pairs whose interval holds the token; the boundary term is "
            "formed of both states"
        )
    return tuple(lines)
