"""From a case that fails to a smaller one that still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from linalg_dsl.testing.cases import Case, Shape, make_case
from linalg_dsl.testing.draws import clock
from linalg_dsl.testing.extremes import Extremes
from linalg_dsl.testing.failures import PropertyError
from linalg_dsl.testing.subject import Subject
from linalg_dsl.testing.watch import OutOfTime

BUDGET_S = 20.0
"""Seconds, as ``draws.clock`` counts them, for making a failure smaller."""
Check = Callable[[Subject, Case], object]


def smallest(subject: Subject, error: PropertyError, check: Check) -> PropertyError:
    """The failure of the smallest case found: fewer tokens, rows, heads, channels, ordinary numbers.

    ``check(subject, case)`` raises ``PropertyError`` where a case fails. Every attempt that still fails is
    the start of the next; after ``BUDGET_S`` seconds the best so far is taken. The likely cause stays that
    of the first failure, which shows more of its pattern.
    """
    now = clock(subject)
    end = now() + BUDGET_S
    best = error
    moved = True
    while moved and now() < end:
        moved = False
        for case in _smaller(subject, best.details["case"]):
            if now() > end:
                break
            try:
                check(subject, case)
            except PropertyError as again:
                best, moved = again, True
                break
            except OutOfTime:
                moved = False
                break
            except Exception:
                continue  # another fault, of a shape that the callable cannot take
    return PropertyError(replace(best.failure, cause=error.failure.cause))


def _smaller(subject: Subject, case: Case) -> Iterator[Case]:
    """Cases a step smaller, the largest steps first."""

    def made(shape: Shape, extremes: Extremes | None = None) -> Case:
        return make_case(
            subject,
            shape,
            seed=case.seed,
            dtype=case.dtype,
            extremes=extremes or case.extremes,
            cotangents=case.cotangents,
            heads=case.heads if shape.H == case.shape.H else {},
            with_state=case.with_state,
        )

    s = case.shape
    if s.lengths is not None:
        if s.T:
            yield made(replace(s, B=1, lengths=None))
        for i in range(len(s.lengths)):
            kept = (*s.lengths[:i], *s.lengths[i + 1 :])
            if kept:
                yield made(replace(s, lengths=kept, T=sum(kept)))
    else:
        for T in dict.fromkeys((1, 2, s.T // 2, s.T - 1)):
            if 0 < T < s.T:
                yield made(replace(s, T=T))
        if s.B > 1:
            yield made(replace(s, B=1))
    if subject.heads is None and s.H > 1:
        yield made(replace(s, H=1))
        yield made(replace(s, H=2)) if s.H > 2 else made(replace(s, H=1))
    if subject.sizes is None:
        for size in (1, 2):
            if size < s.K:
                yield made(replace(s, K=size))
            if size < s.V:
                yield made(replace(s, V=size))
    if not case.extremes.ordinary:
        yield made(s, Extremes())
        for kind in ("gates", "keys", "scalars", "values"):
            plain = replace(case.extremes, **{kind: getattr(Extremes(), kind)})
            if plain != case.extremes:
                yield made(s, plain)
