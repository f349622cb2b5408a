"""What the commands share: finding a spec, and printing text, tables and errors, or JSON instead."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from linalg_dsl.errors import ArgumentError, DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec


def load_spec(where: str) -> RecurrenceSpec:
    """The spec in a file, of a catalogue name, or on standard input (``-``).

    Raises DslError for a text with mistakes, ArgumentError where there is nothing to read.
    """
    from linalg_dsl.ops.catalogue import catalogue_names, catalogue_text

    if where == "-":
        try:
            text = sys.stdin.read()
            text.encode("utf-8")  # some locales let bytes that are no text through as surrogates
        except UnicodeError as error:
            raise ArgumentError(f"cannot read standard input: {error}") from None
        return parse(text, origin="<stdin>")
    path = Path(where)
    if path.suffix == ".py":
        raise ArgumentError(
            f"{where}: Python is not run from here; write the text of the recurrence, `str(function.spec)`, "
            "into a .rec file"
        )
    if where in catalogue_names() and not path.is_file():
        return parse(catalogue_text(where), origin=f"{where}.rec")
    if path.suffix == "" and not path.exists():
        return parse(catalogue_text(where), origin=where)  # says which names there are
    return parse(read_text(path), origin=where)


def read_text(path: Path) -> str:
    """A text file in UTF-8. Raises ArgumentError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {path}: {error}") from None


def use_utf8(*streams: TextIO) -> None:
    """Texts and derivations hold ᵀ and Greek letters, whatever the locale says."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(encoding="utf-8")


PROSE = ("description", "found")
"""Columns that wrap."""


class Output:
    """Prints for people, or one JSON value per command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False, soft_wrap=True)
        self.messages = Console(stderr=True, highlight=False, soft_wrap=True)

    def text(self, text: str, data: Any) -> None:
        if self.as_json:
            self.data(data)
        else:
            self.console.print(text, markup=False)

    def data(self, data: Any) -> None:
        if self.as_json:
            print(json.dumps(data, ensure_ascii=False, indent=2))

    def heading(self, text: str) -> None:
        if not self.as_json:
            self.console.rule(text, align="left")

    def note(self, text: str) -> None:
        """A line for people only."""
        if not self.as_json:
            self.console.print(text, markup=False)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        first_line_only: Sequence[str] = (),
    ) -> None:
        if self.as_json:
            return
        if title:
            self.note(title)
        self.note(format_table(columns, rows, self.console.width, first_line_only))

    def working(self, what: str) -> AbstractContextManager[Any]:
        """Shows that something long is going on (on a terminal a spinner, else one line)."""
        if self.as_json:
            return nullcontext()
        if self.messages.is_terminal:
            return self.messages.status(what)
        self.messages.print(f"{what} ...", markup=False)
        return nullcontext()

    def problem(self, text: str) -> None:
        """Something that went wrong and does not end the command."""
        self.messages.print(text, markup=False)

    def failure(self, error: DslError | ArgumentError) -> None:
        """Mistakes of the user: to stderr for people, as data with ``--json``."""
        if not self.as_json:
            self.messages.print(f"{error}", markup=False)
            return
        if isinstance(error, DslError):
            mistakes = [
                {
                    "code": m.code,
                    "message": m.message,
                    "line": m.span.line if m.span else None,
                    "column": m.span.column if m.span else None,
                    "origin": m.span.origin if m.span else None,
                    "hint": m.hint,
                }
                for m in error.mistakes
            ]
        else:
            mistakes = [{"code": None, "message": str(error)}]
        self.data({"errors": mistakes})


def format_table(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    width: int,
    first_line_only: Sequence[str] = (),
) -> str:
    """Aligned plain text; a last column of prose wraps, numbers never do."""
    cells = [[show(row.get(c)) for c in columns] for row in rows]
    for line in cells:
        for i, column in enumerate(columns):
            if column in first_line_only:
                line[i] = line[i].split("\n", 1)[0]
    prose = columns[-1] in PROSE
    fixed = len(columns) - prose
    widths = [max(len(x) for x in (columns[i], *(line[i] for line in cells))) for i in range(fixed)]
    numeric = [any(isinstance(row.get(c), (int, float)) for row in rows) for c in columns]
    indent = sum(widths) + 2 * fixed
    lines = []
    for line in (list(columns), *cells):
        head = [x.rjust(w) if n else x.ljust(w) for x, w, n in zip(line, widths, numeric, strict=False)]
        text = "  ".join([*head, line[-1]] if prose else head)
        wrapped = textwrap.wrap(
            text,
            max(width, indent + 40),
            subsequent_indent=" " * indent,
            drop_whitespace=True,
            break_on_hyphens=False,
        )
        lines += wrapped if prose else [text.rstrip()]
    return "\n".join(lines)


def show(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.2e}" if value and not 1e-2 <= abs(value) < 1e5 else f"{value:.4g}"
        case _:
            return str(value)
