"""Decoding: one token at a time, by calls and by steps, in pools, with drafts that are rejected."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.testing.cases import Case, run
from linalg_dsl.testing.compare import demand_bits, demand_close
from linalg_dsl.testing.draws import cases
from linalg_dsl.testing.failures import NotApplicable
from linalg_dsl.testing.few_kernels import is_last
from linalg_dsl.testing.memory import every_other
from linalg_dsl.testing.oracle import exact
from linalg_dsl.testing.properties_structure import in_pieces, long_enough, part
from linalg_dsl.testing.subject import Subject

AHEAD = 3
"""Tokens of a step with drafts, of which fewer are accepted."""


def decode_equals_prefill(
    subject: Subject, *, seed: int = 0, examples: int = 6, budget_s: float = inf
) -> None:
    """Token after token, the state carried from call to call, gives what one call gives; so does ``step``,
    and of an op ``step`` on rows of a pool, whose other rows stay as they are, with drafts of which some
    are rejected."""
    if not (subject.initial_state and subject.final_state):
        raise NotApplicable(f"{subject.name} takes or gives no state")
    for case in cases(
        subject, seed=seed + 29, examples=examples, budget_s=budget_s, packed=False, longest=17
    ):
        case = long_enough(subject, case, 1)
        oracle = exact(case, gradients=True)
        whole = run(subject, case, gradients=False)
        for way in ways_to_decode(subject, case):
            found = run(subject, case, way, gradients=False)
            cause = "one token at a time is not what many at once are"
            demand_close(subject, "decode_equals_prefill", case, oracle, found, whole, cause)


def ways_to_decode(subject: Subject, case: Case) -> list[Callable[..., Any]]:
    """Callables that go through the sequences of a case token after token."""
    ways = [in_pieces(subject, case, tuple(range(case.shape.T + 1)))]
    if subject.step is not None:
        ways.append(_by_step(subject, case))
        if subject.op is not None and is_last(subject, case.dtype):
            ways.append(_in_a_pool(subject, case))
    return ways


def _listed(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


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
            piece = {n: part(subject, x, t, t + 1) if n in timed else x for n, x in given.items()}
            o, state = step(**piece, state=state)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    return call


def _in_a_pool(subject: Subject, case: Case) -> Callable[..., Any]:
    """Rows of a pool in another order, one sequence of padding; some steps draft tokens and keep a few."""
    timed = {d.name for d in case.spec.inputs if d.timed}
    step, B, T = subject.step, case.shape.B, case.shape.T
    assert step is not None
    generator = torch.Generator().manual_seed(case.seed)
    rows = torch.randperm(B + 3, generator=generator)

    def call(**given: Any) -> Any:
        starts = _listed(given.pop("initial_state"))
        given.pop("output_final_state", None)
        slots = torch.cat([rows[:1] * 0 - 1, rows[:B]]).to(starts[0].device)  # the first is padding
        pool = []
        for x in starts:
            every = torch.randn((B + 3, *x.shape[1:]), generator=generator, dtype=torch.float64).to(x)
            every[slots[1:]] = x
            pool.append(every_other(every) if case.seed % 2 else every)
        before = [x.clone() for x in pool]
        outputs, t = [], 0
        while t < T:
            ahead = AHEAD if t % 2 else 1
            drafted = slice(t, min(t + ahead, T))
            kept = max(1, (drafted.stop - t + 1) // 2)
            piece = {n: _padded(x[:, drafted]) if n in timed else x for n, x in given.items()}
            counts = torch.full((B + 1,), kept, dtype=torch.int32, device=slots.device)
            accepted: Any = counts if t % 4 else kept
            carried = pool[0] if len(pool) == 1 else tuple(pool)
            o, _ = step(**piece, state=carried, slots=slots, accepted=accepted)
            outputs.append(o[1:, :kept])
            t += kept
        idle = torch.ones(B + 3, dtype=torch.bool)
        idle[slots[1:].cpu()] = False
        demand_bits(
            subject, "decode_equals_prefill", case,
            {f"row of a pool, state {i}": x.cpu()[idle] for i, x in enumerate(pool)},
            {f"row of a pool, state {i}": x.cpu()[idle] for i, x in enumerate(before)},
            "a step wrote to a row of the pool that belongs to none of its sequences",
        )  # fmt: skip
        lasts = [x[slots[1:]] for x in pool]
        return torch.cat(outputs, 1), lasts[0] if len(lasts) == 1 else tuple(lasts)

    return call


def _padded(x: Tensor) -> Tensor:
    """One more sequence in front."""
    return torch.cat([torch.ones_like(x[:1]), x])
