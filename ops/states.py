"""What callers hand in and get back as state: one tensor, or a named tuple of several."""

from __future__ import annotations

import keyword
from collections import namedtuple
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec

States = Tensor | Sequence[Tensor | None] | Mapping[str, Tensor | None]
"""As handed in: one tensor, several in order, or by name; what is None or left out is as declared."""


def state_tuple(spec: RecurrenceSpec) -> Any:
    """The class of the named tuple: the states in order, then ``<name>_prev`` of shifted inputs.

    A name that is a word of Python gets an underscore at its end.
    """
    return _tuple_class(spec.name, state_fields(spec))


def state_fields(spec: RecurrenceSpec) -> tuple[str, ...]:
    """The fields of the named tuple."""
    return tuple(f"{n}_" if keyword.iskeyword(n) else n for n in spec.carried)


@lru_cache(maxsize=256)
def _tuple_class(name: str, fields: tuple[str, ...]) -> Any:
    title = "".join(word.capitalize() for word in name.split("_"))
    made = namedtuple(f"{title}State", fields)  # type: ignore[misc]
    setattr(made, "__reduce__", lambda self: (_restored, (name, fields, *self)))  # noqa: B010
    return made


def _restored(name: str, fields: tuple[str, ...], *states: Any) -> Any:
    """A named tuple out of a pickle: its class is no attribute of this module, but made when it is needed."""
    return _tuple_class(name, fields)(*states)


def pack_states(spec: RecurrenceSpec, tensors: Sequence[Tensor]) -> Any:
    """The tensor itself where only one is carried, else the named tuple."""
    return tensors[0] if len(tensors) == 1 else state_tuple(spec)(*tensors)


def unpack_states(spec: RecurrenceSpec, given: States) -> list[Tensor | None]:
    """The carried tensors in order, None for those left to their declared start.

    Raises ``ArgumentError`` where their number or names are wrong.
    """
    names = spec.carried
    listed: list[Tensor | None]
    match given:
        case Tensor():
            listed = [given]
        case Mapping():
            if unknown := [n for n in given if n not in names]:
                raise ArgumentError(
                    f"{spec.name}: initial_state has {unknown[0]!r}, expected {', '.join(names)}"
                )
            listed = [given.get(n) for n in names]
        case _:
            listed = list(given)
    if len(listed) != len(names):
        raise ArgumentError(
            f"{spec.name}: initial_state holds {len(listed)} tensors, expected {len(names)}: "
            + ", ".join(names)
        )
    return listed
