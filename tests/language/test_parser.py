"""What a text may look like, and what it means."""

from fractions import Fraction

import pytest

from linalg_dsl.algebra.expr import (
    ONE,
    Call,
    Expr,
    Hadamard,
    Identity,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Symbol,
    diag,
    mul,
    negate,
    number,
    outer,
    transpose,
)
from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import Const, Input, Interval, RecurrenceSpec, State

GATED_DELTA_RULE = """
recurrence gated_delta_rule

input q    : [K]
input k    : [K] unit               # |k_t| ≤ 1 promised
input v    : [V]
input g    : log gate               # scalar per token and head, log space, ≤ 0
input beta : scalar in (0, 2)
const scale = 1 / sqrt(K)

S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ
o_t = scale S_tᵀ q_t
"""
HEAD = """recurrence r
const n = 2
const scale = 0.5
input q, k, x : [K]
input v, w : [V]
input g : log gate
input a, beta, c : scalar
input kk : [n, K]
input vv : [n, V]
input bb : [n]
param u : [K]
param gamma : scalar
"""
S_PAST = Symbol("S", ("K", "V"), -1)
S_NOW = Symbol("S", ("K", "V"), 0)


def scalar(name: str) -> Symbol:
    return Symbol(name, (1, 1))


def key(name: str) -> Symbol:
    return Symbol(name, ("K", 1))


def value(name: str) -> Symbol:
    return Symbol(name, ("V", 1))


def term(text: str) -> Expr:
    """The expression that a text stands for, read as a binding."""
    spec = parse(HEAD + f"e_t = {text}\nS_t = S_{{t-1}} + k_t v_tᵀ\no_t = S_tᵀ q_t")
    return next(e.value for e in spec.written if e.target == "e")


def update(text: str) -> Expr:
    return parse(HEAD + f"S_t = {text}\no_t = S_tᵀ q_t").updates[0].value


# -- a whole text -----------------------------------------------------------------------------
def test_gated_delta_rule_gives_its_spec() -> None:
    spec = parse(GATED_DELTA_RULE)
    k, v, beta = key("k"), value("v"), scalar("beta")
    erase = Sum((Identity("K"), mul((number(-1), beta, k, transpose(k)))))
    assert spec.name == "gated_delta_rule"
    assert spec.inputs == (
        Input("q", ("K",)),
        Input("k", ("K",), unit=True),
        Input("v", ("V",)),
        Input("g", (), "log_gate", Interval(None, 0.0, True, False)),
        Input("beta", (), range=Interval(0.0, 2.0)),
    )
    sqrt_k = Call("sqrt", (Symbol("K", (1, 1), None),))
    assert spec.consts == (Const("scale", Quotient(ONE, sqrt_k)),)
    assert spec.states == (State("S", ("K", "V"), 0.0),)
    assert spec.updates[0].value == Sum(
        (Product((Call("exp", (scalar("g"),)), erase, S_PAST)), Product((beta, k, transpose(v))))
    )
    scale = Symbol("scale", (1, 1), None)
    assert spec.outputs[0].value == Product((scale, transpose(S_NOW), key("q")))


def test_bindings_are_substituted_but_kept_as_written() -> None:
    spec = parse(
        HEAD + "M_t = exp(g_t) (I - beta_t k_t k_tᵀ)\n"
        "w2_t = beta_t v_t\n"
        "S_t = M_t S_{t-1} + k_t w2_tᵀ\n"
        "r_t = S_tᵀ q_t\n"
        "o_t = scale r_t"
    )
    plain = parse(
        HEAD + "S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + k_t (beta_t v_t)ᵀ\no_t = scale S_tᵀ q_t"
    )
    assert spec == plain
    assert [e.target for e in spec.written] == ["M", "w2", "S", "r", "o"]
    assert Symbol("M", ("K", "K")) in spec.written[2].value.children[0].children


def test_comments_above_the_first_statement_are_the_description() -> None:
    spec = parse("# The delta rule.\n# arXiv 2102.11174\n" + GATED_DELTA_RULE)
    assert spec.doc == "The delta rule.\narXiv 2102.11174"
    assert spec == parse(GATED_DELTA_RULE)


