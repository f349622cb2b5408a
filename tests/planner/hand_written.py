"""Recurrences in form (1) written by hand, each with the step of its definition, and draws of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from linalg_dsl.algebra import expr as ex
from linalg_dsl.language.spec import Const, Input, RecurrenceSpec, State
from linalg_dsl.planner.form import CanonicalRecurrence, Decay, Read, Recurrence

KEY, VALUE, STEPS = 5, 4, 17
Step = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


def sym(name: str, *dims: str, row: int | None = None, time: int | None = 0) -> ex.Symbol:
    return ex.Symbol(name, (dims[0] if dims else 1, 1), time, row)


q, k, p, v = sym("q", "K"), sym("k", "K"), sym("p", "K"), sym("v", "V")
g, a, beta = sym("g"), sym("a", "K"), sym("beta")
INPUTS = {
    "q": Input("q", ("K",)),
    "k": Input("k", ("K",), unit=True),
    "p": Input("p", ("K",), unit=True),
    "v": Input("v", ("V",)),
    "g": Input("g", (), kind="log_gate"),
    "a": Input("a", ("K",), kind="log_gate"),
    "beta": Input("beta", ()),
    "x": Input("x", ()),
    "keys": Input("keys", (2, "K"), unit=True),
    "values": Input("values", (2, "V")),
    "betas": Input("betas", (2,)),
    "u": Input("u", ("K",), timed=False),
    "gamma": Input("gamma", (), kind="log_gate", timed=False),
    "z": Input("z", ("V",)),
}


@dataclass(frozen=True)
class Case:
    name: str
    inputs: str
    recurrence: Recurrence
    step: Step

    @property
    def canonical(self) -> CanonicalRecurrence:
        spec = RecurrenceSpec(
            self.name,
            tuple(INPUTS[n] for n in self.inputs.split()),
            (Const("scale", ex.number(Fraction(3, 4))),),
            (State("S"),),
            (),
            (),
        )
        return CanonicalRecurrence(spec, (self.recurrence,))


def form(
    *,
    decay: Decay = Decay(),  # noqa: B008 - frozen
    left: tuple[ex.Expr, ...] = (k,),
    written: tuple[ex.Expr, ...] = (v,),
    erase: tuple[ex.Expr, ...] = (),
    erase_read: Literal["exclusive", "decayed"] = "exclusive",
    sigma: tuple[tuple[ex.Expr, ...], ...] = (),
    reads: tuple[Read, ...] = (Read("inclusive", q, ex.ONE),),
    token_terms: tuple[ex.Expr, ...] = (),
) -> Recurrence:
    return Recurrence(
        "S",
        decay,
        left,
        written,
        erase,
        erase_read,
        sigma,
        reads,
        token_terms,
    )


def delta_form(
    decay: Decay = Decay(),  # noqa: B008 - frozen
    erase: ex.Expr = k,
    erase_read: Literal["exclusive", "decayed"] = "exclusive",
) -> Recurrence:
    return form(
        decay=decay,
        written=(ex.mul((beta, v)),),
        erase=(erase,),
        erase_read=erase_read,
        sigma=((ex.negate(beta),),),
    )


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]


def recall(state: Tensor, x: Tensor) -> Tensor:
    """S^T x."""
    return torch.einsum("...kv,...k->...v", state, x)


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + ex.L2NORM_EPS)


def scalar(x: Tensor) -> Tensor:
    return x[..., None, None]


def column(x: Tensor) -> Tensor:
    return x[..., :, None]


def linear(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    s = s + outer(x["k"], x["v"])
    return s, 0.75 * recall(s, x["q"])


def scalar_gate(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    s = scalar(x["g"].exp()) * s + outer(x["k"], x["v"])
    return s, recall(s, x["q"])


def retention(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    s = scalar(x["gamma"].exp()) * s + outer(x["k"], x["v"])
    return s, recall(s, x["q"])


def channel_gate(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    s = column(x["a"].exp()) * s + outer(x["k"], x["v"])
    return s, recall(s, x["q"])


def forget_write(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    forget = x["a"].exp()
    s = column(forget) * s + outer(1 - forget, x["v"])
    return s, recall(s, x["q"])


def decayed_read(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    seen = column(x["a"].exp()) * s
    return seen + outer(x["k"], x["v"]), recall(seen, x["q"])


def bonus(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    write = outer(x["k"], x["v"])
    return column(x["a"].exp()) * s + write, recall(s + column(x["u"]) * write, x["q"])


def delta(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    s = s - scalar(x["beta"]) * outer(x["k"], recall(s, x["k"]) - x["v"])
    return s, recall(s, x["q"])


def gated_delta(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return delta(scalar(x["g"].exp()) * s, x)


def erase_undecayed(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    s = scalar(x["g"].exp()) * s - scalar(x["beta"]) * outer(x["k"], recall(s, x["p"]) - x["v"])
    return s, recall(s, x["q"])


def channel_delta(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return delta(column(x["a"].exp()) * s, x)


def channel_undecayed(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    s = column(x["a"].exp()) * s - scalar(x["beta"]) * outer(x["k"], recall(s, x["k"]) - x["v"])
    return s, recall(s, x["q"])


def low_rank(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    s = column(x["a"].exp()) * s + outer(x["p"], recall(s, x["p"] * -1.5)) + outer(x["k"], x["v"])
    return s, recall(s, x["q"])


def two_erases(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    decayed = column(x["a"].exp()) * s
    s = decayed
    for j in range(2):
        error = x["values"][..., j, :] - recall(decayed, x["keys"][..., j, :])
        s = s + scalar(x["betas"][..., j]) * outer(x["keys"][..., j, :], error)
    return s, recall(s, x["q"])


def preludes(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    key, strength = unit(x["k"]), torch.sigmoid(x["x"])
    gate = -torch.nn.functional.softplus(-x["x"]) / 16
    s = scalar(gate.exp()) * s
    s = s - scalar(strength) * outer(key, recall(s, key) - torch.softmax(x["v"], -1))
    query = x["q"] * (x["q"] + x["k"]).sum(-1, keepdim=True)
    return s, torch.nn.functional.silu(x["z"]) * recall(s, query) + torch.tanh(x["z"])


def two_reads(s: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    after = scalar(x["g"].exp()) * s + outer(x["k"], x["v"])
    return after, recall(after, x["q"]) - recall(s, x["p"]) * x["z"]


decays = {
    "g": Decay("scalar", g),
    "a": Decay("channel", a),
    "gamma": Decay("scalar", sym("gamma", time=None)),
}
x1, khat = sym("x"), ex.call("l2norm", (k,))
strength = ex.call("sigmoid", (x1,))
softplus_gate = ex.call("softplus", (ex.negate(x1),))
rows = [sym("keys", "K", row=j) for j in (0, 1)]
betas = [sym("betas", row=j) for j in (0, 1)]

CASES = [
    Case(
        "linear", "q k v",
        form(reads=(Read("inclusive", q, sym("scale", time=None)),)), linear,
    ),
    Case("scalar_gate", "q k v g", form(decay=decays["g"]), scalar_gate),
    Case("retention", "q k v gamma", form(decay=decays["gamma"]), retention),
    Case("channel_gate", "q k v a", form(decay=decays["a"]), channel_gate),
    Case(
        "forget_write", "q v a",
        form(decay=decays["a"], left=(ex.add((ex.ONE, ex.negate(ex.call("exp", (a,))))),)), forget_write,
    ),
    Case(
        "decayed_read", "q k v a",
        form(decay=decays["a"], reads=(Read("decayed", q, ex.ONE),)), decayed_read,
    ),
    Case(
        "bonus", "q k v a u",
        form(
            decay=decays["a"],
            reads=(Read("exclusive", q, ex.ONE),),
            token_terms=(
                ex.mul((ex.transpose(q), ex.hadamard((sym("u", "K", time=None), k)), v)),
            ),
        ),
        bonus,
    ),
    Case("delta", "q k v beta", delta_form(), delta),
    Case(
        "gated_delta", "q k v g beta",
        delta_form(decays["g"], erase_read="decayed"), gated_delta,
    ),
    Case(
        "erase_undecayed", "q k p v g beta",
        delta_form(decays["g"], erase=p),
        erase_undecayed,
    ),
    Case(
        "channel_delta", "q k v a beta",
        delta_form(decays["a"], erase_read="decayed"), channel_delta,
    ),
    Case("channel_undecayed", "q k v a beta", delta_form(decays["a"]), channel_undecayed),
    Case(
        "low_rank", "q k p v a",
        form(
            decay=decays["a"], left=(k, p), written=(v, ex.ZERO),
            erase=(ex.mul((ex.number(-1.5), p)),), sigma=((ex.ZERO,), (ex.ONE,)),
        ),
        low_rank,
    ),
    Case(
        "two_erases", "q keys values betas a",
        form(
            decay=decays["a"], left=tuple(rows),
            written=tuple(ex.mul((betas[j], sym("values", "V", row=j))) for j in (0, 1)),
            erase=tuple(rows), erase_read="decayed",
            sigma=((ex.negate(betas[0]), ex.ZERO), (ex.ZERO, ex.negate(betas[1]))),
        ),
        two_erases,
    ),
    Case(
        "preludes", "q k v x z",
        form(
            decay=Decay("scalar", ex.mul((ex.number(Fraction(-1, 16)), softplus_gate))),
            left=(khat,), written=(ex.mul((strength, ex.call("softmax", (v,)))),),
            erase=(khat,), erase_read="decayed", sigma=((ex.negate(strength),),),
            reads=(
                Read(
                    "inclusive", ex.mul((q, ex.call("sum", (ex.add((q, k)),)))), ex.ONE,
                    ex.call("silu", (sym("z", "V"),)),
                ),
            ),
            token_terms=(ex.call("tanh", (sym("z", "V"),)),),
        ),
        preludes,
    ),
    Case(
        "two_reads", "q k p v z g",
        form(
            decay=decays["g"],
            reads=(
                Read("inclusive", q, ex.ONE),
                Read("exclusive", p, ex.number(-1), sym("z", "V")),
            ),
        ),
        two_reads,
    ),
]  # fmt: skip


def draw_gates(shape: tuple[int, ...], gates: str, generator: torch.Generator) -> Tensor:
    mild = -torch.nn.functional.softplus(torch.randn(shape, generator=generator, dtype=torch.float64))
    if gates == "mild":
        return mild
    kinds = torch.randint(0, 5 if gates == "resets" else 4, shape, generator=generator)
    values = torch.tensor([0.0, -1e-7, -60.0, 0.0, -torch.inf], dtype=torch.float64)[kinds]
    return torch.where(kinds == 3, mild, values)


def draw(case: Case, gates: str, seed: int, batch: int = 2, heads: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"K": KEY, "V": VALUE}
    tensors = {}
    for name in case.inputs.split():
        declared = INPUTS[name]
        rest = tuple(d if isinstance(d, int) else sizes[d] for d in declared.dims)
        shape = (batch, STEPS, heads, *rest) if declared.timed else (heads, *rest)
        if declared.kind == "log_gate":
            # a per-head gate of exactly 0 or -inf makes every token alike: the mild draw says more
            tensors[name] = draw_gates(shape, gates if declared.timed else "mild", generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
            if declared.unit:
                tensors[name] /= tensors[name].norm(dim=-1, keepdim=True)
            if name.startswith("beta"):
                tensors[name] = 2 * torch.sigmoid(tensors[name])
    tensors["initial_state"] = torch.randn(batch, heads, KEY, VALUE, generator=generator, dtype=torch.float64)
    return tensors


def loop(case: Case, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    state, outputs = tensors["initial_state"], []
    names = case.inputs.split()
    for t in range(STEPS):
        now = {n: tensors[n][:, t] if INPUTS[n].timed else tensors[n] for n in names}
        state, o = case.step(state, now)
        outputs.append(o)
    return torch.stack(outputs, 1), state


def with_consts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
    return {**{n: x for n, x in tensors.items() if n != "initial_state"}, "scale": 0.75}
