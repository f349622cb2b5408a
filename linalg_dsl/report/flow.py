"""The graphs of the page: equations and what they use, kernels and the tensors between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from linalg_dsl.planner.equations import Equation
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.origins import Origins
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.step_values import dimension
from linalg_dsl.report.launches import Launch, Phase, Tensor, human

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a drawing: lines of text, a class for its looks, and what a click leads to.

    ``marks``: a class for each line of a list.
    """

    lines: tuple[str, ...]
    kind: str
    href: str = ""
    hint: str = ""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Flow:
    """A graph to be drawn; ``edges`` have a hint each."""

    boxes: dict[Any, Box] = field(default_factory=dict)
    edges: dict[tuple[Any, Any], str] = field(default_factory=dict)

    def graph(self) -> nx.DiGraph[Any]:
        import networkx as nx

        graph: nx.DiGraph[Any] = nx.DiGraph()
        graph.add_nodes_from(self.boxes)
        graph.add_edges_from(self.edges)
        return graph


# -- kernels --------------------------------------------------------------------------------------------
def kernel_flow(launches: Iterable[Launch], phase: Phase, prefix: str) -> Flow:
    """Kernels of one phase, and the tensors between them.

    What is given, and what leaves the phase, stands in one box at its kernel; what goes from kernel to kernel
    has a box of its own.
    """
    own = [launch for launch in launches if launch.phase == phase]
    written = {t.name for launch in own for t in launch.writes}
    read = {t.name for launch in own for t in launch.reads}
    flow = Flow()
    for launch in own:
        key = ("kernel", launch.name)
        flow.boxes[key] = Box((launch.name, launch.what), "kernel", f"{prefix}-k-{launch.name}")
        for t in (*launch.reads, *launch.writes):
            if t.name in written and t.name in read:
                flow.boxes.setdefault(("tensor", t.name), Box(t.lines, f"tensor {t.role}"))
        for t in launch.reads:
            if t.name in written:
                flow.edges[("tensor", t.name), key] = str(t)
        for t in launch.writes:
            if t.name in read:
                flow.edges[key, ("tensor", t.name)] = str(t)
        for title, tensors in (
            ("given", [t for t in launch.reads if t.name not in written]),
            ("results", [t for t in launch.writes if t.name not in read]),
        ):
            if tensors:
                box = (title, launch.name)
                flow.boxes[box] = Box(table(tensors), f"list {title}", marks=tuple(t.role for t in tensors))
                edge = (box, key) if title == "given" else (key, box)
                flow.edges[edge] = f"{len(tensors)} tensors, {human(sum(t.size for t in tensors))}"
    return flow


def table(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """A line for each tensor, in columns."""
    cells = [t.lines for t in tensors]
    widths = [max(len(line[i]) for line in cells) for i in range(3)]
    return tuple(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in cells)


# -- equations ------------------------------------------------------------------------------------------
def equation_flow(
    origins: Origins, phase: Phase, sizes: Mapping[str, int], colours: Mapping[int, int], prefix: str
) -> Flow:
    """The equations of one phase and what they use; a box has the axes of a chunk's value, and its bytes."""
    plan, places, names = _of(origins, phase)
    own = range(origins.ahead) if phase == "forward" else range(origins.ahead, len(origins.equations))
    flow = Flow()
    for i in own:
        e = origins.equations[i]
        axes = plan.nodes[e.node].axes if e.node is not None else ()
        flow.boxes["equation", i] = Box(
            (e.left, *_extent(axes, sizes)), f"value k{colours[i]}" if i in colours else "value",
            f"{prefix}-e{i + 1}", str(e),
        )  # fmt: skip
    for i in own:
        e = origins.equations[i]
        if e.node is None:
            continue
        for j in _solved_with(plan, origins.equations, i, own.start):
            flow.edges[("equation", j), ("equation", i)] = f"{origins.equations[j].left} → {e.left}"
        for n, place in _operands(plan, places, names, e.node, i):
            key: tuple[str, object] = ("leaf", names[n]) if place is None else ("equation", place)
            if key not in flow.boxes:
                lines = (names[n], *_extent(plan.nodes[n].axes, sizes))
                leads = "" if place is None else f"{prefix}-e{place + 1}"
                flow.boxes[key] = Box(lines, "leaf" if place is None else "taken", leads)
            flow.edges.setdefault((key, ("equation", i)), f"{flow.boxes[key].lines[0]} → {e.left}")
    return flow


def _solved_with(plan: ChunkPlan, lines: Sequence[Equation], i: int, start: int) -> Iterable[int]:
    """Of a solve the equations of U, on which those of Z are drawn to depend (each needs the past
    of the other)."""
    node = lines[i].node
    if node is not None and plan.nodes[node].op in ("solve", "solve_t"):
        first = next(j for j in range(start, i + 1) if lines[j].node == node)
        last = first + int(str(plan.nodes[node].attr("r")))
        if i >= last:
            yield from range(first, last)


def _of(origins: Origins, phase: Phase) -> tuple[ChunkPlan, Mapping[int, int], Mapping[int, str]]:
    if phase == "forward":
        return origins.forward, origins.forward_places, origins.forward_names
    return origins.backward, origins.backward_places, origins.backward_names


def _operands(
    plan: ChunkPlan, places: Mapping[int, int], names: Mapping[int, str], root: int, own: int
) -> Iterable[tuple[int, int | None]]:
    """The named values that an equation is made of, with the equations that they have, if they have one."""
    place = places.get(root)
    if place is not None and place != own and plan.nodes[root].op not in ("solve", "solve_t"):
        yield root, place  # another name of that value
        return
    todo, seen = list(plan.nodes[root].args), {root}
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        place = places.get(n)
        if n in names and place != own:
            yield n, place
        else:
            todo += plan.nodes[n].args


def _extent(axes: Axes, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a value and its bytes in float32, per chunk and head."""
    if not axes:
        return ()
    names = {"t": "C", "s": "C"}
    count = prod(sizes.get(names.get(a, dimension(a)), 1) for a in axes)
    return (f"[{', '.join(names.get(a, dimension(a)) for a in axes)}] {human(4 * count)}",)
