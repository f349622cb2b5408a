"""Times of the step kernels on the GPU at hand, beside the time that their bytes alone take.

python tests/gpu/measure_steps.py [--names a,b]    forward, forward that saves states, backward
python tests/gpu/measure_steps.py --sweep          besides, other blocks, warps and groups than the table's

A ratio is the time over that of moving each input, output and gradient once at the speed of a copy. The bar
is 2 at K = 16 to 64. Of gates for every entry (mamba1) the exponentials alone take longer than that: K V of
them for 2 (K + V) numbers, on units that make 16 a clock.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
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
WHEN_DRY = {"SHAPES": {n: (2, 130, 2, *sizes[3:]) for n, sizes in SHAPES.items()}}
"""Where there is no GPU (tests/stand_in)."""


Choice = tuple[int, int, int, int, int]
BLOCKS, WARPS, GROUPS = (8, 16, 32, 64), (1, 2, 4), (1, 2, 4, 8, 16)


def choices(block: int, warps: int, group: int, held: int) -> list[Choice]:
    """The table's choice, as ``choose_step`` gives it, with another block, warps or group."""
    found = [(b, warps, 1, group, held) for b in BLOCKS if block]
    found += [(block, w, 1, group, held) for w in WARPS]
    found += [(block, warps, 1, g, min(held, g)) for g in GROUPS]
    return list(dict.fromkeys(found))


def sweep(module: Any, backward: bool, run: Callable[[], object], floor: float) -> list[str]:
    """A line for every choice of blocks that compiles, fastest first."""
    import torch

    from linalg_dsl.ops.bench import time_call

    table = module.choose_step
    seen: list[Choice] = []

    def asked(*given: Any) -> Choice:
        seen.append(table(*given))
        return seen[-1]

    try:
        module.choose_step = asked
        run()
        block, warps, _, group, held = seen[-1]
        found = []
        for choice in choices(block, warps, group, held):
            module.choose_step = lambda *given, fixed=choice: fixed
            try:
                time = time_call(run, torch.device("cuda")).median
            except Exception as error:  # too large for the registers or the shared memory of this card
                found.append((float("inf"), f"    {choice}: {type(error).__name__}"))
                continue
            mark = "  (the table's)" if choice == seen[-1] else ""
            found.append((time, f"    {choice}: {time:.3f} ms, {time / floor:.1f} x bytes{mark}"))
    finally:
        module.choose_step = table
    title = f"  {'backward' if backward else 'forward'}: block, warps, stages, tokens per group, states held"
    return [title, *(line for _, line in sorted(found))]


def measure(name: str, speed: float, *, other_choices: bool = False) -> str:
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
    runs: list[Callable[[], object]] = [
        lambda: module.forward(*given, False, False),
        lambda: module.forward(*given, False, True),
        lambda: module.backward(*given, marks, d_o, None),
    ]
    times = [time_call(run, device).median for run in runs]
    saved = sum(prod(m.shape) * 4 for m in marks) / 1e6
    parts = [f"{t:.3f} ms ({t / f:.1f} x bytes)" for t, f in zip(times, floors, strict=True)]
    lines = [f"{name}: B {B} T {T} H {H} K {K} V {V}: {', '.join(parts)}; {saved:.0f} MB saved"]
    if other_choices:
        lines += sweep(module, False, runs[0], floors[0])
        lines += sweep(module, True, runs[2], floors[2])
    return "\n".join(lines)


def main() -> None:
    import torch

    from linalg_dsl.ops.bench import device_rates

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default=",".join(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    speed = device_rates(torch.device("cuda"), torch.bfloat16).bandwidth
    print(f"copy: {speed / 1e12:.2f} TB/s; bf16, forward, forward that saves states, backward")
    warnings.simplefilter("ignore")
    for name in given.names.split(","):
        print(measure(name, speed, other_choices=given.sweep), flush=True)


if __name__ == "__main__":
    main()
