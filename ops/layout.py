"""How states lie in memory: with their axes as declared, or with the key or the value axis first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from linalg_dsl.algebra.expr import Dim


def stored_dims(dims: Sequence[Dim], layout: str | None) -> tuple[Dim, ...]:
    """The axes of a carried tensor as callers hold it: ``layout`` "kv" or "vk", None as declared.

    It is about states with a key and a value axis; others lie as declared.
    """
    if layout is None or {*dims} != {"K", "V"} or len(dims) != 2:
        return tuple(dims)
    return ("K", "V") if layout == "kv" else ("V", "K")


def turned(x: Tensor, dims: Sequence[Dim], layout: str | None) -> Tensor:
    """From the axes as declared to those as stored, and back: a view."""
    return x if stored_dims(dims, layout) == tuple(dims) else x.mT


def turn_all(
    states: Sequence[Tensor | None], dims: Sequence[Sequence[Dim]], layout: str | None
) -> tuple[Tensor | None, ...]:
    """``turned`` of every carried tensor that there is."""
    if layout is None:
        return tuple(states)
    return tuple(None if x is None else turned(x, d, layout) for x, d in zip(states, dims, strict=True))
