"""Errors of a compiled op against the float64 step loop: output, final state, every gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import bind
from linalg_dsl.ops.carried import carried_dims, state_labels
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.layout import turn_all
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.rounding_floor import BITS, rounding_floor
from linalg_dsl.planner.step_form import StepForm

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp

NEGLIGIBLE = 1e-6
"""A gradient whose norm is below this part of the largest is compared with the largest."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One tensor: relative L2 error, largest error over largest value, and the bound for both.

    ``conditioning`` has the same two errors of a step loop in this type (of one whose products take
    operands of it, for short types), where that was looked at: a recurrence that amplifies rounding so is
    held to twice those. Its largest error is at least what is to be expected of one (``expected_largest``).
    """

    name: str
    l2: float
    largest: float
    bound: float
    conditioning: tuple[float, float] | None = None

    @property
    def ok(self) -> bool:
        if self.l2 <= self.bound and self.largest <= self.bound:
            return True
        if self.conditioning is None:
            return False  # and so for NaN
        l2, largest = (max(self.bound, 2 * x) for x in self.conditioning)
        return self.l2 <= l2 and self.largest <= largest


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found; prints as a table, and ``ok`` says whether every error is within its bound."""

    recurrence: str
    backend: str
    device: str
    dtype: str
    shape: str
    rows: tuple[CheckRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> CheckRow:
        """The row that is furthest beyond, or nearest to, its bound."""
        return max(self.rows, key=lambda r: float("inf") if r.l2 != r.l2 else max(r.l2, r.largest) / r.bound)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "recurrence": self.recurrence,
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
            "shape": self.shape,
            "ok": self.ok,
            "rows": [
                {"name": r.name, "l2": r.l2, "max": r.largest, "bound": r.bound, "ok": r.ok}
                for r in self.rows
            ],
        }

    def __str__(self) -> str:
        width = max(len(r.name) for r in self.rows)
        lines = [
            f"{self.recurrence}: {self.backend} on {self.device}, {self.dtype}, {self.shape}, "
            "against the float64 step loop",
            f"  {'':<{width}}  {'rel. L2':>9}  {'max':>9}  {'bound':>9}",
        ]
        for r in self.rows:
            verdict = "ok" if r.ok else "TOO LARGE"
            if r.conditioning is not None:
                verdict += (
                    f" (a step loop of this precision: {r.conditioning[0]:.1e}, {r.conditioning[1]:.1e})"
                )
            lines.append(f"  {r.name:<{width}}  {r.l2:9.2e}  {r.largest:9.2e}  {r.bound:9.1e}  {verdict}")
        return "\n".join(lines)


