"""What a layer does around its kernels in few passes over memory: on a GPU, with ``Mixer(fused=True)``.

A short convolution with silu and l2norm is one kernel forward and two backward, the output norm with its gate
one and one, and the gradients of projections from one x are added up inside their products. Everything is
computed in float32 and stored in the type of its input. The same formulas, operation by operation, are in
``conv.py``, ``inputs.py`` and ``mixer.py``; these are used wherever the kernels do not apply.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 4096
"""Elements of a program, which has eight warps."""


def applies(x: Tensor) -> bool:
    """Whether kernels can run on this tensor: on a GPU, or anywhere in Triton's interpreter.

    Not under torch.compile, which fuses the plain formulas itself.
    """
    if torch.compiler.is_compiling():
        return False
    return (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and x.dtype != torch.float64


def project(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x W^T for every W, [B, T, hidden] and [n, hidden] to [B, T, n]."""
    if torch.is_autocast_enabled(x.device.type):
        kind = torch.get_autocast_dtype(x.device.type)
        x, weights = x.to(kind), [w.to(kind) for w in weights]
    return cast(tuple[Tensor, ...], _Project.apply(x, *weights))  # type: ignore[no-untyped-call]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w) for w in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        flat = [g.reshape(-1, g.shape[-1]) for g in grads]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = flat[0] @ weights[0]
            for g, w in zip(flat[1:], weights[1:], strict=True):
                dx.addmm_(g, w)
            dx = dx.view(x.shape)
        wanted = ctx.needs_input_grad[1:]
        return dx, *(g.mT @ rows if need else None for g, need in zip(flat, wanted, strict=True))


def convolve(x: Tensor, weight: Tensor, channels: int, silu: bool, norm: float | None) -> Tensor:
    """The short convolution of x [B, T, C] with weight [C, size], then silu, then l2norm.

    ``norm`` is added to the squares of ``channels`` neighbours, which are normed together; None: no norm.
    """
    return cast(Tensor, _Convolve.apply(x, weight, channels, silu, norm))  # type: ignore[no-untyped-call]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, channels: int, silu: bool, norm: float | None) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.given = channels, silu, norm
        return _forward(x, weight, channels, silu, norm, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from linalg_dsl.nn import kernels

        x, weight = ctx.saved_tensors
        channels, silu, norm = ctx.given
        batch, tokens, width = x.shape
        block, rows = _tile(channels)
        d_conv = torch.empty_like(x)
        blocks = -(-tokens // rows)
        d_weight = x.new_empty(batch * blocks, *weight.shape, dtype=torch.float32)
        if x.numel():
            kernels.convolve_backward[(blocks * (width // channels) * batch,)](
                x, weight, dy.contiguous(), d_conv, d_weight, tokens, width, blocks, width // channels,
                norm or 0.0, CHANNELS=channels, SIZE=weight.shape[1], SILU=silu, NORM=norm is not None,
                ROWS=rows, BLOCK=block, num_warps=8,
            )  # fmt: skip
        dx = _forward(d_conv, weight, channels, False, None, -1)
        return dx, d_weight.sum(0).to(weight.dtype), None, None, None


def _forward(
    x: Tensor, weight: Tensor, channels: int, silu: bool, norm: float | None, direction: int
) -> Tensor:
    from linalg_dsl.nn import kernels

    batch, tokens, width = x.shape
    block, rows = _tile(channels)
    y = torch.empty_like(x)
    blocks = -(-tokens // rows)
    if x.numel():
        kernels.convolve[(blocks * (width // channels) * batch,)](
            x, weight, y, tokens, width, blocks, width // channels, norm or 0.0, CHANNELS=channels,
            SIZE=weight.shape[1], SILU=silu, NORM=norm is not None, DIRECTION=direction, ROWS=rows,
            BLOCK=block, num_warps=8,
        )  # fmt: skip
    return y


def norm_and_gate(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of o [..., V] with weight [V], times silu of gate, of as many elements; in gate's shape."""
    return cast(Tensor, _NormAndGate.apply(o, gate, weight, eps))  # type: ignore[no-untyped-call]


class _NormAndGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        from linalg_dsl.nn import kernels

        o, gate = o.contiguous(), gate.contiguous()
        ctx.save_for_backward(o, gate, weight)
        ctx.eps = eps
        y = torch.empty_like(gate)
        channels = o.shape[-1]
        block, rows = _tile(channels)
        count = o.numel() // channels
        if count:
            kernels.norm_and_gate[(-(-count // rows),)](
                o, gate, weight, y, count, eps, CHANNELS=channels, ROWS=rows, BLOCK=block, num_warps=8
            )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from linalg_dsl.nn import kernels

        o, gate, weight = ctx.saved_tensors
        channels = o.shape[-1]
        block, rows = _tile(channels)
        count = o.numel() // channels
        programs = -(-count // rows)
        d_o, d_gate = torch.empty_like(o), torch.empty_like(gate)
        d_weight = o.new_empty(programs, channels, dtype=torch.float32)
        if count:
            kernels.norm_and_gate_backward[(programs,)](
                o, gate, weight, dy.contiguous(), d_o, d_gate, d_weight, count, ctx.eps, CHANNELS=channels,
                ROWS=rows, BLOCK=block, num_warps=8,
            )  # fmt: skip
        return d_o, d_gate, d_weight.sum(0).to(weight.dtype), None


def _tile(channels: int) -> tuple[int, int]:
    """Columns, a power of two, and rows of a program."""
    block = 1 << max(channels - 1, 1).bit_length()
    return block, max(1, _TILE // block)
