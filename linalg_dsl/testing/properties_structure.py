"""What a sequence may not see: other chunks, other sequences, other heads, the future, other runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.testing.cases import (
    Case,
    Shape,
    make_case,
    outcome,
    run,
    sequences,
)
from linalg_dsl.testing.compare import demand_bits, demand_close
from linalg_dsl.testing.draws import cases, extremes, one_case, tame
from linalg_dsl.testing.effort import EFFORT, affordable, effort, is_interpreted
from linalg_dsl.testing.failures import NotApplicable
from linalg_dsl.testing.few_kernels import type_of_ways
from linalg_dsl.testing.oracle import exact, head_axis
from linalg_dsl.testing.subject import CARRIED, KERNEL_CHUNKS, Call, Subject


def chunk_size_invariance(
    subject: Subject, *, seed: int = 0, examples: int = 8, budget_s: float = inf
) -> None:
    """Other chunk sizes (``Subject.variants``, two of them a case or one) give the same results and gradients
    up to rounding.

    Boundary terms that are carried from chunk to chunk are looked at over so many that they are formed anew
    in between.
    """
    if not subject.variants:
        raise NotApplicable(f"{subject.name} has no variants to compare")
    kind = type_of_ways(subject)
    others = [n for n in subject.variants if n != CARRIED]
    for case in cases(subject, seed=seed + 3, examples=examples, budget_s=budget_s, dtype=kind):
        at = 2 * (case.seed - seed - 3)
        count = 1 if _is_long_to_wait_for(subject, case) else 2
        some = {others[i % len(others)] for i in range(at, at + count)} if others else set()
        _agree(subject, case, {n: subject.variants[n] for n in sorted(some)})
        if CARRIED in subject.variants:
            many = _of_many_chunks(subject, case)
            _agree(subject, many, {CARRIED: subject.variants[CARRIED]})


def _is_long_to_wait_for(subject: Subject, case: Case) -> bool:
    s = case.shape
    return is_interpreted(subject) and effort(subject, s.N * s.H, s.T, s.K, s.V) > EFFORT / 2


def _agree(subject: Subject, case: Case, variants: Mapping[str, Call]) -> None:
    oracle = exact(case, gradients=bool(subject.wanted))
    base = run(subject, case)
    for name, call in variants.items():
        other = run(subject, case, call)
        cause = f"{name} computes something else: a boundary between chunks is treated wrongly"
        demand_close(subject, "chunk_size_invariance", case, oracle, other, base, cause)


def _of_many_chunks(subject: Subject, case: Case) -> Case:
    """One head with ten chunks, the last of one token; of ordinary numbers where others grow.

    Not with all gates strong: what is carried has no digits of gradients of gates that are all but zero.
    """
    K, V = (2, case.shape.V) if subject.sizes is None else (case.shape.K, case.shape.V)
    H = 1 if subject.heads is None and not subject.few_kernels else case.shape.H
    shape = Shape(1, 9 * KERNEL_CHUNKS[0] + 1, H, K, V)
    ends = extremes(subject, case.seed)
    if ends.gates in ("all strong", "very strong"):
        ends = replace(ends, gates="strong")
    found = make_case(subject, shape, seed=case.seed, dtype=case.dtype, extremes=ends)
    return found if tame(found) else make_case(subject, shape, seed=case.seed, dtype=case.dtype)


def split_and_continue(subject: Subject, *, seed: int = 0, examples: int = 10, budget_s: float = inf) -> None:
    """A sequence cut in two, the state carried over, gives the results and gradients of the whole."""
    if not (subject.initial_state and subject.final_state):
        raise NotApplicable(f"{subject.name} takes or gives no state")
    for case in cases(subject, seed=seed + 5, examples=examples, budget_s=budget_s, packed=False):
        case = long_enough(subject, case, 2)
        T = case.shape.T
        chance = random.Random(case.seed)
        cut = chance.choice([n for n in (1, 15, 16, 17, T // 2, 63, 64, T - 1) if 0 < n < T])
        oracle = exact(case, gradients=bool(subject.wanted))
        whole = run(subject, case)
        joined = run(subject, case, in_pieces(subject, case, (0, cut, T)))
        cause = f"the state handed on at token {cut}, or its gradient, is not the one in the middle"
        demand_close(subject, "split_and_continue", case, oracle, joined, whole, cause)


def long_enough(subject: Subject, case: Case, least: int) -> Case:
    """The case, or one of its seed with so many tokens and an initial state."""
    if least <= case.shape.T and case.states:
        return case
    shape = replace(case.shape, T=max(case.shape.T, least))
    return one_case(subject, case.seed, shape=shape, dtype=case.dtype, ordinary=True, with_state=True)


def part(subject: Subject, x: Tensor, begin: int, end: int) -> Tensor:
    """Some tokens; by themselves where kernels are to be few: which are compiled depends on addresses."""
    found = x[:, begin:end]
    return found.clone() if subject.few_kernels else found


def in_pieces(subject: Subject, case: Case, cuts: tuple[int, ...]) -> Callable[..., Any]:
    """A callable that goes through the sequence piece by piece."""
    timed = {d.name for d in case.spec.inputs if d.timed}

    def call(**given: Any) -> Any:
        outputs = []
        state = given.get("initial_state")
        for begin, end in pairwise(cuts):
            piece = {n: part(subject, x, begin, end) if n in timed else x for n, x in given.items()}
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
            piece = {k: part(subject, x, begin, end) if k in timed else x for k, x in given.items()}
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
    """Output at a token does not depend, to the last bit, on any input of a later token; of the PyTorch
    modules made here, up to rounding, not even where something there is NaN or infinite."""
    for case, cut in _cut_cases(subject, seed + 11, examples, budget_s):
        cause = f"outputs before token {cut} changed with inputs from there on"
        other = _with_other_future(subject, case, cut)
        base, moved = (run(subject, c, gradients=False)["o"][:, :cut] for c in (case, other))
        demand_bits(subject, "causality", case, {"o": moved}, {"o": base}, cause)
        if subject.op is not None and not subject.bitwise:
            whole = run(subject, case, gradients=False)["o"]
            broken = run(subject, _with_broken_future(case, cut), gradients=False)["o"]
            broken[:, cut:] = whole[:, cut:]
            oracle = exact(case, gradients=False)
            demand_close(subject, "causality", case, oracle, {"o": broken}, {"o": whole}, cause)


def _with_broken_future(case: Case, cut: int) -> Case:
    """One input, drawn by the seed, is NaN or infinite at a token."""
    timed = [d for d in case.spec.inputs if d.timed]
    decl = timed[case.seed % len(timed)]
    x = case.tensors[decl.name].clone()
    x[:, cut] = (torch.nan, torch.inf)[case.seed // len(timed) % 2]
    return case.with_tensors(**{decl.name: x})


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


def _cut_cases(subject: Subject, seed: int, examples: int, budget_s: float) -> Iterator[tuple[Case, int]]:
    for case in cases(subject, seed=seed, examples=examples, budget_s=budget_s, packed=False):
        T = case.shape.T
        if T < 2:
            case = one_case(subject, case.seed, shape=replace(case.shape, T=5))
            T = 5
        chance = random.Random(case.seed)
        yield case, chance.choice([n for n in (1, 15, 16, 17, T // 2, T - 1) if 0 < n < T])


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
) -> Iterator[Case]:
    """Cases of several rows or heads."""
    for case in cases(subject, seed=seed, examples=examples, budget_s=budget_s, packed=False):
        heads = case.shape.H if H is None or subject.heads is not None or subject.few_kernels else H
        if subject.heads is not None and H is not None:
            heads = max(subject.heads)
        rows = B
        if is_interpreted(subject):  # one axis has several, the other one
            rows, heads = (1, heads) if H is not None else (B, heads if subject.heads is not None else 1)
        s = case.shape
        T = affordable(subject, rows * heads, min(max(s.T, 2), 40), s.K, s.V)
        shape = replace(s, B=rows, H=heads, T=T)
        yield one_case(subject, case.seed, shape=shape, grouped=False)
