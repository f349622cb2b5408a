"""Predicted work and time of one launch, by the model of ``levels``: nothing here is measured."""

from __future__ import annotations

from collections.abc import Sequence

from linalg_dsl.codegen.schedule.choice import Place, predicted_time
from linalg_dsl.codegen.schedule.kernel_plan import Kernel
from linalg_dsl.codegen.schedule.two_level import products
from linalg_dsl.planner.plan import Node


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


def walk_prediction(
    nodes: Sequence[Node], kernel: Kernel, place: Place, lanes: int, chunks: int, block: int, programs: int
) -> str:
    own, _ = place.sizes(kernel.split)
    flops = walk_flops(nodes, kernel, own, block, place.chunk, programs, chunks)
    time = predicted_time(nodes, kernel, place, lanes, chunks, (place.K, place.V))
    return f"{flops / 1e9:.3g} GFLOP; about {time:.3g} us by the model"


def prep_prediction(nodes: Sequence[Node], kernel: Kernel, place: Place, moved: int) -> str:
    """A floor: what the bytes or the products alone take."""
    flops = prep_flops(nodes, kernel, place)
    rate = (3.3e6 if place.operand_bytes == 2 else 1.65e6) * place.target.units
    by_bytes, by_products = moved / place.target.bandwidth, flops / rate
    of = "bytes" if by_bytes >= by_products else "products"
    return f"{flops / 1e9:.3g} GFLOP; at least {max(by_bytes, by_products):.3g} us for its {of}"
