"""Tests and scripts of a GPU walked where there is none: ``LINALG_DSL_GPU_DRY=1`` (CONTRIBUTING.md).

Everything runs as on a GPU but for the kernels, which are compiled and launched into nothing. So no number is
right, and none is compared: an ``assert`` of a test evaluates its condition and goes on, known-answer runs
pass, the step loop is not run, and inductor is left out of ``torch.compile``. What is left to fail is all
that raises, launches that do not fit their kernel (driver.py), and replayed launches that are not those
which Triton would make of the same tensors.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

ENVIRONMENT_VARIABLE = "LINALG_DSL_GPU_DRY"
HELPERS = ("kernel_cases", "runtime_cases", "step_cases", "stacked_recurrences", "module_files")
_SMALLER = "WHEN_DRY"
"""A test's module says with a table of this name which of its constants are smaller here."""
_STARTED: list[bool] = []


def asked_for() -> bool:
    """Whether this process is to be one with a GPU that is not there."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "0") not in ("", "0")


def start() -> None:
    """Before anything asks whether there is a GPU; for the rest of this process, and once in it."""
    if _STARTED:
        return
    _STARTED.append(True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError(f"unset TRITON_INTERPRET: with {ENVIRONMENT_VARIABLE} kernels are compiled")
    from . import cuda, driver

    cuda.install()
    driver.install()
    _compare_nothing()
    _compare_replays()
    _workers_are_small()
    _compile_without_inductor()


def replace_in(where: Any, **names: Any) -> None:
    """Puts other functions into a module or class; each has to be there."""
    for name, value in names.items():
        if not hasattr(where, name):
            raise AttributeError(f"{where.__name__} has no {name}; the dry run is out of date")
        setattr(where, name, value)


def _compile_without_inductor() -> None:
    """``torch.compile`` traces and lowers as ever; the kernels that inductor would write are not ours."""
    import torch

    compile_all = torch.compile

    def traced(model: Any = None, *, backend: Any = "inductor", **options: Any) -> Any:
        return compile_all(model, backend="aot_eager" if backend == "inductor" else backend, **options)

    replace_in(torch, compile=traced)


def _workers_are_small() -> None:
    """Processes that a script starts read it again."""
    from multiprocessing import spawn

    read = vars(spawn)["_fixup_main_from_path"]

    def read_small(path: str) -> None:
        read(path)
        module = sys.modules["__mp_main__"]
        make_smaller(module)
        for value in list(vars(module).values()):  # whose functions look into another dictionary
            if isinstance(value, FunctionType) and value.__module__ == "__mp_main__":
                value.__globals__.update(getattr(module, _SMALLER, {}))

    replace_in(spawn, _fixup_main_from_path=read_small)


def _compare_nothing() -> None:
    import torch

    from linalg_dsl.ops import bench, bench_shapes, check, decode_check, op, selfcheck

    def narrow(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(narrow(y) for y in x) if type(x) in (list, tuple) else x
        return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x

    def as_reference(self: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return self(*map(narrow, args), **{n: narrow(x) for n, x in kwargs.items()})

    def wanted(op: Any, leaves: Any, weights: Any, *rest: Any) -> Any:
        return tuple(w.double().cpu() for w in weights), [x.detach().double().cpu() for x in leaves.values()]

    # the step loop would take most of the time, for numbers that are not compared
    replace_in(op.CompiledOp, reference=as_reference)
    replace_in(check, reference_results=wanted)
    replace_in(check, short_operand_results=lambda *given: [y for x in wanted(*given) for y in x])
    for module in (selfcheck, decode_check):
        replace_in(module, relative_error=lambda got, want, scale=0.0: 0.0)
    _say_that_properties_hold()
    bench.RATES_SIZES["cuda"] = (64, 1 << 16)
    for name, shape in bench_shapes.SHAPES.items():
        bench_shapes.SHAPES[name] = replace(shape, B=min(shape.B, 2), T=min(shape.T, 512), H=min(shape.H, 2))
    replace_in(torch.testing, assert_close=lambda *args, **kwargs: None)


def _say_that_properties_hold() -> None:
    import torch

    from linalg_dsl.testing import (
        compare,
        properties_algebra,
        properties_calls,
        properties_decode,
        properties_precision,
        properties_reference,
        properties_structure,
    )  # fmt: skip

    def nothing(got: Any, want: Any, *rest: Any) -> Any:
        return torch.zeros_like(want)

    replace_in(compare, ratios=nothing)
    replace_in(properties_algebra, ratios=nothing)
    replace_in(properties_precision, relative_errors=lambda *given: {})
    replace_in(properties_reference, unlike_numbers=lambda got, want, limit: torch.zeros_like(want).bool())
    for module in (properties_calls, properties_decode, properties_structure):
        replace_in(module, demand_bits=lambda *given: None)


def _compare_replays() -> None:
    """A replayed launch passes what Triton's own launch on the same tensors does."""
    from torch.utils._python_dispatch import _disable_current_modes

    from linalg_dsl.ops import replay

    from .driver import LAUNCHES, BadLaunch

    ours = replay.CompiledLaunch.__call__

    def both(launch: Any, tensors: Any, addresses: Any, stream: int) -> None:
        LAUNCHES.last = None
        ours(launch, tensors, addresses, stream)
        found = LAUNCHES.last
        with _disable_current_modes():
            launch.again(tensors, launch.fill)
        if found != LAUNCHES.last:
            raise BadLaunch(f"replayed {found}, and Triton launches {LAUNCHES.last}")

    replace_in(replay.CompiledLaunch, __call__=both)


# -- pytest ----------------------------------------------------------------------------------------
class _Softened(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.copy_location(ast.Expr(self.visit(node.test)), node)


def soften_asserts(register: Callable[..., None]) -> None:
    """From now on pytest reads the ``assert`` of tests and helpers as expressions without consequence."""
    from _pytest.assertion import rewrite

    def softened(tree: ast.Module, *args: Any, **kwargs: Any) -> None:
        _Softened().visit(tree)
        ast.fix_missing_locations(tree)

    sys.dont_write_bytecode = True
    replace_in(rewrite, rewrite_asserts=softened, _read_pyc=lambda *args, **kwargs: None)
    register(*HELPERS)


def compare_nothing_in_helpers() -> None:
    """Once the helpers of tests are there: errors of theirs are none, so that no excuse is looked for."""
    for module, name in (("kernel_cases", "relative"), ("runtime_cases", "worst")):
        if module in sys.modules:
            replace_in(sys.modules[module], **{name: lambda *args: 0.0})


def make_smaller(module: ModuleType) -> None:
    """Constants of a test's module that say how much memory or time it takes."""
    for name, value in getattr(module, _SMALLER, {}).items():
        if not hasattr(module, name):
            raise AttributeError(f"{module.__name__}.{_SMALLER}: there is no constant {name}")
        setattr(module, name, value)
