"""Generated functions on the page: every statement with a link to the equation that it computes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from linalg_dsl.codegen.emit.trace import Trace, Values
from linalg_dsl.planner.origins import Origins, Places

_ADDRESS = re.compile(r"[omirtp]_\w+$|[A-Z]\w*$")
"""Offsets, masks, numbers of rows and sizes."""
_ASSIGNED = re.compile(r"\s*(\w+)(?:: [^=]+)? (?:\+)?= ")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a function, numbered as in the module, and the equation that it belongs to."""

    number: int
    text: str
    equation: int | None


@dataclass(frozen=True, slots=True)
class Function:
    """A generated function."""

    name: str
    lines: tuple[Line, ...]

    @property
    def equations(self) -> tuple[int, ...]:
        """Those that its statements belong to, in order of number."""
        return tuple(sorted({x.equation for x in self.lines if x.equation is not None}))


def functions(text: str, trace: Trace, origins: Origins) -> tuple[Function, ...]:
    """The functions of a module that compute something, in the order of the module."""
    source = text.splitlines()
    known: dict[int, Places] = {}
    found = []
    for i, line in enumerate(source):
        name = line.partition("(")[0].removeprefix("def ")
        if not line.startswith("def ") or name not in trace:
            continue
        places = {}
        for value, (plan, n) in trace[name].items():
            if id(plan) not in known:
                known[id(plan)] = origins.places(plan)
            if n in known[id(plan)]:
                places[value] = known[id(plan)][n]
        first, body, end = _extent(source, i)
        lines = source[first:end]
        linked = _linked(lines, body - first, places, trace[name])
        made = (Line(first + j + 1, x, e) for j, (x, e) in enumerate(zip(lines, linked, strict=True)))
        found.append(Function(name, tuple(made)))
    return tuple(found)


def _extent(source: Sequence[str], at: int) -> tuple[int, int, int]:
    """The first line of a function with its decorators, the first of its body, and the line behind it."""
    first = at
    while first and source[first - 1].startswith("@"):
        first -= 1
    body = next(i for i in range(at, len(source)) if source[i].rstrip().endswith("):")) + 1
    end = body
    while end < len(source) and (not source[end] or source[end].startswith(" ")):
        end += 1
    while not source[end - 1]:
        end -= 1
    return first, body, end


def _linked(lines: Sequence[str], body: int, places: dict[str, int], values: Values) -> Iterator[int | None]:
    """The equation of each line: of what it assigns, else of what it stores or returns, else of what follows.

    Loads, addresses and what is in the signature belong to none.
    """
    found: list[int | None] = []
    open_: list[bool] = []  # lines of a value whose name is not the plan's: they lead to the next that is
    for i, line in enumerate(lines):
        assigned = _ASSIGNED.match(line)
        name = assigned[1] if assigned else None
        words = re.findall(r"\w+", line)
        place = places.get(name) if name else None
        handed = name in values and "tl.load" not in line  # a state becomes its next value
        if place is None and (handed or (name is None and ("tl.store" in line or "return" in words))):
            place = next((places[w] for w in reversed(words) if w in places), None)
        own = name is not None and name not in values and not _ADDRESS.match(name)
        computes = own and "tl.load" not in line
        found.append(place if i >= body else None)
        open_.append(i >= body and computes and place is None)
    following: int | None = None
    for i in reversed(range(len(lines))):
        if open_[i]:
            found[i] = following
        elif found[i] is not None:
            following = found[i]
    return iter(found)
