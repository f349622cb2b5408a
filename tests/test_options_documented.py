"""Every option of a compilation and every variable of the environment is explained (pytorch 158741)."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import linalg_dsl
from linalg_dsl.codegen.options import CompileOptions

ROOT = Path(__file__).resolve().parent.parent
PAGES = "".join(p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("option", list(inspect.signature(linalg_dsl.compile).parameters)[1:])
def test_an_option_is_explained_and_checked(option: str) -> None:
    """Its default is the class's, its legal values are in the class's text; nonsense is refused by name."""
    fields = {f.name: f.default for f in dataclasses.fields(CompileOptions)}
    assert option in fields
    assert f"``{option}``" in inspect.cleandoc(CompileOptions.__doc__ or "")
    text = "recurrence x\ninput q, k : [K]\ninput v : [V]\nS_t = S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t"
    nonsense: dict[str, Any] = {option: object()}
    with pytest.raises(linalg_dsl.ArgumentError, match=option):
        linalg_dsl.compile(text, **nonsense)


def test_variables_of_the_environment_are_explained() -> None:
    sources = [p for d in ("linalg_dsl", "codegen", "ops") for p in (ROOT / d).rglob("*.py")]
    names = {n for p in sources for n in re.findall(r'"(LINALG_DSL_\w+)"', p.read_text(encoding="utf-8"))}
    assert "LINALG_DSL_CACHE" in names
    assert {n for n in names if n not in PAGES} == set()
