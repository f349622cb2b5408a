"""Tile functions of the generated kernels. This file is text for the generator, which copies what a
module uses; nothing imports it.

A tile [C, D] holds the C tokens of one chunk; w is the per-step log decay, zero where a token is
padding. Every exponent is a sum over an interval inside the chunk, formed by adding only, so a gate
of -inf (a reset) needs no care: nothing is subtracted, and masks select instead of multiplying. Only gates
of one number per token, where operands are bfloat16 anyway, are bounded, summed once and subtracted.
"""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)); the series keeps small results where 1 + e rounds to 1."""
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 - e * (0.5 - e * (1 / 3 - e * (0.25 - e * 0.2))))
    return tl.maximum(x, 0.0) + tl.where(e < 3e-2, series, tl.log(1.0 + e))


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
    series = x * (1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5))))
    return tl.where(x > -0.1, series, tl.exp(tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)) - 1.0)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def step(x):
    """1 above zero, 1/2 at zero, 0 below."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, 0.0, 0.5))


@triton.jit
def parity_sign(count):
    """-1 to the power of a whole number."""
    return tl.where((count + 0.5).to(tl.int32) & 1 == 1, -1.0, 1.0)


@triton.jit
def power(x, exponent: tl.constexpr):
    """x ** exponent for x >= 0."""
    return tl.where(x > 0, tl.exp(exponent * tl.log(tl.maximum(x, 1.2e-38))), tl.where(x != x, x, 0.0))


@triton.jit
def token_rows(x):
    """The U rows of x [U, D] as vectors, U a power of two: nothing moves where a thread holds columns."""
    if x.shape[0] == 1:
        return (tl.reshape(x, (x.shape[1],)),)
    else:
        first, second = tl.split(tl.trans(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 1, 2, 0))
        return token_rows(first) + token_rows(second)


@triton.jit
def token_numbers(x):
    """The U numbers of x [U, 1]."""
    rows = token_rows(x)
    numbers = ()
    for u in tl.static_range(x.shape[0]):
        numbers = numbers + (tl.sum(rows[u], 0),)  # noqa: RUF005
    return numbers


