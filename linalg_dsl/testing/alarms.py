"""Draws over the whole catalogue, of which none may be judged wrong: ``python -m linalg_dsl.testing.alarms``.

A run goes entry after entry, one draw of ``matches_reference`` each, round after round; where it was is kept
in a file, so that it can be broken off and go on. An alarm is a fault of an entry or of the kit. Of each draw
the file has two numbers: the error that came nearest to its allowance, as a part of it, and how many passes
(``rounding.passes``) its roundings needed, 0 where what is allowed in any case was enough.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from linalg_dsl.driver import compile as compile_op
from linalg_dsl.ops.catalogue import catalogue_names
from linalg_dsl.testing.draws import cases
from linalg_dsl.testing.failures import PropertyError
from linalg_dsl.testing.properties_reference import check_case
from linalg_dsl.testing.reductions import entry_spec
from linalg_dsl.testing.subject import Subject


@cache
def _subject(name: str, backend: str) -> Subject:
    return Subject.of_op(compile_op(entry_spec(name), backend=backend))


def run(
    count: int, path: Path, minutes: float, first_seed: int = 0, backend: str = "torch"
) -> tuple[int, int]:
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
                subject = _subject(name, backend)
                for case in cases(subject, seed=seed, examples=1):
                    _, nearest = check_case(subject, case)
                    if nearest is not None:
                        told += f" {nearest.ratio:.3f} {nearest.passes:.3f}"
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
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch")
    given = parser.parse_args(arguments)
    if given.backend == "triton" and not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        os.environ["TRITON_INTERPRET"] = "1"  # which counts before the first import of triton: start again
        words = sys.argv[1:] if arguments is None else list(arguments)
        os.execv(sys.executable, [sys.executable, "-m", "linalg_dsl.testing.alarms", *words])
    warnings.filterwarnings("ignore", message=".* has no chunk form", category=UserWarning)
    given.file.parent.mkdir(parents=True, exist_ok=True)
    at, alarms = run(given.draws, given.file, given.minutes, given.seed, given.backend)
    print(f"{at} draws over {len(catalogue_names())} entries, {alarms} alarms: {given.file}")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
