"""Recurrences of the catalogue that are each other at special inputs: the lattice that tests walk along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.catalogue import catalogue_names, catalogue_text

Values = Mapping[str, Tensor]
B, T, H = 1, 40, 2
SMALL = (5, 4)
"""K and V, where a reduction does not need others."""


@dataclass(frozen=True)
class Side:
    """One entry with the tensors it gets, made of the shared values.

    ``state`` compares the final state in place of the output, ``turned`` transposes it.
    """

    entry: str
    tensors: Callable[[Values], dict[str, Tensor]]
    consts: Mapping[str, float] = field(default_factory=dict)
    state: bool = False
    turned: bool = False

    @property
    def spec(self) -> RecurrenceSpec:
        return entry_spec(self.entry)

    def pick(self, found: Any) -> Tensor:
        """What is compared, of an output or of a final state."""
        value: Tensor = found if isinstance(found, Tensor) else found[0]
        return value.mT if self.turned else value


@dataclass(frozen=True)
class Reduction:
    """Two entries that give the same numbers at these inputs."""

    title: str
    sides: tuple[Side, Side]
    sizes: tuple[int, int] = SMALL

    def inputs(self, seed: int, K: int, V: int) -> dict[str, Tensor]:
        """The values that both sides are made of, in float64."""
        return shared_values(seed, K, V)


@cache
def entry_spec(name: str) -> RecurrenceSpec:
    """The spec of a catalogue entry."""
    return parse(catalogue_text(name), f"{name}.rec")


def shared_values(seed: int, K: int, V: int) -> dict[str, Tensor]:
    """Queries, unit keys ``k`` and ``p``, values, a log gate ``g`` and one per channel, strengths, ..."""
    generator = torch.Generator().manual_seed(seed + 4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, T, H, *shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(B, T, H, *shape, generator=generator, dtype=torch.float64)

    unit = torch.nn.functional.normalize
    g = -uniform()
    return {
        "q": normal(K), "k": unit(normal(K), dim=-1), "p": unit(normal(K), dim=-1), "v": normal(V),
        "g": g, "g_K": -uniform(K), "g_wide": g[..., None].expand(B, T, H, K).clone(), "beta": uniform(),
        "eta": uniform(), "raw": normal(), "zero": torch.zeros(B, T, H, dtype=torch.float64),
        "one": torch.ones(B, T, H, dtype=torch.float64), "slots": uniform(3),
        "no_param": torch.zeros(H, dtype=torch.float64),
        "a_param": torch.tensor([0.3, -1.0], dtype=torch.float64),
    }  # fmt: skip


def _take(names: str, **given: Callable[[Values], Tensor] | str) -> Callable[[Values], dict[str, Tensor]]:
    """Tensors by name: those of the shared values, and others by what they are made of."""

    def tensors(x: Values) -> dict[str, Tensor]:
        found = {n: x[n] for n in names.split()}
        return found | {n: x[f] if isinstance(f, str) else f(x) for n, f in given.items()}

    return tensors


def _wide(name: str) -> Callable[[Values], Tensor]:
    return lambda x: x[name][..., None].expand(B, T, H, x["q"].shape[-1]).clone()


def _at_first_token(name: str) -> Callable[[Values], Tensor]:
    return lambda x: x[name][0, 0].clone()


def _all_tokens(name: str) -> Callable[[Values], Tensor]:
    return lambda x: x[name][:, :1].expand_as(x[name]).clone()


def _pair(title: str, left: Side, right: Side) -> Reduction:
    return Reduction(title, (left, right))


def _delta(**changed: Callable[[Values], Tensor] | str) -> Side:
    return Side("gated_delta_rule", _take("q k v g beta", **changed))


_LINEAR = Side("linear_attention", _take("q k v"))
_SIMPLE = Side("simple_gla", _take("q k v g"))
_KDA = Side("kda", _take("q k v beta", g="g_K"))
_ONES: Callable[[Values], Tensor] = lambda x: torch.ones_like(x["v"])  # noqa: E731
_RESET: Callable[[Values], Tensor] = lambda x: torch.full_like(x["g"], -torch.inf)  # noqa: E731

REDUCTIONS: tuple[Reduction, ...] = (
    _pair(
        "KDA with equal gates is the gated delta rule",
        Side("kda", _take("q k v beta", g="g_wide")), _delta(),
    ),
    _pair("GLA with equal gates is simple GLA", Side("gla", _take("q k v", g="g_wide")), _SIMPLE),
    _pair(
        "GDN-2 with equal strengths is KDA",
        Side("gdn2", _take("q k v", g="g_K", b=_wide("beta"),
                           w=lambda x: x["beta"][..., None].expand_as(x["v"]).clone())),
        _KDA,
    ),
    _pair(
        "GDN-2 that erases nothing is GLA",
        Side("gdn2", _take("q k v", g="g_K", b=lambda x: 0 * x["q"], w=_ONES)),
        Side("gla", _take("q k v", g="g_K")),
    ),
    _pair(
        "the gated delta rule without decay is the delta rule",
        _delta(g="zero"), Side("delta_rule", _take("q k v beta")),
    ),
    _pair(
        "one step of the gated delta product is the gated delta rule",
        Side("gated_delta_product",
             _take("q g", k=lambda x: x["k"][..., None, :], v=lambda x: x["v"][..., None, :],
                   beta=lambda x: x["beta"][..., None]), {"n": 1}),
        _delta(),
    ),
    _pair(
        "one step of the delta product is the delta rule",
        Side("delta_product",
             _take("q", k=lambda x: x["k"][..., None, :], v=lambda x: x["v"][..., None, :],
                   beta=lambda x: x["beta"][..., None]), {"n": 1}),
        Side("delta_rule", _take("q k v beta")),
    ),
    _pair(
        "Q-Delta without the query in its erase is the gated delta rule",
        Side("q_delta", _take("q k v g beta", lam="no_param")), _delta(),
    ),
    _pair(
        "Mamba-2 is simple GLA",
        Side("mamba2", _take("", x="v", dt="eta", B="k", C="q", a="a_param", d="no_param")),
        Side("simple_gla", _take("q k", v=lambda x: x["eta"][..., None] * x["v"],
                                 g=lambda x: -x["eta"] * x["a_param"].exp()), {"scale": 1.0}),
    ),
    _pair(
        "momentum without memory is the delta rule that erases the undecayed state",
        Side("mdn", _take("q k p v g beta eta", h=_RESET)),
        Side("comba", _take("q k p v g", beta=lambda x: x["beta"] * x["eta"], d="no_param")),
    ),
    _pair(
        "the state of gated Oja is that of KDA transposed, keys and values exchanged",
        Side("gated_oja", _take("beta", q="v", k="v", v="k", g="g_K"), state=True, turned=True),
        Side("kda", _take("q k v beta", g="g_K"), state=True),
    ),
    _pair(
        "gated Oja with equal strengths is gated Oja",
        Side("gated_oja_channel", _take("q", k="q", v="k", g="g_K", beta=_wide("beta"))),
        Side("gated_oja", _take("q beta", k="q", v="k", g="g_K")),
    ),
    _pair(
        "a delta rule that writes apart and erases nothing is linear attention",
        Side("iplr", _take("q k v", a="k", b=lambda x: 0 * x["k"])), _LINEAR,
    ),
    _pair(
        "DPLR that erases nothing, with equal gates, is simple GLA",
        Side("dplr", _take("q k v", a="k", b=lambda x: 0 * x["k"], g="g_wide")), _SIMPLE,
    ),
    _pair(
        "DPLR without decay is IPLR",
        Side("dplr", _take("q k v", a=lambda x: -x["k"], b="k", g=lambda x: 0 * x["g_wide"])),
        Side("iplr", _take("q k v", a=lambda x: -x["k"], b="k")),
    ),
    _pair(
        "the two Combas differ by the decay of what is erased",
        Side("comba", _take("q k v g beta", p=lambda x: x["g"].exp()[..., None] * x["p"], d="a_param")),
        Side("comba_decayed", _take("q k p v g beta", d="a_param")),
    ),
    _pair(
        "Comba along the write key is the gated delta rule",
        Side("comba_decayed", _take("q k v g beta", p="k", d="no_param")), _delta(),
    ),
    _pair(
        "sigmoid GLA is simple GLA",
        Side("sigmoid_gla", _take("q k v", a="raw")),
        Side("simple_gla", _take("q k v", g=lambda x: torch.nn.functional.logsigmoid(x["raw"]) / 16)),
    ),
    _pair(
        "the delta rule of either sign is the delta rule",
        Side("delta_rule_negative", _take("q k v", b="raw")),
        Side("delta_rule", _take("q k v", beta=lambda x: 2 * torch.sigmoid(x["raw"]))),
    ),
    _pair(
        "lightning attention is RetNet",
        Side("lightning", _take("q k v", slope=lambda x: -x["g"][0, 0])),
        Side("retnet", _take("q k v", gamma=lambda x: x["g"][0, 0].exp())),
    ),
    _pair(
        "EFLA of unit keys is the delta rule",
        Side("efla", _take("q k v beta")),
        Side("delta_rule", _take("q k v", beta=lambda x: 1 - torch.exp(-x["beta"]))),
    ),
    _pair(
        "Kaczmarz steps of unit keys are the delta rule",
        Side("kaczmarz", _take("q k v", eta="beta"), {"eps": 1e-60}),
        Side("delta_rule", _take("q k v beta")),
    ),
    _pair(
        "RWKV-5 is RWKV-6 with one gate for all tokens",
        Side("rwkv5", _take("k v", r="q", w=_at_first_token("g_K"), u=_at_first_token("g_K"))),
        Side("rwkv6", _take("k v", r="q", w=_all_tokens("g_K"), u=_at_first_token("g_K"))),
    ),
    _pair(
        "a signed gate that is positive is a gate",
        Side("mamba2_negative", _take("q k v", a=lambda x: x["g"].exp())), _SIMPLE,
    ),
    _pair(
        "Mamba-3 without the trapezoid is Mamba-2",
        Side("mamba3", _take("q k v", dt="eta", lam="one", a="a_param")),
        Side("mamba2", _take("", x="v", dt="eta", B="k", C="q", a="a_param", d="no_param")),
    ),
    _pair(
        "EDA that erases nothing more is KDA",
        Side("eda", _take("q k v beta", e="p", g="g_K", gamma="zero")), _KDA,
    ),
    _pair(
        "OSDN whose preconditioner stays at one is the delta rule",
        Side("osdn", _take("q k v beta", eta="zero")), Side("delta_rule", _take("q k v beta")),
    ),
    _pair(
        "PGDN with x = 1 is the gated delta rule",
        Side("pgdn", _take("q k v g beta", h="g", eta="beta", center="no_param"), {"x": 1.0}), _delta(),
    ),
    _pair(
        "PKDA with x = 1 is KDA",
        Side("pkda", _take("q k v beta", g="g_K", h="g", eta="beta", center="no_param"), {"x": 1.0}), _KDA,
    ),
    _pair(
        "a memory that is always chosen is the gated delta rule",
        Side("mom", _take("q k v g beta", c="one", w="one")), _delta(),
    ),
    _pair(
        "Raven that routes to every slot is gated slot attention",
        Side("raven", _take("q k v", f="g", r="slots"), {"m": 3}),
        Side("gsa", _take("q k v", g=lambda x: x["g"][..., None] * x["slots"]), {"m": 3}),
    ),
    _pair(
        "titans with a linear memory is momentum with other names",
        Side("titans_linear", _take("q k v", eta=lambda x: x["g"].exp(), theta="eta", alpha="beta")),
        Side("mdn", _take("q k v", p="k", g=lambda x: torch.log1p(-x["beta"]), h="g",
                          beta=lambda x: -x["one"], eta=lambda x: -x["eta"]), {"scale": 1.0}),
    ),
)  # fmt: skip


@cache
def _entries() -> dict[RecurrenceSpec, str]:
    return {entry_spec(n): n for n in catalogue_names()}


def reductions_of(spec: RecurrenceSpec) -> list[tuple[Reduction, int]]:
    """The reductions with this entry of the catalogue on one side, and on which."""
    name = _entries().get(spec)
    return [(r, i) for r in REDUCTIONS for i, side in enumerate(r.sides) if side.entry == name]
