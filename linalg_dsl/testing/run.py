"""All properties of a subject within a time budget, and the report of that."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.testing.draws import clock
from linalg_dsl.testing.failures import NotApplicable, PropertyError
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
SHARES = {"matches_reference": 5.0, "chunk_size_invariance": 2.0, "poisoned_memory": 2.0}
"""Of the time, where a property has another share than 1."""


@dataclass(frozen=True)
class Outcome:
    """What one property said: ``passed``, ``not applicable``, ``failed`` or ``crashed``."""

    name: str
    status: str
    seconds: float
    message: str = ""
    error: PropertyError | None = None

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "not applicable")

    def __str__(self) -> str:
        text = f"{self.name:<32} {self.status:<15} {self.seconds:6.1f} s"
        if not self.message:
            return text
        return f"{text}  {self.message.splitlines()[0] if self.ok else ''}".rstrip() + (
            "" if self.ok else "\n    " + self.message.replace("\n", "\n    ")
        )


@dataclass(frozen=True)
class Report:
    """The outcomes of all properties that were run."""

    subject: str
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Whether no property failed."""
        return all(o.ok for o in self.outcomes)

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the properties that failed or crashed."""
        return tuple(o.name for o in self.outcomes if not o.ok)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "subject": self.subject,
            "ok": self.ok,
            "properties": [
                {
                    "name": o.name,
                    "status": o.status,
                    "seconds": o.seconds,
                    "message": o.message,
                    "failure": o.error.failure.as_dict() if o.error else None,
                }
                for o in self.outcomes
            ],
        }

    def __str__(self) -> str:
        verdict = "all hold" if self.ok else f"{len(self.failed)} do not hold"
        seconds = sum(o.seconds for o in self.outcomes)
        lines = [f"{self.subject}: {len(self.outcomes)} properties in {seconds:.1f} s, {verdict}"]
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

    A property always sees one example at least. What a subject raises counts as a failure (``crashed``);
    ``stop_at_first`` leaves the rest out after one. Raises ``ArgumentError`` for an unknown name.
    """
    names = list(PROPERTIES) if only is None else list(only)
    if unknown := [n for n in names if n not in PROPERTIES]:
        raise ArgumentError(f"there is no property {unknown[0]!r}; they are {', '.join(PROPERTIES)}")
    now = clock(subject)
    end = now() + budget_s
    outcomes: list[Outcome] = []
    for i, name in enumerate(names):
        share = SHARES.get(name, 1.0) / sum(SHARES.get(n, 1.0) for n in names[i:])
        left = max(end - now(), 0.0) * share
        outcomes.append(run_one(subject, name, seed=seed, budget_s=left))
        if stop_at_first and not outcomes[-1].ok:
            break
    return Report(subject.name, tuple(outcomes))


def assert_op_matches_reference(op: CompiledOp | Subject, *, seed: int = 0, examples: int = 40) -> None:
    """Raises ``PropertyError`` where an op, or any subject, is not what the step loop of its spec is.

    Results, states and all gradients, per element, at ``examples`` draws of shapes, types and nasty ends.
    """
    subject = op if isinstance(op, Subject) else Subject.of_op(op)
    matches_reference(subject, seed=seed, examples=examples)


def run_one(subject: Subject, name: str, *, seed: int = 0, budget_s: float = 10.0) -> Outcome:
    """One property by name; nothing is raised."""
    began = time.monotonic()

    def said(status: str, message: str = "", error: PropertyError | None = None) -> Outcome:
        return Outcome(name, status, time.monotonic() - began, message, error)

    try:
        PROPERTIES[name](subject, seed=seed, budget_s=budget_s)
    except NotApplicable as reason:
        return said("not applicable", str(reason))
    except PropertyError as error:
        return said("failed", str(error), error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return said("crashed", f"{type(error).__name__}: {error}\nin {last.filename}:{last.lineno}")
    return said("passed")
