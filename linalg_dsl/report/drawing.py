"""A flow as SVG; looks come from the page's style sheet by class."""

from __future__ import annotations

from html import escape
from typing import Any, NamedTuple

from linalg_dsl.report.flow import Box, Flow
from linalg_dsl.report.layout import Point, layered
from linalg_dsl.report.markup import Markup, tag

_CHAR, _LINE, _PAD = 6.3, 14.0, 7.0
_LEAST = 0.72
"""A drawing shrinks to this before it scrolls."""


class Drawing(NamedTuple):
    """``width``: in pixels, where nothing has to shrink."""

    svg: Markup
    width: int


def draw(flow: Flow, title: str) -> Drawing:
    """The drawing, as wide as its boxes need."""
    if not flow.boxes:
        return Drawing(Markup(), 0)
    sizes = {key: _size(box) for key, box in flow.boxes.items()}
    found = layered(flow.graph(), sizes)
    edges = [
        tag("g", tag("title", flow.edges[edge]), tag("path", d=_curve(points), class_="edge"), class_="link")
        for edge, points in found.routes.items()
    ]
    boxes = [_box(box, found.centres[key], sizes[key]) for key, box in flow.boxes.items()]
    width, height = round(found.width), round(found.height)
    svg = tag(
        "svg", tag("title", title), *edges, *boxes,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", role="img", class_="flow",
        style=f"width: 100%; max-width: {width}px; min-width: {round(_LEAST * width)}px",
    )  # fmt: skip
    return Drawing(svg, width)


def _size(box: Box) -> tuple[float, float]:
    if box.marks:
        return max(map(len, box.lines)) * _CHAR + 3 * _PAD + 8, len(box.lines) * _LINE + _PAD
    longest = max(len(line) * (1.12 if i == 0 else 0.97) for i, line in enumerate(box.lines))
    return max(34.0, longest * _CHAR + 2 * _PAD), len([x for x in box.lines if x]) * _LINE + _PAD


def _box(box: Box, centre: Point, size: tuple[float, float]) -> Markup:
    (x, y), (width, height) = centre, size
    lines = [line for line in box.lines if line]
    top = y - (len(lines) - 1) * _LINE / 2 + 4
    texts: list[Markup] = []
    for i, line in enumerate(lines):
        at = _short(top + i * _LINE)
        if box.marks:
            left = x - width / 2 + _PAD
            texts.append(
                tag("rect", x=_short(left), y=_short(top + i * _LINE - 8), width="8", height="8", rx="2",
                    class_=box.marks[i])
            )  # fmt: skip
            texts.append(tag("text", Markup(_fixed(line)), x=_short(left + 13), y=at, class_="row"))
        else:
            texts.append(tag("text", line, x=_short(x), y=at, class_="name" if i == 0 else "more"))
    rect = tag(
        "rect", x=_short(x - width / 2), y=_short(y - height / 2), width=_short(width), height=_short(height),
        rx="4" if "kernel" in box.kind else _short(min(9.0, height / 2)),
    )  # fmt: skip
    hint = [tag("title", box.hint)] if box.hint else []
    made = tag("g", *hint, rect, *texts, class_=f"box {box.kind}")
    return tag("a", made, href=f"#{box.href}") if box.href else made


def _fixed(line: str) -> str:
    """Columns stay columns: SVG joins spaces."""
    return escape(line, quote=False).replace(" ", "\N{NO-BREAK SPACE}")


def _curve(points: tuple[Point, ...]) -> str:
    """A smooth line through the points that leaves and arrives vertically."""
    (x, y), *rest = points
    out = f"M{_short(x)} {_short(y)}"
    for nx, ny in rest:
        bend = (ny - y) / 2
        if nx == x:
            out += f"V{_short(ny)}"
            y = ny
            continue
        out += f"C{_short(x)} {_short(y + bend)} {_short(nx)} {_short(ny - bend)} {_short(nx)} {_short(ny)}"
        x, y = nx, ny
    return out


def _short(x: Any) -> str:
    return f"{x:.1f}".removesuffix(".0")
