"""The two kinds of error: a mistake in what the user gave, and a fault of the compiler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from linalg_dsl.source import Span


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake: a stable code (``E101``), what is wrong, where, and what to do about it."""

    code: str
    message: str
    span: Span | None = None
    hint: str | None = None
    related: tuple[tuple[str, Span], ...] = ()

    def __str__(self) -> str:
        where = f"{self.span.origin}:{self.span.line}:{self.span.column}: " if self.span else ""
        parts = [f"{where}{self.code}: {self.message}"]
        if self.span:
            parts.append(self.span.excerpt())
        for note, span in self.related:
            parts.append(f"     note: {note}\n{span.excerpt()}")
        if self.hint:
            parts.append(f"     help: {self.hint}")
        return "\n".join(parts)


class DslError(Exception):
    """What the user wrote cannot be compiled; holds every mistake found, in source order."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes: tuple[Mistake, ...] = tuple(
            sorted(mistakes, key=lambda m: (m.span.start if m.span else -1, m.code))
        )
        super().__init__("\n\n".join(str(m) for m in self.mistakes))

    @classmethod
    def single(cls, code: str, message: str, span: Span | None = None, hint: str | None = None) -> DslError:
        return cls([Mistake(code, message, span, hint)])


class ArgumentError(ValueError):
    """A call of a compiled op got a wrong argument: says which, what was expected, what came."""


class InternalError(Exception):
    """A broken promise inside the compiler: never the user's fault."""
