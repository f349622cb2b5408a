"""The short depthwise causal convolution in front of queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linalg_dsl.nn.packing import Packing, last_tokens


class ShortConvolution(nn.Module):
    """y_t = sum_j weight[:, j] x_{t-j} for every channel by itself, j = 0 .. size - 1; no bias.

    x is [B, T, C]. What a sequence hands on is its tail, its last size - 1 tokens [N, size - 1, C]. A sum
    of ``size`` shifted products instead of a library's convolution: one form serves packed sequences,
    tails and single tokens, and needs no transposed copy.
    """

    def __init__(
        self,
        channels: int,
        size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size, device=device, dtype=dtype))
        bound = size**-0.5  # what torch gives a depthwise convolution
        nn.init.uniform_(self.weight, -bound, bound)

    def start(self, count: int, like: Tensor) -> Tensor:
        """The tail of a sequence that has not begun: zeros."""
        return like.new_zeros(count, self.size - 1, self.weight.shape[0])

    def forward(
        self, x: Tensor, tail: Tensor | None = None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output and the new tail."""
        if tail is None:
            tail = self.start(x.shape[0] if packing is None else packing.count, x)
        if packing is None:
            longer = torch.cat([tail.to(x.dtype), x], dim=1)
            taps = [longer[:, self.size - 1 - j :][:, : x.shape[1]] for j in range(self.size)]
        else:
            taps = [self._shifted(x, j, tail, packing) for j in range(self.size)]
        weight = self.weight.to(x.dtype)
        y = taps[0] * weight[:, 0]
        for j in range(1, self.size):
            y = torch.addcmul(y, taps[j], weight[:, j])
        return y, last_tokens(x, tail.to(x.dtype), packing)

    def _shifted(self, x: Tensor, by: int, tail: Tensor, packing: Packing) -> Tensor:
        """Every token's value ``by`` tokens before, of its own sequence."""
        if by == 0:
            return x
        moved = torch.roll(x, by, dims=1)
        old = tail[packing.sequence, (self.size - 1 + packing.place - by).clamp_max(self.size - 2)]
        return torch.where((packing.place >= by)[None, :, None], moved, old[None].to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, size={self.size}"
