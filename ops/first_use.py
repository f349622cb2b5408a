"""Before a module's first use on a device: its kernels are compiled side by side, and none may spill.

Triton compiles a kernel when it is first launched, one after the other, 2 to 20 seconds each. Here all that a
call will launch, and its backward, are compiled by as many threads as there are processors. What the compiler
made is looked at before it is used: sizes of a launch that spill more than ``MOST_SPILLS`` registers give way
to the next best ones; where nothing helps that is said once. So do those of which the assembler made code
that is known to be wrong (``codegen.machine_faults``); where nothing helps nothing is launched.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.machine_faults import fault_of
from linalg_dsl.ops.args import axis_sizes
from linalg_dsl.ops.launched import Launched, Module, Use
from linalg_dsl.ops.selfcheck import SelfCheck, left_out

ENVIRONMENT_VARIABLE = "LINALG_DSL_FIRST_USE"
"""``0``: kernels are compiled one by one as they are launched, and not looked at."""
FAULTY = 1 << 20
"""Counts as so many spilled registers: code that must not run."""
MOST_SPILLS = 20
"""Registers of a thread that may lie in memory: from hundreds on a kernel is two to five times slower."""
_ROUNDS = 4
_KEPT = 1024
_LOCK = threading.Lock()
Compile = Callable[[ModuleType, Sequence[Launched]], list[int]]
"""Compiles launches of a module; of each the registers that it spills, or ``FAULTY``."""


class FirstUse:
    """Called before a module runs on data: settles its launches on a GPU, then has its numbers checked."""

    def __init__(self, check: SelfCheck) -> None:
        self.check = check
        self._seen: set[tuple[object, ...]] = set()
        self._settled: set[tuple[object, ...]] = set()

    def __call__(
        self, module: ModuleType, tensors: tuple[Tensor, ...], offsets: Tensor | None, use: Use
    ) -> None:
        if not asked_for():
            self.check(module, tensors, offsets)  # which tells calls apart by itself
            return
        device = tensors[0].device
        count = None if offsets is None else offsets.shape[0]
        call = (module.__name__, device, count, use, *((x.dtype, x.shape) for x in tensors))
        if call in self._seen:
            return
        here = compiles(device)
        if here and hasattr(module, "REPLACED"):
            self._settle(module, tensors, offsets, use)
        self.check(module, tensors, offsets)
        if here and not left_out():  # else nothing was settled, or checked, and a later call may have to be
            if len(self._seen) >= _KEPT:
                self._seen.clear()
            self._seen.add(call)

    def _settle(
        self, module: ModuleType, tensors: tuple[Tensor, ...], offsets: Tensor | None, use: Use
    ) -> None:
        launch = self.check.launch_of(module, tensors, offsets)
        sizes = tuple(axis_sizes(self.check.spec, tensors).items())
        kinds = tuple(x.dtype for x in tensors)
        key = (module.__name__, tensors[0].device, kinds, sizes, launch, use)
        with _LOCK:
            if key in self._settled:
                return
            uses = [use]
            if self.check.is_due(module, tensors, offsets):
                uses.append(Use(initial=True, final=True, save=True))
            with torch.cuda.device(tensors[0].device):
                say_once(settle(module, tensors, offsets, uses, compile_side_by_side))
            self._settled.add(key)


def asked_for() -> bool:
    return os.environ.get(ENVIRONMENT_VARIABLE) != "0"


def compiles(device: torch.device) -> bool:
    """Whether kernels are compiled for this device, and may be now."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return not torch.cuda.is_current_stream_capturing()


def settle(
    module: ModuleType,
    tensors: Sequence[Tensor],
    offsets: Tensor | None,
    uses: Iterable[Use],
    compile_all: Compile,
    device: torch.device | None = None,
) -> tuple[str, ...]:
    """Compiles what these uses of a module launch, and replaces sizes that spill in its ``REPLACED``.

    Gives a sentence for every launch that still spills. ``device``: where sizes are chosen for, by default
    that of the tensors. Raises ``RuntimeError`` where every size tried of a kernel is ``FAULTY``.
    """
    place = Module(module, device or tensors[0].device)
    done: dict[Launched, int] = {}
    tried: dict[tuple[str, tuple[int, int, int]], list[tuple[int, tuple[int, int, int]]]] = {}
    for _ in range(_ROUNDS + 2):
        wanted = dict.fromkeys(x for use in uses for x in place.launches(tensors, offsets, use))
        new = [x for x in wanted if x not in done]
        done.update(zip(new, compile_all(module, new), strict=True))
        spilling = {x: done[x] for x in wanted if done[x] > MOST_SPILLS}
        if not spilling or not _replace(module, spilling, tried):
            break
    for x, count in spilling.items():
        if count >= FAULTY:
            raise RuntimeError(
                f"{x.kernel}: this assembler makes wrong code of it, with every size that was tried. Set "
                "TRITON_PTXAS_PATH to a ptxas of CUDA 13.1 or later, or use backend='torch'"
            )
    return tuple(
        f"{x.kernel} with block {x.block}, {x.warps} warps and {x.stages} stages spills {n} registers"
        for x, n in spilling.items()
    )


