from __future__ import annotations

from fractions import Fraction

import pytest

from linalg_dsl.algebra.expr import (
    ONE,
    SCALAR,
    Expr,
    Identity,
    Symbol,
    add,
    call,
    diag,
    divide,
    hadamard,
    mul,
    negate,
    number,
    transpose,
)
from linalg_dsl.algebra.factors import split_number, total
from linalg_dsl.algebra.rules import Word, distribute, gather_diagonals
from linalg_dsl.algebra.traverse import commutative_key, mentions, rebuild, symbols, transform
from linalg_dsl.errors import DslError

S = Symbol("S", ("K", "V"), -1)
k, p, f = (Symbol(n, ("K", 1)) for n in "kpf")
v, w = (Symbol(n, ("V", 1)) for n in "vw")
beta, alpha = (Symbol(n, SCALAR) for n in ("beta", "alpha"))
EYE = Identity("K")


def opened(expr: Expr) -> bool:
    return mentions(expr, lambda s: s.name == "S")


def test_gather_diagonals_makes_one_diagonal_and_keeps_the_rest() -> None:
    rank_one = negate(mul((k, transpose(k))))
    assert gather_diagonals(add((EYE, rank_one, negate(diag(f))))) == (diag(add((ONE, negate(f)))), rank_one)


def test_gather_diagonals_of_identities_is_a_multiple_of_the_identity() -> None:
    assert gather_diagonals(add((EYE, mul((beta, EYE))))) == (mul((add((ONE, beta)), EYE)),)


def test_gather_diagonals_multiplies_diagonal_factors() -> None:
    product = mul((alpha, diag(f), diag(p)))
    assert gather_diagonals(add((product, EYE))) == (diag(add((mul((alpha, hadamard((f, p)))), ONE))),)


def test_distribute_spreads_over_the_state_and_nothing_else() -> None:
    gate = add((ONE, negate(beta)))
    update = add(
        (mul((gate, add((EYE, negate(mul((k, transpose(k)))))), S)), mul((add((k, p)), transpose(v))))
    )
    assert distribute(update, opened) == (
        Word(Fraction(1), (gate,), (EYE, S)),
        Word(Fraction(-1), (gate,), (k, transpose(k), S)),
        Word(Fraction(1), (), (add((k, p)), transpose(v))),
    )


def test_distribute_gathers_the_terms_that_do_not_read_the_state() -> None:
    residual = add((v, negate(mul((transpose(S), k))), negate(w)))
    words = distribute(residual, opened)
    assert [x.chain for x in words] == [(transpose(S), k), (add((v, negate(w))),)]


def test_distribute_turns_elementwise_products_into_diagonals() -> None:
    (column,) = distribute(hadamard((w, mul((transpose(S), k)))), opened)
    assert column.chain == (diag(w), transpose(S), k)
    (row,) = distribute(hadamard((transpose(w), mul((transpose(k), S)))), opened)
    assert row.chain == (transpose(k), S, diag(w))


def test_distribute_turns_a_product_with_an_outer_one_into_two_diagonals() -> None:
    (word,) = distribute(hadamard((mul((f, transpose(w))), S)), opened)
    assert word.chain == (diag(f), S, diag(w))


def test_distribute_divides_by_scalars_and_vectors() -> None:
    (scalar,) = distribute(divide(S, beta), opened)
    assert scalar.scalars == (divide(ONE, beta),)
    (vector,) = distribute(divide(mul((transpose(S), k)), w), opened)
    assert vector.chain[1:] == (transpose(S), k)
    assert vector.chain[0].shape == ("V", "V")


@pytest.mark.parametrize(
    "expr",
    [
        call("exp", (S,)),
        hadamard((S, S)),
        divide(v, mul((transpose(S), k))),
        diag(mul((transpose(S), k))),
        add((S, ONE)),
    ],
)
def test_distribute_refuses_what_is_not_linear(expr: Expr) -> None:
    with pytest.raises(DslError):
        distribute(expr, opened)


def test_total_counts_equal_terms_whatever_the_order_of_their_factors() -> None:
    assert total((mul((alpha, beta)), mul((beta, alpha)))) == mul((number(2), alpha, beta))
    assert total((hadamard((k, p)), negate(hadamard((p, k))))) == number(0)
    assert total((add((k, p)), k)) == add((mul((number(2), k)), p))


def test_split_number() -> None:
    assert split_number(mul((number(-2), k))) == (Fraction(-2), k)
    assert split_number(k) == (Fraction(1), k)
    assert split_number(number(3)) == (Fraction(3), ONE)


def test_commutative_key_knows_which_products_commute() -> None:
    assert commutative_key(mul((alpha, beta, k))) == commutative_key(mul((beta, k, alpha)))
    assert commutative_key(call("dot", (k, p))) == commutative_key(call("dot", (p, k)))
    assert commutative_key(mul((k, transpose(p)))) != commutative_key(mul((p, transpose(k))))
    assert commutative_key(divide(alpha, beta)) != commutative_key(divide(beta, alpha))


def test_transform_rebuilds_only_what_changed() -> None:
    expr = add((mul((beta, k)), hadamard((p, f))))
    changed = transform(expr, lambda e: alpha if e == beta else e)
    assert changed == add((mul((alpha, k)), hadamard((p, f))))
    assert changed.children[1] is expr.children[1]
    assert transform(expr, lambda e: e) is expr


@pytest.mark.parametrize(
    "expr",
    [
        add((k, p)), mul((beta, k)), hadamard((k, p)), divide(k, beta), transpose(k), diag(k),
        call("exp", (k,)), number(2), EYE, call("sqrt", (beta,)),
    ],
)  # fmt: skip
def test_rebuild_gives_back_every_node(expr: Expr) -> None:
    assert rebuild(expr, expr.children) == expr


def test_symbols_come_once_in_order() -> None:
    assert symbols(add((mul((beta, k)), k, p))) == [beta, k, p]
