"""States: which names are states, their shapes, what may be done with them."""

import pytest
from state_recurrences import TEXTS, text

from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec


@pytest.mark.parametrize("name", TEXTS)
def test_states_are_found_with_their_shapes_and_starts(name: str) -> None:
    found = parse(text(name)).states
    assert [(s.name, s.dims, s.start) for s in found] == TEXTS[name][1]


@pytest.mark.parametrize("name", TEXTS)
def test_a_spec_reads_back(name: str) -> None:
    spec = parse(text(name))
    assert parse(str(spec)) == spec


@pytest.mark.parametrize("name", TEXTS)
def test_a_spec_without_its_equations_as_written_reads_back(name: str) -> None:
    spec = parse(text(name))
    bare = RecurrenceSpec(spec.name, spec.inputs, spec.consts, spec.states, spec.updates, spec.outputs)
    assert parse(str(bare)) == spec


def states(*lines: str) -> list[tuple[str, tuple[object, ...]]]:
    head = "recurrence r\nconst n = 3\ninput q, k : [K]\ninput v : [V]\ninput b : scalar\ninput s : [n]\n"
    return [(s.name, s.dims) for s in parse(head + "\n".join(lines)).states]


@pytest.mark.parametrize(
    ("lines", "dims"),
    [
        (["z_t = b_t z_{t-1} + k_t", "o_t = z_t"], ("K",)),
        (["z_t = max(z_{t-1}, b_t)", "o_t = z_t v_t"], ()),
        (["z_t = z_{t-1} + 1", "o_t = z_t v_t"], ()),
        (["z_t = z_{t-1} + k_tᵀ q_t", "o_t = z_t v_t"], ()),
        (["z_t = z_{t-1} + s_t", "o_t = z_t"], ("n",)),
        (["z_t = softmax(z_{t-1} + s_t)", "o_t = z_t"], ("n",)),
        (["z_t = z_{t-1} + s_t v_tᵀ", "o_t = z_tᵀ s_t"], ("n", "V")),
        (["z_t = z_{t-1} + k_t s_tᵀ", "o_t = z_t s_t"], ("K", "n")),
        (["z_t = z_{t-1} + v_t k_tᵀ", "o_t = z_t q_t"], ("V", "K")),
        (["z_t = (I - k_t k_tᵀ) z_{t-1} + k_t q_tᵀ", "o_t = z_t q_t"], ("K", "K")),
        (["z_t = z_{t-1} + b_t v_t (k_tᵀ - v_tᵀ z_{t-1})", "o_t = z_t q_t"], ("V", "K")),
        (["z_t = z_{t-1} + k_t (b_t - k_tᵀ z_{t-1})", "o_t = z_t"], ("K",)),
        (["z_t = z_{t-1}", "o_t = z_tᵀ q_t"], ("K", "V")),
        (["z_t = b_t z_{t-1}", "o_t = z_tᵀ q_t"], ("K", "V")),
        (["z_t = diag(k_t) z_{t-1}", "o_t = z_tᵀ q_t"], ("K", "V")),
        (["z_t = diag(v_t) z_{t-1}", "o_t = z_t q_t"], ("V", "K")),
    ],
)
def test_the_shape_of_a_state_is_that_of_its_update(lines: list[str], dims: tuple[object, ...]) -> None:
    assert states(*lines) == [("z", dims)]


def test_a_declaration_comes_before_what_the_update_shows() -> None:
    lines = ["z_t = z_{t-1} + b_t", "o_t = z_tᵀ q_t"]
    assert states("state z : [K, V]", *lines) == [("z", ("K", "V"))]


def test_states_feed_each_other_in_shape_too() -> None:
    lines = ["a_t = b_t a_{t-1} + S_{t-1}ᵀ k_t", "S_t = b_t S_{t-1} + k_t a_tᵀ", "o_t = a_t"]
    assert states(*lines) == [("a", ("V",)), ("S", ("K", "V"))]
    assert states("x_t = y_{t-1}", "y_t = x_{t-1} + k_t", "o_t = x_t") == [("x", ("K",)), ("y", ("K",))]


def test_several_states_are_declared_in_one_line() -> None:
    lines = ["state y, x : [K] = 0.5", "x_t = x_{t-1} + k_t", "y_t = y_{t-1} + x_t", "o_t = y_t"]
    assert states(*lines) == [("y", ("K",)), ("x", ("K",))]


def test_updates_stand_in_the_order_of_the_states() -> None:
    spec = parse(
        "recurrence r\ninput k : [K]\nstate y, x\nx_t = x_{t-1} + k_t\ny_t = y_{t-1} + x_t\no_t = y_t"
    )
    assert [s.name for s in spec.states] == [e.target for e in spec.updates] == ["y", "x"]
    assert [e.target for e in spec.written] == ["x", "y", "o"]


