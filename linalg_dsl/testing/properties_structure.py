"""What a sequence may not see: other chunks, other sequences, other heads, the future, other runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.testing.cases import (
    Case,
    make_case,
    outcome,
    run,
    sequences,
)
from linalg_dsl.testing.compare import Excess, allowance, fail, least, ratios
from linalg_dsl.testing.draws import cases, extremes, one_case
from linalg_dsl.testing.failures import NotApplicable
from linalg_dsl.testing.oracle import Oracle, exact, head_axis
from linalg_dsl.testing.subject import Subject

RUNS = 20
"""How often a call is repeated to see whether its bits are always the same."""


def demand_close(
    subject: Subject,
    prop: str,
    case: Case,
    oracle: Oracle,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    cause: str,
) -> None:
    """Two ways to compute the same: each may be off by what the error model allows."""
    for name, want in expected.items():
        if want.numel() == 0:
            continue
        allowed = 2 * least(case, oracle, name)
        ratio = ratios(got[name].double(), want.double(), allowed, got[name].dtype)
        if float(ratio.max()) > 1:
            allowed = 2 * allowance(subject, case, oracle, name)
            ratio = ratios(got[name].double(), want.double(), allowed, got[name].dtype)
        ratio = torch.where(oracle.want[name].isfinite(), ratio, 0.0)
        if float(ratio.max()) > 1:
            raise fail(subject, prop, case, _at(name, got[name], want, allowed, ratio), cause, got)


def demand_bits(
    subject: Subject,
    prop: str,
    case: Case,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    cause: str,
) -> None:
    """The same numbers to the last bit; NaN equals NaN, 0 equals -0."""
    for name, want in expected.items():
        same = (got[name] == want) | (got[name].isnan() & want.isnan())
        if not bool(same.all()):
            error = (got[name].double() - want.double()).abs().nan_to_num(inf)
            raise fail(
                subject, prop, case, _at(name, got[name], want, torch.zeros_like(error), error), cause, got
            )


def _at(name: str, got: Tensor, want: Tensor, allowed: Tensor, ratio: Tensor) -> Excess:
    at = torch.unravel_index(ratio.reshape(-1).argmax(), ratio.shape)
    index = tuple(int(i) for i in at)
    return Excess(
        name, index, float(got[index]), float(want[index]), float(allowed[index]), float(ratio[index])
    )


def chunk_size_invariance(
    subject: Subject, *, seed: int = 0, examples: int = 8, budget_s: float = inf
) -> None:
    """Other chunk sizes (``Subject.variants``) give the same results and gradients up to rounding."""
    if not subject.variants:
        raise NotApplicable(f"{subject.name} has no variants to compare")
    for case in cases(subject, seed=seed + 3, examples=examples, budget_s=budget_s):
        oracle = exact(case, gradients=bool(subject.wanted))
        base = run(subject, case)
        for name, call in subject.variants.items():
            other = run(subject, case, call)
            cause = f"{name} computes something else: a boundary between chunks is treated wrongly"
            demand_close(subject, "chunk_size_invariance", case, oracle, other, base, cause)


def split_and_continue(subject: Subject, *, seed: int = 0, examples: int = 10, budget_s: float = inf) -> None:
    """A sequence cut in two, the state carried over, gives the results and gradients of the whole."""
    if not (subject.initial_state and subject.final_state):
        raise NotApplicable(f"{subject.name} takes or gives no state")
    for case in cases(subject, seed=seed + 5, examples=examples, budget_s=budget_s, packed=False):
        case = _long_enough(subject, case, 2)
        T = case.shape.T
        chance = random.Random(case.seed)
        cut = chance.choice([n for n in (1, 15, 16, 17, T // 2, 63, 64, T - 1) if 0 < n < T])
        oracle = exact(case, gradients=bool(subject.wanted))
        whole = run(subject, case)
        joined = run(subject, case, _in_pieces(subject, case, (0, cut, T)))
        cause = f"the state handed on at token {cut}, or its gradient, is not the one in the middle"
        demand_close(subject, "split_and_continue", case, oracle, joined, whole, cause)


def _long_enough(subject: Subject, case: Case, least: int) -> Case:
    """The case, or one of its seed with so many tokens and an initial state."""
    if least <= case.shape.T and case.states:
        return case
    shape = replace(case.shape, T=max(case.shape.T, least))
    return one_case(subject, case.seed, shape=shape, dtype=case.dtype, ordinary=True, with_state=True)


def _in_pieces(subject: Subject, case: Case, cuts: tuple[int, ...]) -> Callable[..., Any]:
    """A callable that goes through the sequence piece by piece."""
    timed = {d.name for d in case.spec.inputs if d.timed}

    def call(**given: Any) -> Any:
        outputs = []
        state = given.get("initial_state")
        for begin, end in pairwise(cuts):
            piece = {n: x[:, begin:end] if n in timed else x for n, x in given.items()}
            if state is not None:
                piece["initial_state"] = state
            o, state = subject.call(**piece)
            if not isinstance(state, Tensor):
                state = tuple(state)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    return call


def packed_equals_separate(
    subject: Subject, *, seed: int = 0, examples: int = 10, budget_s: float = inf
) -> None:
    """Packed sequences, empty ones included, give what each gives alone, and gradients likewise."""
    if not subject.packed:
        raise NotApplicable(f"{subject.name} takes no packed sequences")
    for case in cases(subject, seed=seed + 7, examples=examples, budget_s=budget_s, packed=True):
        oracle = exact(case, gradients=bool(subject.wanted))
        packed = run(subject, case)
        alone = run(subject, case, _one_by_one(subject, case))
        cause = "a packed sequence sees its neighbours, or starts from another's state"
        demand_close(subject, "packed_equals_separate", case, oracle, packed, alone, cause)


def _one_by_one(subject: Subject, case: Case) -> Callable[..., Any]:
    timed = {d.name for d in case.spec.inputs if d.timed}

    def call(**given: Any) -> Any:
        given = {n: x for n, x in given.items() if n != "cu_seqlens"}
        outputs, lasts = [], []
        for n, (_, begin, end) in enumerate(sequences(case)):
            piece = {k: x[:, begin:end] if k in timed else x for k, x in given.items()}
            if "initial_state" in piece:
                starts: Any = piece["initial_state"]
                one = isinstance(starts, Tensor)
                piece["initial_state"] = starts[n : n + 1] if one else tuple(x[n : n + 1] for x in starts)
            found = outcome(subject, case, subject.call(**piece))
            o, *states = found.values()
            outputs.append(o)
            lasts.append(states)
        if not subject.final_state:
            return torch.cat(outputs, 1)
        joined = tuple(torch.cat(x) for x in zip(*lasts, strict=True))
        return torch.cat(outputs, 1), joined[0] if len(joined) == 1 else joined

    return call


def causality(subject: Subject, *, seed: int = 0, examples: int = 10, budget_s: float = inf) -> None:
    """Output at a token does not depend, to the last bit, on any input of a later token."""
    for case, cut in _cut_cases(subject, seed + 11, examples, budget_s):
        other = _with_other_future(subject, case, cut)
        base, moved = (run(subject, c, gradients=False)["o"][:, :cut] for c in (case, other))
        cause = f"outputs before token {cut} changed with inputs from there on"
        demand_bits(subject, "causality", case, {"o": moved}, {"o": base}, cause)


def prefix_gradient_causality(
    subject: Subject, *, seed: int = 0, examples: int = 10, budget_s: float = inf
) -> None:
    """Of a loss on the outputs before some token, gradients from that token on are exactly 0, and those
    before it do not depend, to the last bit, on what stands there."""
    if not subject.wanted:
        raise NotApplicable(f"no gradients of {subject.name} are claimed")
    for case, cut in _cut_cases(subject, seed + 13, examples, budget_s):
        for name, weight in case.weights.items():
            if name == "o":
                weight[:, cut:] = 0
            else:
                weight.zero_()
        other = _with_other_future(subject, case, cut)
        other.weights.update(case.weights)
        base, moved = run(subject, case), run(subject, other)
        timed = [f"d {d.name}" for d in case.spec.inputs if d.timed and f"d {d.name}" in base]
        cause = f"a loss before token {cut} sees inputs from there on"
        late = {n: base[n][:, cut:] for n in timed}
        demand_bits(
            subject, "prefix_gradient_causality", case, late, {n: x * 0 for n, x in late.items()}, cause
        )
        names = [n for n in base if n.startswith("d ")]
        early = {n: (base[n][:, :cut] if n in timed else base[n]) for n in names}
        early_moved = {n: (moved[n][:, :cut] if n in timed else moved[n]) for n in names}
        demand_bits(subject, "prefix_gradient_causality", case, early_moved, early, cause)


def _cut_cases(subject: Subject, seed: int, examples: int, budget_s: float) -> list[tuple[Case, int]]:
    found = []
    for case in cases(subject, seed=seed, examples=examples, budget_s=budget_s, packed=False):
        T = case.shape.T
        if T < 2:
            case = one_case(subject, case.seed, shape=replace(case.shape, T=5))
            T = 5
        chance = random.Random(case.seed)
        found.append((case, chance.choice([n for n in (1, 15, 16, 17, T // 2, T - 1) if 0 < n < T])))
    return found


def _with_other_future(subject: Subject, case: Case, cut: int) -> Case:
    """Other numbers, of another size, from a token on."""
    other = make_case(
        subject, case.shape, seed=case.seed + 5003, dtype=case.dtype, heads=case.heads,
        extremes=replace(extremes(subject, case.seed + 1), values="large"), with_state=case.with_state,
    )  # fmt: skip
    changed = {}
    for decl in case.spec.inputs:
        x = case.tensors[decl.name]
        if decl.timed:
            x = torch.cat([x[:, :cut], other.tensors[decl.name][:, cut:]], 1)
        changed[decl.name] = x
    return case.with_tensors(**changed)


def batch_independence(subject: Subject, *, seed: int = 0, examples: int = 8, budget_s: float = inf) -> None:
    """A row of the batch gives the same bits whatever the other rows hold, in every result and gradient of
    its own."""
    cause = "results of one sequence depend on another one in the batch"
    for case in _wide_cases(subject, seed + 17, examples, budget_s, B=3):
        timed = {"o", *case.labels, *case.states, *(d.name for d in case.spec.inputs if d.timed)}
        axes = dict.fromkeys(timed, 0)
        _only_one_changes(subject, "batch_independence", case, axes, cause)


def head_independence(subject: Subject, *, seed: int = 0, examples: int = 8, budget_s: float = inf) -> None:
    """A head gives the same bits whatever the other heads hold, in every result and gradient of its own."""
    if subject.heads is not None and max(subject.heads) < 2:
        raise NotApplicable(f"{subject.name} takes one head only")
    cause = "results of one head depend on another one: a stride or a map of heads is wrong"
    for case in _wide_cases(subject, seed + 19, examples, budget_s, H=3):
        axes = {n: head_axis(case, n) for n in case.labels}
        axes |= {n: head_axis(case, f"d {n}") for n in (*case.tensors, *case.states)}
        _only_one_changes(subject, "head_independence", case, axes, cause)


def _only_one_changes(
    subject: Subject, prop: str, case: Case, axes: Mapping[str, int], cause: str, keep: int = 1
) -> None:
    """All but entry ``keep`` along the axis of each tensor are drawn anew; the results there stay."""
    other = make_case(
        subject, case.shape, seed=case.seed + 5003, dtype=case.dtype, heads=case.heads,
        extremes=extremes(subject, case.seed + 1), with_state=case.with_state,
    )  # fmt: skip

    def mixed(mine: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(mine)
        for name in mine.keys() & axes.keys():
            found[name] = others[name].clone()
            found[name].select(axes[name], keep).copy_(mine[name].select(axes[name], keep))
        return found

    changed = replace(
        case, tensors=mixed(case.tensors, other.tensors), states=mixed(case.states, other.states)
    )
    changed.weights.update(mixed(case.weights, other.weights))
    base, moved = run(subject, case), run(subject, changed)
    at = {n: axes[n.removeprefix("d ")] for n in base if n.removeprefix("d ") in axes}
    demand_bits(
        subject, prop, case,
        {n: moved[n].select(axis, keep) for n, axis in at.items()},
        {n: base[n].select(axis, keep) for n, axis in at.items()}, cause,
    )  # fmt: skip


def _wide_cases(
    subject: Subject, seed: int, examples: int, budget_s: float, B: int = 2, H: int | None = None
) -> list[Case]:
    """Cases of several rows or heads."""
    found = []
    for case in cases(subject, seed=seed, examples=examples, budget_s=budget_s, packed=False):
        heads = case.shape.H if H is None or subject.heads is not None else H
        if subject.heads is not None and H is not None:
            heads = max(subject.heads)
        shape = replace(case.shape, B=B, H=heads, T=max(case.shape.T, 2))
        found.append(one_case(subject, case.seed, shape=shape, grouped=False))
    return found


def determinism(subject: Subject, *, seed: int = 0, examples: int = 2, budget_s: float = inf) -> None:
    """Twenty runs on the same inputs give the same bits, gradients included."""
    for case in cases(
        subject, seed=seed + 23, examples=examples, budget_s=budget_s, packed=False, ordinary=True
    ):
        base = run(subject, case)
        for _ in range(RUNS - 1):
            demand_bits(
                subject, "determinism", case, run(subject, case), base,
                "runs differ: sums in no fixed order (atomics), a race, or memory that nobody wrote",
            )  # fmt: skip


def decode_equals_prefill(
    subject: Subject, *, seed: int = 0, examples: int = 6, budget_s: float = inf
) -> None:
    """Token after token, the state carried from call to call, gives what one call gives."""
    if not (subject.initial_state and subject.final_state):
        raise NotApplicable(f"{subject.name} takes or gives no state")
    for case in cases(
        subject, seed=seed + 29, examples=examples, budget_s=budget_s, packed=False, longest=17
    ):
        case = _long_enough(subject, case, 1)
        oracle = exact(case, gradients=True)
        whole = run(subject, case, gradients=False)
        steps = run(subject, case, _in_pieces(subject, case, tuple(range(case.shape.T + 1))), gradients=False)
        cause = "one token at a time is not what many at once are"
        demand_close(subject, "decode_equals_prefill", case, oracle, steps, whole, cause)
        if subject.step is not None:
            stepped = run(subject, case, _by_step(subject, case), gradients=False)
            demand_close(subject, "decode_equals_prefill", case, oracle, stepped, whole, cause)


def _by_step(subject: Subject, case: Case) -> Callable[..., Any]:
    timed = {d.name for d in case.spec.inputs if d.timed}
    step = subject.step
    assert step is not None

    def call(**given: Any) -> Any:
        outputs = []
        state = given.pop("initial_state", None)  # updated in place
        state = state.clone() if isinstance(state, Tensor) else tuple(x.clone() for x in state)
        given.pop("output_final_state", None)
        for t in range(case.shape.T):
            piece = {n: x[:, t : t + 1] if n in timed else x for n, x in given.items()}
            o, state = step(**piece, state=state)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    return call


def poisoned_memory(subject: Subject, *, seed: int = 0, examples: int = 6, budget_s: float = inf) -> None:
    """NaN around every input in memory, and in all memory that is allocated, changes no bit of a result;
    no input is written to."""
    for case in cases(subject, seed=seed + 31, examples=examples, budget_s=budget_s):
        base = run(subject, case)
        with fresh_memory_is_nan():
            moved = run(subject, case)
        cause = "memory is read that nobody wrote: a result is not filled, or a load goes beyond its tensor"
        demand_bits(subject, "poisoned_memory", case, moved, base, cause)
        watched: dict[str, Tensor] = {}
        with fresh_memory_is_nan():
            surrounded = run(subject, case, _surrounded(subject.call, watched))
        demand_bits(subject, "poisoned_memory", case, surrounded, base, cause)
        given = {n: x for n, x in {**case.tensors}.items() if n in watched}
        demand_bits(
            subject, "poisoned_memory", case, {n: watched[n].cpu() for n in given}, given,
            "an input was written to",
        )  # fmt: skip


def _surrounded(call: Callable[..., Any], watched: dict[str, Tensor]) -> Callable[..., Any]:
    """Hands every tensor in from the middle of a larger one that is NaN elsewhere."""
    margin = 1024

    def moved(x: Tensor) -> Tensor:
        whole = torch.full((x.numel() + 2 * margin,), torch.nan, dtype=x.dtype, device=x.device)
        return whole[margin : margin + x.numel()].view(x.shape).copy_(x)

    def wrapped(**given: Any) -> Any:
        changed: dict[str, Any] = {}
        for name, x in given.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                y = changed[name] = moved(x)
                watched[name] = y.detach()
            elif name == "initial_state" and isinstance(x, tuple):
                changed[name] = tuple(moved(s) for s in x)
            else:
                changed[name] = x
        return call(**changed)

    return wrapped


class fresh_memory_is_nan:
    """A context in which ``torch.empty`` gives NaN (and integers their largest value)."""

    def __enter__(self) -> None:
        self.fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        self.was = torch.are_deterministic_algorithms_enabled()
        self.warn = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = self.fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(self.was, warn_only=self.warn)
