"""Calls that are like an earlier one, launched again without the work that found out how.

A generated module's function allocates results and launches kernels; which ones, and with what numbers, is
the same for the same types, shapes, strides and alignments of its tensors. The second such call is recorded,
and those after it allocate and launch what was recorded: no dispatcher, no checks, no choice of blocks, and
Triton's compiled kernels are started without its search for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from linalg_dsl.ops.described import BareLaunch, bare_launch, is_descriptor, unbound

ENVIRONMENT_VARIABLE = "LINALG_DSL_REPLAY"
"""Set to 0, every call goes the long way."""
_LARGEST = 1024
"""Kept recordings of one operator; more are forgotten all at once."""
_READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})
"""What gives a number of the data to Python, on which anything might depend."""
_EMPTY = frozenset({"aten::empty", "aten::new_empty", "aten::empty_like"})
_ZEROS = frozenset({"aten::zeros", "aten::new_zeros"})
Key = tuple[object, ...]


_paused = 0


@contextmanager
def paused() -> Iterator[None]:
    """Every call goes the long way, in all threads: for who wants to see what modules launch."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


def is_plain() -> bool:
    """Whether nothing follows or transforms what is computed here: no compiler, mode or derivative."""
    if torch.compiler.is_compiling() or _paused or os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def describe(tensors: Sequence[Any]) -> tuple[Key, list[int]] | None:
    """What decides how these tensors are computed with, and their addresses; None if one is no plain tensor.

    Also None where a gradient would be wanted. This is most of the host time of a replayed call.
    """
    grad = torch.is_grad_enabled()
    key: list[object] = []
    addresses: list[int] = []
    for x in tensors:
        if x is None:
            key.append(None)
            addresses.append(0)
            continue
        kind = x.__class__
        if (kind is not Tensor and kind is not Parameter) or (grad and x.requires_grad):
            return None
        address = x.data_ptr()
        lies = True if x.is_contiguous() else x.stride()
        key.append((x.dtype, x.shape, lies, x.get_device(), address & 15))
        addresses.append(address)
    return tuple(key), addresses


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a call allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    zero: bool

    def make(self) -> Tensor:
        make = torch.zeros if self.zero else torch.empty
        return make(self.shape, dtype=self.dtype, device=self.device)


Fill = tuple[tuple[int, int, int], ...]
"""Of a launch: (place among the arguments, which leaf or buffer, bytes beyond its first)."""
Place = tuple[int, int]
"""Which buffer, and the byte of it."""
Again = Callable[[Sequence[Tensor | None], Fill], None]
"""Launches in Triton's own way."""


class CompiledLaunch:
    """A kernel that Triton has compiled, with the arguments of one launch."""

    def __init__(
        self,
        compiled: Any,
        programs: int,
        arguments: Sequence[Any],
        fill: Fill,
        hooks: Any,
        again: Again,
        bare: BareLaunch | None = None,
    ) -> None:
        self.run = bare.run if bare else compiled.run
        self.programs = programs
        self.function = compiled.function
        self.metadata = compiled.packed_metadata
        self.arguments = bare.arguments if bare else list(arguments)
        self.places = bare.place if bare else range(len(arguments))
        self.tiles = bare.tiles if bare else {}
        self.fill = fill
        self.hooks = hooks
        self.again = again

    def __call__(self, tensors: Sequence[Tensor | None], addresses: Sequence[int], stream: int) -> None:
        if _has_hooks(self.hooks):  # a profiler: Triton tells it about launches of its own
            self.again(tensors, self.fill)
            return
        arguments, places, tiles = self.arguments.copy(), self.places, self.tiles
        for place, which, beyond in self.fill:
            at, address = places[place], addresses[which] + beyond
            arguments[at] = tiles[at].at(address) if at in tiles else address
        self.run(
            self.programs, 1, 1, stream, self.function, self.metadata, None, None, None, *arguments
        )  # fmt: skip


class OrdinaryLaunch:
    """A launch in Triton's own way: in the interpreter, and where compiled kernels are unlike those known."""

    def __init__(self, fill: Fill, again: Again) -> None:
        self.fill = fill
        self.again = again

    def __call__(self, tensors: Sequence[Tensor | None], addresses: Sequence[int], stream: int) -> None:
        self.again(tensors, self.fill)


@dataclass(frozen=True, slots=True)
class _Value:
    """A leaf, buffer or earlier result among the arguments of an operation."""

    which: int


