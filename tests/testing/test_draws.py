"""Draws are such that the recurrence itself has numbers in the type under test."""

from __future__ import annotations

import pytest

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.testing import Subject, make_case
from linalg_dsl.testing.draws import cases, one_case, tame
from linalg_dsl.testing.extremes import Extremes
from linalg_dsl.testing.oracle import step_loop
from linalg_dsl.testing.properties_reference import check_case


@pytest.mark.parametrize(
    ("entry", "seed", "keys"), [("normalised_linear_attention", 505, "large"), ("efla", 0, "denormal")]
)
def test_a_quotient_of_what_underflows_is_not_drawn(entry: str, seed: int, keys: str) -> None:
    """Keys a thousand times longer have feature maps of exp(-1000), and squares of denormal ones are 0."""
    subject = Subject.of_op(linalg_dsl.compile(getattr(ops, entry).spec, backend="torch"))
    drawn = one_case(subject, seed)
    hard = make_case(subject, drawn.shape, seed=seed, dtype=subject.dtypes[1], extremes=Extremes(keys=keys))
    assert not all(bool(x.isfinite().all()) for x in step_loop(hard))
    assert not tame(hard)
    for case in cases(subject, seed=seed, examples=1):
        check_case(subject, case)
