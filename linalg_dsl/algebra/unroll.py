"""Substeps written out: every ``Iterate`` becomes one expression, step in step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from linalg_dsl.algebra.expr import Expr, Iterate, Number, Symbol
from linalg_dsl.algebra.traverse import transform, walk
from linalg_dsl.errors import DslError

LARGEST = 20_000
"""Nodes of an expression with its substeps written out."""
MOST_SUBSTEPS = 64


def unroll(expr: Expr, consts: Mapping[str, Fraction]) -> Expr:
    """The expression without ``Iterate``; rows of substeps become numbers, counted from 0.

    Raises DslError where a count is no whole number from 1 to 64, or the result would be too large.
    """

    def change(node: Expr) -> Expr:
        return _written_out(node, consts) if isinstance(node, Iterate) else node

    return transform(expr, change)


def _written_out(loop: Iterate, consts: Mapping[str, Fraction]) -> Expr:
    count = _count(loop, consts)
    sizes = [sum(1 for _ in walk(e)) for e in (loop.start, loop.body)]
    uses = sum(1 for node in walk(loop.body) if _is_running(node, loop))
    size = sizes[0]
    for _ in range(count):
        size = sizes[1] + uses * size
        if size > LARGEST:
            raise DslError.single(
                "E107",
                f"{count} substeps written out have more than {LARGEST} terms",
                loop.span or loop.body.span,
                f"let the update of {loop.name} use {loop.name}_t once",
            )
    value = loop.start
    for step in range(count):
        value = _substep(loop, value, step)
    return value


def _substep(loop: Iterate, before: Expr, step: int) -> Expr:
    def change(node: Expr) -> Expr:
        if _is_running(node, loop):
            return before
        if isinstance(node, Symbol) and node.row == loop.index:
            return replace(node, row=step)
        return node

    return transform(loop.body, change)


def _is_running(node: Expr, loop: Iterate) -> bool:
    return isinstance(node, Symbol) and (node.name, node.time) == (loop.name, 0)


def _count(loop: Iterate, consts: Mapping[str, Fraction]) -> int:
    match loop.count:
        case Number(value):
            count: Fraction | None = value
        case Symbol(name):
            count = consts.get(name)
        case _:
            count = None
    if count is None or count.denominator != 1 or not 1 <= count <= MOST_SUBSTEPS:
        raise DslError.single(
            "E961",
            f"the number of substeps must be a whole number from 1 to {MOST_SUBSTEPS}, "
            f"got {'no value' if count is None else f'{float(count):g}'}",
            loop.span or loop.body.span,
        )
    return int(count)
