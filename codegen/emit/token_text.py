"""Expressions of values at one token as PyTorch text.

Every value is a matrix [..., rows, columns] there: a vector is a column, a scalar 1 x 1. So shapes need no
care, elementwise work broadcasts, and an inner product is a sum over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linalg_dsl.algebra.expr import (
    L2NORM_EPS,
    Call,
    Diag,
    Expr,
    Hadamard,
    Identity,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Symbol,
    Transpose,
)
from linalg_dsl.algebra.rules import split_inner_products
from linalg_dsl.errors import InternalError

NameOf = Callable[[Symbol], str]
"""The text of a symbol's value, [..., rows, columns], or of a number."""
_PLAIN = {"silu", "relu", "elu", "logsigmoid"}


def token_text(expr: Expr, name_of: NameOf) -> str:
    """The text of an expression, in parentheses where it is not one term."""
    match expr:
        case Number(value):
            return repr(float(value))
        case Symbol():
            return name_of(expr)
        case Sum(terms):
            return f"({' + '.join(token_text(t, name_of) for t in terms)})"
        case Product(factors):
            return _product(factors, name_of)
        case Hadamard(factors):
            return f"({' * '.join(token_text(f, name_of) for f in factors)})"
        case Quotient(top, bottom):
            return f"({token_text(top, name_of)} / {token_text(bottom, name_of)})"
        case Power(base, exponent):
            return f"({token_text(base, name_of)} ** {token_text(exponent, name_of)})"
        case Transpose(arg):
            return f"{token_text(arg, name_of)}.mT"
        case Diag(arg):
            return f"torch.diag_embed({token_text(arg, name_of)}[..., 0])"
        case Call(function, args):
            return _call(function, args, [token_text(a, name_of) for a in args])
        case _:
            raise InternalError(f"no text for {type(expr).__name__} in a step on tokens")


def _product(factors: Sequence[Expr], name_of: NameOf) -> str:
    scalars, chain = split_inner_products(factors)
    if not chain and len(scalars) == 1 and isinstance(scalars[0], Product):
        return _chain(scalars[0].factors, name_of)
    parts = [token_text(s, name_of) for s in scalars]
    if chain:
        parts.append(_chain(chain, name_of))
    return f"({' * '.join(parts)})" if len(parts) > 1 else parts[0]


def _chain(factors: Sequence[Expr], name_of: NameOf) -> str:
    """A product of matrices, from the right where it ends in a column."""
    kept = [f for f in factors if not isinstance(f, Identity)] or factors[:1]
    if kept[-1].shape[1] == 1:
        text, shape = token_text(kept[-1], name_of), kept[-1].shape
        for left in reversed(kept[:-1]):
            text = _times(left, text, shape[0] == 1, name_of)
            shape = (left.shape[0], shape[1])
        return text
    text, width = token_text(kept[0], name_of), kept[0].shape[1]
    for right in kept[1:]:
        other = token_text(right, name_of)
        if isinstance(right, Diag):
            text = f"({text} * {token_text(right.arg, name_of)}.mT)"
        else:
            text = f"({text} * {other})" if width == 1 else f"({text} @ {other})"
        width = right.shape[1]
    return text


def _times(left: Expr, right: str, scales: bool, name_of: NameOf) -> str:
    """``left`` times a column, which is 1 x 1 where it ``scales``."""
    if isinstance(left, Diag):
        return f"({token_text(left.arg, name_of)} * {right})"
    code = token_text(left, name_of)
    if left.shape[0] == 1:  # an inner product
        column = token_text(left.arg, name_of) if isinstance(left, Transpose) else f"{code}.mT"
        return f"({column} * {right}).sum(-2, keepdim=True)"
    return f"({code} * {right})" if scales else f"({code} @ {right})"


def _call(function: str, exprs: Sequence[Expr], args: Sequence[str]) -> str:
    x = args[0]
    match function:
        case "exp" | "log" | "sigmoid" | "tanh" | "sqrt" | "rsqrt" | "abs" | "sign":
            return f"torch.{function}({x})"
        case "softplus":  # torch's own goes over to x
            return f"(-torch.nn.functional.logsigmoid(-{x}))"
        case _ if function in _PLAIN:
            return f"torch.nn.functional.{function}({x})"
        case "min" | "max":
            return _bound(function, exprs, args)
        case "clamp":
            inner = _bound("max", exprs[:2], args[:2])
            return _bound("min", (exprs[0], exprs[2]), (inner, args[2]))
        case "sum":
            return f"{x}.sum(-2, keepdim=True)"
        case "dot":
            return f"({x} * {args[1]}).sum(-2, keepdim=True)"
        case "l2norm":
            return f"({x} * torch.rsqrt(({x} * {x}).sum(-2, keepdim=True) + {L2NORM_EPS!r}))"
        case "softmax":
            return f"torch.softmax({x}, -2)"
        case _:
            raise InternalError(f"no text for the function {function}")


def _bound(function: str, exprs: Sequence[Expr], args: Sequence[str]) -> str:
    """min and max: ``clamp`` where one of the two is a number."""
    way = "max" if function == "min" else "min"
    for i in (0, 1):
        if _is_number(exprs[i]):
            return f"torch.clamp({args[1 - i]}, {way}={args[i]})"
    return f"torch.{function}imum({args[0]}, {args[1]})"


def _is_number(expr: Expr) -> bool:
    return isinstance(expr, Number) or (isinstance(expr, Symbol) and expr.time is None and expr.is_scalar)
