"""Cuts a text into statements: lines, joined inside brackets, without comments; keeps offsets."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

from linalg_dsl.language.mistakes import Mistakes
from linalg_dsl.source import Span

KEYWORDS = ("recurrence", "input", "param", "const", "state", "output", "for")
DEEPEST_BRACKETS = 40

_STATEMENT = re.compile(
    r"[ \t]*(?:(?:recurrence|input|param|const|state|output|for)[ \t]+[^\W\d_][\w, \t]*(?:$|[:=#\n]| in )"
    r"|[^\W\d_][\w\u0300-\u036f]*(?:_?\{[^{}\n]*\}|_<[^<>\n]*>|\[[^\[\]\n]*\])?[ \t]*=)"
)
_FIRST_WORD = re.compile(r"[^\W\d_]\w*")


@dataclass(frozen=True, slots=True)
class Line:
    """One statement: ``text[start:end]`` may span several physical lines."""

    start: int
    end: int
    indent: int
    keyword: str
    """Its first word if that opens a declaration or a loop, else ``""``."""


class Source:
    """A text that gives out spans."""

    def __init__(self, text: str, origin: str) -> None:
        self.text = text
        self.origin = origin
        self._starts = [0] + [m.end() for m in re.finditer("\n", text)]

    def line_start(self, line: int) -> int:
        """The offset of a line, counted from 1."""
        return self._starts[line - 1]

    def span(self, start: int, end: int) -> Span:
        line = bisect_right(self._starts, start)
        return Span(self.text, start, max(end, start), line, start - self._starts[line - 1] + 1, self.origin)


def cut(source: Source, mistakes: Mistakes) -> list[Line]:
    """All statements whose brackets close; the others are reported and left out."""
    text, lines = source.text, []
    position = 0
    while position < len(text):
        end, fault = _end_of_statement(source, position)
        body = text[position:end]
        bare = re.sub(r"#[^\n]*", "", body)
        if fault is not None:
            mistakes.add(*fault)
        elif bare.strip("\ufeff \t\r\n\f"):
            first = position + len(body) - len(body.lstrip("\ufeff \t\r\n\f"))
            if text[first] == "#":  # a comment line cannot be joined to a statement
                first = end
            indent = first - text.rfind("\n", 0, first) - 1
            lines.append(Line(first, end, indent, _keyword(text, first, end)))
        position = end + 1
    return lines


def _end_of_statement(source: Source, start: int) -> tuple[int, tuple[str, str, Span, str] | None]:
    """Where the statement that begins at ``start`` ends (a newline or the end), and what is wrong."""
    text = source.text
    opened: list[int] = []
    i = start
    while i < len(text):
        c = text[i]
        if c == "#":
            i = text.find("\n", i)
            if i < 0:
                i = len(text)
            continue
        if c == "\n" and (not opened or _STATEMENT.match(text, i + 1)):
            break
        if c in "([{":
            opened.append(i)
            if len(opened) > DEEPEST_BRACKETS:
                message = f"brackets are nested more than {DEEPEST_BRACKETS} deep"
                end = text.find("\n", i)
                fault = ("E107", message, source.span(i, i + 1), "name an inner part in a binding")
                return (len(text) if end < 0 else end), fault
        elif c in ")]}" and opened:
            opened.pop()
        i += 1
    if not opened:
        return i, None
    where = opened[-1]
    message = f"this `{text[where]}` is never closed"
    return i, ("E102", message, source.span(where, where + 1), "close it before the statement ends")


def _keyword(text: str, start: int, end: int) -> str:
    """``state`` in ``state S``, nothing in ``state_t = ...`` and ``state = ...``."""
    found = _FIRST_WORD.match(text, start, end)
    if not found or found.group() not in KEYWORDS:
        return ""
    after = text[found.end() : end].lstrip()
    return "" if after.startswith(("=", "{", "[")) else found.group()
