"""Where kernels are compiled draws are from few classes of sizes, and a run ends when its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any
from unittest import SkipTest
from unittest.mock import Mock

import pytest
import torch
from faulty import gated, subject

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.ops.selfcheck import enabled, known_answers_left_out
from linalg_dsl.testing import Subject, run, run_properties
from linalg_dsl.testing.draws import one_case
from linalg_dsl.testing.failures import NotApplicable
from linalg_dsl.testing.few_kernels import HEADS, SIZES, WIDE_SIZES, of_few_kernels, type_of_ways
from linalg_dsl.testing.keep import findings_kept
from linalg_dsl.testing.oracle import exact
from linalg_dsl.testing.watch import CALLS, OutOfTime, Watch, spent, watched


def on_a_gpu() -> Subject:
    return Subject.of_op(linalg_dsl.compile(ops.gated_delta_rule.spec, backend="triton"), device="cuda")


def test_draws_on_a_gpu_are_of_few_classes_and_vary_within_them() -> None:
    few = of_few_kernels(on_a_gpu(), 0)
    drawn = [one_case(few, seed) for seed in range(80)]
    classes = {(c.dtype, c.shape.K, c.shape.V, tuple(c.heads), c.with_state) for c in drawn}
    assert {(c.dtype, c.shape.K, c.shape.V) for c in drawn} == {
        (torch.bfloat16, *WIDE_SIZES[0]), (torch.float32, *SIZES[1])
    }  # fmt: skip
    assert len(classes) == 5  # of bfloat16 with and without shared heads and state, of float32 one
    assert {c.shape.H for c in drawn} == {HEADS}
    assert all(2 * n == HEADS for c in drawn for n in c.heads.values())
    assert len({(c.shape.B, c.shape.T, c.shape.lengths) for c in drawn}) > 20
    assert len({str(c.extremes) for c in drawn}) > 15


def test_another_seed_has_other_classes_and_variants() -> None:
    one, other = (of_few_kernels(on_a_gpu(), seed) for seed in (0, 1))
    assert one.dtypes == other.dtypes[::-1]
    assert one.sizes != other.sizes
    assert not set(one.variants) & set(other.variants)
    assert len(one.variants) == len(other.variants) == 2
    assert (type_of_ways(one), type_of_ways(other)) == (torch.float32, torch.bfloat16)


def test_a_cpu_has_all_sizes() -> None:
    mine = subject()
    assert of_few_kernels(mine, 0) is mine
    assert type_of_ways(mine) is None


def test_tiles_that_are_written_out_term_by_term_are_small() -> None:
    assert max(max(sizes) for sizes in SIZES) <= 32
    assert all(K >= 32 for K, _ in WIDE_SIZES)  # else products of bfloat16 have no short operands
    assert len(SIZES) == len(WIDE_SIZES)


def test_what_the_step_loop_finds_of_a_case_is_found_once_in_a_run() -> None:
    case = one_case(subject(), 3)
    same, other = (one_case(subject(), n) for n in (3, 11))
    assert exact(case) is not exact(case)
    with findings_kept():
        known = exact(case)
        assert exact(same) is known
        assert exact(same, gradients=False) is not known
        assert exact(other) is not known
        same.weights["o"][:] += 1.0
        assert exact(same) is not known
    assert exact(case) is not known


def test_properties_take_turns_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[str, int, float]] = []

    def noted(name: str) -> Callable[..., None]:
        def look(subject: Subject, *, seed: int, budget_s: float) -> None:
            looked.append((name, seed, budget_s))
            if name == "causality" and seed == 8:
                raise NotApplicable("at the second case")

        return look

    names = ("split_and_continue", "causality")
    monkeypatch.setattr(run, "PROPERTIES", {n: noted(n) for n in names})
    monkeypatch.setattr(run, "Prepared", lambda *given: Mock())
    report = run_properties(on_a_gpu(), only=names, seed=7, budget_s=50.0)
    assert [(n, s, b > 0) for n, s, b in looked] == [
        ("split_and_continue", 7, False), ("causality", 7, False),
        ("split_and_continue", 8, True), ("causality", 8, True),
    ]  # fmt: skip
    assert [o.status for o in report.outcomes] == ["passed", "not applicable"]


def test_nothing_is_judged_while_calls_are_rehearsed() -> None:
    def wrong(**given: Any) -> object:
        o, state = gated(**given)
        return o * torch.nan, state

    mine = subject(wrong)
    names = [n for n in run.PROPERTIES if n not in run.WITHOUT_CALLS]
    for name in names:
        with suppress(SkipTest), watched(Watch(rehearses=True)):
            run.PROPERTIES[name](mine, examples=1)
    with watched(Watch()), pytest.raises(AssertionError):
        run.PROPERTIES["matches_reference"](mine, examples=1)


def test_time_that_is_over_ends_a_run_and_what_was_examined_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    whole = Watch()
    monkeypatch.setattr(run, "Watch", lambda end=inf: whole if not calls else Watch(end))

    def counted(**given: object) -> object:
        calls.append(0.0)
        if len(calls) == 4:  # two cases of the first property, of two calls each
            whole.end = -inf
        return gated(**given)  # type: ignore[arg-type]

    names = ("split_and_continue", "causality", "linearity")

    def prepared(*given: object) -> Mock:
        calls.append(0.0)
        return Mock()

    monkeypatch.setattr(run, "Prepared", prepared)
    report = run_properties(subject(counted), only=names)
    assert report.ok
    assert report.not_examined == names[1:]
    assert "none fails, 2 not examined" in str(report)
    assert [o.status for o in report.outcomes][1:] == ["not examined"] * 2
    assert report.as_dict()["not_examined"] == list(names[1:])


def test_no_call_is_begun_when_time_is_over_and_seconds_are_told_apart() -> None:
    with watched(Watch(time.monotonic() - 1.0)), pytest.raises(OutOfTime), spent(CALLS):
        pass
    with watched(Watch()) as watch, spent(CALLS):
        watch.compiled(1e3, 1)  # more than has passed: nothing is left for the call itself
    assert watch.seconds == {"compiling": 1e3, "calls": 0.0}
    assert str(watch) == "calls 0.0 s, compiling 1 kernels 1000.0 s"


def test_known_answers_wait_while_the_kit_compares_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("LINALG_DSL_SELFCHECK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device("cuda")
    assert enabled(device)
    with known_answers_left_out():
        assert not enabled(device)
    assert enabled(device)
