"""Texts that the tests of ops share, and a comparison with the step loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import linalg_dsl
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.reference import reference

TEXTS = {
    "gated_delta": """
recurrence gated_delta
input q : [K]
input k : [K] unit
input v : [V]
input g : log gate
input beta : scalar in (0, 2)
const scale = 1 / sqrt(K)
S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ
o_t = scale S_tᵀ q_t
""",
    "bonus": """
recurrence bonus
input q, k : [K]
input v : [V]
input g : log gate [K]
param u : [K]
S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ
o_t = (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ q_t
""",
    "sigmoid_gate": """
recurrence sigmoid_gate
input q, k : [K]
input v : [V]
input a : scalar
const tau = 16
S_t = sigmoid(a_t)^(1/tau) S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
    "pairs": """
recurrence pairs
const n = 2
input q : [K]
input k : [n, K] unit
input v : [n, V]
input beta : [n] in (0, 1)
S_t = S_{t-1} + beta_{t,1} k_{t,1} (v_{t,1}ᵀ - k_{t,1}ᵀ S_{t-1}) + beta_{t,2} k_{t,2} v_{t,2}ᵀ
o_t = S_tᵀ q_t
""",
}


@cache
def compiled(name: str, **options: Any) -> CompiledOp:
    return linalg_dsl.compile(TEXTS[name], **options)


def leaves(
    op: CompiledOp, B: int, T: int, H: int, K: int, V: int, *, N: int | None = None, **options: Any
) -> tuple[list[Tensor], Tensor]:
    """Random tensors and an initial state, all of which want gradients."""
    dtype = options.setdefault("dtype", torch.float64)
    tensors = [x.requires_grad_() for x in draw(op.spec, B, T, H, K, V, **options).values()]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    (state,) = draw_state(op.spec, B if N is None else N, H, K, V, dtype=wide)
    return tensors, state.requires_grad_()


def gradients(
    op: CompiledOp, tensors: list[Tensor], state: Tensor, weights: tuple[float, float], **call: Any
) -> list[Tensor]:
    """o, the final state, then all gradients of a loss that weighs both."""
    o, last = op(*tensors, initial_state=state, output_final_state=True, **call)
    grads = torch.autograd.grad(_loss(o, last, weights), [*tensors, state])
    return [o, last, *grads]


def expected(
    op: CompiledOp, tensors: list[Tensor], state: Tensor, weights: tuple[float, float], **call: Any
) -> list[Tensor]:
    """The same by the step loop in float64, on the same rounded numbers."""
    names = [d.name for d in op.spec.inputs]
    exact = {n: x.detach().double().requires_grad_() for n, x in zip(names, tensors, strict=True)}
    start = state.detach().double().requires_grad_()
    o, last = reference(op.spec, exact, initial_state=start, output_final_state=True, **call)
    assert isinstance(last, Tensor)
    wanted = [*exact.values(), start]
    grads = torch.autograd.grad(_loss(o, last, weights), wanted, allow_unused=True)
    full = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)]
    return [o, last, *full]


def worst_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative L2 error; tiny tensors count against the largest of all."""
    floor = 1e-6 * max(w.detach().norm().item() for w in wanted)
    errors = [
        (f.detach().double() - w.detach()).norm().item() / max(w.detach().norm().item(), floor, 1e-30)
        for f, w in zip(found, wanted, strict=True)
    ]
    return max(errors, default=0.0) if all(e == e for e in errors) else float("nan")


def _loss(o: Tensor, last: Tensor, weights: tuple[float, float]) -> Tensor:
    """A weighted sum: linear, so that the errors of the gradients are those of the op alone."""
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for x, weight in ((o, weights[0]), (last, weights[1])):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        if weight:  # rounded as the op's own cotangent would be
            total = total + weight * (noise.bfloat16().double() * x.double()).sum()
    return total
