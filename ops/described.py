"""Kernels that take tensor descriptors, launched with what the driver has encoded for an address before.

Triton encodes a descriptor for the hardware at every launch, some microseconds each. A recorded call
(``ops/replay.py``) has the shapes, strides and types of an earlier one, so that its addresses alone decide.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST = 64
"""Addresses that are kept of one argument; more are forgotten all at once."""


@dataclass(frozen=True, slots=True)
class _Address:
    """What an encoder asks of a descriptor's tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class _Plain:
    """What an encoder asks of a descriptor."""

    base: _Address
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str
    round_f32_to_tf32: bool


@dataclass
class EncodedTile:
    """One argument of a launch: what ``encode`` makes of the descriptor at an address."""

    encode: Callable[[int], Any]
    kept: dict[int, Any] = field(default_factory=dict)

    def at(self, address: int) -> Any:
        found = self.kept.get(address)
        if found is None:
            if len(self.kept) >= _MOST:
                self.kept.clear()
            found = self.kept[address] = self.encode(address)
        return found


@dataclass(frozen=True, slots=True)
class BareLaunch:
    """How a compiled kernel is launched past Triton's own handling of descriptors.

    ``arguments``: as ``run`` takes them, every descriptor written out as encoded form, shape and strides;
    ``place``: where each of the launch's arguments is among them; ``tiles`` by the place of the encoded form.
    """

    run: Callable[..., Any]
    arguments: list[Any]
    place: tuple[int, ...]
    tiles: dict[int, EncodedTile]


def is_descriptor(x: Any) -> bool:
    """Whether an argument is one of Triton's ``TensorDescriptor``, without a need for Triton."""
    return hasattr(x, "block_shape") and hasattr(x, "base")


def bare_launch(compiled: Any, arguments: Sequence[Any]) -> BareLaunch | None:
    """For Triton 3.6 and 3.7; None where its launchers are unlike those, which then launch by themselves."""
    run = compiled.run
    encode = getattr(sys.modules.get(type(run).__module__), "make_tensordesc_arg", None)
    wrapped = getattr(run, "launch", None)
    if encode is None or not inspect.isfunction(wrapped):
        return None
    inside = inspect.getclosurevars(wrapped).nonlocals
    launcher, metadata = inside.get("launcher"), inside.get("tensordesc_meta")
    count = sum(is_descriptor(x) for x in arguments)
    if launcher is None or not metadata or len(metadata) != count or None in metadata:
        return None
    bare = copy.copy(run)
    bare.launch = launcher
    out: list[Any] = []
    place: list[int] = []
    tiles: dict[int, EncodedTile] = {}
    for x in arguments:
        place.append(len(out))
        if not is_descriptor(x):
            out.append(x)
            continue
        tiles[len(out)] = EncodedTile(_encoder(encode, x, metadata[len(tiles)]))
        out += [None, *x.shape, *x.strides]
    return BareLaunch(bare, out, tuple(place), tiles)


def _encoder(encode: Callable[[Any, Any], Sequence[Any]], like: Any, meta: Any) -> Callable[[int], Any]:
    """The first of what Triton writes a descriptor out as: the others are its shape and strides."""
    shape, strides, block = list(like.shape), list(like.strides), list(like.block_shape)
    padding, rounds = like.padding, bool(getattr(like, "round_f32_to_tf32", False))  # the latter from 3.7 on

    def encoded(address: int) -> Any:
        return encode(_Plain(_Address(address), shape, strides, block, padding, rounds), meta)[0]

    return encoded


def unbound(descriptor: Any) -> Callable[[Any], Any]:
    """Makes the same descriptor of another tensor, without keeping this one's."""
    make, shape, strides = type(descriptor), list(descriptor.shape), list(descriptor.strides)
    block = list(descriptor.block_shape)
    return lambda base: make(base, shape, strides, block)
