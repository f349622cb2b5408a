"""Coupled states on a GPU, forward and backward, against the float64 step loop."""

from __future__ import annotations

import pytest
import torch
from stacked_recurrences import BY_HAND

import linalg_dsl as ld
from linalg_dsl import ops
from linalg_dsl.ops.draw import GateKind

pytestmark = pytest.mark.gpu
LONG = 1500
WHEN_DRY = {"LONG": 200}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", BY_HAND)
def test_couplings_keep_their_bounds(name: str, dtype: torch.dtype) -> None:
    report = ld.compile(BY_HAND[name], backend="triton").check(B=2, T=300, H=2, K=64, V=48, dtype=dtype)
    assert report.ok, str(report)


@pytest.mark.parametrize("gates", ["mild", "strong", "resets"])
@pytest.mark.parametrize("name", ["mdn", "mdn_lagged"])
def test_momentum_of_full_heads(name: str, gates: GateKind) -> None:
    op = getattr(ops, name).op(backend="triton")
    report = op.check(B=1, T=LONG, H=4, K=128, V=128, dtype=torch.bfloat16, gates=gates)
    assert report.ok, str(report)


def test_momentum_gives_the_same_bits_twice() -> None:
    from linalg_dsl.ops.draw import draw

    op = ops.mdn.op(backend="triton")
    x = draw(op.spec, 2, 500, 4, 128, 128, dtype=torch.bfloat16, device="cuda")
    grads = []
    for _ in range(2):
        given = {n: t.clone().requires_grad_() for n, t in x.items()}
        o = op(**given)
        grads.append([o, *torch.autograd.grad(o.float().square().sum(), list(given.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
