"""The stages of a recurrence, run one after the other, are the recurrence; each is one of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stage_runner import run_stages
from state_recurrences import TEXTS, text

from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.split import split
from linalg_dsl.planner.stages import PerToken, Shift, Stage, Stages, TokenStep

MORE = {
    "trapezoid": """
input q, k : [K]
input v : [V]
input g : log gate
input lam : scalar in (0, 1)
S_t = exp(g_t) S_{t-1} + lam_t k_t v_tᵀ + (1 - lam_t) exp(g_t) k_{t-1} v_{t-1}ᵀ
o_t = S_tᵀ q_t
""",
    "shifted_binding": """
input q, k : [K]
input v : [V]
input a : gate
khat_t = l2norm(k_t) a_t
S_t = a_{t-1} S_{t-1} + khat_{t-1} v_tᵀ
o_t = S_tᵀ (q_t + khat_{t-1}) + v_{t-1}
""",
    "shifted_rows": """
const n = 2
input q : [K]
input k : [n, K]
input v : [n, V]
S_t = 0.9 S_{t-1} + k_{t,1} v_{t-1,2}ᵀ + k_{t-1,2} v_{t,1}ᵀ
o_t = S_tᵀ q_t
""",
    "other_axes": """
const n = 3
const scale = 1 / sqrt(K)
input q, k : [K]
input v : [V]
input g : log gate [n]
param w : [K]
state A : [K, n]
state B : [n, V]
A_t = A_{t-1} diag(exp(g_t)) + k_t (1 - exp(g_t))ᵀ
B_t = diag(exp(g_t)) B_{t-1} + (q_tᵀ (w ⊙ k_t)) (1 - exp(g_t)) v_tᵀ
o_t = scale (wᵀ w) B_tᵀ softmax(A_tᵀ q_t)
""",
    "function_of_two_reads": """
input q, k, p : [K]
input v : [V]
input g : log gate
A_t = exp(g_t) A_{t-1} + k_t v_tᵀ
B_t = B_{t-1} + p_t v_tᵀ
o_t = tanh(A_tᵀ q_t + B_{t-1}ᵀ k_t) ⊙ v_t
""",
    "read_twice": """
input q, k, p : [K]
input v : [V]
A_t = 0.9 A_{t-1} + k_t v_tᵀ
B_t = 0.8 B_{t-1} + p_t (A_tᵀ k_t)ᵀ
o_t = B_tᵀ q_t + A_{t-1}ᵀ (q_t + p_t)
""",
    "each_in_the_query_of_the_other": """
input q, k : [K]
input v : [K]
input w : [V]
state A : [K, V]
state B : [K, V]
A_t = A_{t-1} + k_t w_tᵀ
B_t = B_{t-1} + v_t w_tᵀ
o_t = A_tᵀ tanh(B_t tanh(A_tᵀ q_t))
""",
    "state_V_K_feeds": """
input q, k : [K]
input v : [V]
input b : scalar in (0, 1)
state A : [V, K]
state B : [V, K]
A_t = A_{t-1} (I - b_t k_t k_tᵀ) + b_t v_t k_tᵀ
B_t = B_{t-1} + (A_t q_t) k_tᵀ
o_t = B_t q_t
""",
    "sum_of_states_is_read": """
input q, k, p : [K]
input v : [V]
A_t = 0.9 A_{t-1} + k_t v_tᵀ
B_t = 0.8 B_{t-1} + p_t v_tᵀ
o_t = (A_t + B_{t-1})ᵀ q_t
""",
    "never_read": """
input q, k : [K]
input v : [V]
A_t = 0.9 A_{t-1} + k_t v_tᵀ
B_t = 0.8 B_{t-1} + q_t v_tᵀ
c_t = 0.5 c_{t-1} + v_t
o_t = B_tᵀ q_t
""",
    "vector_states": """
input x, y : [V]
input g : log gate [V]
state h, c : [V]
h_t = exp(g_t) ⊙ h_{t-1} + x_t
c_t = exp(g_t) ⊙ c_{t-1} + h_{t-1} ⊙ y_t + h_t
o_t = c_{t-1} + h_t
""",
    "shift_in_a_loop": """
const n = 2
input q : [K]
input k : [n, K] unit
input v : [n, V]
input beta : [n] in (0, 1)
input g : log gate
S_t = exp(g_{t-1}) S_{t-1}
for j in 1..n:
    S_t = S_t - beta_{t,j} k_{t,j} (k_{t,j}ᵀ S_t - v_{t-1,j}ᵀ)
o_t = S_tᵀ q_t
""",
    "gate_of_a_loop": """
