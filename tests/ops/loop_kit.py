"""Running one token's rule, written by hand, over a whole call: nothing of the compiler is used here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class At:
    """Tensors of one head as attributes: the inputs of a token and the params, or the states before it.

    ``before`` holds the inputs of the token before, zeros at the first.
    """

    before: At

    def __init__(self, values: Mapping[str, Tensor], before: At | None = None) -> None:
        self._values = dict(values)
        self.before = self if before is None else before

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None


Result = tuple[Tensor, dict[str, Tensor]]
Step = Callable[[At, At], Result]
"""(the token, the states before it) to (what is read, the states after it)."""

outer = torch.outer


def rows(a: Tensor, S: Tensor) -> Tensor:
    """diag(a) S."""
    return a[:, None] * S


def columns(S: Tensor, a: Tensor) -> Tensor:
    """S diag(a)."""
    return S * a[None, :]


def root(x: Tensor) -> float:
    """sqrt(K) for a vector of K channels."""
    return float(x.shape[0] ** 0.5)


def unit(x: Tensor) -> Tensor:
    """The language's l2norm, with its epsilon."""
    return x / torch.sqrt((x * x).sum() + 1e-6)


def log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    return torch.logaddexp(a, b)


def run_loop(
    step: Step,
    timed: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    carried: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs [B, T, H, ...], params [H, ...] and states [B, H, ...] to outputs and states, token by token.

    ``carried`` has inputs of the token before the first one, [B, H, ...], where a rule looks back; they are
    zero otherwise.
    """
    batch, length, heads = next(iter(timed.values())).shape[:3]
    outputs: list[list[Tensor]] = []
    ends: dict[str, list[Tensor]] = {name: [] for name in start}
    for b in range(batch):
        for h in range(heads):
            fixed = {name: x[h] for name, x in params.items()}
            zeros = {name: torch.zeros_like(x[b, 0, h]) for name, x in timed.items()}
            zeros |= {name: x[b, h] for name, x in (carried or {}).items()}
            before = At({**fixed, **zeros})
            past = At({name: x[b, h] for name, x in start.items()})
            read = []
            for t in range(length):
                now = At({**fixed, **{name: x[b, t, h] for name, x in timed.items()}}, before)
                o, after = step(now, past)
                read.append(o)
                before, past = At({**fixed, **{n: x[b, t, h] for n, x in timed.items()}}), At(after)
            outputs.append(read)
            for name, values in ends.items():
                values.append(getattr(past, name))
    o = torch.stack([torch.stack(read) for read in outputs])
    o = o.reshape(batch, heads, *o.shape[1:]).transpose(1, 2)
    finals = {name: torch.stack(values) for name, values in ends.items()}
    return o, {name: x.reshape(batch, heads, *x.shape[1:]) for name, x in finals.items()}


def phase(x: At) -> Tensor:
    """The number of size 1 in the direction of c + i s."""
    return torch.polar(torch.ones_like(x.c), torch.atan2(x.s, x.c))
