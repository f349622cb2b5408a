"""What the step loop found of a case, kept for the properties that look at the same case later in a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from linalg_dsl.testing.cases import Case

Found = TypeVar("Found")

_KEPT: ContextVar[dict[Any, Any] | None] = ContextVar("linalg_dsl_kit_kept", default=None)


@contextmanager
def findings_kept() -> Iterator[None]:
    """Inside, what ``kept`` finds is found once."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(case: Case, what: Any, find: Callable[[], Found]) -> Found:
    """What ``find`` gives, or gave before for ``what`` of a case with the same numbers."""
    known = _KEPT.get()
    if known is None:
        return find()
    key = (what, _told_apart_by(case))
    if key not in known:
        known[key] = find()
    found: Found = known[key]
    return found


def all_kept() -> list[Any]:
    """What was found so far, in the order of it."""
    return list((_KEPT.get() or {}).values())


def _told_apart_by(case: Case) -> tuple[Any, ...]:
    """All that the step loop sees of a case: the equations, the numbers, and which tensor they stand in."""
    digest = hashlib.sha256()
    for part in (case.tensors, case.states, case.weights):
        for name, x in part.items():
            digest.update(f"{name} {tuple(x.shape)};".encode())
            digest.update(x.detach().double().numpy().tobytes())
    consts, heads = (tuple(sorted(d.items())) for d in (case.consts, case.heads))
    return case.spec, case.dtype, case.shape, consts, heads, digest.digest()
