"""Runs of one update for several reads become one run with several outputs.

Two stages that have the same states and equations differ in what they read. Where neither read waits for the
other, one walk gives both: it forms and applies the update once, forward and backward. Reads along different
axes stay apart: their walks split different axes and would not share anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from linalg_dsl.algebra.traverse import symbols
from linalg_dsl.errors import DslError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.micro_tokens import choose_substeps
from linalg_dsl.planner.stages import PerToken, Shift, Stage, Step, TokenStep
from linalg_dsl.planner.two_axes import with_two_axes


def join_runs(spec: RecurrenceSpec, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps of ``spec`` with as few runs of every update as their reads allow."""
    found = tuple(steps)
    while True:
        shorter = next(_with_one_less(spec, found), None)
        if shorter is None:
            return found
        found = shorter


def _with_one_less(spec: RecurrenceSpec, steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    runs = [(i, s) for i, s in enumerate(steps) if isinstance(s, Stage)]
    for (i, one), (j, other) in combinations(runs, 2):
        joined = _joined(spec, one, other)
        if joined is None:
            continue
        rest = [joined if n == i else s for n, s in enumerate(steps) if n != j]
        placed = _in_order(rest)
        if placed is not None:
            yield placed


def _joined(spec: RecurrenceSpec, one: Stage, other: Stage) -> Stage | None:
    """One run for what both read; None where the updates differ or the reads are of two shapes."""
    x, y = one.spec, other.spec
    axes = dict(one.axes) | dict(other.axes)
    if x.states != y.states or x.updates != y.updates or x.outputs[0].value.shape != y.outputs[0].value.shape:
        return None
    if axes != dict(other.axes) | dict(one.axes) or len(set(axes.values())) != len(axes):
        return None
    taken, consts = {i.name for i in x.inputs}, {c.name: c for c in (*x.consts, *y.consts)}
    made = replace(
        one,
        spec=replace(
            x,
            inputs=(*x.inputs, *(i for i in y.inputs if i.name not in taken)),
            consts=tuple(consts[c.name] for c in spec.consts if c.name in consts),
            outputs=(*x.outputs, *y.outputs),
        ),
        arguments=(*one.arguments, *(a for a in other.arguments if a not in one.arguments)),
        results=(*one.results, *other.results),
        axes=tuple(sorted(axes.items())),
        keeps=one.keeps or other.keeps,
    )
    return made if _in_chunks(made) or not (_in_chunks(one) and _in_chunks(other)) else None


def _in_chunks(stage: Stage) -> bool:
    try:
        form = canonicalise(with_two_axes(choose_substeps(stage)).spec)
    except DslError:
        return False
    (rec,) = form.recurrences
    reads = [[replace(r, to=0) for r in rec.reads if r.to == i] for i, _ in enumerate(rec.outputs)]
    return not any(a == b for a, b in combinations(reads, 2))  # one value would be two outputs


def _in_order(steps: Sequence[Step]) -> tuple[Step, ...] | None:
    """The steps so that every value is made before it is used; None where they wait for each other."""
    todo, placed = list(steps), list[Step]()
    waiting = {name for s in todo for name in s.made}
    while todo:
        ready = next((s for s in todo if not _needs(s) & waiting), None)
        if ready is None:
            return None
        todo.remove(ready)
        placed.append(ready)
        waiting -= set(ready.made)
    return tuple(placed)


def _needs(step: Step) -> set[str]:
    match step:
        case Shift(of=of) | PerToken(of=of):
            return {of}
        case TokenStep(value=value):
            return {s.name for s in symbols(value)}
        case Stage(arguments=arguments):
            return set(arguments)
