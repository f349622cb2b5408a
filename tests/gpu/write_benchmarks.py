"""BENCHMARKS.md from what ``linalg-dsl bench --out`` wrote.

    linalg-dsl bench gla kda ... --shape train --shape long --check --out rows.json      on the GPU
    python tests/gpu/write_benchmarks.py rows.json more.json > BENCHMARKS.md

Rows of others are those of the same run, else of ``ops/peers.json``. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

PASSES = {"forward": "forward", "training": "forward + backward"}
NAMES = (
    "linear_attention,retnet,simple_gla,delta_rule,gated_delta_rule,comba,gla,hgrn2,rwkv6,kda,gdn2,iplr,dplr"
)
SHAPES = "train,long,d64,d256,mid,few"
"""What a whole page has."""
Row = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", type=Path)
    args = parser.parse_args()
    data = [json.loads(p.read_text(encoding="utf-8")) for p in args.data]
    print(benchmarks(data, recorded_peers()), end="")
    return 0


def recorded_peers() -> Any:
    """What was measured of others, in a run of its own."""
    return json.loads(files("linalg_dsl.ops").joinpath("peers.json").read_text(encoding="utf-8"))


def benchmarks(data: Sequence[Mapping[str, Any]], recorded: Mapping[str, Any]) -> str:
    """The text; ``data``: one object per run, of one card and one set of versions."""
    settings = {(d["card"], d["versions"]) for d in data}
    if len(settings) != 1:
        raise SystemExit(f"these are measurements of several cards or versions: {sorted(settings)}")
    ((card, versions),) = settings
    rows = [r for d in data for r in d["rows"]]
    dates = sorted({d["date"] for d in data})
    flops = max(d["flops_per_second"] for d in data)
    moved = max(d["bytes_per_second"] for d in data)
    ours = [r for r in rows if r["backend"] == "triton" and r["passes"] in PASSES]
    peers = {**_index(recorded["rows"]), **_index([r for r in rows if r["backend"] in ("fla", "torch")])}
    return "\n".join(
        [
            "# Benchmarks",
            "",
            f"{card}, {' and '.join(dates)}. {versions}. It does {flops / 1e12:,.0f} TFLOP/s in a large "
            f"product of bfloat16 and {moved / 1e12:.2f} TB/s in a large copy. Written by "
            "`tests/gpu/write_benchmarks.py` from `linalg-dsl bench --check --out`.",
            "",
            "Times are milliseconds, medians; *graph* is the replay of a CUDA graph, the time of the GPU "
            "alone; *plain* a call through torch. *predicted* is what the cost model says to the first. "
            "*floor* is what the bytes or the FLOPs of the plan alone would take, whichever is longer, as a "
            "share of the time. *peer* is flash-linear-attention's operator (graph where it could be "
            f"captured, else plain), from the same run or from {recorded['card']}, {recorded['date']}, "
            f"{recorded['versions']}; *times* is how much longer it takes.",
            *_tables(ours, peers),
            *_losses(ours, peers),
            *_left_out(ours),
            *_attention(ours, peers),
            *_checks(ours),
            "",
        ]
    )


def _index(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    return {(_base(r), r["passes"], *_sizes(r)): r for r in rows}


def _base(row: Row) -> str:
    return str(row["operator"]).partition(" (")[0]


def _sizes(row: Row) -> tuple[int, ...]:
    return tuple(row[n] for n in "BTHKV")


def _time(row: Row) -> float:
    return float(row["graph"] or row["ms"])


def _floor(row: Row) -> float:
    return max(float(row["flop_share"]), float(row["byte_share"]))


def _peer(row: Row, peers: Mapping[tuple[Any, ...], Row]) -> Row | None:
    return peers.get((_base(row), row["passes"], *_sizes(row)))


def _best(rows: Sequence[Row]) -> list[Row]:
    """Of schedules of one operator, shape and pass the fastest."""
    out: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (_base(row), row["passes"], *_sizes(row))
        if key not in out or _time(row) < _time(out[key]):
            out[key] = row
    return list(out.values())


def _tables(ours: Sequence[Row], peers: Mapping[tuple[Any, ...], Row]) -> Iterator[str]:
    for shape in dict.fromkeys((r["shape"], *_sizes(r)) for r in ours):
        name, *sizes = shape
        told = " ".join(f"{n} {x}" for n, x in zip("BTHKV", sizes, strict=True))
        yield from ("", f"## {name + ': ' if name else ''}{told}", "")
        yield "| operator | pass | graph | plain | predicted | floor | launches | peak MB | peer | times |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for row in (r for r in ours if (r["shape"], *_sizes(r)) == shape):
            other = _peer(row, peers)
            theirs = ("", "") if other is None else (_ms(_time(other)), f"{_time(other) / _time(row):.2f}")
            cells = (
                row["operator"], PASSES[row["passes"]], _ms(row["graph"]), _ms(row["ms"]),
                _ms(row["predicted"]), f"{_floor(row):.0%}", row["launches"] or "",
                "" if row["peak"] is None else f"{row['peak'] / 1e6:,.0f}", *theirs,
            )  # fmt: skip
            yield f"| {' | '.join(map(str, cells))} |"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1 else f"{value:.3f}"


def _losses(ours: Sequence[Row], peers: Mapping[tuple[Any, ...], Row]) -> Iterator[str]:
    yield from ("", "## Where we lose", "")
    lost = [
        (row, other)
        for row in _best(ours)
        if (other := _peer(row, peers)) is not None and _time(other) < _time(row)
    ]
    if not lost:
        yield "Nowhere in these tables."
    for row, other in sorted(lost, key=lambda pair: _time(pair[1]) / _time(pair[0])):
        yield (
            f"- {row['operator']}, {row['shape'] or _sizes(row)}, {PASSES[row['passes']]}: {_ms(_time(row))} "
            f"against {_ms(_time(other))} of {other['operator']}"
        )


def _left_out(ours: Sequence[Row]) -> Iterator[str]:
    """What a whole page has and this one has not."""
    lines = []
    for shape in SHAPES.split(","):
        here = {_base(r) for r in ours if r["shape"] == shape}
        rest = [n for n in NAMES.split(",") if n not in here]
        if rest:
            lines.append(f"- {shape}: {', '.join(rest) if here else 'all operators'}")
    if lines:
        yield from ("", "## Not measured in this run", "", *lines)


def _attention(ours: Sequence[Row], peers: Mapping[tuple[Any, ...], Row]) -> Iterator[str]:
    found = {k: r for k, r in peers.items() if k[0] == "attention"}
    shapes = {_sizes(r): r["shape"] for r in ours}
    lines = [
        f"| {shapes[_sizes(r)] or _sizes(r)} | {PASSES[r['passes']]} | {_ms(_time(r))} |"
        for r in found.values()
        if _sizes(r) in shapes and r["passes"] in PASSES
    ]
    if lines:
        yield from (
            "",
            "## Causal softmax attention (SDPA)",
            "",
            "| shape | pass | ms |",
            "|---|---|---|",
            *lines,
        )


def _checks(ours: Sequence[Row]) -> Iterator[str]:
    checked = [r for r in ours if r["verdict"] is not None]
    yield from ("", "## Numbers", "")
    yield (
        f"{len({(_base(r), *_sizes(r)) for r in checked})} of {len({(_base(r), *_sizes(r)) for r in ours})} "
        "pairs of operator and shape were checked in the same run: outputs pre-filled with NaN, relative L2 "
        "errors of o (5e-3) and of every gradient (1e-2) against the float64 step loop on the first tokens "
        "of the first sequence, equal bits over 20 runs."
    )
    for row in checked:
        if not row["right"]:
            yield f"- beyond a bound: {row['operator']}, {row['shape'] or _sizes(row)}: {row['verdict']}"


if __name__ == "__main__":
    raise SystemExit(main())
