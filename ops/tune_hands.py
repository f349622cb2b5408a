"""What a tuning does to a GPU: compiles side by side, times, compares with the step loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linalg_dsl.ops.bench import graph_of, launch_times, time_call
from linalg_dsl.ops.first_use import compiled_side_by_side, spills_of
from linalg_dsl.ops.launched import Launched

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp


class GpuHands:
    """For the kernels of one call. ``shape`` and ``dtype`` are those of the numbers' check."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = sizes
        self.dtype = dtype
        self.device = device

    def compile(self, module: ModuleType, launches: Sequence[Launched]) -> list[int | str]:
        with torch.cuda.device(self.device):
            out: list[int | str] = []
            for kernel in compiled_side_by_side(module, launches):
                try:
                    if isinstance(kernel, Exception):
                        raise kernel
                    out.append(spills_of(kernel))
                except Exception as error:  # too much shared memory, among others
                    out.append(f"{type(error).__name__}: {str(error)[:300]}")
            return out

    def kernel_times(self, modules: Sequence[ModuleType], run: Callable[[], object]) -> dict[str, float]:
        out: dict[str, float] = {}
        for name, ms in launch_times(modules, run, self.device, budget=0.02):
            out[name] = out.get(name, 0.0) + ms  # a stage that runs twice
        return out

    def whole_time(self, op: CompiledOp, run: Callable[[], object]) -> float:
        replay = graph_of(run, self.device)
        return time_call(replay or run, self.device, 0.1).median

    def fault(self, op: CompiledOp, run: Callable[[], object]) -> str:
        return wrong_numbers(op, self.sizes, self.dtype, self.device) or changing_bits(run)


def wrong_numbers(op: CompiledOp, sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> str:
    """How the op disagrees with the float64 step loop on a short case; empty if it does not."""
    report = op.check(**sizes, dtype=dtype, device=device)
    return "" if report.ok else f"wrong numbers: {str(report).strip()[-400:]}"


def changing_bits(run: Callable[[], object]) -> str:
    """Whether two equal runs differ, which a race does."""
    first, again = (_tensors(run()) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return "" if same else "two equal calls gave other bits"


def _tensors(result: Any) -> list[Tensor]:
    found = [result] if isinstance(result, Tensor) else list(result)
    return [x for x in found if isinstance(x, Tensor)]
