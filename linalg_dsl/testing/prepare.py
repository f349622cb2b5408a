"""The kernels that the properties will need, compiled side by side while the step loop runs (on a GPU).

A rehearsal: the first cases of every property, in turn, whose launches are noted and not carried out. So what
is compiled is what these cases launch, nothing else, and what the step loop finds of them is there when it is
asked for (``keep``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from linalg_dsl.ops.compile_ahead import Ahead, launches_noted
from linalg_dsl.testing.few_kernels import compiles
from linalg_dsl.testing.keep import all_kept
from linalg_dsl.testing.oracle import Oracle
from linalg_dsl.testing.subject import Subject
from linalg_dsl.testing.watch import COMPILING, REFERENCE, REHEARSING, Watch, watched


class Prepared:
    """The kernels of each round of cases; none of foreign code, whose launches may depend on what earlier
    ones gave. Time goes to ``watch``. ``end`` has to be called."""

    def __init__(self, subject: Subject, watch: Watch) -> None:
        needed = subject.op is not None and subject.few_kernels and compiles(subject)
        self.ahead = Ahead() if needed else None
        self.watch = watch
        self.counts: list[int] = []

    def rehearse(self, rounds: Iterable[Iterable[Callable[[], Any]]], seconds: float) -> None:
        """Has all that they launch compiled; what is not come to in so many seconds is left out."""
        if self.ahead is None:
            return
        began = time.monotonic()
        rehearsal = Watch(began + seconds, rehearses=True)
        with watched(rehearsal), launches_noted(self.ahead):
            for works in rounds:
                for work in works:
                    if rehearsal.left > 0:
                        with suppress(Exception):  # the property tells
                            work()
                self.counts.append(len(self.ahead.numbers))
        reference = rehearsal.seconds.get(REFERENCE, 0.0)
        self.watch.add(REFERENCE, reference)
        self.watch.add(REHEARSING, time.monotonic() - began - reference)
        self.watch.kernels += len(self.ahead.numbers)

    def wait(self, turn: int, seconds: float) -> None:
        """Until the kernels of a round are compiled, or so many seconds are over."""
        if self.ahead is not None and turn < len(self.counts):
            began, before = time.monotonic(), self.watch.seconds.get(REFERENCE, 0.0)
            with watched(self.watch):
                self._wait(self.counts[turn], began + seconds)
            reference = self.watch.seconds.get(REFERENCE, 0.0) - before
            self.watch.add(COMPILING, time.monotonic() - began - reference)

    def _wait(self, count: int, end: float) -> None:
        """Meanwhile it is found what roundings make of the results of what was rehearsed."""
        assert self.ahead is not None
        for oracle in all_kept():
            if self.ahead.wait(count, 0.0) or time.monotonic() > end:
                break
            if isinstance(oracle, Oracle) and oracle.gradients and oracle.copies:
                _ = oracle.condition
        self.ahead.wait(count, end - time.monotonic())

    def end(self) -> None:
        if self.ahead is not None:
            self.ahead.end()
