"""Blocks, warps and stages that launches are asked to have, in place of what the tables choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from linalg_dsl.errors import ArgumentError

FAMILIES = ("walk", "prep", "step")
"""Names that stand for all kernels of a kind."""
_LEGAL: dict[str, tuple[int, ...]] = {
    "block": (8, 16, 32, 64, 128, 256, 512),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4, 5, 6),
    "tma": (0, 1),
}
_TOKEN_BY_TOKEN = ("step", "forward", "backward")
"""Names of kernels that go token after token, and of their kind."""
Launches = tuple[tuple[str, "LaunchSizes"], ...]


@dataclass(frozen=True, slots=True)
class LaunchSizes:
    """Of one launch: ``block`` of the axis that a walk splits, or of K and V in a prep; None: the table's.

    ``tma``: 1 where a walk loads tiles by tensor descriptors (``schedule/descriptors.py``), 0 by pointers.
    """

    block: int | None = None
    warps: int | None = None
    stages: int | None = None
    tma: int | None = None

    def over(self, other: LaunchSizes) -> LaunchSizes:
        """What is given here, else what the other has."""
        mine, rest = asdict(self), asdict(other)
        return LaunchSizes(**{n: rest[n] if x is None else x for n, x in mine.items()})

    @property
    def as_tuple(self) -> tuple[int | None, int | None, int | None]:
        """(block, warps, stages)."""
        return self.block, self.warps, self.stages

    def as_dict(self) -> dict[str, int]:
        """What is given."""
        return {n: x for n, x in asdict(self).items() if x is not None}

    def __str__(self) -> str:
        return ", ".join(f"{n} {x}" for n, x in self.as_dict().items())


def read_launches(given: Mapping[str, Mapping[str, int]] | None) -> Launches:
    """``{"bwd_reverse_v": {"block": 64, "warps": 4}}`` as options hold it, checked; None is none.

    Keys are names of kernels as ``explain`` prints them, behind the name of a stage and a dot where only that
    stage's is meant, or "walk", "prep" and "step" for all of a kind. Raises ``ArgumentError``.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise ArgumentError(
            "launch: expected a mapping from a kernel's name to its sizes, such as "
            f'{{"walk": {{"warps": 8}}}}, got {type(given).__name__}'
        )
    found = []
    for name, sizes in given.items():
        if not isinstance(sizes, Mapping):
            raise ArgumentError(
                f"launch: {name}: expected a mapping from block, warps, stages, tma to numbers"
            )
        for size, number in sizes.items():
            legal = _LEGAL.get(size)
            if legal is None:
                raise ArgumentError(f"launch: {name}: expected block, warps, stages or tma, got {size!r}")
            if isinstance(number, bool) or number not in legal:
                shown = ", ".join(map(str, legal))
                raise ArgumentError(f"launch: {name}: {size} is one of {shown}, got {number!r}")
            if size == "block" and number < 16 and name.rpartition(".")[2] not in _TOKEN_BY_TOKEN:
                raise ArgumentError(f"launch: {name}: blocks of products are 16 or more, got {number}")
            if size == "stages" and name.rpartition(".")[2].endswith("prep"):
                raise ArgumentError(f"launch: {name}: a prep has no loop over chunks, and so no stages")
            if size == "tma" and not _is_walk(name.rpartition(".")[2]):
                raise ArgumentError(f"launch: {name}: only walks take tma, which copies tiles of their loops")
        found.append((str(name), LaunchSizes(**sizes)))
    return tuple(sorted(found, key=lambda pair: pair[0]))


def joined(found: Launches, own: Launches) -> Launches:
    """What was found, with what the user asked for before it."""
    out = dict(found)
    for name, sizes in own:
        out[name] = sizes.over(out.get(name, LaunchSizes()))
    return tuple(sorted(out.items(), key=lambda pair: pair[0]))


def _is_walk(name: str) -> bool:
    """Whether a name may be that of walks over chunks, not of those that two levels add."""
    other = name in ("prep", *_TOKEN_BY_TOKEN) or name.endswith(("_prep", "_gradients", "_scan"))
    return not other and "_super_" not in name


def sizes_of(launches: Launches, stage: str, name: str, family: str) -> LaunchSizes:
    """What is asked of one kernel; its own name counts before that of its kind."""
    out = LaunchSizes()
    asked = dict(launches)
    for key in (f"{stage}.{name}", name, f"{stage}.{family}", family):
        if key in asked:
            out = out.over(asked[key])
    return out


def check_names(launches: Launches, kernels: Iterable[tuple[str, str, str]], recurrence: str) -> None:
    """Raises ``ArgumentError`` for a name that is none of the (stage, kernel, family) there are."""
    known: set[str] = set()
    names: list[str] = []
    for stage, name, family in kernels:
        known |= {f"{stage}.{name}", name, f"{stage}.{family}", family}
        names.append(name)
    for key, _ in launches:
        if key not in known:
            raise ArgumentError(
                f"launch: {recurrence} has no kernel {key!r}; it has {', '.join(dict.fromkeys(names))}"
            )
