"""The searches behind ``linalg-dsl tune``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import linalg_dsl
from linalg_dsl.cli_check import Request
from linalg_dsl.cli_output import Output
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec

COLUMNS = ("operator", "shape", "default ms", "best ms", "tried", "failed", "finished", "found")


def run_tune(
    specs: Sequence[RecurrenceSpec],
    request: Request,
    shapes: Sequence[tuple[str, Any]],
    passes: str,
    budget: float,
    output: Output,
) -> bool:
    """Searches for every recurrence and (name, ``Shape``); whether the default ran everywhere."""
    from linalg_dsl.ops.bench import inputs_of
    from linalg_dsl.ops.tune_worker import Job, known, tune_apart

    device, dtype = request.torch_device(), request.torch_dtype()
    if device.type != "cuda":
        raise ArgumentError(f"tune: needs a GPU, got device {device}")
    if passes not in ("training", "forward"):
        raise ArgumentError(f"tune: a pass is training or forward, got {passes!r}")
    rows: list[dict[str, Any]] = []
    good = True
    for spec in specs:
        op = linalg_dsl.compile(spec, backend="triton")
        for name, shape in shapes:
            small = inputs_of(spec, type(shape)(1, 1, shape.H, shape.K, shape.V), dtype, device)
            heads = tuple(shape.H for _ in spec.inputs)
            kinds = tuple(x.dtype for x in small.values())
            job = Job(op, shape, heads, kinds, str(device), passes, budget)
            try:
                record = known(job, op)
                if not record.finished:
                    with output.working(f"tuning {spec.name} at {name} for at most {budget:.0f} s"):
                        record = tune_apart(job, output.note)
            except RuntimeError as error:
                good = False
                output.problem(str(error))
                continue
            failed = sum(isinstance(found, str) for found in record.tried.values())
            rows.append(
                {
                    "operator": spec.name, "shape": name, "default ms": record.default_ms,
                    "best ms": record.best_ms, "tried": len(record.tried), "failed": failed,
                    "finished": record.finished, "found": _options(record.best or {}),
                    "best": record.best, "candidates": record.tried,
                }
            )  # fmt: skip
    output.table("", COLUMNS, rows)
    output.data(rows)
    return good


def _options(best: dict[str, Any]) -> str:
    if not best:
        return "the default is the best"
    return ", ".join(f"{name}={value}" for name, value in best.items())
