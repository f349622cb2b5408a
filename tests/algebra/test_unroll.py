"""Substeps written out one after the other."""

from fractions import Fraction

import pytest

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.traverse import commutative_key, scalars_first, symbols
from linalg_dsl.algebra.unroll import unroll
from linalg_dsl.errors import DslError
from linalg_dsl.language.printer import show_expr

KV = ("K", "V")
PAST, NOW = ex.Symbol("S", KV, -1), ex.Symbol("S", KV)
KEY = ex.Symbol("k", ("K", 1), 0, "j")
VALUE = ex.Symbol("v", ("V", 1), 0, "j")
COUNT = ex.Symbol("n", ex.SCALAR, None)


def test_every_step_takes_the_one_before_and_its_own_rows() -> None:
    body = ex.add((NOW, ex.outer(KEY, VALUE)))
    loop = ex.iterate("S", "j", ex.number(3), ex.mul((ex.number(2), PAST)), body)
    assert loop.shape == KV
    assert show_expr(unroll(loop, {})) == "2 S_{t-1} + k_{t,1} v_{t,1}ᵀ + k_{t,2} v_{t,2}ᵀ + k_{t,3} v_{t,3}ᵀ"


def test_the_count_may_be_a_const() -> None:
    loop = ex.iterate("S", "j", COUNT, PAST, ex.mul((ex.outer(KEY, KEY), NOW)))
    assert show_expr(unroll(loop, {"n": Fraction(2)})) == "k_{t,2} k_{t,2}ᵀ k_{t,1} k_{t,1}ᵀ S_{t-1}"


def test_loops_follow_each_other_and_stand_in_expressions() -> None:
    first = ex.iterate("S", "j", ex.number(2), PAST, ex.add((NOW, ex.outer(KEY, VALUE))))
    second = ex.iterate("S", "j", ex.number(2), first, ex.mul((ex.number(3), NOW)))
    found = unroll(ex.negate(second), {})
    assert show_expr(found) == "-9 (S_{t-1} + k_{t,1} v_{t,1}ᵀ + k_{t,2} v_{t,2}ᵀ)"


@pytest.mark.parametrize("count", [Fraction(1, 2), Fraction(0), Fraction(-1), Fraction(65)])
def test_a_count_that_is_none_is_refused(count: Fraction) -> None:
    loop = ex.iterate("S", "j", COUNT, PAST, NOW)
    for consts in ({"n": count}, {}):
        with pytest.raises(DslError, match="E961"):
            unroll(loop, consts)


def test_substeps_that_explode_are_refused() -> None:
    body = ex.add((NOW, ex.mul((ex.outer(KEY, KEY), NOW))))
    with pytest.raises(DslError, match="E107"):
        unroll(ex.iterate("S", "j", ex.number(40), PAST, body), {})


def test_a_substep_keeps_the_shape() -> None:
    with pytest.raises(ex.ShapeError):
        ex.iterate("S", "j", COUNT, PAST, KEY)


def test_loops_are_compared_by_state_index_and_parts() -> None:
    def loop(name: str, factor: int) -> ex.Expr:
        running = ex.Symbol(name, KV)
        return ex.iterate(name, "j", COUNT, ex.Symbol(name, KV, -1), ex.mul((ex.number(factor), running)))

    assert commutative_key(loop("S", 2)) == commutative_key(loop("S", 2))
    assert len({commutative_key(loop(n, f)) for n in "SR" for f in (2, 3)}) == 4
    assert scalars_first(loop("S", 2)) == loop("S", 2)
    assert {s.name for s in symbols(loop("S", 2))} == {"n", "S"}