def _replace(
    module: Any,
    spilling: dict[Launched, int],
    tried: dict[tuple[str, tuple[int, int, int]], list[tuple[int, tuple[int, int, int]]]],
) -> bool:
    """Sets the next sizes of every spilling launch, or the best of those tried; whether any is new."""
    back = {(name, new): old for (name, old), new in module.REPLACED.items()}
    changed = False
    for launch, count in spilling.items():
        chosen = back.get((launch.kernel, launch.sizes), launch.sizes)
        key = (launch.kernel, chosen)
        seen = tried.setdefault(key, [])
        if launch.sizes not in [sizes for _, sizes in seen]:
            seen.append((count, launch.sizes))
        following = next((s for s in alternatives(*chosen) if s not in [x for _, x in seen]), None)
        if following is not None and len(seen) <= _ROUNDS:
            module.REPLACED[key] = following
            changed = True
        else:
            module.REPLACED[key] = min(seen)[1]
            changed = changed or min(seen)[1] != launch.sizes
    return changed


def alternatives(block: int, warps: int, stages: int) -> Iterator[tuple[int, int, int]]:
    """Sizes with fewer registers to a thread, best first: more threads, narrower blocks, both."""
    if warps < 8:
        yield block, 2 * warps, stages
    if block > 16:
        yield block // 2, warps, stages
        if warps < 8:
            yield block // 2, 2 * warps, stages
    if warps < 4:
        yield block, 4 * warps, stages


def compile_side_by_side(module: ModuleType, launches: Sequence[Launched]) -> list[int]:
    """With Triton, for the current device; its disk cache counts."""
    found = compiled_side_by_side(module, launches)
    for kernel in found:
        if isinstance(kernel, Exception):
            raise kernel
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        faults = list(pool.map(fault_of, found))
    return [FAULTY if fault else spills_of(kernel) for kernel, fault in zip(found, faults, strict=True)]


def compiled_side_by_side(module: ModuleType, launches: Sequence[Launched]) -> list[Any]:
    """Of each launch Triton's compiled kernel, or the exception that the compiler raised."""
    from triton.runtime.jit import MockTensor

    def compiled(launch: Launched) -> Any:
        kernel = getattr(module, launch.kernel)
        mocked = [MockTensor(x.dtype) if isinstance(x, Tensor) else x for x in launch.arguments]
        sizes = {"num_warps": launch.warps, "num_stages": launch.stages}
        try:
            return kernel.warmup(*mocked, grid=(launch.programs,), **sizes, **dict(launch.constants))
        except Exception as error:
            return error

    found = _in_threads(compiled, launches)
    return [_settled_kernel(x) for x in found]


def _in_threads(compiled: Callable[[Launched], Any], launches: Sequence[Launched]) -> list[Any]:
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:  # a version of Triton that compiles one after the other
        return [compiled(x) for x in launches]
    if len(launches) < 2 or active_mode.get() is not None:
        return [compiled(x) for x in launches]
    workers = min(len(launches), os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool, ignore_errors=True):
        return [compiled(x) for x in launches]


def _settled_kernel(found: Any) -> Any:
    """What a kernel that was compiled elsewhere has become."""
    try:
        return found.result() if hasattr(found, "result") else found
    except Exception as error:
        return error


def spills_of(kernel: Any) -> int:
    """Known once a kernel is loaded onto the device, which raises where it has no room there."""
    load = getattr(kernel, "_init_handles", None)
    if load is not None:
        load()
    return int(getattr(kernel, "n_spills", 0) or 0)


_SAID: set[str] = set()


def say_once(sentences: Iterable[str]) -> None:
    """A warning for every sentence that has not been said."""
    for text in sentences:
        if text not in _SAID:
            _SAID.add(text)
            warnings.warn(f"{text}; nothing near it spills less", stacklevel=2)