def test_order_of_declarations_is_the_order_of_a_call() -> None:
    spec = parse(HEAD + "S_t = S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t")
    names = ["q", "k", "x", "v", "w", "g", "a", "beta", "c", "kk", "vv", "bb", "u", "gamma"]
    assert [i.name for i in spec.inputs] == names
    assert [i.name for i in spec.inputs if not i.timed] == ["u", "gamma"]


def test_a_text_without_heading_has_a_name() -> None:
    assert parse("input k : [K]\nS_t = S_{t-1} + k_t\nstate S : [K]\no_t = S_t").name == "recurrence"


def test_indentation_and_line_ends_do_not_matter() -> None:
    crlf = GATED_DELTA_RULE.replace("\n", "\r\n")
    indented = GATED_DELTA_RULE.replace("\n", "\n    ")
    assert parse(crlf) == parse(indented) == parse(GATED_DELTA_RULE)


def test_lines_go_on_inside_brackets() -> None:
    text = GATED_DELTA_RULE.replace("exp(g_t) (", "(exp(g_t)  # the decay\n\n   ) (\n")
    assert parse(text) == parse(GATED_DELTA_RULE)


# -- notations --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    ["S_{t-1}", "S_<t-1>", "S[t-1]", "S_{ t - 1 }", "S_{t−1}", "Sₜ₋₁"],
)
def test_every_way_to_write_the_past_state(text: str) -> None:
    assert update(f"{text} + k_t v_tᵀ") == update("S_{t-1} + k_t v_tᵀ")


@pytest.mark.parametrize("text", ["q_t", "q_{t}", "q_<t>", "q[t]", "qₜ", "𝑞_t"])
def test_every_way_to_write_the_present(text: str) -> None:
    assert term(text) == key("q")


@pytest.mark.parametrize("text", ["k_tᵀ", "k_t^T", "k_t.T", "k_t ^T", "k_t⊤", "k_t^⊤", "k_t^{T}", "k_{t}^T"])
def test_every_way_to_write_a_transpose(text: str) -> None:
    assert term(text) == transpose(key("k"))


@pytest.mark.parametrize(
    "text",
    ["k_t v_tᵀ", "k_t·v_tᵀ", "k_t @ v_tᵀ", "k_t ⋅ v_tᵀ", "outer(k_t, v_t)", "(k_t)(v_tᵀ)", "(v_t k_tᵀ)ᵀ"],
)
def test_every_way_to_write_a_matrix_product(text: str) -> None:
    assert term(text) == outer(key("k"), value("v"))


@pytest.mark.parametrize("text", ["k_t ⊙ x_t", "k_t ∘ x_t", "k_t .* x_t"])
def test_every_way_to_write_an_elementwise_product(text: str) -> None:
    assert term(text) == Hadamard((key("k"), key("x")))


def test_transposing_twice_is_nothing() -> None:
    assert term("k_tᵀᵀ") == term("(k_tᵀ)ᵀ") == term("k_t" + "ᵀ" * 500) == key("k")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", Fraction(2)),
        ("0.25", Fraction(1, 4)),
        ("1e-6", Fraction(1, 10**6)),
        ("1/3", Fraction(1, 3)),
        ("2^10", Fraction(1024)),
        ("1 - 2^(-5)", Fraction(31, 32)),
        ("-(3 - 1)", Fraction(-2)),
        ("2 * 3 / 4", Fraction(3, 2)),
        ("2 · 3", Fraction(6)),
        ("(2)(3)", Fraction(6)),
    ],
)
def test_arithmetic_with_numbers_is_exact(text: str, expected: Fraction) -> None:
    assert term(text) == Number(expected)


def test_numbers_may_stand_before_a_name() -> None:
    assert term("0.5 c_t") == term("0.5c_t") == term("c_t / 2") == mul((number(0.5), scalar("c")))


def test_rows_are_counted_from_one() -> None:
    assert term("kk_{t,1}") == Symbol("kk", ("K", 1), 0, 0)
    assert term("kk_{t, 2}") == term("kk[t,2]") == term("kk_<t,2>") == Symbol("kk", ("K", 1), 0, 1)
    assert term("bb_{t,2}") == Symbol("bb", (1, 1), 0, 1)
    assert term("kk_{t,n}") == term("kk_{t,2}")


