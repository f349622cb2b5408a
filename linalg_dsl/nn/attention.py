"""Softmax attention for hybrids: over everything before, or over a sliding window."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linalg_dsl.errors import ArgumentError
from linalg_dsl.nn.conv import ShortConvolution
from linalg_dsl.nn.packing import Packing

ROTARY_BASE = 10000.0


class AttentionState(NamedTuple):
    """Keys (rotated) and values of the tokens that are still seen, [N, S, heads, D], the newest last.

    ``seen`` [N] counts all tokens so far; a sequence of fewer than S has its own at the end. ``tail`` is
    the short convolution's.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor
    tail: Tensor | None


class Attention(nn.Module):
    """Causal softmax attention, x [B, T, hidden_size] to the same shape.

    With ``window`` a token sees itself and the window - 1 tokens before it. Queries and keys are rotated by
    place (RoPE, Su et al. 2021, arXiv 2104.09864) unless ``rotary=False``. ``num_kv_heads`` divides
    ``num_heads``. ``conv_size`` > 1 puts a short convolution in front of queries, keys and values, as in
    ``Mixer``. Runs on PyTorch's scaled_dot_product_attention: causal for all of the past; for a window in
    blocks of its size, each with the block before, so time and memory grow with T times the window.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        window: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: bool = True,
        conv_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_heads = num_kv_heads or num_heads
        if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads:
            raise ArgumentError(f"Attention: num_kv_heads {kv_heads} does not divide num_heads {num_heads}")
        if head_dim is None and hidden_size % num_heads:
            raise ArgumentError(
                f"Attention: hidden_size {hidden_size} is no multiple of num_heads {num_heads}; give head_dim"
            )
        if window is not None and window < 1:
            raise ArgumentError(f"Attention: window must be at least 1, got {window}")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, kv_heads
        self.window = window
        self.head_dim = head_dim or hidden_size // num_heads
        if rotary and self.head_dim % 2:
            raise ArgumentError(f"Attention: rotary needs an even head_dim, got {self.head_dim}")
        self.rotary = rotary
        self.q = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False, **made)
        self.k = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=False, **made)
        self.v = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=False, **made)
        channels = (num_heads + 2 * kv_heads) * self.head_dim
        self.convolution = ShortConvolution(channels, conv_size, **made) if conv_size > 1 else None
        self.out = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False, **made)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        return_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        packing: Packing | None = None,
        in_place: bool = False,
    ) -> Any:
        """x to y; with ``return_state`` (y, ``AttentionState``). Arguments as of ``Mixer``; nothing is
        overwritten here.

        A state and ``cu_seqlens`` together are not taken: continue sequences as rows of a batch.
        """
        if packing is None and cu_seqlens is not None:
            packing = Packing.of(cu_seqlens, x.shape[1], cu_seqlens_cpu)
        if packing is not None and state is not None:
            raise ArgumentError("Attention: a state goes with rows of a batch, not with cu_seqlens")
        q, k, v, tail = self._project(x, state.tail if state else None, packing)
        batch = x.shape[0] if packing is None else packing.count
        seen = state.seen if state else torch.zeros(batch, dtype=torch.int64, device=x.device)
        if packing is None:
            place = seen[:, None] + torch.arange(x.shape[1], device=x.device)
        else:
            place = packing.place[None]
        if self.rotary:
            q, k = rotate(q, place), rotate(k, place)
        lengths = None
        if packing is not None:
            q, k, v, lengths = packing.pad(q), packing.pad(k), packing.pad(v), packing.lengths
        o = self._attend(q, k, v) if state is None else self._continue(q, k, v, state)
        if packing is not None:
            o = packing.unpad(o)
        y = self.out(o.flatten(2))
        if not return_state:
            return y
        return y, self._next(state, k, v, seen, lengths, tail)

    def _project(
        self, x: Tensor, tail: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        mixed = torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)
        if self.convolution is not None:
            mixed, tail = self.convolution(mixed, tail, packing)
        heads = mixed.view(*x.shape[:2], -1, self.head_dim)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=2)
        return q, k, v, tail

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Sequences from their beginning, [B, T, heads, D]."""
        if self.window is None or q.shape[1] <= self.window:
            return self._sdpa(q, k, v, causal=True)
        return self._blocks(q, k, v, self.window)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
        """Blocks of queries, each against its own keys and those of the block before."""
        batch, tokens = q.shape[:2]
        count = -(-tokens // size)
        fill = count * size - tokens

        def cut(x: Tensor) -> Tensor:
            padded = F.pad(x, (0, 0, 0, 0, 0, fill))
            return padded.view(batch, count, size, *x.shape[2:])

        def with_previous(x: Tensor) -> Tensor:
            own = cut(x)
            before = F.pad(own[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
            return torch.cat([before, own], dim=2).flatten(0, 1)

        i = torch.arange(size, device=q.device)[:, None] + size
        j = torch.arange(2 * size, device=q.device)
        near = (j <= i) & (j > i - size)
        first = near & (j >= size)
        mask = near.repeat(count, 1, 1)
        mask[0] = first
        mask = mask.repeat(batch, 1, 1)[:, None]
        o = self._sdpa(cut(q).flatten(0, 1), with_previous(k), with_previous(v), mask=mask)
        return o.reshape(batch, count * size, *o.shape[2:])[:, :tokens]

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState) -> Tensor:
        keys, values = torch.cat([state.keys.to(k.dtype), k], 1), torch.cat([state.values.to(v.dtype), v], 1)
        new, total = q.shape[1], keys.shape[1]
        # how many tokens before the query a key stands
        places = torch.arange(total, device=q.device)
        back = places[total - new :, None] - places
        mask = back >= 0
        if self.window is not None:
            mask = mask & (back < self.window)
        there = places >= total - new - state.seen[:, None]
        return self._sdpa(q, keys, values, mask=(mask & there[:, None])[:, None])

    def _sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        if group > 1:
            k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return o.transpose(1, 2)

    def _next(
        self,
        state: AttentionState | None,
        k: Tensor,
        v: Tensor,
        seen: Tensor,
        lengths: Tensor | None,
        tail: Tensor | None,
    ) -> AttentionState:
        if lengths is not None:  # to the right, so that the newest stand last
            shift = (torch.arange(k.shape[1], device=k.device) - (k.shape[1] - lengths[:, None])) % max(
                k.shape[1], 1
            )
            index = shift[:, :, None, None].expand(k.shape)
            k, v = k.gather(1, index), v.gather(1, index)
        if state is not None:
            k, v = torch.cat([state.keys.to(k.dtype), k], 1), torch.cat([state.values.to(v.dtype), v], 1)
        new = seen + (lengths if lengths is not None else k.shape[1] - (state.keys.shape[1] if state else 0))
        if self.window is not None:
            keep = min(self.window - 1, k.shape[1])
            k, v = k[:, k.shape[1] - keep :], v[:, v.shape[1] - keep :]
        return AttentionState(k, v, new, tail)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, window={self.window}"


def rotate(x: Tensor, place: Tensor) -> Tensor:
    """Pairs of channels (i, i + D/2) of x [B, T, heads, D] turned by place [B, T] times their own rate."""
    half = x.shape[-1] // 2
    rates = ROTARY_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = place.float()[..., None, None] * rates
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
