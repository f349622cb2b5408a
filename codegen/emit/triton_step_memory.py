"""Where the values of a step kernel lie: tiles of its axes, pointers, addresses, masks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase

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

RESERVED = (
    "C", "K", "V", "H", "KP", "VP", "BLOCK", "BLOCKS", "PRECISION", "SAVE", "STAGES", "ORDERED", "seq_start",
    "seq_order", "chunk_start", "i_block", "i_h", "i_n", "i_nh", "i_c", "i_ch", "i_step", "i_first", "there",
    "i", "i_back", "o_u", "EVEN", "token_rows", "token_numbers", "token_tile",
    "start", "length", "begin", "count", "first_chunk", "chunks", "softplus", "tanh", "expm1", "sign", "step",
    "power", "U", "W", "u", "w", "i_kept", "i_group", "groups", "live",
    # masks and indices of axes
    *(f"{kind}_{axis}" for kind in ("m", "o", "span", "within") for axis in ascii_lowercase),
)  # fmt: skip
PER_BLOCK = "(i_n.to(tl.int64) * BLOCKS + i_block) * H + i_h"
"""The entry of a value per sequence, block and head: a partial sum."""


@dataclass(frozen=True, slots=True)
class StepNames:
    """Names of the launcher: inputs, consts, outputs and gradients; sizes of small axes; rows of inputs."""

    title: str
    inputs: Mapping[str, str]
    consts: Mapping[str, str]
    outputs: dict[str, str]
    cotangents: dict[str, str]
    factors: dict[int, str]
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
    names: Names = field(default_factory=lambda: Names(reserved=RESERVED))
    pointers: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, None] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    library: set[str] = field(default_factory=set)
    params: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    rows: dict[tuple[str, ...], str] = field(default_factory=dict)
    token: str = "u"
    """Which token of the group the statements being printed are of."""

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

    def tiles(self, plans: Iterable[ChunkPlan], each: int | None = None) -> dict[str, Tile]:
        """The tile of every axis; its offsets and mask are the first lines of the kernel.

        ``each``: how many neighbours along the split axis a thread may hold. Otherwise the compiler lays out
        a state's tile by what it may load at once, up to 16 bytes, which leaves the other threads to share
        the axis that is summed over at every token.
        """
        found = {}
        for axis in dict.fromkeys(a for p in plans for n in p.nodes for a in n.axes):
            low, length = axis_name(axis), self.length(axis)
            offsets = f"tl.arange(0, {length})"
            if axis == self.split:
                offsets = offsets if each is None else f"tl.multiple_of({offsets}, {each})"
                offsets = f"i_block * BLOCK + {offsets}"
            self.before += [
                f"o_{low} = {offsets}",
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
        # a comparison binds less than &
        parts += [f"({m})" if parts or len(more) > 1 else m for m in more]
        return f", mask={' & '.join(parts)}" if parts else ""

    def row(self, wanted: str, pointer: str, entry: str, entries: str, memory: Axes, tile: Axes) -> str:
        """Where a tile of this token of the group lies: ``entry`` of the ``entries`` of every token."""
        key = (pointer, entry, entries, *memory, *tile)
        if key not in self.rows:
            self.rows[key] = self.names.unique(f"at_{wanted}")
            self.before.append(f"{self.rows[key]} = {self.address(pointer, entry, memory, tile)}")
        each = " * ".join([entries, *(self.size(a) for a in memory)])
        step = f"({each})" if " " in each and not re.fullmatch(r"\(.*\)", each) else each
        return f"{self.rows[key]} + i_first * {step} + {self.token} * {step}"

    def load(self, pointer: str, place: str, memory: Axes, tile: Axes, *more: str) -> str:
        mask = self.mask(tile, *more)
        return f"tl.load({self.address(pointer, place, memory, tile)}{mask}{', other=0.0' if mask else ''})"

    def store(self, pointer: str, place: str, memory: Axes, tile: Axes, value: str, *more: str) -> str:
        return f"tl.store({self.address(pointer, place, memory, tile)}, {value}{self.mask(tile, *more)})"

    def load_leaf(self, node: Node) -> str:
        """The expression that loads an input or cotangent of this token, or a param."""
        pointer, entry, entries, memory = self.place_of_leaf(node)
        if node.op == "param":
            return self.load(pointer, entry, memory, node.axes)
        wanted = node.label or str(node.attr("name"))
        if node.op == "cotangent":
            wanted = self.launcher.cotangents[str(node.attr("name"))]
        return self._load_row(self.row(wanted, pointer, entry, entries, memory, node.axes), node.axes)

    def place_of_leaf(self, node: Node) -> tuple[str, str, str, Axes]:
        """(pointer, entry of a token or head, entries of each, axes in memory) of a leaf."""
        if node.op == "cotangent":
            argument = self.launcher.cotangents[str(node.attr("name"))]
            return self.pointer(argument), "i_h", "H", memory_axes(self.spec.outputs[0].value.shape)
        name = str(node.attr("name"))
        argument = self.launcher.inputs[name]
        ratio = f"R_{argument}"
        self.ratios[ratio] = None
        entry, entries = f"i_h // {ratio}", f"(H // {ratio})"
        row, dims = node.attr("row"), self.spec.input(name).dims
        if row is not None:
            count, dims = self.launcher.counts[name], dims[1:]
            entry, entries = f"({entry}) * {count} + {row}", f"{entries} * {count}"
        return self.pointer(argument), entry, entries, memory_axes(dims)

    def _load_row(self, at: str, tile: Axes) -> str:
        return f"tl.load({at}{self.mask(tile, 'live')}, other=0.0)"

    def store_row(
        self, argument: str, entry: str, entries: str, memory: Axes, tile: Axes, value: str, *more: str
    ) -> str:
        """The store of a tile of this token."""
        pointer = self.pointer(argument)
        at = self.row(argument, pointer, entry, entries, memory, tile)
        return f"tl.store({at}, {value}.to({pointer}.dtype.element_ty){self.mask(tile, *more, 'live')})"

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
        """Where a program keeps a state before a group of tokens: whole tiles, padding included."""
        lengths = [self.length(a) for a in tile]
        terms = [" * ".join(["(tl.program_id(0).to(tl.int64) * (C // W) + i_kept)", *lengths])]
        for i, axis in enumerate(tile):
            terms.append(" * ".join([f"tl.arange(0, {lengths[i]}){index(tile, axis)}", *lengths[i + 1 :]]))
        return f"{pointer} + {' + '.join(terms)}"

    # -- one token ------------------------------------------------------------------------------------
    def statements(
        self,
        plan: ChunkPlan,
        tiles: Mapping[str, Tile],
        roots: Iterable[int],
        given: Mapping[int, str],
        group: Mapping[str, str],
    ) -> StepStatements:
        """A statement per node that the roots need; ``given`` and the leaves of ``group`` are at hand.

        What is the same at all tokens is computed once, before the loop.
        """
        nodes = self.nodes(plan)
        out = StepStatements(nodes, tiles, self.names, padding=zero_axes(nodes, plan))
        live = sorted(_live(plan, roots, given))
        for n in live:
            node = nodes[n]
            if n in given:
                out.given(n, given[n])
            elif node.op in ("input", "cotangent"):
                name = self.names.unique(f"b_{node.label or node.attr('name')}")
                every = group.get(leaf_name(node))
                out.lines.append(
                    f"{name} = {self.load_leaf(node) if every is None else f'{every}[{self.token}]'}"
                )
                out.loaded(n, name, converted=False)
            elif node.op == "param":
                out.given(n, self._param(node))
            elif node.op == "const":
                out.given(n, self._const(str(node.attr("name"))))
        keys = self._fixed(nodes)

        def ahead(n: int, number: float) -> str | None:
            """A value of all tokens times a number, formed before the loop; None for any other."""
            if keys[n] is None or nodes[n].op == "number":
                return None
            key = f"{keys[n]} times {number!r}"
            if key not in self.params:
                name = self.params[key] = self.names.unique(f"{out.text[n]}_scaled")
                self.before.append(f"{name} = {out.value(n)} * {number!r}")
            return self.params[key]

        out.ahead = ahead
        out.fixed = frozenset(n for n, key in enumerate(keys) if key is not None)
        for n in live:
            if n in out.text or nodes[n].op == "number":
                continue
            key = keys[n]
            if key is None:
                out.compute(n)
                continue
            if key not in self.params:
                lines, out.lines = out.lines, self.before
                out.compute(n)
                out.lines = lines
                self.params[key] = out.text[n]
            out.given(n, self.params[key])
        self.library |= out.library
        return out

    def group(self, plan: ChunkPlan, roots: Iterable[int]) -> tuple[dict[str, str], list[str]]:
        """Names of tuples with a leaf's values at a group of tokens, and the lines that fill them.

        Loads of a whole group together wait once; matrices are too large for that.
        """
        names: dict[str, str] = {}
        lines = []
        for node, every in self._small_leaves(plan, roots):
            names[leaf_name(node)] = every
            lines.append(f"{every} = {every} + ({self.load_leaf(node)},)")
        return names, lines

    def group_tiles(self, plan: ChunkPlan, roots: Iterable[int]) -> tuple[dict[str, str], list[str]]:
        """As ``group``, with the vectors and numbers of all U tokens in one load each.

        Triton's pipeline copies such tiles to shared memory some rounds of the loop ahead, which it does not
        with vectors of less than 4 bytes a thread.
        """
        names: dict[str, str] = {}
        lines = []
        for node, every in self._small_leaves(plan, roots):
            names[leaf_name(node)] = every
            take = "token_rows" if node.axes else "token_numbers"
            self.library.add(take)
            lines.append(f"{every} = {take}({self._load_group(node)})")
        return names, lines

    def _small_leaves(self, plan: ChunkPlan, roots: Iterable[int]) -> Iterator[tuple[Node, str]]:
        """Inputs and cotangents that are vectors or numbers, with a name for their values at many tokens."""
        nodes = self.nodes(plan)
        for n in sorted(plan.live(roots)):
            node = nodes[n]
            if node.op in ("input", "cotangent") and len(node.axes) < 2:
                yield node, self.names.unique(f"every_{node.label or node.attr('name')}")

    def _load_group(self, node: Node) -> str:
        """A tile [U, D] of an input or cotangent, or [U, 1] of a number: all tokens of the group."""
        at, mask = self._group_tile(node.label or str(node.attr("name")), *self.place_of_leaf(node))
        return f"tl.load({at}, mask={mask}, other=0.0)"

    def store_group(
        self, argument: str, entry: str, entries: str, memory: Axes, rows: str, *more: str
    ) -> str:
        """The store of the tuple of the vectors of a group as one tile [U, D]."""
        self.library.add("token_tile")
        at, mask = self._group_tile(argument, self.pointer(argument), entry, entries, memory)
        return (
            f"tl.store({at}, token_tile({rows}, 0, U), mask={' & '.join([mask, *(f'({m})' for m in more)])})"
        )

    def _group_tile(
        self, wanted: str, pointer: str, entry: str, entries: str, memory: Axes
    ) -> tuple[str, str]:
        """(pointers, mask) of a tile [U, D] of the tokens of the group."""
        sizes = [self.size(a) for a in memory]
        each = " * ".join([entries, *sizes])
        step = f"({each})" if " " in each and not re.fullmatch(r"\(.*\)", each) else each
        key = ("group", pointer, entry, entries, *memory)
        if key not in self.rows:
            self.rows[key] = self.names.unique(f"in_{wanted}")
            if "o_u = tl.arange(0, U)" not in self.before:
                self.before.append("o_u = tl.arange(0, U)")
            terms = [" * ".join([f"({entry})" if sizes and " " in entry else entry, *sizes])]
            terms.append(f"o_u[:, None] * {step}")
            terms.extend(f"{self._span(axis)}[None, :]" for axis in memory)
            self.before.append(f"{self.rows[key]} = {pointer} + {' + '.join(terms)}")
        masks = "".join(f" & within_{axis_name(a)}[None, :]" for a in memory)
        return f"{self.rows[key]} + i_first * {step}", f"(o_u < there)[:, None]{masks}"

    def _span(self, axis: str) -> str:
        """The offsets along an axis without the hint of ``tiles``: as many bytes at once as may be."""
        name = f"span_{axis_name(axis)}"
        offsets = f"tl.arange(0, {self.length(axis)})"
        line = f"{name} = {f'i_block * BLOCK + {offsets}' if axis == self.split else offsets}"
        if line not in self.before:
            self.before += [line, f"within_{axis_name(axis)} = {name} < {self.size(axis)}"]
        return name

    def _fixed(self, nodes: Sequence[Node]) -> list[str | None]:
        """A key of every value that is the same at all tokens: made of params, consts and numbers."""
        keys: list[str | None] = []
        for node in nodes:
            inner = [keys[a] for a in node.args]
            fixed = node.op in ("param", "const", "number", "eye") or (node.args and None not in inner)
            keys.append(
                f"{node.op}{dict(node.attrs)}{node.axes}({', '.join(map(str, inner))})" if fixed else None
            )
        return keys

    def _param(self, node: Node) -> str:
        """A param, loaded once before the loop."""
        key = f"param {gradient_name(node)}"
        if key not in self.params:
            self.params[key] = self.names.unique(f"b_{node.label or node.attr('name')}")
            self.before.append(f"{self.params[key]} = {self.load_leaf(node)}.to(tl.float32)")
        return self.params[key]

    def _const(self, const: str) -> str:
        argument = self.launcher.consts[const]
        if argument not in self.scalars:
            self.scalars[argument] = self.names.unique(argument)
        return self.scalars[argument]


def _live(plan: ChunkPlan, roots: Iterable[int], given: Mapping[int, str]) -> set[int]:
    """What the roots need, but nothing that only values at hand need."""
    todo, found = list(roots), set[int]()
    while todo:
        n = todo.pop()
        if n not in found:
            found.add(n)
            todo += () if n in given else plan.nodes[n].args
    return found


def leaf_name(node: Node) -> str:
    """What tells a leaf of a token from others: ``k``, ``k[0]``, ``d_o``."""
    return f"d_{node.attr('name')}" if node.op == "cotangent" else gradient_name(node).removeprefix("d_")


def memory_axes(dims: Sequence[Dim]) -> Axes:
    """The axes of a declared tensor in their order in memory; the columns of a square one by another name."""
    kept = [d for d in dims if d != 1]
    if len(kept) == 2 and kept[0] == kept[1]:
        return family(kept[0])[:2]
    return tuple(str(d) for d in kept)
