"""Plots of measurements: time and memory over length, roofline, errors. Needs matplotlib (extra ``plot``).

Every function takes plain rows, as ``linalg-dsl bench --json`` and ``check --json`` print them, and gives a
matplotlib ``Figure``; ``save`` writes it as PNG or SVG, ``svg`` gives it to be put into a page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linalg_dsl.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Point = tuple[float, float]
_ATTENTION = "attention (SDPA)"
_FORMATS = ("png", "svg")
_MOST_INSIDE = 6
"""More lines than this are named beside a plot: inside there is no room that none of them crosses."""


def time_over_length(rows: Sequence[Row], passes: str = "training") -> Figure:
    """Milliseconds over T, with the fifths around the median, and where each line crosses attention's."""
    chosen = [r for r in rows if r["passes"] == passes]
    figure, axes = _axes("T", f"ms, {passes}", log=True)
    lines = _by(chosen, "operator")
    for name, found in lines.items():
        points = [(r["T"], r["ms"]) for r in found]
        (line,) = axes.plot(*_columns(points), marker="o", label=name, **_style(name))
        axes.fill_between(
            [r["T"] for r in found], [r["low"] for r in found], [r["high"] for r in found],
            alpha=0.15, color=line.get_color(), linewidth=0,
        )  # fmt: skip
        other = [(r["T"], r["ms"]) for r in lines.get(_ATTENTION, [])]
        met = crossing(points, other) if name != _ATTENTION else None
        if met is not None:
            axes.axvline(met[0], color=line.get_color(), linestyle=":", linewidth=1)
            axes.annotate(f"T = {met[0]:,.0f}", met, xytext=(4, 4), textcoords="offset points", fontsize=8)
    return _finished(figure, axes)


def memory_over_length(rows: Sequence[Row], passes: str = "training") -> Figure:
    """Peak megabytes over T, of rows that know them."""
    known = [r for r in rows if r["passes"] == passes and r["peak"] is not None]
    if not known:
        raise ArgumentError("no row knows its peak memory: it is counted on GPUs only")
    figure, axes = _axes("T", f"peak MB, {passes}", log=True)
    for name, found in _by(known, "operator").items():
        axes.plot(
            *_columns([(r["T"], r["peak"] / 1e6) for r in found]), marker="o", label=name, **_style(name)
        )
    return _finished(figure, axes)


def roofline(rows: Sequence[Row], flops: float, bandwidth: float) -> Figure:
    """FLOP/s over FLOP per byte, below what the device does: ``flops`` and bytes per second."""
    known = [r for r in rows if r["flops"] and r["moved"]]
    figure, axes = _axes("FLOP per byte", "TFLOP/s", log=True)
    xs = [r["flops"] / r["moved"] for r in known]
    ridge = flops / bandwidth
    ends = [min([*xs, ridge]) / 2, ridge, max([*xs, ridge]) * 2]
    axes.plot(ends, [min(flops, x * bandwidth) / 1e12 for x in ends], color="0.4", label="device")
    for (name, passes), found in _by(known, "operator", "passes").items():
        points = [(r["flops"] / r["moved"], r["flops"] / r["ms"] / 1e9) for r in found]
        axes.plot(
            *_columns(points),
            marker="o" if passes == "training" else "x",
            linestyle="",
            label=f"{name}, {passes}",
        )
    return _finished(figure, axes)


def errors(rows: Sequence[Row]) -> Figure:
    """Relative errors over T, a line for each strength of the gates, and the bound that they must keep.

    Rows have ``T``, ``gates``, ``error`` and ``bound``; with a ``floor`` it is drawn in place of the bound:
    what the type costs whatever computes the recurrence.
    """
    figure, axes = _axes("T", "largest relative L2 error", log=True)
    for name, found in _by(rows, "gates").items():
        axes.plot(
            *_columns([(r["T"], max(r["error"], 1e-18)) for r in found]), marker="o", label=f"{name} gates"
        )
    label = "floor" if all("floor" in r for r in rows) else "bound"
    least = {T: min(r[label] for r in rows if r["T"] == T) for T in {r["T"] for r in rows}}
    axes.plot(*_columns(sorted(least.items())), color="0.4", linestyle="--", label=label)
    return _finished(figure, axes)