class Operation:
    """An operator of torch between or behind the launches, as a sum over heads that share an input."""

    def __init__(self, function: Any, args: Any, options: Any, result: int) -> None:
        self.function = function
        self.args = args
        self.options = options
        self.result = result

    def __call__(self, tensors: list[Tensor | None], addresses: list[int], stream: int) -> None:
        args, options = tree_map_only(_Value, lambda v: tensors[v.which], (self.args, self.options))
        found = self.function(*args, **options)
        tensors[self.result] = found
        addresses[self.result] = found.data_ptr()

    def values(self) -> set[int]:
        """What it takes."""
        return {v.which for v in tree_leaves((self.args, self.options)) if isinstance(v, _Value)}

    def move(self, place: Callable[[int], int]) -> None:
        """Counts values in another way."""
        self.args, self.options = tree_map_only(
            _Value, lambda v: _Value(place(v.which)), (self.args, self.options)
        )
        self.result = place(self.result)


Action = CompiledLaunch | OrdinaryLaunch | Operation


@dataclass(frozen=True, slots=True)
class Replay:
    """One recorded call. ``results``: which of the buffers are the results."""

    buffers: tuple[Buffer, ...]
    launches: tuple[Action, ...]
    results: tuple[int, ...]
    device: int
    stream: Callable[[int], int]
    computed: int = 0
    """How many results of operations come behind the buffers."""

    def __call__(self, tensors: Sequence[Tensor | None], addresses: list[int]) -> list[Tensor]:
        """The results of the same call on other tensors, on the current stream of their device."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self._run(tensors, addresses)
        return self._run(tensors, addresses)

    def _run(self, tensors: Sequence[Tensor | None], addresses: list[int]) -> list[Tensor]:
        made = [buffer.make() for buffer in self.buffers]
        every: list[Any] = [*tensors, *made]
        places = [*addresses, *[x.data_ptr() for x in made]]
        if self.computed:
            every += [None] * self.computed
            places += [0] * self.computed
        stream = self.stream(self.device)
        for launch in self.launches:
            launch(every, places, stream)
        first = len(tensors)
        return [every[first + i] for i in self.results]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a function of a module and notes what it allocates and launches.

    ``known``: the tensors given to it, each an object of its own: which leaf of the call it is, and how many
    bytes beyond its first.
    """

    def __init__(self, known: Mapping[int, tuple[int, int]], leaves: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = dict(known)
        self.leaves = leaves
        self.made: list[Tensor] = []  # kept alive, as they are known by their identity
        self.buffers: list[Buffer | None] = []  # None: the result of an operation
        self.launches: list[Action] = []
        self.clean = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _EMPTY or name in _ZEROS:
            self._take(out, Buffer(tuple(out.shape), out.dtype, out.device, name in _ZEROS))
        elif name == "aten::detach" and id(args[0]) in self.known:
            # under a mode torch.empty returns another object for its tensor
            self.known[id(out)] = self.known[id(args[0])]
            self.made.append(out)
        else:
            self._note(func, name, args, kwargs or {}, out)
        return out

    def _take(self, out: Tensor, buffer: Buffer | None) -> None:
        self.known[id(out)] = (self.leaves + len(self.buffers), 0)
        self.made.append(out)
        self.buffers.append(buffer)

    def _note(self, func: Any, name: str, args: Any, options: Any, out: Any) -> None:
        """An operation of tensors that are known, which is carried out again."""
        given = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        seen = all(self.known.get(id(x), (0, 1))[1] == 0 for x in given)
        if not isinstance(out, Tensor) or not given or not seen or name in _READS or func._schema.is_mutable:
            self.clean = False
            return
        args, options = tree_map_only(Tensor, lambda x: _Value(self.known[id(x)][0]), (args, options))
        self.launches.append(Operation(func, args, options, self.leaves + len(self.buffers)))
        self._take(out, None)

    def launch(
        self,
        kernel: Any,
        programs: int,
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        warps: int,
        stages: int,
    ) -> None:
        """Launches a kernel; what generated modules call in place of their own function."""
        with _disable_current_modes():  # what Triton does with tensors is none of the module's
            compiled = kernel[(programs,)](*arguments, **constants, num_warps=warps, num_stages=stages)
        bases = [x.base if is_descriptor(x) else x for x in arguments]
        fill = tuple(
            (place, *self.known[id(x)])
            for place, x in enumerate(bases)
            if isinstance(x, Tensor) and id(x) in self.known
        )
        fixed = [None if place in {p for p, _, _ in fill} else x for place, x in enumerate(arguments)]
        shapes = {p: (bases[p].shape, bases[p].stride(), bases[p].dtype) for p, _, _ in fill}
        tiles = {p: unbound(arguments[p]) for p, _, _ in fill if is_descriptor(arguments[p])}

        def again(tensors: Sequence[Tensor | None], fill: Fill) -> None:
            given = list(fixed)
            for place, which, beyond in fill:
                part = _part(tensors[which], *shapes[place], beyond)
                given[place] = tiles[place](part) if place in tiles else part
            kernel[(programs,)](*given, **constants, num_warps=warps, num_stages=stages)

        hooks = _hooks()
        if hooks is None or not all(hasattr(compiled, n) for n in ("run", "function", "packed_metadata")):
            self.launches.append(OrdinaryLaunch(fill, again))
            return
        rest = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        given = [*fixed, *rest]
        described = [arguments[p] if p in tiles else x for p, x in enumerate(given)]
        bare = bare_launch(compiled, described) if tiles else None
        if tiles and bare is None:
            self.launches.append(OrdinaryLaunch(fill, again))
            return
        self.launches.append(CompiledLaunch(compiled, programs, given, fill, hooks, again, bare))

    def replay(self, results: Sequence[Tensor], like: Tensor) -> Replay | None:
        """What was recorded, if it is all that was done."""
        places = [self.known.get(id(x), (-1, 0))[0] - self.leaves for x in results]
        if not self.clean or min(places, default=0) < 0:
            return None
        operations = [x for x in self.launches if isinstance(x, Operation)]
        whole = {which - self.leaves for x in operations for which in x.values()}
        buffers, moved = _together(self.buffers, whole | set(places))

        def place(which: int) -> int:
            return which if which < self.leaves else self.leaves + moved[which - self.leaves][0]

        for launch in self.launches:
            if isinstance(launch, Operation):
                launch.move(place)
                continue
            launch.fill = tuple(
                (at, place(which), beyond + (0 if which < self.leaves else moved[which - self.leaves][1]))
                for at, which, beyond in launch.fill
            )
        return Replay(
            tuple(buffers),
            tuple(self.launches),
            tuple(moved[i][0] for i in places),
            like.get_device(),
            current_stream if like.device.type == "cuda" else no_stream,
            sum(x is None for x in self.buffers),
        )


@dataclass
class ReplayCache:
    """The recorded calls of one operator."""

    found: dict[Key, Replay | bool] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: Key) -> Replay | None:
        """The recording of such calls, if there is one."""
        replay = self.found.get(key)
        return replay if isinstance(replay, Replay) else None

    def is_due(self, key: Key) -> bool:
        """Whether such a call is to be recorded: the second one is, as many shapes come once only."""
        seen = self.found.get(key)
        if seen is not None:
            return seen is True
        with self.lock:
            if len(self.found) >= _LARGEST:
                self.found.clear()
            self.found[key] = True
        return False

    def keep(self, key: Key, replay: Replay | None) -> None:
        """Keeps a recording; None for what cannot be replayed."""
        self.found[key] = False if replay is None else replay


