"""Coupled states as one recurrence: form (1), chunk plan, gradients and kernel plan against the step loop."""

from __future__ import annotations

import pytest
import stacked_recurrences
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stacked_recurrences import BY_HAND, random_stacks
from torch import Tensor

from linalg_dsl.algebra.expr import ONE, ZERO
from linalg_dsl.codegen.schedule.cut import cut
from linalg_dsl.codegen.schedule.describe import schedule_lines
from linalg_dsl.codegen.schedule.evaluate import run_kernels
from linalg_dsl.codegen.schedule.kernel_plan import BoundaryProducts
from linalg_dsl.codegen.schedule.lower import lower
from linalg_dsl.errors import DslError
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import GateKind, draw
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.canonical import canonicalise, classify
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.classes import find_form
from linalg_dsl.planner.evaluate import run_backward, run_plan
from linalg_dsl.planner.evaluate_form import run_states
from linalg_dsl.planner.form import Recurrence, Stack
from linalg_dsl.planner.prove import prove
from linalg_dsl.planner.split import split
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.planner.verdict import explain
from linalg_dsl.planner.verify import verify

B, H, K, V = 2, 2, 4, 3
LIMIT = 1e-10


def errors(
    spec: RecurrenceSpec, T: int, chunk: int, seed: int = 3, gates: GateKind = "mild"
) -> dict[str, float]:
    """Of every level: form (1) run token by token, the plans, the kernels; outputs, states and gradients."""
    tensors = draw(spec, B, T, H, K, V, dtype=torch.float64, seed=seed, gates=gates)
    generator = torch.Generator().manual_seed(seed)

    def like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64)

    turned = spec.states[0].dims == ("V", "K")
    shape = torch.empty(B, H, *((V, K) if turned else (K, V)))
    names = [s.name for s in spec.states]
    starts = {n: like(shape) for n in names}
    leaves = {n: x.clone().requires_grad_() for n, x in (tensors | starts).items()}
    o, finals = reference(
        spec,
        {n: leaves[n] for n in tensors},
        initial_state=[leaves[n] for n in names],
        output_final_state=True,
    )
    assert isinstance(finals, tuple)
    want = dict(zip(names, finals, strict=True))
    d_o, d_states = like(o), {n: like(x) for n, x in want.items()}
    grads = torch.autograd.grad(
        [o, *finals], list(leaves.values()), [d_o, *d_states.values()], allow_unused=True
    )

    def plan_axes(x: Tensor) -> Tensor:
        return x.mT if turned else x

    canonical = canonicalise(spec)
    forward = derive(canonical)
    reverse = backward(forward)
    verify(forward)
    verify(reverse)
    kernels = cut(lower(forward, reverse))
    first = {n: plan_axes(x) for n, x in starts.items()}
    d_last = {n: plan_axes(x) for n, x in d_states.items()}
    found: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}

    def add(level: str, name: str, got: Tensor, exact: Tensor) -> None:
        found[f"{level} {name}"], expected[f"{level} {name}"] = got, exact

    o_form, last = run_states(canonical, tensors, [starts[n] for n in names])
    add("form", "o", o_form, o)
    for n, x in zip(names, last, strict=True):
        add("form", n, x, want[n])
    o_plan, states = run_plan(forward, tensors, first, chunk)
    assert isinstance(states, dict)
    got = run_backward(reverse, forward, tensors, first, chunk, d_o, d_last)
    run = run_kernels(kernels, tensors, first, chunk, d_o, d_last)
    for level, out, ends, slopes in (
        ("plan", o_plan, states, got),
        ("kernels", run.output, run.final_states, run.gradients),
    ):
        add(level, "o", out, o)
        for n in names:
            add(level, n, ends[n], plan_axes(want[n]))
        for (n, leaf), grad in zip(leaves.items(), grads, strict=True):
            exact = torch.zeros_like(leaf) if grad is None else grad
            slope = slopes.get(n if n in tensors else f"initial_state {n}", torch.zeros(()))
            add(level, f"d {n}", slope.expand(plan_axes(exact).shape) if n in starts else slope, exact)
            if n in starts:
                expected[f"{level} d {n}"] = plan_axes(exact)
    return {
        n: float((x - expected[n]).detach().abs().max() / max(1.0, float(expected[n].detach().abs().max())))
        for n, x in found.items()
    }


