"""Triton's driver for the GPU that is not there: kernels are compiled for sm_90, launches are looked at.

A launch does nothing. What it is given has to fit what was compiled: how many arguments and of which kinds,
numbers within their types, what was taken for divisible by 16 or for a constant. ``LINALG_DSL_GPU_DRY`` is
``full`` to compile down to machine code; else Triton's own form of the kernel is made, which takes a tenth
of the time and finds all that is wrong in the text.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

_LIMITS = {"i1": (0, 1), "i8": (-(2**7), 2**7), "i16": (-(2**15), 2**15), "i32": (-(2**31), 2**31)}
_LIMITS |= {"i64": (-(2**63), 2**63), "u32": (0, 2**32), "u64": (0, 2**64)}
_FLOATS = ("fp16", "bf16", "fp32", "fp64", "f32", "f64")
_HANDLES = itertools.count(1 << 20)
_NAMES: dict[int, str] = {}


class BadLaunch(Exception):
    """A launch whose arguments are not those that the kernel was compiled for."""


@dataclass(frozen=True)
class Seen:
    """One launch: pointers are numbers in ``arguments``."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    function: int
    arguments: tuple[Any, ...]


class Launches(threading.local):
    """What this thread launched."""

    def __init__(self) -> None:
        self.count = 0
        self.last: Seen | None = None


LAUNCHES = Launches()
KERNELS: dict[str, int] = {}
"""How often each kernel was launched, by its name."""


