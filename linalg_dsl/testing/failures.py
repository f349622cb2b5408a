"""What a property raises: a failure with everything needed to see it again, or why it does not apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import SkipTest


class NotApplicable(SkipTest):
    """The property says nothing about this subject; the message says why. Test runners count it as a skip."""


@dataclass(frozen=True)
class Failure:
    """One wrong number.

    ``seed`` draws the inputs again, ``shape`` describes them in words, ``tensor`` is the result that is
    wrong (``o``, ``final state``, ``d q`` ...) at ``index``, ``allowed`` the largest deviation from
    ``expected`` that the error model admits there (0 where bits must be equal), ``cause`` what such a
    pattern of errors usually comes from.
    """

    subject: str
    property: str
    seed: int
    shape: str
    tensor: str
    index: tuple[int, ...]
    got: float
    expected: float
    allowed: float
    cause: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = ", ".join(map(str, self.index))
        return (
            f"{self.subject} fails {self.property}\n"
            f"  inputs    seed {self.seed}: {self.shape}\n"
            f"  tensor    {self.tensor}[{where}]\n"
            f"  got       {self.got!r}\n"
            f"  expected  {self.expected!r} (within {self.allowed:.3g})\n"
            f"  likely    {self.cause}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; what is not finite is a word."""

        def plain(x: float) -> float | str:
            return x if abs(x) < float("inf") else str(x)

        return {
            "subject": self.subject,
            "property": self.property,
            "seed": self.seed,
            "shape": self.shape,
            "tensor": self.tensor,
            "index": list(self.index),
            "got": plain(self.got),
            "expected": plain(self.expected),
            "allowed": plain(self.allowed),
            "cause": self.cause,
        }


class PropertyError(AssertionError):
    """A property that does not hold. Its fields are those of ``Failure``.

    ``property``, ``seed``, ``shape``, ``tensor``, ``index``, ``got``, ``expected``, ``allowed``, ``cause``.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __getattr__(self, name: str) -> Any:
        if name in Failure.__dataclass_fields__:
            return getattr(self.failure, name)
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return PropertyError, (self.failure,)