def run_check(
    op: CompiledOp,
    B: int = 2,
    T: int = 100,
    H: int = 2,
    K: int = 16,
    V: int = 24,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    gates: GateKind = "mild",
    heads: Mapping[str, int] | None = None,
    cu_seqlens: list[int] | None = None,
    consts: Mapping[str, float] | None = None,
    seed: int = 0,
) -> CheckReport:
    """Runs the op on random inputs that keep the spec's promises, forward and backward.

    The loss weighs output and final state with random cotangents. The reference is the step loop in
    float64 on the same rounded inputs. ``cu_seqlens`` (a list of offsets) checks packed sequences, with
    B = 1 and T their last offset.
    """
    spec = op.spec
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    offsets = None
    if cu_seqlens is not None:
        if not cu_seqlens or cu_seqlens[0] != 0:
            raise ArgumentError(f"cu_seqlens must start at 0, got {cu_seqlens}")
        B, T = 1, cu_seqlens[-1]
        offsets = torch.tensor(cu_seqlens, dtype=torch.int64, device=where)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    tensors = draw(
        spec, B, T, H, K, V, dtype=dtype, seed=seed, gates=gates, heads=heads, consts=consts, device=where
    )
    state_type = torch.float64 if dtype == torch.float64 else torch.float32
    drawn = _initial_states(spec, (N, H, K, V), gates, consts, seed)
    drawn = [x.to(device=where, dtype=state_type) for x in drawn]
    initials = dict(zip(state_labels(spec, "initial_state"), drawn, strict=True))
    leaves = {n: x.requires_grad_() for n, x in {**tensors, **initials}.items()}
    dims, layout = carried_dims(spec), op.options.state_layout
    options: dict[str, Any] = {
        "initial_state": turn_all(drawn, dims, layout), "output_final_state": True, "cu_seqlens": offsets,
    }  # fmt: skip
    options |= consts or {}
    o, last = op(*tensors.values(), **options)
    lasts = turn_all((last,) if isinstance(last, Tensor) else last, dims, layout)
    outcome = (o, *(x for x in lasts if x is not None))
    weights = _cotangents(outcome, seed)
    wanted, grads = reference_results(op, leaves, weights, cu_seqlens, consts)
    found = torch.autograd.grad(outcome, list(leaves.values()), weights, materialize_grads=True)
    backend = op.backend_for(where.type, dtype == torch.float64)
    labels = ("o", *state_labels(spec, "final state"))
    results = dict(zip(labels, zip(outcome, wanted, strict=True), strict=True))
    results |= {f"d {n}": (got, want) for n, got, want in zip(leaves, found, grads, strict=True)}
    scale = max((g.norm().item() for g in grads), default=0.0)
    floors = derived_floors(op, dtype) if backend == "triton" else {}

    def row(name: str, got: Tensor) -> CheckRow:
        gradient = name.startswith("d ")
        bound = gradient_bound(backend, dtype) if gradient else output_bound(backend, dtype)
        bound = max(bound, 2 * floors.get(name, 0.0))
        return compare(name, got, results[name][1], bound, scale if gradient else 0.0)

    rows = [row(name, got) for name, (got, _) in results.items()]
    if dtype != torch.float64 and not all(r.ok for r in rows):
        if dtype == torch.float32:
            values, short_grads = reference_results(op, leaves, weights, cu_seqlens, consts, torch.float32)
            short = [*values, *short_grads]
        else:
            short = short_operand_results(op, leaves, weights, dtype, cu_seqlens, consts)
        yardstick = dict(zip(results, short, strict=True))
        by_token = {"o", *(f"d {d.name}" for d in spec.inputs if d.timed)}
        for i, failed in enumerate(rows):
            if not failed.ok:
                rounded = row(failed.name, yardstick[failed.name])
                wanted_here = results[failed.name][1]
                usual = expected_largest(
                    yardstick[failed.name].double() - wanted_here, failed.name in by_token
                )
                usual /= max(float(wanted_here.abs().max()), 1e-300)
                rows[i] = replace(failed, conditioning=(rounded.l2, max(rounded.largest, usual)))
    packed = "" if cu_seqlens is None else f" in {N} packed sequences"
    shape = f"B {B} T {T} H {H} K {K} V {V}{packed}, {gates} gates"
    return CheckReport(spec.name, backend, str(where), str(dtype).removeprefix("torch."), shape, tuple(rows))


def derived_floors(op: CompiledOp, dtype: torch.dtype) -> dict[str, float]:
    """What a short type costs the chunk form of coupled states by derivation (``planner.rounding_floor``).

    Relative root mean squares by row, where nothing cancels. Coupled states are joined by products of which
    none is near the identity, and what is derived is what is measured (docs/precision.md); of one state less
    than the ordinary bounds is measured, and there is none: nor of other types, nor without a chunk form.
    """
    kind = str(dtype).removeprefix("torch.")
    coupled = op.stages.is_whole and len(op.spec.states) > 1
    if kind not in BITS or not coupled or isinstance(op.artefacts().form, StepForm):
        return {}
    found = rounding_floor(op.artefacts().forward, op.artefacts().backward, kind)
    spec = op.spec
    labels = {f"d_{d.name}": f"d {d.name}" for d in spec.inputs}
    for mine, theirs in (("final state", "final"), ("initial_state", "d_initial")):
        named = zip(spec.carried, state_labels(spec, mine), strict=True)
        labels |= {f"{theirs} {s}": label if mine == "final state" else f"d {label}" for s, label in named}
    if len(spec.outputs) == 1:
        labels[spec.outputs[0].target] = "o"
    return {labels[name]: x for name, x in found.items() if name in labels}


_BLOCK = 64


