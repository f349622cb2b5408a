"""A process that compiles Triton kernels into Triton's disk cache; ``compile_ahead`` starts it.

Jobs come on standard input, one pickle after another until it is closed, and each is compiled by a process
forked for it: threads wait for each other in the parts of Triton that are Python. The number of each that
ended stands on a line of standard output. Nothing here touches a GPU.
"""

from __future__ import annotations

import importlib
import os
import pickle
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from linalg_dsl.codegen.cache import private_copy


@dataclass(frozen=True)
class Job:
    """A kernel, where it is to be found, and what it is compiled for, as Triton's launcher has it."""

    module: str
    path: str
    kernel: str
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: Any
    target: Any
    options: dict[str, Any]


def serve(workers: int) -> None:
    """Compiles what comes on standard input, ``workers`` kernels at a time; what does not compile is left to
    the launch that needs it."""
    import triton.compiler  # noqa: F401 (before the first fork, so that no child imports it)

    jobs, told = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # what compilers print or read is not for the pipes
        os.dup2(null, stream)
    loaded: dict[str, ModuleType | None] = {}
    running = number = 0
    while True:
        try:
            job: Job = pickle.load(jobs)
        except EOFError:
            break
        if not number:
            _warm(job)
        if running == workers:
            os.wait()
            running -= 1
        module = _module(job, loaded)
        if not os.fork():
            _compile(job, module, told, number)
        running += 1
        number += 1
    for _ in range(running):
        os.wait()


def _warm(job: Job) -> None:
    """What Triton asks of itself and of its tools, once and not in every child: a digest of its own files."""
    with suppress(Exception):  # other versions ask elsewhere
        from triton.compiler import make_backend
        from triton.runtime.cache import triton_key

        triton_key()
        make_backend(job.target).hash()


def _module(job: Job, loaded: dict[str, ModuleType | None]) -> ModuleType | None:
    """The module of a kernel; None where it cannot be imported, which the launch will tell."""
    if job.path not in loaded:
        try:
            if job.module.startswith("linalg_dsl."):
                loaded[job.path] = importlib.import_module(job.module)
            else:
                text = ModuleType(Path(job.path).stem)
                text.__file__ = job.path
                loaded[job.path] = private_copy(text)
        except Exception:
            loaded[job.path] = None
    return loaded[job.path]


def _compile(job: Job, module: ModuleType | None, told: int, number: int) -> None:
    """In a child, which ends here."""
    try:
        from triton.compiler import ASTSource, compile

        source = ASTSource(getattr(module, job.kernel), job.signature, job.constants, job.attributes)
        compile(source, target=job.target, options=job.options)
    finally:
        with suppress(OSError):  # nobody listens any more
            os.write(told, f"{number}\n".encode())
        os._exit(0)
