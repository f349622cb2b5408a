"""One level against two on the GPU at hand, and both against the model: few heads, long sequences.

python tests/gpu/measure_levels.py [--names a,b] [--shapes 1x32768x16,1x131072x4] [--dtype bfloat16]
                                   [--lengths 0,16,64]     chunks of a super-chunk, 0: the model's choice

Prints, for every entry, shape and schedule, milliseconds of the forward and of forward and backward, of every
kernel, the model's time of what stands for the forward's walk, the largest error of o and of the gradients
against one level (relative L2), and whether two equal calls gave equal bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

NAMES = "linear_attention,retnet,simple_gla,gla,rwkv6,delta_rule,gated_delta_rule,comba,kda,dplr"
SIZE, SHAPES = 128, "1x32768x16,1x131072x4"
WHEN_DRY = {"SHAPES": "1x700x2"}
"""Where there is no GPU (tests/stand_in)."""


def entry(name: str, schedule: str, length: int) -> Any:
    import linalg_dsl as ld
    from linalg_dsl.ops.catalogue import catalogue_text

    return ld.compile(catalogue_text(name), backend="triton", schedule=schedule, super_chunk=length or None)


def operands(op: Any, shape: Mapping[str, int], dtype: str) -> tuple[dict[str, Any], Any]:
    import torch

    from linalg_dsl.ops.draw import draw, draw_state

    drawn = draw(op.spec, **shape, dtype=torch.float32, gates="mild", seed=1)  # type: ignore[arg-type]
    kind = getattr(torch, dtype)
    tensors = {}
    for decl in op.spec.inputs:
        wide = decl.kind == "plain" and bool({"K", "V"} & set(map(str, decl.dims)))
        tensors[decl.name] = drawn[decl.name].to("cuda", kind if wide else torch.float32)
    (state,) = draw_state(op.spec, shape["B"], shape["H"], SIZE, SIZE, dtype=torch.float32)
    return tensors, state.cuda()


def results(op: Any, tensors: Mapping[str, Any], state: Any) -> dict[str, Any]:
    import torch

    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    first = state.detach().requires_grad_()
    o, final = op(**leaves, initial_state=first, output_final_state=True)
    generator = torch.Generator("cuda").manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype) for x in (o, final)]
    wanted = [*leaves.values(), first]
    grads = torch.autograd.grad([o, final], wanted, weights, allow_unused=True)
    named = {f"d_{n}": g for n, g in zip([*leaves, "initial_state"], grads, strict=True) if g is not None}
    return {"o": o.detach(), "state": final.detach(), **named}


def distance(got: Mapping[str, Any], want: Mapping[str, Any]) -> dict[str, float]:
    return {
        n: float((got[n].float() - w.float()).norm() / w.float().norm().clamp_min(1e-30))
        for n, w in want.items()
    }


def measure(op: Any, tensors: Mapping[str, Any], state: Any) -> tuple[float, float, list[tuple[str, float]]]:
    """(forward, forward and backward, every kernel of both) in milliseconds, medians."""
    import triton.testing

    from linalg_dsl.ops.bench import kernel_times

    def forward() -> None:
        op(**tensors, initial_state=state, output_final_state=True)

    def both() -> None:
        results(op, tensors, state)

    module = op.operator("triton").module
    times = [float(triton.testing.do_bench(run, return_mode="median")) for run in (forward, both)]
    return times[0], times[1], list(kernel_times(module, both, state.device))


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", default=NAMES)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", default="0")
    args = parser.parse_args()
    failed = 0
    for name in args.names.split(","):
        for sizes in args.shapes.split(","):
            batch, length, heads = map(int, sizes.split("x"))
            shape = {"B": batch, "T": length, "H": heads, "K": SIZE, "V": SIZE}
            walk = entry(name, "walk", 0)
            tensors, state = operands(walk, shape, args.dtype)
            want = results(walk, tensors, state)
            runs = [("walk", walk)]
            runs += [
                (f"two_level {n or ''}".strip(), entry(name, "two_level", int(n)))
                for n in args.lengths.split(",")
            ]
            for label, op in runs:
                got, again = (results(op, tensors, state) for _ in range(2))
                same = all(torch.equal(got[n], again[n]) for n in got)
                found = distance(got, want)
                worst = max(found, key=lambda n: found[n])
                bad = not same or not found[worst] < 2e-2
                failed += bad
                forward, both, kernels = measure(op, tensors, state)
                said = next(
                    line for line in op.plan.explain(**shape, dtype=args.dtype).schedule if " level" in line
                )
                print(
                    f"{'FAIL ' if bad else ''}{name} {sizes} {label}: forward {forward:.3f}, with backward "
                    f"{both:.3f} ms; {worst} {found[worst]:.1e} from one level; equal bits {same}\n  "
                    + "  ".join(f"{k} {t:.3f}" for k, t in kernels)
                    + f"\n  {said}",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
