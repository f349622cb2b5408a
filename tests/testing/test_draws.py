"""Draws are such that the recurrence itself has numbers in the type under test."""

from __future__ import annotations

import pytest
import torch

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.testing import Shape, Subject, floor, make_case
from linalg_dsl.testing.compare import allowance
from linalg_dsl.testing.draws import cases, one_case, tame
from linalg_dsl.testing.extremes import Extremes
from linalg_dsl.testing.oracle import exact, step_loop
from linalg_dsl.testing.properties_reference import check_case
from linalg_dsl.testing.reductions import entry_spec


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


def test_what_cancels_twice_is_left_with_products_of_two_roundings() -> None:
    kalman = Subject.of_op(linalg_dsl.compile(entry_spec("kalman"), backend="torch"))
    ends = Extremes(gates="all resets", keys="nearly identical", values="denormal")
    case = make_case(kalman, Shape(2, 2, 2, 3, 3), seed=655, dtype=torch.float32, extremes=ends)
    loop = floor.step_loop(case, torch.float32)["d initial_state lam"].double()
    oracle = exact(case)
    allowed = allowance(kalman, case, oracle, "d initial_state lam")
    part = (loop - oracle.want["d initial_state lam"]).abs() / allowed
    assert 0.005 < float(part.max()) < 0.1  # 1.04 where replicas err by 2^-30
