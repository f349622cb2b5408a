"""Collects the mistakes of a text, so that all of them are shown at once."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from linalg_dsl.errors import DslError, Mistake
from linalg_dsl.source import Span

MOST = 50
"""More than this many mistakes are not kept: the first ones say enough."""

MOST_NAMES = 200
"""More candidates than this are not compared."""


class Mistakes:
    def __init__(self) -> None:
        self.found: list[Mistake] = []

    def add(
        self,
        code: str,
        message: str,
        span: Span | None = None,
        hint: str | None = None,
        related: tuple[tuple[str, Span | None], ...] = (),
    ) -> None:
        if self.full:
            return
        notes = tuple((note, place) for note, place in related if place is not None)
        mistake = Mistake(code, message, span, hint, notes)
        if mistake not in self.found:
            self.found.append(mistake)

    def copy(self) -> Mistakes:
        """Those found so far, to be added to apart."""
        other = Mistakes()
        other.found = list(self.found)
        return other

    @property
    def full(self) -> bool:
        """Whether no more are kept."""
        return len(self.found) >= MOST

    def raise_if_any(self) -> None:
        if self.found:
            raise DslError(self.found)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like this one, if any does; only names of similar length."""
    options = [o for o in known if abs(len(o) - len(name)) <= 3][:MOST_NAMES]
    folded = {o.lower(): o for o in reversed(options)}
    if name.lower() in folded:
        return folded[name.lower()]
    close = get_close_matches(name, options, n=1, cutoff=0.6)
    return close[0] if close else None
