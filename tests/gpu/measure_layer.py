"""What a layer adds to its kernels and projections on the GPU at hand.

    python tests/gpu/measure_layer.py [NAME ...]

For every entry a training step of ``Mixer`` is timed, and beside it the recurrence alone on inputs of the
same sizes, and the layer's matrix products alone. The rest (activations, norms, gates, convolutions) is
printed in ms and as a part of both together, eager and under torch.compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import linalg_dsl as ld

NAMES = ("linear_attention", "gated_delta_rule", "kda", "gla", "rwkv7")
B, T, HIDDEN, HEADS, ROUNDS = 8, 2048, 2048, 16, 20
WHEN_DRY = {"B": 2, "T": 130, "HIDDEN": 128, "HEADS": 2, "ROUNDS": 1}
"""Where there is no GPU (tests/stand_in)."""


def time_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of a call, the median."""
    times = []
    for i in range(ROUNDS + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 5:
            times.append(begin.elapsed_time(end))
    return float(median(times))


def step(run: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Callable[[], Any]:
    """Forward and backward, the gradients thrown away."""

    def go() -> None:
        o = run()
        torch.autograd.grad(o, leaves, torch.ones_like(o), allow_unused=True)

    return go


def measure(name: str) -> None:
    torch.manual_seed(0)
    layer = ld.nn.Mixer(name, HIDDEN, HEADS, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(B, T, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    values = {n: v.detach().requires_grad_() for n, v in layer.make_inputs(x)[0].items()}
    kernels = time_ms(step(lambda: layer.op(**values, **layer.consts), list(values.values())))
    linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    fed = [
        torch.randn(B * T, m.in_features, device="cuda", dtype=x.dtype, requires_grad=True) for m in linears
    ]
    weights = [m.weight for m in linears]

    def products() -> None:
        for y, m in zip(fed, linears, strict=True):
            o = m(y)
            torch.autograd.grad(o, [y, m.weight], torch.ones_like(o))

    matrices = time_ms(products)
    print(f"{name}: kernels {kernels:.3f} ms, {len(weights)} projections {matrices:.3f} ms")
    for kind, run in (("eager", layer), ("compiled", torch.compile(layer))):
        whole = time_ms(step(lambda run=run: run(x), leaves))
        rest = whole - kernels - matrices
        part = rest / (kernels + matrices)
        print(f"  {kind}: {whole:.3f} ms, of which {rest:.3f} ms ({part:.1%}) are the layer's own")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or NAMES:
        measure(wanted)
