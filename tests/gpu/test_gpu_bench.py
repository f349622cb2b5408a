"""Measurements on a GPU: memory and launches are counted, and no time is below its floors."""

from __future__ import annotations

import pytest
import torch

import linalg_dsl
from linalg_dsl.ops.bench import PASSES, Shape, device_rates, measure_op, measure_peers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["gated_delta_rule", "mamba1"])
def test_rows_on_a_gpu(name: str) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    rates = device_rates(device, dtype)
    op = linalg_dsl.compile(getattr(linalg_dsl.ops, name).spec)
    shape = Shape(4, 1024, 8, 64, 64)
    rows = list(measure_op(op, shape, dtype, device, PASSES, rates, budget=0.05))
    assert {r.passes for r in rows} == set(PASSES)
    for row in rows:
        assert row.backend == "triton"
        assert row.peak is not None
        assert row.low <= row.ms <= row.high
        # a plan counts triangles in full and a cache may hold what is read again: some room above 1
        assert 0 < row.byte_share < 1.5
        if row.passes != "decode":
            assert row.launches
            assert row.flop_share < 2


def test_attention_stands_beside() -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    rates = device_rates(device, dtype)
    specs = {"gla": linalg_dsl.ops.gla.spec}
    found = list(measure_peers(specs, Shape(2, 512, 4, 64, 64), dtype, device, ("forward",), rates, 0.05))
    assert found[0].operator == "attention (SDPA)"
    assert all(row.ms > 0 for row in found)
