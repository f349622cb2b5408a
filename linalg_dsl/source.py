"""Places in a source text, and the excerpt with a caret that points at one."""

from __future__ import annotations

from dataclasses import dataclass
from unicodedata import combining


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of characters of one source text.

    ``line`` and ``column`` are 1-based and belong to ``start``; ``start`` and ``end`` are 0-based
    character offsets into ``text``, and ``origin`` is a file name or ``"<text>"``.
    """

    text: str
    start: int
    end: int
    line: int
    column: int
    origin: str = "<text>"

    def cover(self, other: Span) -> Span:
        """The smallest span that holds both."""
        first = self if self.start <= other.start else other
        return Span(self.text, first.start, max(self.end, other.end), first.line, first.column, self.origin)

    def quoted(self) -> str:
        """The characters themselves, on one line."""
        return " ".join(self.text[self.start : self.end].split())

    def excerpt(self) -> str:
        """The source line, and below it carets under the span."""
        line = self.text.split("\n")[self.line - 1].rstrip("\r")
        column = self.column - 1
        width = max(1, min(self.end - self.start, len(line) - column))
        first = max(0, column - _LONGEST // 2) if len(line) > _LONGEST else 0
        gutter = f"{self.line:>4} | "
        shown = line[first : first + _LONGEST]
        marked = _blank(line[first:column]) + "^" * _cells(
            line[column : min(column + width, first + _LONGEST)]
        )
        return f"{gutter}{shown}\n{' ' * len(gutter)}{marked}"


_LONGEST = 160
"""A longer line is shown in part."""


def _blank(text: str) -> str:
    """As wide as the text: tabs stay, combining marks take no place."""
    return "".join("\t" if c == "\t" else " " for c in text if not combining(c))


def _cells(text: str) -> int:
    return max(1, sum(not combining(c) for c in text))
