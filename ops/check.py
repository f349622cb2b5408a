"""Errors of a compiled op against the float64 step loop: output, final state, every gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.reference import reference

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp

NEGLIGIBLE = 1e-6
"""A gradient whose norm is below this part of the largest is compared with the largest."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One tensor: relative L2 error, largest error over largest value, and the bound for both."""

    name: str
    l2: float
    largest: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.l2 <= self.bound and self.largest <= self.bound  # False for NaN


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
    (initial,) = draw_state(spec, N, H, K, V, dtype=state_type, seed=seed, device=where)
    leaves = {n: x.requires_grad_() for n, x in {**tensors, "initial_state": initial}.items()}
    options: dict[str, Any] = {"initial_state": initial, "output_final_state": True, "cu_seqlens": offsets}
    options |= consts or {}
    o, state = op(*tensors.values(), **options)
    wanted, grads = reference_results(op, leaves, o, state, cu_seqlens, consts, seed)
    weights = _cotangents(o, state, seed)
    found = torch.autograd.grad((o, state), list(leaves.values()), weights)
    backend = op.backend_for(where.type, dtype == torch.float64)
    rows = [
        compare("o", o, wanted[0], output_bound(backend, dtype)),
        compare("final state", state, wanted[1], output_bound(backend, dtype)),
    ]
    scale = max((g.norm().item() for g in grads), default=0.0)
    bound = gradient_bound(backend, dtype)
    rows += [
        compare(f"d {name}", got, want, bound, scale)
        for name, got, want in zip(leaves, found, grads, strict=True)
    ]
    packed = "" if cu_seqlens is None else f" in {N} packed sequences"
    shape = f"B {B} T {T} H {H} K {K} V {V}{packed}, {gates} gates"
    return CheckReport(spec.name, backend, str(where), str(dtype).removeprefix("torch."), shape, tuple(rows))


def reference_results(
    op: CompiledOp,
    leaves: Mapping[str, Tensor],
    o: Tensor,
    state: Tensor,
    cu_seqlens: list[int] | None,
    consts: Mapping[str, float] | None,
    seed: int,
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Output and state, and the gradients, of the step loop in float64 on the CPU."""
    exact = {n: x.detach().double().cpu().requires_grad_() for n, x in leaves.items()}
    inputs = {n: x for n, x in exact.items() if n != "initial_state"}
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    ro, rs = reference(
        op.spec,
        inputs,
        initial_state=exact["initial_state"],
        output_final_state=True,
        cu_seqlens=offsets,
        consts=consts,
    )
    if not isinstance(rs, Tensor):
        raise ArgumentError(f"{op.spec.name}: a check of several states is not supported yet")
    weights = [w.double().cpu() for w in _cotangents(o, state, seed)]
    loss = (ro * weights[0]).sum() + (rs * weights[1]).sum()
    grads = torch.autograd.grad(loss, list(exact.values()), allow_unused=True)
    full = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, exact.values(), strict=True)]
    return (ro.detach(), rs.detach()), full


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


def _cotangents(o: Tensor, state: Tensor, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = []
    for x in (o, state):
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
