"""The sequence of cases that a property looks at: every shape and every end comes up, then mixtures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

import torch

from linalg_dsl.testing.cases import COTANGENTS, Case, Shape, make_case
from linalg_dsl.testing.effort import EFFORT, affordable, effort, is_interpreted
from linalg_dsl.testing.extremes import Extremes, applicable
from linalg_dsl.testing.few_kernels import HEADS, is_first, sharing, sizes_of
from linalg_dsl.testing.keep import kept
from linalg_dsl.testing.oracle import exact, step_loop
from linalg_dsl.testing.subject import Subject
from linalg_dsl.testing.watch import looked_at

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 40, 63, 64, 65, 70)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 16, 17)
WIDE = (33, 40, 65, 70)
"""More than one block of the axes that kernels cut: of 16, 32 and 64."""
PACKINGS = ((1, 0), (0, 5, 0, 17), (16, 1, 33), (3, 0, 0), (1, 1, 1, 20), (0, 64, 3), (31,), (0, 0))
"""Lengths of packed sequences: empty ones first, last, and several; one token; chunk sizes and one beside."""
KINDS = ("long", "shared heads", "packed", "wide keys", "square", "any", "wide values", "small")
"""What shapes take turns in, so that a few draws in a row see all that kernels treat apart: several chunks,
the last ragged; heads that share a tensor; packed sequences; more than one block of either axis; K = V."""


def kind_of(seed: int) -> str:
    return KINDS[seed % len(KINDS)]


def _shares_heads(subject: Subject, seed: int) -> bool:
    """Of kernels every other packed batch does too: they sum over shared heads in buffers of their own."""
    if subject.bitwise and kind_of(seed) == "packed":
        return seed // len(KINDS) % 2 == 0
    return kind_of(seed) == "shared heads"


def shapes(
    subject: Subject,
    seed: int,
    *,
    packed: bool | None = None,
    longest: int = 70,
    dtype: torch.dtype | None = None,
) -> Shape:
    """A shape that the subject can take; ``packed`` None leaves it to the seed, as ``KINDS`` says."""
    chance = random.Random(1000003 * seed + 17)
    kind = kind_of(seed)
    K, V = chance.choice(WIDTHS), chance.choice(WIDTHS)
    H = chance.choice((1, 2, 3))
    lengths = [n for n in LENGTHS if n <= longest]
    length = chance.choice(lengths)
    match kind:
        case "long":
            length = chance.choice([n for n in (70, 65, 40, 70) if n <= longest] or lengths[-2:])
            H = chance.choice((2, 3))
        case "shared heads":
            H = chance.choice((4, 4, 3, 2))
        case "packed" if subject.bitwise:
            H = max(H, 2)
        case "wide keys":
            K, V, length = chance.choice(WIDE), min(V, 5), min(length, 40)
        case "wide values":
            K, V, length = min(K, 5), chance.choice(WIDE), min(length, 40)
        case "square":
            K = V = max(K, 2)
        case "small":
            K, V, length = min(K, 3), min(V, 3), chance.choice((1, 2, 3))
    if subject.sizes is not None:
        K, V = sizes_of(subject, seed, dtype)
    if subject.few_kernels:
        H = HEADS
    if subject.heads is not None:
        H = subject.heads[seed % len(subject.heads)]
    if packed is None:
        packed = subject.packed and (kind == "packed" or (kind == "any" and chance.random() < 0.5))
    if packed:
        chosen = chance.choice(PACKINGS[1:3] if kind == "packed" else PACKINGS)
        if is_interpreted(subject):
            H, K, V = _affordable_packing(subject, chosen, H, K, V)
        return Shape(1, sum(chosen), H, K, V, chosen)
    rows = chance.choice((1, 2))
    if is_interpreted(subject):
        rows = rows if H == 1 else 1
        if subject.heads is None and kind != "shared heads":
            most = 2 if kind == "long" else H
            H = next((n for n in range(most, 1, -1) if effort(subject, n, length, K, V) <= EFFORT), 1)
        length = affordable(subject, rows * H, length, K, V)
    return Shape(rows, length, H, K, V)


def _affordable_packing(
    subject: Subject, lengths: tuple[int, ...], H: int, K: int, V: int
) -> tuple[int, int, int]:
    """H, K, V: lengths stay as they are, so there are two heads, and channels enough for whole chunks."""

    if subject.heads is None:
        H = min(H, 2)
    if sum(effort(subject, H, n, K, V) for n in lengths) > EFFORT and subject.sizes is None:
        K, V = max(K, 16), max(V, 16)
    return H, K, V


TELLING = (
    ("gates", "resets"), ("keys", "identical"), ("gates", "strong"), ("scalars", "ends"),
    ("values", "mixed sizes"), ("gates", "all strong"), ("keys", "nearly identical"), ("gates", "slow"),
)  # fmt: skip
"""The ends that most faults of kernels show at, where time is short."""


def extremes(subject: Subject, seed: int) -> Extremes:
    """Ordinary at first; then every end of every kind by itself, the telling ones first; then mixtures."""
    choices = applicable(subject.spec)
    single = [
        Extremes(**{kind: end})
        for kind, ends in choices.items()
        for end in ends
        if Extremes(**{kind: end}) != Extremes()
    ]
    told = [e for e in (Extremes(**dict([pair])) for pair in TELLING) if e in single]
    rest = [e for e in single if e not in told]
    # a fixed stride spreads the kinds of the others
    single = [*told, *(rest[(i * _stride(len(rest))) % len(rest)] for i in range(1, len(rest) + 1))]
    turn = seed % (len(single) + 8)
    if turn == 0 or not choices:
        return Extremes()
    if turn <= len(single):
        return single[turn - 1]
    chance = random.Random(7 * seed + 3)
    mixed = Extremes(**{kind: chance.choice(ends) for kind, ends in choices.items()})
    return replace(mixed, keys="normal") if mixed.keys == "large" and mixed.values == "large" else mixed


def _stride(count: int) -> int:
    """Coprime to ``count``, about .6 of it."""
    step = max(1, int(0.618 * count))
    while any(step % p == 0 and count % p == 0 for p in range(2, step + 1)):
        step += 1
    return step


def clock(subject: Subject) -> Callable[[], float]:
    """What budgets are measured by: on a CPU the time that this process has computed, so that what else runs
    on the machine does not decide how much is looked at; elsewhere the time that has passed."""
    return time.process_time if subject.device == "cpu" else time.monotonic


def cases(
    subject: Subject,
    *,
    seed: int = 0,
    examples: int = 1,
    budget_s: float = inf,
    packed: bool | None = None,
    longest: int = 70,
    ordinary: bool = False,
    dtype: torch.dtype | None = None,
) -> Iterator[Case]:
    """``examples`` cases from ``seed`` on, but one at least: no further one is begun where it would take
    longer, by the mean of those before, than ``budget_s`` seconds of ``clock`` from the first on.

    Types alternate, as do what the loss looks at, head counts and whether there is an initial state.
    """
    now = clock(subject)
    began = now()
    for at in range(seed, seed + examples):
        spent = now() - began
        if at > seed and spent + spent / (at - seed) > budget_s:
            return
        case = one_case(subject, at, packed=packed, longest=longest, ordinary=ordinary, dtype=dtype)
        if not tame(case):
            case = one_case(subject, at, packed=packed, longest=longest, ordinary=True, dtype=dtype)
            if not tame(case):
                case = _smallest(subject, at, packed, case.dtype)
        yield case
        looked_at()


def _smallest(subject: Subject, seed: int, packed: bool | None, dtype: torch.dtype | None) -> Case:
    """Two tokens, where everything longer grows out of its type."""
    K, V = (2, 2) if subject.sizes is None else sizes_of(subject, seed, dtype)
    H = HEADS if subject.few_kernels else 1
    if subject.heads is not None:
        H = subject.heads[0]
    shape = Shape(1, 2, H, K, V, (1, 0, 1) if packed else None)
    return one_case(subject, seed, shape=shape, ordinary=True, dtype=dtype)


LIMITS = {torch.float64: 1e100, torch.float32: 1e12, torch.bfloat16: 1e12, torch.float16: 200.0}
"""Results beyond these are not looked at: products of a few of them overflow on the way."""


def tame(case: Case) -> bool:
    """Whether the exact results are finite and of a size that the type can compute with, and the step loop in
    this type gives numbers too: 0 / 0, left of a quotient of what underflows, is the recurrence's own."""
    return kept(case, "tame", lambda: _is_tame(case))


