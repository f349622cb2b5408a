"""The whole planner, line to gradients, against autograd through the step loop of the spec."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from catalogue_sets import IN_DEPTH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recurrences import WIDER
from torch import Tensor

from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.draw import GateKind, draw
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.evaluate import run_backward, run_plan
from linalg_dsl.planner.verify import verify
from linalg_dsl.testing.strategies_lines import ACROSS, DECLARATIONS, READS, updates, wider_updates

CATALOGUE = Path(__file__).parents[2] / "ops" / "catalogue"
B, H, K, V = 2, 2, 4, 3


def check(spec: RecurrenceSpec, gates: GateKind, T: int, chunk: int, seed: int) -> None:
    """Outputs, final state and every gradient agree to rounding."""
    tensors = draw(spec, B, T, H, K, V, dtype=torch.float64, seed=seed, gates=gates)
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    dims = spec.states[0].dims
    start = randn(B, H, *({"K": K, "V": V}[str(d)] for d in dims))
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    first = start.clone().requires_grad_()
    o, final = reference(spec, leaves, initial_state=first, output_final_state=True)
    assert isinstance(final, Tensor)
    d_o, d_state = randn(*o.shape), randn(*final.shape)
    wanted = [*leaves.values(), first]
    grads = torch.autograd.grad([o, final], wanted, [d_o, d_state], allow_unused=True)
    expected = dict(zip([*leaves, "initial_state"], grads, strict=True))

    def turned(x: Tensor) -> Tensor:
        """Between the state as it is declared and as plans have it."""
        return x.mT if dims == ("V", "K") else x

    canonical = canonicalise(spec)
    forward = derive(canonical)
    reverse = backward(forward)
    verify(forward)
    verify(reverse)
    given_: dict[str, Tensor | float] = {**tensors, "scale": K**-0.5}
    got_o, got_final = run_plan(forward, given_, turned(start), chunk)
    got = run_backward(reverse, forward, given_, turned(start), chunk, d_o, turned(d_state))
    got["initial_state"] = turned(got["initial_state"])
    results = {"o": (got_o, o), "final state": (turned(got_final), final)}
    for name, gradient in expected.items():
        if gradient is None:
            assert name not in got or not got[name].any(), name
            continue
        results[f"d_{name}"] = (got.get(name, torch.zeros_like(gradient)), gradient)
    scale = max(float(x.detach().abs().max()) for _, x in results.values())
    for name, (found, want) in results.items():
        want = want.detach()
        error = float((found - want).abs().max())
        assert error <= 1e-10 * max(float(want.abs().max()), 1e-6 * scale), f"{name}: {error:.1e}"


@pytest.mark.parametrize("gates", ["mild", "strong", "resets"])
@pytest.mark.parametrize("name", IN_DEPTH)
def test_catalogue(name: str, gates: GateKind) -> None:
    spec = parse((CATALOGUE / f"{name}.rec").read_text(encoding="utf-8"))
    check(spec, gates, T=13, chunk=5, seed=1)


@pytest.mark.parametrize("gates", ["mild", "resets"])
@pytest.mark.parametrize("name", WIDER)
def test_either_side_of_the_state(name: str, gates: GateKind) -> None:
    check(parse(WIDER[name].text(name)), gates, T=13, chunk=5, seed=1)


@given(wider_updates(), ACROSS, st.sampled_from(["mild", "resets"]), st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_lines_with_gates_and_erases_on_either_side(
    update: str, read: str, gates: GateKind, T: int, chunk: int
) -> None:
    check(parse(f"recurrence drawn\n{DECLARATIONS}\nS_t = {update}\no_t = {read}\n"), gates, T, chunk, seed=T)


@pytest.mark.parametrize(
    "gate",
    [
        "exp(beta_t g_t)",
        "diag(exp((1 - beta_t) (a_t + g_t)))",
        "diag(exp(a_t / (1 + y_t^2)))",
        "exp(g_t - g_t^2)",
    ],
)
def test_resets_of_gates_with_a_factor(gate: str) -> None:
    """The derivative by the factor is 0 times -inf on paper: it is 0, not NaN."""
    spec = parse(f"recurrence drawn\n{DECLARATIONS}\nS_t = {gate} S_{{t-1}} + k_t v_tᵀ\no_t = S_tᵀ q_t\n")
    check(spec, "resets", T=23, chunk=5, seed=1)


@given(updates(), READS, st.sampled_from(["mild", "strong", "resets"]), st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_lines_of_every_chunk_class(update: str, read: str, gates: GateKind, T: int, chunk: int) -> None:
    spec = parse(f"recurrence drawn\n{DECLARATIONS}\nS_t = {update}\no_t = {read}\n")
    check(spec, gates, T, chunk, seed=T)
