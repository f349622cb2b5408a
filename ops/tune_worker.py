"""A search in a process of its own: a candidate that breaks the device's context ends that process only.

``python -m linalg_dsl.ops.tune_worker`` reads a pickled ``Job`` of its parent from standard input and prints
what it does, a line each. The parent starts it anew while there is time: it goes on behind what broke it.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.bench import Shape
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.tune import Say
from linalg_dsl.ops.tune_record import Record
from linalg_dsl.ops.tuned import record_of, shape_class, tune_op

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp

COMMAND = (sys.executable, "-m", "linalg_dsl.ops.tune_worker")
GRACE = 120.0
"""Seconds beyond its budget after which a worker is ended: it starts, compiles and checks as well."""
STARTS = 4
"""How often a worker is started for one search."""
Start = Callable[["Job", Say], tuple[int, str]]
"""Runs a job in a process: its exit status, and what it said at the end."""


@dataclass(frozen=True)
class Job:
    """``heads`` and ``dtypes``: of every input and param of the call that is tuned for."""

    op: CompiledOp
    shape: Shape
    heads: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: str
    passes: str
    budget: float

    def tensors(self, device: str | None = None) -> tuple[Tensor, ...]:
        """Random ones like those of the call."""
        spec, shape = self.op.spec, self.shape
        few = {d.name: n for d, n in zip(spec.inputs, self.heads, strict=True)}
        drawn = draw(spec, shape.B, shape.T, shape.H, shape.K, shape.V, heads=few, dtype=torch.float32)
        return tuple(
            x.to(device or self.device, kind) for x, kind in zip(drawn.values(), self.dtypes, strict=True)
        )


def tune_apart(job: Job, say: Say, start: Start | None = None) -> Record:
    """The record of a search by workers. Raises ``RuntimeError`` where even the default choice fails."""
    started = time.monotonic()
    plain = job.op.with_options(tune=False)
    last = ""
    for _ in range(STARTS):
        left = job.budget - (time.monotonic() - started)
        status, last = (start or _start)(job_with(job, plain, max(left, 1.0)), say)
        record = known(job, plain)
        if status == 0 or record.finished or left <= 0 or record.default_ms is None:
            break
        say(f"the process of the search ended with status {status}; it is started anew")
    if record.best is None and record.default_ms is None:
        raise RuntimeError(f"{job.op.spec.name}: tuning failed: {last[-2000:]}")
    return record


def job_with(job: Job, op: CompiledOp, budget: float) -> Job:
    return Job(op, job.shape, job.heads, job.dtypes, job.device, job.passes, budget)


def known(job: Job, plain: CompiledOp) -> Record:
    """What the cache directory says of such a call."""
    like = tuple(
        torch.empty((1, 1, n) if d.timed else (n,), dtype=t)
        for d, n, t in zip(plain.spec.inputs, job.heads, job.dtypes, strict=True)
    )
    shape = job.shape
    sizes = {"B": shape.B, "T": shape.T, "H": shape.H, "K": shape.K, "V": shape.V}
    device = torch.device(job.device)
    return record_of(plain, shape_class(plain, like, sizes, False, job.passes, device), device)


def _start(job: Job, say: Say) -> tuple[int, str]:
    lines: list[str] = []
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(COMMAND, **pipes) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        # a kernel that never ends would hold up the search for good
        end = threading.Timer(job.budget + GRACE, worker.kill)
        end.start()
        try:
            worker.stdin.write(pickle.dumps(job))
            worker.stdin.close()
            for line in worker.stdout:
                text = line.decode(errors="replace").rstrip("\n")
                if text.startswith(_MARK):
                    say(text.removeprefix(_MARK))
                else:
                    lines.append(text)
        finally:
            end.cancel()
    return worker.returncode, "\n".join(lines)


_MARK = "tune: "


def main(given: Sequence[Any] = ()) -> int:
    """The worker."""
    job: Job = given[0] if given else pickle.load(sys.stdin.buffer)
    if torch.device(job.device).type != "cuda":
        raise ArgumentError(f"tuning needs a GPU, got {job.device}")

    def say(text: str) -> None:
        print(f"{_MARK}{text}", flush=True)

    device = torch.device(job.device)
    kind = next(t for d, t in zip(job.op.spec.inputs, job.dtypes, strict=True) if {"K", "V"} & set(d.dims))
    tune_op(job.op, job.shape, kind, device, job.passes, job.budget, say=say, tensors=job.tensors())
    return 0


if __name__ == "__main__":
    sys.exit(main())