def test_rows_contract_when_matrices_of_rows_multiply() -> None:
    assert term("kk_tᵀ vv_t").shape == ("K", "V")
    assert term("kk_tᵀ bb_t").shape == ("K", 1)


def test_names_are_folded_after_lexing() -> None:
    head = "recurrence r\ninput k̂, α, q : [K]\ninput v₁ : [V]\n"
    spec = parse(head + "S_t = S_{t-1} + k̂_t v₁_tᵀ\no_t = S_tᵀ (q_t ⊙ α_t)")
    assert [i.name for i in spec.inputs] == ["k̂", "α", "q", "v1"]
    assert spec == parse((head + "S_t = S_{t-1} + k̂_t v1_tᵀ\no_t = S_tᵀ (q_t ⊙ α_t)").replace("v₁", "v1"))


def test_an_index_counts_only_at_the_end_of_a_word() -> None:
    head = "recurrence r\ninput k_tilde, q : [K]\ninput v_tt : [V]\n"
    text = head + "S_t = S_{t-1} + k_tilde_t v_tt_tᵀ\no_t = S_tᵀ q_t"
    assert [i.name for i in parse(text).inputs] == ["k_tilde", "q", "v_tt"]


# -- precedence -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("1/2 c_t", "(1/2) c_t"),
        ("a_t / beta_t c_t", "(a_t / beta_t) c_t"),
        ("-a_t c_t", "-(a_t c_t)"),
        ("-a_t^2", "-(a_t^2)"),
        ("-a_t / c_t", "-(a_t / c_t)"),
        ("a_t - beta_t - c_t", "(a_t - beta_t) - c_t"),
        ("a_t - beta_t c_t", "a_t - (beta_t c_t)"),
        ("a_t * -c_t", "-(a_t c_t)"),
        ("(-a_t) (-c_t)", "a_t c_t"),
        ("(-a_t) / (-c_t)", "a_t / c_t"),
        ("a_t + -c_t", "a_t - c_t"),
        ("2 a_t^2", "2 (a_t^2)"),
        ("k_t ⊙ x_t v_tᵀ", "(k_t ⊙ x_t) v_tᵀ"),
        ("a_t k_t ⊙ x_t", "(a_t k_t) ⊙ x_t"),
        ("k_t^2ᵀ", "(k_t^2)ᵀ"),
        ("exp(g_t) k_t", "(exp(g_t)) k_t"),
        ("exp (g_t) k_t", "exp(g_t) k_t"),
        ("a_t^gamma c_t", "(a_t^gamma) c_t"),
        ("a_t^{1/16}", "a_t^(1/16)"),
        ("a_t²", "a_t^2"),
        ("k_tᵀ x_t k_t", "(k_tᵀ x_t) k_t"),
        ("k_t k_tᵀ x_t", "k_t (k_tᵀ x_t)"),
    ],
)
def test_precedence(text: str, same: str) -> None:
    assert term(text) == term(same)


def test_division_and_elementwise_products_are_told_apart() -> None:
    assert term("a_t / (beta_t c_t)") != term("a_t / beta_t c_t")
    assert term("exp(g_t + a_t)") != term("exp(g_t) + a_t")
    assert term("(a_t + beta_t)^2") != term("a_t + beta_t^2")


def test_a_product_may_be_grouped_around_an_inner_product() -> None:
    inner = term("x_tᵀ q_t")
    assert term("(k_t v_tᵀ) (x_tᵀ q_t)") == mul((inner, key("k"), transpose(value("v"))))


# -- scalars, matrices, I ---------------------------------------------------------------------
def test_i_takes_its_size_from_the_matrix_beside_it() -> None:
    assert term("I - k_t k_tᵀ").children[0] == Identity("K")
    assert term("v_t v_tᵀ + I").children[1] == Identity("V")
    assert term("I + (a_t I + k_t k_tᵀ)") == term("I + a_t I + k_t k_tᵀ")


def test_a_scalar_beside_a_square_matrix_is_a_multiple_of_i() -> None:
    assert term("exp(g_t) - k_t k_tᵀ") == term("exp(g_t) I - k_t k_tᵀ")
    assert term("1 + k_t k_tᵀ") == term("I + k_t k_tᵀ")


