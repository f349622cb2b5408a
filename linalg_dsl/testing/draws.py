"""The sequence of cases that a property looks at: every shape and every end comes up, then mixtures."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import torch

from linalg_dsl.testing.cases import COTANGENTS, Case, Shape, make_case
from linalg_dsl.testing.extremes import Extremes, applicable
from linalg_dsl.testing.oracle import exact
from linalg_dsl.testing.subject import Subject

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 40, 63, 64, 65, 70)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 16, 17)
PACKINGS = ((1, 0), (0, 5, 0, 17), (16, 1, 33), (3, 0, 0), (1, 1, 1, 20), (0, 64, 3), (31,), (0, 0))
"""Lengths of packed sequences: empty ones first, last, and several; one token; chunk sizes and one beside."""


def shapes(subject: Subject, seed: int, *, packed: bool | None = None, longest: int = 70) -> Shape:
    """A shape that the subject can take; ``packed`` None draws it. The first seeds are the smallest."""
    chance = random.Random(1000003 * seed + 17)
    K, V = chance.choice(WIDTHS), chance.choice(WIDTHS)
    if seed % 5 == 1:
        K, V = min(K, 3), min(V, 3)
    if subject.sizes is not None:
        K, V = subject.sizes[seed % len(subject.sizes)]
    H = chance.choice((1, 2, 3)) if subject.heads is None else subject.heads[seed % len(subject.heads)]
    if packed is None:
        packed = subject.packed and chance.random() < 0.3
    if packed:
        lengths = chance.choice(PACKINGS)
        return Shape(1, sum(lengths), H, K, V, lengths)
    length = chance.choice([n for n in LENGTHS if n <= longest])
    return Shape(chance.choice((1, 2)), length, H, K, V)


def extremes(subject: Subject, seed: int) -> Extremes:
    """Ordinary at first; then every end of every kind by itself; then mixtures of them."""
    choices = applicable(subject.spec)
    single = [
        Extremes(**{kind: end})
        for kind, ends in choices.items()
        for end in ends
        if Extremes(**{kind: end}) != Extremes()
    ]
    turn = seed % (len(single) + 8)
    if turn == 0 or not choices:
        return Extremes()
    if turn <= len(single):
        # a fixed stride spreads the kinds over the first seeds
        return single[(turn * _stride(len(single))) % len(single)]
    chance = random.Random(7 * seed + 3)
    mixed = Extremes(**{kind: chance.choice(ends) for kind, ends in choices.items()})
    return replace(mixed, keys="normal") if mixed.keys == "large" and mixed.values == "large" else mixed


def _stride(count: int) -> int:
    """Coprime to ``count``, about .6 of it."""
    step = max(1, int(0.618 * count))
    while any(step % p == 0 and count % p == 0 for p in range(2, step + 1)):
        step += 1
    return step


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
    """``examples`` cases from ``seed`` on, fewer where ``budget_s`` seconds are over, but one at least.

    Types alternate, as do what the loss looks at, head counts and whether there is an initial state.
    """
    end = time.monotonic() + budget_s
    for at in range(seed, seed + examples):
        if at > seed and time.monotonic() > end:
            return
        case = one_case(subject, at, packed=packed, longest=longest, ordinary=ordinary, dtype=dtype)
        if tame(case):
            yield case
            continue
        calmer = one_case(subject, at, packed=packed, longest=longest, ordinary=True, dtype=dtype)
        yield calmer if tame(calmer) else _smallest(subject, at, packed, dtype)


def _smallest(subject: Subject, seed: int, packed: bool | None, dtype: torch.dtype | None) -> Case:
    """Two tokens, where everything longer grows out of its type."""
    K, V = (2, 2) if subject.sizes is None else subject.sizes[0]
    H = 1 if subject.heads is None else subject.heads[0]
    shape = Shape(1, 2, H, K, V, (1, 0, 1) if packed else None)
    return one_case(subject, seed, shape=shape, ordinary=True, dtype=dtype)


LIMITS = {torch.float64: 1e100, torch.float32: 1e12, torch.bfloat16: 1e12, torch.float16: 200.0}
"""Results beyond these are not looked at: products of a few of them overflow on the way."""


def tame(case: Case) -> bool:
    """Whether the exact results are finite and of a size that the type can compute with."""
    found = exact(case, gradients=False, copies=0).want
    return all(bool((x.abs() < LIMITS[case.dtype]).all()) for x in found.values())


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
    shape = shape or shapes(subject, seed, packed=packed, longest=longest)
    chance = random.Random(31 * seed + 5)
    few: dict[str, int] = {}
    if (
        grouped
        and subject.grouped_heads
        and shape.H > 1
        and len(subject.spec.inputs) > 1
        and chance.random() < 0.25
    ):
        # one input keeps all heads
        some = chance.sample([d.name for d in subject.spec.inputs][1:], 1)
        few = dict.fromkeys(some, 1)
    return make_case(
        subject,
        shape,
        seed=seed,
        dtype=dtype or subject.dtypes[seed % len(subject.dtypes)],
        extremes=Extremes() if ordinary else extremes(subject, seed),
        cotangents=chance.choice((COTANGENTS[0], *COTANGENTS)),
        heads=few,
        with_state=chance.random() < 0.8 if with_state is None else with_state,
    )