class Utils:
    """Of the driver; a kernel is loaded by giving it a number."""

    def load_binary(self, name: str, kernel: Any, shared: int, device: int) -> tuple[int, int, int, int, int]:
        handle = next(_HANDLES)
        _NAMES[handle] = name
        return handle, handle, 64, 0, 1024

    def get_device_properties(self, device: int) -> Mapping[str, int]:
        return {
            "max_shared_mem": 227 << 10, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32,
            "sm_clock_rate": 1_980_000, "mem_clock_rate": 3_201_000, "mem_bus_width": 6144,
        }  # fmt: skip

    def fill_tma_descriptor(
        self, address: int, swizzle: int, size: int, kind: int, block: Any, shape: Any, strides: Any,
        padding: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        """What stands for an encoded tensor descriptor, by the driver's own rules of what it encodes."""
        apart = address % 16 or any(n * size % 16 for n in strides[:-1]) or max(block) > 256
        if apart or not all(0 < n <= 1 << 32 for n in shape):
            raise BadLaunch(f"no descriptor of {address}, shape {shape}, strides {strides}, block {block}")
        return (
            "descriptor",
            address,
            swizzle,
            size,
            kind,
            tuple(block),
            tuple(shape),
            tuple(strides),
            padding,
        )

    fill_tma_descriptor_tiled = fill_tma_descriptor

    @property
    def launch(self) -> Any:
        """What newer launchers launch with: asked for while one is made."""
        return MADE.look.newer


class _Made(threading.local):
    look: Look


MADE = _Made()


class Look:
    """What is known of one compiled kernel, and looked at in each of its launches."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = str(metadata.name)
        names = list(src.fn.arg_names)
        constants = {_place(names, k): v for k, v in src.constants.items()}
        divisible = {
            _place(names, k): int(value)
            for k, values in (src.attrs or {}).items()
            for what, value in values
            if what == "tt.divisibility"
        }
        encoded = bool(getattr(metadata, "tensordesc_meta", None))
        self.names: list[str] = []
        self.types: list[str] = []
        self.constants: dict[int, Any] = {}
        self.divisible: dict[int, int] = {}
        for i, name in enumerate(names):
            at = len(self.types)
            if i in constants:
                self.constants[at] = constants[i]
            if i in divisible:
                self.divisible[at] = divisible[i]
            types = _written_out(src.signature[name], encoded)
            self.names += [name] * len(types)
            self.types += types

    def older(
        self, x: int, y: int, z: int, stream: int, function: int, cooperative: bool, dependent: bool,
        scratch: Any, profile: Any, packed: Any, said: Any, enter: Any, leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        """As the launchers of Triton 3.6 call it."""
        self.start((x, y, z), stream, function, packed, (said, enter, leave), arguments)

    def newer(
        self, x: int, y: int, z: int, stream: int, function: int, cooperative: bool, dependent: bool,
        packed: Any, said: Any, enter: Any, leave: Any, scratch: Any, profile: Any, annotations: Any,
        signature: Any, arguments: Any,
    ) -> None:  # fmt: skip
        """As those of Triton 3.7 do."""
        self.start((x, y, z), stream, function, packed, (said, enter, leave), arguments)

    def start(
        self, grid: tuple[int, int, int], stream: int, function: int, packed: Any, hooks: Any, arguments: Any
    ) -> None:
        if _NAMES.get(function) != self.name:
            raise BadLaunch(f"{self.name}: launched with the function of {_NAMES.get(function)}")
        warps, ctas, shared, *_ = packed
        whole = all(type(n) is int for n in (*grid, stream, warps, ctas, shared))
        if not whole or not 0 < grid[0] < 2**31 or not all(0 < n < 2**16 for n in grid[1:]):
            raise BadLaunch(f"{self.name}: a grid of {grid} on stream {stream} with {packed}")
        if stream != torch.cuda.current_stream().cuda_stream:
            raise BadLaunch(f"{self.name}: launched on stream {stream}, which is not the current one")
        if len(arguments) != len(self.types):
            raise BadLaunch(f"{self.name}: {len(arguments)} arguments, it has {len(self.types)}")
        plain = tuple(self._looked_at(i, x) for i, x in enumerate(arguments))
        said, enter, leave = hooks
        if enter is not None:
            enter(said)
        LAUNCHES.count += 1
        LAUNCHES.last = Seen(self.name, grid, stream, function, plain)
        KERNELS[self.name] = KERNELS.get(self.name, 0) + 1
        if leave is not None:
            leave(said)

    def _looked_at(self, i: int, x: Any) -> Any:
        where, kind = f"{self.name}: argument {self.names[i]} ({self.types[i]})", self.types[i]
        if kind == "constexpr":
            if i in self.constants and not _same(self.constants[i], x):
                raise BadLaunch(f"{where} is {x!r}, compiled for {self.constants[i]!r}")
            return getattr(x, "value", x)
        if kind == "nvTmaDesc":
            if not isinstance(x, tuple):
                raise BadLaunch(f"{where} is {x!r}, no encoded descriptor")
            return x
        if kind.startswith("*"):
            if isinstance(x, torch.Tensor):
                if not x.is_cuda:
                    raise BadLaunch(f"{where}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
                x = x.data_ptr()
            if x is not None and type(x) is not int:
                raise BadLaunch(f"{where} is {x!r}, no pointer")
            value = x or 0
        elif kind in _FLOATS:
            if not isinstance(x, (int, float)):
                raise BadLaunch(f"{where} is {x!r}, no number")
            return float(x)
        else:
            low, high = _LIMITS[kind]
            if not isinstance(x, int) or not low <= x < high + (kind == "i1"):
                raise BadLaunch(f"{where} is {x!r}, beyond its type")
            value = int(x)
        if value % self.divisible.get(i, 1):
            raise BadLaunch(f"{where} is {value}, compiled for multiples of {self.divisible[i]}")
        return value


def _place(names: list[str], key: Any) -> int:
    if isinstance(key, str):
        return names.index(key)
    return int(key[0] if isinstance(key, tuple) else key)


def _same(fixed: Any, x: Any) -> bool:
    fixed, x = getattr(fixed, "value", fixed), getattr(x, "value", x)
    return bool(fixed == x) or str(fixed) == str(x)


def _written_out(kind: Any, encoded: bool) -> list[str]:
    """The types that an argument is launched as: of a descriptor its encoded form, shape and strides."""
    found = re.match(r"tensordesc<([^\[>]*)\[([^\]]*)\]", str(kind))
    if found is None:
        return [str(kind)]
    count = found[2].count(",") + 1
    if not encoded:
        raise BadLaunch(f"a descriptor of {found[1]} that the kernel takes apart")
    return ["nvTmaDesc", *["i32"] * count, *["i64"] * count]


def launcher_class() -> Any:
    """Triton's own launcher of NVIDIA's GPUs, but for the C function at its end."""
    from triton.backends.nvidia import driver as nvidia

    class Launcher(nvidia.CudaLauncher):  # type: ignore[misc]
        def __init__(self, src: Any, metadata: Any) -> None:
            MADE.look = Look(src, metadata)
            super().__init__(src, metadata)

    Launcher.__module__ = nvidia.__name__
    if hasattr(nvidia, "make_launcher"):  # 3.6: a module in C for every signature
        nvidia.make_launcher = lambda *given: ""
        nvidia.library_dirs = list
        nvidia.compile_module_from_src = lambda **given: SimpleNamespace(launch=MADE.look.older)
    else:
        nvidia.annotate_arguments = list
        nvidia.make_kernel_signature = list
    return Launcher


def install() -> None:
    """Makes it Triton's active driver; for the rest of this process."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    class Driver(GPUDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.utils = Utils()
            self.launcher_cls = launcher_class()
            self.get_current_device = lambda: 0

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> Any:
            from triton.testing import do_bench

            return do_bench

        def get_empty_cache_for_benchmark(self) -> torch.Tensor:
            return torch.empty(1, dtype=torch.int32, device="cuda")

        def clear_cache(self, cache: torch.Tensor) -> None:
            cache.zero_()

    driver.set_active(Driver())
    if os.environ.get("LINALG_DSL_GPU_DRY") == "full":
        return
    every = CUDABackend.add_stages

    def add_stages(self: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        found: dict[str, Any] = {}
        every(self, found, options, language)
        stages["ttir"] = found["ttir"]
        rest = [found[n] for n in ("ttgir", "llir", "ptx", "cubin")]
        stages["cubin"] = lambda module, metadata: unfinished(module, metadata, rest)

    CUDABackend.add_stages = add_stages
    CUDABackend.hash = lambda self: "stand-in"


def unfinished(module: Any, metadata: dict[str, Any], rest: Sequence[Any]) -> Any:
    """What stands for the machine code of a kernel that is compiled no further.

    One with descriptors is: later stages say how they are laid out.
    """
    if "tensordesc" in str(module):
        for stage in rest:
            module = stage(module, metadata)
        return module
    name = re.search(r"tt\.func public @(\w+)", str(module))
    assert name is not None
    metadata["name"] = name[1]
    for field in ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size"):
        metadata.setdefault(field, 0)
    for field in ("global_scratch_align", "profile_scratch_align"):
        metadata.setdefault(field, 1)
    return b"none"
