"""Draws in Triton's interpreter are as long as a call may take there, and still have boundaries in them."""

from __future__ import annotations

import pytest

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.testing import Subject
from linalg_dsl.testing.draws import KINDS, shapes
from linalg_dsl.testing.effort import EFFORT, affordable, effort, is_interpreted, tokens_of_a_chunk


def of(entry: str, backend: str) -> Subject:
    return Subject.of_op(linalg_dsl.compile(getattr(ops, entry).spec, backend=backend))


@pytest.mark.parametrize("entry", ["gated_delta_rule", "mdn", "gsa", "mamba1"])
def test_a_call_costs_what_it_may_or_has_one_boundary(entry: str) -> None:
    subject = of(entry, "triton")
    assert is_interpreted(subject)
    for seed in range(4 * len(KINDS)):
        s = shapes(subject, seed)
        if s.lengths is not None:
            assert sum(effort(subject, s.H, n, s.K, s.V) for n in s.lengths) <= 4 * EFFORT
            continue
        within = effort(subject, s.B * s.H, s.T, s.K, s.V) <= EFFORT
        assert within or tokens_of_a_chunk(subject, s.K, s.V) + 1 >= s.T


def test_few_channels_along_an_erase_make_short_chunks_and_short_draws() -> None:
    subject = of("gated_delta_rule", "triton")
    assert tokens_of_a_chunk(subject, 5, 4) == 5
    assert tokens_of_a_chunk(subject, 16, 4) == 32
    assert affordable(subject, 2, 70, 40, 4) == 70 > affordable(subject, 2, 70, 5, 4) > 5
    assert affordable(subject, 100, 70, 5, 4) == 6
    assert affordable(subject, 100, 70, 5, 4, least=0) == 1


def test_nothing_is_shortened_where_no_interpreter_is_at_work() -> None:
    subject = of("gated_delta_rule", "torch")
    assert not is_interpreted(subject)
    assert affordable(subject, 100, 70, 5, 4) == 70


def test_every_kind_of_shape_comes_up_with_several_chunks_in_the_interpreter() -> None:
    subject = of("gated_delta_rule", "triton")
    drawn = [shapes(subject, seed) for seed in range(2 * len(KINDS))]
    assert any(s.lengths is not None and s.H == 2 for s in drawn)
    assert any(s.K > 32 for s in drawn)
    assert any(s.V > 32 for s in drawn)
    assert any(s.lengths is None and 2 * tokens_of_a_chunk(subject, s.K, s.V) < s.T for s in drawn)