def expected_largest(error: Tensor, by_token: bool) -> float:
    """The largest of N errors that rounding gives: sqrt(2 ln N) of their deviation where that is largest.

    Rounding errors are sums of many independent terms, so they are about normal, and the largest of N normal
    numbers is about sqrt(2 ln N) deviations. The largest of one run is one draw of that, and two runs whose
    errors are alike have largest errors that are not. The deviation is that of ``64`` neighbours, which are
    channels and tokens of one head: [B, T, H, ...] if ``by_token``.
    """
    count = error.numel()
    if count < 2 * _BLOCK:
        return 0.0
    flat = (error.transpose(1, 2) if by_token and error.dim() > 2 else error).reshape(-1)
    blocks = flat[: count // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return float(blocks.square().mean(1).sqrt().max()) * math.sqrt(2 * math.log(count))


def _initial_states(
    spec: RecurrenceSpec,
    shape: tuple[int, int, int, int],
    gates: GateKind,
    consts: Mapping[str, float] | None,
    seed: int,
) -> list[Tensor]:
    """Normal numbers; of a recurrence with vector states, which may be sums of what is positive or logs of
    such, what a few tokens make of them."""
    N, H, K, V = shape
    if all(len(s.dims) == 2 for s in spec.states):
        return list(draw_state(spec, N, H, K, V, seed=seed))
    tensors = draw(spec, N, 5, H, K, V, seed=seed + 2, gates=gates, consts=consts)
    with torch.no_grad():
        _, last = reference(spec, tensors, output_final_state=True, consts=consts)
    return [last] if isinstance(last, Tensor) else list(last)


def reference_results(
    op: CompiledOp,
    leaves: Mapping[str, Tensor],
    weights: Sequence[Tensor],
    cu_seqlens: list[int] | None,
    consts: Mapping[str, float] | None,
    dtype: torch.dtype = torch.float64,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Output and states, and the gradients, of the step loop on the CPU, in float64 unless asked otherwise.

    ``leaves`` are the inputs and params, then the initial states; ``weights`` the cotangents of the results.
    """
    exact = _exact(leaves, dtype)
    names = {d.name for d in op.spec.inputs}
    o, last = reference(
        op.spec,
        {n: x for n, x in exact.items() if n in names},
        initial_state=[x for n, x in exact.items() if n not in names],
        output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else torch.tensor(cu_seqlens),
        consts=consts,
        reverse=op.options.reverse,
    )
    results = (o, last) if isinstance(last, Tensor) else (o, *last)
    return tuple(x.detach() for x in results), _gradients(results, weights, exact)


def short_operand_results(
    op: CompiledOp,
    leaves: Mapping[str, Tensor],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
    cu_seqlens: list[int] | None,
    consts: Mapping[str, float] | None,
) -> list[Tensor]:
    """Output, state and gradients of form (1) stepped in float64 with the operands of products rounded."""
    exact = _exact(leaves)
    spec = op.spec
    inputs = {d.name: exact[d.name] for d in spec.inputs}
    starts = [x for n, x in exact.items() if n not in inputs]
    heads = starts[0].shape[1]
    for decl in spec.inputs:
        axis = 2 if decl.timed else 0
        x = inputs[decl.name]
        inputs[decl.name] = x.repeat_interleave(heads // x.shape[axis], dim=axis)
    timed = {d.name for d in spec.inputs if d.timed}
    bounds = cu_seqlens if cu_seqlens is not None else [0, next(inputs[n].shape[1] for n in timed)]
    pieces = []
    for i, (begin, end) in enumerate(pairwise(bounds)):
        piece = [x[:, begin:end] if n in timed else x for n, x in inputs.items()]
        first = starts if cu_seqlens is None else [x[i : i + 1] for x in starts]
        call = bind(spec, piece, consts or {}, first, None)
        o, last = op.short_loop(lambda x: x.to(dtype).to(x.dtype), call)
        pieces.append((o, *last))
    outputs, *lasts = zip(*pieces, strict=True)
    results = (torch.cat(outputs, 1), *(torch.cat(x) for x in lasts))
    return [*(x.detach() for x in results), *_gradients(results, weights, exact)]


def _exact(leaves: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {n: x.detach().to("cpu", dtype, copy=True).requires_grad_() for n, x in leaves.items()}


def _gradients(
    results: Sequence[Tensor], weights: Sequence[Tensor], leaves: Mapping[str, Tensor]
) -> list[Tensor]:
    parts = [(x * w.to("cpu", x.dtype)).sum() for x, w in zip(results, weights, strict=True)]
    loss = torch.stack(parts).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves.values(), strict=True)]


def output_bound(backend: str, dtype: torch.dtype) -> float:
    """The error that output and states may have."""
    if dtype == torch.float64:
        return 1e-10
    if dtype == torch.float32:
        return 5e-5 if backend == "triton" else 2e-5
    return 1e-2


def gradient_bound(backend: str, dtype: torch.dtype) -> float:
    """The error that a gradient may have."""
    return 2e-2 if dtype in (torch.float16, torch.bfloat16) else output_bound(backend, dtype)


def _cotangents(results: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = []
    for x in results:
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        drawn.append(noise.to(x.dtype).to(x.device))
    return drawn


def compare(name: str, got: Tensor, want: Tensor, bound: float, scale: float = 0.0) -> CheckRow:
    """The errors of one tensor; one whose norm is negligible beside ``scale`` is measured against that."""
    error = got.detach().double().cpu() - want
    if error.numel() == 0:
        return CheckRow(name, 0.0, 0.0, bound)
    size, largest = want.norm().item(), want.abs().max().item()
    if size < NEGLIGIBLE * scale:
        size = largest = scale
    tiny = 1e-300
    return CheckRow(
        name, error.norm().item() / max(size, tiny), error.abs().max().item() / max(largest, tiny), bound
    )
