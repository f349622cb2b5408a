"""Recurrences of several stages in Triton's interpreter: kernels of every class one after the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from state_recurrences import text

import linalg_dsl
from linalg_dsl.codegen.cache import load_module
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw, draw_state

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on the GPU: tests/gpu")

TEXTS = {
    **{name: text(name) for name in ("gsa", "mlstm", "lightnet", "rwkv4")},
    "micro_tokens": catalogue_text("gated_delta_product").replace("const n = 2", "const n = 4"),
    "trapezoid": """
recurrence trapezoid
input q, k : [K]
input v : [V]
input g : log gate
input lam : scalar in (0, 1)
S_t = exp(g_t) S_{t-1} + lam_t k_t v_tᵀ + (1 - lam_t) exp(g_t) k_{t-1} v_{t-1}ᵀ
o_t = S_tᵀ q_t
""",
    "function_of_reads": """
recurrence function_of_reads
input q, k, p : [K]
input v : [V]
A_t = A_{t-1} + k_t v_tᵀ
B_t = B_{t-1} + p_t v_tᵀ
o_t = tanh(A_tᵀ q_t + B_{t-1}ᵀ k_t) ⊙ v_t
""",
}


@pytest.mark.parametrize("packed", [None, [0, 0, 5, 33, 33]])
@pytest.mark.parametrize("name", TEXTS)
def test_kernels_of_all_stages_agree_with_the_step_loop(name: str, packed: list[int] | None) -> None:
    op = linalg_dsl.compile(TEXTS[name], backend="triton")
    report = op.check(B=1, T=33, H=2, K=9, V=7, dtype=torch.float32, device="cpu", cu_seqlens=packed)
    assert report.ok, str(report)


@pytest.mark.parametrize("K", [3, 20])
def test_the_maximum_of_what_is_past_the_end_reaches_no_gradient(K: int) -> None:
    """A softmax scaled by a param: the sum over tokens meets rows of which the maximum is of nothing."""
    op = linalg_dsl.compile(
        """
recurrence scaled_softmax
input u, k : [K]
input v : [V]
param c : scalar
S_t = S_{t-1} + k_t v_tᵀ
o_t = c S_tᵀ softmax(u_t)
""",
        backend="triton",
    )
    report = op.check(B=1, T=21, H=1, K=K, V=5, dtype=torch.float32, device="cpu")
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["gsa", "function_of_reads", "micro_tokens"])
def test_an_exported_file_of_kernels_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    op = linalg_dsl.compile(TEXTS[name], backend="triton")
    code = op.export(tmp_path / "kernels.py", backend="triton").read_text(encoding="utf-8")
    assert code.isascii()
    module = load_module(f"exported_{name}", code)  # Triton reads the source from a file
    tensors = list(draw(op.spec, 1, 20, 2, 6, 5, dtype=torch.float32).values())
    states = draw_state(op.spec, 1, 2, 6, 5, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (*tensors, *states)]
    initial: Any = states if len(states) > 1 else states[0]
    results = []
    for call in (op, getattr(module, op.spec.name)):
        o, last = call(*tensors, initial_state=initial, output_final_state=True)
        finals = [last] if isinstance(last, torch.Tensor) else list(last)
        loss = sum((x.sin().sum() for x in (o, *finals)), torch.zeros(()))
        results.append([o, *finals, *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_values_between_stages_are_float32() -> None:
    """The module of a stage that feeds another gives float32, whatever the types of its inputs."""
    op = linalg_dsl.compile(TEXTS["gsa"], backend="triton")
    x = [t.half() for t in draw(op.spec, 1, 20, 2, 6, 5, dtype=torch.float32).values()]
    module = op.stage_ops[0].operator("triton").module
    o, _, _ = module.forward((x[0], x[1], x[3]), (None,), (), None, False, False)
    assert o.dtype == torch.float32
    assert op(*x).dtype == torch.float16
