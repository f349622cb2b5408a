"""How far rounding moves each element of the results of the plan's form, as against the step loop.

A plan of one token applies matrices to states one after the other (S - k (k^T S)), where the step loop
multiplies their product, so that other numbers cancel. A chunk form takes what a token erases from the
state before the *chunk*: where most of that state has been erased meanwhile, two numbers of its size
cancel, which the step loop never sees. And a gate's gradient is a difference of sums over the chunk. So the
plan of the spec, carried out in float64 by its plain PyTorch module, is run twice: as it is, and with every
result of every tensor operation, forward and backward, multiplied by 1 + u xi. Their difference over u is
the condition of each element in this form.

Only the *difference* of the two runs counts. A plan that computes something else has the same small
difference, and is found wrong by the step loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.algebra.expr import Call
from linalg_dsl.algebra.traverse import walk
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.driver import assemble
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import axis_sizes, bind, const_numbers
from linalg_dsl.ops.carried import started, state_labels
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.stage_op import StageOp
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.outputs import each, one_or_all
from linalg_dsl.planner.step_form import StepForm

CHUNK = 64


@lru_cache(maxsize=128)
def plan_op(spec: RecurrenceSpec) -> CompiledOp:
    """The spec compiled for the torch backend."""
    return assemble(spec, CompileOptions("torch", CHUNK))


def chunk_op(spec: RecurrenceSpec) -> CompiledOp | None:
    """The same; None where no stage of it has a chunk form."""
    op = plan_op(spec)
    return None if all(isinstance(s.artefacts().form, StepForm) for s in op.stage_ops) else op


@lru_cache(maxsize=128)
def counts_small_gates_as_floor(spec: RecurrenceSpec) -> bool:
    """Whether some gate is taken as the logarithm of its size, where ``FLOOR`` stands for all below it."""
    op = chunk_op(spec)
    forms = [] if op is None else [s.artefacts().form for s in op.stage_ops]
    return any(
        isinstance(node, Call) and node.function == "log_size"
        for form in forms
        if isinstance(form, CanonicalRecurrence)
        for rec in form.recurrences
        for decay in rec.decays
        for node in walk(decay.log)
    )


def chunk_runs(
    op: CompiledOp,
    leaves: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    cu_seqlens: Tensor | None,
    consts: Mapping[str, float],
    inside: AbstractContextManager[Any],
    gradients: bool = True,
) -> dict[str, Tensor]:
    """Results and gradients by label, computed ``inside`` a mode."""
    spec = op.spec
    names = [d.name for d in spec.inputs]
    labels = state_labels(spec, "initial_state")
    with torch.set_grad_enabled(gradients):
        given = {n: x.detach().requires_grad_(gradients) for n, x in leaves.items()}
        with inside:
            moved = {n: x * 1.0 for n, x in given.items()}
            initial = [moved[n] for n in labels] if labels[0] in moved else None
            call = bind(spec, [moved[n] for n in names], consts, initial, cu_seqlens)
            runs = [partial(_stage, s, call.consts) for s in op.stage_ops]
            o, states = op.run_stages(runs, call, cu_seqlens, True)
            results = dict(zip(("o", *state_labels(spec, "final state")), (o, *states), strict=True))
            used = {n: x for n, x in results.items() if x is not None and x.requires_grad}
            grads: Sequence[Tensor | None] = ()
            if gradients:
                grads = torch.autograd.grad(
                    list(used.values()),
                    list(given.values()),
                    [weights[n].to(x) for n, x in used.items()],
                    allow_unused=True,
                )
    found = {n: x.detach() for n, x in results.items() if x is not None}
    for (name, leaf), grad in zip(given.items(), grads, strict=gradients):
        found[f"d {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def _stage(
    stage: StageOp,
    consts: tuple[tuple[str, float], ...],
    tensors: Sequence[Tensor],
    initials: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    want: bool,
) -> tuple[Any, tuple[Tensor | None, ...]]:
    """One stage by its PyTorch module, called as it is so that its operations are seen."""
    names = {c.name for c in stage.spec.consts}
    own = tuple((n, v) for n, v in consts if n in names)
    general = stage.operator("torch")
    fixed = tuple((n, v) for n, v in own if n not in general.consts)
    module = (stage.operator("torch", fixed) if fixed else general).module
    sizes = axis_sizes(stage.spec, tensors)
    numbers: dict[str, float] = {**sizes, **const_numbers(stage.spec, sizes, dict(own))}
    heads = max(x.shape[2 if d.timed else 0] for x, d in zip(tensors, stage.spec.inputs, strict=True))
    count = tensors[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    whole = {n: int(x) for n, x in numbers.items() if x == int(x)}
    begin = started(stage.spec, initials, {**whole, "N": count, "H": heads}, tensors[0])
    values = tuple(numbers[c] for c in module.CONSTS)
    run: Callable[..., tuple[Tensor, ...]] = _Module.apply
    results = run(module, values, cu_seqlens, len(tensors), *tensors, *begin)
    outputs = len(stage.spec.outputs)
    return one_or_all(results[:outputs]), tuple(results[outputs:])


class _Module(torch.autograd.Function):
    """Forward and backward of a generated module, without an operator around them."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        values: tuple[float, ...],
        offsets: Tensor | None,
        count: int,
        *given: Any,
    ) -> tuple[Tensor, ...]:
        tensors = tuple(x.contiguous() for x in given[:count])
        initials = tuple(None if x is None else x.contiguous() for x in given[count:])
        o, states, residuals = module.forward(tensors, initials, values, offsets, True, True)
        ctx.kept = (module, values, offsets, tensors, initials, residuals, len(each(o)))
        return (*each(o), *states)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        module, values, offsets, tensors, initials, residuals, outputs = ctx.kept
        d_outputs = one_or_all([d.contiguous() for d in grads[:outputs]])
        d_finals = tuple(None if d is None else d.contiguous() for d in grads[outputs:])
        found, d_initials = module.backward(
            tensors, initials, values, offsets, residuals, d_outputs, d_finals
        )
        return None, None, None, None, *found, *d_initials