def _together(
    buffers: Sequence[Buffer | None], apart: set[int]
) -> tuple[list[Buffer], list[Place]]:  # fmt: skip
    """The buffers, with all that are between kernels only in one; where each of them is now.

    Behind them come those that are none of ours (None). ``apart``: the ones that tensors are needed of.
    """
    kept: list[Buffer] = []
    moved: list[Place] = []
    size = 0
    between = [b for i, b in enumerate(buffers) if b is not None and not b.zero and i not in apart]
    computed = 0
    for i, buffer in enumerate(buffers):
        if buffer is None:
            moved.append((-2 - computed, 0))
            computed += 1
        elif i in apart or buffer.zero:
            moved.append((len(kept), 0))
            kept.append(buffer)
        else:
            moved.append((-1, size))
            size += -(-prod(buffer.shape) * buffer.dtype.itemsize // 256) * 256
    if between:
        kept.append(Buffer((size,), torch.uint8, between[0].device, False))
    last = len(kept) - 1
    return kept, [(last - 1 - i if i < -1 else last if i < 0 else i, at) for i, at in moved]


def _part(x: Tensor | None, shape: Any, stride: Any, dtype: torch.dtype, beyond: int) -> Tensor:
    """The tensor that a launch got, of the leaf or buffer that it is a part of."""
    if x is None:
        raise AssertionError("a launch got no tensor")
    if x.dtype != dtype:  # a part of the memory between kernels
        x, beyond = x[beyond : beyond + prod(shape) * dtype.itemsize].view(dtype), 0
    return x.as_strided(shape, stride, x.storage_offset() + beyond // x.element_size())


def _hooks() -> Any:
    """Triton's hooks of launches; None where this version keeps them elsewhere."""
    try:
        from triton import knobs

        return knobs.runtime if hasattr(knobs.runtime, "launch_enter_hook") else None
    except ImportError:
        return None


def _has_hooks(runtime: Any) -> bool:
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def current_stream(device: int) -> int:
    """The handle of the stream on which a device's kernels are launched now."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def no_stream(device: int) -> int:
    return 0
