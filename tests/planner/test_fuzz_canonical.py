"""Random recurrences: each has a form (1) with the same values, or is refused with a place and a code."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings

from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.evaluate_form import run_form
from linalg_dsl.testing.strategies_grammar import HEADER, OUTPUTS, UPDATES

REFUSALS = {"E951", "E952", "E953", "E955", "E957", "E959"}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(UPDATES, OUTPUTS)
def test_a_form_with_the_same_values_or_a_refusal(update: str, output: str) -> None:
    try:
        spec = parse(f"{HEADER}{update}\no_t = {output}\n")
    except DslError:
        return
    try:
        canonical = canonicalise(spec)
    except DslError as err:
        for mistake in err.mistakes:
            assert mistake.code in REFUSALS
            assert mistake.span is not None
        return
    tensors = draw(spec, B=1, T=3, H=1, K=3, V=2, dtype=torch.float64, seed=7)
    start = torch.randn(1, 1, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    o, last = run_form(canonical, tensors, start)
    expected, end = reference(spec, tensors, initial_state=start, output_final_state=True)
    assert isinstance(end, torch.Tensor)
    for got, want in ((o, expected), (last, end)):
        scale = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 1.0
        assert torch.equal(got.isfinite(), want.isfinite()) or scale > 1e12
        if want.isfinite().all():
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9 * (1 + scale))
