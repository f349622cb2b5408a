"""What the tests of the catalogue share: hand-written loops, inputs that suit each entry, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from loop_kit import Step, run_loop
from loops_delta import DELTA
from loops_gated import GATED
from loops_memory import MEMORY
from torch import Tensor

import linalg_dsl
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import GateKind, draw
from linalg_dsl.ops.reference import const_values, reference

STEPS: dict[str, Step] = {**GATED, **DELTA, **MEMORY}

SMALLER = {name: {"m": 3.0} for name in ("abc", "gsa", "raven", "blurry_window")}
"""Consts that are given in the calls of the tests."""

Named = dict[str, Tensor]


@cache
def spec_of(name: str) -> RecurrenceSpec:
    return parse(catalogue_text(name), f"{name}.rec")


def classes_of(name: str) -> str:
    """What the entry compiles to, as its page says: ``scan (m), scalar gate (C)`` for two stages."""
    found = []
    for stage in linalg_dsl.compile(spec_of(name), backend="torch").plan.explain().stages:
        label, verdict = stage.verdict.split(": ", 1)
        of = "" if label == name else f" ({label.removeprefix(f'{name}_')})"
        found.append(verdict.split(" → ")[0] + of)
    return ", ".join(found)


def positive(x: Tensor) -> Tensor:
    return x.abs() + 0.1


# what a state holds when it is no free tensor: a normaliser, a precision
STARTS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "normalised_linear_attention": {"n": positive},
    "based": {"n": positive},
    "rebased": {"n": positive},
    "rwkv4": {"d": positive},
    "slstm": {"n": positive},
    "kalman": {"lam": positive},
    "pgdn": {"A": positive},
    "pkda": {"A": positive},
}


@dataclass(frozen=True)
class Call:
    """Inputs and what is carried into the call, all of which want gradients.

    ``states`` follows ``spec.carried``: the states, then the token before of inputs that are looked back to.
    """

    name: str
    tensors: Named
    states: Named

    @property
    def spec(self) -> RecurrenceSpec:
        return spec_of(self.name)

    @property
    def consts(self) -> dict[str, float]:
        return SMALLER.get(self.name, {})

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.tensors.values(), *self.states.values()]

    @property
    def labels(self) -> list[str]:
        return [f"d {n}" for n in (*self.tensors, *self.states)]

    def to(self, dtype: torch.dtype) -> Call:
        """The same numbers, rounded."""
        turned = [
            {n: x.detach().to(dtype).requires_grad_() for n, x in named.items()}
            for named in (self.tensors, self.states)
        ]
        return Call(self.name, *turned)


def make_call(
    name: str, B: int, T: int, H: int, K: int, V: int, gates: GateKind = "mild", seed: int = 0
) -> Call:
    """Random float64 tensors that keep what the entry's text says of its inputs."""
    spec, consts = spec_of(name), SMALLER.get(name, {})
    tensors = draw(spec, B, T, H, K, V, gates=gates, seed=seed, consts=consts)
    if name == "based":  # features whose products are positive
        tensors |= {n: tensors[n].abs() for n in ("q", "k")}
    if {"c", "s"} <= tensors.keys():  # cosine and sine
        size = torch.hypot(tensors["c"], tensors["s"])
        tensors |= {n: tensors[n] / size for n in ("c", "s")}
    sizes: dict[str, float] = {"K": K, "V": V}
    sizes |= const_values(spec, {"K": K, "V": V}, consts)
    generator = torch.Generator().manual_seed(seed + 77)
    states = {}
    dims = [*(s.dims for s in spec.states), *(i.dims for i in spec.shifted)]
    for label, axes in zip(spec.carried, dims, strict=True):
        shape = (B, H, *(d if isinstance(d, int) else int(sizes[d]) for d in axes))
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        fit = STARTS.get(name, {}).get(label)
        states[label] = value if fit is None else fit(value)
    return Call(
        name,
        {n: x.clone().requires_grad_() for n, x in tensors.items()},
        {n: x.clone().requires_grad_() for n, x in states.items()},
    )


def by_hand(call: Call, starts: Named | None = None) -> list[Tensor]:
    """o and what is carried out of the hand-written loop; ``starts`` in place of the call's states."""
    states = call.states if starts is None else starts
    timed = {i.name: call.tensors[i.name] for i in call.spec.inputs if i.timed}
    params = {i.name: call.tensors[i.name] for i in call.spec.inputs if not i.timed}
    own = {s.name: states[s.name] for s in call.spec.states}
    before = {i.name: states[f"{i.name}_prev"] for i in call.spec.shifted if f"{i.name}_prev" in states}
    o, ends = run_loop(STEPS[call.name], timed, params, own, before)
    return [o, *ends.values(), *(timed[i.name][:, -1] for i in call.spec.shifted)]


def by_reference(call: Call) -> list[Tensor]:
    """o and the final states of the step loop of the spec."""
    states = list(call.states.values())
    o, last = reference(
        call.spec,
        call.tensors,
        initial_state=states[0] if len(states) == 1 else call.states,
        output_final_state=True,
        consts=call.consts,
    )
    return [o, *as_list(last)]


def by_op(call: Call, function: Callable[..., Any], **options: Any) -> list[Tensor]:
    """o and the final states of a compiled op or a catalogue function."""
    states = list(call.states.values())
    initial = states[0] if len(states) == 1 else tuple(states)
    arguments = {**call.consts, **options, "initial_state": initial, "output_final_state": True}
    o, last = function(**call.tensors, **arguments)
    return [o, *as_list(last)]


def as_list(last: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [last] if isinstance(last, Tensor) else list(last)


def with_gradients(call: Call, results: list[Tensor]) -> dict[str, Tensor]:
    """The results and, from random cotangents of all of them, the gradient of every leaf."""
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
    found = torch.autograd.grad(results, call.leaves, cotangents, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, call.leaves, strict=True)]
    names = ["o", *(f"final {s}" for s in call.states), *call.labels]
    return dict(zip(names, [*results, *grads], strict=True))


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 error of each tensor; small gradients count against a millionth of the largest."""
    assert list(found) == list(wanted)
    floor = 1e-6 * max(w.detach().norm().item() for w in wanted.values())
    result = {}
    for name, want in wanted.items():
        assert found[name].shape == want.shape, name
        distance = (found[name].detach().double() - want.detach().double()).norm().item()
        result[name] = distance / max(want.detach().norm().item(), floor, 1e-30)
    return result


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    bad = {name: error for name, error in errors(found, wanted).items() if not error <= bound}
    assert not bad, f"beyond {bound:g}: {bad}"
