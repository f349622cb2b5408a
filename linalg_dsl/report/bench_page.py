"""The page of a measurement: plots, and the table behind them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from linalg_dsl.report.launches import human
from linalg_dsl.report.markup import Markup, tag
from linalg_dsl.report.page import document
from linalg_dsl.report.text import row, table, three


def bench_page(data: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """``data`` as ``linalg-dsl bench --json`` prints it; ``plots``: SVG elements by name."""
    rows = data["rows"]
    names = ", ".join(dict.fromkeys(str(r["operator"]) for r in rows))
    device, dtype = rows[0]["device"], rows[0]["dtype"]
    rates = (
        f"{three(data['flops_per_second'] / 1e12)} TFLOP/s and {three(data['bytes_per_second'] / 1e9)} GB/s"
    )
    figures = [
        tag(
            "figure",
            tag("figcaption", name.replace("_", ", ")),
            # an image each: names inside one drawing are none of the page's
            tag(
                "img",
                src=f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}",
                alt=name,
                class_="plot",
            ),
            style="flex-basis: 30rem",
        )
        for name, svg in plots.items()
    ]
    head = (
        "operator",
        "pass",
        "B",
        "T",
        "H",
        "K",
        "V",
        "ms",
        "fifths",
        "peak",
        "launches",
        "of FLOPs",
        "of bytes",
    )
    return document(
        f"times of {names}",
        tag(
            "header",
            tag("h1", "Measurements"),
            tag("p", names),
            tag("p", f"{device}, {dtype}; it does {rates}"),
        ),
        tag("main", tag("div", *figures, class_="sides"), table(head, [_row(r) for r in rows], range(2, 13))),
    )


def _row(r: Mapping[str, Any]) -> Markup:
    known = r["flops"] > 0
    cells = (
        r["operator"], r["passes"], *(f"{r[n]:,}" for n in "BTHKV"), three(r["ms"]),
        f"{three(r['low'])} to {three(r['high'])}", "" if r["peak"] is None else human(r["peak"]),
        "" if r["launches"] is None else str(r["launches"]),
        f"{r['flop_share']:.0%}" if known else "", f"{r['byte_share']:.0%}" if known else "",
    )  # fmt: skip
    return row(cells, range(2, 13))