const n = 2
input q : [K]
input k : [n, K] unit
input v : [n, V]
input beta : [n] in (0, 1)
input g : log gate
state m = -inf
m_t = max(g_t + m_{t-1}, beta_{t,1} + beta_{t,2})
S_t = exp(g_t + m_{t-1} - m_t) S_{t-1}
for j in 1..n:
    S_t = S_t - beta_{t,j} k_{t,j} (k_{t,j}ᵀ S_t - v_{t,j}ᵀ)
z_t = exp(g_t) z_{t-1} + k_{t,2}
o_t = S_tᵀ q_t / max(abs(z_tᵀ q_t), exp(-m_t))
""",
    "read_in_a_loop": """
const n = 2
input q : [K]
input k : [n, K] unit
input v : [n, V]
input beta : [n] in (0, 1)
input g : log gate
A_t = exp(g_t) A_{t-1} + k_{t,1} v_{t,1}ᵀ
S_t = exp(g_t) S_{t-1}
for j in 1..n:
    S_t = S_t + beta_{t,j} k_{t,j} (v_{t,j} - A_tᵀ k_{t,j})ᵀ
o_t = S_tᵀ q_t
""",
    "across": """
const n = 3
input q, k : [K]
input v : [V]
input g : log gate [n]
input r : [n, K]
state A : [K, n]
state B : [n, V]
A_t = A_{t-1} diag(exp(g_t)) + k_t (r_t q_t)ᵀ
B_t = 0.1 r_t r_tᵀ B_{t-1} + softmax(A_tᵀ q_t) v_tᵀ
o_t = B_tᵀ (r_t k_t)
""",
    "matrix_of_past": """
