"""Kernels of many calls compiled side by side, before any of them is launched.

Triton compiles a kernel when it is first launched, one after the other. Calls that are made while launches
are noted compute nothing: their results hold whatever was in memory. What they would have launched is
compiled meanwhile by as many processes as there are processors (``compile_server``), and the calls made in
earnest find it in Triton's disk cache.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from linalg_dsl.ops.compile_server import Job


class Ahead:
    """The process that compiles, and what it was given. ``end`` has to be called."""

    def __init__(self, workers: int | None = None) -> None:
        begin = f"from linalg_dsl.ops.compile_server import serve; serve({workers or os.cpu_count() or 1})"
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # its children end with it
        )
        self.numbers: dict[Any, int] = {}
        self.jobs: SimpleQueue[bytes | None] = SimpleQueue()
        self.done: set[int] = set()
        self.gone = False
        self.told = Condition()
        # the process takes no more than it works on, which nobody here has to wait for
        for work in (self._write, self._read):
            Thread(target=work, daemon=True).start()

    def _write(self) -> None:
        pipe = self.process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError), pipe:
            while (job := self.jobs.get()) is not None:
                pipe.write(job)
                pipe.flush()

    def _read(self) -> None:
        pipe = self.process.stdout
        assert pipe is not None
        with pipe:
            for line in pipe:
                with self.told:
                    self.done.add(int(line))
                    self.told.notify_all()
        with self.told:
            self.gone = True
            self.told.notify_all()

    def give(self, job: Job, key: Any) -> None:
        """One kernel more, unless it was given before."""
        if key not in self.numbers:
            self.jobs.put(pickle.dumps(job))
            self.numbers[key] = len(self.numbers)

    def wait(self, count: int, seconds: float) -> bool:
        """Whether the first ``count`` kernels are compiled, or failed to be, in so many seconds."""
        with self.told:
            return self.told.wait_for(
                lambda: self.gone or self.done.issuperset(range(count)), max(seconds, 0.0)
            )

    def end(self) -> None:
        """What is under way is left."""
        self.jobs.put(None)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def launches_noted(ahead: Ahead) -> Iterator[None]:
    """Launches of Triton kernels in this process, whichever thread makes them, are given to be compiled and
    not carried out. Calls are not replayed meanwhile, nor recorded."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def note(kernel: Any, *args: Any, warmup: bool, **keywords: Any) -> Any:
        with suppress(Exception):  # the launch will tell
            run(kernel, *args, warmup=True, **keywords)

    def give(*, fn: Any, key: Any, compile: dict[str, Any], **_: Any) -> bool:
        function = fn.jit_function
        with suppress(Exception):  # what cannot be handed over is compiled by its launch
            ahead.give(_job(function, compile), (fn.module, fn.name, str(key)))
        return True  # and not compiled here

    JITFunction.run, knobs.runtime.jit_cache_hook = note, give
    try:
        with _Unrecorded():  # type: ignore[no-untyped-call]
            yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, hook


def _job(function: Any, told: dict[str, Any]) -> Job:
    """What Triton tells its hook before it compiles."""
    options = json.loads(told["specialization_data"])["options"]
    path = inspect.getsourcefile(function.fn)
    if path is None:
        raise TypeError(f"{function.fn.__name__} comes from no file")
    return Job(
        function.fn.__module__, path, function.fn.__name__, told["signature"], told["constants"],
        told["configs"][0], function.device_caches[told["device"]][2],
        {n: tuple(x) if isinstance(x, list) else x for n, x in options.items()},
    )  # fmt: skip


class _Unrecorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that does nothing: calls under one go the long way (``replay.is_plain``)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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
