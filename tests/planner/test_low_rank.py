"""Columns of L, W, Σ and B, by themselves and in the words of random updates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linalg_dsl.algebra.expr import SCALAR, ZERO, Expr, Symbol, hadamard, mul, number
from linalg_dsl.algebra.factors import Factors
from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.printer import show_expr
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.evaluate_form import run_form
from linalg_dsl.planner.linear_map import RankOne
from linalg_dsl.planner.low_rank import merge_columns, read_decayed, without

k, p, a = (Symbol(n, ("K", 1)) for n in "kpa")
v, w = (Symbol(n, ("V", 1)) for n in "vw")
alpha, beta = (Symbol(n, SCALAR) for n in ("alpha", "beta"))


def term(column: Expr, row: Expr, *scalars: Expr, coefficient: int = 1) -> RankOne:
    vectors = [row.factors if hasattr(row, "factors") else (row,)][0]
    return RankOne(
        Factors(number(coefficient).value, scalars), Factors(vectors=(column,)), Factors(vectors=vectors)
    )


def test_an_erase_and_a_write_along_one_vector_share_a_column() -> None:
    found = merge_columns([term(k, k, beta, coefficient=-1)], [term(k, v, beta)])
    assert (found.left, found.erase) == ((k,), (k,))
    assert found.written == (mul((beta, v)),)
    assert found.sigma == ((mul((number(-1), beta)),),)


def test_writes_come_first_and_have_zeros_where_nothing_is_written() -> None:
    found = merge_columns([term(a, p)], [term(k, v)])
    assert (found.left, found.written, found.sigma) == ((k, a), (v, ZERO), ((ZERO,), (number(1),)))


def test_never_more_erase_columns_than_left_vectors_that_erase() -> None:
    found = merge_columns([term(k, k, alpha), term(k, p, beta), term(k, a)], [term(p, v)])
    assert len(found.erase) == 1
    assert found.combined == 2
    assert show_expr(found.erase[0]) == "alpha_t k_t + beta_t p_t + a_t"


def test_a_common_scalar_stays_out_of_combined_vectors() -> None:
    found = merge_columns([term(k, k, beta, alpha), term(k, p, beta)], [])
    assert show_expr(found.erase[0]) == "alpha_t k_t + p_t"
    assert found.sigma == ((beta,),)


def test_opposite_terms_cancel() -> None:
    found = merge_columns([term(k, p, beta), term(k, p, beta, coefficient=-1)], [term(k, v)])
    assert found.erase == ()


def test_the_cheaper_grouping_is_taken() -> None:
    by_written = merge_columns([], [term(k, v), term(p, v, beta), term(a, v)])
    assert len(by_written.left) == 1
    by_left = merge_columns([], [term(k, v), term(k, w, beta)])
    assert by_left.left == (k,)


def test_without_strikes_out_factors_once_each() -> None:
    found = without(
        Factors(scalars=(alpha, beta, alpha), vectors=(k, a)), Factors(scalars=(alpha,), vectors=(a,))
    )
    assert found == Factors(scalars=(beta, alpha), vectors=(k,))
    assert without(Factors(scalars=(beta,), vectors=(k,)), Factors(scalars=(alpha,))) is None


def test_an_erase_reads_the_decayed_state_only_if_all_do() -> None:
    decay = Factors(vectors=(a,))
    both = [term(k, hadamard((a, k)), beta), term(p, hadamard((p, a)))]
    found = read_decayed(both, decay)
    assert found is not None
    assert [t.row.vectors for t in found] == [(k,), (p,)]
    assert read_decayed([*both, term(k, p)], decay) is None


# -- random updates -----------------------------------------------------------------------------------
HEADER = """recurrence drawn
input k : [K] unit
input p, q : [K]
input v, w : [V]
input x : [2, K]
input y : [2, V]
input z : [2]
input g : log gate
input h : log gate [K]
input f : gate [K] in (0, 1)
input beta : scalar in (0, 1)
param u : [K]
const c = 0.5
"""
KEYS = st.sampled_from(
    ["k_t", "p_t", "(k_t + c p_t)", "f_t ⊙ k_t", "diag(u) p_t", "x_{t,1}", "beta_t k_t", "l2norm(p_t)"]
).map(lambda s: f"({s})")
VALUES = st.sampled_from(
    ["v_t", "w_t", "(v_t - w_t)", "w_t ⊙ v_t", "2 v_t", "(k_tᵀ p_t) v_t", "y_{t,2}"]
).map(lambda s: f"({s})")
SCALARS = st.sampled_from(["", "beta_t ", "c ", "(1 - beta_t) ", "sigmoid(g_t) ", "(k_tᵀ p_t) ", "0.3 "])
GATES = st.sampled_from(
    ["exp(g_t) I", "diag(exp(h_t))", "diag(f_t)", "beta_t I", "I", "0.9 I", "(I - diag(f_t))"]
)


@st.composite
def updates(draw_from: st.DrawFn) -> str:
    """A transition of one to three factors, and writes, in one of several ways of writing it."""
    factors, rank = [], 0
    for _ in range(draw_from(st.integers(1, 3))):
        gate = draw_from(GATES)
        if rank < 3 and draw_from(st.booleans()):
            erase = f"{draw_from(SCALARS)}{draw_from(KEYS)} {draw_from(KEYS)}ᵀ"
            gate = f"({gate} - {erase})"
            rank += 1
        factors.append(gate)
    state = "S_{t-1}"
    if draw_from(st.booleans()):
        state = f"(S_{{t-1}}ᵀ {factors.pop()})ᵀ" if factors[-1].count("ᵀ") == 0 else state
    update = " ".join([*factors, state])
    writes = draw_from(st.lists(st.tuples(SCALARS, KEYS, VALUES), min_size=1, max_size=2))
    for scalar, key, value in writes:
        update += f" + {scalar}{key} {value}ᵀ"
    match draw_from(st.integers(0, 3)):
        case 0 if rank < 3:
            update += f" + {draw_from(KEYS)} (v_t - {draw_from(SCALARS)}S_{{t-1}}ᵀ {draw_from(KEYS)})ᵀ"
        case 1 if rank < 2:
            update += " + x_tᵀ diag(z_t) (y_t - x_t S_{t-1})"
        case _:
            pass
    return f"S_t = {update}"


OUTPUTS = st.sampled_from(
    [
        "S_tᵀ q_t",
        "c S_tᵀ (q_t - beta_t k_t)",
        "(S_{t-1} + diag(u) k_t v_tᵀ)ᵀ q_t",
        "w_t ⊙ (S_tᵀ q_t) + v_t - S_{t-1}ᵀ p_t",
        "(diag(exp(h_t)) S_{t-1})ᵀ q_t",
        "exp(g_t) S_{t-1}ᵀ q_t + S_tᵀ k_t / (1 + q_tᵀ q_t)",
        "S_tᵀ (I - k_t k_tᵀ) q_t",
    ]
)


@settings(max_examples=150, deadline=None)
@given(updates(), OUTPUTS)
def test_any_update_of_the_class_has_a_form_with_the_same_values(update: str, output: str) -> None:
    spec = parse(f"{HEADER}{update}\no_t = {output}\n")
    try:
        canonical = canonicalise(spec)
    except DslError as err:
        assert {m.code for m in err.mistakes} == {"E955"}  # noqa: PT017 - more than four erases
        return
    tensors = draw(spec, B=1, T=4, H=2, K=4, V=3, dtype=torch.float64, seed=7)
    start = torch.randn(1, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    o, last = run_form(canonical, tensors, start)
    expected, end = reference(spec, tensors, initial_state=start, output_final_state=True)
    scale = end.abs().max().item() + 1
    torch.testing.assert_close(last, end, rtol=1e-10, atol=1e-12 * scale)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-11 * scale)
    rec = canonical.recurrences[0]
    assert rec.r <= rec.m


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_products_of_factors_add_their_ranks(count: int) -> None:
    factors = " ".join(f"(I - beta_{{t,{i}}} k_{{t,{i}}} k_{{t,{i}}}ᵀ)" for i in range(1, count + 1))
    text = (
        f"recurrence product\ninput q : [K]\ninput k : [{count + 1}, K] unit\ninput v : [V]\n"
        f"input beta : [{count + 1}] in (0, 2)\nS_t = {factors} S_{{t-1}} + k_{{t,1}} v_tᵀ\no_t = S_tᵀ q_t\n"
    )
    rec = canonicalise(parse(text)).recurrences[0]
    assert (rec.m, rec.r) == (count, count)
