"""Seconds of an operator's first forward and backward in a process, and of the second.

    python tests/gpu/first_call.py kda dplr                  with the caches as they are
    python tests/gpu/first_call.py kda --empty               with empty ones, then with what that left there

Importing torch and this package, and making the inputs, is not counted; deriving, writing and compiling
kernels and the known-answer run are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time


def measure(name: str) -> None:
    """Prints the seconds of one recurrence of the catalogue at the shape train."""
    import torch

    import linalg_dsl as ld
    from linalg_dsl.ops.bench import inputs_of, training_call
    from linalg_dsl.ops.bench_shapes import SHAPES

    spec = getattr(ld.ops, name).spec
    tensors = tuple(inputs_of(spec, SHAPES["train"], torch.bfloat16, torch.device("cuda")).values())
    shape = SHAPES["train"]
    weights = torch.ones(1, device="cuda").expand(shape.B, shape.T, shape.H, shape.V)
    torch.cuda.synchronize()
    start = time.perf_counter()
    op = ld.compile(spec)
    leaves = tuple(x.requires_grad_() for x in tensors)
    torch.autograd.grad(op(*leaves), leaves, weights.bfloat16(), allow_unused=True)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    run = training_call(lambda *given: op(*given), tensors)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    print(f"{name}: first {first:.2f} s, second {time.perf_counter() - start:.4f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+")
    parser.add_argument("--empty", action="store_true")
    args = parser.parse_args()
    for name in args.names:
        if not args.empty:
            measure(name)
            continue
        with tempfile.TemporaryDirectory() as folder:
            places = {"TRITON_CACHE_DIR": f"{folder}/triton", "LINALG_DSL_CACHE": f"{folder}/modules"}
            for label in ("empty caches", "caches of the run before"):
                print(f"{label}: ", end="", flush=True)
                subprocess.run([sys.executable, __file__, name], env={**os.environ, **places}, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
