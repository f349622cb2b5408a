"""Predicted work and time of one launch: bytes, FLOPs, waves x chunks x time per chunk.

The model of walks is that of ``levels``, which generated modules use to choose between one level and two.
That of preps stands here: programs are many and short, so what counts is how long a multiprocessor is busy
with each. ``tests/gpu/fit_model.py`` fits the constants to measurements of ``linalg-dsl bench --kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from linalg_dsl.codegen.schedule.choice import Place
from linalg_dsl.codegen.schedule.kernel_plan import Kernel, tile_kinds
from linalg_dsl.codegen.schedule.levels import moved_in_a_chunk, reached, step_time, waves
from linalg_dsl.codegen.schedule.two_level import products
from linalg_dsl.planner.plan import Node

Bound = Literal["bytes", "products", "chain"]
LAUNCH = 2.0
"""Microseconds of a launch inside a CUDA graph."""
RATE = {2: 3.3e6, 4: 1.65e6}
"""FLOPs per microsecond and multiprocessor of products, by bytes of an operand; see ``levels.step_time``."""
PREP = (0.15, 0.1, 0.05, 0.6)
"""Microseconds that a multiprocessor takes for a program of a prep: always, for each of its operations on
tiles, for each level of a triangular solve, and for each level of scores with a decay per channel (of their
derivatives twice)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """``microseconds`` of a launch that moves ``moved`` bytes and does ``flops``; what they are bound by.

    ``chain``: the dependent operations of its programs, one after the other.
    """

    microseconds: float
    flops: int
    moved: int
    bound: Bound
    features: tuple[float, ...] = ()
    """Of a prep what ``PREP`` is multiplied by, of all programs of a multiprocessor."""

    def __str__(self) -> str:
        reason = {
            "bytes": "its bytes", "products": "its products", "chain": "the chain of its operations"
        }  # fmt: skip
        return (
            f"{self.flops / 1e9:.3g} GFLOP; about {self.microseconds:.3g} us by the model, for "
            f"{reason[self.bound]}"
        )


def walk_flops(
    nodes: Sequence[Node], kernel: Kernel, own: int, block: int, chunk: int, programs: int, chunks: int
) -> int:
    """Of the products of a walk whose programs go over ``chunks`` chunks each; a multiply-add counts two."""
    state, inner, scores = products(nodes, kernel)
    return (
        2 * chunk * (state * own * block + inner * chunk * block + scores * chunk * own) * programs * chunks
    )


def prep_flops(nodes: Sequence[Node], kernel: Kernel, place: Place) -> int:
    """Of the products of a prep over all chunks and heads: scores, what they are applied to, solves.

    A score with decays per channel counts once, its derivatives twice each; a solve by masked doubling has
    two products of [C, C] tiles per level and triple of erases.
    """
    C = place.chunk
    sizes = {"K": place.K, "V": place.V}
    total = 0
    for n in kernel.body:
        node = nodes[n]
        match node.op:
            case "score":
                total += 2 * C * C * sizes.get(nodes[node.args[0]].axes[-1], 1)
            case "apply" | "apply_t":
                total += 2 * C * C * sizes.get(node.axes[-1], C)
            case "decayed_scores" | "decay_adjoints":
                pairs = len(str(node.attr("pairs")).split(","))
                each = 1 if node.op == "decayed_scores" else 2
                width = next((sizes[a] for x in node.args for a in nodes[x].axes if a in sizes), 1)
                total += 2 * each * pairs * C * C * width
            case "ut_transform":
                r = int(str(node.attr("r")))
                total += 4 * r**3 * C**3 * (C.bit_length() - 1)
    return total * place.B * place.chunks * place.H


def prep_features(nodes: Sequence[Node], kernel: Kernel, place: Place) -> tuple[float, float, float, float]:
    """What ``PREP`` is multiplied by: of one program."""
    levels = place.chunk.bit_length() - 1
    tiles = solves = scores = 0.0
    for n in kernel.body:
        node = nodes[n]
        match node.op:
            case "ut_transform":
                solves += levels * int(str(node.attr("r"))) ** 2
            case "decayed_scores" | "decay_adjoints":
                each = 1 if node.op == "decayed_scores" else 2
                scores += each * levels * len(str(node.attr("pairs")).split(","))
            case _ if len(node.axes) == 2:
                tiles += 1
    return 1.0, tiles, solves, scores


def predict_prep(nodes: Sequence[Node], kernel: Kernel, place: Place, moved: int) -> Prediction:
    """Of a prep over all chunks and heads of a call."""
    flops = prep_flops(nodes, kernel, place)
    target = place.target
    each = -(-place.B * place.chunks * place.H // target.units)
    features = tuple(each * x for x in prep_features(nodes, kernel, place))
    busy = sum(a * b for a, b in zip(PREP, features, strict=True))
    work = flops / (RATE[place.operand_bytes] * target.units)
    return _longest(flops, moved, moved / reached(target.bandwidth), work, busy, features)


def predict_walk(
    nodes: Sequence[Node], kernel: Kernel, place: Place, chunks: int, block: int, programs: int, moved: int
) -> Prediction:
    """Of a walk whose ``programs`` go over ``chunks`` chunks each."""
    own, _ = place.sizes(kernel.split)
    target = place.target
    flops = walk_flops(nodes, kernel, own, block, place.chunk, programs, chunks)
    each = moved_in_a_chunk(tile_kinds(nodes, kernel), own, block, place.chunk) * place.operand_bytes
    share = target.bandwidth / max(1, min(target.units, programs))
    step = step_time(products(nodes, kernel), own, block, place.chunk, place.operand_bytes, each, share)
    work = flops / (RATE[place.operand_bytes] * target.units)
    chain = waves(programs, target.units) * chunks * step
    return _longest(flops, moved, moved / reached(target.bandwidth), work, chain)


def _longest(
    flops: int,
    moved: int,
    by_bytes: float,
    by_products: float,
    chain: float,
    features: tuple[float, ...] = (),
) -> Prediction:
    times: dict[Bound, float] = {"bytes": by_bytes, "products": by_products, "chain": chain}
    bound = max(times, key=lambda name: times[name])
    return Prediction(LAUNCH + times[bound], flops, moved, bound, features)
