"""Recurrences of every class for the tests of calls, among them ones that the catalogue lacks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

import linalg_dsl
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.reference import reference

OWN = {
    "mixed_reads": """
recurrence mixed_reads
input q, r : [K]
input k : [K] unit
input v : [V]
input a : log gate [K]
input beta, gamma : scalar in (0, 1)
param u : [K]
S_t = diag(exp(a_t)) (I - beta_t k_t k_tᵀ) S_{t-1} + gamma_t k_t v_tᵀ
o_t = S_tᵀ q_t + S_{t-1}ᵀ (u ⊙ r_t)
""",
    "value_erase": """
recurrence value_erase
input q, k : [K]
input v, w : [V] unit
input g : log gate [V]
input beta : scalar in (0, 2)
S_t = S_{t-1} diag(exp(g_t)) (I - beta_t w_t w_tᵀ) + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
    "looking_back": """
recurrence looking_back
input q, k : [K]
input v : [V]
input g : log gate
n_t = exp(g_t) n_{t-1} + k_t
S_t = exp(g_t) S_{t-1} + k_{t-1} v_tᵀ
o_t = S_tᵀ q_t / (1 + n_tᵀ n_t)
""",
    "own_scan": """
recurrence own_scan
input x, c : [V]
input g : log gate [V]
param b : [V]
h_t = exp(g_t) ⊙ h_{t-1} + b ⊙ x_t
o_t = c_t ⊙ h_t
""",
    "both_sides": """
recurrence both_sides
input q : [K]
input k : [K] unit
input v, u : [V] unit
input b, c : scalar in (0, 1)
S_t = (I - b_t k_t k_tᵀ) S_{t-1} (I - c_t u_t u_tᵀ) + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
}
"""Diagonal gate and an erase with two reads and a param; the value side; stages with a shift; a scan; a
sequential one."""
CLASSES = ("simple_gla", "gla", "gated_delta_rule", "delta_product", "mdn", *OWN)
"""Scalar gate, diagonal gate, low rank, substeps, states that need each other's past, and those above."""
KERNELS = ("simple_gla", "mdn", *OWN)
"""Of these the ones that stand for the others where kernels are interpreted, which is slow."""


@cache
def op_of(name: str, **options: Any) -> CompiledOp:
    """The compiled entry or text of this name; what it says of a slower path is not what is tested."""
    text = OWN[name] if name in OWN else catalogue_text(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return linalg_dsl.compile(text, **options)


def inputs_of(
    op: CompiledOp, B: int, T: int, H: int, K: int, V: int, *, N: int | None = None, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Random tensors on the CPU and what is carried in: the state that a few other tokens leave behind."""
    dtype = options.pop("dtype", torch.float32)
    count = B if N is None else N
    tensors = draw(op.spec, B, T, H, K, V, dtype=dtype, **options)
    with torch.no_grad():
        before = draw(op.spec, count, 3, H, K, V, seed=91)
        _, last = reference(op.spec, before, output_final_state=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    states = [last] if isinstance(last, Tensor) else list(last)
    return list(tensors.values()), [x.to(wide) for x in states]


def call(op: Any, tensors: Sequence[Tensor], states: Sequence[Tensor] | None, **options: Any) -> list[Tensor]:
    """o, then everything that is carried out."""
    given: Any = None if states is None else states[0] if len(states) == 1 else list(states)
    o, last = op(*tensors, initial_state=given, output_final_state=True, **options)
    return [o, last] if isinstance(last, Tensor) else [o, *last]


def with_gradients(
    op: Any,
    tensors: Sequence[Tensor],
    states: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """The results, and the gradients of all tensors and states from ``cotangents``, else random ones."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *states)]
    results = call(op, leaves[: len(tensors)], leaves[len(tensors) :], **options)
    if cotangents is None:
        cotangents = random_like(results)
    found = torch.autograd.grad(results, leaves, cotangents, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]
    return [x.detach() for x in results], grads


def random_like(tensors: Sequence[Tensor], seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in tensors]


def worst(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest error relative to the largest entry; NaN counts as infinite."""
    floor = 1e-6 * max((float(w.detach().abs().max()) for w in wanted if w.numel()), default=0.0)
    errors = [0.0]
    for f, w in zip(found, wanted, strict=True):
        assert f.shape == w.shape
        if w.numel():
            size = max(float(w.detach().abs().max()), floor, 1e-30)
            errors.append(float((f.detach().double() - w.detach().double()).abs().max()) / size)
    return max(errors) if all(e == e for e in errors) else float("inf")
