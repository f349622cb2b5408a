"""What each declared input is to a layer, read off the declaration and the equations.

The choices are those that published layers agree on; ``role_of`` is the table. What the equations add to
the declaration: an input that stands only inside sigmoid, softplus, exp ... is raw (a projection is all it
needs), one that stands only inside elu, relu, silu or softmax has its feature map already, and a vector
[K] that only the output reads is a query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from linalg_dsl.algebra.expr import (
    ELEMENTWISE_FUNCTIONS,
    MULTI_FUNCTIONS,
    Call,
    Expr,
    Number,
    Product,
    Sum,
    Symbol,
)
from linalg_dsl.algebra.traverse import mentions
from linalg_dsl.language.spec import Input, Interval, RecurrenceSpec
from linalg_dsl.nn.links import FREE, Above, Between, Link, Root, link_of

SQUASHES = frozenset(ELEMENTWISE_FUNCTIONS + MULTI_FUNCTIONS) - {"elu", "relu", "silu"}
FEATURE_MAPS = frozenset(("elu", "relu", "silu", "softmax"))
LOW_RANK = 16
"""The rank of the projection that makes a gate per channel, as in gated linear attention."""


@dataclass(frozen=True, slots=True)
class Role:
    """How the default module makes an input.

    ``kind`` is the row of the table in docs/layers.md: vector, query, raw, ranged, step, gate, decay (a
    scalar log gate by Mamba's rule), matrix, or, of params, param. ``conv``: short convolution first;
    ``silu``, ``norm``: then silu, l2norm. ``rank``: low-rank projection. ``bias``: a number per head and
    channel is added before the link.
    """

    kind: str
    link: Link = FREE
    conv: bool = False
    silu: bool = False
    norm: bool = False
    rank: int | None = None
    bias: bool = False


def role_of(spec: RecurrenceSpec, decl: Input) -> Role:
    """The role of one input or param."""
    if not decl.timed:
        return Role("param", _link(decl), bias=True)
    rank = LOW_RANK if decl.dims else None
    if decl.kind == "log_gate" and decl.range.low is None and decl.range.high in (None, 0):
        if not decl.dims:
            return Role("decay", bias=True)
        return Role("gate", Root(), rank=rank, bias=True)
    if decl.kind != "plain":
        return Role("gate", _link(decl), rank=rank, bias=True)
    if decl.range.low is not None or decl.range.high is not None:
        link = link_of(decl.range)
        step = isinstance(link, Above) and inside(spec, decl.name) >= {"exp"}
        return Role("step" if step else "ranged", link, bias=True)
    if len(decl.dims) == 2 and decl.dims[0] in ("K", "V"):
        return Role("matrix")
    around = only_inside(spec, decl.name)
    if not decl.unit and (not _is_vector(decl) or around & SQUASHES):
        return Role("raw", bias=True)
    silu = not around & FEATURE_MAPS
    norm = decl.unit or (is_query(spec, decl) and any(i.unit and "K" in i.dims for i in spec.inputs))
    return Role("query" if is_query(spec, decl) else "vector", conv=True, silu=silu, norm=norm)


def _link(decl: Input) -> Link:
    if decl.kind == "log_gate" and decl.range.low is None and decl.range.high in (None, 0):
        return Root() if decl.timed else link_of(decl.range if decl.range.high == 0 else _at_most_zero())
    if decl.kind == "gate" and decl.range.low is None and decl.range.high is None:
        return Root(linear=True) if decl.timed else Between(0.0, 1.0)
    return link_of(decl.range)


def _at_most_zero() -> Interval:
    return Interval(None, 0.0, True, False)


def _is_vector(decl: Input) -> bool:
    return decl.dims[-1:] in (("K",), ("V",))


def is_query(spec: RecurrenceSpec, decl: Input) -> bool:
    """Whether it is a vector along K that the output reads and no state is updated with."""
    name = decl.name
    updates = any(mentions(e.value, lambda s: s.name == name) for e in spec.updates)
    return decl.dims == ("K",) and not updates


def only_inside(spec: RecurrenceSpec, name: str) -> frozenset[str]:
    """The functions around the input where every use of it stands inside one; else none."""
    found: set[str] = set()
    for around, _ in _uses(spec, name):
        if not around:
            return frozenset()
        found.update(around)
    return frozenset(found)


def inside(spec: RecurrenceSpec, name: str) -> set[str]:
    """Every function inside which the input stands somewhere."""
    return {f for around, _ in _uses(spec, name) for f in around}


def is_added(spec: RecurrenceSpec, name: str) -> bool:
    """Whether the input is a term of its own wherever it stands: ``x + b``, not ``x b``."""
    uses = list(_uses(spec, name))
    return bool(uses) and all(isinstance(parent, Sum) for _, parent in uses)


def _uses(spec: RecurrenceSpec, name: str) -> Iterator[tuple[tuple[str, ...], Expr | None]]:
    """The functions around each use, from the outermost, and the node that it is an operand of."""
    for equation in (*spec.updates, *spec.outputs):
        yield from _below(equation.value, name, (), None)


def _below(
    expr: Expr, name: str, around: tuple[str, ...], parent: Expr | None
) -> Iterator[tuple[tuple[str, ...], Expr | None]]:
    match expr:
        case Symbol():
            if expr.name == name:
                yield around, parent
            return
        case Call(function, _) if function in SQUASHES | FEATURE_MAPS:
            around = (*around, function)
        case Product((Number(), Symbol() as signed)):  # a - b is a + (-1) b
            yield from _below(signed, name, around, parent)
            return
    for child in expr.children:
        yield from _below(child, name, around, expr)


def innermost(spec: RecurrenceSpec, name: str) -> str | None:
    """The function nearest around the input, where every use has one."""
    found = {around[-1] if around else None for around, _ in _uses(spec, name)}
    return min((f for f in found if f is not None), default=None) if None not in found else None


def varies_beside(spec: RecurrenceSpec, name: str) -> bool:
    """Whether an outermost function around the input also holds what changes from token to token."""

    def look(expr: Expr) -> Iterator[Expr]:
        if isinstance(expr, Call) and expr.function in SQUASHES:
            yield expr
            return
        for child in expr.children:
            yield from look(child)

    calls = [c for e in (*spec.updates, *spec.outputs) for c in look(e.value)]
    own = [c for c in calls if mentions(c, lambda s: s.name == name)]
    return any(mentions(c, lambda s: s.time is not None) for c in own)
