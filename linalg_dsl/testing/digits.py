"""Where digits are lost: every entry of the catalogue at every nasty end, its error beside a yardstick's.

``python -m linalg_dsl.testing.digits`` (``make digits``) prints a table, one row per entry with the result
that comes nearest to its bound (``floor.bounds``), and every result beyond it. How it would be with chunks of
one length, whatever the keys, is ``--chunk-size 64``; on a GPU ``--device cuda --dtype bfloat16 --sizes 64``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing import get_context
from typing import TextIO

import torch

from linalg_dsl import ops
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.driver import assemble
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops import catalogue_names
from linalg_dsl.testing.cases import Case, Shape, make_case, run
from linalg_dsl.testing.draws import tame
from linalg_dsl.testing.extremes import Extremes, applicable
from linalg_dsl.testing.floor import bounds, relative_errors
from linalg_dsl.testing.oracle import exact
from linalg_dsl.testing.subject import Subject

PAIRS = (
    ("keys", ("identical", "nearly identical", "orthogonal"), "scalars", ("high end", "one")),
    ("keys", ("identical", "nearly identical", "orthogonal"), "gates", ("slow", "resets", "zero")),
    ("scalars", ("high end", "one"), "values", ("denormal", "mixed sizes")),
    ("gates", ("resets", "all strong"), "values", ("mixed sizes",)),
)
"""Ends that are drawn together: erases of the same key at full strength, and where gates are no help."""
SIZES = (4, 16)
LENGTH = 130


@dataclass(frozen=True)
class Digits:
    """One result of one draw: relative L2 error, that of its yardstick (loop or floor), what is allowed."""

    entry: str
    case: str
    tensor: str
    error: float
    yardstick: float
    allowed: float

    @property
    def part(self) -> float:
        """The error as a part of what is allowed; NaN counts as beyond."""
        return inf if self.error != self.error else self.error / self.allowed

    def __str__(self) -> str:
        return (
            f"| {self.entry} | {self.tensor} | {self.case} | {self.error:.1e} | {self.yardstick:.1e} | "
            f"{self.part:.2f} |"
        )


Found = tuple[Digits, tuple[Digits, ...], int]
"""The result of an entry that comes nearest to its bound, those beyond it, how many draws there were."""
HEAD = "| entry | result | at | error | yardstick | of allowed |\n|---|---|---|---|---|---|"


def ends(spec: RecurrenceSpec) -> tuple[Extremes, ...]:
    """Every end of every kind by itself, then pairs."""
    choices = applicable(spec)
    found = [Extremes(), *(Extremes(**{kind: end}) for kind, some in choices.items() for end in some)]
    for one, some, other, more in PAIRS:
        found += [
            Extremes(**{one: x, other: y})
            for x in some
            for y in more
            if x in choices.get(one, ()) and y in choices.get(other, ())
        ]
    return tuple(dict.fromkeys(found))


def short(drawn: Extremes) -> str:
    """What is not ordinary about a draw."""
    parts = {"gates": drawn.gates, "keys": drawn.keys, "scalars": drawn.scalars, "values": drawn.values}
    plain = Extremes()
    return ", ".join(f"{k} {x}" for k, x in parts.items() if x != getattr(plain, k)) or "ordinary"


def measured(subject: Subject, cases: Iterable[Case]) -> Iterator[Digits]:
    """The errors of every result of every case."""
    for case in cases:
        want = exact(case).want
        errors = relative_errors(case, run(subject, case), want)
        allowed = bounds(case, want)
        where = f"{short(case.extremes)}; T {case.shape.T} K {case.shape.K} V {case.shape.V}"
        for name, error in errors.items():
            yield Digits(subject.spec.name, where, name, error, *allowed[name])


def cases_of(
    subject: Subject, sizes: Sequence[int], length: int, dtype: torch.dtype, seed: int
) -> Iterator[Case]:
    """A case for every end and size whose results are ordinary numbers."""
    for size in sizes:
        shape = Shape(1, length if size > SIZES[0] else length // 2, 1, size, max(1, size // 2))
        for drawn in ends(subject.spec):
            case = make_case(subject, shape, seed=seed, dtype=dtype, extremes=drawn)
            if tame(case):
                yield case


def survey(
    name: str,
    *,
    backend: str = "torch",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
    sizes: Sequence[int] = SIZES,
    length: int = LENGTH,
    seed: int = 3,
) -> Found:
    """An entry of the catalogue, compiled as by ``linalg_dsl.compile(backend=..., chunk_size=...)``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    op = assemble(getattr(ops, name).spec, CompileOptions(backend, chunk_size))
    subject = Subject.of_op(op, dtypes=(dtype,), device=device)
    found: list[Digits] = []
    draws = 0
    for case in cases_of(subject, sizes, length, dtype, seed):
        draws += 1
        found += measured(subject, [case])
    found.sort(key=lambda d: d.part, reverse=True)
    return found[0], tuple(d for d in found if d.part > 1), draws


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """The command line; 1 where something is beyond its bound."""
    parser = argparse.ArgumentParser(prog="python -m linalg_dsl.testing.digits", description=__doc__)
    parser.add_argument("entries", nargs="*", help="entries of the catalogue; all of them by default")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk-size", type=int)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="channels of the keys")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens, half as many at the least size")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args(arguments)
    one = partial(
        survey, backend=given.backend, device=given.device, dtype=getattr(torch, given.dtype),
        chunk_size=given.chunk_size, sizes=given.sizes, length=given.length, seed=given.seed,
    )  # fmt: skip
    names = given.entries or list(catalogue_names())
    print(HEAD, file=out, flush=True)
    beyond: list[Digits] = []
    draws = 0
    for worst, over, count in _runs(one, names, given.jobs):
        print(worst, file=out, flush=True)
        beyond += over
        draws += count
    print(f"\n{draws} draws of {len(names)} entries; {len(beyond)} results beyond their bound", file=out)
    if beyond:
        print(f"\n{HEAD}", *beyond, sep="\n", file=out, flush=True)
    return int(bool(beyond))


def _runs(one: Callable[[str], Found], names: Sequence[str], jobs: int) -> Iterator[Found]:
    """The surveys as they are done."""
    if jobs == 1:
        yield from map(one, names)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(one, name) for name in names]):
            yield done.result()


if __name__ == "__main__":
    sys.exit(main())
