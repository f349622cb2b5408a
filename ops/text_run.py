"""A real text as input: bytes through a fixed random embedding, and the step loop over it in pieces.

Letters come back all the time, so keys are alike and correlated as they are in life, which random
keys never are, and a sequence is several thousand tokens long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.reference import reference

SEGMENT = 128


@dataclass(frozen=True)
class LongRun:
    """What came of one run: ``gradients`` holds every input and param, by name."""

    o: Tensor
    state: Tensor
    gradients: dict[str, Tensor]


def embedded_text(
    spec: RecurrenceSpec,
    text: bytes,
    H: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    consts: Mapping[str, float] | None = None,
) -> dict[str, Tensor]:
    """One token per byte: every input has a table of 256 rows, drawn within its promises.

    Returns tensors [1, T, H, *dims], params [H, *dims]. Raises ArgumentError for an empty text.
    """
    if not text:
        raise ArgumentError("the text is empty")
    index = torch.tensor(list(text))
    tables = draw(spec, 1, 256, H, K, V, dtype=dtype, seed=seed, consts=consts)
    return {i.name: tables[i.name][:, index] if i.timed else tables[i.name] for i in spec.inputs}


def step_loop(
    spec: RecurrenceSpec,
    tensors: Mapping[str, Tensor],
    d_o: Tensor,
    d_state: Tensor,
    *,
    consts: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> LongRun:
    """Output, final state and gradients of the float64 step loop over a long sequence.

    The loop is run twice, the second time in segments from the last to the first, so that memory
    holds one segment's intermediate results. ``progress`` is told of tokens done, 2 T in all.
    """
    exact = {name: x.double() for name, x in tensors.items()}
    timed = {i.name for i in spec.inputs if i.timed}
    length = d_o.shape[1]
    starts = list(range(0, length, SEGMENT))
    states: list[Tensor | None] = [None]
    outputs = []
    with torch.no_grad():
        for begin in starts:
            o, state = _piece(spec, _cut(exact, timed, begin), states[-1], consts)
            outputs.append(o)
            states.append(state)
            progress(o.shape[1])
    gradients = {name: torch.zeros_like(x) for name, x in exact.items()}
    cotangent = d_state.double()
    for n in reversed(range(len(starts))):
        pieces = _cut(exact, timed, starts[n])
        leaves = {name: x.detach().requires_grad_() for name, x in pieces.items()}
        start = states[n]
        known = torch.zeros_like(cotangent) if start is None else start
        known = known.detach().requires_grad_()
        o, state = _piece(spec, leaves, known if start is not None else None, consts)
        wanted = [*leaves.values(), *([known] if start is not None else [])]
        d_piece = d_o[:, starts[n] : starts[n] + SEGMENT].double()
        found = torch.autograd.grad([o, state], wanted, [d_piece, cotangent], allow_unused=True)
        for name, d in zip(leaves, found, strict=False):
            if d is not None:
                target = _cut(gradients, timed, starts[n])[name]
                target += d
        if start is not None and found[-1] is not None:
            cotangent = found[-1]
        progress(o.shape[1])
    last = states[-1]
    if last is None:
        raise InternalError("a step loop without tokens")
    return LongRun(torch.cat(outputs, dim=1), last, gradients)


def _cut(tensors: Mapping[str, Tensor], timed: set[str], begin: int) -> dict[str, Tensor]:
    return {n: x[:, begin : begin + SEGMENT] if n in timed else x for n, x in tensors.items()}


def _piece(
    spec: RecurrenceSpec,
    tensors: Mapping[str, Tensor],
    start: Tensor | None,
    consts: Mapping[str, float] | None,
) -> tuple[Tensor, Tensor]:
    o, state = reference(spec, tensors, initial_state=start, output_final_state=True, consts=consts)
    if not isinstance(state, Tensor):
        raise ArgumentError(f"{spec.name}: a text is run with one state, it has {len(spec.states)}")
    return o, state
