"""Draws for subjects whose kernels are compiled for the sizes of a call: from few classes of sizes.

A compiled kernel belongs to its type, K and V, to how many heads share a tensor, to whether there is an
initial state, and takes a second or two to make; tokens, sequences, heads, numbers and layouts cost nothing
more. So within a run each type has one pair of K and V, and heads are shared in one way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from linalg_dsl.testing.subject import CARRIED, CHUNK_SIZE, Call, Subject

SIZES = ((40, 20), (16, 33), (17, 64), (48, 7))
"""K and V that runs take by their seed: whole tiles and ragged ones, one block of an axis and several."""


def compiles(subject: Subject) -> bool:
    """Whether calls compile kernels: on a GPU, but for an op's PyTorch modules."""
    return subject.device != "cpu" and (subject.op is None or subject.bitwise)


def of_few_kernels(subject: Subject, seed: int) -> Subject:
    """The same claims, looked at where few kernels are compiled; a subject that compiles none as it is.

    What costs kernels of its own is done in one type, the first (shared heads, no initial state) or the last
    (no final state, pools), and of the variants one chunk size and one other way are looked at: ``seed`` says
    which type comes first and which variants these are.
    """
    if not compiles(subject) or subject.few_kernels:
        return subject
    turn = seed % len(subject.dtypes)
    kinds = (*subject.dtypes[turn:], *subject.dtypes[:turn])
    sizes = subject.sizes
    if sizes is None:
        sizes = tuple(SIZES[(seed + i) % len(SIZES)] for i in range(len(kinds)))
    return replace(
        subject, dtypes=kinds, sizes=sizes, variants=_some(subject.variants, seed), few_kernels=True
    )


def _some(variants: Mapping[str, Call], seed: int) -> dict[str, Call]:
    """One chunk size and one other way."""
    chunks = [n for n in variants if n.startswith(CHUNK_SIZE)]
    others = [n for n in variants if n not in chunks]
    return {n: variants[n] for some in (chunks, others) for n in some[seed % max(len(some), 1) :][:1]}


def sizes_of(subject: Subject, seed: int, dtype: torch.dtype | None) -> tuple[int, int]:
    """K and V of a draw, of a subject that takes some sizes only; each type its own if ``few_kernels``."""
    assert subject.sizes is not None
    at = seed
    if subject.few_kernels and dtype is not None and dtype in subject.dtypes:
        at = subject.dtypes.index(dtype)
    return subject.sizes[at % len(subject.sizes)]


def is_first(subject: Subject, dtype: torch.dtype) -> bool:
    """Whether draws of this type do what the first type does by itself."""
    return not subject.few_kernels or dtype == subject.dtypes[0]


def is_last(subject: Subject, dtype: torch.dtype) -> bool:
    return not subject.few_kernels or dtype == subject.dtypes[-1]


def sharing(subject: Subject, heads: int, dtype: torch.dtype) -> dict[str, int]:
    """Which inputs have half the heads: every other one."""
    if heads % 2 or not is_first(subject, dtype):
        return {}
    return dict.fromkeys([d.name for d in subject.spec.inputs][::2], heads // 2)


def looks_at(subject: Subject, ways: Iterable[str], dtype: torch.dtype) -> list[str]:
    """Which of these ways to compute the same, each with kernels of its own, draws of a type go: all, but
    with ``few_kernels`` each is gone in one type."""
    if not subject.few_kernels:
        return list(ways)
    kinds = subject.dtypes
    return [n for i, n in enumerate(ways) if kinds[0 if n == CARRIED else i % len(kinds)] == dtype]