def test_i_in_a_product_is_one() -> None:
    assert update("exp(g_t) I S_{t-1} + k_t v_tᵀ") == update("exp(g_t) S_{t-1} + k_t v_tᵀ")
    assert term("k_t I v_tᵀ") == term("k_t v_tᵀ")


def test_a_binding_may_be_a_multiple_of_i() -> None:
    text = "M_t = exp(g_t) I\nS_t = M_t S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t"
    assert parse(HEAD + text) == parse(
        HEAD + text.replace("M_t = exp(g_t) I\n", "").replace("M_t", "exp(g_t)")
    )


def test_a_scalar_is_added_to_every_element_of_a_vector() -> None:
    assert term("1 - k_t") == Sum((ONE, negate(key("k"))))


def test_functions_are_elementwise_on_vectors() -> None:
    assert term("exp(k_t)").shape == ("K", 1)
    assert term("k_t^2") == Power(key("k"), number(2))
    assert term("diag(sigmoid(k_t))") == diag(Call("sigmoid", (key("k"),)))
    assert term("min(k_t, 1)").shape == ("K", 1)
    assert term("clamp(a_t, 0, 1)").shape == (1, 1)
    assert term("dot(k_t, q_t)").shape == term("sum(k_t)").shape == (1, 1)
    assert term("l2norm(k_t)").shape == term("softmax(k_t)").shape == ("K", 1)


# -- declarations -----------------------------------------------------------------------------
def declared(line: str) -> Input:
    spec = parse(f"recurrence r\nconst m = 3\n{line}\ninput q0, k0 : [K]\ninput v0 : [V]\n"
                 "S_t = S_{t-1} + k0_t v0_tᵀ\no_t = S_tᵀ q0_t")  # fmt: skip
    return spec.inputs[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("input x : [K]", Input("x", ("K",))),
        ("input x : [V] unit", Input("x", ("V",), unit=True)),
        ("input x : [m, K]", Input("x", ("m", "K"))),
        ("input x : [2, V]", Input("x", (2, "V"))),
        ("input x : [m]", Input("x", ("m",))),
        ("input x : scalar in (0, 2)", Input("x", (), range=Interval(0.0, 2.0))),
        ("input x : scalar in [0, 1)", Input("x", (), range=Interval(0.0, 1.0, False, True))),
        ("input x : scalar in (-1/2, 0.5]", Input("x", (), range=Interval(-0.5, 0.5, True, False))),
        ("input x : scalar <= 0", Input("x", (), range=Interval(None, 0.0, True, False))),
        ("input x : scalar ≥ 1", Input("x", (), range=Interval(1.0, None, False, True))),
        ("input x : scalar > 0", Input("x", (), range=Interval(0.0, None, True, True))),
        ("input x : scalar < 3e2", Input("x", (), range=Interval(None, 300.0, True, True))),
        ("input x : [V] in [0, 1] unit", Input("x", ("V",), "plain", Interval(0.0, 1.0, False, False), True)),
        ("input x : log gate", Input("x", (), "log_gate", Interval(None, 0.0, True, False))),
        ("input x : log gate [K]", Input("x", ("K",), "log_gate", Interval(None, 0.0, True, False))),
        ("input x : log gate in (-inf, 2]", Input("x", (), "log_gate", Interval(None, 2.0, True, False))),
        ("input x : log gate in [-∞, 2]", Input("x", (), "log_gate", Interval(None, 2.0, True, False))),
        ("input x : gate", Input("x", (), "gate", Interval(0.0, 1.0, True, False))),
        ("input x : gate [K] in (0, 1)", Input("x", ("K",), "gate", Interval(0.0, 1.0, True, True))),
        ("param x : [K]", Input("x", ("K",), timed=False)),
        ("param x : scalar in (0, 1)", Input("x", (), range=Interval(0.0, 1.0), timed=False)),
    ],
)
def test_declarations(line: str, expected: Input) -> None:
    assert declared(line) == expected


