"""Every entry of the catalogue on a GPU, forward and backward, against the float64 step loop."""

from __future__ import annotations

import pytest
import torch

from linalg_dsl import ops
from linalg_dsl.ops import catalogue_names

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", catalogue_names())
def test_an_entry_keeps_its_bounds(name: str, dtype: torch.dtype) -> None:
    op = getattr(ops, name).op(backend="triton")
    report = op.check(B=2, T=200, H=2, K=64, V=48, dtype=dtype)
    assert report.ok, str(report)
