"""A small line chart in logarithmic scales, drawn as SVG with the page's colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log2, log10

from linalg_dsl.report.markup import Markup, tag

Point = tuple[float, float]
_WIDTH, _HEIGHT = 560.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 150.0, 12.0, 34.0


def chart(
    lines: Mapping[str, Sequence[Point]], marks: Sequence[tuple[Point, str]], across: str, up: str
) -> Markup:
    """``lines`` by their names, ``marks`` with a text each; both axes are logarithmic, x in powers of two."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    low, high = floor(log10(min(ys))), ceil(log10(max(ys)))
    first, last = log2(min(xs)), log2(max(xs))

    def at(point: Point) -> Point:
        x = (log2(point[0]) - first) / max(last - first, 1e-9)
        y = (log10(point[1]) - low) / max(high - low, 1)
        return _LEFT + x * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - y * (_HEIGHT - _TOP - _BOTTOM)

    parts: list[Markup] = []
    for power in range(ceil(first), floor(last) + 1, 2):
        x, _ = at((2.0**power, 10.0**low))
        parts.append(_rule(x, _TOP, x, _HEIGHT - _BOTTOM))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 14, _short(2**power), "middle"))
    for power in range(low, high + 1):
        _, y = at((2.0**first, 10.0**power))
        parts.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(_text(_LEFT - 6, y + 4, _short(10**power), "end"))
    for i, (name, points) in enumerate(lines.items()):
        placed = [at(p) for p in points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(tag("path", d=path, class_=f"curve c{i}"))
        parts.append(_text(placed[-1][0] + 6, placed[-1][1] + 4, name, "start"))
    for point, text in marks:
        x, y = at(point)
        parts.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="4", class_="mark"))
        parts.append(_text(x + 7, y + 13, text, "start"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, across, "middle"))
    return tag(
        "svg", tag("title", f"{up} against {across}"), *parts, xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", role="img", class_="chart",
    )  # fmt: skip


def _rule(x: float, y: float, to_x: float, to_y: float) -> Markup:
    return tag("line", x1=f"{x:.1f}", y1=f"{y:.1f}", x2=f"{to_x:.1f}", y2=f"{to_y:.1f}", class_="rule")


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def _short(x: float) -> str:
    """1024 is 1k, a million 1M."""
    for size, unit in ((2**30, "G"), (2**20, "M"), (2**10, "k")):
        if x == size * (x // size) and x >= size:
            return f"{x // size:g}{unit}"
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= scale:
            return f"{x / scale:g}{unit}"
    return f"{x:g}"