def error_panels(rows: Sequence[Row]) -> Figure:
    """The errors of a certificate and its floor: over T where several lengths were run, and over the gates.

    Rows have ``T``, ``gates``, ``error`` and ``floor``, those of one strength of gates in a row.
    """
    by_gates = _by(rows, "gates")
    long = {name: found for name, found in by_gates.items() if len({r["T"] for r in found}) > 1}
    figure, over_T = _axes("T", "largest relative L2 error", log=True)
    figure.set_figwidth(10)
    grid = figure.add_gridspec(1, 2)
    over_T.set_subplotspec(grid[0])
    over_gates = figure.add_subplot(grid[1], sharey=over_T)
    for name, found in long.items():
        line = over_T.plot(*_columns([(r["T"], max(r["error"], 1e-18)) for r in found]), marker="o")
        over_T.plot(*_columns([(r["T"], r["floor"]) for r in found]), color=line[0].get_color(), ls="--")
        line[0].set_label(f"{name} gates, dashed: floor")
    _finished(figure, over_T)
    names = list(by_gates)
    for what, style in (("error", "o"), ("floor", "_")):
        worst = [max(r[what] for r in by_gates[n]) for n in names]
        over_gates.plot(range(len(names)), [max(x, 1e-18) for x in worst], style, label=what)
    over_gates.set_xticks(range(len(names)), names, rotation=30, ha="right")
    over_gates.set_xlabel("gates")
    over_gates.grid(True, which="major", color="0.9")
    return _finished(figure, over_gates)


def spread(
    series: Mapping[str, Sequence[Point]], x: str, y: str, *, title: str = "", log_x: bool = False
) -> Figure:
    """One line per name through the mean of its points at each x, with bars from the least to the most."""
    figure, axes = _axes(x, y, log=False)
    for (name, points), mark in zip(series.items(), cycle("osD^v<>Pp*hX")):
        at: dict[float, list[float]] = {}
        for a, b in points:
            at.setdefault(a, []).append(b)
        xs = sorted(at)
        means = [sum(at[a]) / len(at[a]) for a in xs]
        below = [m - min(at[a]) for a, m in zip(xs, means, strict=True)]
        above = [max(at[a]) - m for a, m in zip(xs, means, strict=True)]
        axes.errorbar(xs, means, yerr=(below, above), label=name, marker=mark, markersize=4, capsize=2)
    axes.set_title(title)
    if log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({a for points in series.values() for a, _ in points})
        axes.set_xticks(ticks, [f"{a:g}" for a in ticks])
    return _finished(figure, axes)


def bars(values: Mapping[str, float], x: str) -> Figure:
    """One horizontal bar per name, from the top in the order given, with its number."""
    figure, axes = _axes(x, "", log=False)
    figure.set_figheight(1.2 + 0.3 * max(len(values), 1))
    names = list(values)[::-1]
    drawn = axes.barh(names, [values[n] for n in names])
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize="small")
    axes.margins(x=0.12)
    axes.set_axisbelow(True)
    return figure


def crossing(points: Sequence[Point], other: Sequence[Point]) -> Point | None:
    """Where a line falls below another for good, both straight between their points in log-log scale."""
    from math import exp, log

    ours, theirs = dict(points), dict(other)
    shared = sorted(set(ours) & set(theirs))
    gaps = [log(ours[t] / theirs[t]) for t in shared]
    found = None
    for a, b, before, after in zip(shared, shared[1:], gaps, gaps[1:], strict=False):
        if before > 0 >= after:
            part = before / (before - after)
            x = exp(log(a) + part * (log(b) - log(a)))
            found = (x, exp(log(ours[a]) + part * (log(ours[b]) - log(ours[a]))))
        elif after > 0:
            found = None
    return found


def save(figure: Figure, path: Path) -> Path:
    """Writes a PNG or an SVG, by the name of the file. Raises ArgumentError for another ending."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in _FORMATS:
        raise ArgumentError(f"a plot is written as .png or .svg, got {path.name!r}")
    try:
        figure.savefig(path, format=kind, dpi=160)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error}") from None
    return path


def svg(figure: Figure) -> str:
    """The plot as an ``<svg>`` element that refers to nothing outside itself."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text[text.index("<svg") :]


# -- how it looks -------------------------------------------------------------------------------------------
def _axes(x: str, y: str, *, log: bool) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError("plots need matplotlib: pip install 'linalg-dsl[plot]'") from None
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes: Axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if log:
        axes.set_xscale("log", base=2 if x == "T" else 10)
        axes.set_yscale("log")
    axes.grid(True, which="major", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finished(figure: Figure, axes: Axes) -> Figure:
    beside: dict[str, Any] = {}
    if len(axes.get_legend_handles_labels()[1]) > _MOST_INSIDE:
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axes.legend(fontsize=8, frameon=False, **beside)
    return figure


def _style(name: str) -> dict[str, Any]:
    return {"color": "0.25", "linestyle": "--"} if name == _ATTENTION else {}


def _by(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """The rows of each line, in the order of T where they have one."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row[k] for k in keys)
        found.setdefault(key if len(keys) > 1 else key[0], []).append(row)
    return {key: sorted(lines, key=lambda r: float(r["T"])) for key, lines in found.items()}


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
