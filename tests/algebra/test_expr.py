"""The constructors keep values, shapes and the stated invariants."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Expr, Number, Shape, ShapeError
from linalg_dsl.testing.strategies_exprs import K1, KK, KV, V1, expressions

SIZES = {"K": 3, "V": 2}
SHAPES = [ex.SCALAR, K1, V1, KK, KV, (1, "K"), ("V", "K")]
LIMITS = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

q, k = ex.Symbol("q", K1), ex.Symbol("k", K1)
v = ex.Symbol("v", V1)
a, b = ex.Symbol("a", ex.SCALAR), ex.Symbol("b", ex.SCALAR)
S = ex.Symbol("S", KV, -1)


def size(dim: ex.Dim) -> int:
    return dim if isinstance(dim, int) else SIZES[dim]


def leaf(symbol: ex.Symbol) -> Tensor:
    """Positive numbers, fixed for each symbol."""
    if symbol.name in SIZES:
        return torch.tensor([[float(SIZES[symbol.name])]], dtype=torch.float64)
    seed = sum(map(ord, repr((symbol.name, symbol.time, symbol.row))))
    generator = torch.Generator().manual_seed(seed)
    rows, cols = map(size, symbol.dims)
    return 0.5 + torch.rand(rows, cols, dtype=torch.float64, generator=generator)


def evaluate(expr: Expr) -> Tensor:
    """The matrix that an expression stands for, straight from the meaning of the nodes."""
    rows, cols = map(size, expr.shape)
    match expr:
        case Number(value):
            return torch.tensor([[float(value)]], dtype=torch.float64)
        case ex.Symbol():
            return leaf(expr)
        case ex.Identity():
            return torch.eye(rows, dtype=torch.float64)
        case ex.Sum(terms):
            return sum(
                (evaluate(t).expand(rows, cols) for t in terms), torch.zeros(rows, cols, dtype=torch.float64)
            )
        case ex.Product(factors):
            out = evaluate(factors[0])
            for factor in factors[1:]:
                right = evaluate(factor)
                out = out * right if 1 in (out.numel(), right.numel()) else out @ right
            return out
        case ex.Hadamard(factors):
            return torch.stack([evaluate(f) for f in factors]).prod(0)
        case ex.Quotient(above, below):
            return evaluate(above) / evaluate(below)
        case ex.Power(base, exponent):
            return evaluate(base) ** evaluate(exponent)
        case ex.Transpose(arg):
            return evaluate(arg).T
        case ex.Diag(arg):
            return torch.diag(evaluate(arg)[:, 0])
        case ex.Call(function, args):
            values = [evaluate(x) for x in args]
            match function:
                case "min":
                    return torch.minimum(*values).expand(rows, cols)
                case "clamp":
                    return torch.minimum(torch.maximum(values[0], values[1]), values[2]).expand(rows, cols)
                case "l2norm":
                    return values[0] / (values[0].square().sum() + 1e-6).sqrt()
                case "sum":
                    return values[0].sum().reshape(1, 1)
                case "softplus":
                    return torch.nn.functional.softplus(values[0])
                case _:
                    return torch.as_tensor(getattr(torch, function)(values[0]))
        case _:
            raise AssertionError(expr)


def same(found: Expr, wanted: Tensor) -> bool:
    """Equal up to rounding, or not finite at the same places."""
    value = evaluate(found)
    wanted = wanted.expand(*map(size, found.shape))
    finite = wanted.isfinite() & value.isfinite()
    scale = 1 + wanted[finite].abs().max() if finite.any() else 1
    close = (value - wanted)[finite].abs() <= 1e-9 * scale
    return bool(close.all()) and bool((value.isfinite() == wanted.isfinite()).all() or scale > 1e12)


def pair(shape: Shape) -> st.SearchStrategy[tuple[Expr, Expr]]:
    return st.tuples(expressions(shape, 2), expressions(shape, 2))


def check(expr: Expr) -> None:
    """The invariants that the module states."""
    match expr:
        case ex.Sum(terms):
            assert len(terms) >= 2
            assert not any(isinstance(t, ex.Sum) for t in terms)
            assert len({t.shape for t in terms if not t.is_scalar}) <= 1
            if ex.is_square(expr.shape):
                assert not any(t.is_scalar for t in terms)
            assert sum(isinstance(t, Number) for t in terms) <= 1
        case ex.Product(factors):
            assert len(factors) >= 2
            assert not any(isinstance(f, ex.Product) for f in factors)
            assert not any(isinstance(f, Number) for f in factors[1:])
            assert factors[0] != ex.ONE
        case ex.Hadamard(factors):
            assert len(factors) >= 2
            assert not any(isinstance(f, ex.Hadamard) for f in factors)
            assert {f.shape for f in factors} == {expr.shape}
        case ex.Quotient(_, below):
            assert not isinstance(below, Number)
            assert below.is_scalar or below.shape == expr.shape
        case ex.Transpose(arg):
            assert isinstance(arg, ex.Symbol | ex.Call | ex.Power | ex.Quotient)
            assert not arg.is_scalar
    for child in expr.children:
        check(child)


@LIMITS
@given(st.sampled_from(SHAPES).flatmap(lambda s: expressions(s, 3)))
def test_invariants(expr: Expr) -> None:
    check(expr)
    check(ex.transpose(expr))
    check(ex.negate(expr))
    assert tuple(evaluate(expr).shape) == tuple(map(size, expr.shape))


@LIMITS
@given(st.sampled_from(SHAPES).flatmap(pair))
def test_sums_keep_values(pair: tuple[Expr, Expr]) -> None:
    x, y = pair
    assert same(ex.add(pair), evaluate(x) + evaluate(y))
    assert same(ex.add((x, ex.negate(y))), evaluate(x) - evaluate(y))


@LIMITS
@given(st.sampled_from(SHAPES).flatmap(lambda s: st.tuples(expressions(s, 2), expressions(ex.SCALAR, 2))))
def test_a_scalar_beside_a_square_matrix_is_a_multiple_of_the_identity(pair: tuple[Expr, Expr]) -> None:
    x, scalar = pair
    added = evaluate(scalar) * (torch.eye(3, dtype=torch.float64) if ex.is_square(x.shape) else 1)
    assert same(ex.add((x, scalar)), evaluate(x) + added)
    assert same(ex.mul((x, scalar)), evaluate(x) * evaluate(scalar))
    assert same(ex.mul((scalar, x)), evaluate(x) * evaluate(scalar))


@LIMITS
@given(
    st.sampled_from(
        [(KK, KV, ("V", "K")), (K1, (1, "K"), KV), ((1, "K"), K1, KV), (KV, V1, (1, "K"))]
    ).flatmap(lambda shapes: st.tuples(*(expressions(s, 2) for s in shapes)))
)
def test_products_keep_values_however_they_are_grouped(three: tuple[Expr, Expr, Expr]) -> None:
    def times(x: Tensor, y: Tensor) -> Tensor:
        return x * y if 1 in (x.numel(), y.numel()) else x @ y

    x, y, z = three
    wanted = times(times(evaluate(x), evaluate(y)), evaluate(z))
    left = ex.mul((ex.mul((x, y)), z))
    flat = ex.mul(three)
    for found in (flat, left, ex.transpose(ex.transpose(flat))):
        check(found)
        assert same(found, wanted)
    if x.shape[1] == y.shape[0] and y.shape[1] == z.shape[0]:
        assert same(ex.mul((x, ex.mul((y, z)))), wanted)
    assert same(ex.transpose(flat), wanted.T)


@LIMITS
@given(st.sampled_from([K1, V1, KV, ("V", "K")]).flatmap(pair))
def test_elementwise_products_keep_values(pair: tuple[Expr, Expr]) -> None:
    x, y = pair
    assert same(ex.hadamard(pair), evaluate(x) * evaluate(y))
    check(ex.hadamard(pair))


@LIMITS
@given(st.sampled_from(SHAPES).flatmap(lambda s: st.tuples(expressions(s, 2), expressions(ex.SCALAR, 2))))
def test_quotients_keep_values(pair: tuple[Expr, Expr]) -> None:
    above, below = pair
    try:
        quotient = ex.divide(above, below)
    except ZeroDivisionError:
        assert evaluate(below).item() == 0
        return
    check(quotient)
    assert same(quotient, evaluate(above) / evaluate(below))


def test_a_scalar_group_that_would_not_conform_stands_first() -> None:
    inner = ex.mul((ex.transpose(k), q))
    assert ex.mul((S, inner)) == ex.Product((ex.transpose(k), q, S))
    assert ex.mul((ex.transpose(k), ex.mul((inner, S)))) == ex.Product(
        (ex.transpose(k), q, ex.transpose(k), S)
    )
    assert ex.mul((q, inner, ex.transpose(v))) == ex.Product((q, ex.transpose(k), q, ex.transpose(v)))


def test_numbers_are_folded() -> None:
    two, half = ex.number(2), ex.number(0.5)
    assert ex.mul((two, a, half, b)) == ex.Product((a, b))
    assert ex.mul((two, half)) == ex.ONE
    assert ex.add((two, a, half)) == ex.Sum((Number(Fraction(5, 2)), a))
    assert ex.add((a, two, ex.number(-2))) == a
    assert ex.add((two, ex.number(-2))) == ex.ZERO
    assert ex.divide(ex.mul((two, a)), ex.mul((half, b))) == ex.Product((ex.number(4), ex.Quotient(a, b)))
    assert ex.divide(a, a) != ex.ONE
    assert ex.power(two, ex.number(-2)) == Number(Fraction(1, 4))
    assert ex.power(a, ex.ONE) == a
    assert ex.hadamard((ex.mul((two, q)), ex.negate(k))) == ex.mul((ex.number(-2), ex.Hadamard((q, k))))


def test_multiples_of_the_identity_are_folded() -> None:
    unit, matrix = ex.Identity("K"), ex.outer(k, k)
    assert ex.add((unit, matrix, ex.ONE)) == ex.Sum((ex.mul((ex.number(2), unit)), matrix))
    assert ex.add((unit, matrix, ex.negate(unit))) == matrix
    assert ex.add((unit, ex.negate(unit))).shape == KK


def test_a_negated_sum_is_a_sum_of_negated_terms() -> None:
    assert ex.negate(ex.add((a, b))) == ex.Sum((ex.negate(a), ex.negate(b)))
    assert ex.mul((ex.number(-1), ex.add((a, b)))) == ex.negate(ex.add((a, b)))
    assert ex.negate(ex.negate(ex.add((a, b)))) == ex.add((a, b))


@given(st.floats(min_value=-1e20, max_value=1e20))
def test_a_float_becomes_a_fraction_that_rounds_to_it(value: float) -> None:
    assert float(ex.number(value).value) == value


@pytest.mark.parametrize(
    ("value", "fraction"),
    [
        (0.1, Fraction(1, 10)),
        (1 / 3, Fraction(1, 3)),
        (1e-7, Fraction(1, 10**7)),
        (0.5, Fraction(1, 2)),
        (3, Fraction(3)),
    ],
)
def test_a_float_becomes_the_simplest_such_fraction(value: float, fraction: Fraction) -> None:
    assert ex.number(value).value == fraction


@pytest.mark.parametrize(
    "make",
    [
        lambda: ex.add((q, v)),
        lambda: ex.add((q, ex.transpose(q))),
        lambda: ex.mul((q, v)),
        lambda: ex.mul((S, S)),
        lambda: ex.hadamard((q, v)),
        lambda: ex.hadamard((q, S)),
        lambda: ex.divide(q, v),
        lambda: ex.divide(a, q),
        lambda: ex.power(a, q),
        lambda: ex.power(ex.outer(k, k), ex.number(2)),
        lambda: ex.diag(a),
        lambda: ex.diag(ex.transpose(q)),
        lambda: ex.outer(q, ex.transpose(v)),
        lambda: ex.call("min", (q, v)),
        lambda: ex.call("exp", (a, b)),
        lambda: ex.call("exp", (ex.outer(k, k),)),
        lambda: ex.call("l2norm", (a,)),
        lambda: ex.call("sum", (ex.transpose(q),)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(make: object) -> None:
    with pytest.raises(ShapeError):
        make()  # type: ignore[operator]


def test_places_take_no_part_in_equality() -> None:
    from linalg_dsl.source import Span

    assert ex.with_span(q, Span("q_t", 0, 3, 1, 1)) == q
    assert hash(ex.with_span(q, Span("q_t", 0, 3, 1, 1))) == hash(q)


def test_shapes_read_as_they_are_declared() -> None:
    shown = [ex.show_shape(s) for s in (ex.SCALAR, K1, (1, "K"), KV, ("n", "K"))]
    assert shown == ["a scalar", "[K]", "[K]ᵀ", "[K, V]", "[n, K]"]
