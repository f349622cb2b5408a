"""A real text as input: bytes through a fixed random embedding, and the step loop over it in pieces.

Letters come back all the time, so keys are alike and correlated as they are in life, which random
keys never are, and a sequence is several thousand tokens long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.carried import state_labels
from linalg_dsl.ops.check import CheckReport, compare, gradient_bound, output_bound
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.reference import reference

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp

SEGMENT = 128


@dataclass(frozen=True)
class LongRun:
    """What came of one run: ``states`` is all that is carried on, ``gradients`` of every input and param."""

    o: Tensor
    states: tuple[Tensor, ...]
    gradients: dict[str, Tensor]


def check_text(
    op: CompiledOp,
    text: bytes,
    H: int = 2,
    K: int = 32,
    V: int = 32,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    consts: Mapping[str, float] | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda tokens: None,
) -> CheckReport:
    """The compiled op over a text, forward and backward, against the float64 step loop.

    ``progress`` is told of tokens that the step loop has done, twice the length of the text in all.
    """
    spec, where = op.spec, torch.device(device)
    given = dict(consts or {})
    tensors = embedded_text(spec, text, H, K, V, dtype=dtype, seed=seed, consts=given)
    leaves = {name: x.to(where).requires_grad_() for name, x in tensors.items()}
    o, last = op(**leaves, output_final_state=True, **given)
    states = (last,) if isinstance(last, Tensor) else tuple(last)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (o, *states)]
    found = torch.autograd.grad([o, *states], list(leaves.values()), [w.to(where) for w in weights])
    exact = step_loop(spec, tensors, weights[0], weights[1:], consts=given, progress=progress)
    backend = op.backend_for(where.type, dtype == torch.float64)
    bound = gradient_bound(backend, dtype)
    scale = max(float(d.norm()) for d in exact.gradients.values())
    rows = [compare("o", o, exact.o, output_bound(backend, dtype))]
    for name, got, want in zip(state_labels(spec, "final state"), states, exact.states, strict=True):
        rows.append(compare(name, got, want, output_bound(backend, dtype)))
    for name, got in zip(leaves, found, strict=True):
        rows.append(compare(f"d {name}", got, exact.gradients[name], bound, scale))
    shape = f"a text of {len(text)} bytes, H {H} K {K} V {V}"
    return CheckReport(spec.name, backend, str(where), str(dtype).removeprefix("torch."), shape, tuple(rows))


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
    d_states: Sequence[Tensor],
    *,
    consts: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> LongRun:
    """Output, final states and gradients of the float64 step loop over a long sequence.

    The loop is run twice, the second time in segments from the last to the first, so that memory
    holds one segment's intermediate results. ``progress`` is told of tokens done, 2 T in all.
    """
    exact = {name: x.double() for name, x in tensors.items()}
    timed = {i.name for i in spec.inputs if i.timed}
    length = d_o.shape[1]
    starts = list(range(0, length, SEGMENT))
    states: list[tuple[Tensor, ...] | None] = [None]
    outputs = []
    with torch.no_grad():
        for begin in starts:
            o, after = _piece(spec, _cut(exact, timed, begin), states[-1], consts)
            outputs.append(o)
            states.append(after)
            progress(o.shape[1])
    gradients = {name: torch.zeros_like(x) for name, x in exact.items()}
    cotangents = [d.double() for d in d_states]
    for n in reversed(range(len(starts))):
        pieces = _cut(exact, timed, starts[n])
        leaves = {name: x.detach().requires_grad_() for name, x in pieces.items()}
        known = tuple(x.detach().requires_grad_() for x in states[n] or ())
        o, after = _piece(spec, leaves, known or None, consts)
        d_piece = d_o[:, starts[n] : starts[n] + SEGMENT].double()
        found = torch.autograd.grad(
            [o, *after], [*leaves.values(), *known], [d_piece, *cotangents], allow_unused=True
        )
        targets = _cut(gradients, timed, starts[n])
        for name, d in zip(leaves, found, strict=False):
            if d is not None:
                targets[name] += d
        if known:
            cotangents = [
                torch.zeros_like(x) if d is None else d
                for x, d in zip(known, found[len(leaves) :], strict=True)
            ]
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
    start: tuple[Tensor, ...] | None,
    consts: Mapping[str, float] | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    o, last = reference(spec, tensors, initial_state=start, output_final_state=True, consts=consts)
    return o, (last,) if isinstance(last, Tensor) else tuple(last)
