"""Functions that are not finite at 0, with lengths and sizes that leave padding in every block."""

from __future__ import annotations

import pytest
import torch

import linalg_dsl as ld
from linalg_dsl.ops.draw import draw

HEAD = """recurrence test
input q, k : [K]
input v : [V]
input f : gate [K] in (0.5, 1)
input b : scalar in (0.5, 2)
"""


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize(
    "equations",
    [
        "S_t = diag(f_t) S_{t-1} + k_t v_tᵀ / b_t\no_t = S_tᵀ q_t",
        "S_t = diag(f_t) S_{t-1} + (k_t / f_t) v_tᵀ\no_t = S_tᵀ (q_t / sqrt(q_tᵀ q_t))",
        "S_t = b_t^(-0.5) S_{t-1} + log(b_t) k_t v_tᵀ\no_t = S_tᵀ q_t / (k_tᵀ k_t)",
        "x_t = k_t rsqrt(k_tᵀ k_t)\nS_t = (I - x_t x_tᵀ / b_t) S_{t-1} + x_t v_tᵀ\n"
        "o_t = S_tᵀ (q_t ⊙ f_t^(-2))",
    ],
)
def test_padding_stays_finite(equations: str) -> None:
    op = ld.compile(f"{HEAD}{equations}\n", backend="triton")
    tensors = draw(op.spec, B=1, T=19, H=1, K=3, V=5, dtype=torch.float32, seed=0)
    for x in tensors.values():
        x.requires_grad_()
    o, expected = op(**tensors), op.reference(**tensors)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)
    grads = torch.autograd.grad(o.sum(), list(tensors.values()), materialize_grads=True)
    wanted = torch.autograd.grad(expected.sum(), list(tensors.values()), materialize_grads=True)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * (1 + want.abs().max().item()))
