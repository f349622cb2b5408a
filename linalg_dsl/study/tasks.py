"""Synthetic tasks that tell sequence mixers apart: associative recall and state tracking.

A task draws batches (ids, targets), both [B, T] int64 on the generator's device; targets are -100 where
nothing is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.nn.lm import IGNORED


@runtime_checkable
class Task(Protocol):
    """What training needs of a task. ``places``: those at which something may be asked; None: all."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def places(self) -> Tensor | None: ...

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927), with values that may change.

    ``pairs`` keys are told ``tellings`` times each, in random order, always followed by a value; then every
    key is asked once, at even places drawn by the paper's power law (early ones are likelier) with filler
    between, and the value told last is due at the question itself. With one telling this is the published
    task; with two, a memory has to replace what it stored. Keys are distinct symbols of the lower half of
    ``symbols``, values any of the upper half. ``length`` counts all tokens; by default there is no filler.
    """

    pairs: int = 16
    tellings: int = 1
    symbols: int = 256
    length: int | None = None
    power: float = 0.01

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.tellings < 1 or self.tokens < self.least:
            raise ArgumentError(
                f"recall of {self.pairs} pairs told {self.tellings} times: both must be at least 1, and "
                f"the length at least {self.least}, got {self.tokens}"
            )
        if self.symbols // 2 - 1 < self.pairs:
            raise ArgumentError(
                f"recall of {self.pairs} pairs needs {2 * self.pairs + 2} symbols, got {self.symbols}"
            )

    @property
    def least(self) -> int:
        """The shortest length: all that is told, then the questions, two tokens each."""
        return 2 * self.pairs * (self.tellings + 1)

    @property
    def tokens(self) -> int:
        return self.least if self.length is None else self.length

    @property
    def name(self) -> str:
        return "recall"

    @property
    def vocab_size(self) -> int:
        return self.symbols

    @property
    def places(self) -> Tensor:
        return torch.arange(2 * self.pairs * self.tellings, self.tokens - 1, 2)

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        half, n, told = self.symbols // 2, self.pairs, self.pairs * self.tellings
        drawn: dict[str, Any] = {"generator": generator, "device": generator.device}
        # symbol 0 is the filler
        keys = 1 + torch.rand(size, half - 1, **drawn).argsort(-1)[:, :n]
        order = torch.rand(size, told, **drawn).argsort(-1)
        which = order % n  # every key as often as every other
        values = half + torch.randint(self.symbols - half, (size, told), **drawn)
        ids = order.new_zeros(size, self.tokens)
        targets = order.new_full((size, self.tokens), IGNORED)
        ids[:, 0 : 2 * told : 2], ids[:, 1 : 2 * told : 2] = keys.gather(1, which), values
        places = torch.arange(told, device=order.device).expand(size, told)
        last = values.gather(1, order.new_zeros(size, n).scatter_reduce(1, which, places, "amax"))
        slots = (self.tokens - 2 * told) // 2
        chance = torch.arange(1.0, slots + 1, device=order.device) ** (self.power - 1)
        where = 2 * told + 2 * torch.multinomial(chance.expand(size, slots), n, generator=generator)
        return ids.scatter(1, where, keys), targets.scatter(1, where, last)


@dataclass(frozen=True)
class Parity:
    """Bits; asked at every token is whether the ones so far are odd in number."""

    length: int = 40

    @property
    def name(self) -> str:
        return "parity"

    @property
    def vocab_size(self) -> int:
        return 2

    @property
    def places(self) -> None:
        return None

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        bits = torch.randint(2, (size, self.length), generator=generator, device=generator.device)
        return bits, bits.cumsum(-1) % 2


@dataclass(frozen=True)
class Permutations:
    """S3: every token is a permutation of three things, asked is the product of all so far.

    ``swaps`` leaves only the identity and the three exchanges of two things, which are reflections; the two
    cyclic shifts are products of two of these.
    """

    length: int = 40
    swaps: bool = True

    @property
    def name(self) -> str:
        return "s3"

    @property
    def vocab_size(self) -> int:
        return 6

    @property
    def places(self) -> None:
        return None

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        elements = list(permutations(range(3)))
        device = generator.device
        products_of = [[elements.index(tuple(q[i] for i in p)) for p in elements] for q in elements]
        table = torch.tensor(products_of, device=device)
        moved = [sum(i != j for i, j in enumerate(p)) for p in elements]
        allowed = torch.tensor([i for i, m in enumerate(moved) if m < 3 or not self.swaps], device=device)
        ids = allowed[torch.randint(len(allowed), (size, self.length), generator=generator, device=device)]
        product = torch.zeros(size, dtype=torch.int64, device=device)
        products = []
        for t in range(self.length):
            product = table[ids[:, t], product]
            products.append(product)
        return ids, torch.stack(products, dim=1) if products else ids
