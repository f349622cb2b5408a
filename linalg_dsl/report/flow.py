"""The graphs of the page: equations and what they use, kernels and the tensors between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from linalg_dsl.codegen.schedule.call_shape import (
    DTYPES,
    CallShape,
    boundary_bytes,
    tensor_bytes,
    value_names,
)
from linalg_dsl.codegen.schedule.kernel_plan import Kernel, KernelPlan
from linalg_dsl.codegen.schedule.step_split import StepSchedule, needs_states
from linalg_dsl.language.spec import Input
from linalg_dsl.planner.equations import Equation
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.origins import Origins
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.planner.step_values import dimension

if TYPE_CHECKING:
    import networkx as nx


Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """What goes between kernels: ``role`` is input, output, saved (for the backward), temporary or state."""

    name: str
    axes: tuple[str, ...]
    size: float
    role: str

    @property
    def lines(self) -> tuple[str, str, str]:
        return self.name, f"[{', '.join(self.axes)}]", human(self.size)

    def __str__(self) -> str:
        return " ".join((*self.lines, self.role))


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel: what it reads and writes, and the equations that it computes."""

    name: str
    what: str
    phase: Phase
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    equations: frozenset[int] = frozenset()


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
def chunk_launches(plan: KernelPlan, shape: CallShape, origins: Origins) -> tuple[Launch, ...]:
    """The launches of chunk kernels."""
    names = value_names(plan)
    nodes = plan.plan.nodes
    saved = {b.node for b in plan.buffers if b.saved}
    results = {n for _, n in plan.results}

    def tensor(n: int) -> Tensor:
        node = nodes[n]
        lead = ("H",) if node.op == "param" else ("B", "T", "H") if "t" in node.axes else ("chunks", "H")
        axes = (
            ("chunks", "H", "C", "C")
            if node.axes == ("t", "s")
            else (*lead, *node.axes[node.axes[:1] == ("t",) :])
        )
        leaf = node.op in ("input", "param", "cotangent")
        role = "input" if leaf else "output" if n in results else "saved" if n in saved else "temporary"
        name = names.get(n) or f"{node.op}_{n}"
        return Tensor(name, axes, tensor_bytes(plan, n, shape), role)

    def state(name: str) -> Tensor:
        return Tensor(name, ("B", "H", "K", "V"), 4 * shape.B * shape.H * shape.K * shape.V, "state")

    places = origins.places(plan.plan)
    last: dict[int, int] = {}
    for n, place in places.items():
        last[place] = max(n, last.get(place, 0))
    out = []
    found: list[tuple[Phase, Kernel]] = [("forward", k) for k in plan.forward]
    found += [("backward", k) for k in plan.backward]
    walked: set[tuple[str, str]] = set()
    for phase, kernel in found:
        reads = [tensor(n) for n in kernel.loads if nodes[n].op != "const"]
        writes = [tensor(n) for n in kernel.stores]
        if kernel.boundary is not None:
            kept = Tensor(
                "states kept", ("chunks", "H", "K", "V"), boundary_bytes(kernel, shape), "temporary"
            )
            (writes if kernel.direction == kernel.boundary.keeper else reads).append(kept)
        if kernel.direction and (phase, kernel.direction) not in walked:
            walked.add((phase, kernel.direction))
            if (phase, kernel.direction) == ("forward", "forward"):
                carried = [name for name, direction, _, _ in plan.plan.carries if direction == "forward"]
                names_of_states = carried if len(carried) > 1 else ["S"]
                reads = [*reads, *(state(f"{name}_0") for name in names_of_states)]
                writes = [*writes, *(state(f"{name}_T") for name in names_of_states)]
        what = "prep" if kernel.family == "prep" else f"{kernel.direction} walk, splits {kernel.split}"
        here = frozenset(p for p, n in last.items() if n in kernel.body)
        out.append(Launch(kernel.name, what, phase, tuple(reads), tuple(writes), here))
    return tuple(out)


def step_launches(
    form: StepForm, schedule: StepSchedule, shape: CallShape, origins: Origins, every: int
) -> tuple[Launch, ...]:
    """The two launches of a step class: over the tokens, and in reverse."""
    spec, short = form.spec, DTYPES[shape.dtype]
    sizes = {n: getattr(shape, n) for n in "BTHKV"} | {"marks": -(-shape.T // every)}
    sizes |= {name: int(x) for name, x in form.consts}

    def tensor(name: str, lead: tuple[str, ...], dims: Iterable[object], role: str, width: int) -> Tensor:
        axes = (*lead, *map(str, dims))
        return Tensor(name, axes, width * prod(sizes[a] if a in sizes else int(a) for a in axes), role)

    def of_input(i: Input, name: str, role: str) -> Tensor:
        lead = ("B", "T", "H") if i.timed else ("H",)
        return tensor(name, lead, i.dims, role, short if i.dims and i.kind == "plain" else 4)

    given = [of_input(i, i.name, "input") for i in spec.inputs]
    gradients = [of_input(i, f"d_{i.name}", "output") for i in spec.inputs]
    outputs = [
        tensor(e.target, ("B", "T", "H"), [d for d in e.value.shape if d != 1], "output", short)
        for e in spec.outputs
    ]
    cotangents = [replace(o, name=f"d_{o.name}", role="input") for o in outputs]
    marks = [tensor(f"{s.name} marks", ("B", "marks", "H"), s.dims, "saved", 4) for s in spec.states]
    marks = marks if needs_states(schedule.backward) else []
    ends = [tensor(f"{s.name}_T", ("B", "H"), s.dims, "state", 4) for s in spec.states]
    ahead = frozenset(range(origins.ahead))
    behind = frozenset(range(origins.ahead, len(origins.equations)))
    split = f", splits {schedule.split}" if schedule.split else ""
    forward = (tuple(given), (*outputs, *marks, *ends), ahead)
    backward = ((*given, *marks, *cotangents), tuple(gradients), behind)
    return (
        Launch("forward", f"token after token{split}", "forward", *forward),
        Launch("backward", f"from the last token{split}", "backward", *backward),
    )


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


def human(size: float) -> str:
    """Bytes in a unit that leaves three digits."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:,.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError
