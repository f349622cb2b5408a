"""Plots of comparisons; matplotlib (the extra ``plot``) is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linalg_dsl.errors import ArgumentError

Points = Sequence[tuple[float, float]]
_MARKS = "osD^v<>Pp*hX"


def _figure(width: float = 7.0, height: float = 4.2) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError("plots need matplotlib: pip install 'linalg-dsl[plot]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _write(figure: Any, path: str | Path) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target


def lines(
    path: str | Path,
    series: Mapping[str, Points],
    *,
    x: str,
    y: str,
    title: str = "",
    log_x: bool = False,
    chance: float | None = None,
) -> Path:
    """One line per name through the mean of its points at each x, with bars from least to most.

    The file's ending (png, svg, pdf) says the format. ``chance`` draws what guessing gives.
    """
    figure, axes = _figure()
    for i, (name, points) in enumerate(series.items()):
        by_x: dict[float, list[float]] = {}
        for a, b in points:
            by_x.setdefault(a, []).append(b)
        xs = sorted(by_x)
        means = [sum(by_x[a]) / len(by_x[a]) for a in xs]
        below = [m - min(by_x[a]) for a, m in zip(xs, means, strict=True)]
        above = [max(by_x[a]) - m for a, m in zip(xs, means, strict=True)]
        axes.errorbar(
            xs,
            means,
            yerr=(below, above),
            label=name,
            marker=_MARKS[i % len(_MARKS)],
            markersize=4,
            capsize=2,
        )
    if chance is not None:
        axes.axhline(chance, color="grey", linestyle=":", linewidth=1, label="chance")
    if log_x:
        axes.set_xscale("log", base=2)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return _write(figure, path)


def bars(path: str | Path, values: Mapping[str, float], *, x: str, title: str = "") -> Path:
    """One horizontal bar per name, in the order given, with its number."""
    figure, axes = _figure(7.0, 1.2 + 0.3 * max(len(values), 1))
    names = list(values)[::-1]
    drawn = axes.barh(names, [values[n] for n in names])
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize="small")
    axes.set(xlabel=x, title=title)
    axes.margins(x=0.12)
    return _write(figure, path)
