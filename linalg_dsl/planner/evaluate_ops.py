"""What each chunk-level op computes, in PyTorch: the meaning that every other back end must match.

A value of a node with axes ``a_1 .. a_n`` is a tensor ``[*batch, a_1, .., a_n]``; batch dimensions
broadcast. Written for clarity and safety, not for speed: intervals of log decays are formed by adding
only, so -inf is a legal gate, and masks select, they never multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import FLOOR, Axes, ordered
from linalg_dsl.planner.plan import Node

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "tanh": torch.tanh,
    "silu": F.silu,
    "relu": torch.relu,
    "elu": F.elu,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "abs": torch.abs,
    "sign": torch.sign,
    "reciprocal": torch.reciprocal,
    "heaviside": lambda x: torch.heaviside(x, torch.full_like(x, 0.5)),
    "side": lambda x: side(x),
    "log_size": lambda x: x.abs().clamp_min(FLOOR).log(),
}
"""``pow`` is not here: it has its exponent as an attribute."""


def side(x: Tensor) -> Tensor:
    """-1 below 0, else 1."""
    return 1 - 2 * (x < 0).to(x.dtype)


def align(x: Tensor, have: Axes, want: Axes) -> Tensor:
    """A view of ``x`` with dimensions of size 1 for the axes that it lacks."""
    index = tuple(slice(None) if a in have else None for a in want)
    where = (..., *index)
    return x[where] if want else x


def align_to(have: Sequence[str], x: Tensor, want: Axes) -> Tensor:
    """A view of ``x``, whose trailing axes are ``have``, with these axes in the order ``want``."""
    lead = x.dim() - len(have)
    return x.permute(*range(lead), *(lead + have.index(a) for a in want))


def expand(x: Tensor, have: Axes, want: Axes, sizes: Mapping[str, int]) -> Tensor:
    """A view of ``x`` in which every axis of ``want`` has its full size."""
    x = align(x, have, want)
    return x.expand(*x.shape[: x.dim() - len(want)], *(sizes[a] for a in want))


def pair_mask(tokens: int, read: object, device: torch.device) -> Tensor:
    """[t, s], true where the pair is in ``read``."""
    ones = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    return ones.tril(0 if read == "inclusive" else -1)


def pair_decay(w: Tensor, read: object) -> Tensor:
    """[.., t, s, D] from the log decay [.., t, D]: the decay of each pair of ``read``, else 0."""
    tokens = w.shape[-2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=w.device).tril(-1)[..., None]
    logs = torch.where(later, w.unsqueeze(-2), 0.0).cumsum(-3)
    if read == "exclusive":  # the interval ends before t
        logs = torch.cat([torch.zeros_like(logs[..., :1, :, :]), logs[..., :-1, :, :]], dim=-3)
    inside = pair_mask(tokens, read, w.device)[..., None]
    return torch.where(inside, torch.where(inside, logs, 0.0).exp(), 0.0)


def sum_before(x: Tensor, dim: int) -> Tensor:
    """At tau the sum of all earlier entries."""
    whole = x.cumsum(dim)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, 1)), whole.narrow(dim, 0, x.shape[dim] - 1)], dim)


def sum_after(x: Tensor, dim: int) -> Tensor:
    """At tau the sum of all later entries."""
    return sum_before(x.flip(dim), dim).flip(dim)


def sum_over_spans(p: Tensor, read: object) -> Tensor:
    """[.., t, s, D] -> [.., tau, D]: the sum over the pairs s < tau <= t (exclusive: tau < t)."""
    left = sum_before(p, -2)
    both = sum_after(left, -3) if read == "exclusive" else sum_after(left, -3) + left
    return both.diagonal(dim1=-3, dim2=-2).transpose(-1, -2)


def solve(
    scores: Sequence[Sequence[Tensor]],
    sigma: Sequence[Sequence[Tensor]],
    written: Sequence[Tensor],
    right: Sequence[Tensor],
    decay: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Z [t, D] of each of m rows and U of each of r, token after token; scores[i][j], sigma[j][i].

    All operands have one batch shape. ``decay`` [t, s, D] multiplies the scores of every column of rows.
    """
    rows, cols = range(len(written)), range(len(right))
    tokens = written[0].shape[-2] if written else 0
    z: list[list[Tensor]] = [[] for _ in rows]
    u: list[list[Tensor]] = [[] for _ in cols]
    for t in range(tokens):
        for i in cols:
            value = right[i][..., t, :]
            for j in rows if t else ():
                past = torch.stack(z[j], dim=-2)
                if decay is not None:
                    past = decay[..., t, :t, :] * past
                value = value + (scores[i][j][..., t : t + 1, :t] @ past).squeeze(-2)
            u[i].append(value)
        for j in rows:
            value = written[j][..., t, :]
            for i in cols:
                value = value + sigma[j][i][..., t, None] * u[i][t]
            z[j].append(value)
    return [torch.stack(x, dim=-2) for x in z], [torch.stack(x, dim=-2) for x in u]


