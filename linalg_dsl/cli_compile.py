"""Writing generated modules, and compiling their kernels for GPUs that need not be there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import linalg_dsl
from linalg_dsl.cli_output import Output
from linalg_dsl.errors import ArgumentError, DslError, InternalError
from linalg_dsl.language.spec import RecurrenceSpec

COLUMNS = (
    "kernel",
    "target",
    "registers",
    "spilled",
    "shared",
    "limit",
    "warps",
    "stages",
    "blocks",
    "seconds",
)


def compile_all(
    specs: Sequence[RecurrenceSpec],
    targets: Sequence[str],
    key: int,
    value: int,
    dtype: str,
    out: Path | None,
    output: Output,
    schedule: str = "walk",
) -> bool:
    """Whether every kernel fits its target; equal kernels of several recurrences are compiled once."""
    places = _targets(targets)
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ArgumentError(f"dtype is one of bfloat16, float16, float32, got {dtype!r}")
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    good = True
    for spec in specs:
        found: list[dict[str, Any]] = []
        try:
            op = linalg_dsl.compile(spec, schedule=schedule)
            if out is not None or not places:
                for path in write_modules(op, out or Path("build")):
                    output.note(f"wrote {path}")
            for target in places:
                with output.working(f"compiling {spec.name} for {target}"):
                    failure = _compile(op, target, {"K": key, "V": value}, dtype, seen, found)
                if failure is not None:
                    good = False
                    output.problem(f"{spec.name} does not compile for {target}: {failure}")
        except (DslError, ArgumentError) as refusal:
            if len(specs) == 1:
                raise
            good = False  # the others are still of interest
            output.problem(str(refusal))
        for row in found:
            if row["fault"]:
                good = False
                output.problem(
                    f"{row['kernel']} for {row['target']}: the assembler makes wrong code, {row['fault']}; "
                    "at its first use other sizes are taken"
                )
        if found:
            output.table(spec.name, COLUMNS, found)
        rows += [{"recurrence": spec.name, **row} for row in found]
    output.data(rows)
    return good and all(row["shared"] <= row["limit"] for row in rows)


def write_modules(op: Any, folder: Path) -> list[Path]:
    """The Triton and the PyTorch module of every stage as files, of what is between them, and of a step."""
    texts = {
        f"{module.name}_{backend}": module.text
        for backend in ("triton", "torch")
        for module in op.modules(backend)
    }
    texts |= {f"{op.spec.name}_step_{backend}": op.source("step", backend) for backend in ("triton", "torch")}
    if op.program_text is not None:
        texts[f"{op.spec.name}_stages"] = op.program_text
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = folder / f"{name}.py"
            path.write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise ArgumentError(f"cannot write to {folder}: {error}") from None
    return written


def _targets(names: Sequence[str]) -> list[str]:
    from linalg_dsl.codegen.targets import TARGETS, find_target

    places = list(TARGETS) if "all" in names else [find_target(name).name for name in names]
    if places and os.environ.get("TRITON_INTERPRET") == "1":
        raise ArgumentError("unset TRITON_INTERPRET: the interpreter does not compile kernels")
    return places


def _compile(
    op: Any,
    target: str,
    sizes: Mapping[str, int],
    dtype: str,
    seen: set[str],
    found: list[dict[str, Any]],
) -> str | None:
    """Adds a row per kernel to ``found``; why the compiler refused one, if it did."""
    from linalg_dsl.codegen.targets import report

    given: dict[str, Any] = {"dtype": dtype, "seen": seen}
    try:
        for module in op.modules("triton"):
            own = module.sizes(op.spec, sizes)
            for kernel in report(module.text, target, key=own["K"], value=own["V"], **given):
                found.append(_row(kernel))
        step, own = op.source("step", "triton"), {"key": sizes["K"], "value": sizes["V"]}
        found += [_row(kernel) for kernel in report(step, target, **own, **given, batch=256, length=1)]
    except (ArgumentError, DslError, InternalError):
        raise
    except Exception as error:  # the compiler has many kinds, and one bad target should not hide the rest
        return f"{type(error).__name__}: {error}"
    return None


def _row(kernel: Any) -> dict[str, Any]:
    row = {column: getattr(kernel, column) for column in COLUMNS}
    return row | {"seconds": round(kernel.seconds, 1), "fault": kernel.fault}
