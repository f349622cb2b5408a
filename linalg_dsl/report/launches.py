"""The launches of a call, what each reads and writes, and the equations that it computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from linalg_dsl.codegen.schedule.call_shape import (
    DTYPES,
    CallShape,
    boundary_bytes,
    tensor_bytes,
    value_names,
)
from linalg_dsl.codegen.schedule.describe import CallSchedule, KernelSchedule, ScanSchedule
from linalg_dsl.codegen.schedule.kernel_plan import Kernel, KernelPlan, leaves_last_states
from linalg_dsl.codegen.schedule.step_split import StepSchedule, needs_states
from linalg_dsl.codegen.schedule.two_level import Summary, TwoLevel
from linalg_dsl.language.spec import Input
from linalg_dsl.planner.origins import Origins
from linalg_dsl.planner.step_form import StepForm

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, Phase] = ("forward", "backward")


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
    """One kernel: what it reads and writes, and the equations that it computes.

    ``ahead``: it only finds out states that others start from, and computes equations that they compute too.
    """

    name: str
    what: str
    phase: Phase
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    equations: frozenset[int] = frozenset()
    ahead: bool = False


def chunk_launches(plan: KernelPlan, found: CallSchedule, origins: Origins) -> tuple[Launch, ...]:
    """The launches of chunk kernels, as ``found`` has them: on one level or on two."""
    listed = _ChunkLaunches(plan, found, origins)
    schedules = {"forward": found.forward, "backward": found.backward}
    return tuple(listed.launch(phase, x) for phase in PHASES for x in schedules[phase])


class _ChunkLaunches:
    """Of walks on one level the states go from the call to the call; on two a scan gives each super-chunk its
    own first state."""

    def __init__(self, plan: KernelPlan, found: CallSchedule, origins: Origins) -> None:
        self.plan, self.shape = plan, found.shape
        self.two: TwoLevel | None = found.levels.two_level
        self.names = value_names(plan)
        self.saved = {b.node for b in plan.buffers if b.saved}
        self.results = {n for _, n in plan.results}
        self.summaries = {s.kernel.name: s for s in (self.two.summaries if self.two else ())}
        self.last: dict[int, int] = {}
        for n, place in origins.places(plan.plan).items():
            self.last[place] = max(n, self.last.get(place, 0))

    def launch(self, phase: Phase, found: KernelSchedule | ScanSchedule) -> Launch:
        if isinstance(found, ScanSchedule):
            return self._scan(phase, found)
        summary = self.summaries.get(found.name)
        return self._kernel(phase, found.kernel) if summary is None else self._summary(phase, summary)

    def _kernel(self, phase: Phase, kernel: Kernel) -> Launch:
        nodes = self.plan.plan.nodes
        reads = [self._tensor(n) for n in kernel.loads if nodes[n].op != "const"]
        writes = [self._tensor(n) for n in kernel.stores]
        if kernel.boundary is not None:
            size = boundary_bytes(kernel, self.shape)
            kept = Tensor("states kept", ("chunks", "H", "K", "V"), size, "temporary")
            (writes if kernel.direction == kernel.boundary.keeper else reads).append(kept)
        if kernel.direction and self.two:
            reads.append(self._starts("forward" if kernel.direction == "forward" else "backward"))
        elif kernel.direction == "forward":
            reads += self._states("forward", "0")
        elif kernel.direction == "reverse":
            reads += self._states("backward", "T")
        if not self.two and leaves_last_states(self.plan, kernel):
            writes += self._states(phase, "T" if phase == "forward" else "0")
        what = "prep" if kernel.family == "prep" else f"{kernel.direction} walk, splits {kernel.split}"
        here = frozenset(p for p, n in self.last.items() if n in kernel.body)
        return Launch(kernel.name, what, phase, tuple(reads), tuple(writes), here)

    def _summary(self, phase: Phase, summary: Summary) -> Launch:
        assert self.two is not None
        nodes, kernel = self.plan.plan.nodes, summary.kernel
        made_of = dict(self.two.made_of)
        reads = tuple(self._tensor(n) for n in kernel.loads if nodes[n].op != "const")
        body = {made_of.get(n, n) for n in kernel.body}
        here = frozenset(p for p, n in self.last.items() if n in body)
        what = f"{kernel.direction} walk from {summary.start}"
        return Launch(kernel.name, what, phase, reads, (self._map(summary),), here, True)

    def _scan(self, phase: Phase, found: ScanSchedule) -> Launch:
        two = self.two
        assert two is not None
        step = two.forward if phase == "forward" else two.reverse
        maps = [self._map(s) for s in (step, two.matrix, two.factors) if s is not None]
        first, last = ("0", "T") if phase == "forward" else ("T", "0")
        reads = (*maps, *self._states(phase, first))
        writes = (self._starts(phase), *self._states(phase, last))
        return Launch(found.name, "scan over super-chunks", phase, reads, writes, frozenset(), True)

    # -- tensors --------------------------------------------------------------------------------------
    def _tensor(self, n: int) -> Tensor:
        node = self.plan.plan.nodes[n]
        lead = ("H",) if node.op == "param" else ("B", "T", "H") if "t" in node.axes else ("chunks", "H")
        axes = (
            ("chunks", "H", "C", "C")
            if node.axes == ("t", "s")
            else (*lead, *node.axes[node.axes[:1] == ("t",) :])
        )
        leaf = node.op in ("input", "param", "cotangent")
        role = (
            "input" if leaf
            else "output" if n in self.results
            else "saved" if n in self.saved
            else "temporary"
        )  # fmt: skip
        name = self.names.get(n) or f"{node.op}_{n}"
        return Tensor(name, axes, tensor_bytes(self.plan, n, self.shape), role)

    def _states(self, phase: Phase, end: str) -> list[Tensor]:
        """The states of sequences at their beginning (0) or end (T); in the backward their gradients."""
        shape = self.shape
        carried = [name for name, direction, _, _ in self.plan.plan.carries if direction == "forward"]
        names = carried if len(carried) > 1 else ["S"]
        size = 4 * shape.B * shape.H * shape.K * shape.V
        prefix = "" if phase == "forward" else "d"
        return [Tensor(f"{prefix}{name}_{end}", ("B", "H", "K", "V"), size, "state") for name in names]

    def _starts(self, phase: Phase) -> Tensor:
        """What the scan leaves: the state before every super-chunk, or the gradient behind it."""
        name, role = ("S before", "saved") if phase == "forward" else ("dS behind", "temporary")
        return self._of_pieces(name, ("K", "V"), role)

    def _map(self, summary: Summary) -> Tensor:
        assert self.two is not None
        axes = tuple(str(a) for a in (summary.rows, summary.columns) if a != 1)
        if summary is self.two.matrix:
            return self._of_pieces("F", axes, "saved")
        if summary is self.two.factors:
            return self._of_pieces("R" if self.two.matrix else "D", axes, "saved")
        return self._of_pieces("H" if summary is self.two.forward else "H′", axes, "temporary")

    def _of_pieces(self, name: str, axes: tuple[str, ...], role: str) -> Tensor:
        sizes = {"K": self.shape.K, "V": self.shape.V}
        size = 4 * self.shape.pieces * self.shape.H * prod(sizes[a] for a in axes)
        return Tensor(name, ("super-chunks", "H", *axes), size, role)


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
    first, last, d_first, d_last = (
        [tensor(f"{d}{s.name}_{end}", ("B", "H"), s.dims, "state", 4) for s in spec.states]
        for d, end in (("", "0"), ("", "T"), ("d", "0"), ("d", "T"))
    )
    ahead = frozenset(range(origins.ahead))
    behind = frozenset(range(origins.ahead, len(origins.equations)))
    split = f", splits {schedule.split}" if schedule.split else ""
    forward = ((*given, *first), (*outputs, *marks, *last), ahead)
    backward = ((*given, *marks, *cotangents, *d_last), (*gradients, *d_first), behind)
    return (
        Launch("forward", f"token after token{split}", "forward", *forward),
        Launch("backward", f"from the last token{split}", "backward", *backward),
    )


def human(size: float) -> str:
    """Bytes in a unit that leaves three digits."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:,.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError
