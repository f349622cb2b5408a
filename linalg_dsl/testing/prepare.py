"""The kernels that the properties will need, compiled side by side before the first of them (on a GPU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from linalg_dsl.ops.compile_ahead import compile_noted, launches_noted
from linalg_dsl.testing.cases import Case, Shape, make_case, run
from linalg_dsl.testing.draws import one_case
from linalg_dsl.testing.few_kernels import compiles, looks_at, sharing, sizes_of
from linalg_dsl.testing.properties_algebra import turned_case, turned_ops
from linalg_dsl.testing.properties_decode import ways_to_decode
from linalg_dsl.testing.subject import Subject
from linalg_dsl.testing.watch import COMPILING, Watch

LENGTH = 70
"""Tokens: more than a chunk."""


def prepare(subject: Subject, seconds: float, watch: Watch) -> None:
    """Compiles what calls of the subject launch, for about ``seconds`` at most; nothing for foreign code,
    whose launches may depend on what earlier ones gave. The time goes to ``watch``."""
    if subject.op is None or not subject.few_kernels or not compiles(subject):
        return
    began = time.monotonic()
    watch.side_by_side = True
    with launches_noted() as noted:
        for work in _calls(subject):
            try:
                work()
            except Exception:  # the property that comes to it tells
                continue
    compile_noted(noted, max(seconds - (time.monotonic() - began), 0.0))
    watch.side_by_side = False
    watch.seconds = {COMPILING: time.monotonic() - began}


def _calls(subject: Subject) -> Iterator[Callable[[], Any]]:
    """What properties do with the subject, once of each kind; what most of them do first."""
    plain = {kind: _case(subject, i, kind) for i, kind in enumerate(subject.dtypes)}
    first, last = subject.dtypes[0], subject.dtypes[-1]
    for case in plain.values():
        yield partial(run, subject, case)
    if subject.grouped_heads:
        shared = _case(subject, 0, first, sharing(subject, 2, first))
        yield partial(run, subject, shared)
    if subject.initial_state:
        yield partial(run, subject, replace(plain[first], states={}, with_state=False))
    if subject.packed:
        packed = one_case(
            subject, 0, shape=Shape(1, LENGTH, 2, *sizes_of(subject, 0, first), (LENGTH - 1, 0, 1)),
            dtype=first, ordinary=True, grouped=False, with_state=True,
        )  # fmt: skip
        yield partial(run, subject, packed)
    for kind, case in plain.items():
        for name in looks_at(subject, subject.variants, kind):
            yield partial(run, subject, case, subject.variants[name])
    if subject.final_state:
        yield partial(run, replace(subject, final_state=False), plain[last])
    assert subject.op is not None
    others = turned_ops(subject.op)
    for kind, case in plain.items():
        for name in looks_at(subject, others, kind):
            turned = replace(subject, call=others[name], spec=others[name].spec)
            given = turned_case(case, name, others[name])
            yield partial(run, turned, given)
    if subject.initial_state and subject.final_state:
        for case in plain.values():
            short = one_case(
                subject, 0, shape=replace(case.shape, T=5), dtype=case.dtype, ordinary=True, grouped=False,
                with_state=True,
            )  # fmt: skip
            for way in ways_to_decode(subject, short):
                yield partial(run, subject, short, way, gradients=False)


def _case(subject: Subject, seed: int, kind: torch.dtype, heads: dict[str, int] | None = None) -> Case:
    shape = Shape(1, LENGTH, 2, *sizes_of(subject, seed, kind))
    if subject.heads is not None:
        shape = replace(shape, H=subject.heads[0])
    return make_case(subject, shape, seed=seed, dtype=kind, heads=heads)
