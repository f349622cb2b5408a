"""Gates declared in linear space: signs, exact zeros and growth, against autograd through the step loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.reference import reference

B, H, K, V = 2, 2, 4, 3
HEAD = """
recurrence drawn
input q, k : [K] unit
input v : [V]
input beta : scalar in (0, 2)
"""
LINES = {
    "scalar": "input f : gate in [0, 1]\nS_t = f_t S_{t-1} + k_t v_tᵀ",
    "scalar_signed": "input f : gate in (-1, 1)\nS_t = (f_t I - beta_t k_t k_tᵀ) S_{t-1} + k_t v_tᵀ",
    "tied_key": "input f : gate [K] in [0, 1]\nS_t = diag(f_t) S_{t-1} + (1 - f_t) v_tᵀ",
    "channel": "input f : gate [K] in (-1, 1)\n"
    "S_t = (I - beta_t k_t k_tᵀ) diag(f_t) S_{t-1} + beta_t k_t v_tᵀ",
    "undecayed_erase": "input f : gate [K] in (-1, 1)\nS_t = (diag(f_t) - k_t k_tᵀ) S_{t-1} + k_t v_tᵀ",
    "value_side": "input f : gate [V] in [-1, 1]\nS_t = S_{t-1} diag(f_t) + k_t v_tᵀ",
    "separable": "input f : gate [V] in [-1, 1]\ninput e : gate [K] in [-1, 1]\n"
    "S_t = (I - beta_t k_t k_tᵀ) diag(e_t) S_{t-1} diag(f_t) + k_t v_tᵀ",
    "product": "input f : gate [K] in (-1, 1)\ninput g : log gate\n"
    "S_t = exp(g_t) (1 - beta_t) diag(f_t) S_{t-1} + k_t v_tᵀ",
}
READS = {"after": "S_tᵀ q_t", "before": "S_{t-1}ᵀ q_t"}


def spec_of(line: str, read: str = "S_tᵀ q_t") -> RecurrenceSpec:
    return parse(f"{HEAD}{line}\no_t = {read}\n")


def with_zeros(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A fifth of all gates exactly 0, either sign of it; every third beta 1."""
    made = {n: x.clone() for n, x in tensors.items()}
    for seed, name in enumerate(n for n in ("f", "e") if n in made):
        drawn = torch.rand(made[name].shape, generator=torch.Generator().manual_seed(seed))
        made[name][drawn < 0.2] = 0.0
        made[name][drawn < 0.1] = -0.0
    made["beta"][:, ::3] = 1.0
    return made


def compare(spec: RecurrenceSpec, tensors: dict[str, Tensor], T: int, dtype: torch.dtype) -> float:
    """The worst relative error of the emitted torch module, gradients of everything included."""
    (start,) = draw_state(spec, B, H, K, V, dtype=dtype)
    op = ld.compile(spec, backend="torch", chunk_size=16)

    def results(run: object, kind: torch.dtype) -> dict[str, Tensor]:
        leaves = {n: x.detach().to(kind).requires_grad_() for n, x in tensors.items()}
        first = start.detach().to(kind).requires_grad_()
        o, final = run(leaves, first)  # type: ignore[operator]
        loss = (o * o.detach().cos()).sum() + (final * final.detach().sin()).sum()
        grads = torch.autograd.grad(loss, [*leaves.values(), first], allow_unused=True)
        named = dict(zip([*leaves, "initial"], grads, strict=True))
        return {"o": o, "final": final, **{n: g for n, g in named.items() if g is not None}}

    want = results(lambda x, s: reference(spec, x, initial_state=s, output_final_state=True), torch.float64)
    got = results(lambda x, s: op(**x, initial_state=s, output_final_state=True), dtype)
    assert got.keys() >= want.keys()
    want = {n: x.detach() for n, x in want.items()}
    largest = max(float(x.abs().max()) for x in want.values())
    worst = 0.0
    for name, x in want.items():
        assert got[name].isfinite().all(), name
        error = float((got[name].detach().double() - x).abs().max())
        worst = max(worst, error / max(float(x.abs().max()), 1e-3 * largest))
    return worst


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", LINES)
def test_gradients_are_right_at_exact_zeros_and_across_signs(name: str, read: str) -> None:
    spec = spec_of(LINES[name], READS[read])
    for T in (1, 13, 40):
        tensors = with_zeros(draw(spec, B, T, H, K, V, dtype=torch.float64, seed=T))
        assert compare(spec, tensors, T, torch.float64) < 1e-10
    single = {n: x.float() for n, x in tensors.items()}
    assert compare(spec, single, T, torch.float32) < 2e-5


@pytest.mark.parametrize("name", ["channel", "separable", "product"])
def test_gates_that_are_all_zero(name: str) -> None:
    spec = spec_of(LINES[name])
    tensors = draw(spec, B, 20, H, K, V, dtype=torch.float64, seed=1)
    for gate in {"f", "e"} & tensors.keys():
        tensors[gate] = torch.zeros_like(tensors[gate])
    assert compare(spec, tensors, 20, torch.float64) < 1e-10


@pytest.mark.parametrize(("gate", "factor"), [(2.0, "I"), (0.5, "(I - beta_t k_t k_tᵀ)")])
def test_growth_within_a_chunk(gate: float, factor: str) -> None:
    """Log gates above 0, as far as the recurrence stays finite."""
    line = f"input g : log gate [K] in (-inf, 2]\nS_t = {factor} diag(exp(g_t)) S_{{t-1}} + beta_t k_t v_tᵀ"
    spec = spec_of(line)
    tensors = draw(spec, B, 24, H, K, V, dtype=torch.float64, seed=1)
    tensors["beta"] = 0.5 * tensors["beta"]
    tensors["g"] = torch.full_like(tensors["g"], gate)
    tensors["g"][:, ::4] = -6.0
    assert compare(spec, tensors, 24, torch.float64) < 1e-10
    single = {n: x.float() for n, x in tensors.items()}
    assert compare(spec, single, 24, torch.float32) < 1e-4
