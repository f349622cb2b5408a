"""What the lowered ops compute, in PyTorch, from the meaning of the planner's ops.

They are made by ``lower``: a joint op is the sum or the tuple of the planner's ops that it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import product

import torch
from torch import Tensor

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.evaluate_ops import apply_op, expand
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.plan import Node

SCORE: Axes = ("t", "s")


def apply_lowered(
    node: Node,
    args: Sequence[Tensor | tuple[Tensor, ...]],
    axes: Sequence[Axes],
    sizes: Mapping[str, int],
) -> Tensor | tuple[Tensor, ...]:
    """The value of a node of a lowered plan, a tuple for an op that is used through picks."""
    if node.op == "pick":
        (several,) = args
        return several[int(str(node.attr("index")))]
    whole = [_single(a) for a in args]
    match node.op:
        case "ut_transform":
            return _ut_transform(node, whole, axes, sizes)
        case "total":
            return whole[0].sum(axes[0].index("t") - len(axes[0])).exp()
        case "decayed_scores":
            return _decayed_scores(node, whole, axes[-1], sizes)
        case "decay_adjoints":
            return _decay_adjoints(node, whole, axes[-1], sizes)
        case _:
            return apply_op(node, whole, axes, sizes)


def _ut_transform(
    node: Node, args: Sequence[Tensor], axes: Sequence[Axes], sizes: Mapping[str, int]
) -> tuple[Tensor, ...]:
    """(I - G Sigma)^-1, r x r blocks row-major; token-major the matrix is unit lower triangular."""
    m, r, tokens = int(str(node.attr("m"))), int(str(node.attr("r"))), sizes["t"]
    scores = [expand(x, have, SCORE, sizes) for x, have in zip(args[: m * r], axes[: m * r], strict=True)]
    sigma = [expand(x, have, ("t",), sizes) for x, have in zip(args[m * r :], axes[m * r :], strict=True)]
    # [.., t, s] for every pair of blocks: G with its columns scaled by sigma, summed over the rows of W
    blocks = [
        [
            reduce(Tensor.add, (scores[i * m + j] * sigma[j * r + k].unsqueeze(-2) for j in range(m)))
            for k in range(r)
        ]
        for i in range(r)
    ]
    batch = reduce(Tensor.add, (x for row in blocks for x in row)).shape[:-2]
    system = scores[0].new_zeros(*batch, tokens, r, tokens, r)
    for i, k in product(range(r), repeat=2):
        system[..., :, i, :, k] = blocks[i][k]
    system = system.reshape(*batch, tokens * r, tokens * r)
    unit = torch.eye(tokens * r, dtype=system.dtype, device=system.device)
    inverse = torch.linalg.solve_triangular(unit - system, unit, upper=False, unitriangular=True)
    inverse = inverse.reshape(*batch, tokens, r, tokens, r)
    return tuple(inverse[..., :, i, :, k] for i, k in product(range(r), repeat=2))


def _decayed_scores(
    node: Node, args: Sequence[Tensor], wide: Axes, sizes: Mapping[str, int]
) -> tuple[Tensor, ...]:
    rows, cols, reads, pairs = _group(node)
    x, y, w = args[:rows], args[rows : rows + cols], args[-1]
    return tuple(
        apply_op(
            Node("decayed_score", (), (("read", reads[i]),), SCORE),
            (x[i], y[j], w),
            (wide, wide, wide),
            sizes,
        )
        for i, j in pairs
    )


def _decay_adjoints(
    node: Node, args: Sequence[Tensor], wide: Axes, sizes: Mapping[str, int]
) -> tuple[Tensor, ...]:
    rows, cols, reads, pairs = _group(node)
    a, rest = args[: len(pairs)], args[len(pairs) :]
    x, y, w = rest[:rows], rest[rows : rows + cols], rest[-1]

    def moved(number: int, transposed: bool) -> Tensor:
        i, j = pairs[number]
        made = Node("decay_apply", (), (("read", reads[i]), ("transposed", transposed)), wide)
        return apply_op(made, (a[number], x[i] if transposed else y[j], w), (SCORE, wide, wide), sizes)

    def gate(number: int) -> Tensor:
        i, j = pairs[number]
        made = Node("pair_gate", (), (("read", reads[i]),), wide)
        return apply_op(made, (a[number], x[i], y[j], w), (SCORE, wide, wide, wide), sizes)

    everything = range(len(pairs))
    dx = [_total([moved(n, False) for n in everything if pairs[n][0] == i]) for i in range(rows)]
    dy = [_total([moved(n, True) for n in everything if pairs[n][1] == j]) for j in range(cols)]
    for i, j in _pairs(str(dict(node.attrs).get("same", ""))):
        dy[j] = dy[j] + dx[i]
    return (*dx, *dy, _total([gate(n) for n in everything]))


def _group(node: Node) -> tuple[int, int, list[str], list[tuple[int, int]]]:
    """(rows, columns, read of every row, pairs) of a joint op."""
    attrs = dict(node.attrs)
    pairs = _pairs(str(attrs["pairs"]))
    return int(str(attrs["rows"])), int(str(attrs["cols"])), str(attrs["reads"]).split(","), pairs


def _pairs(text: str) -> list[tuple[int, int]]:
    return [(int(p.split("-")[0]), int(p.split("-")[1])) for p in text.split(",") if p]


def _total(terms: Sequence[Tensor]) -> Tensor:
    if not terms:
        raise InternalError("a row or column of a joint op stands in no pair")
    return reduce(Tensor.add, terms)


def _single(value: Tensor | tuple[Tensor, ...]) -> Tensor:
    if not isinstance(value, Tensor):
        raise InternalError("a value of several results is used through its picks only")
    return value
