"""What a layer adds to its kernels and projections on the GPU at hand.

    python tests/gpu/measure_layer.py [NAME ...]
    python tests/gpu/measure_layer.py --device cpu --sizes 1 32 32 2   # that the script itself runs

For every entry a training step of ``Mixer`` is timed, and beside it the recurrence alone on inputs of the
same sizes, and the layer's matrix products alone. The rest (activations, norms, gates, convolutions) is
printed in ms and as a part of both together, eager and under torch.compile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import linalg_dsl as ld

NAMES = ("gated_delta_rule", "linear_attention", "kda", "gla", "rwkv7")


def time_ms(call: Callable[[], Any], device: str, rounds: int = 20) -> float:
    """Milliseconds of a call, the median."""
    times = []
    for _ in range(rounds + 5):
        if device == "cpu":
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(median(times[5:]))


def step(run: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Callable[[], Any]:
    """Forward and backward, the gradients thrown away."""

    def go() -> None:
        o = run()
        torch.autograd.grad(o, leaves, torch.ones_like(o), allow_unused=True)

    return go


def measure(name: str, device: str, sizes: Sequence[int], compiled: bool) -> None:
    batch, length, hidden, heads = sizes
    torch.manual_seed(0)
    layer = ld.nn.Mixer(name, hidden, heads, device=device, dtype=torch.bfloat16)
    x = torch.randn(batch, length, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    values = {n: v.detach().requires_grad_() for n, v in layer.make_inputs(x)[0].items()}
    kernels = time_ms(step(lambda: layer.op(**values, **layer.consts), list(values.values())), device)
    linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    fed = [
        torch.randn(batch * length, m.in_features, device=device, dtype=x.dtype, requires_grad=True)
        for m in linears
    ]
    weights = [m.weight for m in linears]

    def products() -> None:
        for y, m in zip(fed, linears, strict=True):
            o = m(y)
            torch.autograd.grad(o, [y, m.weight], torch.ones_like(o))

    matrices = time_ms(products, device)
    print(f"{name}: kernels {kernels:.3f} ms, {len(weights)} projections {matrices:.3f} ms", flush=True)
    runs = [("eager", layer)]
    if compiled:
        runs.append(("compiled", torch.compile(layer)))
    for kind, run in runs:
        whole = time_ms(step(lambda run=run: run(x), leaves), device)
        rest = whole - kernels - matrices
        part = rest / (kernels + matrices)
        print(
            f"  {kind}: {whole:.3f} ms, of which {rest:.3f} ms ({part:.1%}) are the layer's own", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--sizes", type=int, nargs=4, default=(8, 2048, 2048, 16), metavar=("B", "T", "HIDDEN", "HEADS")
    )
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    for name in options.names:
        measure(name, options.device, options.sizes, not options.eager)


if __name__ == "__main__":
    main()
