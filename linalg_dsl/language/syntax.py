"""What both fronts produce: declarations and equations as written, before names mean anything.

Expression nodes know their ``depth`` (nesting) and ``size`` (nodes counted as a tree, shared ones
twice), so that ``resolve`` can refuse what is too large before it walks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from typing import Literal

from linalg_dsl.errors import InternalError
from linalg_dsl.language.spec import Interval
from linalg_dsl.source import Span

_serials = count()


def next_serial() -> int:
    """A number larger than that of every node made so far."""
    return next(_serials)


class Node:
    """Base of the expression nodes; compared by identity, since a Python name may be bound twice."""

    __slots__ = ("depth", "serial", "size", "span")

    def __init__(self, span: Span | None, children: tuple[Node, ...] = ()) -> None:
        self.span = span
        self.serial = next_serial()
        self.depth: int = 1 + max((c.depth for c in children), default=0)
        self.size: int = 1 + sum(c.size for c in children)


class Num(Node):
    __slots__ = ("value",)
    __match_args__ = ("value",)

    def __init__(self, value: Fraction, span: Span | None = None) -> None:
        super().__init__(span)
        self.value = value


@dataclass(frozen=True, slots=True)
class Index:
    """``_t`` is Index(0), ``_{t-1}`` Index(-1), ``_{t,j}`` Index(0, "j"), and of a param ``_{j}`` is
    Index(None, "j"); rows count from 1 in text."""

    time: int | None = 0
    row: int | str | None = None


INDEX = "j"
"""What the index of every loop is called inside a spec, whatever a text calls it."""


class Ref(Node):
    """A name, with the index it carries (``None``: written bare)."""

    __slots__ = ("index", "name")
    __match_args__ = ("name", "index")

    def __init__(self, name: str, index: Index | None, span: Span | None = None) -> None:
        super().__init__(span)
        self.name = name
        self.index = index


ProductSign = Literal["", "*", "/", "⊙", "times"]
"""``""`` is the matrix product however it is spelled (juxtaposition, ``·``, ``@``); ``times`` is
Python's ``*``, which scales or, between equal shapes, is elementwise."""


class Chain(Node):
    """Products on one level, left to right: ``first sign factor sign factor ...``."""

    __slots__ = ("first", "rest")
    __match_args__ = ("first", "rest")

    def __init__(
        self, first: Node, rest: tuple[tuple[ProductSign, Node], ...], span: Span | None = None
    ) -> None:
        super().__init__(span, (first, *(f for _, f in rest)))
        self.first = first
        self.rest = rest


class Total(Node):
    """A sum; subtracted terms stand in a ``Minus``."""

    __slots__ = ("terms",)
    __match_args__ = ("terms",)

    def __init__(self, terms: tuple[Node, ...], span: Span | None = None) -> None:
        super().__init__(span, terms)
        self.terms = terms


class Minus(Node):
    __slots__ = ("arg",)
    __match_args__ = ("arg",)

    def __init__(self, arg: Node, span: Span | None = None) -> None:
        super().__init__(span, (arg,))
        self.arg = arg


class Raised(Node):
    __slots__ = ("base", "exponent")
    __match_args__ = ("base", "exponent")

    def __init__(self, base: Node, exponent: Node, span: Span | None = None) -> None:
        super().__init__(span, (base, exponent))
        self.base = base
        self.exponent = exponent


class Transposed(Node):
    __slots__ = ("arg",)
    __match_args__ = ("arg",)

    def __init__(self, arg: Node, span: Span | None = None) -> None:
        super().__init__(span, (arg,))
        self.arg = arg


class Apply(Node):
    """``function(args)``: diag, outer, or one of ``algebra.expr.FUNCTIONS``."""

    __slots__ = ("args", "function")
    __match_args__ = ("function", "args")

    def __init__(self, function: str, args: tuple[Node, ...], span: Span | None = None) -> None:
        super().__init__(span, args)
        self.function = function
        self.args = args


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Chain(first, rest):
            return (first, *(f for _, f in rest))
        case Total(terms):
            return terms
        case Minus(arg) | Transposed(arg):
            return (arg,)
        case Raised(base, exponent):
            return (base, exponent)
        case Apply(_, args):
            return args
        case Num() | Ref():
            return ()
        case _:
            raise InternalError(f"unknown syntax node {type(node).__name__}")


def head(node: Node) -> tuple[object, ...]:
    """What a node is apart from its children."""
    match node:
        case Num(value):
            return (Num, value)
        case Ref(name, index):
            return (Ref, name, index)
        case Chain(_, rest):
            return (Chain, *(sign for sign, _ in rest))
        case Apply(function, _):
            return (Apply, function)
        case _:
            return (type(node),)


def refs(node: Node) -> Iterator[Ref]:
    """All names in an expression; shared nodes once."""
    todo, seen = [node], {id(node)}
    while todo:
        one = todo.pop()
        if isinstance(one, Ref):
            yield one
        for child in children(one):
            if id(child) not in seen:
                seen.add(id(child))
                todo.append(child)


def rebuild(node: Node, change: Callable[[Node], Node]) -> Node:
    """The same node over changed children; the node itself where none changed."""
    before = children(node)
    after = tuple(change(c) for c in before)
    if all(a is b for a, b in zip(after, before, strict=True)):
        return node
    match node:
        case Chain(_, rest):
            signs = [s for s, _ in rest]
            return Chain(after[0], tuple(zip(signs, after[1:], strict=True)), node.span)
        case Total():
            return Total(after, node.span)
        case Minus():
            return Minus(after[0], node.span)
        case Transposed():
            return Transposed(after[0], node.span)
        case Raised():
            return Raised(after[0], after[1], node.span)
        case Apply(function, _):
            return Apply(function, after, node.span)
        case _:
            raise InternalError(f"{type(node).__name__} has no children to change")


DimName = tuple[str | int, Span | None]


@dataclass(frozen=True, slots=True)
class InputDecl:
    """One name of an ``input`` or ``param`` line; ``dims`` is () for a scalar."""

    name: str
    span: Span | None
    dims: tuple[DimName, ...] = ()
    kind: Literal["plain", "log_gate", "gate"] = "plain"
    range: Interval | None = None
    range_span: Span | None = None
    unit: bool = False
    unit_span: Span | None = None
    timed: bool = True


@dataclass(frozen=True, slots=True)
class ConstDecl:
    name: str
    span: Span | None
    value: Node


@dataclass(frozen=True, slots=True)
class StateDecl:
    """``dims`` is None where the shape is left to the update."""

    name: str
    span: Span | None
    dims: tuple[DimName, ...] | None = None
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputDecl:
    name: str
    span: Span | None


@dataclass(frozen=True, slots=True)
class Assign:
    """``name_t = value``; ``index`` is what stood on the left (``None``: nothing)."""

    name: str
    index: Index | None
    value: Node
    span: Span | None
    """Of the target."""


@dataclass(frozen=True, slots=True)
class Loop:
    """``for variable in low..high:`` with its body."""

    variable: str
    low: int | str
    high: int | str
    body: tuple[Assign, ...]
    span: Span | None


Statement = InputDecl | ConstDecl | StateDecl | OutputDecl | Assign | Loop


@dataclass(frozen=True, slots=True)
class Document:
    name: str
    statements: tuple[Statement, ...]
    doc: str = ""
    span: Span | None = field(default=None, compare=False)
    """Of the name, or of the whole text."""
