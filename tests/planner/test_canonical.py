from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from recurrences import ALL, Case

from linalg_dsl.algebra.expr import SCALAR, ZERO, Symbol, transpose
from linalg_dsl.errors import ArgumentError, DslError, InternalError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.printer import show_expr
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.canonical import canonicalise, classify, verify_canonical
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.evaluate_form import run_form
from linalg_dsl.planner.form import CanonicalRecurrence, Decay
from linalg_dsl.planner.prove import prove

HEADER = "input q, k : [K]\ninput v : [V]\ninput g : log gate\ninput h : log gate [K]\n"


def canonical(lines: str, **consts: float) -> CanonicalRecurrence:
    return canonicalise(parse(f"recurrence test\n{HEADER}{lines}\n"), consts)


@pytest.mark.parametrize("name", ALL)
def test_comes_to_the_expected_form(name: str) -> None:
    case: Case = ALL[name]
    rec = canonicalise(parse(case.text(name))).recurrences[0]
    show = [show_expr(x) for x in rec.left], [show_expr(x) for x in rec.written]
    assert show == (case.left, case.written)
    assert rec.decay.show_log() == case.log
    assert rec.axis == case.axis
    assert show_expr(rec.value_decay.log) == case.value_log
    assert [show_expr(x) for x in (*rec.decay.signed, *rec.value_decay.signed)] == case.signed
    assert [show_expr(x) for x in rec.erase] == case.erase
    if case.erase:
        assert [[show_expr(x) for x in row] for row in rec.sigma] == case.sigma
        assert rec.erase_read == case.erase_read
    assert [(r.kind, show_expr(r.query), show_expr(r.scale)) for r in rec.reads] == case.reads
    assert [show_expr(x) for x in rec.token_terms] == case.token_terms
    assert classify(rec) == case.kind


