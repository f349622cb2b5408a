"""What a tuning tries: the neighbourhood of the tables' choice by kernel, and variants of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from linalg_dsl.codegen.launch_sizes import LaunchSizes
from linalg_dsl.ops.launched import Launched

Sizes = tuple[int, int, int]
"""(block, warps, stages) of a launch."""
Assignment = dict[str, Sizes]
"""Of kernels by their names in modules."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Options that change the plan or the text; None is what the op was asked to have.

    ``tma``: the walk, or "walk" for all, that loads its tiles by descriptors; ``pointers``: the same of
    those that load by pointers.
    """

    chunk_size: int | None = None
    schedule: str | None = None
    tma: str | None = None
    pointers: str | None = None

    @property
    def changes(self) -> dict[str, Any]:
        plan = {"chunk_size": self.chunk_size, "schedule": self.schedule}
        return {n: x for n, x in plan.items() if x is not None} | (
            {"launch": self.launch} if self.launch else {}
        )

    @property
    def launch(self) -> dict[str, dict[str, int]]:
        """Its part of the option ``launch``."""
        ways = ((self.tma, 1), (self.pointers, 0))
        return {name: {"tma": way} for name, way in ways if name is not None}

    def __str__(self) -> str:
        return ", ".join(f"{n} {x}" for n, x in asdict(self).items() if x is not None) or "as it is"


def variants(
    chunk: int | None,
    asked_chunk: bool,
    schedule: str,
    few: bool,
    two_levels: bool,
    described: Sequence[str] = (),
    pointers: Sequence[str] = (),
) -> tuple[Variant, ...]:
    """The op as it is, with half and twice the ``chunk`` (None: it has none), and with the other schedule.

    Before these with each of the ``described`` walks loading by descriptors, each of ``pointers`` by those.

    What the user asked for stays: ``asked_chunk``, a schedule other than "walk". ``few``: one level leaves
    multiprocessors idle; ``two_levels``: there is such a schedule.
    """
    out = [Variant(), *(Variant(tma=name) for name in described), *(Variant(pointers=n) for n in pointers)]
    if chunk is not None and not asked_chunk:
        out += [Variant(chunk_size=c) for c in (chunk * 2, chunk // 2) if 16 <= c <= 128]
    if two_levels and few and schedule == "walk":
        out.append(Variant(schedule="two_level"))
    return tuple(out)


def neighbours(launch: Launched) -> tuple[Sizes, ...]:
    """Sizes next to those of a launch, which come first; nearest first."""
    block, warps, stages = launch.sizes
    given = dict(launch.constants)
    wider = any(given.get(n, 1) > 1 for n in ("BLOCKS", "K_BLOCKS", "V_BLOCKS"))
    loop = "STAGES" in given and stages > 1
    found: list[Sizes] = [(block, warps, stages), (block, 2 * warps, stages), (block, warps // 2, stages)]
    if block:
        found.append((block // 2, warps, stages))
    if block and wider:
        found += [(2 * block, warps, stages), (2 * block, 2 * warps, stages)]
    if loop:
        found += [(block, warps, stages + 1), (block, warps, stages - 1), (block, 2 * warps, stages - 1)]
    if block:
        found.append((block // 2, warps, stages + 1) if loop else (block // 2, 2 * warps, stages))
    least = min(16, block)
    return tuple(
        dict.fromkeys((b, w, s) for b, w, s in found if least <= b <= 512 and 1 <= w <= 8 and 1 <= s <= 5)
    )


def rounds(choices: Mapping[str, Sequence[Sizes]]) -> list[Assignment]:
    """Assignments that have every choice of every kernel in at least one; the first has the first of each."""
    most = max((len(c) for c in choices.values()), default=0)
    return [{name: sizes[min(i, len(sizes) - 1)] for name, sizes in choices.items()} for i in range(most)]


def batches(choices: Mapping[str, Sequence[Sizes]], least: int) -> Iterator[dict[str, list[Sizes]]]:
    """The choices in parts of at least ``least`` launches, nearest first: so many are compiled at once."""
    each = max(1, -(-least // max(1, len(choices))))
    for i in range(0, max((len(c) for c in choices.values()), default=0), each):
        yield {name: list(sizes[i : i + each]) for name, sizes in choices.items() if sizes[i : i + each]}


def as_option(
    assignment: Mapping[str, Sizes], owners: Mapping[str, tuple[str, str]]
) -> dict[str, dict[str, int]]:
    """The option ``launch``; ``owners``: (stage, kernel) of names in modules."""
    out = {}
    for name, (block, warps, stages) in assignment.items():
        stage, kernel = owners[name]
        sizes = LaunchSizes(
            block or None, warps, None if "prep" in kernel or "gradients" in kernel else stages
        )
        out[f"{stage}.{kernel}"] = sizes.as_dict()
    return out
