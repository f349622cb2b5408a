"""Token expressions in normal form, evaluated with PyTorch (imported at the first use)."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING

from linalg_dsl.algebra.expr import (
    L2NORM_EPS,
    Call,
    Expr,
    Hadamard,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Symbol,
)
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import FLOOR

if TYPE_CHECKING:
    from torch import Tensor


def evaluate(expr: Expr, value_of: Callable[[Symbol], Tensor]) -> Tensor:
    """The value of a scalar [...] or a column [..., D]; symbols give values of these shapes.

    Leading axes are broadcast. Raises InternalError on rows, matrices and inner products written as
    products: those are not in normal form.
    """
    import torch

    def value(e: Expr) -> Tensor:
        match e:
            case Number(number):
                return torch.tensor(float(number), dtype=torch.float64)
            case Symbol():
                return value_of(e)
            case Sum(terms):
                return reduce(torch.add, [_wide(t, e, value(t)) for t in terms])
            case Product(factors) | Hadamard(factors):
                return reduce(torch.mul, [_wide(f, e, value(f)) for f in factors])
            case Quotient(top, bottom):
                return _wide(top, e, value(top)) / _wide(bottom, e, value(bottom))
            case Power(base, Number(exponent)):
                return value(base) ** float(exponent)
            case Power(base, exponent):
                return torch.pow(value(base), _wide(exponent, e, value(exponent)))
            case Call(function, args):
                return _call(
                    function, [value(a) if function == "dot" else _wide(a, e, value(a)) for a in args]
                )
            case _:
                raise InternalError(f"{type(e).__name__} is not in normal form")

    return value(expr)


def _wide(part: Expr, whole: Expr, value: Tensor) -> Tensor:
    """A scalar beside columns gets the axis of the columns; a number without axes broadcasts as it is."""
    return value.unsqueeze(-1) if value.ndim and part.is_scalar and not whole.is_scalar else value


def _call(function: str, args: list[Tensor]) -> Tensor:
    import torch
    import torch.nn.functional as F

    x = args[0]
    match function:
        case "exp" | "log" | "sigmoid" | "tanh" | "sqrt" | "rsqrt" | "abs" | "sign":
            return getattr(torch, function)(x)  # type: ignore[no-any-return]
        case "side":
            return 1 - 2 * (x < 0).to(x.dtype)
        case "log_size":
            return torch.log(x.abs().clamp_min(FLOOR))
        case "logsigmoid":
            return F.logsigmoid(x)
        case "softplus":
            return -F.logsigmoid(-x)  # exact for large x, where torch's own softplus goes over to x
        case "silu" | "relu" | "elu":
            return getattr(F, function)(x)  # type: ignore[no-any-return]
        case "heaviside":
            return torch.heaviside(x, torch.full_like(x, 0.5))
        case "min":
            return torch.minimum(x, args[1])
        case "max":
            return torch.maximum(x, args[1])
        case "clamp":
            return torch.minimum(torch.maximum(x, args[1]), args[2])
        case "sum":
            return x.sum(-1)
        case "dot":
            return (x * args[1]).sum(-1)
        case "l2norm":
            return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)
        case "softmax":
            return torch.softmax(x, -1)
        case _:
            raise InternalError(f"unknown function {function}")
