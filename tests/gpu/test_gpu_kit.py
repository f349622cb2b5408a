"""The property kit over kernels on a GPU: every property holds, within twenty seconds per operator."""

from __future__ import annotations

import time

import pytest
import torch

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.testing import Subject, run_properties

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "kda", "rwkv7", "mlstm", "hgrn"])
def test_every_property_holds_of_kernels(name: str) -> None:
    op = linalg_dsl.compile(getattr(ops, name).spec, backend="triton")
    subject = Subject.of_op(op, device="cuda", dtypes=(torch.float32, torch.bfloat16))
    op.check(B=1, T=20, H=1, K=16, V=16, device="cuda")  # pays for compiling
    began = time.monotonic()
    report = run_properties(subject, budget_s=20.0)
    assert report.ok, str(report)
    print(f"{name}: {time.monotonic() - began:.1f} s")
