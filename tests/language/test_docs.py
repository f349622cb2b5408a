"""What the page on the language shows is what the language does."""

import re
from pathlib import Path

import pytest

import linalg_dsl as ld
from linalg_dsl.algebra.expr import FUNCTIONS
from linalg_dsl.errors import DslError
from linalg_dsl.language.builder import PythonRecurrence
from linalg_dsl.language.parser import parse

PAGE = (Path(__file__).parents[2] / "docs" / "language.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for label, text in fenced if label == kind]


@pytest.mark.parametrize("text", blocks("recurrence"))
def test_texts_are_read(text: str) -> None:
    spec = parse(text)
    assert parse(str(spec)) == spec


@pytest.mark.parametrize("code", blocks("python"))
def test_functions_are_read(code: str) -> None:
    scope: dict[str, object] = {}
    exec(code, scope)
    found = [x for x in scope.values() if isinstance(x, PythonRecurrence)]
    assert found
    assert all(parse(str(f)) == f.spec for f in found)


@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_delta_product", "mlstm"])
def test_both_fronts_are_shown_with_the_same_recurrence(name: str) -> None:
    scope: dict[str, object] = {}
    for code in blocks("python"):
        exec(code, scope)
    function = scope[name]
    assert isinstance(function, PythonRecurrence)
    (text,) = (t for t in blocks("recurrence") if f"recurrence {name}\n" in t)
    assert function.spec == parse(text)


def test_the_message_is_the_one_that_is_given() -> None:
    head = "recurrence r\n\n\ninput q, k : [K]\ninput v : [V]\n\n"
    with pytest.raises(DslError) as caught:
        parse(head + "S_t = S_{t-1} + k_t v_t\no_t = S_tᵀ q_t")
    assert blocks("")[0].strip() == str(caught.value)


def test_every_function_is_named() -> None:
    words = set(re.findall(r"\w+", PAGE))
    assert set(FUNCTIONS) <= words


def test_every_name_of_the_python_front_exists() -> None:
    for name in re.findall(r"\bld\.(\w+)", PAGE):
        assert hasattr(ld, name), name
