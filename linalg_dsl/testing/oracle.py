"""The exact results of a case, and how far rounding of a given size would move each of their elements.

The error model. The step loop runs in float64 on exact inputs: these are the exact results. It runs again
on COPIES replicas with every result of every tensor operation, forward and backward, multiplied by
1 + u xi, xi uniform in [-1, 1] and drawn anew for every element (``rounding.noise_of`` has u). The
deviation of the replicas from the exact run is what independent roundings of relative size u at every
operation make of each element of each result: cancellation, amplification by the recurrence, and their
absence are all in it. Its root mean square over u is the *condition* of the element; times the unit
roundoff of a type it is the error to expect of a computation in that type. After: random rounding as in
CESTAC (Vignes, Math. Comput. Simul. 35, 1993).

The condition in the form that the plan has counts where it is larger (``chunk_condition``). Where matrix
products take operands of a shorter type, further replicas have the inputs of products (all but gates)
perturbed, and their deviation counts with the shorter type's roundoff.

Replicas are heads of their own, which no recurrence mixes, so that one run gives all of them, packed
sequences included.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.ops import FLOOR
from linalg_dsl.testing.cases import Case
from linalg_dsl.testing.chunk_condition import chunk_runs, counts_small_gates_as_floor, plan_op
from linalg_dsl.testing.keep import kept
from linalg_dsl.testing.rounding import UNIT, Noise, Rounding, noise_of, working
from linalg_dsl.testing.watch import REFERENCE, spent

COPIES = 16
"""Replicas that roundings are tried on: few enough to be cheap, and their mean square is never near 0."""


@dataclass
class Oracle:
    """Exact results by name, in float64 on the CPU: ``o``, final states, ``d NAME`` of every leaf.

    The conditions are found when they are first asked for: most results are far nearer than they admit.
    """

    case: Case
    want: dict[str, Tensor]
    gradients: bool
    copies: int
    seed: int

    @cached_property
    def of_inputs(self) -> dict[str, Tensor]:
        """The deviation of each element under relative roundings of size 1 of the inputs of products."""
        noise = _InputNoise(self.case, Noise(self.seed + 1))
        loop = _step_loop(self.case, 1 + self.copies, self.gradients, nullcontext(), noise)
        blocks = _blocks(self.case, loop, 1 + self.copies)
        return {
            n: _deviation(self.want[n], parts[1:], noise_of(self.case.dtype)) for n, parts in blocks.items()
        }

    @cached_property
    def condition(self) -> dict[str, Tensor]:
        """The deviation of each element under relative roundings of size 1 at every operation."""
        case, copies, gradients = self.case, self.copies, self.gradients
        noise = Noise(self.seed)
        size = noise_of(case.dtype)
        # a unit roundoff of float32 is to its smallest normal number what the size is to the floor
        floor = 0.0 if case.dtype == torch.float64 else 2.0**-126 * size / UNIT[torch.float32]
        loop = Rounding(noise, size, floor)
        if counts_small_gates_as_floor(case.spec):
            # said in explain: sizes of gates below FLOOR count as FLOOR
            loop = Rounding(noise, size, FLOOR * size / UNIT[working(case.dtype)], everywhere=True)
        replicas = _blocks(case, _step_loop(case, copies, gradients, loop), copies)
        found = {n: _deviation(x, replicas[n], size) for n, x in self.want.items()}
        if not case.shape.T:
            return found
        op = plan_op(case.spec)
        offsets = case.shape.offsets
        cu = None if offsets is None else torch.tensor(offsets)
        runs = []
        for count, inside in ((1, nullcontext()), (copies, Rounding(noise, size, floor))):
            leaves, weights = _leaves(case, count), _weights(case, count)
            with spent(REFERENCE):
                results = chunk_runs(op, leaves, weights, cu, case.consts, inside, gradients)
            runs.append(_blocks(case, results, count))
        plain, moved = runs
        return {n: torch.maximum(x, _deviation(plain[n][0], moved[n], size)) for n, x in found.items()}


def exact(case: Case, *, gradients: bool = True, copies: int = COPIES, seed: int = 0) -> Oracle:
    """Runs the step loop of the case's spec on its (rounded) inputs.

    What a gradient is of is weighed as ``case.weights`` says; ``copies`` is how many replicas conditions are
    measured on.
    """

    def found() -> Oracle:
        blocks = _blocks(case, _step_loop(case, 1, gradients, nullcontext()), 1)
        own = replace(case)  # whose cotangents stay as they are now
        own.weights.update({n: w.clone() for n, w in case.weights.items()})
        return Oracle(own, {n: parts[0] for n, parts in blocks.items()}, gradients, copies, seed)

    return kept(case, ("exact", gradients, copies, seed), found)


def step_loop(case: Case) -> list[Tensor]:
    """Output and final states of the step loop in the type that the case is computed in."""
    offsets = case.shape.offsets
    with torch.no_grad(), spent(REFERENCE):
        o, last = reference(
            case.spec,
            case.tensors,
            initial_state=list(case.states.values()) if case.states else None,
            output_final_state=True,
            cu_seqlens=None if offsets is None else torch.tensor(offsets),
            consts=case.consts,
            dtype=working(case.dtype),
        )
    return [o, *([last] if isinstance(last, Tensor) else last)]


class _InputNoise:
    """Relative roundings of the inputs of products, in all blocks of heads but the first."""

    def __init__(self, case: Case, noise: Noise) -> None:
        self.gates = {d.name for d in case.spec.inputs if d.kind != "plain"}
        self.case = case
        self.noise = noise

    def __call__(self, name: str, x: Tensor) -> Tensor:
        axis, H = head_axis(self.case, f"d {name}"), self.case.shape.H
        if name in self.gates or x.shape[axis] == H:
            return x
        factor = torch.ones(x.shape, dtype=x.dtype)
        some = factor.narrow(axis, H, x.shape[axis] - H)
        some += noise_of(self.case.dtype) * self.noise.numbers(tuple(some.shape))
        return x * factor


def _step_loop(
    case: Case,
    blocks: int,
    gradients: bool,
    inside: AbstractContextManager[Any],
    perturb: _InputNoise | None = None,
) -> dict[str, Tensor]:
    with spent(REFERENCE):
        return _results(case, blocks, gradients, inside, perturb)


def _results(
    case: Case,
    blocks: int,
    gradients: bool,
    inside: AbstractContextManager[Any],
    perturb: _InputNoise | None,
) -> dict[str, Tensor]:
    leaves = {n: x.requires_grad_(gradients) for n, x in _leaves(case, blocks).items()}
    names = {d.name for d in case.spec.inputs}
    offsets = case.shape.offsets
    with torch.set_grad_enabled(gradients), inside:
        given = {n: x if perturb is None else perturb(n, x) for n, x in leaves.items()}
        o, last = reference(
            case.spec,
            {n: x for n, x in given.items() if n in names},
            initial_state=[x for n, x in given.items() if n not in names] if case.states else None,
            output_final_state=True,
            cu_seqlens=None if offsets is None else torch.tensor(offsets),
            consts=case.consts,
            dtype=torch.float64,
        )
        lasts = [last] if isinstance(last, Tensor) else list(last)
        results = dict(zip(case.labels, [o, *lasts], strict=True))
        if gradients:
            weights = _weights(case, blocks)
            used = [n for n in results if results[n].requires_grad]
            grads: Sequence[Tensor | None] = torch.autograd.grad(
                [results[n] for n in used],
                list(leaves.values()),
                [weights[n] for n in used],
                allow_unused=True,
            )
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
                results[f"d {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return {n: x.detach() for n, x in results.items()}


def _leaves(case: Case, blocks: int) -> dict[str, Tensor]:
    """Inputs and states in float64, all with as many heads as there are, side by side in blocks."""
    found = {}
    H = case.shape.H
    for name, x in {**case.tensors, **case.states}.items():
        axis = head_axis(case, f"d {name}")
        wide = x.double().repeat_interleave(H // x.shape[axis], dim=axis)
        found[name] = torch.cat([wide] * blocks, dim=axis)
    return found


def _weights(case: Case, blocks: int) -> dict[str, Tensor]:
    return {n: torch.cat([w.double()] * blocks, dim=head_axis(case, n)) for n, w in case.weights.items()}


def head_axis(case: Case, name: str) -> int:
    """Which axis of a result, or of a gradient ``d NAME``, holds the heads."""
    if name == "o":
        return 2
    for decl in case.spec.inputs:
        if name == f"d {decl.name}":
            return 2 if decl.timed else 0
    return 1


def _blocks(case: Case, results: dict[str, Tensor], blocks: int) -> dict[str, Sequence[Tensor]]:
    """Each result split into its blocks of heads, gradients of shared heads summed over each group."""
    found: dict[str, Sequence[Tensor]] = {}
    H = case.shape.H
    for name, x in results.items():
        axis = head_axis(case, name)
        parts: Sequence[Tensor] = torch.split(x, H, dim=axis)
        have = case.heads.get(name.removeprefix("d "), H) if name.startswith("d ") else H
        if have != H:
            shape = (*x.shape[:axis], have, H // have, *x.shape[axis + 1 :])
            parts = [p.reshape(shape).sum(axis + 1) for p in parts]
        found[name] = parts
    return found


def _deviation(base: Tensor, replicas: Sequence[Tensor], size: float) -> Tensor:
    """Root mean square, per unit of rounding."""
    moved = torch.stack([x - base for x in replicas])
    return rms(moved, [0]).squeeze(0).nan_to_num(torch.inf) / size


def rms(x: Tensor, axes: list[int]) -> Tensor:
    """Root mean square over some axes, which are kept; squares of small numbers do not vanish."""
    largest = x.abs().amax(axes, keepdim=True)
    ratio = torch.where(largest > 0, x / largest, 0.0)
    return largest * ratio.square().mean(axes, keepdim=True).sqrt()
