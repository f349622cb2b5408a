"""The tree of printed formulas, and the MathML written from it."""

from __future__ import annotations

import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache

import pytest

import linalg_dsl
from linalg_dsl.language.latex import to_latex
from linalg_dsl.language.mathml import to_mathml, to_mathml_terms
from linalg_dsl.language.notation import Script, read
from linalg_dsl.ops.catalogue import catalogue_names
from linalg_dsl.planner.verdict import Explanation

CORE = {"math", "mrow", "mi", "mn", "mo", "msub", "msup", "msubsup", "mspace"}


@cache
def formulas(name: str) -> tuple[str, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = linalg_dsl.compile(getattr(linalg_dsl.ops, name).spec).plan
    return tuple(_formulas(plan))


def _formulas(plan: object) -> Iterator[str]:
    for stage in plan.explain().stages:  # type: ignore[attr-defined]
        yield from stage.line
        lines = [*stage.forward_equations, *stage.backward_equations]
        if isinstance(stage, Explanation):
            lines += stage.form
            yield from (x for r in stage.canonical.rewrites for x in (r.before, r.after))
        yield from (x for e in lines for x in (e.left, e.right))


@pytest.mark.parametrize("name", catalogue_names())
def test_every_printed_formula_survives_its_tree(name: str) -> None:
    for text in formulas(name):
        assert str(read(text)) == text
        assert "".join(map(str, read(text).terms())) == text


@pytest.mark.parametrize("name", catalogue_names())
def test_every_printed_formula_is_mathml_core_and_ascii_latex(name: str) -> None:
    for text in formulas(name):
        assert to_latex(text).isascii(), text
        for made in (to_mathml(text), *to_mathml_terms(text)):
            tags = {
                e.tag.removeprefix("{http://www.w3.org/1998/Math/MathML}") for e in ET.fromstring(made).iter()
            }
            assert tags <= CORE


def shown(text: str) -> str:
    """The MathML without its outer element, spaces and attributes."""

    def plain(e: ET.Element) -> str:
        tag = e.tag.rpartition("}")[2]
        inside = (e.text or "") + "".join(map(plain, e))
        return inside if tag == "math" else f"<{tag}>{inside}</{tag}>" if tag != "mspace" else ""

    return plain(ET.fromstring(to_mathml(text)))


@pytest.mark.parametrize(
    ("text", "mathml"),
    [
        ("beta_t", "<msub><mi>β</mi><mrow><mi>t</mi></mrow></msub>"),
        ("k_tᵀ", "<msubsup><mi>k</mi><mrow><mi>t</mi></mrow><mrow><mo>⊤</mo></mrow></msubsup>"),
        ("dZ₁", "<mi>d</mi><msub><mi>Z</mi><mrow><mn>1</mn></mrow></msub>"),
        ("G^Q₁₂", "<msubsup><mi>G</mi><mrow><mn>12</mn></mrow><mrow><mi>Q</mi></mrow></msubsup>"),
        ("0.5 x", "<mn>0.5</mn><mi>x</mi>"),
        (
            "Λ₁[C←0]",
            "<msub><msub><mi>Λ</mi><mrow><mn>1</mn></mrow></msub><mrow><mi>C</mi><mo>←</mo><mn>0</mn></mrow></msub>",
        ),
        ("diag(u)", "<mi>diag</mi><mrow><mo>(</mo><mi>u</mi><mo>)</mo></mrow>"),
        ("a < b", "<mi>a</mi><mo><</mo><mi>b</mi>"),
        ("log |x|", "<mi>log</mi><mrow><mo>|</mo><mi>x</mi><mo>|</mo></mrow>"),
    ],
)  # fmt: skip
def test_mathml(text: str, mathml: str) -> None:
    assert shown(text) == mathml


def test_brackets_hold_what_is_between_them() -> None:
    (item,) = read("⟨q, (k)⟩ᴿ[t←s | s≤t]").items
    assert isinstance(item, Script)
    assert str(item.body) == "t←s | s≤t"
    assert isinstance(item.base, Script)
    assert str(item.base.base) == "⟨q, (k)⟩"


@pytest.mark.parametrize("text", ["(a", "a)", "⟨a, b", "a⟩[", "|a", "^", "_{t", "Σ_{t"])
def test_a_bracket_without_a_partner_is_a_sign(text: str) -> None:
    assert str(read(text)).startswith(text[:1])
