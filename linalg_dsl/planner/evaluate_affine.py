"""Chunks as affine maps in PyTorch: the map of each chunk of a plan, their composition, and what they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.affine import AffineMap, affine_map
from linalg_dsl.planner.evaluate import ChunkSequence, run_chunk
from linalg_dsl.planner.plan import ChunkPlan, PlanBuilder


@dataclass(frozen=True)
class MapValue:
    """S -> F S o D + H with F on the axis ``erased``: [B, H, E, E]; ``factors`` D and ``end`` H [B, H, K, V].

    ``matrix`` None stands for the identity. D broadcasts.
    """

    erased: str | None
    matrix: Tensor | None
    factors: Tensor
    end: Tensor

    def linear(self, state: Tensor) -> Tensor:
        """F S o D."""
        if self.matrix is not None:
            state = self.matrix @ state if self.erased == "K" else state @ self.matrix.mT
        return state * self.factors

    def __call__(self, state: Tensor) -> Tensor:
        """S_C of S_0 [B, H, K, V]."""
        return self.linear(state) + self.end

    def adjoint(self, cotangent: Tensor) -> Tensor:
        """What a gradient of S_C adds to that of S_0."""
        scaled = cotangent * self.factors
        if self.matrix is None:
            return scaled
        return self.matrix.mT @ scaled if self.erased == "K" else scaled @ self.matrix


def compose(later: MapValue, earlier: MapValue) -> MapValue:
    """First ``earlier``, then ``later``."""
    if later.erased != earlier.erased:
        raise InternalError("maps that erase along different axes do not compose")
    matrix = None
    if later.matrix is not None and earlier.matrix is not None:
        matrix = later.matrix @ earlier.matrix
    return MapValue(later.erased, matrix, later.factors * earlier.factors, later(earlier.end))


def chunk_maps(
    forward: ChunkPlan, tensors: Mapping[str, Tensor | float], chunk_size: int
) -> tuple[MapValue, ...]:
    """The map of every chunk of a forward plan; ``tensors`` as in ``run_plan``."""
    sequence = ChunkSequence(forward, tensors, chunk_size)
    found = affine_map(forward)
    return tuple(_chunk_map(forward, found, sequence, index) for index in range(len(sequence.bounds)))


def sequence_map(forward: ChunkPlan, tensors: Mapping[str, Tensor | float], chunk_size: int) -> MapValue:
    """The map of a whole sequence, composed of those of its chunks."""
    return reduce(lambda earlier, later: compose(later, earlier), chunk_maps(forward, tensors, chunk_size))


def _chunk_map(forward: ChunkPlan, found: AffineMap, sequence: ChunkSequence, index: int) -> MapValue:
    name = forward.carries[0][0]
    like, lead = sequence.like, (sequence.batch, sequence.heads)

    def step(after: int, state: Tensor) -> Tensor:
        raw = PlanBuilder(found.nodes).finish(forward.name, [(name, "forward", found.leaf, after)], ())
        start, end = sequence.bounds[index]
        values = {**sequence.leaves(raw, index), ("carry", name, "forward"): state}
        return run_chunk(raw, values, {"t": end - start}).carries[name, "forward"]

    size = {"K": sequence.size("K"), "V": sequence.size("V")}
    zeros = like.new_zeros(*lead, size["K"], size["V"])
    end = step(forward.carries[0][3], zeros)
    matrix = None
    if found.matrix is not None:
        assert found.erased is not None
        eye = torch.eye(size[found.erased], dtype=like.dtype, device=like.device)
        matrix = step(found.matrix, eye.expand(*lead, *eye.shape))
        matrix = matrix if found.erased == "K" else matrix.mT
    factors = like.new_ones(())
    if found.factors is not None:
        shape = [size[axis] if axis in found.along else 1 for axis in ("K", "V")]
        factors = step(found.factors, like.new_ones(*lead, *shape))
    return MapValue(found.erased, matrix, factors, end)