@triton.jit
def token_tile(rows, first: tl.constexpr, count: tl.constexpr):
    """``count`` vectors of a tuple as a tile [count, D], count a power of two: token_rows turned around."""
    if count == 1:
        return tl.expand_dims(rows[first], 0)
    else:
        pairs = tl.join(token_tile(rows, first, count // 2), token_tile(rows, first + count // 2, count // 2))
        return tl.reshape(tl.trans(pairs, 2, 0, 1), (count, pairs.shape[1]))


@triton.jit
def widened(x, one, DOT: tl.constexpr, ROWS: tl.constexpr):
    """x in float32, by a product with the unit matrix, which comes first if ROWS.

    Exact where all is finite (``has_spread``). A loop copies the tiles that products take to shared memory
    some rounds ahead; any other tile of short numbers goes to registers, and each round then waits for the
    loads of a later one.
    """
    if x.dtype == tl.bfloat16 and tl.bfloat16 == DOT:
        return tl.dot(one, x) if ROWS else tl.dot(x, one)
    else:
        return x.to(tl.float32)


@triton.jit
def solve_dot(a, b, SOLVE: tl.constexpr):
    """A product of the triangular system; "fp16" has the mantissa of tf32, for entries that stay bounded."""
    if SOLVE == "fp16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        return tl.dot(a, b, input_precision=SOLVE)


@triton.jit
def selected_sums(x, ones, DOT: tl.constexpr, SUMS: tl.constexpr):
    """x @ ones of two [C, C] matrices, the second of 0 and 1, with 16 bits of x at least; DOT is bfloat16 or
    float32 (then in SUMS precision)."""
    if tl.bfloat16 == DOT:
        high = x.to(DOT)
        return tl.dot((x - high.to(tl.float32)).to(DOT), ones.to(DOT), tl.dot(high, ones.to(DOT)))
    else:
        return tl.dot(x, ones, input_precision=SUMS)


@triton.jit
def running_sums(w, C: tl.constexpr, DOT: tl.constexpr, AFTER: tl.constexpr, STRICT: tl.constexpr):
    """row_sums; where operands are bfloat16, by a scan and a difference: their rounding is larger."""
    if tl.bfloat16 == DOT:
        sums = tl.cumsum(w, 0)
        if AFTER:
            sums = tl.sum(w, 0) - sums
            return sums if STRICT else sums + w
        else:
            return sums - w if STRICT else sums
    else:
        return row_sums(w, C, AFTER, STRICT)


@triton.jit
def bounded(w, DOT: tl.constexpr):
    """Log decays for sums of which differences are taken: exp(-300) is zero, and so is -inf's; NaN stays."""
    if tl.bfloat16 == DOT:
        return tl.maximum(w, -300.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        return w


@triton.jit
def pairs_decay(w, C: tl.constexpr, DOT: tl.constexpr, INCLUSIVE: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """[C, C] of exp(w_{s+1} + ... + w_t), to w_{t-1} if EXCLUSIVE, zero outside the read; w [C].

    Where operands are bfloat16 the sums are differences of running ones: these err by less than 1e-3 even
    when every token resets the state.
    """
    t = tl.arange(0, C)
    inside = t[:, None] >= t[None, :] if INCLUSIVE else t[:, None] > t[None, :]
    if tl.bfloat16 == DOT:
        w = bounded(w, DOT)
        sums = tl.cumsum(w, 0)
        rows = sums - w if EXCLUSIVE else sums
        return tl.where(inside, tl.exp(rows[:, None] - sums[None, :]), 0.0)
    else:
        if EXCLUSIVE:
            # row t holds w_{t-1}: the running sum down the rows then ends one step earlier
            w = tl.sum(tl.where(t[:, None] - 1 == t[None, :], w[None, :], 0.0), 1)
            sums = tl.cumsum(tl.where(t[:, None] - 1 > t[None, :], w[:, None], 0.0), 0)
        else:
            sums = tl.cumsum(tl.where(t[:, None] > t[None, :], w[:, None], 0.0), 0)
        return tl.where(inside, tl.exp(tl.where(inside, sums, 0.0)), 0.0)


@triton.jit
def span_sum(p, C: tl.constexpr, DOT: tl.constexpr, SUMS: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """[C]: at tau the sum of p[t, s] over s < tau <= t (EXCLUSIVE: s < tau < t)."""
    t = tl.arange(0, C)
    left = selected_sums(p, tl.where(t[:, None] < t[None, :], 1.0, 0.0), DOT, SUMS)
    rows = t[:, None] > t[None, :] if EXCLUSIVE else t[:, None] >= t[None, :]
    return tl.sum(tl.where(rows, left, 0.0), 0)


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
def finite_gate(w):
    """A log gate for sums that are products with 0 and 1, where 0 times inf would be NaN.

    -inf, a reset, becomes -1e30, whose exponential is zero as well; inf and NaN become 1e36, which no sum
    with resets makes small again: its exponential is inf.
    """
    return tl.where(w < 1e36, tl.maximum(w, -1e30), 1e36)


@triton.jit
def tokens_within(C: tl.constexpr, AFTER: tl.constexpr, STRICT: tl.constexpr):
    """[C, C] of 0 and 1: in row t the tokens s <= t, or s >= t if AFTER; without s = t if STRICT."""
    t = tl.arange(0, C)
    if AFTER:
        inside = t[None, :] > t[:, None] if STRICT else t[None, :] >= t[:, None]
    else:
        inside = t[None, :] < t[:, None] if STRICT else t[None, :] <= t[:, None]
    return tl.where(inside, 1.0, 0.0)


@triton.jit
def token_sums(x, among, TURNED: tl.constexpr, DOT: tl.constexpr, SUMS: tl.constexpr):
    """For every token t the sum of x over the tokens that row t of ``among`` has, [C, C] of 0 and 1.

    x is [C, D], or [D, C] if TURNED, float32 and finite. Operands in bfloat16 keep x as two halves of 8 bits,
    whose sum has 16, those in tf32 as two of 11: with one a log gate of -60 is off by .06.
    """
    if DOT == tl.bfloat16:  # noqa: SIM300 (DOT is a type of Triton's)
        among = among.to(DOT)
        high = x.to(DOT)
        low = (x - high.to(tl.float32)).to(DOT)
        if TURNED:
            sums = tl.dot(low, tl.trans(among), tl.dot(high, tl.trans(among)))
        else:
            sums = tl.dot(among, low, tl.dot(among, high))
    elif SUMS == "tf32":
        high = (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        low = x - high
        if TURNED:
            sums = tl.dot(high, tl.trans(among), input_precision=SUMS)
            sums = tl.dot(low, tl.trans(among), sums, input_precision=SUMS)
        else:
            sums = tl.dot(among, high, input_precision=SUMS)
            sums = tl.dot(among, low, sums, input_precision=SUMS)
    elif TURNED:
        sums = tl.dot(x, tl.trans(among), input_precision=SUMS)
    else:
        sums = tl.dot(among, x, input_precision=SUMS)
    return sums


@triton.jit
def blocks_meet(level, C: tl.constexpr):
    """[C, C]: whether the blocks of 2^level tokens of t and s are neighbours that meet, in either order."""
    block = tl.arange(0, C) >> level
    return (block[:, None] ^ block[None, :]) == 1


@triton.jit
def anchored_intervals(level, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """[C, C] of 0 and 1: the tokens between row t and the anchor of its pair of blocks.

    At a level, neighbouring blocks of 2^level tokens meet; the anchor is the boundary between them. Row t
    of the second block sums from the anchor to t (to t - 1 if EXCLUSIVE), one of the first block from
    t + 1 to the anchor. So the row's factor of a decay is exp(this matrix @ w): no exponent spans more
    than the interval, and none looks past t.
    """
    t = tl.arange(0, C)
    before = t & ((1 << level) - 1)  # tokens before t in its block
    second = ((t >> level) & 1) == 1
    first = tl.where(second, t - before, t + 1)
    count = tl.where(second, before if EXCLUSIVE else before + 1, (1 << level) - 1 - before)
    # one comparison for both ends: what lies before the first token is large without a sign
    inside = (t[None, :] - first[:, None]).to(tl.uint32) < count.to(tl.uint32)[:, None]
    return tl.where(inside, 1.0, 0.0)


@triton.jit
def meeting_blocks(level, C: tl.constexpr):
    """[C, C]: rows in the second, columns in the first of two neighbouring blocks of 2^level tokens."""
    t = tl.arange(0, C)
    half = t >> level
    meet = (half >> 1)[:, None] == (half >> 1)[None, :]
    return meet & (half[:, None] > half[None, :])


@triton.jit
def meeting_tokens(level, t):
    """The same for rows and columns of any order, of the tokens t."""
    half = t >> level
    meet = (half >> 1)[:, None] == (half >> 1)[None, :]
    return meet & (half[:, None] > half[None, :])


@triton.jit
def is_seen(seen, LOOK: tl.constexpr):
    """Whether an entry is True; "always": True unseen, where a branch does not compile or spills.

    Triton 3.7 fails at sums of rows that lie in tensor memory (LOOK "flat" has none), and on AMD cards at a
    product in a branch of a loop; below sm_90 operands that wait for it spill, up to 3 KB; on sm_90 those of
    "products" beside sums over more than 128, up to 2.4 KB.
    What such a branch does is right whether or not there is NaN.
    """
    if LOOK == "always" or LOOK == "products":
        return tl.constexpr(True)
    elif LOOK == "flat":
        return tl.max(seen.to(tl.int32)) > 0
    else:
        return tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0


@triton.jit
def has_nan(x, LOOK: tl.constexpr):
    """Whether an entry is NaN."""
    return is_seen(x != x, LOOK)


@triton.jit
def has_lost(state, LOOK: tl.constexpr):
    """Whether the state at the end of a walk says that something was not finite (``leaves_trace``)."""
    return is_seen((tl.abs(state) < float("inf")) == 0, "rows" if LOOK == "products" else LOOK)


@triton.jit
def has_late_nan(x, C: tl.constexpr, TURNED: tl.constexpr, BACK: tl.constexpr, LOOK: tl.constexpr):
    """Whether a triangle's product x (``one_sided_product``) may have NaN of later tokens, or earlier (BACK).

    What is not finite there comes, times zero, to the first token too, or to the last: one row is looked at.
    """
    t = tl.arange(0, C)
    edge = t == (C - 1 if BACK else 0)
    return is_seen((x != x) & (edge[None, :] if TURNED else edge[:, None]), LOOK)


@triton.jit
def has_spread(wide, x, C: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, LOOK: tl.constexpr):
    """Whether ``widened`` took what is not finite in x to other tokens, by 0 times it.

    It then came to the first token as well, or from there: one row is looked at, or one column.
    """
    if x.dtype == tl.bfloat16 and tl.bfloat16 == DOT:
        edge = tl.arange(0, C) == 0
        bad = (tl.abs(wide) < float("inf")) == 0
        return is_seen(
            bad & (edge[:, None] if ROWS else edge[None, :]), "rows" if LOOK == "products" else LOOK
        )
    else:
        return tl.constexpr(False)


@triton.jit
def one_sided_product(
    a, z, C: tl.constexpr, TURNED: tl.constexpr, BACK: tl.constexpr, STRICT: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """a z, or aT z if BACK, of a lower triangle a [C, C] and z that is not finite somewhere.

    Tiles [C, D], or [D, C] if TURNED. A column of z that is not finite at a token is NaN from there on (up to
    there if BACK); the rows before it are those of the product without it, where 0 times NaN would be NaN.
    """
    clean = finite_numbers(z)
    begin = lost_tokens(
        z, C, TURNED, BACK, STRICT
    )  # nothing is left to do, and to keep for it, behind the product
    if TURNED:
        return tl.dot(clean, a if BACK else tl.trans(a), begin, input_precision=PRECISION)
    else:
        return tl.dot(tl.trans(a) if BACK else a, clean, begin, input_precision=PRECISION)


@triton.jit
def finite_numbers(z):
    """Zero in place of what is not finite, in the type of z."""
    return tl.where(tl.abs(z.to(tl.float32)) < float("inf"), z, 0.0).to(z.dtype)


@triton.jit
def finite_product(a, z, TURNED: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr):
    """The product of ``one_sided_product`` before ``lost_tokens`` are added: the same bits as of finite z,
    whatever it is added to next, which the compiler begins a product with."""
    clean = finite_numbers(z)
    if TURNED:
        return tl.dot(clean, a if BACK else tl.trans(a), input_precision=PRECISION)
    else:
        return tl.dot(tl.trans(a) if BACK else a, clean, input_precision=PRECISION)


@triton.jit
def lost_tokens(z, C: tl.constexpr, TURNED: tl.constexpr, BACK: tl.constexpr, STRICT: tl.constexpr):
    """NaN where z has been not finite at the token or before it (BACK: behind it), zero elsewhere."""
    TOKENS: tl.constexpr = 1 if TURNED else 0
    t = tl.arange(0, C)
    rows = t[None, :] if TURNED else t[:, None]
    good = tl.abs(z.to(tl.float32)) < float("inf")
    if BACK:
        edge = tl.expand_dims(tl.max(tl.where(good, -1, rows), TOKENS), TOKENS)
        free = rows >= edge if STRICT else rows > edge
    else:
        edge = tl.expand_dims(tl.min(tl.where(good, C, rows), TOKENS), TOKENS)
        free = rows <= edge if STRICT else rows < edge
    return tl.where(free, 0.0, float("nan"))


@triton.jit
def product_among(part, z, among, TURNED: tl.constexpr, PRECISION: tl.constexpr, LOOK: tl.constexpr):
    """part z of [C, C] numbers that are zero outside ``among``, where what is not finite in z is not seen."""
    if TURNED:
        r = tl.dot(z, tl.trans(part), input_precision=PRECISION)
    else:
        r = tl.dot(part, z, input_precision=PRECISION)
    if has_nan(r, LOOK):
        good = tl.abs(z.to(tl.float32)) < float("inf")
        clean = tl.where(good, z, 0.0).to(z.dtype)
        lost = tl.where(good, 0.0, 1.0).to(z.dtype)
        reach = tl.where(among, 1.0, 0.0).to(z.dtype)
        if TURNED:
            r = tl.dot(clean, tl.trans(part), input_precision=PRECISION)
            hit = tl.dot(lost, tl.trans(reach), input_precision=PRECISION)
        else:
            r = tl.dot(part, clean, input_precision=PRECISION)
            hit = tl.dot(reach, lost, input_precision=PRECISION)
        r = tl.where(hit > 0, float("nan"), r)
    return r


@triton.jit
def bad_columns(n, t):
    """[C]: of every row the last entry below the diagonal that is not finite, as a token; -1 if all are."""
    bad = (tl.abs(n) < float("inf")) == 0
    return tl.max(tl.where(bad & (t[None, :] < t[:, None]), t[None, :], -1), 1)


@triton.jit
def finite_entries(n):
    """Zero in place of what is not finite."""
    return tl.where(tl.abs(n) < float("inf"), n, 0.0)


@triton.jit
def spoilt_by(x, bad, t):
    """The inverse x of a triangle, NaN where entries that are not finite, in ``bad_columns``, go into it."""
    reach = tl.max(tl.where(t[None, :] <= t[:, None], bad[None, :], -1), 1)
    return tl.where(t[None, :] <= reach[:, None], float("nan"), x)
