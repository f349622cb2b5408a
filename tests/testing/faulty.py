"""A foreign callable in plain PyTorch, and one fault of it for every property of the kit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.language.parser import parse
from linalg_dsl.testing import Subject

SPEC = parse(
    """recurrence gated
input q, k : [K]
input v : [V]
input g : log gate
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
"""
)
Call = Callable[..., Any]


def gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence as its loop; heads of fewer inputs are repeated, packed sequences run one by one."""
    H = max(x.shape[2] for x in (q, k, v, g))
    q, k, v, g = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k, v, g))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if cu_seqlens is None:
        pieces = [(slice(None), 0, q.shape[1])]
    else:
        bounds = cu_seqlens.tolist()
        pieces = [(slice(n, n + 1), a, b) for n, (a, b) in enumerate(itertools.pairwise(bounds))]
    outputs, lasts = [], []
    for rows, begin, end in pieces:
        count = q.shape[0] if cu_seqlens is None else 1
        S = torch.zeros(count, H, q.shape[-1], v.shape[-1], dtype=wide)
        if initial_state is not None:
            S = initial_state[rows].to(wide)
        for t in range(begin, end):
            gate = g[:, t].to(wide).exp()[..., None, None]
            S = gate * S + k[:, t, ..., None].to(wide) * v[:, t, :, None].to(wide)
            outputs.append((S * q[:, t, ..., None].to(wide)).sum(-2))
        lasts.append(S)
    o = torch.stack(outputs, 1) if outputs else q.new_zeros(q.shape[0], 0, H, v.shape[-1])
    return o.to(v.dtype), torch.cat(lasts)


def subject(call: Call = gated, **fields: Any) -> Subject:
    """``call`` with everything claimed of it."""
    claims: dict[str, Any] = {
        "initial_state": True,
        "final_state": True,
        "packed": True,
        "grouped_heads": True,
        "dtypes": (torch.float64, torch.float32),
    }
    return Subject.of_callable(call, SPEC, name="mine", **{**claims, **fields})


def _future(**x: Any) -> Any:
    o, state = gated(**x)
    return o + 1e-3 * x["v"].mean(1, keepdim=True), state


class _Leaks(torch.autograd.Function):
    """The identity, with a gradient that sees the tokens before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] + 1e-3 * grads[0].cumsum(1)


class _Off(torch.autograd.Function):
    """The identity, with a gradient that is a thousandth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 1.001 * grads[0]


def _through(function: Any, name: str) -> Call:
    def call(**x: Any) -> Any:
        return gated(**{**x, name: function.apply(x[name])})

    return call


def _subtracting(**x: Any) -> Any:
    """Gates as a difference of cumulated sums: NaN at resets."""
    total = x["g"].cumsum(1)
    return gated(**{**x, "g": torch.cat([total[:, :1], total[:, 1:] - total[:, :-1]], 1)})


def _forgets_the_state(**x: Any) -> Any:
    return gated(**{**x, "initial_state": None})


def _as_one(**x: Any) -> Any:
    """Packed sequences are run on."""
    offsets = x.pop("cu_seqlens", None)
    o, state = gated(**{**x, "initial_state": None if offsets is not None else x.get("initial_state")})
    return o, state if offsets is None else state.expand(offsets.numel() - 1, *state.shape[1:])


def _short_token(**x: Any) -> Any:
    """A path of its own for one token, in half precision."""
    o, state = gated(**x)
    return (o.half().to(o) if x["q"].shape[1] == 1 else o), state


def _rows_meet(**x: Any) -> Any:
    o, state = gated(**x)
    return o + 1e-3 * o.mean(0, keepdim=True), state


def _heads_meet(**x: Any) -> Any:
    o, state = gated(**x)
    return o + 1e-3 * o.mean(2, keepdim=True), state


def _noisy() -> Call:
    count = itertools.count()

    def call(**x: Any) -> Any:
        o, state = gated(**x)
        return o * (1 + 1e-6 * (next(count) % 3)), state

    return call


def _writes(**x: Any) -> Any:
    found = gated(**x)
    if x["v"].numel():
        x["v"].detach().mul_(1.0).add_(1.0)
    return found


def _clips(**x: Any) -> Any:
    o, state = gated(**x)
    return o.clamp(-0.5, 0.5), state


def _half(**x: Any) -> Any:
    """The state is carried in half precision from token to token."""
    o, state = gated(**{**x, "v": x["v"] * (1 + 2.0**-9)})
    return o, state


def _alone(**x: Any) -> Any:
    """A gradient that is asked for alone is half of what it is."""
    wanted = [n for n, y in x.items() if isinstance(y, Tensor) and y.requires_grad]
    if len(wanted) == 1:
        y = x[wanted[0]]
        x[wanted[0]] = 0.5 * y + 0.5 * y.detach()
    return gated(**x)


def _taken_for_contiguous(**x: Any) -> Any:
    v = x["v"]
    return gated(
        **{**x, "v": torch.as_strided(v, v.shape, torch.empty(v.shape).stride(), v.storage_offset())}
    )


FAULTS: dict[str, Call] = {
    "matches_reference": _through(_Off, "k"),
    "finite_where_the_recurrence_is": _subtracting,
    "finite_differences": _through(_Off, "q"),
    "precision": _half,
    "split_and_continue": _forgets_the_state,
    "packed_equals_separate": _as_one,
    "decode_equals_prefill": _short_token,
    "causality": _future,
    "prefix_gradient_causality": _through(_Leaks, "v"),
    "batch_independence": _rows_meet,
    "head_independence": _heads_meet,
    "determinism": _noisy(),
    "poisoned_memory": _writes,
    "nothing_else_asked": _alone,
    "strided_inputs": _taken_for_contiguous,
    "linearity": _clips,
    "scaling_laws": _clips,
}
"""What no foreign code can break is missing: ``tests/testing/test_properties.py`` has an op for each."""
