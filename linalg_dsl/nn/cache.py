"""What a model hands from one call to the next while it generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cache:
    """The state of every layer after ``seen`` tokens (of packed prompts: of the longest), N sequences each.

    A layer's is ``MixerState`` or ``AttentionState``. A cache is not changed, every call gives a new one, so
    an old one may be kept to go back to, unless the call is told to work ``in_place``.
    """

    layers: tuple[Any, ...]
    seen: int = 0

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> Any:
        return self.layers[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens went in, as generation loops ask it."""
        return self.seen

    def select(self, index: Tensor) -> Cache:
        """The sequences ``index`` [M], in that order, repeats allowed: for beam search."""
        return self.map(lambda x: x.index_select(0, index))

    reorder_cache = select

    def detach(self) -> Cache:
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str) -> Cache:
        return self.map(lambda x: x.to(device))

    def map(self, change: Callable[[Tensor], Tensor]) -> Cache:
        """The same with every tensor changed."""
        return Cache(tuple(_map(x, change) for x in self.layers), self.seen)

    def bytes(self) -> int:
        """What all its tensors take."""
        total = 0

        def count(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        self.map(count)
        return total


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    match value:
        case Tensor():
            return change(value)
        case Mapping():
            return {k: _map(x, change) for k, x in value.items()}
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(_map(x, change) for x in value))
        case tuple():
            return tuple(_map(x, change) for x in value)
        case _:
            return value
