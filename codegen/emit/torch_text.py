"""Python expressions as text: precedence, axes, and the numbers that fold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from linalg_dsl.planner.ops import Axes, ordered

SUM, PRODUCT, NEGATION, POWER, ATOM = range(5)
"""Precedence of Python's operators; ``*`` and ``@`` share one level and group to the left."""


@dataclass(frozen=True, slots=True)
class Text:
    """A printed expression with its precedence, the axes of its value, and the number it is, if one.

    ``scalar`` says that the value is a Python float.
    """

    code: str
    level: int = ATOM
    axes: Axes = ()
    number: float | None = None
    scalar: bool = False

    def at(self, level: int) -> str:
        """In parentheses where an operator of ``level`` would tear it apart."""
        return self.code if self.level >= level else f"({self.code})"

    def fit(self, axes: Axes, level: int = SUM) -> str:
        """Indexed so that it broadcasts against a value with ``axes``."""
        if self.scalar or self.axes == axes:
            return self.at(level)
        index = [":" if a in self.axes else "None" for a in ordered((*axes, *self.axes))]
        while index and index[0] == ":":
            del index[0]
        return f"{self.at(ATOM)}[..., {', '.join(index)}]" if index else self.at(level)


def number(value: float) -> Text:
    text = repr(value)
    return Text(text, NEGATION if text.startswith("-") else ATOM, (), value, True)


ZERO = number(0.0)


def add(a: Text, b: Text) -> Text:
    if a.number == 0:
        return b
    if b.number == 0:
        return a
    axes = joined(a, b)
    scalar = a.scalar and b.scalar
    if b.code.startswith("-") and b.level == NEGATION:
        inner = Text(b.code[1:], POWER, b.axes, None, b.scalar)
        return Text(f"{a.fit(axes)} - {inner.fit(axes, PRODUCT)}", SUM, axes, None, scalar)
    return Text(f"{a.fit(axes)} + {b.fit(axes, PRODUCT)}", SUM, axes, None, scalar)


def mul(a: Text, b: Text) -> Text:
    for x, y in ((a, b), (b, a)):
        if x.number == 0:
            return x
        if x.number == 1:
            return y
        if x.number == -1:
            return Text(f"-{y.at(POWER)}", NEGATION, y.axes, None, y.scalar)
    axes = joined(a, b)
    code = f"{a.fit(axes, PRODUCT)} * {b.fit(axes, NEGATION)}"
    return Text(code, PRODUCT, axes, None, a.scalar and b.scalar)


def matmul(a: Text, b: Text, axes: Axes) -> Text:
    return Text(f"{a.at(PRODUCT)} @ {b.at(NEGATION)}", PRODUCT, axes)


def transposed(a: Text) -> Text:
    return Text(f"{a.at(ATOM)}.mT", ATOM, (*a.axes[:-2], a.axes[-1], a.axes[-2]))


def renamed(a: Text, axes: Axes) -> Text:
    """The same value with other names of its axes."""
    return Text(a.code, a.level, axes, a.number, a.scalar)


def call(function: str, *args: Text | str, axes: Axes = ()) -> Text:
    return Text(f"{function}({', '.join(a if isinstance(a, str) else a.code for a in args)})", ATOM, axes)


def method(a: Text, name: str, *args: str, axes: Axes | None = None) -> Text:
    return Text(f"{a.at(ATOM)}.{name}({', '.join(args)})", ATOM, a.axes if axes is None else axes)


def joined(a: Text, b: Text) -> Axes:
    return ordered((*a.axes, *b.axes))


def dim(axes: Axes, axis: str) -> int:
    """The position of an axis, from the end."""
    return axes.index(axis) - len(axes)


def total(terms: Iterable[Text]) -> Text:
    found = ZERO
    for term in terms:
        found = add(found, term)
    return found
