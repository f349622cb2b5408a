"""The measurements behind ``linalg-dsl bench``."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import linalg_dsl
from linalg_dsl.cli_check import Request
from linalg_dsl.cli_output import Output
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec

if TYPE_CHECKING:
    from linalg_dsl.ops.bench import Shape
    from linalg_dsl.ops.op import CompiledOp

COLUMNS = (
    "operator", "pass", "shape", "T", "ms", "low", "high", "graph ms", "predicted ms", "ns a token",
    "peak MB", "launches", "of FLOPs", "of bytes", "checked",
)  # fmt: skip
KERNEL_COLUMNS = ("operator", "shape", "phase", "kernel", "us", "predicted us", "bound", "ratio")
SMALL = {"B": 1, "T": (256, 1024), "H": 2, "K": 32, "V": 32}
SLOW = 10.0
"""Seconds of one call that are said beforehand."""
LARGE = {"B": 8, "T": (2048,), "H": 16, "K": 128, "V": 128}


@dataclass(frozen=True)
class Wanted:
    """What to measure; sizes that are None are those of ``SMALL`` on a CPU, of ``LARGE`` on a GPU.

    ``shapes``: names in place of sizes; ``head_sizes``: one batch over sizes of K and V; ``kernels``: also
    every kernel by itself beside the model's time; ``check``: whether numbers are right, in the same run.
    """

    B: int | None
    T: Sequence[int]
    H: int | None
    K: int | None
    V: int | None
    passes: Sequence[str]
    peers: bool
    seconds: float
    shapes: Sequence[str] = ()
    head_sizes: bool = False
    kernels: bool = False
    check: bool = False
    schedule: str = "walk"

    def named(self, default: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
        """(name or empty, shape). Raises ``ArgumentError`` for unknown names, and for sizes beside names."""
        from linalg_dsl.ops.bench import Shape
        from linalg_dsl.ops.bench_shapes import HEAD_SIZES, shape_named

        given = [n for n in "BHKV" if getattr(self, n) is not None] + (["T"] if self.T else [])
        if (self.shapes or self.head_sizes) and given:
            raise ArgumentError(f"--{given[0]}: a shape that is named has its sizes; leave it out")
        for name in self.shapes:
            yield name, shape_named(name)
        for shape in HEAD_SIZES if self.head_sizes else ():
            yield f"K {shape.K}, V {shape.V}", shape
        if not self.shapes and not self.head_sizes:
            sizes = {n: default[n] if getattr(self, n) is None else getattr(self, n) for n in "BHKV"}
            for length in self.T or default["T"]:
                yield "", Shape(T=length, **sizes)


def _least_seconds(op: CompiledOp, shape: Shape, rate: float) -> float:
    """What the products of a forward and a backward take at ``rate`` FLOP per second."""
    work = [
        plan.work(key, value).training_flops for plan, key, value in op.plan.sized_stages(shape.K, shape.V)
    ]
    return sum(work) * shape.B * shape.T * shape.H / rate


def run_bench(
    specs: Sequence[RecurrenceSpec],
    request: Request,
    wanted: Wanted,
    plots: Path | None,
    html: Path | None,
    output: Output,
    out: Path | None = None,
) -> bool:
    """Prints a row for every operator, shape and pass; writes plots to a folder, a page and data to files.

    Whether all numbers that were checked are right.
    """
    from linalg_dsl.ops.bench import PASSES, USUAL, device_rates, measure_op, measure_peers
    from linalg_dsl.ops.bench_shapes import target_of
    from linalg_dsl.ops.peers import recorded_rows

    device, dtype = request.torch_device(), request.torch_dtype()
    shapes = list(wanted.named(LARGE if device.type == "cuda" else SMALL))
    passes = tuple(wanted.passes) or USUAL
    if unknown := [p for p in passes if p not in PASSES]:
        raise ArgumentError(f"a pass is one of {', '.join(PASSES)}, got {unknown[0]!r}")
    ops = [linalg_dsl.compile(spec, backend=request.backend, schedule=wanted.schedule) for spec in specs]
    with output.working(f"measuring what {device} does"):
        rates = device_rates(device, dtype)
    output.note(
        f"{device}: {rates.flops / 1e12:,.3g} TFLOP/s in {request.dtype}, {rates.bandwidth / 1e9:,.4g} GB/s"
    )
    target = target_of(device, rates)
    data: dict[str, Any] = {
        **setting(device), "flops_per_second": rates.flops, "bytes_per_second": rates.bandwidth, "rows": [],
        "kernels": [],
    }  # fmt: skip
    rows, kernels = data["rows"], data["kernels"]
    for name, shape in shapes:
        told = name or ", ".join(f"{n} {x}" for n, x in asdict(shape).items())
        given = (shape, dtype, device, passes, rates, wanted.seconds)
        for op in ops:
            if (needed := _least_seconds(op, shape, rates.flops)) > SLOW:
                output.note(
                    f"{op.spec.name}, {told}: about {needed:,.0f} s for a forward and backward on {device}; "
                    "--B, --T, --H, --K, --V and --pass make it smaller"
                )
            with output.working(f"measuring {op.spec.name}: {told}"):
                found = measure_op(op, *given, target, wanted.check)
                rows += [{**r.as_dict(), "shape": name} for r in found]
                if wanted.kernels and target is not None:
                    kernels += _kernels(op, shape, name, dtype, device, target)
        if wanted.peers:
            with output.working(f"measuring others: {told}"):
                others = measure_peers({op.spec.name: op.spec for op in ops}, *given)
                rows += [{**r.as_dict(), "shape": name} for r in others]
            live = {r["operator"] for r in rows}
            if device.type == "cuda":
                rows += [
                    {**r, "shape": name}
                    for r in recorded_rows([op.spec.name for op in ops], shape, passes)
                    if r["operator"].partition(",")[0] + ")" not in live
                ]
        _write(out, data)
    output.table("", COLUMNS, [_shown(row) for row in rows])
    if kernels:
        output.table("kernels", KERNEL_COLUMNS, kernels)
    if plots is not None or html is not None:
        _draw(data, plots, html, output)
    output.data(data)
    return all(row.get("right") is not False for row in rows)


def setting(device: Any) -> dict[str, Any]:
    """Card, versions and date of a measurement."""
    from importlib.metadata import version

    import torch

    from linalg_dsl.codegen.cache import toolchain
    from linalg_dsl.ops.selfcheck import device_name

    return {
        "card": device_name(device),
        "versions": f"linalg_dsl {version('linalg_dsl')}, {toolchain()}, CUDA {torch.version.cuda}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _kernels(op: Any, shape: Shape, name: str, dtype: Any, device: Any, target: Any) -> list[dict[str, Any]]:
    """Every kernel of a training step: measured alone, and what the model says."""
    from linalg_dsl.ops.bench import measured_kernels

    kept = {"operator": op.spec.name, "shape": name, **asdict(shape)}
    return [
        {**kept, **found, "predicted us": found["predicted"], "ratio": found["us"] / found["predicted"]}
        for found in measured_kernels(op, shape, dtype, device, target)
    ]


def _write(out: Path | None, data: dict[str, Any]) -> None:
    """What there is so far: a run that is cut short has measured something."""
    import json

    if out is None:
        return
    try:
        out.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write {out}: {error}") from None


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    known = row["flops"] > 0
    tokens = row["B"] * row["H"] * (1 if row["passes"] == "decode" else row["T"])
    return {
        **row,
        "pass": row["passes"],
        "graph ms": row["graph"],
        "predicted ms": row["predicted"],
        "ns a token": 1e6 * (row["graph"] or row["ms"]) / tokens,  # and head
        "peak MB": None if row["peak"] is None else row["peak"] / 1e6,
        "of FLOPs": f"{row['flop_share']:.0%}" if known else None,
        "of bytes": f"{row['byte_share']:.0%}" if known else None,
        "checked": row["verdict"],
    }


def _draw(data: dict[str, Any], plots: Path | None, html: Path | None, output: Output) -> None:
    from linalg_dsl import plots as drawing

    rows = data["rows"]
    figures = {
        f"time_{one}": drawing.time_over_length(rows, one)
        for one in dict.fromkeys(r["passes"] for r in rows)
        if one != "decode"  # which has no length
    }
    figures["roofline"] = drawing.roofline(rows, data["flops_per_second"], data["bytes_per_second"])
    if any(r["peak"] is not None for r in rows):
        figures["memory"] = drawing.memory_over_length(rows, rows[-1]["passes"])
    if plots is not None:
        try:
            plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"cannot write to {plots}: {error}") from None
        for name, figure in figures.items():
            output.note(f"wrote {drawing.save(figure, plots / f'{name}.svg')}")
            drawing.save(figure, plots / f"{name}.png")
    if html is not None:
        from linalg_dsl.report.bench_page import bench_page

        try:
            html.write_text(
                bench_page(data, {n: drawing.svg(f) for n, f in figures.items()}), encoding="utf-8"
            )
        except OSError as error:
            raise ArgumentError(f"cannot write {html}: {error}") from None
        output.note(f"wrote {html}")
