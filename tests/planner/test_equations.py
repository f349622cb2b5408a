"""Chunk plans as mathematics, in Unicode and in LaTeX."""

from __future__ import annotations

import re

import pytest
from hand_written import CASES, Case

from linalg_dsl.language.latex import to_latex
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.equations import Equation, equations, legend
from linalg_dsl.planner.plan import PlanBuilder


def case_of(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


def test_the_delta_rule_reads_as_in_a_paper() -> None:
    assert [str(e) for e in equations(derive(case_of("gated_delta").canonical))] == [
        "G^B = (k kᵀ) ∘ Λ[t←s | s<t]",
        "U = (k ∘ Λ[t←0]) S₀ − v + G^B Z",
        "Z = −beta ∘ U    (solved from the first token: the scores are strict)",
        "G^Q = (q kᵀ) ∘ Λ[t←s | s≤t]",
        "o = (q ∘ Λ[t←0]) S₀ + G^Q Z",
        "S_C = Λ[C←0] ∘ S₀ + (k ∘ Λ[C←s])ᵀ Z",
    ]


def test_gradients_refer_to_forward_values_by_name() -> None:
    forward = derive(case_of("channel_gate").canonical)
    assert [str(e) for e in equations(backward(forward), forward)] == [
        "x₁ = v dS_Cᵀ",
        "dG^Q = do vᵀ",
        "dv = (k ∘ Λ[C←s]) dS_C + G^Qᵀ do",
        "dk = x₁ ∘ Λ[C←s] + (dG^Q ∘ Λ[t←s | s≤t])ᵀ q",
        "x₂ = do S₀ᵀ",
        "dS₀ = Λ[C←0] ∘ dS_C + (q ∘ Λ[t←0])ᵀ do",
        "dq = (dG^Q ∘ Λ[t←s | s≤t]) k + x₂ ∘ Λ[t←0]",
        "da = Λ[C←0] ∘ Σ_V(S₀ ∘ dS_C) + ⟨dG^Q, q, k⟩_τ[t←s | s≤t] + Σ_{s<τ}(Λ[C←s] ∘ x₁ ∘ k) "
        "+ Σ_{t≥τ}(Λ[t←0] ∘ x₂ ∘ q)",
    ]


def names_in(text: str) -> set[str]:
    """The values that a formula mentions."""
    text = re.sub(
        r"Λ\[[^\]]*\]|(?<=⟩)\[[^\]]*\]|⟩_τ\[[^\]]*\]|Σ_\{[^}]*\}|[Σx]?(Σ|max)_[KVt]\b|ᵀ|₋", " ", text
    )
    words = re.findall(r"[^\W\d][\w^]*", text)
    functions = {"tril", "max", "min", "exp", "log", "sigmoid", "softplus", "tanh", "silu", "rsqrt", "e"}
    return {w for w in words if w not in functions}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_name_is_defined_once_and_before_its_use(case: Case) -> None:
    forward = derive(case.canonical)
    known = {*case.inputs.split(), "scale", "S₀", "dS_C", "do"}
    known |= {f"{n}{i}" for n in case.inputs.split() for i in "₁₂"}
    defined: set[str] = set()
    for plan, before in ((forward, None), (backward(forward), forward)):
        lines = equations(plan, before)
        solved = {e.left for e in lines if re.fullmatch(r"d?[UZW][₁-₉]?|dv|dz", e.left)}
        for line in lines:
            assert line.left not in defined, f"{line.left} stands on the left twice"
            missing = names_in(line.right) - known - defined - solved
            assert not missing, f"{missing} in {line}"
            defined.add(line.left)
        assert {name for name, _ in plan.outputs} <= {
            f"d_{e.left[1:]}" if before else e.left for e in lines
        } | {f"d_{e.left[1:-1]}[{'₁₂'.index(e.left[-1])}]" for e in lines if e.left[-1] in "₁₂"}


def test_the_legend_explains_what_is_used_and_no_more() -> None:
    plain = derive(case_of("linear").canonical)
    assert [line[:4] for line in legend(equations(plain), plain)] == ["∘ mu", "tril"]
    decayed = derive(case_of("channel_gate").canonical)
    lines = legend(equations(decayed), decayed)
    assert lines[0].startswith("Λ[t←s] = exp(a_{s+1} + … + a_t)")
    assert any("⟨X, Y⟩" in line for line in lines)


def test_signs_numbers_and_divisions() -> None:
    b = PlanBuilder()
    x, y = (b.add_node("input", (), ("t",), n, name=n, row=None) for n in "xy")

    def shown(node: int) -> str:
        (line,) = equations(b.finish("p", [], [("o", node)]))
        return line.right

    assert shown(b.add(x, b.negate(y))) == "x − y"
    assert shown(b.add(x, b.negate(b.add(x, y)))) == "x − (x + y)"
    assert shown(b.negate(b.mul(b.number(-2), x))) == "2 x"
    assert shown(b.mul(x, b.mul(b.number(-0.5), y))) == "−x ∘ (0.5 y)"
    assert shown(b.mul(b.mul(b.number(-0.5), y), x)) == "−0.5 y ∘ x"
    assert shown(b.negate(b.mul(b.mul(b.number(-0.5), y), x))) == "0.5 y ∘ x"
    assert shown(b.mul(b.negate(x), b.negate(y))) == "x ∘ y"
    assert shown(b.mul(b.number(3), b.add(x, y))) == "3 (x + y)"
    assert shown(b.mul(x, b.unary("reciprocal", b.add(x, y)))) == "x / (x + y)"
    assert shown(b.unary("reciprocal", b.mul(x, y))) == "1 / (x ∘ y)"
    assert shown(b.unary("pow", x, exponent=-0.5)) == "x^(−0.5)"
    assert shown(b.binary("maximum", b.negate(x), y)) == "max(−x, y)"
    assert shown(b.mul(b.add(x, y), b.mul(x, y))) == "(x + y) ∘ x ∘ y"


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1}", r"\exp(g_{t}) (I - \beta_{t} k_{t} k_{t}^{\top}) S_{t-1}"),
        ("k_tilde_t ⊙ σ_t", r"\mathrm{k\_tilde}_{t} \odot \sigma_{t}"),
        ("α_t^(1/16)", r"\alpha_{t}^{1/16}"),
        ("G^B₁₂ᵀ dU₁", r"{G^{B}_{12}}^{\top} \mathrm{d}U_{1}"),
        ("Λ[t−1←s | s<t]", r"\Lambda_{t-1\leftarrow s,\,s<t}"),
        ("⟨q, k⟩[t←s | s≤t]", r"\langle q, k\rangle_{t\leftarrow s,\,s\le t}"),
        ("Σ_{s<τ}(x₁) + Σ_K(k)", r"\textstyle\sum_{s<\tau}(x_{1}) + \textstyle\sum_{K}(k)"),
        ("dbeta", r"\mathrm{d}\beta"),
        ("tril₋(A₁)", r"\mathrm{tril}_{-}(A_{1})"),
        ("delta", r"\delta"),
        ("γ̂_t + ẑ_t", r"\hat{\gamma}_{t} + \hat{z}_{t}"),
        ("dk̃ᵀ q", r"\mathrm{d}\tilde{k}^{\top} q"),
        ("diag(u)", r"\mathrm{diag}(u)"),
    ],
)
def test_latex(text: str, latex: str) -> None:
    assert to_latex(text) == latex


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_latex_is_ascii_and_balanced(case: Case) -> None:
    forward = derive(case.canonical)
    lines: list[Equation] = [*equations(forward), *equations(backward(forward), forward)]
    for line in lines:
        text = to_latex(line.left) + to_latex(line.right)
        assert text.isascii(), text
        depth = 0
        for char in text:
            depth += (char == "{") - (char == "}")
            assert depth >= 0
        assert depth == 0
        assert not re.search(r"\}\^\{[^}]*\}\^|_\{[^{}]*\}_\{", text), f"a double index in {text}"
