"""Whether what is timed is right: on the inputs that are timed, against the step loop, and bit for bit.

Only the first tokens get a gradient of the output, so the gradients of these tokens are those of a sequence
that ends there: a short step loop in float64 is the whole truth about them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linalg_dsl.ops.reference import reference

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp

BOUNDS = {torch.bfloat16: (5e-3, 1e-2), torch.float16: (5e-3, 1e-2)}
"""Relative L2 errors of the output and of gradients, by type; 5e-5 for others."""
TOKENS = 256
"""Of which numbers are compared."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``output``, ``gradients``: worst relative L2 errors, with ``bounds``; ``same``: equal bits in all."""

    output: float
    gradients: float
    same: bool
    worst: str
    bounds: tuple[float, float]

    @property
    def ok(self) -> bool:
        return self.same and self.output <= self.bounds[0] and self.gradients <= self.bounds[1]

    def __str__(self) -> str:
        bits = "equal bits" if self.same else "BITS DIFFER"
        return f"o {self.output:.1e}, gradients {self.gradients:.1e} ({self.worst}), {bits}"


def verdict(op: CompiledOp, tensors: Sequence[Tensor], dtype: torch.dtype, runs: int = 20) -> Verdict:
    """Compares ``runs`` forwards and backwards with each other, and one with the float64 step loop.

    Tensors have equal head counts. Memory is filled with NaN before it is handed out, so that what no kernel
    writes shows.
    """
    leaves = [x.detach().requires_grad_() for x in tensors]
    with nan_filled():
        first = [None if x is None else x.clone() for x in _run(op, leaves)]
        same = all(_equal(first, _run(op, leaves)) for _ in range(runs - 1))
    o, *grads = first
    assert o is not None
    heads = sorted({0, o.shape[2] - 1})
    expected, wanted = _step_loop(op, leaves, o, heads)
    errors = {"none": 0.0}
    scale = max((float(w.norm()) for w in wanted if w is not None), default=0.0)
    for decl, got, want in zip(op.spec.inputs, grads, wanted, strict=True):
        if got is not None and want is not None:
            size = max(float(want.norm()), 1e-6 * scale, 1e-300)
            errors[f"d_{decl.name}"] = float((_part(got, decl.timed, heads).double() - want).norm()) / size
    worst = max(errors, key=lambda n: float("inf") if errors[n] != errors[n] else errors[n])
    output = float((_part(o, True, heads).double() - expected).norm() / expected.norm())
    return Verdict(output, errors[worst], same, worst, BOUNDS.get(dtype, (5e-5, 5e-5)))


@contextmanager
def nan_filled() -> Iterator[None]:
    """Empty tensors are full of NaN."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _run(op: CompiledOp, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The output and the gradients."""
    o: Tensor = op(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, _weights(o), allow_unused=True)]


def _equal(first: Sequence[Tensor | None], again: Sequence[Tensor | None]) -> bool:
    """Bit by bit: a recurrence that grows without a bound ends in NaN, the same one each time."""
    pairs = zip(first, again, strict=True)
    return all(a is b if a is None or b is None else torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _weights(o: Tensor) -> Tensor:
    """A gradient of the output that is zero behind the tokens that are compared, and in other sequences."""
    generator = torch.Generator(o.device).manual_seed(5)
    out = torch.zeros_like(o)
    part = out[:1, :TOKENS]
    part.copy_(torch.randn(part.shape, generator=generator, device=o.device).to(o.dtype))
    return out


def _step_loop(
    op: CompiledOp, leaves: Sequence[Tensor], o: Tensor, heads: list[int]
) -> tuple[Tensor, list[Tensor | None]]:
    named = {
        decl.name: _part(x.detach(), decl.timed, heads).double().requires_grad_()
        for decl, x in zip(op.spec.inputs, leaves, strict=True)
    }
    out, _ = reference(op.spec, named)
    weights = _part(_weights(o), True, heads).double()
    return out.detach(), list(torch.autograd.grad(out, list(named.values()), weights, allow_unused=True))


def _part(x: Tensor, timed: bool, heads: list[int]) -> Tensor:
    """The first tokens of the first sequence, of some heads."""
    return x[:1, :TOKENS, heads] if timed else x[heads]
