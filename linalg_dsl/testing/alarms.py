"""Draws over the whole catalogue, of which none may be judged wrong: ``python -m linalg_dsl.testing.alarms``.

A run goes entry after entry, one draw of ``matches_reference`` each, round after round; where it was is kept
in a file, so that it can be broken off and go on. An alarm is a fault of an entry or of the kit.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from linalg_dsl.driver import compile as compile_op
from linalg_dsl.ops.catalogue import catalogue_names
from linalg_dsl.testing.draws import cases
from linalg_dsl.testing.failures import PropertyError
from linalg_dsl.testing.properties_reference import check_case
from linalg_dsl.testing.reductions import entry_spec
from linalg_dsl.testing.subject import Subject


@cache
def _subject(name: str) -> Subject:
    return Subject.of_op(compile_op(entry_spec(name), backend="torch"))


def run(count: int, path: Path, minutes: float, first_seed: int = 0) -> tuple[int, int]:
    """(draws so far, alarms so far) after up to ``count`` draws in all; a line per draw in ``path``."""
    done = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    alarms = sum(line.startswith("ALARM") for line in done)
    names, end = catalogue_names(), time.monotonic() + 60 * minutes
    at = len(done)
    with path.open("a", encoding="utf-8") as file:
        while at < count and time.monotonic() < end:
            name, seed = names[at % len(names)], first_seed + at // len(names)
            told = f"{name} seed {seed}"
            try:
                for case in cases(_subject(name), seed=seed, examples=1):
                    _, nearest = check_case(_subject(name), case)
                    told += f" {0.0 if nearest is None else nearest.ratio:.3f}"
            except PropertyError as error:
                alarms += 1
                told = f"ALARM {told}: {' | '.join(str(error).splitlines())}"
            except Exception as error:
                alarms += 1
                told = f"ALARM {told}: {type(error).__name__} {' '.join(str(error).split())[:300]}"
            print(told, file=file, flush=True)
            at += 1
    return at, alarms


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit status 1 where there were alarms."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=10_000, help="in all")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long this run may take")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--file", type=Path, default=Path("build/alarms.txt"), help="what was drawn so far")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=".* has no chunk form", category=UserWarning)
    given.file.parent.mkdir(parents=True, exist_ok=True)
    at, alarms = run(given.draws, given.file, given.minutes, given.seed)
    print(f"{at} draws over {len(catalogue_names())} entries, {alarms} alarms: {given.file}")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
