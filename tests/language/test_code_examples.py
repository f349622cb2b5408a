"""Every code has a wrong example that raises it and nothing else, and a right one that compiles."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import linalg_dsl
from linalg_dsl.cli_errors import error_page, message_of, overview
from linalg_dsl.errors import ArgumentError, DslError
from linalg_dsl.language.code_examples import EXAMPLES, Example, whole
from linalg_dsl.language.codes import EXPLANATIONS
from linalg_dsl.language.parser import parse
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.classes import NO_CHUNK_FORM


def read(example: Example, text: str) -> Any:
    if example.kind != "python":
        return parse(text)
    names: dict[str, Any] = {"ld": linalg_dsl}
    exec(text, names)
    return names["example"].spec


def test_every_code_has_examples() -> None:
    assert set(EXAMPLES) == set(EXPLANATIONS)


@pytest.mark.parametrize("code", sorted(EXAMPLES))
def test_the_wrong_example_raises_its_code_and_no_other(code: str) -> None:
    example = EXAMPLES[code]

    def use() -> None:
        spec = read(example, example.wrong)
        assert example.kind == "plan", "only the planner says this"
        if code in NO_CHUNK_FORM:
            canonicalise(spec)
        else:
            linalg_dsl.compile(spec)

    with pytest.raises(DslError) as caught:
        use()
    assert [m.code for m in caught.value.mistakes] == [code]


@pytest.mark.parametrize("code", sorted(EXAMPLES))
def test_the_right_example_compiles_to_what_its_class_promises(code: str) -> None:
    example = EXAMPLES[code]
    assert example.right != example.wrong
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linalg_dsl.compile(read(example, example.right), strict=True)


@pytest.mark.parametrize("code", sorted(EXAMPLES))
def test_the_page_shows_both_and_the_message(code: str) -> None:
    text, data = error_page(code.lower())
    assert text.startswith(f"{code}: ")
    for key in ("wrong", "right"):
        assert all(line in text for line in data[key].splitlines())
    message = message_of(EXAMPLES[code])
    assert (f"{code}: " in message) == (EXAMPLES[code].kind != "python")
    assert all(line in text for line in message.splitlines())


def test_the_overview_names_every_code() -> None:
    text, rows = overview()
    assert [r["code"] for r in rows] == sorted(EXPLANATIONS)
    assert len(text.splitlines()) == len(rows)


def test_an_unknown_code_is_answered_with_those_there_are() -> None:
    with pytest.raises(ArgumentError, match="E101, E102"):
        error_page("E000")


def test_an_example_is_completed_by_what_it_leaves_out() -> None:
    assert whole("o_t = tanh(S_tᵀ q_t)").splitlines()[-2:] == [
        "S_t = S_{t-1} + k_t v_tᵀ",
        "o_t = tanh(S_tᵀ q_t)",
    ]
    assert parse(whole("const c = 2"))
