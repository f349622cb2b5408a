"""The functions of generated pipelines; one holds those that it uses."""

import torch


def turned(x, cu_seqlens):
    """States of the sequences of a packed batch from the last to the first; of a dense batch as they are."""
    return x if x is None or cu_seqlens is None else x.flip(0)


def spread(x, heads, axis):
    """Every head of a tensor as often as it is shared."""
    have = x.shape[axis]
    return x if have == heads else x.repeat_interleave(heads // have, dim=axis)


def stage_heads(heads, counts):
    """How many heads the inputs of a stage stand for: as few as they allow."""
    own = max(counts)
    return heads if any(own % n for n in counts) else own


def wide(x, heads, axis):
    """A value in full precision, spread over the heads."""
    x = spread(x, heads, axis)
    return x if x.dtype == torch.float64 else x.float()


def number(value, like):
    """A const in full precision."""
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    return like.new_full((1, 1), value, dtype=kind)


def per_head(x, heads):
    """What no token changes, once for every head."""
    return x.expand(heads, *x.shape[-2:])


def shift(x, first, start, heads, cu_seqlens):
    """Every token's predecessor; before a sequence stands ``first`` [N, H, ...] or, without it, ``start``."""
    if first is not None:
        x, first = spread(x, heads, 2), first.to(x.dtype)
    if cu_seqlens is None:
        ahead = x.new_full((x.shape[0], 1, *x.shape[2:]), start) if first is None else first[:, None]
        return torch.cat([ahead, x], 1)[:, : x.shape[1]]
    rows = x.new_full((cu_seqlens.shape[0] - 1, *x.shape[2:]), start) if first is None else first
    # one row more than there are tokens takes what stands before empty sequences
    begins = torch.where(cu_seqlens.diff() > 0, cu_seqlens[:-1], x.shape[1]).long()
    before = torch.cat([x.new_zeros((1, *x.shape[2:])), x[0]])
    return before.index_copy(0, begins, rows)[None, : x.shape[1]]


def by_rows(x):
    """[B, T, h, n, ...] as n tokens for each: [B, T n, h, ...]."""
    return x.movedim(3, 2).flatten(1, 2)


def repeated(x, n):
    """Every token n times."""
    return x.repeat_interleave(n, dim=1)


def at_first(x, n, rest):
    """Every token once, then n - 1 times ``rest``."""
    return torch.cat([x[:, :, None], x.new_full((*x.shape[:2], n - 1, *x.shape[2:]), rest)], 2).flatten(1, 2)


def per_token(x, like):
    """A param for every token."""
    return x.expand(*like.shape[:2], *x.shape)


def last_token(x, first, heads, cu_seqlens):
    """The last token of every sequence, [N, H, ...]; of an empty one what was handed in, or 0."""
    x = spread(x, heads, 2)
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # copies: a state that is a part of the input would change with it
    ahead = x.new_zeros((count, *x.shape[2:]), dtype=kind) if first is None else first.to(kind, copy=True)
    if x.shape[1] == 0:
        return ahead
    if cu_seqlens is None:
        return x[:, -1].to(kind, copy=True)
    ends = (cu_seqlens[1:].long() - 1).clamp_min(0)
    empty = (cu_seqlens.diff() == 0).view(-1, *[1] * (x.dim() - 2))
    return torch.where(empty, ahead, x[0][ends].to(kind))


def one(like):
    """The vector of a single one, for every head."""
    return like.new_ones((1, 1))


def column(state):
    """A vector state, if it was handed in, as a matrix with one column."""
    return None if state is None else state[..., None]
