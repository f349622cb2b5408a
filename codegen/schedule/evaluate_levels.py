"""Runs a kernel plan on two levels in PyTorch: super-chunks, their maps, the scan, the same walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.schedule.evaluate import Call, KernelResults, Run, must_be_exact
from linalg_dsl.codegen.schedule.kernel_plan import Direction, Kernel
from linalg_dsl.codegen.schedule.two_level import Summary, TwoLevel, first_walk
from linalg_dsl.errors import InternalError


def run_two_level(
    two: TwoLevel,
    tensors: Mapping[str, Tensor],
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
    super_chunk: int = 4,
    d_o: Any = None,
    d_state: Tensor | None = None,
    consts: Mapping[str, float] | None = None,
    *,
    exact: bool = True,
    segment: int = 8,
    blocks: int = 2,
) -> KernelResults:
    """As ``evaluate.run_kernels``, with super-chunks of ``super_chunk`` chunks."""
    plan = two.plan
    call = Call(plan, tensors, dict(consts or {}), chunk_size)
    run = Run(call, exact or must_be_exact(plan), segment, blocks)
    spans = [
        range(a, min(a + super_chunk, len(call.bounds))) for a in range(0, len(call.bounds), super_chunk)
    ]
    levels = _Levels(two, run, spans)
    state = call.zero_state() if initial_state is None else initial_state
    ((state_name, *_),) = [c for c in plan.plan.carries if c[1] == "forward"]
    starts: list[Tensor] = []
    final = state
    for kernel in plan.forward:
        if kernel is first_walk(plan.forward, "forward"):
            levels.summarise()
            starts, final = levels.scan(two.forward, state, "forward")
        levels.kernel(kernel, starts)
    o = call.outputs()
    if not plan.backward:
        return KernelResults(o, {state_name: final}, {})
    call.take_cotangents(o, d_o)
    d_starts: list[Tensor] = []
    d_first = torch.zeros_like(final) if d_state is None else d_state
    for kernel in plan.backward:
        if kernel is first_walk(plan.backward, "reverse"):
            if two.reverse is None:
                raise InternalError(f"{plan.plan.name} has a backward and no summary of it")
            d_starts, d_first = levels.scan(two.reverse, d_first, "reverse")
        levels.kernel(kernel, starts if kernel.direction == "forward" else d_starts)
    return KernelResults(o, {state_name: final}, {**call.gradients(), "initial_state": d_first})


@dataclass
class _Levels:
    two: TwoLevel
    run: Run
    spans: Sequence[range]
    matrices: Sequence[Tensor | None] = ()
    factors: Sequence[Tensor | None] = ()

    def kernel(self, kernel: Kernel, starts: Sequence[Tensor]) -> None:
        """A prep once, a walk over every super-chunk from its own start."""
        if kernel.family == "prep":
            self.run.kernel(kernel, ())
            return
        for span, start in zip(self.spans, starts, strict=True):
            self.run.kernel(kernel, (start,), span)

    def summarise(self) -> None:
        """The maps of all super-chunks."""
        two = self.two
        self.matrices = [None if two.matrix is None else self._walk(two.matrix, span) for span in self.spans]
        self.factors = [None if two.factors is None else self._walk(two.factors, span) for span in self.spans]

    def scan(self, summary: Summary, first: Tensor, direction: Direction) -> tuple[list[Tensor], Tensor]:
        """The state before every super-chunk, in the order of the chunks, and the last one."""
        starts: list[Tensor] = []
        state = first
        each = list(zip(self.spans, self.matrices, self.factors, strict=True))
        for span, matrix, factors in each if direction == "forward" else reversed(each):
            starts.append(state)
            state = self._linear(state, matrix, factors, direction) + self._walk(summary, span)
        return starts if direction == "forward" else starts[::-1], state

    def _linear(
        self, state: Tensor, matrix: Tensor | None, factors: Tensor | None, direction: Direction
    ) -> Tensor:
        """F S o D, or the adjoint. The matrix lies as its walk leaves it: [from, to] where V is erased."""
        if factors is not None:
            state = state * factors
        if matrix is None:
            return state
        turned = matrix if direction == "forward" else matrix.mT
        return turned @ state if self.two.erased == "K" else state @ turned

    def _walk(self, summary: Summary, span: range) -> Tensor:
        call = self.run.call
        wide = {
            axis: 1 if size == 1 else call.wide[size]
            for axis, size in (("K", summary.rows), ("V", summary.columns))
        }
        shape = (call.batch, call.heads, wide["K"], wide["V"])
        start = call.like.new_zeros(shape)
        if summary.start == "ones":
            start = torch.ones_like(start)
        elif summary.start == "identity":
            start = torch.eye(wide["K"], dtype=start.dtype, device=start.device).expand(shape)
        after = self.run.kernel(summary.kernel, (start,), span, wide)
        if not after:
            raise InternalError(f"{summary.kernel.name} is no walk")
        return after[0]
