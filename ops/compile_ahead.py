"""Kernels of many calls compiled side by side, before any of them is launched.

Triton compiles a kernel when it is first launched, one after the other. Calls that are made while launches
are noted compute nothing: their results hold whatever was in memory. What they would have launched is then
compiled by as many threads as there are processors, and the calls made in earnest find it there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

Noted = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A Triton kernel, its arguments and keywords."""


@contextmanager
def launches_noted() -> Iterator[list[Noted]]:
    """Launches of Triton kernels in this process, whichever thread makes them, are noted and not carried out.

    Nothing is compiled either, but for what is compiled without a launch. Calls are not replayed meanwhile,
    nor recorded.
    """
    from triton.runtime.jit import JITFunction

    found: list[Noted] = []
    run = JITFunction.run

    def note(kernel: Any, *args: Any, warmup: bool, **keywords: Any) -> Any:
        if warmup:
            return run(kernel, *args, warmup=True, **keywords)
        found.append((kernel, args, keywords))
        return None

    JITFunction.run = note
    try:
        with _Unrecorded():  # type: ignore[no-untyped-call]
            yield found
    finally:
        JITFunction.run = run


class _Unrecorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that does nothing: calls under one go the long way (``replay.is_plain``)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def compile_noted(noted: list[Noted], seconds: float, workers: int | None = None) -> None:
    """Compiles what was noted, in the order of it, for the current device; Triton's disk cache counts.

    What was not begun after so many seconds is left to the launch that needs it, as is a kernel that does
    not compile.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # a version of Triton that compiles one after the other
        return
    end = time.monotonic() + seconds
    count = workers or os.cpu_count() or 1
    with ThreadPoolExecutor(count) as pool, AsyncCompileMode(_Ready(pool, count), ignore_errors=True):
        for kernel, args, keywords in noted:
            if time.monotonic() > end:
                break
            with suppress(Exception):  # the launch will tell
                kernel.run(*args, warmup=True, **keywords)


class _Ready:
    """An executor that takes work when a thread is free for it, so that none is left when time is over."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int) -> None:
        self.pool = pool
        self.free = threading.Semaphore(threads)

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        self.free.acquire()
        future = self.pool.submit(function)
        future.add_done_callback(lambda _: self.free.release())
        return future


@contextmanager
def compilations_told(tell: Callable[[float, int], None]) -> Iterator[None]:
    """``tell(seconds, 1)`` is called after every compilation, in the thread of it; ``tell(seconds, 0)`` where
    the disk cache had the kernel."""
    if "triton" not in sys.modules:  # nothing here needs it
        yield
        return
    from triton import knobs

    before = knobs.compilation.listener

    def told(**given: Any) -> None:
        if before is not None:
            before(**given)
        tell(given["times"].total / 1e6, 0 if given["cache_hit"] else 1)

    knobs.compilation.listener = told
    try:
        yield
    finally:
        knobs.compilation.listener = before
