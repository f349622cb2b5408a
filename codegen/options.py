"""What a user may choose about a compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from linalg_dsl.codegen.launch_sizes import Launches
from linalg_dsl.errors import ArgumentError

BACKENDS = ("auto", "triton", "torch", "reference")
SCHEDULES = ("walk", "two_level", "auto")
LAYOUTS = (None, "kv", "vk")
SUBSTEPS = (None, "micro", "expand")
LARGEST_CHUNK = 1 << 20
NanExact = bool | Literal["gradients"]


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """The options of ``linalg_dsl.compile``, checked.

    ``backend`` "auto" decides per call. ``chunk_size`` None leaves it to the schedule; the torch backend
    takes any, the triton backend powers of two from 16 to 256. ``strict`` makes a slower path than the
    class promises an error, ``debug`` checks declared promises and offsets in every call (and waits for the
    device), ``invariant`` makes the plan depend on K, V, dtype and device only.

    ``schedule`` "walk" goes over whole sequences; "two_level" cuts them into super-chunks of ``super_chunk``
    chunks (None: so that they fill the card), for few heads and long sequences; "auto" takes two levels where
    a model of their time says that they are clearly faster. For the triton backend. Two levels have not run
    on a GPU yet, so nothing takes them unasked.

    ``substeps`` "micro" lays the substeps of a token out as tokens, "expand" writes them out as one update
    of higher rank; None takes what costs less. ``reverse`` runs from the last token of every sequence to the
    first.

    ``state_layout`` "kv" or "vk": states with a key and a value axis are [N, H, K, V] or [N, H, V, K] in
    calls, whatever order they are declared in; None is as declared.

    ``launch``: blocks, warps and stages of kernels in place of the tables' (``codegen.launch_sizes``). For
    the triton backend.

    ``tune``: the first call of a shape class on a GPU searches for sizes that are faster than the tables'
    (``ops.tune``); what it finds is kept in the cache directory.

    ``nan_exact``: kernels of the forward look at their products for NaN, and where there is one take out
    what later tokens of a chunk left in earlier ones, as 0 times NaN. Without it a NaN or infinity may reach
    outputs of earlier tokens of its chunk (at most 256 tokens, of the same sequence and head). "gradients":
    kernels of the backward look as well. PyTorch modules keep to it whatever is asked for.

    Of a stage that feeds another: ``wide``, its output is float32 (float64 where something is), whatever
    its inputs are; ``handed``, the inputs that other stages gave, whose types say nothing of the user's.
    """

    backend: str = "auto"
    chunk_size: int | None = None
    schedule: str = "walk"
    invariant: bool = False
    strict: bool = False
    debug: bool = False
    substeps: str | None = None
    reverse: bool = False
    state_layout: str | None = None
    super_chunk: int | None = None
    launch: Launches = ()
    tune: bool = False
    nan_exact: NanExact = True
    wide: bool = False
    handed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ArgumentError(f"backend is one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.schedule == "materialised":
            raise ArgumentError(
                "schedule='materialised' (the states of all chunks in memory) is not built: it was slower "
                "than walk or two_level wherever it was measured (docs/how-to/speed.md); take one of walk, "
                "two_level, auto"
            )
        if self.schedule not in SCHEDULES:
            raise ArgumentError(f"schedule is one of walk, two_level, auto, got {self.schedule!r}")
        if self.substeps not in SUBSTEPS:
            raise ArgumentError(f"substeps is one of micro, expand, got {self.substeps!r}")
        for name in ("invariant", "strict", "debug", "reverse", "tune"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is True or False, got {getattr(self, name)!r}")
        if self.nan_exact is not True and self.nan_exact is not False and self.nan_exact != "gradients":
            raise ArgumentError(f"nan_exact is one of True, False, 'gradients', got {self.nan_exact!r}")
        if self.state_layout not in LAYOUTS:
            raise ArgumentError(f"state_layout is one of kv, vk, got {self.state_layout!r}")
        for name in ("chunk_size", "super_chunk"):
            size = getattr(self, name)
            whole = isinstance(size, int) and not isinstance(size, bool)
            if size is not None and not (whole and 1 <= size <= LARGEST_CHUNK):
                raise ArgumentError(f"{name} is a whole number from 1 to {LARGEST_CHUNK}, got {size!r}")
        if self.schedule == "two_level" and self.backend not in ("auto", "triton"):
            raise ArgumentError(
                f"schedule='two_level' is for the triton backend; backend={self.backend!r} goes over whole "
                "sequences"
            )
        if self.tune and self.invariant:
            raise ArgumentError(
                "tune: what is tuned depends on the number of sequences, heads and tokens, which "
                "invariant=True forbids"
            )
        if self.tune and self.backend not in ("auto", "triton"):
            raise ArgumentError(
                f"tune is for the triton backend; backend={self.backend!r} has no sizes to tune"
            )
        if self.launch and self.backend not in ("auto", "triton"):
            raise ArgumentError(f"launch is for the triton backend; backend={self.backend!r} launches none")
        if self.super_chunk is not None and self.schedule != "two_level":
            raise ArgumentError(
                f"super_chunk={self.super_chunk} needs schedule='two_level', got {self.schedule!r}"
            )
