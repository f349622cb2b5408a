"""A mode under which every tensor operation rounds a little differently, forward and backward."""

from __future__ import annotations

import random
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_POOL = 1 << 16


UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
"""Half the distance from 1 to the next number."""


LAST_PLACES = 2.0
"""Units in the last place that exp2 and a division of a GPU are off by at most (CUDA C++ Programming Guide,
"Mathematical functions"; PTX ISA, ex2.approx: 2^-22)."""
TERMS = 128
"""The longest sum that is one operation of a plan: over the tokens of a chunk, or the channels of a head."""
AT_ONCE = 8
"""Terms that are added exactly and rounded together: a tile of tensor cores in tf32, a vector of a CPU."""


def passes() -> float:
    """Root mean square error of a float32 operation over that of the replicas, which err by u xi, xi uniform
    in [-1, 1]: of a function or a sum, whichever is larger.

    A function errs uniformly up to LAST_PLACES units, each 2 u / m of a number of significand m, and
    the mean of 1 / m^2 over numbers of all sizes is 3 / (8 ln 2). A sum of terms of any sign is rounded n =
    TERMS / AT_ONCE times, of squares that grow with the terms so far: (n + 1) / 2 roundings of its result.
    """
    of_function = (2 * LAST_PLACES) ** 2 * 3 / (8 * log(2))
    of_sum = (TERMS / AT_ONCE + 1) / 2
    return sqrt(max(of_function, of_sum))


def noise_of(dtype: torch.dtype) -> float:
    """Relative size of the roundings that replicas, in float64, try for a type: those of its sums.

    What cancels twice is left with products of two roundings, whose part of a result is right for this size
    only. Float64's own, which replicas cannot be told from, are tried a few million times larger.
    """
    return 2.0**-30 if dtype == torch.float64 else UNIT[torch.float32]


def working(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are formed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Noise:
    """Numbers in [-1, 1] from a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed + 31)
        self.places = random.Random(seed)
        self.pool = 2 * torch.rand(_POOL, generator=self.generator, dtype=torch.float64) - 1

    def numbers(self, shape: tuple[int, ...]) -> Tensor:
        """Numbers of a shape, from a random place of a pool (drawn anew where the pool is too small)."""
        count = int(torch.Size(shape).numel())
        if count > _POOL:
            return 2 * torch.rand(shape, generator=self.generator, dtype=torch.float64) - 1
        at = self.places.randrange(_POOL - count + 1)
        return self.pool[at : at + count].view(shape)


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every new float64 result x becomes x (1 + size xi) + floor xi', unless it is 0 or a number by itself.

    ``floor`` stands for the spacing of denormal numbers (to the same scale as ``size`` stands for a unit
    roundoff); ``everywhere`` moves zeros by it too. Views, and writes into memory that was there, stay as
    they are: their values were rounded when they were computed.
    """

    def __init__(self, noise: Noise, size: float, floor: float = 0.0, everywhere: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noise = noise
        self.size = size
        self.floor = floor
        self.everywhere = everywhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
            return found
        if isinstance(found, Tensor) and found.dtype == torch.float64 and found.dim():
            shape = tuple(found.shape)
            zero = found == 0 if self.floor and not self.everywhere else None
            found.mul_(1 + self.size * self.noise.numbers(shape))
            if self.floor:
                found.add_(self.floor * self.noise.numbers(shape))
            if zero is not None:
                found.masked_fill_(zero, 0.0)
        return found
