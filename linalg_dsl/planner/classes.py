"""Which class a recurrence compiles to: a chunk form where there is one, else token after token."""

from __future__ import annotations

from collections.abc import Mapping

from linalg_dsl.errors import DslError, Mistake
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.step_form import StepForm, step_form
from linalg_dsl.planner.two_axes import obstacles

NO_CHUNK_FORM = frozenset({f"E95{i}" for i in range(1, 10)})
"""Codes of what has no chunk form; other mistakes are mistakes in every class."""


def find_form(spec: RecurrenceSpec, consts: Mapping[str, float]) -> CanonicalRecurrence | StepForm:
    """Form (1), or the step form with the reasons why there is no form (1).

    Raises DslError on what no class can compute, ArgumentError on unknown consts.
    """
    try:
        return canonicalise(spec, consts)
    except DslError as missing:
        if any(m.code not in NO_CHUNK_FORM for m in missing.mistakes):
            raise
        reasons = obstacles(spec) if _has_other_axes(spec) else ()
        return step_form(spec, consts, reasons or tuple(map(_reason, missing.mistakes)))


def _has_other_axes(spec: RecurrenceSpec) -> bool:
    return len(spec.states) == 1 and spec.states[0].dims not in (("K", "V"), ("V", "K"))


def _reason(mistake: Mistake) -> str:
    """What is in the way, with the term as it was written."""
    if mistake.span is None:
        return mistake.message
    return f"{mistake.message} (`{mistake.span.quoted()}`)"
