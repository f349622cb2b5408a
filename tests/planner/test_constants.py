from __future__ import annotations

import math
from fractions import Fraction

import pytest

from linalg_dsl.errors import ArgumentError, DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.constants import find_constants
from linalg_dsl.planner.split import split

HEAD = "recurrence test\ninput q, k : [K]\ninput v : [V]\n"
TAIL = "S_t = c S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t\n"


def spec(lines: str, tail: str = TAIL) -> RecurrenceSpec:
    return parse(f"{HEAD}{lines}\n{tail}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", Fraction(1, 10)),
        ("1 / 3 + 2", Fraction(7, 3)),
        ("2^(-3)", Fraction(1, 8)),
        ("sqrt(2)", Fraction(repr(math.sqrt(2)))),
        ("exp(-1)", Fraction(repr(math.exp(-1)))),
        ("min(2, 1 / 2)", Fraction(1, 2)),
        ("clamp(3, 0, 1)", Fraction(1)),
        ("softplus(0)", Fraction(repr(math.log(2)))),
    ],
)
def test_values_are_exact_or_to_a_float(text: str, value: Fraction) -> None:
    assert find_constants(spec(f"const c = {text}"), {}).values == {"c": value}


def test_values_use_other_consts_and_given_ones_go_through() -> None:
    found = spec("const b = 4\nconst c = 1 / b")
    assert find_constants(found, {}).values["c"] == Fraction(1, 4)
    assert find_constants(found, {"b": 8.0}).values["c"] == Fraction(1, 8)


def test_what_depends_on_a_size_is_not_known_unless_given() -> None:
    found = spec("const b = 1 / sqrt(K)\nconst c = 2 b")
    assert find_constants(found, {}).values == {}
    assert find_constants(found, {"b": 0.25}).values == {"b": Fraction(1, 4), "c": Fraction(1, 2)}


def test_substitution_keeps_what_it_is_told_to() -> None:
    found = spec("const b = 4\nconst c = 2", "S_t = c b S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t\n")
    constants = find_constants(found, {})
    assert show_expr(constants.substitute(found.updates[0].value)) == "8 S_{t-1} + k_t v_tᵀ"
    kept = show_expr(constants.substitute(found.updates[0].value, keep={"b"}))
    assert kept == "2 b S_{t-1} + k_t v_tᵀ"


def test_sizes_come_from_consts() -> None:
    lines = "const n = 3\nconst c = 1\ninput x : [n, K]"
    assert find_constants(spec(lines), {}).sizes == {"n": 3}
    assert find_constants(spec(lines), {"n": 2}).sizes == {"n": 2}


@pytest.mark.parametrize("value", [0.0, 2.5, -1.0, 65.0])
def test_a_size_is_a_small_whole_number(value: float) -> None:
    with pytest.raises(DslError, match="E961"):
        find_constants(spec("const n = 3\nconst c = 1\ninput x : [n, K]"), {"n": value})


def test_a_size_must_reach_the_rows_that_are_used() -> None:
    found = spec(
        "const n = 2\nconst c = 1\ninput x : [n, K]", "S_t = c S_{t-1} + x_{t,2} v_tᵀ\no_t = S_tᵀ q_t\n"
    )
    with pytest.raises(DslError, match="row 2 of x is used, but n is 1"):
        find_constants(found, {"n": 1})


def test_values_without_meaning_are_refused() -> None:
    with pytest.raises(DslError, match="E961"):
        find_constants(spec("const c = log(-1)"), {})
    with pytest.raises(DslError, match="E961"):
        find_constants(spec("const b = 1\nconst c = 1 / b"), {"b": 0.0})
    with pytest.raises(ArgumentError, match="finite"):
        find_constants(spec("const c = 1"), {"c": math.inf})
    with pytest.raises(ArgumentError, match="no const"):
        find_constants(spec("const c = 1"), {"d": 1.0})


def test_a_division_by_a_const_that_becomes_zero_is_refused() -> None:
    found = spec("const c = 1", "S_t = S_{t-1} / c + k_t v_tᵀ\no_t = S_tᵀ q_t\n")
    with pytest.raises(DslError, match="divides by zero"):
        find_constants(found, {"c": 0.0}).substitute(found.updates[0].value)


def test_one_slot_of_a_state_of_slots_is_refused() -> None:
    whole = spec(
        "const n = 2\ninput g : log gate [n]",
        "S_t = exp(g_{t,1}) S_{t-1} + k_t exp(g_t)ᵀ\nz_t = max(z_{t-1}, q_tᵀ k_t)\no_t = S_t g_t + z_t\n",
    )
    stage = next(s for s in split(whole).stages if s.spec.states[0].name == "S")
    with pytest.raises(DslError, match="E963: row 1 of g is picked where all its rows are slots"):
        find_constants(stage.spec, {})
