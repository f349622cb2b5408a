"""The chunk-level ops: what they mean, which axes they take and give, which axis they contract.

A value has named axes and lives per batch element and head. ``t`` is the token axis of a chunk (C
tokens), ``s`` the second token axis of a score, ``K`` and ``V`` the state's axes:

    token value   ("t",) ("t", "K") ("t", "V")
    score         ("t", "s")                     rows t, columns s; ("s",) is a token value of the columns
    state         ("K", "V")                     S at a chunk boundary, or its cotangent
    per head      () ("K",) ("V",)               params, numbers, whole-chunk decays

``w`` is always the *per-step log decay* of the chunk, ("t",) or ("t", X) with X either of K and V, and
Lambda_{t<-s} = exp(w_{s+1} + ... + w_t). Decay ops own their exponents: none hands out cumulative
sums. Elementwise ops broadcast over missing axes. D stands for either of K and V.

A plan of one token (``planner/step_plan.py``) has values without ``t``, and further axes: ``L``, ``M`` are K
again and ``W``, ``Y`` are V again (the columns of square matrices); ``n`` is a small axis of that name.

Which pairs a score has is its ``read``: inclusive s <= t with Lambda_{t<-s}; exclusive s < t with
Lambda_{t-1<-s}; decayed s < t with Lambda_{t<-s}.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Axes = tuple[str, ...]
OTHER = {"K": "V", "V": "K"}
"""The other axis of the state."""
FLOOR = 1e-15
"""The least size of a gate declared in linear space: every term of the gradient of its logarithm has the gate
as a factor, so the gradient divided by the size is right at 0 too, and what a reset lets through is 1e-15."""
KEYS, VALUES = ("K", "L", "M"), ("V", "W", "Y")
_RANK = {axis: i for i, axis in enumerate(("t", "s", "", *KEYS, *VALUES))}


def ordered(axes: Iterable[str]) -> Axes:
    """The axes of a value in the order in which every value has them: tokens, small axes, K, V."""
    return tuple(sorted(set(axes), key=lambda a: (_RANK.get(a, _RANK[""]), a)))


@dataclass(frozen=True, slots=True)
class OpInfo:
    """``meaning`` in one line; ``backward_only`` ops need no adjoint (double backward: reference)."""

    name: str
    meaning: str
    kind: str
    backward_only: bool = False


_TABLE: tuple[OpInfo, ...] = (
    # leaves; attrs: name, and row for one row of an [n, D] input
    OpInfo("input", "a declared input, one row per token of the chunk", "leaf"),
    OpInfo("param", "a declared param, one per head", "leaf"),
    OpInfo("const", "a run-time number", "leaf"),
    OpInfo("number", "a number (attr value)", "leaf"),
    OpInfo("carry", "a state handed over chunk boundaries (attrs name, direction)", "leaf"),
    OpInfo("cotangent", "the gradient of an output (attr name)", "leaf"),
    # elementwise; broadcast over missing axes
    OpInfo("add", "a + b", "elementwise"),
    OpInfo("mul", "a b", "elementwise"),
    OpInfo("unary", "f(a), attr fn; pow has attr exponent", "elementwise"),
    OpInfo("maximum", "max(a, b)", "elementwise"),
    OpInfo("minimum", "min(a, b)", "elementwise"),
    OpInfo("compare", "1 where a > b, 1/2 where equal, else 0", "elementwise", True),
    # shape
    OpInfo("sum", "sum over the axis named by attr axis", "reduce"),
    OpInfo("amax", "max over the axis, a constant to the adjoint (a shift that cancels)", "reduce"),
    OpInfo("tokens", "a per-head value repeated for every token", "shape"),
    OpInfo("expand", "a repeated along the axis named by attr axis (K or V): the adjoint of sum", "shape"),
    # products
    OpInfo("score", "[t,s] = x y^T, x and y [t,D], or [t] both", "matmul"),
    OpInfo("apply", "[t,D] = A z, A [t,s], z [s,D] or [s]", "matmul"),
    OpInfo("apply_t", "[s,D] = A^T z, A [t,s], z [t,D] or [t]", "matmul"),
    OpInfo(
        "compose",
        "[t,s] = A B of two [t,s], of products of decays; attrs left, right: A, B transposed",
        "matmul",
    ),
    OpInfo("read", "[t,E] = x S (attr con K) or x S^T (attr con V)", "matmul"),
    OpInfo("write", "[K,V] = x^T z, x [t,K], z [t,V]", "matmul"),
    OpInfo("mask", "A where the pair is in read, else 0", "score"),
    # decays
    OpInfo("pairs_decay", "[t,s] = Lambda of the pair, 0 outside read; w [t]", "decay"),
    OpInfo("from_start", "Lambda_{t<-0}, attr exclusive: Lambda_{t-1<-0}", "decay"),
    OpInfo("to_end", "Lambda_{C<-s}", "decay"),
    OpInfo("scale_state", "Lambda_{C<-0} o S, along the axis of w", "decay"),
    OpInfo("weigh", "a S, a one number of the chunk; attr axis: the axis of its boundary product", "state"),
    OpInfo("decayed_score", "[t,s] = sum_i x_ti y_si Lambda_{t<-s,i}; x, y, w [t,D], attr read", "decay"),
    OpInfo(
        "decay_apply",
        "[t,D] = sum_s A_ts Lambda_{t<-s} o z_s; attr transposed: sum_t A_ts Lambda_{t<-s} o z_t",
        "decay",
    ),
    OpInfo(
        "signs", "[t] or [t,D]: the product of the signs of x_1..x_t, 0 as +; exclusive: x_1..x_{t-1}", "sign"
    ),
    OpInfo("sign_total", "the product of the signs of x_1..x_C", "sign"),
    OpInfo("span_sum", "[t]: at tau the sum of P over pairs whose interval holds tau", "gate", True),
    OpInfo(
        "gate_sum",
        "at tau: from_start sum_{t>=tau} p_t (from_start_exclusive t > tau), to_end sum_{s<tau} p_s",
        "gate",
        True,
    ),
    OpInfo(
        "pair_gate",
        "[t,D]: at tau the sum of A_ts x_t y_s Lambda_{t<-s} over pairs whose interval holds tau",
        "gate",
        True,
    ),
    OpInfo(
        "boundary_gate",
        "[D] = Lambda_{C<-0} o (the sum of S_0 o dS_C over the axis that w lacks); w [t]: D is K",
        "gate",
        True,
    ),
    OpInfo(
        "boundary_product",
        "[axis] = the sum of S_0 o dS_C over the axis of the state other than attr axis",
        "gate",
        True,
    ),
    # the unit-triangular solve
    OpInfo(
        "solve",
        "Z_j = W_j + sum_i sigma_ji U_i, U_i = R_i + sum_j G_ij Z_j, G strict; attrs m, r; "
        "args G (r x m), sigma (m x r), W (m), R (r), row-major; attr decayed: a last operand w [t,D], and "
        "G Z is decay_apply(G, Z, w, decayed)",
        "solve",
    ),
    OpInfo(
        "solve_t",
        "Y_j = dZ_j + sum_i G_ij^T X_i, X_i = dU_i + sum_j sigma_ji Y_j; args G, sigma, dZ (m), dU (r), "
        "w if decayed",
        "solve",
        True,
    ),
    OpInfo("pick", "attr index: entry of a solve: Z_1..Z_m, U_1..U_r", "solve"),
    # one token: what an axis-by-axis product of the ops above cannot say
    OpInfo("contract", "sum over attr axis of a b, of which both have that axis", "matmul"),
    OpInfo("swap", "a with its axes attrs axis and other called by each other's name", "shape"),
    OpInfo("eye", "1 where both its axes are equal, else 0", "leaf"),
    OpInfo("first", "a in the first block of a split axis, 0 in the others", "shape"),
    # how kernels carry these out: made by the schedule, never by the planner
    OpInfo("ut_transform", "T = (I - G Sigma)^-1 as r x r blocks [t,s]; picks row-major", "lowered", True),
    OpInfo("total", "Lambda_{C<-0}", "lowered", True),
    OpInfo(
        "decayed_scores",
        "all scores of one w: args x (rows), y (cols), w; attrs rows, cols, reads (one per row), pairs "
        "(row-col ...); picks in the order of pairs",
        "lowered",
        True,
    ),
    OpInfo(
        "decay_adjoints",
        "their derivatives: args A (one per pair), x, y, w; picks dx (rows), dy (cols), dw, each summed "
        "over its pairs",
        "lowered",
        True,
    ),
)

OPS: dict[str, OpInfo] = {info.name: info for info in _TABLE}

UNARY_FUNCTIONS = (
    "exp", "log", "sigmoid", "logsigmoid", "softplus", "tanh", "silu", "relu", "elu",
    "sqrt", "rsqrt", "abs", "sign", "reciprocal", "heaviside", "pow", "side", "log_size",
)  # fmt: skip
"""``heaviside`` is 1 above 0, 1/2 at 0 and 0 below; ``pow`` has a constant exponent; ``side`` is -1 below 0
and 1 elsewhere; ``log_size`` is log(max(|x|, FLOOR))."""


def contracted_axes(op: str, axes: tuple[Axes, ...], attrs: dict[str, object]) -> frozenset[str]:
    """The big axes (K, V) that an op sums over: what decides where it can be computed."""
    match op:
        case "score" | "decayed_score":
            return frozenset(axes[0][1:])
        case "decayed_scores":
            return frozenset(axes[-1][1:])
        case "read":
            return frozenset({str(attrs["con"])})
        case "sum" | "amax" | "contract":
            return frozenset({str(attrs["axis"])} & {*KEYS, *VALUES})
        case "boundary_gate":
            return frozenset({"K"} if "V" in axes[2] else {"V"})
        case _:
            return frozenset()