input q, k : [K]
input v : [V]
input mu : scalar in (0, 1)
M_t = mu_t M_{t-1} + k_t v_tᵀ
S_t = 0.9 S_{t-1} + M_t
o_t = S_tᵀ q_t
""",
}
ALL = {**{n: text(n) for n in TEXTS}, **{n: f"recurrence {n}{t}" for n, t in MORE.items()}}
WHOLE = {
    "gated_oja", "state_V_K", "mamba1", "elementwise_gate", "longhorn", "hgrn", "rg_lru", "momentum_delta",
    "dense", "signed_gates", "reads_on_the_key_side", "read_of_the_last_token", "matrix_of_past",
    "gated_delta_product",
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_what_is_one_component_without_shifts_is_its_own_stage(name: str) -> None:
    spec = parse(ALL[name])
    assert split(spec).is_whole == (name in WHOLE)


@pytest.mark.parametrize("name", sorted(set(ALL) - WHOLE))
def test_every_stage_is_a_recurrence_of_its_own(name: str) -> None:
    for stage in split(parse(ALL[name])).stages:
        for output in stage.spec.outputs:  # a text has one
            own = replace(stage.spec, outputs=(output,))
            assert parse(str(own)) == own
        assert len({s.dims for s in stage.spec.states if len(s.dims) == 2} | {("K", "V")}) == 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", sorted(set(ALL) - WHOLE))
def test_the_stages_one_after_the_other_are_the_recurrence(name: str, packed: bool) -> None:
    """Outputs, all that is carried on, and all gradients, with and without what is handed in."""
    spec = parse(ALL[name])
    stages = split(spec)
    offsets = torch.tensor([0, 0, 1, 6, 6, 9]) if packed else None
    count = 5 if packed else 2
    fewer = {spec.inputs[0].name: 1}
    tensors = draw(spec, 1 if packed else 2, 9, 2, 4, 3, gates="mild", heads=fewer)
    for handed in (False, True):
        leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        drawn = draw_state(spec, count, 2, 4, 3, seed=1)
        initial = [x.requires_grad_() for x in drawn] if handed else None
        o, last = run_stages(stages, leaves, initial, offsets)
        want_o, want = reference(
            spec, leaves, initial_state=initial, output_final_state=True, cu_seqlens=offsets
        )
        want = [want] if isinstance(want, torch.Tensor) else list(want)
        wanted = [*leaves.values(), *(initial or ())]
        grads = [_gradients(x, wanted) for x in ([o, *last], [want_o, *want])]
        for got, expect in zip((o, *last, *grads[0]), (want_o, *want, *grads[1]), strict=True):
            torch.testing.assert_close(got, expect, rtol=1e-9, atol=1e-9)


def _gradients(results: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    # what never held anything (a start of -inf) has no weight
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in results]
    loss = sum((torch.where(x.isfinite(), x, 0 * w) * w).sum() for x, w in zip(results, weights, strict=True))
    assert isinstance(loss, torch.Tensor)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]


def _split(name: str) -> Stages:
    return split(parse(ALL[name]))


def test_slots_take_the_place_of_a_big_axis() -> None:
    first, second = _split("gsa").stages
    assert (first.axes, second.axes) == ((("K", "K"), ("V", "n")), (("K", "n"), ("V", "V")))
    assert [i.dims for i in second.spec.inputs] == [("V",), ("K",), ("K",)]
    assert second.spec.consts == ()


def test_the_past_of_a_state_is_its_shifted_value_where_both_are_read() -> None:
    steps = _split("lightnet").steps
    assert [type(s) for s in steps] == [Stage, Shift, Stage]
    assert steps[1] == Shift("z_prev", "z", "z", -float("inf"))
    # read at the token before only: the stage's output is the past itself
    assert not any(isinstance(s, Shift) and s.of == "d" for s in _split("rwkv4").steps)


def test_a_param_that_a_running_maximum_shares_is_laid_out_over_tokens_once() -> None:
    stages = _split("rwkv4")
    assert [s for s in stages.steps if isinstance(s, PerToken)] == [PerToken("w_each", "w")]
    timed = {a: d.timed for s in stages.stages for d, a in zip(s.spec.inputs, s.arguments, strict=True)}
    assert timed["w_each"]
    assert not timed["u"]
    assert "w" not in timed
    # two stages share a param, and neither keeps a maximum
    assert not any(isinstance(s, PerToken) for s in _split("other_axes").steps)


def test_shifted_inputs_are_carried_and_keep_their_promises() -> None:
    stages = _split("shifted_binding")
    shifts = [s for s in stages.steps if isinstance(s, Shift)]
    assert {(s.name, s.of, s.first, s.carries) for s in shifts} == {
        (f"{n}_prev", n, f"{n}_prev", True) for n in ("k", "a", "v")
    }
    (stage,) = stages.stages
    gate = stage.spec.input("a_prev")
    assert gate.kind == "gate"
    assert (gate.range.low, gate.range.low_open, gate.range.high) == (0.0, False, 1.0)
    assert stage.spec.name == "shifted_binding_S"


def test_what_has_other_axes_is_a_step_on_tokens() -> None:
    steps = [s for s in _split("other_axes").steps if isinstance(s, TokenStep)]
    assert {str(s) for s in steps} == {"x_t = q_tᵀ (w ⊙ k_t)", "x_2 = scale", "x_3 = wᵀ w"}
    assert [s.timed for s in steps] == [True, False, False]


def test_an_output_that_is_not_linear_in_a_state_is_a_step_on_tokens() -> None:
    stages = _split("function_of_two_reads")
    last = stages.steps[-1]
    assert isinstance(last, TokenStep)
    assert last.name == stages.output == "o"
    assert str(last) == "o_t = tanh(A_read_t + B_read_t) ⊙ v_t"


def test_a_state_read_in_two_ways_runs_once() -> None:
    (run,) = (s for s in _split("read_twice").stages if s.states == ("A",))
    assert (run.spec.name, len(run.results), run.keeps) == ("read_twice_A", 2, True)


def test_reads_that_wait_for_each_other_are_runs_of_which_one_hands_the_state_on() -> None:
    text = ALL["two_layers"].split("B_t =")[0] + "o_t = A_tᵀ k_t\n"
    runs = split(parse(text.replace("A_tᵀ k_t", "A_tᵀ softmax(A_t tanh(A_tᵀ k_t))"))).stages
    assert [r.keeps for r in runs] == [True, *[False] * (len(runs) - 1)]
    assert len(runs) > 1


def test_the_users_name_of_a_read_is_kept() -> None:
    named = ALL["gsa"].replace(
        "o_t = B_tᵀ softmax(A_tᵀ q_t)", "slots_t = A_tᵀ q_t\no_t = B_tᵀ softmax(slots_t)"
    )
    assert split(parse(named)).stages[0].results == ("slots",)


def test_a_whole_matrix_in_the_output_is_a_mistake_under_a_caret() -> None:
    spec = parse(ALL["two_layers"].replace("o_t = B_{t-1}ᵀ q_t + u_t", "o_t = tanh(B_{t-1} + A_t)ᵀ q_t"))
    with pytest.raises(DslError) as caught:
        split(spec)
    assert (
        str(caught.value)
        == """\
<text>:7:7: E970: the output uses the matrix state B as a whole; only vectors read from it can be handed on
   7 | o_t = tanh(B_{t-1} + A_t)ᵀ q_t
             ^^^^^^^^^^^^^^^^^^^^^^^^
     help: read it with a query, as in B_tᵀ q_t"""
    )


def test_products_over_an_axis_that_a_stage_lacks_are_made_before() -> None:
    spec = parse(ALL["across"])
    assert [str(s) for s in split(spec).steps if isinstance(s, TokenStep)] == [
        "x_t = r_tᵀ", "x_2_t = r_t r_tᵀ", "x_3_t = r_t k_t",
    ]  # fmt: skip
