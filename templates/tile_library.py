"""Tile functions of the generated kernels. This file is text for the generator, which copies what a
module uses; nothing imports it.

A tile [C, D] holds the C tokens of one chunk; w is the per-step log decay, zero where a token is
padding. Every exponent is a sum over an interval inside the chunk, formed by adding only, so a gate
of -inf (a reset) needs no care: nothing is subtracted, and masks select instead of multiplying.
"""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)); the series keeps small results where 1 + e rounds to 1."""
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(e < 1e-3, e - e * e * (0.5 - e / 3), tl.log(1.0 + e))


@triton.jit
def tanh(x):
    """By exp(-2|x|); the series keeps small results."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    big = (1.0 - e) / (1.0 + e)
    small = a - a * a * a / 3
    return tl.where(x < 0, -1.0, 1.0) * tl.where(a < 1e-2, small, big)


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0; the series keeps small results."""
    return tl.where(x > -1e-2, x * (1.0 + x * (0.5 + x / 6)), tl.exp(tl.minimum(x, 0.0)) - 1.0)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def step(x):
    """1 above zero, 1/2 at zero, 0 below."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, 0.0, 0.5))


@triton.jit
def power(x, exponent: tl.constexpr):
    """x ** exponent for x >= 0."""
    return tl.where(x > 0, tl.exp(exponent * tl.log(tl.maximum(x, 1e-38))), 0.0)


