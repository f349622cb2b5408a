"""Symbols that stand for the values of a Python function and record what is done with them."""

from __future__ import annotations

import linecache
import math
import sys
from fractions import Fraction
from itertools import islice
from numbers import Real
from types import CodeType, FrameType
from typing import NoReturn

from linalg_dsl.algebra.expr import number
from linalg_dsl.errors import DslError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.lines import Source
from linalg_dsl.language.substeps import SubstepIndex
from linalg_dsl.source import Span

_OWN = __name__.rpartition(".")[0]
"""Frames of this package are skipped when a place in the user's function is looked for."""


class Traced:
    """An expression under construction. ``@`` is the matrix product; ``*`` scales, or is elementwise
    between equal shapes; ``.T`` transposes; ``k[j]`` is row j (from 0, or of a substep) of an input
    ``Vectors(n, K)``.
    """

    __slots__ = ("node",)
    __array_ufunc__ = None

    def __init__(self, node: syn.Node) -> None:
        self.node = node

    @property
    def T(self) -> Traced:
        return Traced(syn.Transposed(self.node, place()))

    def __getitem__(self, row: int | SubstepIndex) -> Traced:
        node = self.node
        if not isinstance(node, syn.Ref) or (node.index is not None and node.index.row is not None):
            raise DslError.single("E307", "only inputs and params have rows to pick", place())
        time = None if node.index is None else node.index.time
        if isinstance(row, SubstepIndex):
            if not row.loop.is_open:
                raise DslError.single("E307", "the loop of this index has ended", place())
            return Traced(syn.Ref(node.name, syn.Index(time, syn.INDEX), place()))
        if isinstance(row, bool) or not isinstance(row, int) or row < 0:
            hint = "rows are counted from 0: k[0], k[1]"
            raise DslError.single("E307", f"`{node.name}[{row!r}]` picks no row", place(), hint)
        return Traced(syn.Ref(node.name, syn.Index(time, row + 1), place()))

    def __neg__(self) -> Traced:
        return Traced(syn.Minus(self.node, place()))

    def __pos__(self) -> Traced:
        return self

    def __add__(self, other: Operand) -> Traced:
        return _total(self, other)

    def __radd__(self, other: Operand) -> Traced:
        return _total(other, self)

    def __sub__(self, other: Operand) -> Traced:
        return _total(self, other, minus=True)

    def __rsub__(self, other: Operand) -> Traced:
        return _total(other, self, minus=True)

    def __mul__(self, other: Operand) -> Traced:
        return _chain(self, "times", other)

    def __rmul__(self, other: Operand) -> Traced:
        return _chain(other, "times", self)

    def __matmul__(self, other: Operand) -> Traced:
        return _chain(self, "", other)

    def __rmatmul__(self, other: Operand) -> Traced:
        return _chain(other, "", self)

    def __truediv__(self, other: Operand) -> Traced:
        return _chain(self, "/", other)

    def __rtruediv__(self, other: Operand) -> Traced:
        return _chain(other, "/", self)

    def __pow__(self, other: Operand) -> Traced:
        exponent = lift(other)
        return NotImplemented if exponent is None else Traced(syn.Raised(self.node, exponent, place()))

    def __rpow__(self, other: Operand) -> Traced:
        base = lift(other)
        return NotImplemented if base is None else Traced(syn.Raised(base, self.node, place()))

    def __repr__(self) -> str:
        match self.node:
            case syn.Ref(name, _):
                return f"<symbol {name}>"
            case _:
                return "<expression of symbols>"

    # A symbol has no value: whatever asks for one is a mistake in the function.
    def _no_value(self, *_: object) -> NoReturn:
        hint = "write conditions as arithmetic: max, min, clamp, relu, sign"
        raise DslError.single("E412", "a symbol has no value while the function is traced", place(), hint)

    __hash__ = object.__hash__
    __bool__ = __float__ = __int__ = __index__ = __iter__ = __len__ = _no_value
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _no_value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _no_value


