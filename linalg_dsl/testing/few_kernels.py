"""Draws for subjects whose kernels are compiled for the sizes of a call: from few classes of sizes.

A compiled kernel belongs to its type, K and V, to how many heads share a tensor, to whether there is an
initial state, and takes a second or two to make; tokens, sequences, heads, numbers and layouts cost nothing
more. So within a run each type has one pair of K and V, and heads are shared in one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from linalg_dsl.testing.subject import CHUNK_SIZE, Call, Subject

WIDE_SIZES = ((40, 20), (32, 33), (33, 16), (48, 7))
"""K and V of types shorter than float32, by the seed of a run: whole tiles and ragged ones, one block of an
axis and several; from 32 keys on products have short operands (``call_shape.narrow_operands``)."""
SIZES = ((20, 17), (17, 24), (32, 18), (16, 31))
"""The same of other types, whose products are written out term by term: tiles of 32 at most compile in a
second or two where those of 64 take ten, and blocks are of 16."""

HEADS = 4
"""Heads of every draw: what has one row for all heads, a normaliser's ones, is shared by so many."""


def compiles(subject: Subject) -> bool:
    """Whether calls compile kernels: on a GPU, but for an op's PyTorch modules."""
    return subject.device != "cpu" and (subject.op is None or subject.bitwise)


def of_few_kernels(subject: Subject, seed: int) -> Subject:
    """The same claims, looked at where few kernels are compiled; a subject that compiles none as it is.

    What costs kernels of its own is done in one type, the first (shared heads, no initial state) or the last
    (no final state, pools, other ways to the same), and of the variants one chunk size and one other way are
    looked at: ``seed`` says which type comes first and which variants these are.
    """
    if not compiles(subject) or subject.few_kernels:
        return subject
    turn = (seed + 1) % len(subject.dtypes)  # most properties begin with an odd seed: with float32, at 0
    kinds = (*subject.dtypes[turn:], *subject.dtypes[:turn])
    sizes = subject.sizes
    if sizes is None:
        sizes = tuple(_sizes_of(kind)[(seed + i) % len(SIZES)] for i, kind in enumerate(kinds))
    return replace(
        subject, dtypes=kinds, sizes=sizes, variants=_some(subject.variants, seed), few_kernels=True
    )


def _sizes_of(dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    return WIDE_SIZES if dtype in (torch.bfloat16, torch.float16) else SIZES


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


def type_of_ways(subject: Subject) -> torch.dtype | None:
    """The type in which other ways to the same are gone, each with kernels of its own; None is any."""
    return subject.dtypes[-1] if subject.few_kernels else None
