"""What a call may not depend on: earlier calls, what else is asked for, how tensors lie in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.testing.cases import Case, arguments, leaves_of, outcome, run
from linalg_dsl.testing.compare import demand_bits, demand_close
from linalg_dsl.testing.draws import cases, one_case
from linalg_dsl.testing.effort import affordable, is_interpreted
from linalg_dsl.testing.failures import Failure, NotApplicable, PropertyError
from linalg_dsl.testing.few_kernels import is_last
from linalg_dsl.testing.memory import every_other, fresh_memory_is_nan, guarded_memory
from linalg_dsl.testing.offsets import wrapping_offsets
from linalg_dsl.testing.oracle import exact
from linalg_dsl.testing.subject import Subject

RUNS = 20
"""How often a call is repeated to see whether its bits are always the same."""
SMALL = 5
"""The largest K and V of the calls that are repeated, where the subject takes any."""


def determinism(subject: Subject, *, seed: int = 0, examples: int = 2, budget_s: float = inf) -> None:
    """Twenty runs on the same inputs give the same bits, gradients included, whatever runs between them:
    other numbers of the same shape, other numbers of sequences and heads. Numbers written into the same
    tensors count."""
    for case in _small_cases(subject, seed + 23, examples, budget_s):
        base = run(subject, case)
        for i in range(RUNS - 1):
            if i % 5 == 0:
                run(subject, _between(subject, case, i // 5))
            demand_bits(
                subject, "determinism", case, run(subject, case), base,
                "runs differ: sums in no fixed order (atomics), a race, memory that nobody wrote, or "
                "something kept from an earlier call",
            )  # fmt: skip
        _rewritten(subject, case)


def _small_cases(subject: Subject, seed: int, examples: int, budget_s: float) -> Iterator[Case]:
    for case in cases(
        subject, seed=seed, examples=examples, budget_s=budget_s, packed=False, longest=17, ordinary=True
    ):
        s = case.shape
        K, V = (min(s.K, SMALL), min(s.V, SMALL)) if subject.sizes is None else (s.K, s.V)
        H = s.H
        if subject.heads is None and not subject.few_kernels:
            H = 1 if is_interpreted(subject) else min(s.H, 2)
        T = affordable(subject, H, s.T, K, V, part=0.25, least=0)
        yield one_case(
            subject, case.seed, shape=replace(s, B=1, T=T, H=H, K=K, V=V), dtype=case.dtype, ordinary=True
        )


def _between(subject: Subject, case: Case, i: int) -> Case:
    """A call that is alike in some respects."""
    s = case.shape
    heads = s.H + 1 if subject.heads is None and not subject.few_kernels else s.H
    other = (s, replace(s, B=s.B + 1), replace(s, H=heads), replace(s, T=s.T + 17))[i % 4]
    return one_case(
        subject, case.seed + 707 + i, shape=other, dtype=case.dtype, ordinary=True, grouped=False,
        with_state=case.with_state if i % 2 else None,
    )  # fmt: skip


def _rewritten(subject: Subject, case: Case) -> None:
    """Other numbers in the same tensors give what they give in tensors of their own."""
    other = one_case(
        subject, case.seed + 909, shape=case.shape, dtype=case.dtype, ordinary=True, grouped=False,
        with_state=bool(case.states),
    )  # fmt: skip
    other = replace(other, cotangents=case.cotangents)
    same = {n: x.shape for n, x in case.tensors.items()} == {n: x.shape for n, x in other.tensors.items()}
    if not same or case.states.keys() != other.states.keys():
        return
    leaves = leaves_of(subject, case, False)
    found = {}
    with torch.no_grad():
        for now in (case, other, case):
            for name, x in leaves.items():
                x.copy_({**now.tensors, **now.states}[name])
            found = outcome(subject, case, subject.call(**arguments(subject, case, leaves)))
            fresh = run(subject, now, gradients=False)
            demand_bits(
                subject, "determinism", now, {n: x.cpu() for n, x in found.items()}, fresh,
                "numbers written into the tensors of an earlier call are not seen: results were kept",
            )  # fmt: skip


def poisoned_memory(subject: Subject, *, seed: int = 0, examples: int = 6, budget_s: float = inf) -> None:
    """NaN around every input in memory, and in all memory that is allocated, changes no bit of a result;
    no input is written to, and nothing beside a tensor."""
    cause = "memory is read that nobody wrote: a result is not filled, or a load goes beyond its tensor"
    for case in cases(subject, seed=seed + 32, examples=examples, budget_s=budget_s):
        # first, as what writes beside its tensors harms the process
        with fresh_memory_is_nan(), guarded_memory() as guard:
            watched: dict[str, Tensor] = {}
            moved = run(subject, case, _surrounded(subject.call, guard.place, watched), cotangent=guard.place)
            written = guard.written()
        if written is not None:
            demand_bits(
                subject, "poisoned_memory", case,
                {f"memory beside a tensor of shape {list(written.shape)}": torch.ones(())},
                {f"memory beside a tensor of shape {list(written.shape)}": torch.zeros(())},
                "a store goes beyond its tensor: the mask of an axis is missing, or an offset is wrong",
            )  # fmt: skip
        demand_bits(subject, "poisoned_memory", case, moved, run(subject, case), cause)
        given = {n: x for n, x in {**case.tensors}.items() if n in watched}
        demand_bits(
            subject, "poisoned_memory", case, {n: watched[n].cpu() for n in given}, given,
            "an input was written to",
        )  # fmt: skip


def _surrounded(
    call: Callable[..., Any], place: Callable[[Tensor], Tensor], watched: dict[str, Tensor]
) -> Callable[..., Any]:
    """Hands every tensor in from the middle of a larger one that is NaN elsewhere."""

    def wrapped(**given: Any) -> Any:
        changed: dict[str, Any] = {}
        for name, x in given.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                y = changed[name] = place(x)
                watched[name] = y.detach()
            elif name == "initial_state" and isinstance(x, tuple):
                changed[name] = tuple(place(s) for s in x)
            else:
                changed[name] = x
        return call(**changed)

    return wrapped


def offsets_do_not_wrap(subject: Subject, *, seed: int = 0, examples: int = 1, budget_s: float = inf) -> None:
    """No offset that the text of a kernel adds to a pointer can pass 2^31 in 32 bits: what no test is large
    enough to see (``linalg_dsl.testing.offsets``). Of ops that run kernels, step kernels too."""
    if subject.op is None or not subject.bitwise:
        raise NotApplicable(f"no kernels of {subject.name} are known by their text")
    texts = [s.module_text("triton") for s in subject.op.stage_ops]
    if subject.step is not None:
        texts.append(subject.op.source("step", backend="triton"))
    for text in texts:
        for fault in wrapping_offsets(text):
            found = Failure(
                subject.name, "offsets_do_not_wrap", seed, "any", f"offset {fault.offset}", (), 0.0, 0.0, 0.0,
                f"{fault.kernel}, line {fault.line} of its module: {fault.why}",
            )  # fmt: skip
            raise PropertyError(found)


def strided_inputs(subject: Subject, *, seed: int = 0, examples: int = 4, budget_s: float = inf) -> None:
    """Tensors that lie otherwise in memory (heads before tokens, every other channel of a wider tensor),
    cotangents too, give the same."""
    if not subject.strided:
        raise NotApplicable(f"{subject.name} takes contiguous tensors only")
    for case in cases(subject, seed=seed + 53, examples=examples, budget_s=budget_s):
        base = run(subject, case)
        for how in (_heads_first, every_other):
            moved = run(subject, case, _laid_out(subject.call, how), cotangent=how)
            cause = "strides are ignored: a tensor that is not contiguous is read as if it were"
            if subject.op is not None:
                demand_bits(subject, "strided_inputs", case, moved, base, cause)
            else:
                oracle = exact(case, gradients=bool(subject.wanted))
                demand_close(subject, "strided_inputs", case, oracle, moved, base, cause)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x.mT.contiguous().mT


def _laid_out(call: Callable[..., Any], how: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def wrapped(**given: Any) -> Any:
        def of(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(of(y) for y in x)
            return how(x) if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 else x

        return call(**{n: of(x) for n, x in given.items()})

    return wrapped


def nothing_else_asked(subject: Subject, *, seed: int = 0, examples: int = 4, budget_s: float = inf) -> None:
    """A result does not depend on what else is asked for: the output without gradients, or without the final
    state, is the output; the gradient of one tensor alone, or of one result, is that among all."""
    for case in cases(subject, seed=seed + 59, examples=examples, budget_s=budget_s):
        oracle = exact(case, gradients=bool(subject.wanted))
        whole = run(subject, case)

        def same(
            found: dict[str, Tensor], what: str, case: Case = case, whole: Any = whole, o: Any = oracle
        ) -> None:
            kept = {n: whole[n] for n in found}
            demand_close(subject, "nothing_else_asked", case, o, found, kept, f"{what} is another")

        same(run(subject, case, gradients=False), "what a call without gradients gives")
        if subject.final_state and case.cotangents != "final state" and is_last(subject, case.dtype):
            seen = replace(case, cotangents="output")
            alone = run(replace(subject, final_state=False), seen)
            demand_close(
                subject, "nothing_else_asked", seen, exact(seen, gradients=bool(subject.wanted)), alone,
                {n: x for n, x in run(subject, seen).items() if n in alone},
                "what a call gives where no final state is asked for is another",
            )  # fmt: skip
        for some in _subsets(subject, case):
            found = run(replace(subject, gradients=some), case)
            same({n: x for n, x in found.items() if n.startswith("d ")}, f"the gradient of {some[0]} alone")


def _subsets(subject: Subject, case: Case) -> Iterator[tuple[str, ...]]:
    """One tensor that is there, each in its turn; gradients of states come by themselves too."""
    there = [n for n in subject.wanted if n in case.tensors or n in case.states]
    chance = random.Random(case.seed)
    for name in chance.sample(there, min(2, len(there))):
        yield (name,)
