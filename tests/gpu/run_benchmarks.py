"""Everything that BENCHMARKS.md holds, in one run on the GPU at hand.

    python tests/gpu/run_benchmarks.py --budget 150 --out results/

Compiles in several processes first, then measures shape by shape, with a check of the numbers, until the
budget (seconds) is spent; rows are written as they come (``rows.json``), the page (``BENCHMARKS.md``) at the
end. With ``--peers`` fla-core's operators are measured in the same run: they tune themselves for one to three
minutes each, and what was measured of them elsewhere (``ops/peers.json``) stands in their place without it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from write_benchmarks import NAMES, SHAPES, benchmarks, recorded_peers

FEW = ("long", "few")
"""Where two levels are measured beside one."""


def jobs(names: list[str], shapes: list[str]) -> list[tuple[str, str, str]]:
    """(shape, recurrence, schedule), in the order in which they are measured."""
    found = [(shape, name, "walk") for shape in shapes for name in names]
    return found + [(shape, name, "two_level") for shape in shapes if shape in FEW for name in names]


def compiled(name: str, schedule: str, shapes: list[str]) -> str:
    """Compiles what a recurrence launches at these shapes."""
    import torch

    import linalg_dsl as ld
    from linalg_dsl.ops.bench import inputs_of, training_call
    from linalg_dsl.ops.bench_shapes import SHAPES as KNOWN

    os.environ["LINALG_DSL_SELFCHECK"] = "0"  # numbers are checked where they are measured
    start = time.monotonic()
    for shape in shapes:
        try:
            op = ld.compile(getattr(ld.ops, name).spec, schedule=schedule)
            given = inputs_of(op.spec, KNOWN[shape], torch.bfloat16, torch.device("cuda"))
            training_call(lambda *x, op=op: op(*x), tuple(given.values()))()
            torch.cuda.synchronize()
            del given
            torch.cuda.empty_cache()
        except Exception as error:
            return f"{name} {schedule} {shape}: {type(error).__name__}: {str(error)[:200]}"
    return f"{name} {schedule}: compiled in {time.monotonic() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", default=NAMES)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--budget", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    names, shapes = args.names.split(","), args.shapes.split(",")
    start = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    schedules = ("walk", "two_level") if set(FEW) & set(shapes) else ("walk",)
    tasks = [
        (n, s, shapes if s == "walk" else [x for x in shapes if x in FEW]) for s in schedules for n in names
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for line in pool.map(compiled, *zip(*tasks, strict=True)):
            print(line, flush=True)
    data = measured(jobs(names, shapes), args, start)
    (args.out / "BENCHMARKS.md").write_text(benchmarks([data], recorded_peers()), encoding="utf-8")
    print(f"wrote {args.out / 'BENCHMARKS.md'}", flush=True)
    return 0 if all(row["right"] is not False for row in data["rows"]) else 1


def measured(wanted: list[tuple[str, str, str]], args: Any, start: float) -> dict[str, Any]:
    """The data of the page, as far as the budget goes."""
    import torch

    import linalg_dsl as ld
    from linalg_dsl.cli_bench import setting
    from linalg_dsl.ops.bench import USUAL, device_rates, measure_op, measure_peers, measured_kernels
    from linalg_dsl.ops.bench_shapes import SHAPES as KNOWN
    from linalg_dsl.ops.bench_shapes import target_of

    device, dtype = torch.device("cuda"), torch.bfloat16
    rates = device_rates(device, dtype)
    target = target_of(device, rates)
    assert target is not None
    data: dict[str, Any] = {
        **setting(device), "flops_per_second": rates.flops, "bytes_per_second": rates.bandwidth, "rows": [],
        "kernels": [],
    }  # fmt: skip
    for shape, name, schedule in wanted:
        if time.monotonic() - start > args.budget:
            print(f"the budget is spent before {name} {schedule} at {shape}", flush=True)
            break
        try:
            op = ld.compile(getattr(ld.ops, name).spec, backend="triton", schedule=schedule)
            given = (KNOWN[shape], dtype, device, USUAL, rates, 0.05)
            rows = list(measure_op(op, *given, target, True))
            if args.peers and schedule == "walk":
                rows += measure_peers({name: op.spec}, *given)
            if shape in ("train", "long"):
                data["kernels"] += [
                    {"operator": op.spec.name, "shape": shape, **found}
                    for found in measured_kernels(op, KNOWN[shape], dtype, device, target)
                ]
        except Exception as error:
            print(f"FAIL {name} {schedule} {shape}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        data["rows"] += [{**row.as_dict(), "shape": shape} for row in rows]
        for row in rows:
            said = "" if row.predicted is None else f", predicted {row.predicted:.3f}"
            times = f"graph {row.graph or 0:.4f}, plain {row.ms:.4f} ms{said}"
            print(f"{shape} {row.operator} {row.passes}: {times}; {row.verdict}", flush=True)
        (args.out / "rows.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    return data


if __name__ == "__main__":
    raise SystemExit(main())
