"""Identifiers of generated code are ASCII, unique, and never a word that the code needs."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linalg_dsl.codegen.emit.names import RESERVED, Names, ascii_identifier, ascii_text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k", "k"),
        ("k_tilde", "k_tilde"),
        ("x__y", "x__y"),
        ("α", "alpha"),
        ("Δ", "Delta"),
        ("α_1", "alpha_1"),
        ("αβ", "alpha_beta"),
        ("k̂", "k_hat"),
        ("v̄", "v_bar"),
        ("λ", "lamda"),
    ],
)
def test_identifier_reads_like_the_name(name: str, expected: str) -> None:
    assert ascii_identifier(name) == expected


@given(st.text(max_size=20))
def test_any_text_becomes_an_ascii_identifier(text: str) -> None:
    name = ascii_identifier(text)
    assert name.isascii()
    assert name.isidentifier()


@given(st.lists(st.text(max_size=4), max_size=12))
def test_names_are_unique_and_never_reserved(wanted: list[str]) -> None:
    names = Names(reserved=("q",))
    got = [names.unique(w) for w in wanted]
    assert len(set(got)) == len(got)
    assert not set(got) & (RESERVED | {"q"})
    assert not any(keyword.iskeyword(n) for n in got)


def test_a_taken_name_gets_a_number() -> None:
    names = Names()
    assert [names.unique("x") for _ in range(3)] == ["x", "x_2", "x_3"]
    assert names.unique("lambda") == "lambda_2"
    assert names.unique("torch") == "torch_2"


def test_mathematics_in_comments_is_ascii() -> None:
    assert ascii_text("S_t = α_t k_tᵀ") == "S_t = alpha_t k_t^T"
