"""The default modules that make the inputs of a recurrence from x, and its params."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linalg_dsl.nn import fused
from linalg_dsl.nn.conv import ShortConvolution
from linalg_dsl.nn.links import FREE, Below, Between, Link, Root, inverse_softplus
from linalg_dsl.nn.packing import Packing, last_tokens
from linalg_dsl.nn.roles import Role

L2_EPS = 1e-6
RATES = (1e-3, 1e-1)
"""What a token lets go at the start, log-uniform over heads and channels: Mamba's step sizes."""


def head_first(heads: int, dims: Sequence[int]) -> int:
    return heads * math.prod(dims)


class TokenInput(nn.Module):
    """One input per token: x [B, T, hidden] to [B, T, heads, *dims].

    Linear (low rank where the role says so), then short convolution, silu, a bias per head and channel,
    the link into the promised range, l2norm: those of them that the role names. Gates and all that
    has a link is computed and handed on in float32 at least. Along the head axis lie axis 0 of
    ``project.weight``, ``convolution.weight`` and ``bias``.
    """

    def __init__(
        self,
        role: Role,
        hidden_size: int,
        heads: int,
        dims: Sequence[int],
        conv_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.role, self.heads, self.dims = role, heads, tuple(dims)
        width = head_first(heads, dims)
        rank = role.rank if role.rank is not None and role.rank < width else None
        self.down = nn.Linear(hidden_size, rank, bias=False, **made) if rank else None
        self.project = nn.Linear(rank or hidden_size, width, bias=False, **made)
        self.convolution = None
        if role.conv and conv_size > 1:
            self.convolution = ShortConvolution(width, conv_size, **made)
        shape = (heads, *dims)
        self.bias = nn.Parameter(torch.zeros(shape, **made)) if role.bias else None
        self.log_rate = nn.Parameter(torch.zeros(shape, **made)) if role.kind == "decay" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The bias and rate as published; what a projection begins with is torch's."""
        if self.bias is None or self.bias.is_meta:
            return
        with torch.no_grad():
            kind = self.role.kind
            if kind in ("decay", "step"):  # as in Mamba
                self.bias.copy_(inverse_softplus(log_uniform(self.bias, *RATES)))
            elif kind == "gate" and not isinstance(self.link, Root):
                self.set_rest(self._near_top(log_uniform(self.bias, *RATES)))
            if self.log_rate is not None:
                self.log_rate.copy_(uniform(self.log_rate, 1, 16).log_())

    @property
    def link(self) -> Link:
        return self.role.link

    def _near_top(self, lost: Tensor) -> Tensor:
        """Gates that let ``lost`` go, within their range."""
        match self.link:
            case Between(low, high):
                return high - (high - low) * lost
            case Below(high):
                return high - (lost + max(high, 0.0))
            case link:
                return link.value(torch.zeros_like(lost))

    def forward(
        self,
        x: Tensor,
        tail: Tensor | None = None,
        packing: Packing | None = None,
        projected: Tensor | None = None,
        fuse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The input and the convolution's new tail (None where there is no convolution).

        ``projected``: what ``project`` would give. ``fuse``: one kernel for the rest where there is one.
        """
        y = projected
        if y is None:
            y = self.project(x if self.down is None else self.down(x))
        plain = self.role.link == FREE and self.bias is None and self.role.kind != "matrix"
        if fuse and self.convolution is not None and tail is None and packing is None and plain:
            start = self.convolution.start(x.shape[0], y)
            norm = L2_EPS if self.role.norm else None
            after = last_tokens(y, start, None)
            y = fused.convolve(y, self.convolution.weight, self.dims[-1], self.role.silu, norm)
            return y.view(*x.shape[:2], self.heads, *self.dims), after
        if self.convolution is not None:
            y, tail = self.convolution(y, tail, packing)
        if self.role.silu:
            y = F.silu(y)
        y = y.view(*x.shape[:2], self.heads, *self.dims)
        return self.finish(y), tail

    def finish(self, y: Tensor) -> Tensor:
        """What comes after the projection, of [..., heads, *dims]."""
        kind = y.dtype
        if self.bias is not None:
            y = _wide(y) + _wide(self.bias)
        if self.log_rate is not None:
            return -_wide(self.log_rate).exp() * F.softplus(y)
        y = self.link.value(y)
        if self.role.norm:
            wide = _wide(y)
            y = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)).to(kind)
        if self.role.kind == "matrix":  # of spectral norm at most 1
            wide = _wide(y)
            y = (wide / wide.square().sum((-2, -1), keepdim=True).sqrt().clamp_min(1.0)).to(kind)
        return y

    def rest(self) -> Tensor:
        """The value where the projection gives zero, [heads, *dims]; of vectors a small one."""
        weight = self.project.weight
        zero = torch.zeros(self.heads, *self.dims, device=weight.device)
        if self.bias is None and self.role.kind != "matrix":
            signs = torch.arange(zero.shape[-1], device=weight.device) % 2
            return (zero + 1e-3 * (1 - 2 * signs)) if zero.shape[-1] % 2 == 0 else zero
        with torch.no_grad():
            return self.finish(zero).float()

    def set_rest(self, value: Tensor) -> None:
        """Makes ``value`` [heads, *dims] the value at rest, by the bias."""
        assert self.bias is not None
        with torch.no_grad():
            self.bias.copy_(self.link.raw(value.to(self.bias.device, torch.float32)).clamp(-12, 12))

    def extra_repr(self) -> str:
        return f"{self.role.kind}, heads={self.heads}, dims={self.dims}"


class HeadInput(nn.Module):
    """One param, [heads, *dims]: a parameter through the link into its range."""

    def __init__(
        self,
        role: Role,
        heads: int,
        dims: Sequence[int],
        initial: Tensor,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.role, self.heads, self.dims = role, heads, tuple(dims)
        self.bias = nn.Parameter(torch.empty(heads, *dims, device=device, dtype=dtype))
        if not self.bias.is_meta:
            self.set_rest(initial)

    @property
    def link(self) -> Link:
        return self.role.link

    def forward(self) -> Tensor:
        return self.link.value(_wide(self.bias))

    def rest(self) -> Tensor:
        with torch.no_grad():
            return self.forward().float()

    def set_rest(self, value: Tensor) -> None:
        """Makes ``value`` [heads, *dims] its value."""
        with torch.no_grad():
            raw = self.link.raw(value.to(self.bias.device, torch.float32))
            self.bias.copy_(raw.expand(self.bias.shape))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dims={self.dims}"


def uniform(like: Tensor, low: float, high: float) -> Tensor:
    """Numbers of the shape of ``like``, evenly spaced, in an order drawn with torch's generator.

    Independent draws have this distribution, too, but a layer of one head would be a lottery.
    """
    count = like.numel()
    order = torch.randperm(count, device=like.device, dtype=torch.float32)
    return (low + (high - low) * (order + 0.5) / count).view(like.shape)


def log_uniform(like: Tensor, low: float, high: float) -> Tensor:
    """The same, evenly spaced in their logarithms."""
    return uniform(like, math.log(low), math.log(high)).exp_()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
