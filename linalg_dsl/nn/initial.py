"""What params begin with, and biases moved so that a token at rest lets little of the state go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.nn.inputs import RATES, HeadInput, TokenInput, log_uniform, uniform
from linalg_dsl.nn.links import Free, inverse_softplus
from linalg_dsl.nn.roles import innermost, is_added, varies_beside
from linalg_dsl.ops.reference import reference

KEPT = (0.9, 1.0 + 1e-6)
"""The part of the state that a token should keep when it writes and erases nothing."""
_GRID = 97
_TOKENS = 64
_SHRINKS = 8

Maker = TokenInput | HeadInput


def initial_param(spec: RecurrenceSpec, decl: Input, heads: int, dims: Sequence[int]) -> Tensor:
    """The value that a param [heads, *dims] begins with.

    A range from 0 to 1 is taken for a decay: 1 - 2^(-5 - h) for head h (RetNet), 1 minus a rate for every
    channel of vectors. Rates are log-uniform in [1e-3, 1e-1]; what has a lower bound only begins with one.
    A range with 0 inside begins at 0. Square matrices are orthogonal, others normal with variance 1/K.
    Without a range, what stands only inside exp begins as the logarithm of a rate (of 1 to 16 beside a step
    size, as in Mamba; log 1..K for a [K, V], as in S4D), what only inside softplus or sigmoid alike; what is
    added begins at 0, what multiplies near 1.
    """
    shape = (heads, *dims)
    like = torch.empty(shape)
    if decl.dims in (("K", "K"), ("V", "V")):
        return (
            nn.init.orthogonal_(like) if heads == 1 else torch.stack([nn.init.orthogonal_(x) for x in like])
        )
    low, high = decl.range.low, decl.range.high
    if decl.kind == "log_gate":
        return -log_uniform(like, *RATES)
    if decl.kind == "gate" and low is None and high is None:
        low, high = 0.0, 1.0
    if low == 0 and high == 1:
        return 1 - (_by_head(like) if not dims else log_uniform(like, *RATES))
    if low is not None and high is not None:
        return torch.full(shape, 0.0 if low < 0 < high else (low + high) / 2)
    if low is not None:
        return low + log_uniform(like, *RATES)
    if high is not None:
        return high - log_uniform(like, *RATES)
    if is_added(spec, decl.name):
        return torch.zeros(shape)
    match innermost(spec, decl.name):
        case "exp" if not varies_beside(spec, decl.name):
            return log_uniform(like, *RATES).log()
        case "exp" if len(dims) == 2:
            return torch.arange(1.0, dims[0] + 1).log()[:, None].expand(shape).clone()
        case "exp":
            return uniform(like, 1, 16).log_()
        case "softplus":
            return inverse_softplus(log_uniform(like, *RATES))
        case "sigmoid" | "logsigmoid":
            return torch.logit(1 - log_uniform(like, *RATES))
    if len(dims) == 2:
        return like.normal_(0, dims[0] ** -0.5)
    return like.normal_(1, 0.1)  # not all alike: what two equal channels make of opposite signs cancels


def _by_head(like: Tensor) -> Tensor:
    return 2.0 ** (-5 - torch.arange(like.shape[0], dtype=torch.float32) % 8)


@torch.no_grad()
def settle(
    spec: RecurrenceSpec, makers: Mapping[str, Maker], sizes: Mapping[str, int], consts: Mapping[str, float]
) -> None:
    """Moves biases so that the states last: found by running the step loop, not by knowing the rule.

    For every state by itself: of a change of it, one token has to keep 0.9 to 1, with declared gates open and
    vectors that write and erase (almost) nothing. Where it keeps less, the raw or ranged input or param that
    mends it with the smallest step is moved, its heads and channels spread between 0.9 and 0.999. Where
    states grow over 64 such tokens together, as two that rotate into each other may, the params without a
    range are shrunk until they do not. Declared gates and step sizes have their published start and stay.
    """
    probe = _Probe(spec, makers, sizes, consts)
    for state in probe.judged:
        if KEPT[0] <= probe.kept(state) <= KEPT[1]:
            continue
        steps = [(s, m) for n, m in makers.items() if _movable(m) and (s := probe.mending(state, n, m))]
        if steps:
            (_, value), maker = min(steps, key=lambda x: x[0][0])
            maker.set_rest(value)
    probe.shrink([m for m in makers.values() if _free_param(m)])


def _movable(maker: Maker) -> bool:
    matrix = isinstance(maker, HeadInput) and len(maker.dims) == 2
    return maker.bias is not None and not matrix and maker.role.kind in ("raw", "ranged", "param")


def _free_param(maker: Maker) -> bool:
    return isinstance(maker, HeadInput) and isinstance(maker.link, Free) and len(maker.dims) < 2


class _Probe:
    """Single heads of the recurrence at rest, in float64 on the CPU."""

    def __init__(
        self,
        spec: RecurrenceSpec,
        makers: Mapping[str, Maker],
        sizes: Mapping[str, int],
        consts: Mapping[str, float],
    ) -> None:
        self.spec, self.makers, self.consts = spec, makers, consts
        self.sizes = {**sizes}
        finite = [s.name for s in spec.states if math.isfinite(s.start)]
        matrices = [s.name for s in spec.states if len(s.dims) == 2 and s.name in finite]
        self.judged = matrices or finite

    def _tensors(
        self, tokens: int, moved: str | None = None, values: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The inputs at rest, declared gates open; ``values`` [heads, *dims] takes the place of ``moved``."""
        heads = 1 if values is None else values.shape[0]
        out = {}
        for decl in self.spec.inputs:
            if decl.name == moved and values is not None:
                value = values
            else:
                value = self._rest(decl).expand(heads, *self.makers[decl.name].dims)
            out[decl.name] = value.expand(1, tokens, *value.shape) if decl.timed else value
        return out

    def _rest(self, decl: Input) -> Tensor:
        maker = self.makers[decl.name]
        rest = maker.rest().double().cpu().mean(0, keepdim=True)
        if decl.kind != "plain":
            open_ = 0.0 if decl.kind == "log_gate" else 1.0
            return torch.full_like(
                rest, min(open_, decl.range.high if decl.range.high is not None else open_)
            )
        if maker.role.kind == "step":
            return torch.full_like(rest, decl.range.low or 0.0)
        return rest

    def _run(self, ones: Sequence[str], tensors: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
        """The states after the tokens, where those of ``ones`` begin one above their start."""
        begin = {}
        for s in self.spec.states:
            dims = [d if isinstance(d, int) else self.sizes[d] for d in s.dims]
            start = s.start if math.isfinite(s.start) else 0.0
            begin[s.name] = torch.full((1, heads, *dims), start + (s.name in ones), dtype=torch.float64)
        _, last = reference(
            self.spec, tensors, initial_state=begin, output_final_state=True, consts=self.consts
        )
        carried = [last] if isinstance(last, Tensor) else list(last)
        return dict(zip(self.spec.carried, carried, strict=True))

    def _change(self, state: str, tensors: Mapping[str, Tensor], heads: int) -> Tensor:
        """What is left of a change of one state after a token, [heads]."""
        changed, plain = (self._run(x, tensors, heads)[state] for x in ((state,), ()))
        return (changed - plain).flatten(2).mean((0, 2))

    def kept(self, state: str) -> float:
        """What a token keeps of one state, as a part; NaN where that cannot be said."""
        return float(self._change(state, self._tensors(1), 1))

    def mending(self, state: str, name: str, maker: Maker) -> tuple[float, Tensor] | None:
        """How far an input has to move before its link to bring what is kept into range; its new values."""
        grid = torch.linspace(-12, 12, _GRID, dtype=torch.float64)
        z = grid.view(-1, *(1,) * len(maker.dims)).expand(-1, *maker.dims)
        curve = self._change(state, self._tensors(1, name, maker.link.value(z)), _GRID)
        usable = curve.isfinite() & (curve <= KEPT[1])
        if not bool((usable & (curve > 1 - 2 * RATES[0])).any()) or float(curve[usable].min()) > KEPT[0]:
            return None
        now = maker.rest()
        wanted = 1 - log_uniform(now, *RATES).double().cpu()
        distance = (curve - wanted.unsqueeze(-1)).abs().masked_fill(~usable, torch.inf)
        chosen = grid[distance.argmin(-1)]
        moved = (chosen - maker.link.raw(now).double().cpu()).abs().mean()
        return float(moved), maker.link.value(chosen).float()

    def shrink(self, params: Sequence[Maker]) -> None:
        """Multiplies params by one factor below 1 if the resting states grow without."""

        def grows() -> bool:
            last = self._run(self.judged, self._tensors(_TOKENS), 1)
            return not all(
                bool(last[s].isfinite().all()) and float(last[s].abs().max()) < 2 for s in self.judged
            )

        for _ in range(_SHRINKS):
            if not params or not self.judged or not grows():
                return
            for p in params:
                p.set_rest(0.9 * p.rest())
