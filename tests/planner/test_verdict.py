"""What explain says about a recurrence."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from catalogue_sets import IN_DEPTH
from recurrences import WIDER

import linalg_dsl
from linalg_dsl.language.parser import parse
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.verdict import Explanation, explain

CATALOGUE = Path(__file__).parents[2] / "ops" / "catalogue"


def explained(name: str, **options: object) -> Explanation:
    return explained_text((CATALOGUE / f"{name}.rec").read_text(encoding="utf-8"), **options)


def explained_text(text: str, **options: object) -> Explanation:
    canonical = canonicalise(parse(text))
    forward = derive(canonical)
    return explain(canonical, forward, backward(forward), **options)  # type: ignore[arg-type]


def section(text: str, title: str) -> str:
    return next(part for part in text.split("\n\n") if part.startswith(title))


@pytest.mark.parametrize("name", IN_DEPTH)
def test_every_catalogue_entry_is_explained(name: str) -> None:
    text = str(explained(name, B=2, T=100, H=3, K=64, V=32))
    assert text.startswith(f"{name}: ")
    for title in (
        "the line",
        "form (1)",
        "one chunk",
        "its gradients",
        "where",
        "proof",
        "costs",
        "stability",
    ):
        assert section(text, title)
    assert "not proved" not in text
    assert "chunk form = recurrence, backward plan = its gradient" in text
    assert "K = 64, V = 32" in section(text, "costs")
    assert all(len(line) <= 120 for line in text.splitlines())


def test_verdicts_name_the_class_and_what_it_compiles_to() -> None:
    assert explained("linear_attention").verdict == "linear_attention: linear → chunk kernels"
    assert explained("gla").verdict == "gla: diagonal gate → chunk kernels, anchored blocks"
    assert explained("gated_delta_rule").verdict == (
        "gated_delta_rule: scalar gate + rank 1 → chunk kernels, unit-triangular solve (UT transform)"
    )


@pytest.mark.parametrize("name", WIDER)
def test_every_class_is_explained(name: str) -> None:
    found = explained_text(WIDER[name].text(name), proof=False)
    text = str(found)
    assert found.verdict.startswith(f"{name}: {WIDER[name].kind} → ")
    assert ("why no faster class" in text) == (found.verdict.split(": ")[1][:13] != "scalar gate →")
    assert "1e+30" not in text
    assert found.to_latex().isascii()
    names = [e.left for e in (*found.forward_equations, *found.backward_equations)]
    assert len(names) == len(set(names))


def test_the_reasons_for_every_faster_class_missed() -> None:
    assert explained("linear_attention").missed == ()
    assert explained("simple_gla").missed == ()
    text = (
        "recurrence all\ninput q, k : [K]\ninput v, p : [V]\ninput r : gate [V] in (-1, 1)\n"
        "input h : log gate [K]\n"
        "S_t = diag(exp(h_t)) (I - k_t k_tᵀ) S_{t-1} diag(r_t) + q_t v_tᵀ\no_t = S_t p_t\n"
    )
    reasons = "\n".join(explained_text(text).missed)
    for part in (
        "read along k_t",
        "2 left vectors, q_t and exp(h_t) ⊙ k_t",
        "h_t is one number per token and key channel",
        "log_size(r_t) is one number per token and value channel",
        "r_t may be negative",
        "S_t p_t sums over the axis that is not erased",
        "boundary term is formed at every chunk",
    ):
        assert part in reasons


def test_the_form_of_a_transition_on_the_value_side_is_that_of_the_transposed_state() -> None:
    found = explained_text(WIDER["gated_oja"].text("oja"))
    assert [str(e) for e in found.form] == [
        "X = Sᵀ    (erased along the value axis)",
        "log D = -softplus(z_t)    (one number per token and value channel; m = 1, r = 1)",
        "L = v_t",
        "W = beta_t k_t",
        "B = v_t",
        "Σ = -beta_t",
        "read = scale S_tᵀ q_t    (inclusive read, along the axis that is not erased)",
    ]
    assert "X_t = D_t ∘ X_{t-1}" in str(found)


def test_signs_and_decays_of_both_axes_have_their_own_notation() -> None:
    text = str(explained_text(WIDER["signed_separable"].text("all"), proof=False))
    for sign in (
        "R[C←0] ∘ Λ[C←0] ∘ S₀",
        "⟩ᴿ[t←s",
        "σ[t−1←0]",
        "σ[C←0]",
        "log_size(x) = log(max(|x|, 1e-15))",
    ):
        assert sign in text


def test_form_of_the_gated_delta_rule() -> None:
    found = explained("gated_delta_rule")
    assert [str(e) for e in found.form] == [
        "log D = g_t    (one number per token and head; m = 1, r = 1)",
        "L = k_t",
        "W = beta_t v_t",
        "B = k_t",
        "Σ = -beta_t",
        "read = scale S_tᵀ q_t    (inclusive read)",
    ]
    assert "U_t = B_tᵀ (D_t ∘ S_{t-1})" in str(found)
    assert found.line[0] == "S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ"


def test_every_rewrite_is_shown_in_order() -> None:
    found = explained("kda")
    text = section(str(found), "rewrites")
    places = [text.index(f"{i}. {r.rule}") for i, r in enumerate(found.canonical.rewrites, 1)]
    assert places == sorted(places)
    assert len(places) >= 3


def test_reads_and_token_terms_are_shown() -> None:
    form = [str(e) for e in explained("rwkv6").form]
    assert any("exclusive read" in line for line in form)
    assert any(line.startswith("token = ") for line in form)


def test_totals_stand_only_where_the_shape_is_given() -> None:
    assert "GFLOP" not in str(explained("gla", proof=False))
    costs = section(str(explained("gla", B=8, T=2048, H=16, proof=False)), "costs")
    assert "32 chunks per sequence, 128 sequences" in costs
    assert "26.2 GFLOP" in costs.replace("\n      ", " ")
    assert "16 chunks" in str(explained("gla", B=8, T=2048, H=16, chunk_size=128, proof=False))


def test_stability_says_what_the_declaration_proves() -> None:
    assert "contraction" in explained("gated_delta_rule").stability[1]
    assert "no bound of T" in explained("dplr").stability[1]
    assert explained("linear_attention").stability == ("no decay: no exponential is formed",)
    grows = canonicalise(
        parse(
            "recurrence grows\ninput q, k : [K]\ninput v : [V]\ninput g : log gate in (-inf, 2]\n"
            "S_t = exp(g_t) S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t\n"
        )
    )
    forward = derive(grows)
    assert "may be positive" in explain(grows, forward, backward(forward)).stability[0]


def test_the_schedule_is_quoted_where_given() -> None:
    text = str(explained("gla", schedule=["prep: 3 ops", "walk: forward, V split"], proof=False))
    assert section(text, "schedule") == "schedule\n  prep: 3 ops\n  walk: forward, V split"
    assert "schedule" not in str(explained("gla", proof=False))


@pytest.mark.parametrize("name", IN_DEPTH)
def test_latex_is_ascii_and_has_four_parts(name: str) -> None:
    text = explained(name).to_latex()
    assert text.isascii()
    assert text.count(r"\begin{align*}") == text.count(r"\end{align*}") == 4


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
def test_latex_compiles(tmp_path: Path) -> None:
    names = ("linear_attention", "kda", "eda", "gated_oja", "dfw", "mamba2_negative", "mdn", "mlstm", "gru")
    parts = [linalg_dsl.compile(CATALOGUE / f"{name}.rec").plan.to_latex() for name in names]
    lines = ["\\documentclass{article}", "\\usepackage{amsmath}", "\\begin{document}", *parts]
    (tmp_path / "all.tex").write_text("\n".join([*lines, "\\end{document}"]), encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
