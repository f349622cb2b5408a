"""All properties of a subject within a time budget, and the report of that."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.selfcheck import known_answers_left_out
from linalg_dsl.testing.draws import clock
from linalg_dsl.testing.failures import NotApplicable, PropertyError
from linalg_dsl.testing.few_kernels import of_few_kernels
from linalg_dsl.testing.keep import findings_kept
from linalg_dsl.testing.prepare import Prepared
from linalg_dsl.testing.properties_algebra import (
    linearity,
    reductions,
    scaling_laws,
    transposition_symmetry,
)
from linalg_dsl.testing.properties_calls import (
    determinism,
    nothing_else_asked,
    offsets_do_not_wrap,
    poisoned_memory,
    strided_inputs,
)
from linalg_dsl.testing.properties_decode import decode_equals_prefill
from linalg_dsl.testing.properties_precision import precision
from linalg_dsl.testing.properties_reference import (
    finite_differences,
    finite_where_the_recurrence_is,
    matches_reference,
)
from linalg_dsl.testing.properties_structure import (
    batch_independence,
    causality,
    chunk_size_invariance,
    head_independence,
    packed_equals_separate,
    prefix_gradient_causality,
    split_and_continue,
)
from linalg_dsl.testing.subject import Subject
from linalg_dsl.testing.watch import OutOfTime, Watch, watched

Property = Callable[..., None]

PROPERTIES: dict[str, Property] = {
    f.__name__: f
    for f in (
        offsets_do_not_wrap,
        poisoned_memory,  # first: what writes beside its tensors harms the process
        matches_reference,
        finite_where_the_recurrence_is,
        finite_differences,
        precision,
        chunk_size_invariance,
        split_and_continue,
        packed_equals_separate,
        decode_equals_prefill,
        causality,
        prefix_gradient_causality,
        batch_independence,
        head_independence,
        determinism,
        nothing_else_asked,
        strided_inputs,
        linearity,
        scaling_laws,
        transposition_symmetry,
        reductions,
    )
}
"""Every property by name, in the order in which ``run_properties`` runs them."""
NOT_EXAMINED = "not examined"
PREPARING = 0.5
"""How much of the time the rehearsal of calls, whose kernels are compiled meanwhile, may take."""
WAITING = 0.5
"""How much of what is left a round waits for its kernels; its launches compile what is not there then."""
ROUNDS = 2
"""Where kernels are compiled: how often the properties take turns, with one case each until the last time."""
WITHOUT_CALLS = ("offsets_do_not_wrap",)
"""What looks at no result."""
SHARES = {"matches_reference": 5.0, "chunk_size_invariance": 2.0, "poisoned_memory": 2.0}
"""Of the time, where a property has another share than 1."""


@dataclass(frozen=True)
class Outcome:
    """What one property said: ``passed``, ``not applicable``, ``failed``, ``crashed`` or, where the time was
    over before it had looked at anything, ``not examined``.

    ``cases``: how many it has looked at to their end; ``kernels``: how many Triton compiled for it;
    ``spent``: seconds by what they were spent on.
    """

    name: str
    status: str
    seconds: float
    message: str = ""
    error: PropertyError | None = None
    cases: int = 0
    kernels: int = 0
    spent: str = ""

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "not applicable", NOT_EXAMINED)

    def and_then(self, later: Outcome) -> Outcome:
        """This one and what the same property said of further cases."""
        return replace(
            self if later.status == NOT_EXAMINED else later,
            seconds=self.seconds + later.seconds,
            cases=self.cases + later.cases,
            kernels=self.kernels + later.kernels,
            spent=", then ".join(filter(None, (self.spent, later.spent))),
        )

    def __str__(self) -> str:
        text = f"{self.name:<32} {self.status:<15} {self.cases:3} cases {self.seconds:6.1f} s"
        if not self.message:
            return text
        return f"{text}  {self.message.splitlines()[0] if self.ok else ''}".rstrip() + (
            "" if self.ok else "\n    " + self.message.replace("\n", "\n    ")
        )


@dataclass(frozen=True)
class Report:
    """The outcomes of all properties that were run; ``spent``: on what the time was, all of them together."""

    subject: str
    outcomes: tuple[Outcome, ...]
    seconds: float = 0.0
    spent: str = ""

    @property
    def ok(self) -> bool:
        """Whether no property failed; ``not_examined`` are those that the time did not suffice for."""
        return all(o.ok for o in self.outcomes)

    @property
    def not_examined(self) -> tuple[str, ...]:
        """The names of the properties that the time was over before."""
        return tuple(o.name for o in self.outcomes if o.status == NOT_EXAMINED)

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the properties that failed or crashed."""
        return tuple(o.name for o in self.outcomes if not o.ok)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "subject": self.subject,
            "ok": self.ok,
            "seconds": self.seconds,
            "not_examined": list(self.not_examined),
            "properties": [
                {
                    "name": o.name,
                    "status": o.status,
                    "seconds": o.seconds,
                    "cases": o.cases,
                    "message": o.message,
                    "failure": o.error.failure.as_dict() if o.error else None,
                }
                for o in self.outcomes
            ],
        }

    def __str__(self) -> str:
        verdict = "all hold" if self.ok else f"{len(self.failed)} do not hold"
        if self.not_examined:
            verdict = f"{'none fails' if self.ok else verdict}, {len(self.not_examined)} not examined"
        lines = [f"{self.subject}: {len(self.outcomes)} properties in {self.seconds:.1f} s, {verdict}"]
        lines += [f"  {self.spent}"] if self.spent else []
        return "\n".join([*lines, *(f"  {o}" for o in self.outcomes)])


