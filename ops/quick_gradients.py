"""Calls with gradients, replayed (ops/replay.py): forward and backward past the dispatcher.

A registered operator costs its caller several hundred microseconds when gradients are wanted: it goes through
autograd's and torch.library's wrappers in Python, twice. Calls like an earlier one need none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.library import Operator, plain_types
from linalg_dsl.ops.quick import alone, look, prepared, recorded, stage_key
from linalg_dsl.ops.replay import Key, Recorder, ReplayCache, describe, is_plain
from linalg_dsl.planner.outputs import one_or_all

Described = tuple[Key, list[int]]
"""What a run is alike in, and the addresses of its tensors."""


@dataclass(frozen=True)
class _Run:
    """What a forward and its backward are of, beside their tensors."""

    operator: Operator
    numbers: tuple[float, ...]
    want: bool
    described: Described
    """Of the forward."""


class QuickGradients:
    """The runs of one stage with gradients: outputs, states and all gradients as the operator has them."""

    def __init__(self, spec: RecurrenceSpec) -> None:
        self.spec = spec
        self.forwards = ReplayCache()
        self.backwards = ReplayCache()
        self.inputs = len(spec.inputs)
        self.given = self.inputs + len(spec.states)
        self.outputs = len(spec.outputs)

    def __call__(
        self,
        operator: Operator,
        given: Sequence[Tensor | None],
        numbers: Sequence[float],
        want: bool,
        offsets: Tensor | None = None,
    ) -> list[Tensor] | None:
        """The outputs, then the states if ``want``, with their gradients; None if to be run otherwise."""
        found = prepared(given, numbers, want, offsets)
        if found is None:
            return None
        together, key, addresses = found
        if self.forwards.get(key) is None and not self.forwards.is_due(key):
            return None
        look(self.spec, together)
        run = _Run(operator, tuple(numbers), want, (key, addresses))
        return list(_Differentiated.apply(self, run, together, *given, offsets))  # type: ignore[no-untyped-call]

    def forward(self, run: _Run, leaves: Sequence[Tensor | None]) -> list[Tensor]:
        """Outputs, states if wanted, what the backward takes."""
        key, addresses = run.described
        replay = self.forwards.get(key)
        if replay is not None:
            return replay(leaves, addresses)
        results, replay = recorded(self.spec, run.operator, leaves, run.numbers, run.want, save=True)
        self.forwards.keep(key, replay)
        return results

    def backward(self, run: _Run, leaves: Sequence[Tensor | None], count: int) -> list[Tensor] | None:
        """Gradients of all tensors, then those of the initial states there are; None if not to be run so.

        ``leaves``: those of the forward, ``count`` residuals, cotangents of the outputs and of the states.
        """
        leaves = [None if x is None else x.contiguous() for x in leaves]
        found = describe(leaves)
        if found is None:
            return None
        key, addresses = stage_key(found[0], leaves, run.numbers, run.want), found[1]
        replay = self.backwards.get(key)
        if replay is not None:
            return replay(leaves, addresses)
        due = self.backwards.is_due(key)
        given = alone(leaves)
        tensors = tuple(x for x in given[: self.inputs] if x is not None)
        initials, (offsets, *rest) = tuple(given[self.inputs : self.given]), given[self.given :]
        outputs = [x for x in rest[count : count + self.outputs] if x is not None]
        consts, d_finals = run.operator.numbers(tensors, run.numbers), tuple(rest[count + self.outputs :])
        arguments = (tensors, initials, consts, offsets, rest[:count], one_or_all(outputs), d_finals)
        module = run.operator.module
        if not due:
            with plain_types(tensors[0]):
                return self._gradients(tensors, *module.backward(*arguments))[0]
        known = {id(x): (i, 0) for i, x in enumerate(given) if x is not None}
        with plain_types(tensors[0]), Recorder(known, len(leaves)) as recorder:
            grads, d_initials = module.backward(*arguments, launch=recorder.launch)
        results, whole = self._gradients(tensors, grads, d_initials)
        self.backwards.keep(key, recorder.replay(results, tensors[0]) if whole else None)
        return results

    @staticmethod
    def _gradients(
        tensors: Sequence[Tensor], grads: Sequence[Tensor | None], d_initials: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], bool]:
        """Zeros where nothing depends on a tensor; whether there are none such."""
        found = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, tensors, strict=True)]
        whole = all(g is not None for g in grads)
        return [*found, *(d for d in d_initials if d is not None)], whole


class _Differentiated(torch.autograd.Function):
    """A run of one stage."""

    @staticmethod
    def forward(
        ctx: Any,
        quick: QuickGradients,
        run: _Run,
        together: Sequence[Tensor | None],
        *leaves: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """``together``: the leaves, copied where they do not lie together; the copies are not kept."""
        results = quick.forward(run, together)
        count = quick.outputs + (quick.given - quick.inputs if run.want else 0)
        ctx.quick, ctx.run = quick, run
        ctx.has = tuple(x is not None for x in leaves)
        ctx.like = tuple((x.shape, x.dtype, x.device) for x in results[: quick.outputs])
        ctx.set_materialize_grads(False)  # a state that nobody used has no gradient, rather than one of zeros
        ctx.save_for_backward(*(x for x in leaves if x is not None), *results[count:])
        return tuple(results[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        quick: QuickGradients = ctx.quick
        run: _Run = ctx.run
        saved = list(ctx.saved_tensors)
        leaves = [saved.pop(0) if has else None for has in ctx.has]
        d_outputs = [
            torch.zeros(shape, dtype=dtype, device=device) if d is None else d
            for d, (shape, dtype, device) in zip(cotangents[: quick.outputs], ctx.like, strict=True)
        ]
        states = quick.given - quick.inputs
        d_states = list(cotangents[quick.outputs :]) if run.want else [None] * states
        rest = [*saved, *d_outputs, *d_states]
        grads = None
        if not torch.is_grad_enabled() and is_plain():
            grads = quick.backward(run, [*leaves, *rest], len(saved))
        if grads is None:
            # a graph of the backward is asked for, which the operator refuses when it is used; or something
            # else looks on
            *tensors, offsets = leaves
            operator = getattr(torch.ops.linalg_dsl, f"{run.operator.name}_backward")
            grads = operator(*tensors, list(run.numbers), offsets, True, saved, *d_outputs, *d_states)
        found = iter(grads)
        return (None, None, None, *(next(found) if has else None for has in ctx.has[:-1]), None)