def message(*lines: str) -> str:
    head = "recurrence r\ninput q, k : [K]\ninput v : [V]\ninput b : scalar\n"
    with pytest.raises(DslError) as caught:
        parse(head + "\n".join(lines))
    return str(caught.value)


def test_states_that_need_each_others_present_are_refused() -> None:
    found = message("x_t = x_{t-1} + y_t", "y_t = y_{t-1} + x_t + k_t", "o_t = x_t")
    assert found == (
        "<text>:5:17: E401: `y_t` is used before it is defined\n"
        "   5 | x_t = x_{t-1} + y_t\n"
        "                       ^^^\n"
        "     help: `y_t` needs `x_t` itself: one of the two takes the other's past, as in `y_{t-1}`"
    )


def test_a_present_that_is_defined_below_is_moved_up() -> None:
    found = message("x_t = x_{t-1} + y_t", "y_t = y_{t-1} + k_t", "o_t = x_t")
    assert found == (
        "<text>:5:17: E401: `y_t` is used before it is defined\n"
        "   5 | x_t = x_{t-1} + y_t\n"
        "                       ^^^\n"
        "     help: move the equation of `y_t` up, or read its past, `y_{t-1}`"
    )


def test_a_nonlinear_use_is_quoted_where_states_feed_each_other() -> None:
    found = message("a_t = b_t a_{t-1} + tanh(S_{t-1}ᵀ k_t)", "S_t = S_{t-1} + k_t a_tᵀ", "o_t = a_t")
    assert found == (
        "<text>:5:21: E405: the update of `a` is not linear in `S`, `a`, which feed each other: "
        "`tanh(S_{t-1}ᵀ k_t)`\n"
        "   5 | a_t = b_t a_{t-1} + tanh(S_{t-1}ᵀ k_t)\n"
        "                           ^^^^^^^^^^^^^^^^^^\n"
        "     help: `S` is a matrix: every term may hold one of them once, outside functions; with `tanh` "
        "around the state this is a recurrent network of the kind of M2RNN; the nearest linear relative is "
        "without it, or has it around what is read"
    )


@pytest.mark.parametrize(
    ("update", "relative"),
    [
        ("S_{t-1} ⊙ (S_{t-1} v_t v_tᵀ) + k_t v_tᵀ", "a delta rule, (I - beta_t k_t k_tᵀ) with vectors of"),
        ("S_{t-1} / (1 + k_tᵀ S_{t-1} v_t) + k_t v_tᵀ", "keeps the sum, and divides what is read from S_t"),
        ("S_{t-1} + k_t l2norm(S_{t-1}ᵀ k_t)ᵀ", "has `l2norm` around the key, or around what is read"),
        ("S_{t-1} + k_t ((S_{t-1}ᵀ k_t)^2)ᵀ", "is without the power"),
        ("relu(S_{t-1} + k_t v_tᵀ)", "with `relu` around the state this is a recurrent network"),
    ],
)
def test_a_nonlinear_update_is_told_its_nearest_linear_relative(update: str, relative: str) -> None:
    found = message(f"S_t = {update}", "o_t = S_tᵀ q_t")
    assert "E405: the update of `S` is not linear in it" in found
    assert relative in found


@pytest.mark.parametrize(
    "lines",
    [
        ["z_t = tanh(z_{t-1} ⊙ z_{t-1} + k_t)", "o_t = z_t / (1 + z_tᵀ z_t)"],
        ["z_t = z_{t-1} / (1 + abs(z_{t-1})) + k_t", "o_t = softmax(z_t)"],
        ["A_t = A_{t-1} + k_t v_tᵀ", "B_t = B_{t-1} + k_t softmax(A_tᵀ q_t)ᵀ", "o_t = silu(B_tᵀ q_t)"],
        ["A_t = A_{t-1} + k_t v_tᵀ", "B_t = (q_tᵀ A_t v_t)^2 B_{t-1} + k_t v_tᵀ", "o_t = B_tᵀ q_t"],
        ["S_t = S_{t-1} + k_t v_tᵀ", "o_t = S_tᵀ S_{t-1} v_t / (q_tᵀ S_t v_t)"],
    ],
)
def test_what_feeds_no_matrix_that_feeds_it_may_be_used_freely(lines: list[str]) -> None:
    assert states(*lines)


def test_a_text_with_endless_states_is_refused() -> None:
    lines = [f"x{i}_t = x{i}_{{t-1}} + k_t" for i in range(40)]
    assert "E107: more than 16 states" in message(*lines, "o_t = x1_t")