def stack_of(spec: RecurrenceSpec) -> tuple[Recurrence, Stack]:
    rec = canonicalise(spec).recurrences[0]
    assert rec.stack is not None
    return rec, rec.stack


def catalogued(name: str) -> RecurrenceSpec:
    from linalg_dsl.language.parser import parse

    (stage,) = split(parse(catalogue_text(name))).stages
    return stage.spec


@pytest.mark.parametrize("name", BY_HAND)
def test_coupled_states_agree_with_the_step_loop_at_every_level(name: str) -> None:
    found = errors(BY_HAND[name], 11, 4)
    assert not {n: e for n, e in found.items() if not e < LIMIT}


@pytest.mark.parametrize("gates", ["strong", "resets", "zero"])
def test_gates_of_any_size(gates: GateKind) -> None:
    found = errors(BY_HAND["three"], 9, 4, gates=gates)
    assert not {n: e for n, e in found.items() if not e < LIMIT}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_stacks(), st.sampled_from([(7, 3), (4, 4), (5, 1)]), st.integers(0, 99))
def test_random_coupled_states_agree_with_the_step_loop(
    spec: RecurrenceSpec, sizes: tuple[int, int], seed: int
) -> None:
    found = errors(spec, *sizes, seed)
    assert not {n: e for n, e in found.items() if not e < LIMIT}, str(spec)


@pytest.mark.parametrize("name", ["momentum", "three", "signed", "common_channel"])
def test_chunk_form_and_gradients_are_proved(name: str) -> None:
    canonical = canonicalise(BY_HAND[name])
    forward = derive(canonical)
    assert prove(canonical, 2, 1, 1, forward, backward(forward)).holds


@pytest.mark.parametrize("name", ["mdn", "mdn_lagged", "titans_linear"])
def test_published_momentum_rules_are_stacked_with_one_write_and_one_erase(name: str) -> None:
    rec, stack = stack_of(catalogued(name))
    assert (rec.m, rec.r, len(stack.states)) == (1, 1, 2)
    assert classify(rec) == "stacked 2 x 2 + rank 1"
    assert not isinstance(find_form(catalogued(name), {}), StepForm)


def test_momentum_is_the_block_gate_of_the_derivation() -> None:
    _, stack = stack_of(catalogued("mdn"))
    assert stack.states == ("S", "M")
    assert show_expr(stack.coupling[0][1]) == "-beta_t exp(h_t)"
    assert [show_expr(x) for x in stack.spread[0]] == ["-beta_t", "1"]
    _, lagged = stack_of(catalogued("mdn_lagged"))
    assert show_expr(lagged.coupling[0][1]) == "-beta_t"
    assert lagged.spread == ((ZERO, ONE),)


def test_the_explanation_names_the_block_gate_and_its_decays() -> None:
    canonical = canonicalise(catalogued("mdn"))
    forward = derive(canonical)
    reverse = backward(forward)
    plan = cut(lower(forward, reverse))
    lines = schedule_lines(plan, B=8, T=2048, H=16, K=128, V=128)
    text = str(explain(canonical, forward, reverse, schedule=lines, proof=False))
    flat = " ".join(text.split())
    for part in (
        "mdn: stacked 2 x 2 + rank 1 → chunk kernels",
        "X_t = a_t X_{t-1} + c_t L_t (W_t + Σ_t U_t), U_t = B_tᵀ (e_t X_{t-1}), X = [S; M]",
        "a₁₂ = -beta_t exp(h_t) (what S takes up of M)",
        "c = [-beta_t, 1]",
        "S_C = Λ₁[C←0] ∘ S₀ + m_to_s M₀ + (k ∘ l_1_to_s)ᵀ Z",
        "Λ₂[t←s] = exp(h_{s+1} + … + h_t), the decay of one state",
        "no single state: S and M are coupled",
        "M and S go side by side from chunk to chunk",
        "forms the 3 boundary terms Σ_V S_0 ∘ dS_C of the gates' gradients exactly at every chunk",
    ):
        assert part in flat, part


