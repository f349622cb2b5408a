from __future__ import annotations

import math

import pytest
import torch

from linalg_dsl.algebra.expr import (
    ONE,
    SCALAR,
    Call,
    Expr,
    Symbol,
    add,
    call,
    divide,
    hadamard,
    mul,
    negate,
    number,
    power,
)
from linalg_dsl.algebra.to_sympy import VARIABLE, log_form, unary_derivative
from linalg_dsl.algebra.traverse import walk
from linalg_dsl.errors import InternalError
from linalg_dsl.language.printer import show_expr
from linalg_dsl.planner.evaluate_tokens import evaluate
from linalg_dsl.planner.ops import UNARY_FUNCTIONS

g, h, beta = (Symbol(n, SCALAR) for n in ("g", "h", "beta"))
a, f = (Symbol(n, ("K", 1)) for n in "af")


def fn(name: str, x: Expr) -> Expr:
    return call(name, (x,))


LOGS = [
    (fn("exp", g), "g_t"),
    (mul((fn("exp", g), fn("exp", h))), "g_t + h_t"),
    (mul((fn("exp", g), fn("exp", a))), "g_t + a_t"),
    (power(fn("sigmoid", a), number("1/16")), "-1/16 softplus(-a_t)"),
    (fn("sqrt", fn("sigmoid", a)), "-0.5 softplus(-a_t)"),
    (fn("rsqrt", fn("exp", g)), "-0.5 g_t"),
    (divide(fn("exp", g), fn("sigmoid", h)), "g_t + softplus(-h_t)"),
    (hadamard((f, fn("exp", a))), "log(f_t) + a_t"),
    (add((ONE, negate(fn("sigmoid", a)))), "-softplus(a_t)"),
    (divide(ONE, add((ONE, fn("exp", g)))), "-softplus(g_t)"),
    (fn("exp", negate(mul((fn("exp", g), fn("softplus", a))))), "-exp(g_t) softplus(a_t)"),
    (power(f, beta), "beta_t log(f_t)"),
    (f, "log(f_t)"),
    (add((ONE, negate(f))), "log(1 - f_t)"),
    (number(1), "0"),
    (number("0.9"), "log(0.9)"),
    (mul((number("0.5"), fn("exp", g))), "log(0.5) + g_t"),
    (mul((fn("sigmoid", number(2)), fn("exp", g))), "-softplus(-2) + g_t"),
]


@pytest.mark.parametrize(("gate", "expected"), LOGS, ids=[e for _, e in LOGS])
def test_log_form(gate: Expr, expected: str) -> None:
    assert show_expr(log_form(gate)) == expected


@pytest.mark.parametrize(("gate", "expected"), LOGS, ids=[e for _, e in LOGS])
def test_log_form_is_the_logarithm(gate: Expr, expected: str) -> None:
    torch.manual_seed(0)
    values = {
        s: torch.rand(3 if s in (a, f) else (), dtype=torch.float64) * 0.8 + 0.1 for s in (g, h, beta, a, f)
    }
    found = evaluate(log_form(gate), lambda s: values[s])
    torch.testing.assert_close(found, evaluate(gate, lambda s: values[s]).log(), rtol=1e-12, atol=1e-14)


def test_log_of_a_small_sigmoid_does_not_round_to_minus_infinity() -> None:
    log = log_form(power(fn("sigmoid", g), number("1/16")))
    assert evaluate(log, lambda _: torch.tensor(-2000.0)).item() == pytest.approx(-125.0)


def test_log_is_spread_only_over_what_is_positive() -> None:
    square = power(g, number(2))
    assert show_expr(log_form(fn("sqrt", square), positive=lambda _: False)) != "log(g_t)"
    found = evaluate(log_form(fn("sqrt", square), positive=lambda _: False), lambda _: torch.tensor(-3.0))
    assert found.item() == pytest.approx(math.log(3.0))


def test_reductions_are_opaque() -> None:
    gate = fn("exp", negate(call("dot", (a, f))))
    assert log_form(gate) == negate(call("dot", (a, f)))


EXPONENTS = (2.0, 3.0, 0.5, -1.5, 1 / 16)


@pytest.mark.parametrize(
    ("function", "exponent"),
    [*((f, None) for f in UNARY_FUNCTIONS if f != "pow"), *(("pow", e) for e in EXPONENTS)],
)
def test_derivative_against_autograd(function: str, exponent: float | None) -> None:
    positive = function in ("log", "sqrt", "rsqrt", "pow")
    points = [0.3, 1.7, 4.0] if positive else [-3.1, -0.4, 0.3, 2.2]
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    match function:
        case "pow":
            assert exponent is not None
            y = x**exponent
        case "reciprocal":
            y = 1 / x
        case "heaviside" | "sign" | "side":
            y = 0 * x
        case _:
            y = evaluate(Call(function, (VARIABLE,)), lambda _: x)
    (expected,) = torch.autograd.grad(y.sum(), x)
    found = evaluate(unary_derivative(function, exponent), lambda _: x.detach())
    torch.testing.assert_close(found.expand(expected.shape), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("function", ["sigmoid", "logsigmoid", "softplus", "tanh", "silu", "elu"])
def test_derivative_is_finite_far_out(function: str) -> None:
    x = torch.tensor([-1e4, -200.0, 200.0, 1e4], dtype=torch.float32)
    assert evaluate(unary_derivative(function), lambda _: x).isfinite().all()


def test_derivatives_use_only_known_functions() -> None:
    for function in UNARY_FUNCTIONS:
        value = unary_derivative(function, 3.0 if function == "pow" else None)
        for node in walk(value):
            if isinstance(node, Call):
                assert node.function in (*UNARY_FUNCTIONS, "min")
            if isinstance(node, Symbol):
                assert node == VARIABLE


def test_unknown_functions_and_missing_exponents_are_faults() -> None:
    with pytest.raises(InternalError):
        unary_derivative("gamma")
    with pytest.raises(InternalError):
        unary_derivative("pow")
