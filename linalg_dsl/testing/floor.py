"""What a type costs: the error that a chunk form has when nothing but its type is at fault.

The floor of a short type is the error of the exact chunk form whose matrix products take operands rounded
to that type and accumulate in float32, everything else in float32, on inputs that are exact: a kernel on
tensor cores cannot be asked for less. It is measured by carrying the plan out like that.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linalg_dsl.ops.carried import state_labels
from linalg_dsl.ops.reference import reference
from linalg_dsl.testing.cases import Case
from linalg_dsl.testing.chunk_condition import chunk_op, chunk_runs
from linalg_dsl.testing.rounding import UNIT
from linalg_dsl.testing.watch import rehearsing

_PRODUCTS = ("aten::mm", "aten::bmm", "aten::matmul", "aten::baddbmm", "aten::addmm")


class ShortOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Matrix products round their operands to a type; sums stay in the type of the tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _PRODUCTS:
            args = tuple(self._short(x) for x in args)
        return func(*args, **(kwargs or {}))

    def _short(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != self.dtype:
            return x.to(self.dtype).to(x.dtype)
        return x


def chunk_floor(case: Case, want: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 error, by result, of the chunk form with operands of products in the case's type.

    ``want`` are the exact results. Where there is no chunk form, products have no short operands, and the
    floor is that of the float32 step loop. Outputs and gradients of inputs are rounded to the case's type.
    """
    op = chunk_op(case.spec)
    leaves = {n: x.float() for n, x in {**case.tensors, **case.states}.items()}
    if op is None:
        found = step_loop(case, torch.float32)
    else:
        offsets = case.shape.offsets
        cu = None if offsets is None else torch.tensor(offsets)
        weights = {n: w.float() for n, w in case.weights.items()}
        found = chunk_runs(op, leaves, weights, cu, case.consts, ShortOperands(case.dtype))
    short = {"o", *(f"d {n}" for n in case.tensors)}
    rounded = {n: x.to(case.dtype) if n in short else x for n, x in found.items() if n in want}
    return relative_errors(case, rounded, want)


def step_loop(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Results and gradients of the step loop in a type."""
    given = {**case.tensors, **case.states}
    leaves = {n: x.detach().to(dtype, copy=True).requires_grad_() for n, x in given.items()}
    labels = state_labels(case.spec, "initial_state")
    offsets = case.shape.offsets
    o, last = reference(
        case.spec,
        {d.name: leaves[d.name] for d in case.spec.inputs},
        initial_state=[leaves[n] for n in labels] if case.states else None,
        output_final_state=True,
        cu_seqlens=None if offsets is None else torch.tensor(offsets),
        consts=case.consts,
        dtype=dtype,
    )
    results = dict(zip(case.labels, [o, *([last] if isinstance(last, Tensor) else last)], strict=True))
    used = [n for n in results if results[n].requires_grad]
    grads = torch.autograd.grad(
        [results[n] for n in used],
        list(leaves.values()),
        [case.weights[n].to(dtype) for n in used],
        allow_unused=True,
    )
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results[f"d {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return {n: x.detach() for n, x in results.items()}


SINGLE = 5e-5
"""Relative L2 error of any result in float32, also at the nasty ends."""


def bounds(case: Case, want: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """(error of the yardstick, relative L2 error that is allowed) of every result of a case.

    Float32: ``SINGLE``, or twice the error of the float32 step loop where that is larger (no bound where the
    loop has no numbers); short types: twice their floor.
    """
    if case.dtype in (torch.float32, torch.float64):
        loop = relative_errors(case, step_loop(case, case.dtype), want)
        return {n: (e, inf if e != e else max(SINGLE, 2 * e)) for n, e in loop.items()}
    return {n: (e, inf if e != e else 2 * e) for n, e in chunk_floor(case, want).items()}


NEGLIGIBLE = 1e-6
"""A gradient whose norm is below this part of the largest is measured against the largest."""
ERASED = 1e-3
"""What is left of a state (or of its gradient) below this part of what came in is measured against that.

A chunk form takes what is erased from the state before the chunk: of a state that is nearly gone it keeps
the digits of what it was.
"""


def least_size(case: Case, want: Mapping[str, Tensor], name: str) -> float:
    """The norm below which a result is next to nothing beside what it came from, or for its type."""
    kind = torch.float64 if case.dtype == torch.float64 else torch.float32
    scale = torch.finfo(kind).smallest_normal / UNIT[kind]  # what is not below loses no digits to denormals
    if name.startswith("d "):
        largest = max(float(x.norm()) for n, x in want.items() if n.startswith("d "))
        if float(want[name].norm()) < NEGLIGIBLE * largest:
            scale = max(scale, largest)
    came = None
    if name.startswith("final state"):
        came = case.states.get(name.replace("final state", "initial_state"))
    if name.startswith("d initial_state"):
        came = case.weights.get(name.removeprefix("d ").replace("initial_state", "final state"))
    return scale if came is None else max(scale, ERASED * float(came.double().norm()))


def relative_errors(
    case: Case, results: Mapping[str, Tensor], want: Mapping[str, Tensor]
) -> dict[str, float]:
    """Relative L2 error of every result, measured against ``least_size`` where it is smaller than that."""
    if rehearsing():
        return dict.fromkeys(results, 0.0)
    found = {}
    for name, got in results.items():
        error = float((got.double() - want[name]).norm())
        found[name] = error / max(float(want[name].norm()), least_size(case, want, name))
    return found
