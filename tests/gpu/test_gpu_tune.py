"""Tuning on a GPU, kernels that do not spill, and what a first call takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import linalg_dsl as ld
from linalg_dsl.ops import first_use
from linalg_dsl.ops.bench import Shape, inputs_of
from linalg_dsl.ops.bench_shapes import SHAPES
from linalg_dsl.ops.launched import Use
from linalg_dsl.ops.tune_worker import Job, known, tune_apart
from linalg_dsl.ops.tuned import Tuner, applied

pytestmark = pytest.mark.gpu
SHAPE = Shape(2, 512, 4, 64, 64)


def job_for(name: str, budget: float) -> Job:
    op = ld.compile(getattr(ld.ops, name).spec, backend="triton")
    tensors = inputs_of(op.spec, SHAPE, torch.bfloat16, torch.device("cuda"))
    kinds = tuple(x.dtype for x in tensors.values())
    return Job(op, SHAPE, (SHAPE.H,) * len(kinds), kinds, "cuda", "training", budget)


def test_a_search_ends_in_time_with_something_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINALG_DSL_CACHE", str(tmp_path))
    job = job_for("delta_rule", 25)
    said: list[str] = []
    record = tune_apart(job, said.append)
    assert record.default_ms is not None
    assert record.best is not None
    assert record.best_ms is not None
    assert record.best_ms <= record.default_ms
    assert known(job, job.op).best == record.best
    timed = [found for found in record.tried.values() if isinstance(found, float)]
    assert timed, (said, record.tried)
    sizes = {"B": 1, "T": 200, "H": 2, "K": 64, "V": 64}
    assert applied(job.op, record).check(**sizes, dtype=torch.bfloat16, device="cuda").ok
    # an op that asks to be tuned takes what was found
    tensors = tuple(x.requires_grad_() for x in job.tensors())
    op = ld.compile(job.op.spec, tune=True)
    found = Tuner(op).op_for(tensors, {"B": 2, "T": 512, "H": 4, "K": 64, "V": 64}, None)
    assert found.options.launch == applied(job.op, record).options.launch
    op(*tensors).sum().backward()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, "train") for name in ("linear_attention", "gated_delta_rule", "kda", "dplr", "gated_oja")),
        ("gated_delta_rule", "long"),
        ("kda", "d256"),
    ],
)
def test_no_default_launch_spills(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = ld.compile(getattr(ld.ops, name).spec, backend="triton")
    device = torch.device("cuda")
    tensors = tuple(inputs_of(op.spec, SHAPES[shape], torch.bfloat16, device).values())
    module = op.operator("triton").module
    counts: dict[str, int] = {}

    def compile_all(module, launches):  # type: ignore[no-untyped-def]
        found = first_use.compile_side_by_side(module, launches)
        counts.update({str((x.kernel, x.sizes)): n for x, n in zip(launches, found, strict=True)})
        return found

    said = first_use.settle(module, tensors, None, [Use()], compile_all)
    assert said == ()
    assert counts
    assert {n: c for n, c in counts.items() if c > first_use.MOST_SPILLS} == {}
