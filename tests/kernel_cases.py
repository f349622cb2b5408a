"""Cases and comparisons for generated kernels: every output and gradient against the float64 step loop."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.op import CompiledOp

RANK_TWO = """
recurrence gated_rank_two
input q, k, p : [K]
input e : [K] unit
input v : [V]
input g : log gate
input beta, gamma : scalar in (0, 1)
S_t = exp(g_t) (I - gamma_t e_t e_tᵀ) (I - beta_t k_t p_tᵀ) S_{t-1} + beta_t k_t v_tᵀ
o_t = S_tᵀ q_t
"""
MANY_ROWS = """
recurrence two_writes
input q : [K]
input k : [2, K]
input v : [2, V]
input a : [K] unit
input b : [K] unit
input z : [V]
input g : log gate [K]
S_t = diag(exp(g_t)) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_tᵀ v_t
o_t = silu(z_t) ⊙ (S_tᵀ l2norm(q_t)) + S_{t-1}ᵀ q_t
"""
ENTRIES = sorted(p.name[:-4] for p in files("linalg_dsl.ops.catalogue").iterdir() if p.name.endswith(".rec"))
TEXTS = {n: (files("linalg_dsl.ops.catalogue") / f"{n}.rec").read_text(encoding="utf-8") for n in ENTRIES}
TEXTS |= {"gated_rank_two": RANK_TWO, "two_writes": MANY_ROWS}


def embedded(x: Tensor) -> Tensor:
    """The same numbers between NaNs: what is read past the ends is seen."""
    flat = torch.full((x.numel() + 64,), float("nan"), dtype=x.dtype, device=x.device)
    flat[32 : 32 + x.numel()] = x.flatten()
    return flat[32 : 32 + x.numel()].view(x.shape)


def relative(got: Tensor, want: Tensor, floor: float) -> float:
    """The worse of the relative error in norm and of the largest error over the largest entry."""
    d = got.double() - want
    if not d.numel():
        return 0.0
    norm = float(d.norm()) / max(float(want.norm()), floor, 1e-30)
    return max(norm, float(d.abs().max()) / max(float(want.abs().max()), floor, 1e-30))


def errors(
    op: CompiledOp,
    tensors: Mapping[str, Tensor],
    state: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    loss: str = "both",
) -> dict[str, float]:
    """Relative error of every output and gradient of the kernels against the step loop in float64."""
    given = {n: embedded(t).requires_grad_() for n, t in tensors.items()}
    exact = {n: t.detach().double().requires_grad_() for n, t in given.items()}
    states = []
    results: list[dict[str, Tensor]] = []
    generator = torch.Generator().manual_seed(3)
    weights: list[Tensor] = []
    for run, values in ((op, given), (op.reference, exact)):
        extra: dict[str, Any] = {}
        if state is not None:
            s0 = embedded(state).to(next(iter(values.values())).dtype).requires_grad_()
            states.append(s0)
            extra["initial_state"] = s0
        if cu_seqlens is not None:
            extra["cu_seqlens"] = cu_seqlens
        o, final = run(**values, output_final_state=True, **extra)
        if not weights:
            weights = [
                torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
                for x in (o, final)
            ]
        parts = [(x.double() * w).sum() for x, w in zip((o, final), weights, strict=True)]
        total = parts[0] + parts[1] if loss == "both" else parts[1] if loss == "state" else parts[0]
        wanted = [*values.values(), *([states[-1]] if state is not None else [])]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        names = [f"d_{n}" for n in values] + (["d_initial_state"] if state is not None else [])
        found = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
        results.append({"o": o.detach(), "state": final.detach(), **found})
    got, want = results
    largest = max((float(w.norm()) for n, w in want.items() if n.startswith("d_")), default=0.0)
    return {
        n: relative(got[n], w, 1e-6 * largest if n.startswith("d_") else 0.0) if n in got else float(w.norm())
        for n, w in want.items()
    }


def case(
    name: str,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    gates: GateKind = "mild",
    *,
    chunk_size: int | None = 16,
    device: str = "cpu",
) -> tuple[CompiledOp, dict[str, Tensor], Tensor]:
    """An op of the triton backend, float32 tensors and an initial state."""
    op = ld.compile(TEXTS[name], backend="triton", chunk_size=chunk_size)
    tensors = draw(op.spec, B, T, H, K, V, dtype=torch.float32, gates=gates, seed=5, device=device)
    (state,) = draw_state(op.spec, B, H, K, V, dtype=torch.float32, device=device)
    return op, tensors, state


def assert_close(found: Mapping[str, float], limit: float = 5e-5) -> None:
    bad = {n: e for n, e in found.items() if not e < limit}
    assert not bad, f"relative errors above {limit}: {bad}"
