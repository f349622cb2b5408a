"""Where kernels are compiled draws are from few classes of sizes, and a run ends when its time is over."""

from __future__ import annotations

import time
from math import inf

import pytest
import torch
from faulty import gated, subject

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.ops.selfcheck import enabled, known_answers_left_out
from linalg_dsl.testing import Subject, run, run_properties
from linalg_dsl.testing.draws import one_case
from linalg_dsl.testing.few_kernels import SIZES, looks_at, of_few_kernels
from linalg_dsl.testing.watch import CALLS, OutOfTime, Watch, spent, watched


def on_a_gpu() -> Subject:
    return Subject.of_op(linalg_dsl.compile(ops.gated_delta_rule.spec, backend="triton"), device="cuda")


def test_draws_on_a_gpu_are_of_few_classes_and_vary_within_them() -> None:
    few = of_few_kernels(on_a_gpu(), 0)
    drawn = [one_case(few, seed) for seed in range(80)]
    classes = {(c.dtype, c.shape.K, c.shape.V, tuple(c.heads), c.with_state) for c in drawn}
    assert {(c.dtype, c.shape.K, c.shape.V) for c in drawn} == {
        (torch.float32, *SIZES[0]), (torch.bfloat16, *SIZES[1])
    }  # fmt: skip
    assert len(classes) == 5  # of float32 with and without shared heads and state, of bfloat16 one
    assert all(2 * n == c.shape.H for c in drawn for n in c.heads.values())
    assert len({(c.shape.B, c.shape.T, c.shape.H, c.shape.lengths) for c in drawn}) > 40
    assert len({str(c.extremes) for c in drawn}) > 15


def test_another_seed_has_other_classes_and_variants() -> None:
    one, other = (of_few_kernels(on_a_gpu(), seed) for seed in (0, 1))
    assert one.dtypes == other.dtypes[::-1]
    assert one.sizes != other.sizes
    assert not set(one.variants) & set(other.variants)
    assert len(one.variants) == len(other.variants) == 2
    ways = [n for kind in one.dtypes for n in looks_at(one, one.variants, kind)]
    assert sorted(ways) == sorted(one.variants)


def test_a_cpu_has_all_sizes() -> None:
    mine = subject()
    assert of_few_kernels(mine, 0) is mine
    assert looks_at(mine, ("a", "b"), torch.float32) == ["a", "b"]


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
    monkeypatch.setattr(run, "prepare", lambda *given: calls.append(0.0))
    report = run_properties(subject(counted), only=names)
    assert report.ok
    assert report.not_examined == names[1:]
    assert "none fails, 2 not examined" in str(report)
    assert [o.status for o in report.outcomes][1:] == ["not examined"] * 2
    assert report.as_dict()["not_examined"] == list(names[1:])


def test_no_call_is_begun_when_time_is_over_and_seconds_are_told_apart() -> None:
    with watched(Watch(time.monotonic() - 1.0)), pytest.raises(OutOfTime), spent(CALLS):
        pass
    with watched(Watch()) as watch:
        with spent(CALLS):
            watch.compiled(1e3, 1)  # more than has passed: nothing is left for the call itself
        watch.side_by_side = True
        watch.compiled(5.0, 1)
    assert watch.seconds == {"compiling": 1e3, "calls": 0.0}
    assert str(watch) == "calls 0.0 s, compiling 2 kernels 1000.0 s"


def test_known_answers_wait_while_the_kit_compares_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("LINALG_DSL_SELFCHECK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device("cuda")
    assert enabled(device)
    with known_answers_left_out():
        assert not enabled(device)
    assert enabled(device)
