"""Random recurrences from end to end: spec, plan, modules, numbers. ``python -m linalg_dsl.testing.fuzz``.

Every recurrence is printed and parsed again, compiled, and run forward and backward on a case at random
ends, by the torch backend and, some of them, by kernels in Triton's interpreter; results are judged as
``matches_reference`` does, and nothing may be written beside a tensor. A recurrence that the planner refuses
with a place and a code is counted, not failed. What fails is shrunk by hypothesis and saved: the recurrence
as ``NAME.rec``, its case as ``NAME.pt`` (for ``linalg-dsl check NAME.rec --replay NAME.pt``), the message as
``NAME.txt``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from linalg_dsl.driver import compile as compile_op
from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.testing.cases import Case
from linalg_dsl.testing.draws import tame
from linalg_dsl.testing.failures import PropertyError
from linalg_dsl.testing.memory import guarded_memory
from linalg_dsl.testing.properties_reference import check_case
from linalg_dsl.testing.replay import save_case
from linalg_dsl.testing.strategies import CLASSES, inputs, specs
from linalg_dsl.testing.subject import Subject

BATCH = 25
"""Recurrences per seed."""
SHRINKING_S = 60.0
"""How long after the end of a run a last failure may still be shrunk."""


@dataclass
class Tally:
    """What a run has seen: how many recurrences, and what became of them."""

    specs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        return f"{self.specs} recurrences: {parts}; {len(self.failures)} distinct failures"


@dataclass
class Found(Exception):
    """A failure on its way to being shrunk."""

    spec: RecurrenceSpec
    case: Case | None
    backend: str
    message: str

    @property
    def kind(self) -> str:
        """Alike failures are one: the first line without numbers."""
        return f"{self.backend} {self.message.splitlines()[0].split(':')[0]}"


def one(spec: RecurrenceSpec, case: Case, backend: str, tally: Tally) -> None:
    """One recurrence from end to end. Raises ``Found``."""

    def wrong(message: str, with_case: bool = True) -> Found:
        return Found(spec, case if with_case else None, backend, message)

    if parse(str(spec)) != spec:
        raise wrong("parse(str(spec)) is another spec", False)
    try:
        op = compile_op(spec, backend=backend, chunk_size=16)
        op.source("module", backend=backend)
    except DslError as refusal:
        if any(m.span is None or not m.code for m in refusal.mistakes):
            raise wrong(f"a refusal without a place: {refusal}", False) from None
        tally.outcomes["refused"] += 1
        return
    except Exception as error:
        raise wrong(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", False) from None
    if not tame(case):
        tally.outcomes["compiled only (numbers out of range)"] += 1
        return
    subject = Subject.of_op(op, dtypes=(case.dtype,))
    try:
        with guarded_memory() as guard:
            check_case(subject, case)
            beside = guard.written()
        if beside is not None:
            raise wrong(f"writes beside a tensor of shape {list(beside.shape)}")
    except Found:
        raise
    except PropertyError as error:
        raise wrong(f"wrong {error.tensor}\n{error}") from None
    except Exception as error:
        raise wrong(f"{type(error).__name__}: {error}\n{traceback.format_exc()}") from None
    tally.outcomes[f"right by {backend}"] += 1


def run(
    minutes: float,
    seed: int,
    out: Path,
    *,
    classes: Sequence[str] = CLASSES,
    kernels: float = 0.1,
    say: Callable[[str], None] = print,
) -> Tally:
    """Draws batches of recurrences, a seed each, until the time is over; failures go to ``out``.

    ``kernels`` is the part of the batches that runs in Triton's interpreter, on short sequences.
    """
    end = time.monotonic() + 60 * minutes
    tally = Tally()
    at = seed
    while time.monotonic() < end:
        backend = "triton" if (at - seed) * kernels % 1 + kernels >= 1 else "torch"
        before = tally.specs
        found = _batch(at, backend, tuple(classes), tally, end)
        if found is not None:
            tally.outcomes["failed"] += 1
            if found.kind not in tally.failures:
                tally.failures.append(found.kind)
                name = save(found, out, at)
                say(f"seed {at}: {found.kind}; saved as {name}.rec")
        say(f"seed {at} ({backend}): {tally.specs - before} recurrences; so far {tally}")
        at += 1
    return tally


def _batch(seed: int, backend: str, classes: tuple[str, ...], tally: Tally, end: float) -> Found | None:
    kind = torch.float64 if backend == "torch" else torch.float32
    longest = 40 if backend == "torch" else 20

    @seeded(seed)
    @settings(
        max_examples=BATCH if backend == "torch" else max(1, BATCH // 5),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    @given(st.data())
    def explore(data: st.DataObject) -> None:
        spec = data.draw(specs(classes))
        case = data.draw(inputs(spec, (kind,), longest))
        if time.monotonic() > end + SHRINKING_S:
            return  # shrinking has had its time
        tally.specs += 1
        one(spec, case, backend, tally)

    try:
        explore()
    except Found as found:
        return found
    except Flaky as error:
        # where time was over, an example that failed before no longer does
        tally.outcomes["not reproduced"] += 1
        first = error.__context__
        return first if isinstance(first, Found) else None
    return None


def save(found: Found, out: Path, seed: int) -> Path:
    """Writes the recurrence, its case and the message; returns the path without a suffix."""
    out.mkdir(parents=True, exist_ok=True)
    name = out / f"{found.backend}_seed{seed}"
    comment = "".join(f"# {line}\n" for line in found.message.splitlines()[:1])
    name.with_suffix(".rec").write_text(comment + str(found.spec), encoding="utf-8")
    name.with_suffix(".txt").write_text(found.message, encoding="utf-8")
    if found.case is not None:
        save_case(found.case, name.with_suffix(".pt"))
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit status 1 where something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long")
    parser.add_argument("--seed", type=int, default=None, help="of the first batch, else from the clock")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder for failures")
    parser.add_argument("--kernels", type=float, default=0.1, help="part of batches in Triton's interpreter")
    parser.add_argument("--classes", nargs="+", default=list(CLASSES), choices=CLASSES)
    given_ = parser.parse_args(arguments)
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        os.environ["TRITON_INTERPRET"] = "1"  # which counts before the first import of triton: start again
        words = sys.argv[1:] if arguments is None else list(arguments)
        os.execv(sys.executable, [sys.executable, "-m", "linalg_dsl.testing.fuzz", *words])
    warnings.filterwarnings("ignore", message=".* has no chunk form", category=UserWarning)
    seed = int(time.time()) % 10**6 if given_.seed is None else given_.seed
    print(f"first seed {seed}", flush=True)
    tally = run(
        given_.minutes, seed, given_.out, classes=given_.classes, kernels=given_.kernels,
        say=lambda line: print(line, flush=True),
    )  # fmt: skip
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
