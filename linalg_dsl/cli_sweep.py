"""``linalg-dsl sweep``: the table over variants, with a bar on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from linalg_dsl.cli_output import Output, load_spec

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ends, as shells have it."""


@dataclass(frozen=True)
class Files:
    """Where results go besides the terminal."""

    record: Path | None = None
    csv: Path | None = None
    plots: Path | None = None


def run_sweep(
    bases: Sequence[str], edits: Sequence[str], files: Files, output: Output, options: dict[str, Any]
) -> bool:
    """Prints the table; whether all certificates hold. Raises as ``linalg_dsl.sweep``."""
    from linalg_dsl.study.table import sweep

    given = [Path(b) if Path(b).is_dir() else load_spec(b) for b in bases]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=output.messages, transient=True, disable=output.as_json) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, of: int, what: str) -> None:
            bar.update(task, completed=done, total=of, description=what)

        try:
            found = sweep(given, edits, out=files.record, progress=progress, **options)
        except KeyboardInterrupt:
            if files.record is None:
                raise
            output.problem(f"interrupted; the same command goes on from {files.record}")
            raise SystemExit(INTERRUPTED) from None
    output.table("", found.columns(), found.rows, first_line_only=("problem",))
    output.data(list(found.rows))
    if files.csv is not None:
        output.note(f"wrote {found.write_csv(files.csv)}")
    if files.plots is not None:
        for path in found.plot(files.plots):
            output.note(f"wrote {path}")
    return found.ok