@pytest.mark.parametrize("gates", ["mild", "strong"])
@pytest.mark.parametrize("name", ALL)
def test_form_equals_the_step_loop(name: str, gates: GateKind) -> None:
    spec = parse(ALL[name].text(name))
    tensors = draw(spec, B=2, T=9, H=2, K=4, V=3, dtype=torch.float64, seed=1, gates=gates)
    (start,) = draw_state(spec, 2, 2, 4, 3, dtype=torch.float64)
    o, last = run_form(canonicalise(spec), tensors, start)
    expected, end = reference(spec, tensors, initial_state=start, output_final_state=True)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(last, end, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_chunk_form_and_gradients_of_the_form_are_exact(name: str) -> None:
    canonical = canonicalise(parse(ALL[name].text(name)))
    forward = derive(canonical)
    assert prove(canonical, 2, 1, 1, forward, backward(forward)).holds


def test_three_orders_of_decay_and_erase_are_three_recurrences() -> None:
    tails = ("kda", "undecayed_erase", "decay_after_erase")
    specs = [parse(ALL[n].text("same")) for n in tails]
    tensors = draw(specs[0], B=1, T=8, H=1, K=4, V=3, dtype=torch.float64, seed=3)
    outputs = [run_form(canonicalise(s), tensors)[0] for s in specs]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (outputs[i] - outputs[j]).abs().max() > 1e-3


def test_the_same_map_written_differently_has_the_same_form() -> None:
    for group in (
        ("delta_rule", "delta_rule_residual", "delta_rule_inner"),
        ("kda", "kda_spread"),
        ("gated_delta_rule", "scalar_decay_after_erase_is_before"),
    ):
        forms = [canonicalise(parse(ALL[n].text("same"))).recurrences[0] for n in group]
        for form in forms[1:]:
            assert dataclasses.replace(form, span=None) == dataclasses.replace(forms[0], span=None)


# -- consts -----------------------------------------------------------------------------------------
def test_a_const_of_the_read_stays_a_run_time_number_and_others_become_numbers() -> None:
    lines = "const c = 3\nconst d = 0.25\nS_t = exp(g_t / d) S_{t-1} + k_t v_tᵀ\no_t = c S_tᵀ q_t"
    found = canonical(lines)
    assert found.consts == (("d", 0.25),)
    rec = found.recurrences[0]
    assert show_expr(rec.decay.log) == "4 g_t"
    assert rec.reads[0].scale == Symbol("c", SCALAR, None)


def test_a_given_value_replaces_the_declared_one() -> None:
    lines = "const d = 0.25\nS_t = exp(d g_t) S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t"
    found = canonical(lines, d=0.5)
    assert found.consts == (("d", 0.5),)
    assert show_expr(found.recurrences[0].decay.log) == "0.5 g_t"


def test_a_const_inside_a_query_becomes_a_number() -> None:
    lines = "const c = 3\nS_t = S_{t-1} + k_t v_tᵀ\no_t = c S_tᵀ (q_t - c k_t)"
    found = canonical(lines)
    assert found.consts == (("c", 3.0),)
    assert show_expr(found.recurrences[0].reads[0].query) == "q_t - 3 k_t"
    assert show_expr(found.recurrences[0].reads[0].scale) == "3"


def test_a_const_that_depends_on_the_size_stays_in_the_gate() -> None:
    lines = "const c = 1 / K\nS_t = exp(c g_t) S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t"
    found = canonical(lines)
    assert found.consts == ()
    assert show_expr(found.recurrences[0].decay.log) == "c g_t"


def test_an_unknown_const_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no const 'tau'"):
        canonical("S_t = S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t", tau=2.0)


# -- what is refused ----------------------------------------------------------------------------------
READ = "\no_t = S_tᵀ q_t"


@pytest.mark.parametrize(
    ("lines", "code", "part"),
    [
        ("S_t = diag(k_t) S_{t-1} + S_{t-1} diag(v_t) + k_t v_tᵀ" + READ, "E951", "a gate of its own"),
        ("S_t = S_{t-1} + k_t (v_t ⊙ (v_t - S_{t-1}ᵀ k_t))ᵀ" + READ, "E951", "scaled by v_t"),
        ("S_t = S_{t-1} diag(v_t) - k_t k_tᵀ S_{t-1} + k_t v_tᵀ" + READ, "E951", "before its gate v_t"),
        ("S_t = (I - k_t k_tᵀ) S_{t-1} (I - v_t v_tᵀ) + k_t v_tᵀ" + READ, "E952", "along both axes"),
        ("S_t = k_t k_tᵀ S_{t-1} + S_{t-1} (I - v_t v_tᵀ) + k_t v_tᵀ" + READ, "E952", "along the other"),
        ("S_t = S_{t-1} + (k_tᵀ S_{t-1} v_t) k_t v_tᵀ" + READ, "E952", "low rank on both"),
        ("S_t = exp(g_t) S_{t-1}" + READ, "E955", "nothing is ever written"),
        ("S_t = S_{t-1} + k_t v_tᵀ\no_t = (q_tᵀ S_t v_t) v_t", "E952", "low rank on both"),
        ("S_t = S_{t-1} + k_t v_tᵀ\no_t = v_t (v_tᵀ S_tᵀ q_t)", "E957", "is no read"),
        ("S_t = S_{t-1} + k_t (k_tᵀ S_{t-1} v_t) v_tᵀ" + READ, "E952", "low rank on both"),
        ("S_t = S_{t-1} + k_t v_tᵀ\no_t = q_tᵀ S_t v_t", "E957", "outputs [V] or [K]"),
        ("S_t = S_{t-1} + k_t v_tᵀ\no_t = v_t", "E957", "does not read"),
        ("S_t = S_{t-1} + k_t v_tᵀ + 1" + READ, "E959", "every element"),
        (
            "input p : [5, K]\nS_t = S_{t-1} - p_tᵀ (p_t S_{t-1}) + k_t v_tᵀ" + READ,
            "E955",
            "erases along 5 vectors",
        ),
    ],
)
def test_what_has_no_form_is_refused_with_its_reason(lines: str, code: str, part: str) -> None:
    with pytest.raises(DslError) as caught:
        canonical(lines)
    if code:
        (mistake,) = caught.value.mistakes
        assert mistake.code == code
        assert part in mistake.message
        assert mistake.span is not None


def test_all_obstacles_are_told_at_once() -> None:
    update = "S_t = S_{t-1} + (k_tᵀ S_{t-1} v_t) k_t v_tᵀ + (k_t k_tᵀ) S_{t-1} (v_t v_tᵀ)"
    with pytest.raises(DslError) as caught:
        canonical(f"{update}\no_t = v_t (v_tᵀ S_tᵀ q_t)")
    assert [m.code for m in caught.value.mistakes] == ["E952", "E952", "E957"]
    assert "k_t k_tᵀ S_{t-1} v_t v_tᵀ" in caught.value.mistakes[1].message


# -- the record ---------------------------------------------------------------------------------------
def test_rewrites_tell_the_steps_in_order() -> None:
    found = canonicalise(parse(ALL["gated_delta_rule"].text("gdn")))
    assert [r.rule for r in found.rewrites] == [
        "distribute",
        "take the decay",
        "read the decayed state",
        "merge left vectors",
    ]
    assert found.rewrites[1].before == "exp(g_t) S_{t-1}"
    assert found.rewrites[1].after == "log λ_t = g_t"


def test_verify_finds_every_broken_invariant() -> None:
    good = canonicalise(parse(ALL["gated_delta_rule"].text("gdn")))
    rec = good.recurrences[0]
    past = Symbol("S", ("K", "V"), -1)
    for broken in (
        dataclasses.replace(rec, left=()),
        dataclasses.replace(rec, sigma=((rec.sigma[0][0], ZERO),)),
        dataclasses.replace(rec, decay=Decay("channel", rec.decay.log)),
        dataclasses.replace(rec, decay=Decay("none", rec.decay.log)),
        dataclasses.replace(rec, left=rec.written),
        dataclasses.replace(rec, written=(past,)),
        dataclasses.replace(rec, erase=(transpose(rec.erase[0]),)),
        dataclasses.replace(rec, reads=(dataclasses.replace(rec.reads[0], scale=rec.sigma[0][0]),)),
        dataclasses.replace(rec, token_terms=(rec.left[0],)),
    ):
        with pytest.raises(InternalError):
            verify_canonical(dataclasses.replace(good, recurrences=(broken,)))
    verify_canonical(good)


# -- reductions that hold between published recurrences -----------------------------------------------
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def _run(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    spec = parse(ALL[name].text(name))
    return run_form(canonicalise(spec), {i.name: tensors[i.name] for i in spec.inputs})[0]


@pytest.mark.parametrize(
    ("general", "special", "same"),
    [
        ("kda", "gated_delta_rule", lambda x: {"h": x["g"][..., None].expand_as(x["k"])}),
        ("gla", "simple_gla", lambda x: {"h": x["g"][..., None].expand_as(x["k"])}),
        ("gated_delta_rule", "delta_rule", lambda x: {"g": torch.zeros_like(x["g"])}),
        (
            "gdn2",
            "kda",
            lambda x: {n: x["beta"][..., None].expand_as(x[t]) for n, t in (("b", "k"), ("w", "v"))},
        ),
        ("gdn2", "gla", lambda x: {"b": torch.zeros_like(x["k"]), "w": torch.ones_like(x["v"])}),
        ("q_delta", "gated_delta_rule", lambda x: {"p": x["k"]}),
        ("dplr", "gla", lambda x: {"b": torch.zeros_like(x["k"])}),
        ("simple_gla", "linear_attention", lambda x: {"g": torch.zeros_like(x["g"])}),
    ],
)
def test_a_recurrence_reduces_to_its_special_case(general: str, special: str, same: Change) -> None:
    gen = torch.Generator().manual_seed(0)
    shapes = {"q": 4, "k": 4, "p": 4, "b": 4, "h": 4, "v": 3, "w": 3, "beta": 0, "gamma": 0, "g": 0}
    x = {
        n: torch.randn(2, 7, 2, *((d,) if d else ()), dtype=torch.float64, generator=gen)
        for n, d in shapes.items()
    }
    x |= {n: -x[n].abs() for n in ("g", "h")} | {"beta": x["beta"].sigmoid()}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    torch.testing.assert_close(_run(general, x | same(x)), _run(special, x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "zero",
    [
        " + (k_t - k_t) v_tᵀ",
        " + k_t (v_t - v_t)ᵀ",
        " + (k_t ⊙ q_t - q_t ⊙ k_t) q_tᵀ S_{t-1}",
        " + diag(k_t - k_t) S_{t-1}",
        " + 0 k_t k_tᵀ S_{t-1}",
    ],
)
def test_terms_that_cancel_leave_no_trace(zero: str) -> None:
    tail = "o_t = S_tᵀ q_t + S_tᵀ (k_t - k_t) + (v_t - v_t) ⊙ (S_tᵀ k_t) + (v_t - v_t)"
    plain = canonical(f"S_t = exp(g_t) S_{{t-1}} + k_t v_tᵀ\n{READ}").recurrences[0]
    padded = canonical(f"S_t = exp(g_t) S_{{t-1}} + k_t v_tᵀ{zero}\n{tail}").recurrences[0]
    assert dataclasses.replace(padded, span=None) == dataclasses.replace(plain, span=None)


def test_a_vector_of_equal_elements_is_refused() -> None:
    with pytest.raises(DslError, match="E959"):
        canonical("S_t = exp(g_t) S_{t-1} + (1 - k_t + k_t) v_tᵀ" + READ)


def test_a_state_axis_that_no_input_has_is_refused() -> None:
    update = "S_t = exp(g_t) (I - k_t k_tᵀ) S_{t-1}\no_t = S_tᵀ k_t"
    with pytest.raises(DslError, match=r"E962.*axis V"):
        canonicalise(parse(f"input k : [K] unit\ninput g : log gate\n{update}"))
