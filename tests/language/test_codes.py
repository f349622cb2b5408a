"""Every code of a mistake has an explanation, and every explanation a code in use."""

import re
from pathlib import Path

import pytest

import linalg_dsl.codegen
import linalg_dsl.ops
from linalg_dsl.language.codes import EXPLANATIONS, explain

PACKAGES = [Path(str(p.__file__)).parent for p in (linalg_dsl, linalg_dsl.codegen, linalg_dsl.ops)]


def codes_in_use() -> set[str]:
    sources = {f for package in PACKAGES for f in package.rglob("*.py") if f.name != "codes.py"}
    return {c for f in sources for c in re.findall(r'"(E[1-9]\d\d)"', f.read_text(encoding="utf-8"))}


def test_the_table_holds_exactly_the_codes_that_are_raised() -> None:
    assert codes_in_use() == set(EXPLANATIONS)


@pytest.mark.parametrize("code", sorted(EXPLANATIONS))
def test_an_explanation_is_a_paragraph(code: str) -> None:
    text = explain(code.lower())
    assert text == " ".join(text.split())
    assert len(text) > 20
    assert text[0].isupper() or text[0] == "`"
    assert text.endswith(".")
