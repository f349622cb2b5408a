"""What a stage with several outputs gives: one value where there is one, else a tuple of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def one_or_all(values: Sequence[T]) -> Any:
    """The only value, or all as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)


def each(values: Any) -> tuple[Any, ...]:
    """A tuple of values as it is, a single one as a tuple."""
    return values if isinstance(values, tuple) else (values,)
