"""Numbers of a call: sizes used in equations, consts of the read, and none at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import linalg_dsl as ld
from linalg_dsl.ops.draw import draw

HEAD = "recurrence test\ninput q, k : [K]\ninput v : [V]\ninput g : log gate\n"


@pytest.mark.parametrize(
    ("equations", "consts"),
    [
        ("S_t = exp(g_t / K) S_{t-1} + k_t v_tᵀ / V\no_t = S_tᵀ q_t / sqrt(K)", {}),
        ("S_t = exp(g_t) S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t", {}),
        ("const c = 2\nS_t = exp(g_t) S_{t-1} + k_t v_tᵀ\no_t = c S_tᵀ q_t + c (q_tᵀ k_t) v_t", {"c": 3.0}),
        ("const c = 2\nS_t = exp(c g_t) S_{t-1} + k_t v_tᵀ\no_t = c S_tᵀ q_t", {"c": 0.5}),
        ("const c = 1 / K\nS_t = exp(c g_t) S_{t-1} + k_t v_tᵀ\no_t = c S_tᵀ q_t", {}),
    ],
)
def test_values_and_gradients_follow_the_numbers(equations: str, consts: dict[str, float]) -> None:
    op = ld.compile(f"{HEAD}{equations}\n", backend="torch")
    tensors = draw(op.spec, B=1, T=19, H=2, K=4, V=3, dtype=torch.float64, seed=0)
    for x in tensors.values():
        x.requires_grad_()
    o, expected = op(**tensors, **consts), op.reference(**tensors, **consts)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    grads = torch.autograd.grad(o.square().sum(), list(tensors.values()))
    wanted = torch.autograd.grad(expected.square().sum(), list(tensors.values()))
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


SIZES = "S_t = 0.9 exp(g_t / K) S_{t-1} + k_t v_tᵀ / sqrt(2)\no_t = S_tᵀ q_t / sqrt(K)"


def test_an_exported_file_takes_the_sizes_from_its_tensors(tmp_path: Path) -> None:
    op = ld.compile(f"{HEAD}{SIZES}\n", backend="torch")
    scope: dict[str, Any] = {"__name__": "exported"}
    text = op.export(tmp_path / "mine.py", backend="torch").read_text(encoding="utf-8")
    exec(compile(text, "mine.py", "exec"), scope)
    for key in (3, 5):
        tensors = draw(op.spec, B=1, T=9, H=1, K=key, V=2, dtype=torch.float32, seed=0)
        assert torch.equal(scope["test"](**tensors), op(**tensors))


def test_a_kernel_takes_the_sizes_as_numbers_under_another_name() -> None:
    """K is a compile-time constant in every kernel: the number K is passed under a name of its own."""
    text = ld.compile(f"{HEAD}{SIZES}\n").source("forward", backend="triton")
    assert "(K,) = consts" in text
    assert ", (K,), " in text
