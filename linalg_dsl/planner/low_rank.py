"""Erases and writes in few columns: L, W, Σ and B of form (1).

Terms that share a left vector up to a per-token scalar become one column of L, terms that read along
the same vector one column of B; what is left over are the scalars, which go to Σ on an erase and to W
on a write. Of the possible groupings the one with the fewest columns is taken. Vectors of different states
are different vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from linalg_dsl.algebra.expr import ZERO, Expr, mul
from linalg_dsl.algebra.factors import Factors, collected, divided, factored, split_factors, total
from linalg_dsl.algebra.traverse import commutative_key
from linalg_dsl.errors import DslError, for_each
from linalg_dsl.language.printer import show_expr
from linalg_dsl.planner.linear_map import RankOne

Grouping = Literal["left", "row"]
Key = tuple[int, str]
"""A vector and the number of its state."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """L (m columns), W (m), B (r) and Σ (m x r), with what was done to get there."""

    left: tuple[Expr, ...]
    written: tuple[Expr, ...]
    erase: tuple[Expr, ...]
    sigma: tuple[tuple[Expr, ...], ...]
    combined: int = 0
    """How many erase columns were given up by adding those with a common left vector."""
    into: tuple[int, ...] = ()
    """For every left vector the state that it belongs to."""
    of: tuple[int, ...] = ()
    """For every erase vector the state that it reads."""


def without(factors: Factors, taken: Factors) -> Factors | None:
    """The factors that are left when those of ``taken`` are struck out, or None if some are missing."""
    have = Counter(commutative_key(f) for f in (*factors.scalars, *factors.vectors))
    need = Counter(commutative_key(f) for f in (*taken.scalars, *taken.vectors))
    if need - have:
        return None
    found = divided(factors, taken)
    if found.coefficient.denominator > factors.coefficient.denominator:
        return None  # 0.9 S - β k kᵀ S erases the undecayed state, though β could be divided by 0.9
    return found


def after_value_decay(erases: Sequence[RankOne], other: Sequence[Expr]) -> tuple[RankOne, ...]:
    """The erases as ones of the state after the decay of the axis that is not erased.

    Raises DslError where one of them reads the state before it, or after more than that decay.
    """
    decay = Factors(vectors=tuple(other))

    def after(erase: RankOne) -> RankOne:
        rest = without(Factors(vectors=erase.other), decay)
        if rest is None or rest.vectors:
            raise _not_after_value_decay(erase, decay)
        return replace(erase, other=())

    return tuple(for_each(erases, after))


def _not_after_value_decay(erase: RankOne, decay: Factors) -> DslError:
    along = f"the erase along {show_expr(erase.row.vector)}"
    if decay.vectors:
        message = (
            f"{along} reads the state before its gate {show_expr(decay.vector)} along the axis that is not "
            "erased: every column would have a triangular system of its own, which has no chunk form"
        )
    else:
        message = (
            f"what {along} takes away is scaled by {show_expr(Factors(vectors=erase.other).vector)}, each "
            "column by another factor: every column would have a triangular system of its own, which has no "
            "chunk form"
        )
    return DslError.single("E951", message, erase.span, "let the erase read the state after that gate")


def read_decayed(erases: Sequence[RankOne], decay: Factors) -> tuple[RankOne, ...] | None:
    """The erases as ones of the decayed state, D_t ∘ S_{t-1}, if all of them carry the decay."""
    found = []
    for erase in erases:
        rest = without(erase.scale * erase.row, decay)
        if rest is None or not rest.vectors:
            return None
        scale = Factors(rest.coefficient, rest.scalars)
        found.append(replace(erase, scale=scale, row=Factors(vectors=rest.vectors), other=()))
    return tuple(found)


def merge_columns(erases: Sequence[RankOne], writes: Sequence[RankOne]) -> LowRank:
    """The grouping with the fewest columns m + r, then the fewest columns of L."""
    best: LowRank | None = None
    for erases_by, writes_by in product(("left", "row"), ("left", "row")):
        made = _grouped(erases, writes, erases_by, writes_by)  # type: ignore[arg-type]
        if best is None or (_cost(made) < _cost(best)):
            best = made
    assert best is not None
    return best


def _cost(found: LowRank) -> tuple[int, int]:
    return len(found.left) + len(found.erase), len(found.left)


@dataclass(frozen=True, slots=True)
class _Entry:
    """``scalar * left rowᵀ`` with plain vectors."""

    left: Expr
    scalar: Expr
    row: Expr
    into: int = 0
    of: int = 0

    @property
    def left_key(self) -> Key:
        return self.into, commutative_key(self.left)

    @property
    def row_key(self) -> Key:
        return self.of, commutative_key(self.row)


def _grouped(
    erases: Sequence[RankOne], writes: Sequence[RankOne], erases_by: Grouping, writes_by: Grouping
) -> LowRank:
    erased = _entries(erases, erases_by)
    wrote = _entries(writes, writes_by)
    left: dict[Key, Expr] = {}
    for entry in (*wrote, *erased):
        left.setdefault(entry.left_key, entry.left)
    written = tuple(collected([mul((e.scalar, e.row)) for e in wrote if e.left_key == key]) for key in left)
    reduced = _combine_erases(erased)
    rows: dict[Key, Expr] = {}
    for entry in reduced:
        rows.setdefault(entry.row_key, entry.row)
    sigma = tuple(
        tuple(total(e.scalar for e in reduced if (e.left_key, e.row_key) == (at, of)) for of in rows)
        for at in left
    )
    given_up = len({e.row_key for e in erased}) - len(rows)
    return LowRank(
        tuple(left.values()),
        written,
        tuple(rows.values()),
        sigma,
        given_up,
        tuple(into for into, _ in left),
        tuple(of for of, _ in rows),
    )


def _entries(terms: Sequence[RankOne], grouping: Grouping) -> list[_Entry]:
    """One entry per pair of vectors; grouped by row, one per row with the left vectors added."""
    merged: dict[tuple[Key, Key], tuple[RankOne, list[Expr]]] = {}
    for term in terms:
        column, row = commutative_key(term.column.vector), commutative_key(term.row.vector)
        key = (term.into, column), (term.of, row)
        merged.setdefault(key, (term, []))[1].append(term.scale.scalar)
    entries = [
        _Entry(term.column.vector, scalar, term.row.vector, term.into, term.of)
        for term, scalars in merged.values()
        if (scalar := total(scalars)) != ZERO
    ]
    if grouping == "left":
        return entries
    by_row: dict[tuple[int, Key], list[_Entry]] = {}
    for entry in entries:
        by_row.setdefault((entry.into, entry.row_key), []).append(entry)
    return [
        _Entry(column, common, group[0].row, group[0].into, group[0].of)
        for group in by_row.values()
        for common, column in [_weighted([(e.scalar, e.left) for e in group])]
    ]


def _combine_erases(entries: list[_Entry]) -> list[_Entry]:
    """B' = Σ_i σ_i B_i for the erases with one left vector, where that leaves fewer columns."""
    rows = {e.row_key for e in entries}
    groups: dict[tuple[Key, int], list[_Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.left_key, entry.of), []).append(entry)
    if len(rows) <= len(groups):
        return entries
    return [
        _Entry(group[0].left, common, row, group[0].into, group[0].of)
        for group in groups.values()
        for common, row in [_weighted([(e.scalar, e.row) for e in group])]
    ]


def _weighted(terms: Sequence[tuple[Expr, Expr]]) -> tuple[Expr, Expr]:
    """``Σ scalar vector`` as common scalar and vector: β k + β p is β (k + p)."""
    if len(terms) == 1:
        return terms[0]
    common, rest = factored([mul(t) for t in terms])
    whole = common * split_factors(rest)
    return whole.scalar, whole.vector
