"""``torch.cuda`` of the GPU that is not there: an H200's numbers, streams and graphs that do nothing."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from . import device as memory

NAME = "stand-in for an NVIDIA H200"
_HANDLES = itertools.count(4096, 4096)


class Stream:
    """A stream: work on it is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, handle: int | None = None, **_: Any) -> None:
        self.cuda_stream = next(_HANDLES) if handle is None else handle
        self.device = torch.device("cuda", 0)
        self.device_index, self.stream_id, self.device_type = 0, self.cuda_stream, 1

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _no_wait("Stream.synchronize")

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream


class Event:
    """An event; its times are the host's."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timed = enable_timing
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _no_wait("Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        if not (self.timed and end.timed) or self.at is None or end.at is None:
            raise RuntimeError("both events must be recorded, with enable_timing=True")
        return max(1e3 * (end.at - self.at), 1e-3)


class CUDAGraph:
    """A graph that was captured and replays nothing."""

    captured = False

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        STATE.capturing = True

    def capture_end(self) -> None:
        STATE.capturing = False
        self.captured = True

    def replay(self) -> None:
        if not self.captured:
            raise RuntimeError("a graph is replayed that was not captured")

    def reset(self) -> None:
        self.captured = False

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class State:
    """What is current."""

    def __init__(self) -> None:
        self.stream = Stream(handle=0)
        self.capturing = False
        self.mode = 0


STATE = State()
_CURRENT = [STATE.stream]


def _no_wait(what: str) -> None:
    if STATE.capturing:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


@contextlib.contextmanager
def stream(given: Stream | None) -> Iterator[None]:
    before = STATE.stream
    STATE.stream = given or before
    try:
        yield
    finally:
        STATE.stream = before


@contextlib.contextmanager
def graph(made: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
    side = stream or Stream()
    before = STATE.stream
    STATE.stream = side
    made.capture_begin()
    try:
        yield
    finally:
        made.capture_end()
        STATE.stream = before


class device:
    """``torch.cuda.device``: there is one."""

    def __init__(self, given: Any) -> None:
        self.idx = 0
        index = given if isinstance(given, int) else torch.device(given).index
        if index not in (None, 0, -1):
            raise RuntimeError(f"there is no GPU {index}")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class device_of(device):
    """``torch.cuda.device_of``."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x.get_device() if x.is_cuda else -1)


def properties(given: Any = None) -> Any:
    """An H200's."""
    return SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=150_000_000_000, warp_size=32,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
        regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=228 << 10,
        max_threads_per_multi_processor=2048, L2_cache_size=60 << 20,
        gcnArchName="", is_integrated=0, is_multi_gpu_board=0, uuid="none", memory_clock_rate=3_201_000,
        memory_bus_width=6144, clock_rate=1_980_000,
    )  # fmt: skip


def set_sync_debug_mode(mode: int | str) -> None:
    STATE.mode = mode if isinstance(mode, int) else ("default", "warn", "error").index(mode)
    torch.ops.linalg_dsl_stand_in.refuse_waits(STATE.mode == 2)


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """torch's own has a backward for a GPU alone."""
    wide = x.float()
    mean = wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    y = (wide * torch.rsqrt(mean + (torch.finfo(x.dtype).eps if eps is None else eps))).to(x.dtype)
    return y if weight is None else y * weight


def _nothing() -> Any:
    """A function that does nothing: a new one each time, since dynamo tells them apart."""
    return lambda *args, **kwargs: None


def install() -> None:
    """Puts all of it in place of what a build of torch has; for the rest of this process."""
    memory.install()
    given: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "get_device_name": lambda given=None: NAME,
        "get_device_capability": lambda given=None: (9, 0),
        "get_device_properties": properties,
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_stream": lambda given=None: STATE.stream,
        "default_stream": lambda given=None: _CURRENT[0],
        "is_current_stream_capturing": lambda: STATE.capturing,
        "synchronize": lambda given=None: _no_wait("synchronize"),
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: STATE.mode,
        "mem_get_info": lambda given=None: (140_000_000_000, 150_000_000_000),
        "get_rng_state": lambda given=None: torch.get_rng_state(),
        "set_rng_state": lambda state, given=None: torch.set_rng_state(state),
        "stream": stream,
        "graph": graph,
        "device": device,
        "device_of": device_of,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        given[name] = lambda given=None: 1 << 20
    for name in (
        "_lazy_init", "init", "set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed", "_sleep",
        "manual_seed_all", "set_stream", "reset_max_memory_allocated", "ipc_collect",
    ):  # fmt: skip
        given[name] = _nothing()
    for name, value in given.items():
        setattr(torch.cuda, name, value)
    setattr(torch.nn.functional, "rms_norm", rms_norm)  # noqa: B010
    for switch in ("flash", "mem_efficient", "cudnn"):  # attention by what any device can do
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(False)
    torch._C._cuda_getCurrentRawStream = lambda device: STATE.stream.cuda_stream
    torch.version.cuda = torch.version.cuda or "13.0"
