"""Where the values of a step kernel lie: tiles of its axes, pointers, addresses, masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.signature import tuple_text
from linalg_dsl.codegen.emit.triton_statements import Tile
from linalg_dsl.codegen.emit.triton_step_statements import (
    StepStatements,
    axis_name,
    index,
    tile_axes,
    zero_axes,
)
from linalg_dsl.codegen.schedule.step_split import StepSchedule
from linalg_dsl.language.spec import RecurrenceSpec, State
from linalg_dsl.planner.adjoint import gradient_name
from linalg_dsl.planner.ops import Axes, ordered
from linalg_dsl.planner.plan import ChunkPlan, Node
from linalg_dsl.planner.step_values import dimension, family

_RESERVED = (
    "C", "K", "V", "H", "KP", "VP", "BLOCK", "BLOCKS", "PRECISION", "SAVE", "STAGES", "seq_start",
    "chunk_start", "i_block", "i_h", "i_n", "i_nh", "i_t", "i_c", "i_ch", "i_step", "i_token", "i", "i_back",
    "start", "length", "begin", "count", "first_chunk", "chunks", "softplus", "tanh", "expm1", "sign", "step",
    "power",
)  # fmt: skip
PER_BLOCK = "(i_n.to(tl.int64) * BLOCKS + i_block) * H + i_h"
"""The entry of a value per sequence, block and head: a partial sum."""


@dataclass(frozen=True, slots=True)
class StepNames:
    """Names of the launcher: of inputs, consts, output and gradients; sizes of small axes; rows of inputs."""

    title: str
    inputs: Mapping[str, str]
    consts: Mapping[str, str]
    output: str
    cotangent: str
    gradients: Mapping[str, str]
    rows: Mapping[str, int]
    counts: Mapping[str, int]


@dataclass
class StepMemory:
    """Axes, pointers and addresses of one kernel; ``before`` has the lines ahead of its loop.

    ``pointers``, ``scalars`` and ``flags`` (compile-time) are kernel arguments: the launcher's expression of
    each, with the argument's name, or of flags the other way round.
    """

    spec: RecurrenceSpec
    schedule: StepSchedule
    launcher: StepNames
    names: Names = field(default_factory=lambda: Names(reserved=_RESERVED))
    pointers: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, None] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    library: set[str] = field(default_factory=set)
    params: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)

    @property
    def split(self) -> str | None:
        return self.schedule.split

    # -- axes -----------------------------------------------------------------------------------------
    def nodes(self, plan: ChunkPlan) -> tuple[Node, ...]:
        """The nodes with their axes as tiles have them."""
        return tuple(Node(n.op, n.args, n.attrs, tile_axes(n.axes, self.split), n.label) for n in plan.nodes)

    def length(self, axis: str) -> str:
        """How long a tile is along an axis."""
        if axis == self.split:
            return "BLOCK"
        name = dimension(axis)
        if name in ("K", "V"):
            return f"{name}P"
        return str(1 << max(0, self.launcher.rows[name] - 1).bit_length())

    def size(self, axis: str) -> str:
        """How many entries there are along an axis."""
        name = dimension(axis)
        return name if name in ("K", "V") else str(self.launcher.rows[name])

    def tiles(self, plans: Iterable[ChunkPlan]) -> dict[str, Tile]:
        """The tile of every axis; its offsets and mask are the first lines of the kernel."""
        found = {}
        for axis in dict.fromkeys(a for p in plans for n in p.nodes for a in n.axes):
            low, length = axis_name(axis), self.length(axis)
            first = "i_block * BLOCK + " if axis == self.split else ""
            self.before += [
                f"o_{low} = {first}tl.arange(0, {length})",
                f"m_{low} = o_{low} < {self.size(axis)}",
            ]
            found[axis] = Tile(length, f"m_{low}")
        return found

    # -- arguments ------------------------------------------------------------------------------------
    def pointer(self, launcher: str, wanted: str = "") -> str:
        if launcher not in self.pointers:
            self.pointers[launcher] = self.names.unique(f"p_{wanted or launcher}")
        return self.pointers[launcher]

    def flag(self, wanted: str, launcher: str) -> str:
        name = self.names.unique(wanted)
        self.flags[name] = launcher
        return name

    # -- addresses ------------------------------------------------------------------------------------
    def address(self, pointer: str, place: str, memory: Axes, tile: Axes) -> str:
        """A tile of the tensor whose trailing axes are ``memory``, at entry ``place`` of it."""
        sizes = [self.size(a) for a in memory]
        place = f"({place})" if sizes and " " in place else place
        terms = [" * ".join([place, *sizes])]
        for i, axis in enumerate(memory):
            terms.append(" * ".join([f"o_{axis_name(axis)}{index(tile, axis)}", *sizes[i + 1 :]]))
        return f"{pointer} + {' + '.join(terms)}"

    def mask(self, tile: Axes, *more: str) -> str:
        """``, mask=...`` for what lies in the tensor, and where ``more`` holds."""
        parts = [f"m_{axis_name(a)}{index(tile, a)}" for a in tile]
        parts += [f"({m})" if parts else m for m in more]
        return f", mask={' & '.join(parts)}" if parts else ""

    def load(self, pointer: str, place: str, memory: Axes, tile: Axes, *more: str) -> str:
        mask = self.mask(tile, *more)
        return f"tl.load({self.address(pointer, place, memory, tile)}{mask}{', other=0.0' if mask else ''})"

    def store(self, pointer: str, place: str, memory: Axes, tile: Axes, value: str, *more: str) -> str:
        return f"tl.store({self.address(pointer, place, memory, tile)}, {value}{self.mask(tile, *more)})"

    def load_leaf(self, node: Node) -> str:
        """The expression that loads an input, param or cotangent."""
        if node.op == "cotangent":
            pointer = self.pointer(self.launcher.cotangent)
            return self.load(
                pointer, "i_token * H + i_h", memory_axes(self.spec.outputs[0].value.shape), node.axes
            )
        name = str(node.attr("name"))
        argument = self.launcher.inputs[name]
        ratio = f"R_{argument}"
        self.ratios[ratio] = None
        place = f"i_token * (H // {ratio}) + i_h // {ratio}" if node.op == "input" else f"i_h // {ratio}"
        row, dims = node.attr("row"), self.spec.input(name).dims
        if row is not None:
            place, dims = f"({place}) * {self.launcher.counts[name]} + {row}", dims[1:]
        return self.load(self.pointer(argument), place, memory_axes(dims), node.axes)

    # -- states ---------------------------------------------------------------------------------------
    def state_axes(self, state: State) -> tuple[Axes, Axes]:
        """(axes in memory, axes of the tile) of a state."""
        memory = memory_axes(state.dims)
        return memory, tile_axes(ordered(memory), self.split)

    def filled(self, tile: Axes, value: str) -> str:
        return f"tl.full({tuple_text(self.length(a) for a in tile)}, {value}, tl.float32)"

    def start(self, tile: Axes, value: float) -> str:
        """A state before the first token: zero on padding, whatever it is elsewhere."""
        text = f"float('{value}')" if value in (float("inf"), float("-inf")) else repr(value)
        if value == 0 or not tile:
            return self.filled(tile, text)
        return f"tl.where({self.mask(tile).removeprefix(', mask=')}, {text}, {self.filled(tile, '0.0')})"

    def once(self, tile: Axes) -> tuple[str, ...]:
        """Where a value that every block has alike is stored, or counted: in the first block."""
        return () if self.split is None or self.split in tile else ("i_block == 0",)

    def kept(self, pointer: str, tile: Axes) -> str:
        """Where a program keeps a state before token i: whole tiles, padding included."""
        lengths = [self.length(a) for a in tile]
        terms = [" * ".join(["(tl.program_id(0).to(tl.int64) * C + i)", *lengths])]
        for i, axis in enumerate(tile):
            terms.append(" * ".join([f"tl.arange(0, {lengths[i]}){index(tile, axis)}", *lengths[i + 1 :]]))
        return f"{pointer} + {' + '.join(terms)}"

    # -- one token ------------------------------------------------------------------------------------
    def statements(
        self, plan: ChunkPlan, tiles: Mapping[str, Tile], roots: Iterable[int], given: Mapping[int, str]
    ) -> StepStatements:
        """Loads of all leaves that the roots need, then a statement per node; ``given`` are at hand."""
        nodes = self.nodes(plan)
        out = StepStatements(nodes, tiles, self.names, padding=zero_axes(nodes, plan))
        live = sorted(plan.live(roots))
        for n in live:
            node = nodes[n]
            if n in given:
                out.given(n, given[n])
            elif node.op in ("input", "cotangent"):
                name = self.names.unique(f"b_{node.label or node.attr('name')}")
                out.lines.append(f"{name} = {self.load_leaf(node)}")
                out.loaded(n, name, converted=False)
            elif node.op == "param":
                out.given(n, self._param(node))
            elif node.op == "const":
                out.given(n, self._const(str(node.attr("name"))))
        for n in live:
            if n not in out.text and nodes[n].op != "number":
                out.compute(n)
        self.library |= out.library
        return out

    def _param(self, node: Node) -> str:
        """A param, loaded once before the loop."""
        key = gradient_name(node)
        if key not in self.params:
            self.params[key] = self.names.unique(f"b_{node.label or node.attr('name')}")
            self.before.append(f"{self.params[key]} = {self.load_leaf(node)}.to(tl.float32)")
        return self.params[key]

    def _const(self, const: str) -> str:
        argument = self.launcher.consts[const]
        if argument not in self.scalars:
            self.scalars[argument] = self.names.unique(argument)
        return self.scalars[argument]


def memory_axes(dims: Sequence[Dim]) -> Axes:
    """The axes of a declared tensor in their order in memory; the columns of a square one by another name."""
    kept = [d for d in dims if d != 1]
    if len(kept) == 2 and kept[0] == kept[1]:
        return family(kept[0])[:2]
    return tuple(str(d) for d in kept)
