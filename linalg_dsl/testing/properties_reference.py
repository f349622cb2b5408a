"""Against the recurrence itself: values and gradients, finiteness, finite differences."""

from __future__ import annotations

from math import inf

import torch

from linalg_dsl.testing.cases import Case, arguments, leaves_of, outcome, run
from linalg_dsl.testing.compare import Excess, fail, worst
from linalg_dsl.testing.diagnose import likely_cause
from linalg_dsl.testing.draws import cases
from linalg_dsl.testing.failures import NotApplicable, PropertyError
from linalg_dsl.testing.oracle import Oracle, exact
from linalg_dsl.testing.shrink import smallest
from linalg_dsl.testing.subject import Subject
from linalg_dsl.testing.watch import CALLS, rehearsing, spent


def check_case(subject: Subject, case: Case, prop: str = "matches_reference") -> tuple[Oracle, Excess | None]:
    """Raises ``PropertyError`` where an element of some result is beyond its allowance.

    Returns the exact results and the element that came nearest to its allowance.
    """
    oracle = exact(case, gradients=bool(subject.wanted))
    results = run(subject, case)
    found = worst(subject, case, oracle, results)
    if found is not None and found.ratio > 1:
        raise fail(subject, prop, case, found, likely_cause(subject, case, oracle, results), results)
    return oracle, found


def matches_reference(subject: Subject, *, seed: int = 0, examples: int = 40, budget_s: float = inf) -> None:
    """Output, final states and every gradient are those of the float64 step loop, element by element.

    Over all types, shapes (packed, empty, grouped heads) and nasty ends of the declared ranges; what an
    element may be off by is derived in ``linalg_dsl.testing.compare``.
    """
    for case in cases(subject, seed=seed, examples=examples, budget_s=budget_s):
        try:
            check_case(subject, case)
        except PropertyError as error:
            raise smallest(subject, error, check_case) from None


def finite_where_the_recurrence_is(
    subject: Subject, *, seed: int = 0, examples: int = 30, budget_s: float = inf
) -> None:
    """No result is NaN or infinite where the exact one is finite, at the nasty ends that keep the exact
    results far from overflow (``draws.LIMITS``)."""
    for case in cases(subject, seed=seed + 1, examples=examples, budget_s=budget_s):
        oracle = exact(case, gradients=bool(subject.wanted), copies=0)
        results = run(subject, case)
        for name, got in results.items():
            want = oracle.want[name]
            limit = 1e-3 * torch.finfo(got.dtype).max
            wrong = unlike_numbers(got, want, limit)
            if bool(wrong.any()) and bool(want.isfinite().all()):
                at = tuple(int(i) for i in wrong.nonzero()[0])
                excess = Excess(name, at, float(got[at]), float(want[at]), limit, inf)
                raise fail(
                    subject, "finite_where_the_recurrence_is", case, excess,
                    likely_cause(subject, case, oracle, results), results,
                )  # fmt: skip


def unlike_numbers(got: torch.Tensor, want: torch.Tensor, limit: float) -> torch.Tensor:
    """Which elements are NaN or infinite where the exact one is a number below the limit."""
    if rehearsing():
        return torch.zeros_like(want, dtype=torch.bool)
    return ~got.isfinite() & want.isfinite() & (want.abs() < limit)


STEP = 2.0**-18
"""Of central differences in float64: they err by about STEP^2 (curvature) and 2^-53 / STEP (rounding)."""


def finite_differences(subject: Subject, *, seed: int = 0, examples: int = 6, budget_s: float = inf) -> None:
    """In float64 the derivative of a weighed sum of the results, along a random direction in each leaf, is
    the inner product of the leaf's gradient with it."""
    if torch.float64 not in subject.dtypes:
        raise NotApplicable(f"{subject.name} does not compute in float64")
    if not subject.wanted:
        raise NotApplicable(f"no gradients of {subject.name} are claimed")
    for case in cases(
        subject,
        seed=seed,
        examples=examples,
        budget_s=budget_s,
        longest=20,
        ordinary=True,
        dtype=torch.float64,
    ):
        results = run(subject, case)
        generator = torch.Generator().manual_seed(case.seed + 5)
        for name in subject.wanted:
            if name not in {**case.tensors, **case.states}:
                continue
            base = {**case.tensors, **case.states}[name]
            direction = torch.randn(base.shape, generator=generator, dtype=torch.float64)
            ends = [_loss(subject, case, name, base + sign * STEP * direction) for sign in (1, -1)]
            found = (ends[0] - ends[1]) / (2 * STEP)
            grad = results[f"d {name}"].double()
            claimed = float((grad * direction).sum())
            size = float((grad.abs() * direction.abs()).sum()) + max(map(abs, ends))
            allowed = 2e-6 * size + 1e-9
            if not abs(found - claimed) <= allowed and not rehearsing():
                at = tuple(0 for _ in base.shape)
                excess = Excess(f"d {name}", at, claimed, found, allowed, abs(found - claimed) / allowed)
                cause = f"the gradient of {name} is not the derivative of the results (along a direction)"
                raise fail(subject, "finite_differences", case, excess, cause, results)


def _loss(subject: Subject, case: Case, name: str, value: torch.Tensor) -> float:
    leaves = {n: x.detach() for n, x in leaves_of(subject, case, False).items()}
    leaves[name] = value.to(subject.device)
    with torch.no_grad(), spent(CALLS):
        found = outcome(subject, case, subject.call(**arguments(subject, case, leaves)))
    return float(sum((x.cpu() * case.weights[n]).sum() for n, x in found.items()))
