"""What the templates of kernels ask for, and what a kernel's text says of its arguments."""

from __future__ import annotations

from dataclasses import dataclass

from linalg_dsl.codegen.emit.trace import Values
from linalg_dsl.codegen.schedule.kernel_plan import Kernel


@dataclass(frozen=True, slots=True)
class Memory:
    """How a value lies in memory, as a kernel argument.

    ``argument`` is its name among the launcher's tensors; ``ratio`` the constexpr by which the op's
    head number is divided (None: one per head of the op); ``rows``, ``row`` for one row of [n, D];
    ``shares`` the constexpr of how many sums, one per block of a walk, make up the value. ``by_chunks``: the
    numbers of a chunk's tokens lie together, zero on padding, so that one load takes them.
    """

    argument: str
    ratio: str | None = None
    rows: int = 1
    row: int = 0
    saved_only: bool = False
    float32: bool = False
    shares: str | None = None
    by_chunks: bool = False


@dataclass(frozen=True, slots=True)
class DescribedTile:
    """A descriptor as a kernel's argument: of which of the launcher's tensors, axes "tK", "tV" or "ts"."""

    parameter: str
    tensor: str
    axes: str


@dataclass(frozen=True, slots=True)
class KernelText:
    """The text, the launcher's tensors by kernel argument (in order), and what the launch needs."""

    name: str
    kernel: Kernel
    text: str
    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]
    library: frozenset[str]
    loads: tuple[str, ...]
    values: Values
    tiles: tuple[DescribedTile, ...]


@dataclass(frozen=True, slots=True)
class StateText:
    """A carried state in a walk: its name, and what tells its arguments from those of the first."""

    name: str
    suffix: str


@dataclass(frozen=True, slots=True)
class PrepText:
    """What templates/prep.py.jinja asks for."""

    name: str
    doc: str
    pointers: tuple[str, ...]
    scalars: tuple[str, ...]
    bounds: tuple[str, ...]
    constants: tuple[str, ...]
    offsets: tuple[str, ...]
    step: str
    body: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WalkText(PrepText):
    """What templates/walk.py.jinja asks for besides."""

    states: tuple[StateText, ...]
    start: str
    state_offset: str
    state_mask: str
    before_loop: tuple[str, ...]
    tiles: tuple[str, ...]
    whole: str
    turn: str
    chunk_index: str
    careful: tuple[str, ...]
    """The body of a second walk, for when the first has met what is not finite; empty without one."""
