"""One .rec file per published recurrence; the comment at its top says what it is and where it is from."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from linalg_dsl.errors import ArgumentError


@cache
def catalogue_names() -> tuple[str, ...]:
    """The names of all entries, sorted."""
    entries = (f.name for f in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".rec") for name in entries if name.endswith(".rec")))


def catalogue_text(name: str) -> str:
    """The text of one entry. Raises ArgumentError for a name that is not in the catalogue."""
    if name not in catalogue_names():
        near = get_close_matches(name, catalogue_names(), 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(catalogue_names())}"
        raise ArgumentError(f"the catalogue has no recurrence {name!r}; {hint}")
    return files(__name__).joinpath(f"{name}.rec").read_text(encoding="utf-8")
