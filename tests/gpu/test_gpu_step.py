"""Step kernels on a GPU: errors against the float64 step loop, the same bits again, long and packed calls."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from step_cases import TEXTS

import linalg_dsl as ld
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.op import CompiledOp

pytestmark = pytest.mark.gpu


def compiled(name: str, **options: Any) -> CompiledOp:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a slower path is taken
        return ld.compile(TEXTS[name], backend="triton", **options)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_float32_and_bfloat16(name: str) -> None:
    op = compiled(name)
    for dtype in (torch.float32, torch.bfloat16):
        report = op.check(B=2, T=131, H=2, K=40, V=24, dtype=dtype, device="cuda")
        assert report.ok, report


@pytest.mark.parametrize(("K", "V"), [(1, 1), (16, 64), (64, 64), (128, 128)])
@pytest.mark.parametrize("name", ["mamba1", "undecayed_erase", "two_sided", "mdn", "dense"])
def test_head_sizes(name: str, K: int, V: int) -> None:
    report = compiled(name).check(B=1, T=65, H=2, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    assert report.ok, report


@pytest.mark.parametrize("name", ["mamba1", "rwkv4", "mlstm", "two_sided"])
def test_packed_with_empty_sequences_and_shared_heads(name: str) -> None:
    op = compiled(name)
    few = {op.spec.inputs[0].name: 2}
    report = op.check(H=4, K=24, V=40, cu_seqlens=[0, 0, 5, 5, 21, 370, 371, 371], heads=few, device="cuda")
    assert report.ok, report


@pytest.mark.parametrize("name", ["undecayed_erase", "mamba1", "oja_with_skip"])
def test_the_same_bits_again(name: str) -> None:
    op = compiled(name)
    tensors = draw(op.spec, 4, 512, 8, 32, 64, dtype=torch.bfloat16, device="cuda")
    given = [x.requires_grad_() for x in tensors.values()]

    def run() -> list[torch.Tensor]:
        o = op(*given)
        return [o.detach(), *torch.autograd.grad(o.float().square().sum(), given)]

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
