"""Places in a source text, and the excerpt with a caret that points at one."""

from __future__ import annotations

from dataclasses import dataclass


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
        return Span(
            self.text, first.start, max(self.end, other.end), first.line, first.column, self.origin
        )

    def excerpt(self) -> str:
        """The source line, and below it carets under the span."""
        lines = self.text.splitlines() or [""]
        line = lines[self.line - 1] if self.line <= len(lines) else ""
        width = max(1, min(self.end - self.start, len(line) - self.column + 1))
        gutter = f"{self.line:>4} | "
        return f"{gutter}{line}\n{' ' * (len(gutter) + self.column - 1)}{'^' * width}"
