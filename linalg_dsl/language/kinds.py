"""Annotations of the Python front: what a parameter of a traced function is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from linalg_dsl.language import syntax as syn
from linalg_dsl.language.spec import Interval
from linalg_dsl.language.tracing import Traced

Closed = Literal["neither", "left", "right", "both"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One tensor per token, or per head if not ``timed``; see ``InputDecl`` for the fields."""

    dims: tuple[str | int, ...] = ()
    gate: Literal["plain", "log_gate", "gate"] = "plain"
    range: Interval | None = None
    has_unit: bool = False
    timed: bool = True

    @property
    def unit(self) -> Kind:
        """Promises vectors of norm at most 1."""
        return replace(self, has_unit=True)

    def within(self, low: float | None = None, high: float | None = None, closed: Closed = "neither") -> Kind:
        """Promises a range of every element: ``Vectors("n", V).within(0, 1)``."""
        return replace(self, range=_range(low, high, closed))


class Dimension(Traced):
    """K or V: the size of an axis in expressions (``1 / sqrt(K)``), a vector as an annotation."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__(syn.Ref(name, None))
        self.name = name

    @property
    def unit(self) -> Kind:
        return Kind((self.name,)).unit

    def within(self, low: float | None = None, high: float | None = None, closed: Closed = "neither") -> Kind:
        """A vector with a range promised of every element: ``V.within(0)`` is positive."""
        return Kind((self.name,)).within(low, high, closed)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class StateKind:
    """A carried tensor; without ``dims`` its shape is what its update has."""

    dims: tuple[str | int, ...] | None = None
    start: float = 0.0


class _ScalarKind(Kind):
    """``Scalar`` and ``Scalar(0, 2)``: a number per token and head, with its range."""

    __slots__ = ()

    def __call__(
        self, low: float | None = None, high: float | None = None, closed: Closed = "neither"
    ) -> Kind:
        return Kind(range=_range(low, high, closed))


class _GateKind(Kind):
    """``LogGate``, ``LogGate(K)``, ``LogGate(K, V)``, ``LogGate("n", high=2.0)``; ``Gate`` alike, in linear
    space: ``Gate(low=-1, high=1, closed="neither")`` has either sign."""

    __slots__ = ()

    def __call__(
        self,
        *dims: Dimension | str | int,
        low: float | None = None,
        high: float | None = None,
        closed: Closed = "right",
    ) -> Kind:
        return Kind(_dims(dims), self.gate, _range(low, high, closed))


K = Dimension("K")
V = Dimension("V")
I = Traced(syn.Ref("I", None))  # noqa: E741
"""The identity; it takes its size from the matrix beside it."""
Scalar = _ScalarKind()
LogGate = _GateKind(gate="log_gate")
Gate = _GateKind(gate="gate")


def Vectors(count: str | int, dim: Dimension | str) -> Kind:
    """``count`` vectors per token: ``Vectors("n", K)``, with n a const, is ``[n, K]``."""
    return Kind(_dims((count, dim)))


def Scalars(count: str | int) -> Kind:
    """``count`` numbers per token: ``[n]``."""
    return Kind(_dims((count,)))


def Matrix(rows: Dimension | str, columns: Dimension | str) -> Kind:
    """A matrix per token: ``Matrix(K, K)``, ``Matrix(V, V)`` or ``Matrix(K, V)``."""
    return Kind(_dims((rows, columns)))


def Param(kind: Kind | Dimension | None = None) -> Kind:
    """One tensor per head, with gradient: ``Param(K)`` is [H, K], ``Param()`` or ``Param(Scalar)`` [H]."""
    return replace(_plain(kind_of(kind) if kind is not None else Kind()), timed=False)


def State(*dims: Dimension | Kind | str | int, start: float = 0.0) -> StateKind:
    """A carried tensor: ``State(K)``, ``State(Scalar)``; without dims of the shape of its update."""
    if math.isnan(start):
        raise ValueError("the start of a state is a number")
    if len(dims) == 1 and dims[0] is Scalar:
        return StateKind((), float(start))
    if any(isinstance(d, Kind) for d in dims):
        raise TypeError("State takes K, V, counts, or Scalar alone")
    named = _dims(tuple(d for d in dims if not isinstance(d, Kind)))
    return StateKind(named or None, float(start))


def kind_of(annotation: Any) -> Kind | None:
    """The kind behind an annotation; None if it is none of ours."""
    if isinstance(annotation, Dimension):
        return Kind((annotation.name,))
    return annotation if isinstance(annotation, Kind) else None


def _plain(kind: Kind | None) -> Kind:
    if kind is None:
        raise TypeError("Param takes K, V, Scalar, or a gate")
    return Kind(kind.dims, kind.gate, kind.range, kind.has_unit)


def _dims(dims: tuple[Dimension | str | int, ...]) -> tuple[str | int, ...]:
    return tuple(d.name if isinstance(d, Dimension) else d for d in dims)


def _range(low: float | None, high: float | None, closed: Closed) -> Interval | None:
    if closed not in ("neither", "left", "right", "both"):
        raise ValueError(f"closed is 'neither', 'left', 'right' or 'both', got {closed!r}")
    if any(bound is not None and math.isnan(bound) for bound in (low, high)):
        raise ValueError(f"a range has numbers as bounds, got ({low}, {high})")
    if low is None and high is None:
        return None
    lower = None if low is None or low == float("-inf") else float(low)
    upper = None if high is None or high == float("inf") else float(high)
    return Interval(
        lower,
        upper,
        lower is None or closed in ("neither", "right"),
        upper is None or closed in ("neither", "left"),
    )
