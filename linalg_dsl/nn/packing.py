"""Where every token of a packed batch stands: its sequence and its place in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Sequences packed into a batch of one, with what layers need of them, on the tokens' device.

    ``cu_seqlens`` [N + 1]; ``sequence`` and ``place`` [T], which sequence a token is of and how many of
    its tokens stand before it; ``lengths`` [N]; ``longest`` is a number known on the host.
    """

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor | None
    sequence: Tensor
    place: Tensor
    lengths: Tensor
    longest: int

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, tokens: int, cu_seqlens_cpu: Tensor | None = None, longest: int | None = None
    ) -> Packing:
        """``longest`` or ``cu_seqlens_cpu`` spare a wait for the device."""
        times = torch.arange(tokens, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), times, right=True)
        lengths = cu_seqlens.diff()
        if longest is None:
            known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
            longest = int(known.diff().max()) if known.shape[0] > 1 else 0
        return cls(cu_seqlens, cu_seqlens_cpu, sequence, times - cu_seqlens[sequence], lengths, longest)

    @property
    def count(self) -> int:
        return self.lengths.shape[0]

    def pad(self, x: Tensor) -> Tensor:
        """[1, T, ...] as [N, longest, ...], zeros after the end of a sequence."""
        out = x.new_zeros(self.count, self.longest, *x.shape[2:])
        out[self.sequence, self.place] = x[0]
        return out

    def unpad(self, x: Tensor) -> Tensor:
        """Back from [N, longest, ...] to [1, T, ...]."""
        return x[self.sequence, self.place].unsqueeze(0)

    def last(self, x: Tensor) -> Tensor:
        """Of [1, T, ...] the last token of each sequence, [N, ...]; of an empty one that before it."""
        return x[0, (self.cu_seqlens[1:] - 1).clamp_min(0)]


def last_tokens(x: Tensor, before: Tensor, packing: Packing | None) -> Tensor:
    """The last W tokens of ``before`` [N, W, ...] followed by x: [N, W, ...] again."""
    width = before.shape[1]
    if packing is None:
        return torch.cat([before, x], dim=1)[:, x.shape[1] :] if width else before
    # counted from the end of a sequence: what lies before its first token is in ``before``
    back = torch.arange(width, 0, -1, device=x.device)
    place = packing.lengths[:, None] - back
    inside = (packing.cu_seqlens[:-1, None] + place).clamp(0, max(x.shape[1] - 1, 0))
    own = x[0, inside] if x.shape[1] else before
    outside = (width + place).clamp(0, width - 1) if width else place
    old = before.gather(1, outside.view(*outside.shape, *(1,) * (x.dim() - 2)).expand(before.shape))
    return torch.where((place >= 0).view(*place.shape, *(1,) * (x.dim() - 2)), own, old)
