"""The measurements behind ``linalg-dsl bench``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import linalg_dsl
from linalg_dsl.cli_check import Request
from linalg_dsl.cli_output import Output
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec

COLUMNS = ("operator", "pass", "T", "ms", "low", "high", "peak MB", "launches", "of FLOPs", "of bytes")
SMALL = {"B": 1, "T": (256, 1024), "H": 2, "K": 32, "V": 32}
LARGE = {"B": 8, "T": (2048,), "H": 16, "K": 128, "V": 128}


@dataclass(frozen=True)
class Wanted:
    """What to measure; sizes that are None are those of ``SMALL`` on a CPU, of ``LARGE`` on a GPU."""

    B: int | None
    T: Sequence[int]
    H: int | None
    K: int | None
    V: int | None
    passes: Sequence[str]
    peers: bool
    seconds: float


def run_bench(
    specs: Sequence[RecurrenceSpec],
    request: Request,
    wanted: Wanted,
    plots: Path | None,
    html: Path | None,
    output: Output,
) -> None:
    """Prints a row for every operator, length and pass; writes plots to a folder and a page to a file."""
    from linalg_dsl.ops.bench import PASSES, USUAL, Shape, device_rates, measure_op, measure_peers

    device, dtype = request.torch_device(), request.torch_dtype()
    default: dict[str, Any] = LARGE if device.type == "cuda" else SMALL
    sizes = {n: default[n] if getattr(wanted, n) is None else getattr(wanted, n) for n in "BHKV"}
    passes = tuple(wanted.passes) or USUAL
    if unknown := [p for p in passes if p not in PASSES]:
        raise ArgumentError(f"a pass is one of {', '.join(PASSES)}, got {unknown[0]!r}")
    ops = [linalg_dsl.compile(spec, backend=request.backend) for spec in specs]
    with output.working(f"measuring what {device} does"):
        rates = device_rates(device, dtype)
    output.note(
        f"{device}: {rates.flops / 1e12:,.3g} TFLOP/s in {request.dtype}, {rates.bandwidth / 1e9:,.4g} GB/s"
    )
    rows: list[dict[str, Any]] = []
    for length in wanted.T or default["T"]:
        shape = Shape(T=length, **sizes)
        told = ", ".join(f"{n} {x}" for n, x in {**sizes, "T": length}.items())
        given = (shape, dtype, device, passes, rates, wanted.seconds)
        for op in ops:
            with output.working(f"measuring {op.spec.name}: {told}"):
                rows += [r.as_dict() for r in measure_op(op, *given)]
        if wanted.peers:
            with output.working(f"measuring others: {told}"):
                rows += [r.as_dict() for r in measure_peers({op.spec.name: op.spec for op in ops}, *given)]
    output.table("", COLUMNS, [_shown(row) for row in rows])
    data = {"flops_per_second": rates.flops, "bytes_per_second": rates.bandwidth, "rows": rows}
    if plots is not None or html is not None:
        _draw(data, plots, html, output)
    output.data(data)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    known = row["flops"] > 0
    return {
        **row,
        "pass": row["passes"],
        "peak MB": None if row["peak"] is None else row["peak"] / 1e6,
        "of FLOPs": f"{row['flop_share']:.0%}" if known else None,
        "of bytes": f"{row['byte_share']:.0%}" if known else None,
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