def test_form_one_is_printed_state_by_state() -> None:
    lines = str(canonicalise(catalogued("mdn")).recurrences[0]).splitlines()
    assert lines[:3] == [
        "S_t = a_11 S_{t-1} + (-beta_t exp(h_t)) M_{t-1} + (-beta_t) L_1 Z_1",
        "M_t = a_22 M_{t-1} + L_1 Z_1",
        "  U_1 = B_1ᵀ (S_{t-1}),  Z = W_t + Σ_t U_t",
    ]


def test_an_erase_of_a_sum_of_states_is_one_erase() -> None:
    rec, stack = stack_of(BY_HAND["nesterov"])
    assert rec.r == 1
    assert dict(zip(stack.states, map(show_expr, stack.sources[0]), strict=True)) == {"S": "1", "M": "b_t"}


def test_states_stand_in_an_order_in_which_each_takes_up_later_ones_only() -> None:
    _, stack = stack_of(BY_HAND["three"])
    assert stack.states == ("C", "B", "A")
    assert all(x == ZERO for i, row in enumerate(stack.coupling) for x in row[: i + 1])


def test_every_boundary_product_is_formed_at_every_chunk() -> None:
    """n (n + 1) / 2 of them for n states that are all coupled."""
    spec = BY_HAND["three"]
    forward = derive(canonicalise(spec))
    plan = cut(lower(forward, backward(forward)))
    (boundary,) = {k.boundary for k in plan.backward if k.boundary}
    assert isinstance(boundary, BoundaryProducts)
    assert boundary.exact
    assert len(boundary.terms) == 6
    assert len(boundary.kept) == 3


REFUSED = {
    "circle": (
        "state A, B : [K, V]\nA_t = exp(g_t) A_{t-1} + b_t B_{t-1} + k_t v_tᵀ\n"
        "B_t = exp(h_t) B_{t-1} - b_t A_{t-1}\no_t = A_tᵀ q_t\n",
        "E954",
        "A_t takes b_t B_{t-1} and B_t takes -b_t A_{t-1}",
    ),
    "circle of three": (
        "state A, B, C : [K, V]\nA_t = exp(g_t) A_{t-1} + C_{t-1} + k_t v_tᵀ\n"
        "B_t = exp(h_t) B_{t-1} + A_{t-1}\nC_t = exp(h_t) C_{t-1} + B_{t-1}\no_t = A_tᵀ q_t\n",
        "E954",
        "gate each other in a circle",
    ),
    "different channels": (
        "state A, B : [K, V]\nA_t = exp(g_t) A_{t-1} + B_{t-1} + k_t v_tᵀ\n"
        "B_t = diag(exp(a_t)) B_{t-1} + k_t v_tᵀ\no_t = A_tᵀ q_t\n",
        "E951",
        "differ channel by channel",
    ),
    "shapes": (
        "state A : [K, V]\nstate n : [K]\nA_t = exp(g_t) A_{t-1} + n_{t-1} v_tᵀ\n"
        "n_t = exp(g_t) n_{t-1} + A_{t-1} v_t\no_t = A_tᵀ q_t\n",
        "E958",
        "the state n is [K]",
    ),
    "layouts": (
        "state A : [K, V]\nstate B : [V, K]\nA_t = exp(g_t) A_{t-1} + B_{t-1}ᵀ + k_t v_tᵀ\n"
        "B_t = exp(h_t) B_{t-1} + v_t (A_{t-1} v_t)ᵀ\no_t = A_tᵀ q_t\n",
        "E958",
        "have different shapes",
    ),
    "five": (
        "state A, B, C, D, E : [K, V]\nA_t = exp(g_t) A_{t-1} + k_t v_tᵀ\n"
        + "".join(f"{x}_t = exp(g_t) {x}_{{t-1}} + {y}_t\n" for x, y in ("BA", "CB", "DC", "ED"))
        + "o_t = E_tᵀ q_t\n",
        "E958",
        "5 coupled states; a chunk form has at most 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_stacked_form_runs_token_by_token_with_the_true_reason(name: str) -> None:
    body, code, reason = REFUSED[name]
    spec = stacked_recurrences.of("refused", body)
    with pytest.raises(DslError) as caught:
        canonicalise(spec)
    assert code in {m.code for m in caught.value.mistakes}
    form = find_form(spec, {})
    assert isinstance(form, StepForm)
    assert any(reason in r for r in form.reasons), form.reasons
