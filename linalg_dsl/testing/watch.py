"""What a run of the kit has looked at and spent its time on, and when it has to end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf

from linalg_dsl.ops.compile_ahead import compilations_told

COMPILING, REFERENCE, CALLS, REHEARSING = "compiling", "reference", "calls", "rehearsing"


class OutOfTime(Exception):
    """The time is over: what is being looked at is left as it is."""


@dataclass
class Watch:
    """``cases`` looked at to their end; ``seconds`` by the clock, by what they were spent on.

    ``end``: when, by ``time.monotonic``, no further call is begun. ``kernels``: how many were compiled.
    ``rehearses``: calls compute nothing, as their kernels are only noted, so that no result is judged.
    """

    end: float = inf
    cases: int = 0
    kernels: int = 0
    rehearses: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def compiled(self, seconds: float, kernels: int) -> None:
        """Triton tells of each compilation; one found on disk is no kernel more."""
        self.kernels += kernels
        self.add(COMPILING, seconds)

    def take(self, other: Watch) -> None:
        """Adds what another one has."""
        self.cases += other.cases
        self.kernels += other.kernels
        for what, seconds in other.seconds.items():
            self.add(what, seconds)

    def __str__(self) -> str:
        return ", ".join(
            f"{what}{f' {self.kernels} kernels' if what == COMPILING else ''} {seconds:.1f} s"
            for what, seconds in sorted(self.seconds.items())
        )


_ACTIVE: ContextVar[Watch | None] = ContextVar("linalg_dsl_kit_watch", default=None)


@contextmanager
def watched(watch: Watch) -> Iterator[Watch]:
    """What is done inside counts for ``watch``; what Triton compiles on the way counts as compiling."""
    token = _ACTIVE.set(watch)
    try:
        with compilations_told(watch.compiled):
            yield watch
    finally:
        _ACTIVE.reset(token)


@contextmanager
def spent(what: str) -> Iterator[None]:
    """The time inside, less what was compiled meanwhile, goes to ``what``. Raises ``OutOfTime`` where none
    is left for calls; what is known of those made is worked out to its end."""
    watch = _ACTIVE.get()
    if watch is None:
        yield
        return
    if what == CALLS and watch.left < 0:
        raise OutOfTime
    began, before = time.monotonic(), sum(watch.seconds.values())
    try:
        yield
    finally:
        inside = sum(watch.seconds.values()) - before
        watch.add(what, max(time.monotonic() - began - inside, 0.0))


def looked_at() -> None:
    """One more case was looked at to its end."""
    watch = _ACTIVE.get()
    if watch is not None:
        watch.cases += 1


def rehearsing() -> bool:
    """Whether results hold nothing yet, so that none can be wrong."""
    watch = _ACTIVE.get()
    return watch is not None and watch.rehearses
