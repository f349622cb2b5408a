"""Names: folded, checked, spelled in ASCII."""

import keyword
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linalg_dsl.algebra.expr import FUNCTIONS
from linalg_dsl.language.names import RESERVED, ascii_name, fold, is_name


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("alpha", "alpha"),
        ("α", "alpha"),
        ("Λ", "Lambda"),
        ("λ", "lambda"),
        ("ς", "sigma"),
        ("k̂", "k_hat"),
        ("ŷ", "y_hat"),
        ("x̃2", "x_tilde2"),
        ("ключ", "_u43a_u43b_u44e_u447"),
    ],
)
def test_ascii_spelling(name: str, spelled: str) -> None:
    assert ascii_name(name) == spelled


@given(st.text(max_size=10))
def test_ascii_spelling_of_a_name_is_an_identifier(text: str) -> None:
    name = fold(text)
    if is_name(name):
        spelled = ascii_name(name)
        assert spelled.isascii()
        assert spelled.isidentifier() or keyword.iskeyword(spelled)


@given(st.text(max_size=10))
def test_folding_twice_changes_nothing(text: str) -> None:
    assert fold(fold(text)) == fold(text)


def test_composed_and_decomposed_letters_are_one_name() -> None:
    assert fold(unicodedata.normalize("NFD", "ŷ")) == fold("ŷ")


@pytest.mark.parametrize("text", ["", "1a", "a b", "_a", "a-b", "a" * 65, "a\n", "__import__", "k'"])
def test_what_is_no_name(text: str) -> None:
    assert not is_name(text)


def test_functions_and_dimensions_are_reserved() -> None:
    assert set(FUNCTIONS) | {"I", "K", "V", "T", "diag", "outer"} <= RESERVED
