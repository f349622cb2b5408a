"""The property kit over kernels on a GPU: no property fails, and a run ends when its twenty seconds are over.

What the time was spent on is printed (``pytest -s``): compiling, the step loop, calls. With other processes
beside it fewer cases are looked at; how many are in time counts on an idle machine only.
"""

from __future__ import annotations

import pytest
import torch

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.testing import Subject, run_properties

pytestmark = pytest.mark.gpu

BUDGET_S = 20.0
BEYOND_S = 30.0
"""What a run may take longer: the call under way when time is over, compiled among other processes."""
WHEN_DRY = {"BUDGET_S": 5.0}


@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "kda", "rwkv7", "mlstm", "hgrn"])
def test_every_property_holds_of_kernels(name: str) -> None:
    op = linalg_dsl.compile(getattr(ops, name).spec, backend="triton")
    subject = Subject.of_op(op, device="cuda", dtypes=(torch.float32, torch.bfloat16))
    report = run_properties(subject, budget_s=BUDGET_S)
    print(report)
    assert report.ok, str(report)
    assert report.seconds < BUDGET_S + BEYOND_S, str(report)
    examined = [o for o in report.outcomes if o.cases]
    assert examined, str(report)
