"""Random recurrences of several states of all shapes: one-token plans and gradients are the step loop's."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import step_cases
from hypothesis import HealthCheck, assume, given, settings
from step_cases import StepCase

from linalg_dsl.algebra.expr import Expr, Symbol
from linalg_dsl.algebra.traverse import transform
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.step_form import step_form
from linalg_dsl.planner.step_plan import step_backward, verify_step
from linalg_dsl.testing.strategies_exprs import specs_of_several_states


def without_shifts(spec: RecurrenceSpec) -> RecurrenceSpec:
    """Shifted inputs are inputs of a step form, made by an earlier stage."""
    inputs = {i.name for i in spec.inputs}

    def change(node: Expr) -> Expr:
        if isinstance(node, Symbol) and node.name in inputs and node.time == -1:
            return replace(node, time=0)
        return node

    updates = tuple(replace(e, value=transform(e.value, change)) for e in spec.updates)
    outputs = tuple(replace(e, value=transform(e.value, change)) for e in spec.outputs)
    return replace(spec, updates=updates, outputs=outputs)


# most random powers and logarithms are not finite; twenty recurrences that are, are looked at all the same
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(specs_of_several_states())
def test_any_recurrence_runs_token_by_token(spec: RecurrenceSpec) -> None:
    spec = without_shifts(spec)
    assume(all(isfinite(s.start) for s in spec.states))
    form = step_form(spec)
    verify_step(form.plan)
    verify_step(step_backward(form.plan))
    found = StepCase(form)
    errors = step_cases.errors(found, found.module("torch", 2), 1, 3, 2, 3, 4)
    assume(all(isfinite(e) for e in errors.values()))
    assert not {n: e for n, e in errors.items() if not e < 1e-7}
