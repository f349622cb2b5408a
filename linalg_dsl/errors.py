"""The two kinds of error: a mistake in what the user gave, and a fault of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from linalg_dsl.source import Span

Item = TypeVar("Item")
Made = TypeVar("Made")


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


def for_each(items: Iterable[Item], do: Callable[[Item], Made]) -> list[Made]:
    """``do`` of every item; the mistakes of all of them are raised together."""
    made: list[Made] = []
    mistakes: list[Mistake] = []
    for item in items:
        try:
            made.append(do(item))
        except DslError as err:
            mistakes += [m for m in err.mistakes if m not in mistakes]
    if mistakes:
        raise DslError(mistakes)
    return made


@contextmanager
def placed(span: Span | None) -> Iterator[None]:
    """Gives the mistakes that have no place this one."""
    try:
        yield
    except DslError as err:
        raise DslError(replace(m, span=m.span or span) for m in err.mistakes) from None


class ArgumentError(ValueError):
    """A call of a compiled op got a wrong argument: says which, what was expected, what came."""


class InternalError(Exception):
    """A broken promise inside the compiler: never the user's fault."""
