"""A search finds what is faster, never takes what is wrong, outlives what fails, and goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import linalg_dsl as ld
from linalg_dsl.codegen.launch_sizes import LaunchSizes
from linalg_dsl.ops.bench import Shape
from linalg_dsl.ops.launched import Launched
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.tune import modules_of
from linalg_dsl.ops.tune_hands import wrong_numbers
from linalg_dsl.ops.tune_record import Record, length_class
from linalg_dsl.ops.tune_space import Variant, neighbours, rounds, variants
from linalg_dsl.ops.tuned import applied, tune_op

SHAPE = Shape(1, 70, 1, 16, 16)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINALG_DSL_CACHE", str(tmp_path))


class FakeHands:
    """Times that a rule gives for (kernel, warps, chunk size); kernels are not run by it, checks are."""

    def __init__(self, rule: Callable[[str, int, int | None], float]) -> None:
        self.rule = rule
        self.compiled: list[Launched] = []
        self.runs = 0
        self.checked: list[str] = []
        self.broken: Callable[[Launched], str] = lambda launch: ""
        self.wrong: Callable[[CompiledOp], str] = lambda op: ""

    def compile(self, module: ModuleType, launches: Sequence[Launched]) -> list[int | str]:
        self.compiled += launches
        return [self.broken(x) or 0 for x in launches]

    def kernel_times(self, modules: Sequence[Any], run: Callable[[], object]) -> dict[str, float]:
        self.runs += 1
        return {n: self.rule(n, s[1], None) for m in modules for n, s in m.SIZES.items()}

    def whole_time(self, run: Any) -> float:
        return float(self.rule("whole", *run()))

    def fault(self, op: CompiledOp, run: Callable[[], object]) -> str:
        self.checked.append(str(dict(op.options.launch)))
        return self.wrong(op)


def warps_of(op: CompiledOp, name: str, default: int) -> int:
    sizes = dict(op.options.launch).get(f"{op.spec.name}.{name}", LaunchSizes())
    return sizes.warps or default
