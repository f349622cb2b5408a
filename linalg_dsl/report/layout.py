"""Layered drawings: where the boxes of a directed acyclic graph stand, and how its edges run between them.

Layers come from networkx's topological generations; an edge over several layers gets a place in each, so that
it runs between the boxes; a few sweeps bring neighbours above each other. Edges bend between layers only:
beside boxes, however tall, they run straight down.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx

Key = Hashable
Point = tuple[float, float]
_SWEEPS = 8
_GAP, _LANE = 14.0, 10.0
_NEAR = 1e-3
"""Points closer than this are one."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Centres of the boxes, the points that each edge goes through, and the size of the whole."""

    centres: Mapping[Any, Point]
    routes: Mapping[tuple[Any, Any], tuple[Point, ...]]
    width: float
    height: float


def layered(graph: nx.DiGraph[Any], sizes: Mapping[Any, tuple[float, float]], rise: float = 34.0) -> Layout:
    """From top to bottom; ``sizes`` are (width, height) of the boxes, ``rise`` the room between layers."""
    ranks = _ranks(graph)
    chains, layers, neighbours = _with_lanes(graph, ranks)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for rank in sorted(layers, reverse=not down):
            _reorder(layers, rank, neighbours, -1 if down else 1)
    widths = {n: sizes[n][0] if n in sizes else _LANE for layer in layers.values() for n in layer}
    xs = _columns(layers, neighbours, widths)
    left = min((xs[n] - widths[n] / 2 for n in xs), default=0.0)
    xs = {n: x - left + _GAP for n, x in xs.items()}
    width = max((xs[n] + widths[n] / 2 for n in xs), default=0.0) + _GAP
    ys, rows, top = {}, {}, _GAP
    for rank in sorted(layers):
        tall = max((sizes[n][1] for n in layers[rank] if n in sizes), default=0.0)
        ys[rank], rows[rank] = top + tall / 2, (top, top + tall)
        top += tall + rise
    centres = {n: (xs[n], ys[ranks[n]]) for n in graph}
    routes = {}
    for (a, b), lanes in chains.items():
        begin, end = ys[ranks[a]] + sizes[a][1] / 2, ys[ranks[b]] - sizes[b][1] / 2
        points = [(xs[a], rows[ranks[a]][1]), *((xs[n], y) for n in lanes for y in rows[n[3]])]
        points.append((xs[b], rows[ranks[b]][0]))
        inner = [p for p in points if begin + _NEAR < p[1] < end - _NEAR]
        routes[a, b] = ((xs[a], begin), *inner, (xs[b], end))
    return Layout(centres, routes, width, top - rise + _GAP)


def _ranks(graph: nx.DiGraph[Any]) -> dict[Any, int]:
    """Generations; what nothing comes before stands just above its first use."""
    import networkx as nx

    ranks = {n: i for i, layer in enumerate(nx.topological_generations(graph)) for n in layer}
    for n in graph:
        if graph.in_degree(n) == 0 and graph.out_degree(n):
            ranks[n] = min(ranks[m] for m in graph.successors(n)) - 1
    return ranks


def _with_lanes(
    graph: nx.DiGraph[Any], ranks: Mapping[Any, int]
) -> tuple[dict[tuple[Any, Any], list[Any]], dict[int, list[Any]], dict[Any, dict[int, list[Any]]]]:
    """For each edge its places in the layers between its ends; layers; neighbours above (-1), below (1)."""
    layers: dict[int, list[Any]] = {}
    for n in graph:
        layers.setdefault(ranks[n], []).append(n)
    neighbours: dict[Any, dict[int, list[Any]]] = {n: {-1: [], 1: []} for n in graph}
    chains = {}
    for a, b in graph.edges:
        lanes = [("lane", a, b, rank) for rank in range(ranks[a] + 1, ranks[b])]
        for lane in lanes:
            layers[lane[3]].append(lane)
            neighbours[lane] = {-1: [], 1: []}
        chain = [a, *lanes, b]
        for upper, lower in pairwise(chain):
            neighbours[upper][1].append(lower)
            neighbours[lower][-1].append(upper)
        chains[a, b] = lanes
    return chains, layers, neighbours


def _reorder(
    layers: dict[int, list[Any]], rank: int, neighbours: Mapping[Any, Mapping[int, list[Any]]], side: int
) -> None:
    """Sorts a layer by the mean place of its neighbours on one side; those without stay where they are."""
    other = layers.get(rank + side)
    if not other:
        return
    place = {n: i / max(1, len(other) - 1) for i, n in enumerate(other)}
    own = {n: i / max(1, len(layers[rank]) - 1) for i, n in enumerate(layers[rank])}

    def key(n: Any) -> float:
        near = [place[m] for m in neighbours[n][side] if m in place]
        return sum(near) / len(near) if near else own[n]

    layers[rank].sort(key=key)


def _columns(
    layers: Mapping[int, list[Any]],
    neighbours: Mapping[Any, Mapping[int, list[Any]]],
    widths: Mapping[Any, float],
) -> dict[Any, float]:
    """x of every box and lane: near the mean of its neighbours, in order, without overlap."""
    xs: dict[Any, float] = {}
    for layer in layers.values():
        at = 0.0
        for n in layer:
            xs[n] = at + widths[n] / 2
            at += widths[n] + _GAP
        for n in layer:
            xs[n] -= at / 2
    for _ in range(2 * _SWEEPS):
        for layer in layers.values():
            wanted = {}
            for n in layer:
                near = [xs[m] for side in (-1, 1) for m in neighbours[n][side]]
                wanted[n] = sum(near) / len(near) if near else xs[n]
            _place(layer, wanted, widths, xs)
    return xs


def _place(
    layer: list[Any], wanted: Mapping[Any, float], widths: Mapping[Any, float], xs: dict[Any, float]
) -> None:
    """As near as possible to what is wanted: boxes that touch move as one block."""
    blocks: list[tuple[list[Any], float]] = []  # members, x of the first
    for n in layer:
        members, first = [n], wanted[n]
        while blocks:
            before, start = blocks[-1]
            if start + _offsets([*before, members[0]], widths)[-1] <= first:
                break
            blocks.pop()
            members = [*before, *members]
            offsets = _offsets(members, widths)
            first = sum(wanted[m] - o for m, o in zip(members, offsets, strict=True)) / len(members)
        blocks.append((members, first))
    for members, first in blocks:
        for m, offset in zip(members, _offsets(members, widths), strict=True):
            xs[m] = first + offset


def _offsets(members: list[Any], widths: Mapping[Any, float]) -> list[float]:
    out = [0.0]
    for a, b in pairwise(members):
        out.append(out[-1] + (widths[a] + widths[b]) / 2 + _GAP)
    return out