Operand = Traced | int | float | Fraction


def lift(value: object) -> syn.Node | None:
    """The node of an operand; None if it is neither traced nor a number."""
    if isinstance(value, Traced):
        return value.node
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, int | Fraction):
        exact = Fraction(value)
    elif math.isfinite(float(value)):
        exact = number(float(value)).value
    else:
        raise DslError.single("E105", f"{value} is no number of a recurrence", place())
    if exact and not Fraction(1, 10**60) <= abs(exact) <= 10**60:
        raise DslError.single("E105", "a number out of bounds (1e-60 to 1e60)", place())
    return syn.Num(exact, place())


def apply(function: str, *args: Operand) -> Traced:
    """``function(args)`` as an expression; TypeError for an argument that is neither symbol nor number."""
    nodes = [lift(a) for a in args]
    for node, arg in zip(nodes, args, strict=True):
        if node is None:
            raise TypeError(f"{function} takes symbols and numbers, got {type(arg).__name__}")
    return Traced(syn.Apply(function, tuple(n for n in nodes if n is not None), place()))


def _total(left: Operand, right: Operand, minus: bool = False) -> Traced:
    first, second = lift(left), lift(right)
    if first is None or second is None:
        return NotImplemented  # type: ignore[no-any-return]
    if minus:
        second = syn.Minus(second, second.span)
    return Traced(syn.Total((first, second), place()))


def _chain(left: Operand, sign: syn.ProductSign, right: Operand) -> Traced:
    first, second = lift(left), lift(right)
    if first is None or second is None:
        return NotImplemented  # type: ignore[no-any-return]
    return Traced(syn.Chain(first, ((sign, second),), place()))


# -- where in the function --------------------------------------------------------------------
def place() -> Span | None:
    """What the user's code is executing, if its source can be read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_own(frame):
        frame = frame.f_back
    if frame is None:
        return None
    return _span(frame.f_code, frame.f_lasti, frame.f_lineno)


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_OWN + ".")


def _span(code: CodeType, instruction: int, line: int) -> Span | None:
    source = _source(code.co_filename)
    if source is None:
        return None
    if hasattr(code, "co_positions"):
        found = next(islice(code.co_positions(), instruction // 2, None), None)
        if found and None not in found:
            first, last, start, end = (x or 0 for x in found)
            return source.between(first, start, last, end)
    return source.whole_line(line)


def whole_function(function: object) -> Span | None:
    """The line where a function is defined."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    source = _source(code.co_filename)
    if source is None:
        return None
    first: int = code.co_firstlineno
    while first < len(source.lines) and source.lines[first - 1].lstrip().startswith("@"):
        first += 1
    return source.whole_line(first)


class _File(Source):
    """A source file whose columns are given in bytes, as Python does."""

    def __init__(self, lines: list[str], origin: str) -> None:
        super().__init__("".join(lines), origin)
        self.lines = lines

    def _offset(self, line: int, column: int) -> int:
        before = self.lines[line - 1].encode("utf-8")[:column]
        return self.line_start(line) + len(before.decode("utf-8", "ignore"))

    def between(self, line: int, column: int, last_line: int, last_column: int) -> Span | None:
        if not 1 <= line <= last_line <= len(self.lines):
            return None
        return self.span(self._offset(line, column), self._offset(last_line, last_column))

    def whole_line(self, line: int) -> Span | None:
        if not 1 <= line <= len(self.lines):
            return None
        text = self.lines[line - 1]
        start = self.line_start(line)
        return self.span(start + len(text) - len(text.lstrip()), start + len(text.rstrip()))


_files: dict[str, _File] = {}


def _source(filename: str) -> _File | None:
    lines = linecache.getlines(filename)
    if not lines:
        return None
    known = _files.get(filename)
    if known is None or known.lines is not lines:
        known = _files[filename] = _File(lines, filename)
    return known
