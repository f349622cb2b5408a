"""What a packed run costs beside the dense run of equal tokens, on the GPU at hand; the goal is 10 % at most.

python tests/gpu/measure_packed.py [--names a,b] [--tokens 16384] [--sequences 8] [--cuts equal,any]
                                   [--launches]

Milliseconds of the forward and of both directions: plain, as events around calls see them, which the host may
bound, and of a replayed CUDA graph, which is the time of the GPU. --launches: of every kernel as well.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

H, K, V, SEQUENCES, TOKENS = 16, 128, 128, 8, 16384
BUDGET = 0.1
WHEN_DRY = {"H": 2, "TOKENS": 512}
"""Where there is no GPU (tests/stand_in)."""


def cut(kind: str, tokens: int, sequences: int) -> list[int]:
    """Offsets of so many sequences: of one length, or cut at random places."""
    if kind == "equal":
        return [tokens * i // sequences for i in range(sequences + 1)]
    return [0, *sorted(random.Random(3).sample(range(1, tokens), sequences - 1)), tokens]


def times(op: Any, tensors: list[Any], **options: Any) -> list[float]:
    """Milliseconds: forward, both; plain, then in a graph."""
    import torch

    from linalg_dsl.ops.bench import graph_of, time_call

    weight = torch.randn_like(op(*tensors, **options))

    def train() -> None:
        torch.autograd.grad(op(*tensors, **options), tensors, weight, allow_unused=True)

    def infer() -> None:
        with torch.no_grad():
            op(*tensors, **options)

    runs: list[Callable[[], None]] = [infer, train]
    plain = [time_call(run, weight.device, BUDGET).median for run in runs]
    graphs = [graph_of(run, weight.device) for run in runs]
    return plain + [float("nan") if g is None else time_call(g, weight.device, BUDGET).median for g in graphs]


def measure(name: str, tokens: int, sequences: int, cuts: list[str], launches: bool) -> None:
    """Prints dense, then packed in lengths of every kind of cut."""
    import torch
    from runtime_cases import op_of

    from linalg_dsl.ops.bench import launch_times
    from linalg_dsl.ops.draw import draw

    op = op_of(name, backend="triton")
    drawn = draw(op.spec, sequences, tokens // sequences, H, K, V, dtype=torch.float32, device="cuda")
    dense = [
        x.to("cuda", torch.bfloat16 if d.dims and d.kind == "plain" else torch.float32).requires_grad_()
        for x, d in zip(drawn.values(), op.spec.inputs, strict=True)
    ]
    row = [
        x.detach().reshape(1, -1, *x.shape[2:]).requires_grad_() if d.timed else x
        for x, d in zip(dense, op.spec.inputs, strict=True)
    ]
    runs: dict[str, tuple[list[Any], dict[str, Any]]] = {"dense": (dense, {})}
    for kind in cuts:
        offsets = torch.tensor(cut(kind, tokens, sequences), device="cuda")
        runs[kind] = (row, {"cu_seqlens": offsets})
    base: list[float] = []
    for kind, (tensors, options) in runs.items():
        found = times(op, tensors, **options)
        base = base or found
        shares = [t / b for t, b in zip(found, base, strict=True)]
        f, b, gf, gb = (f"{t:.3f} ({s:.2f})" for t, s in zip(found, shares, strict=True))
        print(f"{name:18} {kind:6} plain {f} / {b}; graph {gf} / {gb}", flush=True)
        if launches:
            w = torch.randn_like(op(*tensors, **options))

            def run(x: list[Any] = tensors, o: dict[str, Any] = options, w: torch.Tensor = w) -> object:
                return torch.autograd.grad(op(*x, **o), x, w)

            each = launch_times([op.operator("triton").module], run, w.device, BUDGET / 2)
            print("   ", "  ".join(f"{n.removeprefix(name + '_')} {t:.3f}" for n, t in each), flush=True)


def main() -> None:
    from runtime_cases import CLASSES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", default=",".join(n for n in CLASSES if n != "both_sides"))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--cuts", default="equal,any")
    parser.add_argument("--launches", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{given.tokens} tokens in {given.sequences} sequences, H {H}, K {K}, V {V}; ms forward / both")
    for name in given.names.split(","):
        measure(name, given.tokens, given.sequences, given.cuts.split(","), given.launches)


if __name__ == "__main__":
    main()
