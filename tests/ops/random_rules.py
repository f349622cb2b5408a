"""Random recurrences as text, each beside a step of plain torch that is put together with it, not from it.

The update is a product of random factors on either side of the state (gates of all kinds, identities, low
rank, dense matrices), with writes of this token and of the one before, sometimes before the factors or
followed by substeps; it is read at a random time, along either axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Values = dict[str, Tensor]
Value = Callable[[Values, Values], Tensor]
"""(the inputs of a token, those of the token before) to a value of every head."""


@dataclass(frozen=True)
class Rule:
    """``layout``: the axes of S. ``step``: of the inputs, those before and S to the next S; ``read``: of the
    inputs, those before, and S before and after."""

    text: str
    kinds: dict[str, tuple[str, tuple[str, ...]]]
    layout: tuple[str, str]
    step: Callable[[Values, Values, Tensor], Tensor]
    read: Callable[[Values, Values, Tensor, Tensor], Tensor]

    def is_param(self, name: str) -> bool:
        return self.kinds[name][0].startswith("param")


@dataclass
class _Writer:
    """Declares inputs as they are needed."""

    choose: Any
    lines: list[str] = field(default_factory=list)
    kinds: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    def one_of(self, *options: Any) -> Any:
        return self.choose(st.sampled_from(options))

    def declare(self, stem: str, kind: str, dims: tuple[str, ...], text: str, word: str = "input") -> str:
        name = f"{stem}{len(self.kinds)}"
        shape = f"[{', '.join(dims)}]" if dims else ""
        self.lines.append(f"{word} {name} : {text.replace('#', shape) or 'scalar'}")
        self.kinds[name] = kind, dims
        return name

    def vector(self, dim: str, shifted: bool = False) -> tuple[str, Value]:
        kind, text = self.one_of(("plain", "#"), ("unit", "# unit"))
        name = self.declare("x", kind, (dim,), text)
        if shifted and self.one_of(False, False, False, True):
            return f"{name}_{{t-1}}", lambda now, before: before[name]
        return f"{name}_t", lambda now, before: now[name]

    def scalar(self) -> tuple[str, Value]:
        kind, bounds = self.one_of(
            ("in (0, 1)", "(0, 1)"), ("in (0, 2)", "(0, 2)"), ("in (-1, 1)", "(-1, 1)")
        )
        name = self.declare("b", kind, (), f"scalar in {bounds}")
        return f"{name}_t", lambda now, before: now[name]

    def gate(self, dim: str = "") -> tuple[str, Value]:
        """A gate in linear space, a number or one per channel: of either sign, exactly 0, growing, ..."""
        dims = (dim,) if dim else ()
        kind = self.one_of("log", "resets", "gate", "signed", "zeros", "grows", "param log", "raw")
        text = {
            "log": "log gate #", "resets": "log gate #", "gate": "gate #", "signed": "gate # in (-1, 1)",
            "zeros": "gate # in [0, 1]", "grows": "log gate # in (-inf, 1]", "param log": "log gate #",
            "raw": "#",
        }[kind]  # fmt: skip
        name = self.declare("g", kind, dims, text, "param" if kind == "param log" else "input")
        match kind:
            case "raw":
                return f"sigmoid({name}_t)^(1/4)", lambda now, before: now[name].sigmoid() ** 0.25
            case "param log":
                return f"exp({name})", lambda now, before: now[name].exp()
            case "gate" | "signed" | "zeros":
                return f"{name}_t", lambda now, before: now[name]
            case _:
                return f"exp({name}_t)", lambda now, before: now[name].exp()

    def factor(self, dim: str, dense: bool) -> tuple[str, Value]:
        """A matrix [dim, dim] of a token."""
        kinds = ("gate", "number", "diag", "eye", "delta", "pair", "comba", "dplr", "two", "low", "minus")
        kind = self.one_of(*kinds, *(("dense",) if dense else ()))
        match kind:
            case "gate":
                text, gate = self.gate()
                return text, lambda now, before: gate(now, before)[..., None, None] * eye(dim)
            case "number":
                return "(0.9 I)", lambda now, before: 0.9 * eye(dim)
            case "eye":
                return "I", lambda now, before: eye(dim)
            case "diag":
                text, gate = self.gate(dim)
                return f"diag({text})", lambda now, before: torch.diag_embed(gate(now, before))
            case "dense":
                name = self.declare("M", "dense", (dim, dim), "#")
                return f"{name}_t", lambda now, before: now[name]
        (a, x), (b, y), (c, s) = self.vector(dim), self.vector(dim), self.scalar()

        def scale(now: Values, before: Values) -> Tensor:
            return s(now, before)[..., None, None]

        def pair(left: Value, right: Value) -> Value:
            return lambda now, before: left(now, before)[..., :, None] * right(now, before)[..., None, :]

        xx, xy, yx = pair(x, x), pair(x, y), pair(y, x)
        match kind:
            case "delta":
                return (
                    f"(I - {c} {a} {a}ᵀ)",
                    lambda now, before: eye(dim) - scale(now, before) * xx(now, before),
                )
            case "pair":
                return f"(I + outer({a}, {b}))", lambda now, before: eye(dim) + xy(now, before)
            case "low":
                return f"({a} {b}ᵀ)", xy
            case "minus":
                return (
                    f"({c} - {b} {a}^T)",
                    lambda now, before: scale(now, before) * eye(dim) - yx(now, before),
                )
            case "comba":
                text, gate = self.gate()
                return (
                    f"({text} - {c} {a} {a}ᵀ)",
                    lambda now, before: (
                        gate(now, before)[..., None, None] * eye(dim) - scale(now, before) * xx(now, before)
                    ),
                )
            case "dplr":
                text, gate = self.gate(dim)
                return (
                    f"(diag({text}) + {c} {a} {b}ᵀ)",
                    lambda now, before: (
                        torch.diag_embed(gate(now, before)) + scale(now, before) * xy(now, before)
                    ),
                )
            case _:
                return (
                    f"(I - {a} {b}ᵀ + {c} {b} {a}ᵀ)",
                    lambda now, before: eye(dim) - xy(now, before) + scale(now, before) * yx(now, before),
                )

    def write(self, layout: tuple[str, str]) -> tuple[str, Value]:
        (a, x), (b, y) = self.vector(layout[0], True), self.vector(layout[1], True)

        def value(now: Values, before: Values) -> Tensor:
            return x(now, before)[..., :, None] * y(now, before)[..., None, :]

        if self.one_of(True, False):
            return f"{a} {b}ᵀ", value
        c, s = self.scalar()
        return f"{c} {a} {b}ᵀ", lambda now, before: s(now, before)[..., None, None] * value(now, before)


SIZES = {"K": 3, "V": 4}


def eye(dim: str) -> Tensor:
    return torch.eye(SIZES[dim], dtype=torch.float64)


@st.composite
def rules(choose: st.DrawFn) -> Rule:
    w = _Writer(choose)
    layout: tuple[str, str] = w.one_of(("K", "V"), ("V", "K"))
    side = w.one_of("left", "right", "left", "right", "both", "gated")
    dense = w.one_of(False, False, False, True)

    def factors(dim: str) -> list[tuple[str, Value]]:
        return [w.factor(dim, dense) for _ in range(w.one_of(1, 2, 3))]

    lefts = [] if side == "right" else factors(layout[0])
    rights = factors(layout[1]) if side in ("right", "both") else []
    if side == "gated":
        text, gate = w.gate(layout[1])
        rights = [(f"diag({text})", lambda now, before: torch.diag_embed(gate(now, before)))]
    writes = [w.write(layout) for _ in range(w.one_of(1, 1, 2, 3))]
    inside = w.one_of(False, False, False, True)
    middle = f"(S_{{t-1}} + {writes[0][0]})" if inside else "S_{t-1}"
    rest = writes[1:] if inside else writes
    chain = " ".join([*(t for t, _ in lefts), middle, *(t for t, _ in rights)])
    lines = ["S_t = " + " + ".join([chain, *(t for t, _ in rest)])]
    loop, substep = _substeps(w, layout) if w.one_of(False, False, False, True) else ([], None)

    def step(now: Values, before: Values, S: Tensor) -> Tensor:
        if inside:
            S = S + writes[0][1](now, before)
        for _, f in reversed(lefts):
            S = f(now, before) @ S
        for _, f in rights:
            S = S @ f(now, before)
        for _, f in rest:
            S = S + f(now, before)
        return S if substep is None else substep(now, S)

    text, read = _read(w, layout)
    lines += [*loop, f"o_t = {text}"]
    const = ["const n = 2"] if loop else []
    state = [f"state S : [{', '.join(layout)}]"]
    whole = "\n".join(["recurrence drawn", *const, *w.lines, *state, *lines, ""])
    return Rule(whole, w.kinds, layout, step, read)


def _substeps(w: _Writer, layout: tuple[str, str]) -> tuple[list[str], Callable[[Values, Tensor], Tensor]]:
    """Two steps of a delta rule along the first axis."""
    k = w.declare("k", "unit", ("n", layout[0]), "# unit")
    v = w.declare("v", "plain", ("n", layout[1]), "#")

    def run(now: Values, S: Tensor) -> Tensor:
        for j in (0, 1):
            key, value = now[k][..., j, :], now[v][..., j, :]
            stored = (S.mT @ key[..., None])[..., 0]
            S = S - key[..., :, None] * (stored - value)[..., None, :]
        return S

    body = f"    S_t = S_t - {k}_{{t,j}} (S_tᵀ {k}_{{t,j}} - {v}_{{t,j}})ᵀ"
    return ["for j in 1..n:", body], run


def _read(
    w: _Writer, layout: tuple[str, str]
) -> tuple[str, Callable[[Values, Values, Tensor, Tensor], Tensor]]:
    def product(S: Tensor, x: Tensor) -> Tensor:
        return (S @ x[..., None])[..., 0]

    q, x = w.vector(layout[0])
    match w.one_of("now", "past", "decayed", "bonus", "gated", "both", "across"):
        case "now":
            return f"S_tᵀ {q}", lambda now, before, old, new: product(new.mT, x(now, before))
        case "past":
            return f"S_{{t-1}}ᵀ {q}", lambda now, before, old, new: product(old.mT, x(now, before))
        case "decayed":
            text, gate = w.gate(layout[0])
            return f"(diag({text}) S_{{t-1}})ᵀ {q}", lambda now, before, old, new: product(
                old.mT, gate(now, before) * x(now, before)
            )
        case "bonus":
            u = w.declare("u", "param", (layout[0],), "#", "param")
            (a, k), (b, v) = w.vector(layout[0]), w.vector(layout[1])
            return (
                f"(S_{{t-1}} + diag({u}) {a} {b}ᵀ)ᵀ {q}",
                lambda now, before, old, new: (
                    product(old.mT, x(now, before))
                    + (now[u] * k(now, before) * x(now, before)).sum(-1, keepdim=True) * v(now, before)
                ),
            )
        case "gated":
            b, v = w.vector(layout[1])
            return (
                f"{b} ⊙ (S_tᵀ {q}) + {b}",
                lambda now, before, old, new: v(now, before) * (product(new.mT, x(now, before)) + 1),
            )
        case "both":
            p, y = w.vector(layout[0])
            return (
                f"S_tᵀ {q} - 0.5 S_{{t-1}}ᵀ {p}",
                lambda now, before, old, new: (
                    product(new.mT, x(now, before)) - 0.5 * product(old.mT, y(now, before))
                ),
            )
        case _:
            b, v = w.vector(layout[1])
            return (
                f"S_t {b} + {q}",
                lambda now, before, old, new: product(new, v(now, before)) + x(now, before),
            )


DRAWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "unit": lambda n, u, f: torch.nn.functional.normalize(n, dim=-1),
    "in (0, 1)": lambda n, u, f: u,
    "in (0, 2)": lambda n, u, f: 2 * u,
    "in (-1, 1)": lambda n, u, f: 2 * u - 1,
    "log": lambda n, u, f: -torch.nn.functional.softplus(2 * n),
    "resets": lambda n, u, f: (-torch.nn.functional.softplus(n)).masked_fill(f, -torch.inf),
    "gate": lambda n, u, f: 0.02 + 0.98 * u,
    "signed": lambda n, u, f: 1.8 * u - 0.9,
    "zeros": lambda n, u, f: u.masked_fill(f, 0.0),
    "grows": lambda n, u, f: 1 - 2 * u,
    "param log": lambda n, u, f: -u,
    "dense": lambda n, u, f: 0.3 * n,
}
"""Of normal numbers, uniform ones, and a tenth of all elements; other kinds are the normal numbers."""


def inputs(rule: Rule, length: int, heads: int, seed: int) -> Values:
    """Tensors that keep the declarations: resets and zeros among them, gates of both signs, growth."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (kind, dims) in rule.kinds.items():
        lead = (heads,) if rule.is_param(name) else (1, length, heads)
        shape = (*lead, *(2 if d == "n" else SIZES[d] for d in dims))
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        few = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.1
        found[name] = DRAWS[kind](normal, uniform, few) if kind in DRAWS else normal
    return found


def run(rule: Rule, tensors: Values, S: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs, the last state), token by token; before the first token shifted inputs are 0."""
    timed: Sequence[str] = [n for n in tensors if not rule.is_param(n)]
    params = {n: x[None] for n, x in tensors.items() if rule.is_param(n)}
    outputs = []
    before = {n: torch.zeros_like(tensors[n][:, 0]) for n in timed} | params
    for t in range(tensors[timed[0]].shape[1]):
        now = {n: tensors[n][:, t] for n in timed} | params
        new = rule.step(now, before, S)
        outputs.append(rule.read(now, before, S, new))
        before, S = now, new
    return torch.stack(outputs, 1), S
