"""What a module with two levels has beside the kernels of one: more kernels, launches, tables, the choice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from linalg_dsl.codegen.emit.kernel_text import KernelText, Memory
from linalg_dsl.codegen.emit.render import functions_of, render
from linalg_dsl.codegen.emit.signature import tuple_text
from linalg_dsl.codegen.emit.trace import Trace
from linalg_dsl.codegen.emit.triton_kernel import KernelPrinter
from linalg_dsl.codegen.schedule import levels
from linalg_dsl.codegen.schedule.kernel_plan import KernelPlan, tile_kinds
from linalg_dsl.codegen.schedule.two_level import Summary, TwoLevel, first_walk, products, two_level
from linalg_dsl.planner.ops import OTHER, Axes

RESERVED = (
    "super_first", "super_last", "super_ends", "super_matrix", "super_factors", "super_starts", "super_kept",
)  # fmt: skip
"""Names in the launchers."""
_SIZES = {"K": "call.key", "V": "call.value", 1: "1"}


@dataclass(frozen=True, slots=True)
class LevelsText:
    """What templates ask for: ``length`` is that of super-chunks where it is given, else 0.

    ``forced``: two levels in every call. ``split`` to ``factors``: what the model has to know of the walk.
    """

    length: int
    forced: bool
    split: str
    loads: str
    walk: str
    step: str
    matrix: str
    factors: bool
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Combine:
    """What templates/combine.py.jinja asks for."""

    name: str
    update: str
    matrix: bool
    factors: bool
    own: str
    other: str
    state_offset: str
    forward_map: str
    reverse_map: str
    factor_load: str


class LevelsPrinter:
    """Prints what ``plan`` needs for two levels; ``launch`` prints the launch of a walk.

    ``launch`` takes the kernel's text, the state that it starts from, where it leaves the last one, and
    further arguments of ``Call.walk``; ``stepped`` as for ``KernelPrinter``.
    """

    def __init__(
        self,
        plan: KernelPlan,
        memory: Mapping[int, Memory],
        title: str,
        state_dims: Axes,
        in_one_tile: bool,
        launch: Callable[[KernelText, str, str, str], str],
        stepped: bool,
    ) -> None:
        self.two: TwoLevel = two_level(plan)
        self.base = plan.plan
        self.title = title
        self.state_dims = state_dims
        self.launch = launch
        self.printed = {
            s.kernel.name: KernelPrinter(
                self.two.plan, s.kernel, memory, title, state_dims, in_one_tile, s.start, stepped
            ).run()
            for s in self.two.summaries
        }

    @property
    def trace(self) -> Trace:
        """What names stand for, in the plan of one level; the scan has no values of it."""
        made_of, base = dict(self.two.made_of), self.base
        found: Trace = {
            text.name: {name: (base, made_of.get(n, n)) for name, (_, n) in text.values.items()}
            for text in self.printed.values()
        }
        return {**found, self._scan_name: {}}

    @property
    def _scan_name(self) -> str:
        return f"{self.title}_super_scan"

    @property
    def library(self) -> frozenset[str]:
        return frozenset().union(*(p.library for p in self.printed.values()))

    @property
    def kernels(self) -> tuple[str, ...]:
        return (*(p.text.rstrip() for p in self.printed.values()), self._combine().rstrip())

    def text(self, length: int | None, forced: bool) -> LevelsText:
        """What the choice between one level and two needs to know."""
        two, nodes = self.two, self.two.plan.plan.nodes
        walk = first_walk(two.plan.forward, "forward")
        return LevelsText(
            length or 0,
            forced,
            str(walk.split),
            tuple_text(map(repr, tile_kinds(nodes, walk))),
            repr(products(nodes, walk)),
            repr(products(nodes, two.forward.kernel)),
            repr(None if two.matrix is None else products(nodes, two.matrix.kernel)),
            two.factors is not None,
            level_functions(),
        )

    # -- launches ---------------------------------------------------------------------------------
    def allocations(self) -> tuple[str, ...]:
        """Lines of the forward: what the backward is handed beside the residuals of one level."""
        two = self.two
        return (
            "super_starts = call.super_states()",
            f"super_matrix = {self._map(two.matrix)}",
            f"super_factors = {self._map(two.factors)}",
        )

    def forward_lines(self) -> tuple[str, ...]:
        """Before the first walk: from then on walks go over super-chunks, each from its own start."""
        two = self.two
        return (
            "super_first, super_last = initial_state, final_state",
            "if call.super_chunk:",
            "    super_ends = call.super_states()",
            *(f"    {self._launch(s, target)}" for s, target in (
                (two.forward, "super_ends"), (two.matrix, "super_matrix"), (two.factors, "super_factors"),
            ) if s is not None),
            f"    {self._scan('initial_state', 'final_state', 'super_starts', reverse=False)}",
            "    super_first, super_last = super_starts, None",
        )  # fmt: skip

    def backward_lines(self) -> tuple[str, ...]:
        """Before the first walk in reverse."""
        if self.two.reverse is None:
            return ()
        return (
            "super_first, super_last = d_final_state, d_initial_state",
            "if call.super_chunk:",
            "    super_ends, super_first, super_last = call.super_states(), call.super_states(), None",
            f"    {self._launch(self.two.reverse, 'super_ends')}",
            f"    {self._scan('d_final_state', 'd_initial_state', 'super_first', reverse=True)}",
        )

    def _map(self, summary: Summary | None) -> str:
        if summary is None:
            return "None"
        return f"call.super_map({_SIZES[summary.rows]}, {_SIZES[summary.columns]})"

    def _launch(self, summary: Summary, target: str) -> str:
        more = ""
        if (summary.rows, summary.columns) != ("K", "V"):
            more = f", key={_SIZES[summary.rows]}, value={_SIZES[summary.columns]}"
        return self.launch(self.printed[summary.kernel.name], "NO_STATES", f"({target},)", more)

    def _scan(self, first: str, last: str, starts: str, *, reverse: bool) -> str:
        matrix = self.two.erased
        return (
            f"call.combine({self._scan_name}, {matrix!r}, super_ends, super_matrix, super_factors, "
            f"{starts}, {first}, {last}, {reverse})"
        )

    # -- the scan ---------------------------------------------------------------------------------
    def _combine(self) -> str:
        two, dims = self.two, self.state_dims
        own = two.erased or "K"
        other = OTHER[own]
        rows_first = dims[0] == own
        state = f"o_own[:, None] * {other} + o_other[None, :]"
        by_rows, by_columns = (
            f"o_own[:, None] * {own} + o_own[None, :]",
            f"o_own[:, None] + o_own[None, :] * {own}",
        )
        if not rows_first:
            state = f"o_own[:, None] + o_other[None, :] * {own}"
            by_rows, by_columns = by_columns, by_rows
        along = () if two.factors is None else (two.factors.rows, two.factors.columns)
        load = "tl.load(p_factors + i_map * K * V + o_s, mask=m_s, other=0.0)"
        if "K" not in along and "V" not in along:
            load = "tl.load(p_factors + i_map)"
        elif "K" not in along or "V" not in along:
            axis = "K" if "K" in along else "V"
            index = f"o_s // {dims[1]}" if axis == dims[0] else f"o_s % {dims[1]}"
            load = f"tl.load(p_factors + i_map * {axis} + {index}, mask=m_s, other=0.0)"
        return render(
            "combine.py.jinja",
            _Combine(
                self._scan_name, two.update, two.matrix is not None, two.factors is not None,
                own, other, state, by_rows, by_columns, load,
            ),
        )  # fmt: skip


@functools.cache
def level_functions() -> tuple[str, ...]:
    """The functions of the model, as text."""
    return tuple(functions_of(Path(levels.__file__).read_text(encoding="utf-8")).values())