def run_properties(
    subject: Subject,
    *,
    only: Iterable[str] | None = None,
    budget_s: float = 60.0,
    seed: int = 0,
    stop_at_first: bool = False,
) -> Report:
    """Runs every property, or those in ``only``, each for its share of what is left of ``budget_s`` seconds
    (of computing on a CPU, else by the clock).

    On a CPU a property always sees one example at least. Where kernels are compiled (on a GPU) those of few
    classes of sizes are, side by side before the first property; every property then sees one case before
    any sees more, and no call is begun after ``budget_s``: what is left is ``not examined`` then. What a
    subject raises counts as a failure (``crashed``);
    ``stop_at_first`` leaves the rest out after one. Raises ``ArgumentError`` for an unknown name.
    """
    names = list(PROPERTIES) if only is None else list(only)
    if unknown := [n for n in names if n not in PROPERTIES]:
        raise ArgumentError(f"there is no property {unknown[0]!r}; they are {', '.join(PROPERTIES)}")
    now = clock(subject)
    began, end = time.monotonic(), now() + budget_s
    outcomes: dict[str, Outcome] = {}
    whole = Watch(began + budget_s if subject.device != "cpu" else inf)
    subject = of_few_kernels(subject, seed)
    rounds = ROUNDS if subject.few_kernels else 1
    with ExitStack() as stack:
        if subject.few_kernels:
            stack.enter_context(findings_kept())
        prepared = Prepared(subject, whole)
        stack.callback(prepared.end)
        with known_answers_left_out():
            works = [_rehearsed(subject, names, seed + turn) for turn in range(rounds)]
            prepared.rehearse(works, PREPARING * budget_s)
        for turn, name in ((t, n) for t in range(rounds) for n in names):
            if name == names[0]:
                prepared.wait(turn, WAITING * max(end - now(), 0.0))
            before = outcomes.get(name)
            if before is not None and before.status != "passed":
                continue
            left = 0.0
            if turn == rounds - 1:
                after = names[names.index(name) :]
                share = SHARES.get(name, 1.0) / sum(SHARES.get(n, 1.0) for n in after)
                left = max(end - now(), 0.0) * share
            found = _one(subject, name, seed + turn, left, whole)
            outcomes[name] = found if before is None else before.and_then(found)
            if stop_at_first and not found.ok:
                break
    return Report(subject.name, tuple(outcomes.values()), time.monotonic() - began, str(whole))


def _rehearsed(subject: Subject, names: list[str], seed: int) -> list[Callable[[], None]]:
    """One case of every property that makes calls."""
    return [partial(PROPERTIES[n], subject, seed=seed, budget_s=0.0) for n in names if n not in WITHOUT_CALLS]


def assert_op_matches_reference(op: CompiledOp | Subject, *, seed: int = 0, examples: int = 40) -> None:
    """Raises ``PropertyError`` where an op, or any subject, is not what the step loop of its spec is.

    Results, states and all gradients, per element, at ``examples`` draws of shapes, types and nasty ends.
    """
    subject = op if isinstance(op, Subject) else Subject.of_op(op)
    matches_reference(subject, seed=seed, examples=examples)


def run_one(subject: Subject, name: str, *, seed: int = 0, budget_s: float = 10.0) -> Outcome:
    """One property by name; nothing is raised."""
    return _one(subject, name, seed, budget_s, Watch())


def _one(subject: Subject, name: str, seed: int, budget_s: float, whole: Watch) -> Outcome:
    """``whole``: what of all properties was spent, to which this one adds."""
    began = time.monotonic()
    watch = Watch(whole.end)

    def said(status: str, message: str = "", error: PropertyError | None = None) -> Outcome:
        whole.take(watch)
        seconds = time.monotonic() - began
        return Outcome(name, status, seconds, message, error, watch.cases, watch.kernels, str(watch))

    try:
        if watch.left < 0:
            raise OutOfTime
        with known_answers_left_out(), watched(watch):
            PROPERTIES[name](subject, seed=seed, budget_s=budget_s)
    except OutOfTime:
        return said("passed" if watch.cases else NOT_EXAMINED)
    except NotApplicable as reason:
        return said("not applicable", str(reason))
    except PropertyError as error:
        return said("failed", str(error), error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return said("crashed", f"{type(error).__name__}: {error}\nin {last.filename}:{last.lineno}")
    return said("passed")
