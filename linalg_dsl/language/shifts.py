"""Shifts: the value of an expression at the token before."""

from __future__ import annotations

from dataclasses import replace

from linalg_dsl.algebra.expr import Expr, Symbol
from linalg_dsl.algebra.traverse import transform
from linalg_dsl.errors import InternalError


def shifted(expr: Expr) -> Expr:
    """The expression with every input of the token as it was at the token before.

    It holds neither a state nor a shift: both would lie two tokens back (``scope.py`` refuses them).
    """

    def change(node: Expr) -> Expr:
        match node:
            case Symbol(_, _, 0, _):
                return replace(node, time=-1)
            case Symbol(name, _, -1, _):
                raise InternalError(f"{name} is shifted twice")
            case _:
                return node

    return transform(expr, change)