@triton.jit
def pairs_decay(w, C: tl.constexpr, INCLUSIVE: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """[C, C] of exp(w_{s+1} + ... + w_t), to w_{t-1} if EXCLUSIVE, zero outside the read; w [C]."""
    t = tl.arange(0, C)
    if EXCLUSIVE:
        # row t holds w_{t-1}: the running sum down the rows then ends one step earlier
        w = tl.sum(tl.where(t[:, None] - 1 == t[None, :], w[None, :], 0.0), 1)
        sums = tl.cumsum(tl.where(t[:, None] - 1 > t[None, :], w[:, None], 0.0), 0)
    else:
        sums = tl.cumsum(tl.where(t[:, None] > t[None, :], w[:, None], 0.0), 0)
    inside = t[:, None] >= t[None, :] if INCLUSIVE else t[:, None] > t[None, :]
    return tl.where(inside, tl.exp(tl.where(inside, sums, 0.0)), 0.0)


@triton.jit
def span_sum(p, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """[C]: at tau the sum of p[t, s] over s < tau <= t (EXCLUSIVE: s < tau < t)."""
    t = tl.arange(0, C)
    left = tl.cumsum(p, 1)  # column tau - 1 has the sum over s < tau
    first = t[None, :] + 1
    rows = t[:, None] > first if EXCLUSIVE else t[:, None] >= first
    down = tl.sum(tl.where(rows, left, 0.0), 0)
    return tl.sum(tl.where(t[:, None] - 1 == t[None, :], down[None, :], 0.0), 1)


@triton.jit
def row_sums(w, C: tl.constexpr, AFTER: tl.constexpr, STRICT: tl.constexpr):
    """[C]: at t the sum of w over s <= t, or over s >= t if AFTER; without s = t if STRICT. w [C]."""
    t = tl.arange(0, C)
    if AFTER:
        inside = t[None, :] > t[:, None] if STRICT else t[None, :] >= t[:, None]
    else:
        inside = t[None, :] < t[:, None] if STRICT else t[None, :] <= t[:, None]
    return tl.sum(tl.where(inside, w[None, :], 0.0), 1)


@triton.jit
def column_sums(w, C: tl.constexpr, D: tl.constexpr, AFTER: tl.constexpr, STRICT: tl.constexpr):
    """The same for every column of w [C, D]."""
    sums = tl.cumsum(w, 0, reverse=AFTER)
    if STRICT:
        t = tl.arange(0, C)
        if AFTER:
            source = tl.where(t + 1 < C, t + 1, t)
            edge = t + 1 == C
        else:
            source = tl.where(t > 0, t - 1, t)
            edge = t == 0
        shifted = tl.gather(sums, tl.broadcast_to(source[:, None], (C, D)), 0)
        sums = tl.where(edge[:, None], 0.0, shifted)
    return sums


@triton.jit
def decayed_score(
    x, y, w,
    C: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr,
    INCLUSIVE: tl.constexpr, EXCLUSIVE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[C, C]: sum_i x[t,i] y[s,i] exp(w[s+1,i] + ... + w[t,i]), to w[t-1] if EXCLUSIVE; x, y, w [C, D].

    Halving: at each level neighbouring blocks of 2^level tokens meet, anchored at the boundary between
    them: exp(sum from the boundary to t) on the rows of the second, exp(sum from s to the boundary) on
    those of the first, one product on the tensor cores. Both sums grow from level to level by the
    partner block's total.
    """
    t = tl.arange(0, C)
    whole = w
    after_boundary = tl.zeros_like(w) if EXCLUSIVE else w
    to_boundary = tl.zeros_like(w)
    out = tl.zeros((C, C), dtype=tl.float32)
    if INCLUSIVE:
        out = tl.where(t[:, None] == t[None, :], tl.sum(x * y, 1)[:, None], 0.0)
    for level in range(LEVELS):
        second = ((t >> level) & 1)[:, None] == 1
        rows = tl.where(second, x * tl.exp(after_boundary), 0.0).to(DOT)
        cols = tl.where(second, 0.0, y * tl.exp(to_boundary)).to(DOT)
        meet = (t >> (level + 1))[:, None] == (t >> (level + 1))[None, :]
        out += tl.where(meet, tl.dot(rows, tl.trans(cols), input_precision=PRECISION), 0.0)
        last = (((t >> level) ^ 1) << level) + (1 << level) - 1
        partner = tl.gather(whole, tl.broadcast_to(last[:, None], (C, D)), 0)
        whole += tl.where(second, partner, 0.0)
        after_boundary += tl.where(second, partner, 0.0)
        to_boundary += tl.where(second, 0.0, partner)
    return out


@triton.jit
def decay_adjoint(
    a, x, y, w,
    C: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr,
    INCLUSIVE: tl.constexpr, EXCLUSIVE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The derivatives of sum a[t,s] x[t,i] y[s,i] Lambda[t<-s,i] in x, y and w, by the same halving.

    A pair of blocks gives the gates of the second the sums of x dx over the later rows, those of the
    first the sums of y dy over the earlier ones: only sums, taken in SUMS precision.
    """
    t = tl.arange(0, C)
    whole = w
    after_boundary = tl.zeros_like(w) if EXCLUSIVE else w
    to_boundary = tl.zeros_like(w)
    dx = tl.zeros_like(x)
    dy = tl.zeros_like(y)
    dw = tl.zeros_like(w)
    if INCLUSIVE:
        diagonal = tl.sum(tl.where(t[:, None] == t[None, :], a, 0.0), 1)[:, None]
        dx += diagonal * y
        dy += diagonal * x
    for level in range(LEVELS):
        second = ((t >> level) & 1)[:, None] == 1
        from_boundary = tl.exp(after_boundary)
        up_to_boundary = tl.exp(to_boundary)
        rows = tl.where(second, x * from_boundary, 0.0).to(DOT)
        cols = tl.where(second, 0.0, y * up_to_boundary).to(DOT)
        below = (t & (1 << level))[:, None] > (t & (1 << level))[None, :]
        block = t >> (level + 1)
        meet = (block[:, None] == block[None, :]) & below
        part = tl.where(meet, a, 0.0).to(DOT)
        d_rows = tl.where(second, from_boundary * tl.dot(part, cols, input_precision=PRECISION), 0.0)
        d_cols = tl.where(
            second, 0.0, up_to_boundary * tl.dot(tl.trans(part), rows, input_precision=PRECISION)
        )
        dx += d_rows
        dy += d_cols
        half = t >> level
        inside = half[:, None] == half[None, :]
        if EXCLUSIVE:
            later = t[None, :] > t[:, None]
        else:
            later = t[None, :] >= t[:, None]
        chosen = tl.where(second, inside & later, inside & (t[None, :] < t[:, None]))
        dw += tl.dot(tl.where(chosen, 1.0, 0.0), x * d_rows + y * d_cols, input_precision=SUMS)
        last = ((half ^ 1) << level) + (1 << level) - 1
        partner = tl.gather(whole, tl.broadcast_to(last[:, None], (C, D)), 0)
        whole += tl.where(second, partner, 0.0)
        after_boundary += tl.where(second, partner, 0.0)
        to_boundary += tl.where(second, 0.0, partner)
    return dx, dy, dw


@triton.jit
def doubling_mask(level, C: tl.constexpr):
    """[C, C]: rows in the second, columns in the first of two neighbouring blocks of 2^level tokens."""
    t = tl.arange(0, C)
    half = t >> level
    meet = (half >> 1)[:, None] == (half >> 1)[None, :]
    return meet & (half[:, None] > half[None, :])
