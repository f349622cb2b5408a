"""What a layer adds to its kernels and projections on the GPU at hand.

    python tests/gpu/measure_layer.py [NAME ...]
    for n in gla kda; do python tests/gpu/measure_layer.py $n --meet /tmp/here 2 & done; wait
    python tests/gpu/measure_layer.py --device cpu --sizes 1 32 32 2   # that the script itself runs

For every entry a training step of ``Mixer`` is timed, and beside it the recurrence alone on inputs of the
same sizes, and the layer's matrix products alone. The rest (activations, norms, gates, convolutions) is
printed in ms and as a part of both together, eager and under torch.compile, and the kernels of a step as the
profiler saw them. Compiling takes longer than timing, so several processes may prepare at once and then take
turns: ``--meet FOLDER N`` waits there until all N are ready.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from filelock import FileLock
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


def measure(name: str, device: str, sizes: Sequence[int], compiled: bool) -> Callable[[], None]:
    """Prepares everything; what comes back times it."""
    batch, length, hidden, heads = sizes
    torch.manual_seed(0)
    layer = ld.nn.Mixer(name, hidden, heads, device=device, dtype=torch.bfloat16)
    x = torch.randn(batch, length, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    values = {n: v.detach().requires_grad_() for n, v in layer.make_inputs(x)[0].items()}
    kernels = step(lambda: layer.op(**values, **layer.consts), list(values.values()))
    linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    fed = [
        torch.randn(batch * length, m.in_features, device=device, dtype=x.dtype, requires_grad=True)
        for m in linears
    ]

    def products() -> None:
        for y, m in zip(fed, linears, strict=True):
            o = m(y)
            torch.autograd.grad(o, [y, m.weight], torch.ones_like(o))

    other = ld.nn.Mixer(name, hidden, heads, fused=True, device=device, dtype=torch.bfloat16)
    runs = {"eager": step(lambda: layer(x), leaves)}
    runs["fused"] = step(lambda: other(x), [x, *other.parameters()])
    if compiled:
        fused: Callable[[Tensor], Tensor] = torch.compile(layer)
        runs["compiled"] = step(lambda: fused(x), leaves)
        both: Callable[[Tensor], Tensor] = torch.compile(other)
        runs["fused, compiled"] = step(lambda: both(x), [x, *other.parameters()])
    for call in (kernels, products):
        call()
    for kind, call in list(runs.items()):
        try:
            for _ in range(3):
                call()
        except Exception as error:  # whatever a compiler says, the others are measured
            print(f"{name}, {kind}: {str(error)[:600]}", flush=True)
            del runs[kind]

    def go() -> None:
        alone, matrices = time_ms(kernels, device), time_ms(products, device)
        print(f"{name}: kernels {alone:.3f} ms, {len(linears)} projections {matrices:.3f} ms", flush=True)
        for kind, call in runs.items():
            whole = time_ms(call, device)
            rest = whole - alone - matrices
            part = rest / (alone + matrices)
            print(
                f"  {kind}: {whole:.3f} ms, of which {rest:.3f} ms ({part:.1%}) are the layer's own",
                flush=True,
            )
        if device != "cpu":
            for kind, call in runs.items():
                profile(f"{name}, {kind}", call)

    return go


def profile(what: str, call: Callable[[], Any], rounds: int = 3) -> None:
    """Prints the kernels of a step, those that take longest first."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    rows = [(r.self_device_time_total / rounds, r.count // rounds, r.key) for r in found.key_averages()]
    rows = sorted((r for r in rows if r[0] > 0), reverse=True)
    print(f"  {what}: {sum(r[0] for r in rows) / 1e3:.3f} ms in {sum(r[1] for r in rows)} kernels")
    for took, count, key in rows[:16]:
        print(f"    {took / 1e3:8.3f} ms {count:4d} x {key[:90]}")


def wait(folder: Path, count: int) -> None:
    """Until so many processes are here."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.ready").touch()
    while len(list(folder.glob("*.ready"))) < count:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--sizes", type=int, nargs=4, default=(8, 2048, 2048, 16), metavar=("B", "T", "HIDDEN", "HEADS")
    )
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out")
    parser.add_argument("--prepare", action="store_true", help="only fill the compilers' caches")
    parser.add_argument(
        "--meet", nargs=2, metavar=("FOLDER", "N"), help="wait for N processes there, take turns"
    )
    options = parser.parse_args()
    calls = [measure(name, options.device, options.sizes, not options.eager) for name in options.names]
    if options.prepare:
        return
    if options.meet is None:
        for call in calls:
            call()
        return
    folder = Path(options.meet[0])
    wait(folder, int(options.meet[1]))
    with FileLock(folder / "turn.lock"):
        for call in calls:
            call()


if __name__ == "__main__":
    main()
