"""Runs the property kit on every mutant and writes docs/mutants.md: ``make mutants``, or some by name.

python tests/testing/mutants.py [--write docs/mutants.md] [--jobs N] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import edits
import mutant
import mutants_plan
import mutants_torch
import mutants_triton
from mutant import Mutant, version

MODULES = (edits, mutant, mutants_triton, mutants_torch, mutants_plan)
MUTANTS: tuple[Mutant, ...] = (*mutants_triton.MUTANTS, *mutants_torch.MUTANTS, *mutants_plan.MUTANTS)
BUDGET_S = 60.0
"""What a user gets by default (``linalg_dsl.testing.run_properties``)."""
PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the property that found it (None: it survived), after how long, by what."""

    name: str
    killer: str | None
    seconds: float
    tensor: str = ""
    message: str = ""


def examine(one: Mutant, seed: int = 0) -> Verdict:
    """The kit on one mutant until the first property that does not hold."""
    from linalg_dsl.testing import run_properties, shrink

    one.verify()
    began = time.monotonic()
    with patch.object(shrink, "BUDGET_S", 0.0):  # that it is found is enough
        report = run_properties(one.subject(), budget_s=BUDGET_S, seed=seed, stop_at_first=True)
    seconds = time.monotonic() - began
    for outcome in report.outcomes:
        if not outcome.ok:
            if "NothingToEdit" in outcome.message or "NoSuchNode" in outcome.message:
                raise AssertionError(f"{one.name}: {outcome.message}")
            tensor = outcome.error.failure.tensor if outcome.error else outcome.status
            return Verdict(one.name, outcome.name, seconds, tensor, outcome.message)
    return Verdict(one.name, None, seconds)


def apart(name: str) -> Verdict:
    """``examine`` in a process of its own: what writes beside its tensors may end it."""
    words = [sys.executable, __file__, "--one", name]
    began = time.monotonic()
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return Verdict(**json.loads(found.stdout.splitlines()[-1]))
    if found.returncode < 0:
        return Verdict(name, f"the process ended by signal {-found.returncode}", time.monotonic() - began)
    raise AssertionError(f"{name}: {found.stderr[-2000:]}")


def page(verdicts: list[Verdict]) -> str:
    """The document."""
    known = {m.name: m for m in MUTANTS}
    lines = [
        "# Mutants",
        "",
        f"List {version(MODULES)}: {len(verdicts)} faults, of which the kit found "
        f"{sum(v.killer is not None for v in verdicts)}.",
        "",
        "Typical faults of kernels, each put into the plan, the emitted module or the call of an entry of "
        "the catalogue (`tests/testing/mutants_*.py`), and the first property of "
        "`linalg_dsl.testing.run_properties` that found it, with the default budget of "
        f"{BUDGET_S:.0f} s an operator. Kernels run in Triton's "
        "interpreter. Made by `make mutants`; the tests run five of them again and see that this table "
        "belongs to the list.",
        "",
        "| mutant | entry | where | what it does | found by | in |",
        "|---|---|---|---|---|---|",
    ]
    for v in verdicts:
        m = known[v.name]
        killer = f"`{v.killer}`" if v.killer else "**nothing**"
        lines.append(
            f"| `{m.name}` | `{m.entry}` | {m.backend}, {m.place} | {m.what} | {killer} | {v.tensor} |"
        )
    return "\n".join(lines) + "\n"


def _kept(path: Path | None) -> dict[str, Verdict]:
    """Verdicts of a run that was broken off."""
    if path is None or not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {v.name: v for v in (Verdict(**json.loads(line)) for line in lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="some of them")
    parser.add_argument("--one", help="this one, in this process; prints its verdict as JSON")
    parser.add_argument("--write", type=Path, help="where the table goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument(
        "--resume", type=Path, help="verdicts so far, one a line: what is there is not run again"
    )
    given = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["LINALG_DSL_SELFCHECK"] = "0"  # the known answers would find many of them first
    known = {m.name: m for m in MUTANTS}
    if given.one:
        print(json.dumps(vars(examine(known[given.one], given.seed))))
        return 0
    wanted = given.names or list(known)
    found = _kept(given.resume)
    with ThreadPoolExecutor(given.jobs) as pool:  # each waits for a process of its own
        for v in pool.map(apart, [n for n in wanted if n not in found]):
            found[v.name] = v
            print(f"{v.name:<42} {v.killer or 'SURVIVED':<32} {v.seconds:6.1f} s  {v.tensor}", flush=True)
            if given.resume:
                with given.resume.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(vars(v)) + "\n")
    verdicts = [found[n] for n in wanted]
    alive = [v.name for v in verdicts if v.killer is None]
    print(
        f"{len(verdicts) - len(alive)} of {len(verdicts)} found"
        + (f"; alive: {', '.join(alive)}" if alive else "")
    )
    if given.write:
        given.write.write_text(page(verdicts), encoding="utf-8")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
