"""Triton kernels for ``fused.py``; addresses are 64-bit, sums float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _taps(X, W, base, rows, columns, channel, tokens, width, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
          DIRECTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """sum_j W[c, j] X[t - j, c], or of X[t + j, c] where the direction is -1."""
    found = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.static_range(SIZE):
        t = rows - j * DIRECTION
        there = ((t >= 0) & (t < tokens))[:, None] & (columns < CHANNELS)[None, :]
        x = tl.load(X + base + t[:, None].to(tl.int64) * width + channel[None, :], mask=there, other=0.0)
        w = tl.load(W + channel * SIZE + j, mask=columns < CHANNELS, other=0.0)
        found += x.to(tl.float32) * w.to(tl.float32)[None, :]
    return found


@triton.jit
def convolve(X, W, Y, tokens, width, blocks, groups, eps, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
             SILU: tl.constexpr, NORM: tl.constexpr, DIRECTION: tl.constexpr, ROWS: tl.constexpr,
             BLOCK: tl.constexpr) -> None:  # fmt: skip
    """Y = l2norm(silu(taps)) of one block of tokens and one group of channels."""
    program = tl.program_id(0)
    group = program % groups
    block = program // groups % blocks
    base = (program // groups // blocks).to(tl.int64) * tokens * width
    rows, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    channel = group * CHANNELS + columns
    y = _taps(X, W, base, rows, columns, channel, tokens, width, CHANNELS, SIZE, DIRECTION, ROWS, BLOCK)
    if SILU:
        y = y * tl.sigmoid(y)
    if NORM:
        y = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    there = (rows < tokens)[:, None] & (columns < CHANNELS)[None, :]
    at = base + rows[:, None].to(tl.int64) * width + channel[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=there)


@triton.jit
def convolve_backward(X, W, DY, DC, DW, tokens, width, blocks, groups, eps, CHANNELS: tl.constexpr,
                      SIZE: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
                      BLOCK: tl.constexpr) -> None:  # fmt: skip
    """DC, the gradient of the taps, and DW [programs, width, SIZE], this block's part of that of W."""
    program = tl.program_id(0)
    group = program % groups
    block = program // groups % blocks
    sequence = program // groups // blocks
    base = sequence.to(tl.int64) * tokens * width
    rows, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    channel = group * CHANNELS + columns
    c = _taps(X, W, base, rows, columns, channel, tokens, width, CHANNELS, SIZE, 1, ROWS, BLOCK)
    there = (rows < tokens)[:, None] & (columns < CHANNELS)[None, :]
    at = base + rows[:, None].to(tl.int64) * width + channel[None, :]
    d = tl.load(DY + at, mask=there, other=0.0).to(tl.float32)
    part = tl.sigmoid(c)
    if NORM:
        s = c * part if SILU else c
        root = tl.rsqrt(tl.sum(s * s, 1) + eps)
        d = root[:, None] * (d - s * (root * root * tl.sum(d * s, 1))[:, None])
    if SILU:
        d = d * part * (1.0 + c * (1.0 - part))
    tl.store(DC + at, d.to(DC.dtype.element_ty), mask=there)
    to = DW + (sequence * blocks + block).to(tl.int64) * width * SIZE + channel * SIZE
    for j in tl.static_range(SIZE):
        t = rows - j
        before = ((t >= 0) & (t < tokens))[:, None] & (columns < CHANNELS)[None, :]
        x = tl.load(X + base + t[:, None].to(tl.int64) * width + channel[None, :], mask=before, other=0.0)
        tl.store(to + j, tl.sum(d * x.to(tl.float32), 0), mask=columns < CHANNELS)


@triton.jit
def norm_and_gate(Out, Gate, W, Y, count, eps, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
                  BLOCK: tl.constexpr) -> None:  # fmt: skip
    """Y = rms_norm(Out) W silu(G), rows of CHANNELS."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there = (rows < count)[:, None] & (columns < CHANNELS)[None, :]
    at = rows[:, None].to(tl.int64) * CHANNELS + columns[None, :]
    o = tl.load(Out + at, mask=there, other=0.0).to(tl.float32)
    g = tl.load(Gate + at, mask=there, other=0.0).to(tl.float32)
    w = tl.load(W + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(o * o, 1) / CHANNELS + eps)
    y = o * root[:, None] * w[None, :] * g * tl.sigmoid(g)
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=there)


@triton.jit
def norm_and_gate_backward(Out, Gate, W, DY, DO, DG, DW, count, eps, CHANNELS: tl.constexpr,
                           ROWS: tl.constexpr, BLOCK: tl.constexpr) -> None:  # fmt: skip
    """Gradients of all three; DW [programs, CHANNELS] is this block's part of W's."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there = (rows < count)[:, None] & (columns < CHANNELS)[None, :]
    at = rows[:, None].to(tl.int64) * CHANNELS + columns[None, :]
    o = tl.load(Out + at, mask=there, other=0.0).to(tl.float32)
    g = tl.load(Gate + at, mask=there, other=0.0).to(tl.float32)
    d = tl.load(DY + at, mask=there, other=0.0).to(tl.float32)
    w = tl.load(W + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(o * o, 1) / CHANNELS + eps)
    n = o * root[:, None]
    part = tl.sigmoid(g)
    tl.store(
        DG + at, (d * n * w[None, :] * part * (1.0 + g * (1.0 - part))).to(DG.dtype.element_ty), mask=there
    )
    d = d * g * part
    tl.store(DW + tl.program_id(0) * CHANNELS + columns, tl.sum(d * n, 0), mask=columns < CHANNELS)
    d = d * w[None, :]
    d = root[:, None] * (d - n * (tl.sum(d * n, 1) / CHANNELS)[:, None])
    tl.store(DO + at, d.to(DO.dtype.element_ty), mask=there)
