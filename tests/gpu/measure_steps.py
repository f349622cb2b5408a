"""Times of the step kernels on the GPU at hand, beside the time that their bytes alone take.

python tests/gpu/measure_steps.py [--names a,b]    forward, forward that saves states, backward
"""

from __future__ import annotations

import argparse
import sys
import warnings
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SHAPES = {
    "mamba1": (8, 2048, 64, 16, 64), "longhorn": (8, 2048, 64, 16, 64),
    "undecayed_erase": (8, 2048, 64, 16, 64), "two_sided": (8, 2048, 32, 16, 64),
    "hgrn": (8, 2048, 64, 64, 64), "rwkv4": (8, 2048, 64, 64, 64), "dense": (4, 2048, 8, 64, 64),
    "undecayed_erase wide": (8, 2048, 32, 64, 64), "two_sided wide": (8, 2048, 16, 64, 64),
}  # fmt: skip
"""B, T, H, K, V of each recurrence of tests/step_cases.py."""


def measure(name: str, speed: float) -> str:
    import step_cases
    import torch

    from linalg_dsl.ops.args import const_numbers
    from linalg_dsl.ops.bench import time_call
    from linalg_dsl.ops.draw import draw

    B, T, H, K, V = SHAPES[name]
    found = step_cases.case(name.split()[0])
    module: Any = found.module("triton")
    drawn = draw(found.spec, B, T, H, K, V, dtype=torch.float32)
    tensors = tuple(
        x.to("cuda", torch.bfloat16 if d.dims and d.kind == "plain" else torch.float32)
        for d, x in zip(found.spec.inputs, drawn.values(), strict=True)
    )
    values = {"K": float(K), "V": float(V), **const_numbers(found.spec, {"K": K, "V": V}, {})}
    given = (tensors, (None,) * len(found.spec.states), tuple(values[c] for c in module.CONSTS), None)
    o, _, marks = module.forward(*given, False, True)
    device = o.device
    d_o = torch.randn_like(o)
    moved = sum(x.nbytes for x, d in zip(tensors, found.spec.inputs, strict=True) if d.timed)
    floors = [1000 * (moved + o.nbytes) / speed] * 2 + [1000 * (2 * moved + o.nbytes) / speed]
    times = [
        time_call(lambda: module.forward(*given, False, False), device).median,
        time_call(lambda: module.forward(*given, False, True), device).median,
        time_call(lambda: module.backward(*given, marks, d_o, None), device).median,
    ]
    saved = sum(prod(m.shape) * 4 for m in marks) / 1e6
    parts = [f"{t:.3f} ms ({t / f:.1f} x bytes)" for t, f in zip(times, floors, strict=True)]
    return f"{name}: B {B} T {T} H {H} K {K} V {V}: {', '.join(parts)}; {saved:.0f} MB saved"


def main() -> None:
    import torch

    from linalg_dsl.ops.bench import device_rates

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default=",".join(SHAPES))
    speed = device_rates(torch.device("cuda"), torch.bfloat16).bandwidth
    print(f"copy: {speed / 1e12:.2f} TB/s; bf16, forward, forward that saves states, backward")
    warnings.simplefilter("ignore")
    for name in parser.parse_args().names.split(","):
        print(measure(name, speed), flush=True)


if __name__ == "__main__":
    main()