def test_states_may_be_declared() -> None:
    head = "recurrence r\nstate S : [V, K] = 0.5\ninput q, k : [K]\ninput v : [V]\n"
    text = head + "S_t = S_{t-1} + v_t k_tᵀ\no_t = S_t q_t"
    assert parse(text).states == (State("S", ("V", "K"), 0.5),)
    assert parse(text.replace("= 0.5", "= -inf")).states[0].start == float("-inf")


@pytest.mark.parametrize("shape", ["scalar", "[K]", "[V]", "[V, K]", "[K, K]", "[2, V]"])
def test_a_state_of_any_shape_reads_back(shape: str) -> None:
    text = f"recurrence r\nstate z : {shape}\ninput a : scalar\ninput v : [V]\nz_t = a_t z_{{t-1}}\no_t = v_t"
    spec = parse(text)
    assert parse(str(spec)) == spec


def test_the_output_may_have_another_name() -> None:
    spec = parse(HEAD + "output y\nS_t = S_{t-1} + k_t v_tᵀ\no_t = a_t v_t\ny_t = S_tᵀ q_t + o_t")
    assert [e.target for e in spec.outputs] == ["y"]


def test_reads_may_be_exclusive() -> None:
    spec = parse(HEAD + "S_t = S_{t-1} + k_t v_tᵀ\no_t = S_{t-1}ᵀ q_t")
    above = parse(HEAD + "o_t = S_{t-1}ᵀ q_t\nS_t = S_{t-1} + k_t v_tᵀ")
    assert spec.outputs[0].value == Product((transpose(S_PAST), key("q")))
    assert spec == above


def test_consts_may_use_earlier_consts_and_dimensions() -> None:
    spec = parse("recurrence r\ninput q, k : [K]\ninput v : [V]\nconst a = 2\nconst b = a / sqrt(K V)\n"
                 "S_t = S_{t-1} + k_t v_tᵀ\no_t = b S_tᵀ q_t")  # fmt: skip
    assert [c.name for c in spec.consts] == ["a", "b"]


def test_params_and_consts_have_no_index() -> None:
    assert term("u") == Symbol("u", ("K", 1), None)
    assert term("gamma c_t") == mul((Symbol("gamma", (1, 1), None), scalar("c")))


def test_keywords_may_be_names() -> None:
    text = "recurrence for_all\ninput gate, unit, state : [K]\ninput scalar : [V]\n" \
           "S_t = S_{t-1} + unit_t scalar_tᵀ\no_t = S_tᵀ (gate_t + state_t)"  # fmt: skip
    assert [i.name for i in parse(text).inputs] == ["gate", "unit", "state", "scalar"]


def test_equality_ignores_places_comments_and_spelling() -> None:
    other = GATED_DELTA_RULE.replace("    ", " ").replace("#", "# note:").replace("v_tᵀ", "v_{t}^T")
    assert parse(other) == parse(GATED_DELTA_RULE)
    assert hash(parse(other)) == hash(parse(GATED_DELTA_RULE))


def test_inequality_sees_every_part() -> None:
    specs: set[RecurrenceSpec] = {parse(GATED_DELTA_RULE)}
    for before, after in [
        ("gated_delta_rule", "other"),
        ("unit", ""),
        ("(0, 2)", "(0, 2]"),
        ("sqrt(K)", "sqrt(V)"),
        ("log gate", "gate"),
        ("- beta_t k_t k_tᵀ", "+ beta_t k_t k_tᵀ"),
        ("S_tᵀ q_t", "S_{t-1}ᵀ q_t"),
    ]:
        specs.add(parse(GATED_DELTA_RULE.replace(before, after)))
    assert len(specs) == 8


def test_spans_point_into_the_text() -> None:
    spec = parse(GATED_DELTA_RULE, origin="gdn.rec")
    span = spec.inputs[1].span
    assert span is not None
    assert (span.line, span.column, span.origin) == (5, 7, "gdn.rec")
    assert span.text[span.start : span.end] == "k"
    written = spec.updates[0].value.span
    assert written is not None
    assert written.text[written.start : written.end].startswith("exp(g_t) (I")


def test_the_origin_is_named_in_messages() -> None:
    with pytest.raises(DslError, match=r"my\.rec:2:11: E108"):
        parse("recurrence r\ninput x : strange", origin="my.rec")