def solve_reversed(
    scores: Sequence[Sequence[Tensor]],
    sigma: Sequence[Sequence[Tensor]],
    d_written: Sequence[Tensor],
    d_right: Sequence[Tensor],
    decay: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Y [s, D] of each of m rows and X of each of r: the same solve run from the last token.

    Y_j = dZ_j + sum_i G_ij^T X_i is the U-equation of a solve whose scores are the transposed ones,
    X_i = dU_i + sum_j sigma_ji Y_j its Z-equation.
    """
    rows, cols = range(len(d_written)), range(len(d_right))

    def back(x: Tensor, dim: int = -2) -> Tensor:
        return x.flip(dim)

    x, y = solve(
        [[scores[i][j].transpose(-1, -2).flip(-1, -2) for i in cols] for j in rows],
        [[back(sigma[j][i], -1) for j in rows] for i in cols],
        [back(d) for d in d_right],
        [back(d) for d in d_written],
        None if decay is None else decay.transpose(-3, -2).flip(-3, -2),
    )
    return [back(v) for v in y], [back(v) for v in x]


def apply_op(node: Node, args: Sequence[Tensor], axes: Sequence[Axes], sizes: Mapping[str, int]) -> Tensor:
    """The value of one node that is neither a leaf nor a solve."""
    attrs = dict(node.attrs)
    read = attrs.get("read")
    match node.op:
        case "add" | "mul" | "maximum" | "minimum" | "compare":
            a, b = (align(x, have, node.axes) for x, have in zip(args, axes, strict=True))
            return _elementwise(node.op, a, b)
        case "unary":
            if attrs["fn"] == "pow":
                return torch.pow(args[0], float(str(attrs["exponent"])))
            return UNARY[str(attrs["fn"])](args[0])
        case "sum":
            return args[0].sum(axes[0].index(str(attrs["axis"])) - len(axes[0]))
        case "amax":
            return args[0].amax(axes[0].index(str(attrs["axis"])) - len(axes[0]))
        case "tokens" | "expand":
            return expand(args[0], axes[0], node.axes, sizes)
        case "score" | "apply" | "apply_t" if len(axes[1]) == 1:  # of one number per token
            return _narrow_product(node.op, args[0], args[1])
        case "score":
            return args[0] @ args[1].transpose(-1, -2)
        case "apply":
            return args[0] @ args[1]
        case "apply_t" | "write":
            return args[0].transpose(-1, -2) @ args[1]
        case "compose":
            a, b = (x.mT if attrs[side] else x for x, side in zip(args, ("left", "right"), strict=True))
            return a @ b
        case "read":
            return args[0] @ (args[1] if attrs["con"] == "K" else args[1].transpose(-1, -2))
        case "contract":
            whole = ordered((*axes[0], *axes[1]))
            a, b = (align(x, have, whole) for x, have in zip(args, axes, strict=True))
            return (a * b).sum(whole.index(str(attrs["axis"])) - len(whole))
        case "swap":
            names = {str(attrs["axis"]): str(attrs["other"]), str(attrs["other"]): str(attrs["axis"])}
            return align_to([names.get(a, a) for a in axes[0]], args[0], node.axes)
        case "first":
            return args[0]  # here one block has the whole axis
        case "mask":
            return torch.where(pair_mask(sizes["t"], read, args[0].device), args[0], 0.0)
        case "pairs_decay":
            return pair_decay(args[0][..., None], read).squeeze(-1)
        case "from_start":
            token = axes[0].index("t") - len(axes[0])
            return (sum_before(args[0], token) if attrs["exclusive"] else args[0].cumsum(token)).exp()
        case "to_end":
            return sum_after(args[0], axes[0].index("t") - len(axes[0])).exp()
        case "scale_state":
            return _whole_chunk(args[1], axes[1]) * args[0]
        case "weigh":
            return args[1][..., None, None] * args[0]
        case "boundary_product":
            return (args[0] * args[1]).sum(-2 if attrs["axis"] == "V" else -1)
        case "boundary_gate":
            product = _whole_chunk(args[2], axes[2]) * args[0] * args[1]
            return product.sum(-2 if "V" in axes[2] else -1)
        case "signs":
            token = axes[0].index("t") - len(axes[0])
            x = side(args[0])
            if attrs["exclusive"]:
                earlier = x.narrow(token, 0, x.shape[token] - 1)
                x = torch.cat([torch.ones_like(x.narrow(token, 0, 1)), earlier], token)
            return x.cumprod(token)
        case "sign_total":
            return side(args[0]).prod(axes[0].index("t") - len(axes[0]))
        case "decayed_score":
            return _pair_products(None, args[0], args[1], args[2], read).sum(-1)
        case "decay_apply":
            decay = args[0][..., None] * pair_decay(args[2], read)
            if attrs["transposed"]:
                return (decay * args[1].unsqueeze(-2)).sum(-3)
            return (decay * args[1].unsqueeze(-3)).sum(-2)
        case "pair_gate":
            return sum_over_spans(_pair_products(args[0], args[1], args[2], args[3], read), read)
        case "span_sum":
            return sum_over_spans(args[0][..., None], read).squeeze(-1)
        case "gate_sum":
            token = axes[0].index("t") - len(axes[0])
            match attrs["kind"]:
                case "from_start":
                    return sum_after(args[0], token) + args[0]
                case "from_start_exclusive":
                    return sum_after(args[0], token)
                case "to_end":
                    return sum_before(args[0], token)
                case kind:
                    raise InternalError(f"unknown kind of gate sum {kind!r}")
        case _:
            raise InternalError(f"no meaning for op {node.op!r}")


def apply_solve(
    node: Node, args: Sequence[Tensor], axes: Sequence[Axes], sizes: Mapping[str, int]
) -> tuple[Tensor, ...]:
    """All picks of a solve or solve_t node, in the order of their index."""
    m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
    cut = 2 * m * r
    wants: list[Axes] = [
        ("t", "s") if i < m * r else ("t",) if i < cut else node.axes for i in range(len(args))
    ]
    token = [expand(x, have, want, sizes) for x, have, want in zip(args, axes, wants, strict=True)]
    batch = _common_batch(token, wants)
    token = [x.expand(*batch, *x.shape[x.dim() - len(want) :]) for x, want in zip(token, wants, strict=True)]
    scores = [token[i * m : (i + 1) * m] for i in range(r)]
    sigma = [token[m * r + j * r : m * r + (j + 1) * r] for j in range(m)]
    run = solve if node.op == "solve" else solve_reversed
    decay = pair_decay(token[-1], "decayed") if dict(node.attrs).get("decayed") else None
    first, second = run(scores, sigma, token[cut : cut + m], token[cut + m : cut + m + r], decay)
    return (*first, *second)


def _narrow_product(op: str, a: Tensor, z: Tensor) -> Tensor:
    if op == "score":
        return a[..., None] * z[..., None, :]
    return ((a if op == "apply" else a.mT) @ z[..., None]).squeeze(-1)


def _elementwise(op: str, a: Tensor, b: Tensor) -> Tensor:
    match op:
        case "add":
            return a + b
        case "mul":
            return a * b
        case "maximum":
            return torch.maximum(a, b)
        case "minimum":
            return torch.minimum(a, b)
        case "compare":
            return (a > b).to(a.dtype) + 0.5 * (a == b).to(a.dtype)
        case _:
            raise InternalError(f"{op!r} is not elementwise")


def _common_batch(values: Sequence[Tensor], axes: Sequence[Axes]) -> tuple[int, ...]:
    shapes = [x.shape[: x.dim() - len(have)] for x, have in zip(values, axes, strict=True)]
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _whole_chunk(w: Tensor, axes: Axes) -> Tensor:
    """The decay of the whole chunk, [.., K, 1], [.., 1, V] or [.., 1, 1]."""
    total = w.sum(-2) if len(axes) > 1 else w.sum(-1, keepdim=True)
    return total.exp()[..., None, :] if "V" in axes else total.exp()[..., None]


def _pair_products(a: Tensor | None, x: Tensor, y: Tensor, w: Tensor, read: object) -> Tensor:
    """[.., t, s, D]: A_ts x_t y_s Lambda."""
    product = pair_decay(w, read) * x.unsqueeze(-2) * y.unsqueeze(-3)
    return product if a is None else product * a[..., None]