def _is_tame(case: Case) -> bool:
    found = exact(case, gradients=False, copies=0).want
    if not all(bool((x.abs() < LIMITS[case.dtype]).all()) for x in found.values()):
        return False
    return case.dtype == torch.float64 or all(bool(x.isfinite().all()) for x in step_loop(case))


def one_case(
    subject: Subject,
    seed: int,
    *,
    packed: bool | None = None,
    longest: int = 70,
    ordinary: bool = False,
    dtype: torch.dtype | None = None,
    shape: Shape | None = None,
    grouped: bool = True,
    with_state: bool | None = None,
) -> Case:
    """The case of a seed: the same for the same arguments.

    ``grouped`` False gives every input all heads, ``with_state`` decides whether there is an initial state.
    """
    dtype = dtype or subject.dtypes[seed % len(subject.dtypes)]
    shape = shape or shapes(subject, seed, packed=packed, longest=longest, dtype=dtype)
    chance = random.Random(31 * seed + 5)
    few: dict[str, int] = {}
    if (
        grouped
        and subject.grouped_heads
        and shape.H > 1
        and len(subject.spec.inputs) > 1
        and (_shares_heads(subject, seed) or chance.random() < 0.15)
    ):
        # one input keeps all heads; half of them tell a map by division from one by remainder
        names = [d.name for d in subject.spec.inputs]
        some = chance.sample(names, chance.choice((1, 1, len(names) - 1)))
        few = dict.fromkeys(some, shape.H // 2 if shape.H % 2 == 0 else 1)
        if subject.few_kernels:
            few = sharing(subject, shape.H, dtype)
    return make_case(
        subject,
        shape,
        seed=seed,
        dtype=dtype,
        extremes=Extremes() if ordinary else extremes(subject, seed),
        cotangents=(COTANGENTS[0], *COTANGENTS)[seed % (1 + len(COTANGENTS))],
        heads=few,
        with_state=_has_state(subject, chance, dtype) if with_state is None else with_state,
    )


def _has_state(subject: Subject, chance: random.Random, dtype: torch.dtype) -> bool:
    return chance.random() < 0.8 or not is_first(subject, dtype)
