"""Cases and comparisons for generated kernels: every output and gradient against the float64 step loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from catalogue_sets import IN_DEPTH
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.evaluate_form import run_form

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
_SIDES = {
    "gated_oja": """
input q, k : [K]
input v : [V] unit
input g : log gate [V]
input beta : scalar in (0, 2)
S_t = S_{t-1} diag(exp(g_t)) (I - beta_t v_t v_tᵀ) + beta_t k_t v_tᵀ
""",
    "scalar_gated_oja": """
input q, k : [K]
input v : [V] unit
input g : log gate
input beta : scalar in (0, 2)
S_t = exp(g_t) S_{t-1} (I - beta_t v_t v_tᵀ) + beta_t k_t v_tᵀ
""",
    "value_gate": """
input q, k : [K]
input v : [V]
input g : log gate [V]
S_t = S_{t-1} diag(exp(g_t)) + k_t v_tᵀ
""",
    "separable_gate": """
input q, k : [K]
input v : [V]
input a : log gate [K]
input b : log gate [V]
S_t = diag(exp(a_t)) S_{t-1} diag(exp(b_t)) + k_t v_tᵀ
""",
    "separable_delta": """
input q : [K]
input k : [K] unit
input v : [V]
input a : log gate [K]
input b : log gate [V]
input beta : scalar in (0, 2)
S_t = (I - beta_t k_t k_tᵀ) diag(exp(a_t)) S_{t-1} diag(exp(b_t)) + beta_t k_t v_tᵀ
""",
    "low_rank_alone": """
input q, k, p : [K]
input e : [K] unit
input v : [V]
S_t = 0.5 e_t (p_tᵀ S_{t-1}) + k_t v_tᵀ
""",
    "signed_gates": """
input q : [K]
input k : [K] unit
input v : [V]
input f : gate [K] in (-1, 1)
input beta : scalar in (0, 2)
S_t = (I - beta_t k_t k_tᵀ) diag(f_t) S_{t-1} + k_t v_tᵀ
""",
}
SIDES = {name: f"recurrence {name}{text}o_t = S_tᵀ q_t\n" for name, text in _SIDES.items()}
"""One recurrence of each class beside those that erase and decay keys."""
TEXTS = {n: catalogue_text(n) for n in IN_DEPTH}
TEXTS |= {"gated_rank_two": RANK_TWO, "two_writes": MANY_ROWS}


def carried(text: str) -> str:
    """A module whose boundary terms are carried, as in calls whose states would fill a GiB."""
    kept = "keep_every_state(self.chunks, self.heads, self.key, self.value)"
    changed = text.replace(kept, "False")
    assert changed != text
    return changed


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
    extra = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    given = {n: embedded(t).requires_grad_() for n, t in tensors.items()}
    s0 = None if state is None else embedded(state).requires_grad_()
    got = results(partial(op, output_final_state=True, **extra), given, s0, loss)
    want = results(partial(op.reference, output_final_state=True, **extra), *doubled(tensors, state), loss)
    return distances(got, want)


def short_operand_errors(
    op: CompiledOp, tensors: Mapping[str, Tensor], state: Tensor, dtype: torch.dtype
) -> dict[str, float]:
    """The same of a float64 step loop whose products have their operands rounded to ``dtype``."""
    canonical = canonicalise(op.spec)

    def loop(initial_state: Tensor, **values: Tensor) -> tuple[Tensor, Tensor]:
        return run_form(canonical, values, initial_state, operand=lambda x: x.to(dtype).to(x.dtype))

    values, s0 = doubled(tensors, state)
    want = results(partial(op.reference, output_final_state=True), values, s0, "both")
    return distances(results(loop, values, s0, "both"), want)


def doubled(tensors: Mapping[str, Tensor], state: Tensor | None) -> tuple[dict[str, Tensor], Tensor | None]:
    exact = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    return exact, None if state is None else state.detach().double().requires_grad_()


def results(
    run: Callable[..., Any], values: Mapping[str, Tensor], state: Tensor | None, loss: str
) -> dict[str, Tensor]:
    """Output, final state and all gradients of a fixed random loss of both, or of one of them."""
    o, final = run(**values, **({} if state is None else {"initial_state": state}))
    generator = torch.Generator().manual_seed(3)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in (o, final)
    ]
    parts = [(x.double() * w).sum() for x, w in zip((o, final), weights, strict=True)]
    total = parts[0] + parts[1] if loss == "both" else parts[1] if loss == "state" else parts[0]
    leaves = {f"d_{n}": t for n, t in values.items()} | ({} if state is None else {"d_initial_state": state})
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    found = {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}
    return {"o": o.detach(), "state": final.detach(), **found}


def distances(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """A gradient below 1e-6 of the largest counts absolutely; a missing one by all of its size."""
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
