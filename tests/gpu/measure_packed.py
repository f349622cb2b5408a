"""What a packed run costs beside the dense run of equal tokens, on the GPU at hand; the goal is 10 % at most.

python tests/gpu/measure_packed.py [--names a,b] [--tokens 16384]
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
WHEN_DRY = {"H": 2, "TOKENS": 512}
"""Where there is no GPU (tests/stand_in)."""


def measure(name: str, tokens: int) -> str:
    """Forward and forward + backward: dense, packed in equal lengths, packed in lengths of a random cut."""
    import torch
    from runtime_cases import op_of

    from linalg_dsl.ops.bench import time_call
    from linalg_dsl.ops.draw import draw

    op = op_of(name, backend="triton")
    drawn = draw(op.spec, SEQUENCES, tokens // SEQUENCES, H, K, V, dtype=torch.float32)
    dense = [
        x.to("cuda", torch.bfloat16 if d.dims and d.kind == "plain" else torch.float32).requires_grad_()
        for x, d in zip(drawn.values(), op.spec.inputs, strict=True)
    ]
    row = [
        x.detach().reshape(1, -1, *x.shape[2:]).requires_grad_() if d.timed else x
        for x, d in zip(dense, op.spec.inputs, strict=True)
    ]
    even = torch.arange(0, tokens + 1, tokens // SEQUENCES, device="cuda")
    cuts = sorted(random.Random(3).sample(range(1, tokens), SEQUENCES - 1))
    uneven = torch.tensor([0, *cuts, tokens], device="cuda")

    def both(tensors: list[Any], **options: Any) -> list[float]:
        weight = torch.randn_like(op(*tensors, **options))

        def train() -> None:
            torch.autograd.grad(op(*tensors, **options), tensors, weight, allow_unused=True)

        def infer() -> None:
            with torch.no_grad():
                op(*tensors, **options)

        runs: list[Callable[[], None]] = [infer, train]
        return [time_call(run, weight.device).median for run in runs]

    plain = both(dense)
    kinds = {"equal lengths": both(row, cu_seqlens=even), "any lengths": both(row, cu_seqlens=uneven)}
    parts = [
        f"{kind} {times[0]:.3f} / {times[1]:.3f} ms ({times[0] / plain[0]:.2f}, {times[1] / plain[1]:.2f})"
        for kind, times in kinds.items()
    ]
    return f"{name}: dense {plain[0]:.3f} / {plain[1]:.3f} ms; {'; '.join(parts)}"


def main() -> None:
    from runtime_cases import CLASSES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default=",".join(n for n in CLASSES if n != "both_sides"))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{given.tokens} tokens in {SEQUENCES} sequences, H {H}, K {K}, V {V}; forward / and backward")
    for name in given.names.split(","):
        print(measure(name, given.tokens), flush=True)


if __name__ == "__main__":
    main()
