"""Layered drawings: boxes do not overlap, edges run downwards and end at their boxes."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import networkx as nx
import pytest

from linalg_dsl.report.layout import layered


def graph_of(seed: int) -> nx.DiGraph[int]:
    rng = random.Random(seed)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(rng.randint(1, 25)))
    for b in graph:
        graph.add_edges_from((a, b) for a in range(b) if rng.random() < 0.2)
    return graph


@pytest.mark.parametrize("seed", range(12))
def test_boxes_keep_apart_and_edges_run_down(seed: int) -> None:
    graph = graph_of(seed)
    rng = random.Random(seed)
    sizes = {n: (rng.uniform(20, 200), rng.uniform(15, 90)) for n in graph}
    found = layered(graph, sizes)
    for a, b in combinations(graph, 2):
        (xa, ya), (xb, yb) = found.centres[a], found.centres[b]
        apart = abs(xa - xb) >= (sizes[a][0] + sizes[b][0]) / 2 - 1e-6
        assert apart or abs(ya - yb) >= (sizes[a][1] + sizes[b][1]) / 2 - 1e-6
    for n in graph:
        x, y = found.centres[n]
        assert sizes[n][0] / 2 <= x <= found.width - sizes[n][0] / 2
        assert sizes[n][1] / 2 <= y <= found.height - sizes[n][1] / 2
    for (a, b), points in found.routes.items():
        assert all(upper[1] < lower[1] for upper, lower in pairwise(points))
        for upper, lower in pairwise(points):  # bends touch no box, and what runs down stands in none
            near = [n for n in graph if _meets(found.centres[n], sizes[n], upper, lower)]
            assert not near
        assert points[0] == (found.centres[a][0], found.centres[a][1] + sizes[a][1] / 2)
        assert points[-1] == (found.centres[b][0], found.centres[b][1] - sizes[b][1] / 2)


def _meets(
    centre: tuple[float, float], size: tuple[float, float], a: tuple[float, float], b: tuple[float, float]
) -> bool:
    """Whether the rectangle between two points has more than an edge in common with a box."""
    (x, y), (width, height) = centre, size
    beside = max(a[0], b[0]) <= x - width / 2 + 1e-6 or min(a[0], b[0]) >= x + width / 2 - 1e-6
    above = b[1] <= y - height / 2 + 1e-6 or a[1] >= y + height / 2 - 1e-6
    return not (beside or above)


def test_what_is_given_stands_just_above_its_use() -> None:
    graph: nx.DiGraph[str] = nx.DiGraph([("a", "b"), ("b", "c"), ("late", "c")])
    found = layered(graph, dict.fromkeys(graph, (20.0, 10.0)))
    assert found.centres["late"][1] == found.centres["b"][1]
