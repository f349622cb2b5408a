"""How long a call takes on a GPU, and what it allocates."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import torch

from linalg_dsl.ops.draw import draw

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp

ROUNDS = 20


def measure(
    op: CompiledOp, B: int, T: int, H: int, K: int, V: int, device: str, dtype: torch.dtype
) -> dict[str, float]:
    """``forward_ms``, ``backward_ms`` (medians of ``ROUNDS``), ``memory_mb``, the peak of a training step."""
    tensors = draw(op.spec, B, T, H, K, V, dtype=dtype, device=device)
    gates = {i.name for i in op.spec.inputs if i.kind != "plain"}
    leaves = {n: (x.float() if n in gates else x).requires_grad_() for n, x in tensors.items()}
    weight = torch.randn_like(op(**leaves))

    def step() -> tuple[float, float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        events[0].record()
        o = op(**leaves)
        events[1].record()
        torch.autograd.grad(o, list(leaves.values()), weight)
        events[2].record()
        torch.cuda.synchronize(device)
        return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])

    for _ in range(3):
        step()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    rounds = [step() for _ in range(ROUNDS)]
    peak = torch.cuda.max_memory_allocated(device) - before
    forward, backward = (median(x) for x in zip(*rounds, strict=True))
    return {"forward_ms": forward, "backward_ms": backward, "memory_mb": peak / 2**20}
