"""The two kernels of a step class as text: over the tokens, and in reverse with the states replayed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.render import render
from linalg_dsl.codegen.emit.signature import tuple_text
from linalg_dsl.codegen.emit.triton_statements import Tile
from linalg_dsl.codegen.emit.triton_step_statements import (
    StepStatements,
    axis_name,
    index,
    size_of,
    tile_axes,
    zero_axes,
)
from linalg_dsl.codegen.schedule.step_split import StepSchedule, needs_states
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
OWN_CONSTANTS = ("C", "BLOCK", "BLOCKS", "SAVE", "STAGES", "PRECISION", "K", "V", "KP", "VP")


@dataclass(frozen=True, slots=True)
class StepText:
    """A kernel's text; ``tensors`` are the launcher's expressions for its pointers, in order.

    ``flags`` are the constants that say which optional tensors are there, with the launcher's expressions.
    """

    name: str
    text: str
    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]
    flags: tuple[tuple[str, str], ...]
    library: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Step:
    """What templates/step.py.jinja asks for."""

    name: str
    doc: str
    pointers: tuple[str, ...]
    scalars: tuple[str, ...]
    bounds: tuple[str, ...]
    constants: tuple[str, ...]
    before: tuple[str, ...]
    reverse: bool
    reload: tuple[str, ...]
    replay: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]


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
class _Kernel:
    """What both kernels have in common: axes, pointers, addresses."""

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
        return tuple(Node(n.op, n.args, n.attrs, tile_axes(n.axes, self.split), n.label) for n in plan.nodes)

    def length(self, axis: str) -> str:
        if axis == self.split:
            return "BLOCK"
        name = dimension(axis)
        if name in ("K", "V"):
            return f"{name}P"
        return str(1 << max(0, self.launcher.rows[name] - 1).bit_length())

    def size(self, axis: str) -> str:
        return size_of(axis, dict(self.launcher.rows))

    def blocks(self, plans: Iterable[ChunkPlan]) -> dict[str, Tile]:
        """The tile of every axis; its offsets and mask are the first lines of the kernel."""
        axes = dict.fromkeys(a for p in plans for n in p.nodes for a in n.axes)
        tiles = {}
        for axis in axes:
            low, length = axis_name(axis), self.length(axis)
            first = "i_block * BLOCK + " if axis == self.split else ""
            self.before += [
                f"o_{low} = {first}tl.arange(0, {length})",
                f"m_{low} = o_{low} < {self.size(axis)}",
            ]
            tiles[axis] = Tile(length, f"m_{low}")
        return tiles

    # -- memory ---------------------------------------------------------------------------------------
    def pointer(self, launcher: str, wanted: str) -> str:
        if launcher not in self.pointers:
            self.pointers[launcher] = self.names.unique(f"p_{wanted}")
        return self.pointers[launcher]

    def flag(self, wanted: str, launcher: str) -> str:
        for name, value in self.flags.items():
            if value == launcher:
                return name
        name = self.names.unique(wanted)
        self.flags[name] = launcher
        return name

    def place(self, place: str, memory: Sequence[str], tile: Axes) -> str:
        """The offset of a tile in a tensor whose trailing axes are ``memory``, at entry ``place`` of it."""
        terms = []
        sizes = [self.size(a) for a in memory]
        terms.append(" * ".join([place if not sizes else f"({place})", *sizes]))
        for i, axis in enumerate(memory):
            offset = f"o_{axis_name(axis)}{index(tile, axis)}"
            terms.append(" * ".join([offset, *sizes[i + 1 :]]))
        return " + ".join(terms)

    def mask(self, tile: Axes, *more: str) -> str:
        """``, mask=...`` for what lies in the tensor, and where ``more`` holds."""
        parts = [f"m_{axis_name(a)}{index(tile, a)}" for a in tile] + [f"({m})" for m in more]
        return f", mask={' & '.join(parts)}" if parts else ""

    def head(self, name: str) -> tuple[str, str]:
        """(heads, head) of a declared tensor."""
        ratio = f"R_{self.launcher.inputs[name]}"
        self.ratios[ratio] = None
        return f"(H // {ratio})", f"i_h // {ratio}"

    def load_leaf(self, node: Node) -> str:
        """The expression that loads an input, param or cotangent."""
        if node.op == "cotangent":
            axes = memory_axes(self.spec.outputs[0].value.shape)
            at = self.place("i_token * H + i_h", axes, node.axes)
            return self._load(self.pointer(self.launcher.cotangent, self.launcher.cotangent), at, node.axes)
        name = str(node.attr("name"))
        argument = self.launcher.inputs[name]
        heads, head = self.head(name)
        place = f"i_token * {heads} + {head}" if node.op == "input" else head
        row = node.attr("row")
        dims = self.spec.input(name).dims
        if row is not None:
            place = f"({place}) * {self.launcher.counts[name]} + {row}"
            dims = dims[1:]
        at = self.place(place, memory_axes(dims), node.axes)
        return self._load(self.pointer(argument, argument), at, node.axes)

    def _load(self, pointer: str, at: str, tile: Axes) -> str:
        mask = self.mask(tile)
        return f"tl.load({pointer} + {at}{mask}{', other=0.0' if mask else ''})"

    # -- states ---------------------------------------------------------------------------------------
    def state_axes(self, state: State) -> tuple[Axes, Axes]:
        """(axes in memory, axes of the tile) of a state."""
        memory = memory_axes(state.dims)
        return memory, tile_axes(ordered(memory), self.split)

    def full_tile(self, tile: Axes, value: str) -> str:
        return f"tl.full({tuple_text(self.length(a) for a in tile)}, {value}, tl.float32)"

    def start(self, tile: Axes, value: float) -> str:
        """A state before the first token: zero on padding, whatever it is elsewhere."""
        whole = self.full_tile(tile, repr_of(value))
        if value == 0 or not tile:
            return whole
        mask = self.mask(tile).removeprefix(", mask=")
        return f"tl.where({mask}, {repr_of(value)}, {self.full_tile(tile, '0.0')})"

    def once(self, tile: Axes) -> tuple[str, ...]:
        """What a value that every block has alike is stored or counted by: the first block."""
        return () if self.split is None or self.split in tile else ("i_block == 0",)

    # -- one pass over a token ------------------------------------------------------------------------
    def statements(self, nodes: Sequence[Node], tiles: Mapping[str, Tile], roots: Iterable[int],
                   given: Mapping[int, str], plan: ChunkPlan) -> StepStatements:  # fmt: skip
        """Loads of all leaves that the roots need, then a statement per node."""
        out = StepStatements(nodes, tiles, self.names, padding=zero_axes(nodes, plan))
        live = sorted(plan.live(roots))
        for n in live:
            node = nodes[n]
            if n in given:
                out.given(n, given[n])
            elif node.op in ("input", "cotangent"):
                wanted = node.label or str(node.attr("name"))
                name = self.names.unique(f"b_{wanted}")
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
        for name, launcher in self.scalars.items():
            if launcher == argument:
                return name
        name = self.names.unique(argument)
        self.scalars[name] = argument
        return name

    def finish(self, name: str, doc: str, *, body: Sequence[str], after: Sequence[str],
               reload: Sequence[str] = (), replay: Sequence[str] = (), reverse: bool = False) -> StepText:  # fmt: skip
        lines = [*self.before, *body, *after, *reload, *replay]
        text = "\n".join(lines)
        used = [c for c in OWN_CONSTANTS if c in ("BLOCKS", "STAGES") or re.search(rf"\b{c}\b", text)]
        if reverse and "C" not in used:
            used.append("C")
        before = without_unused(self.before, [*body, *after, *reload, *replay])
        constants = (*used, *self.ratios, *self.flags)
        made = _Step(
            name=f"{self.launcher.title}_{name}",
            doc=doc,
            pointers=tuple(self.pointers.values()),
            scalars=tuple(self.scalars),
            bounds=(),
            constants=constants,
            before=tuple(before),
            reverse=reverse,
            reload=tuple(reload),
            replay=tuple(replay),
            body=tuple(body),
            after=tuple(after),
        )
        return StepText(
            made.name, render("step.py.jinja", made), tuple(self.pointers), tuple(self.scalars.values()),
            constants, tuple(self.flags.items()), frozenset(self.library),
        )  # fmt: skip


def forward_kernel(spec: RecurrenceSpec, schedule: StepSchedule, launcher: StepNames) -> StepText:
    """The kernel over the tokens: outputs, states after, and the states before every C-th token."""
    k = _Kernel(spec, schedule, launcher)
    plan = schedule.forward
    nodes = k.nodes(plan)
    tiles = k.blocks([plan])
    states = {s.name: s for s in spec.states}
    carries = {name: k.names.unique(f"b_{name}") for name in states}
    body: list[str] = []
    after: list[str] = []
    for i, (name, state) in enumerate(states.items()):
        memory, tile = k.state_axes(state)
        first = k.pointer(f"firsts[{i}]", f"{name}_first")
        k.before += [
            f"{carries[name]} = {k.start(tile, state.start)}",
            f"if {k.flag(f'HAS_{name}', f'initial_states[{i}] is not None')}:",
            f"    {carries[name]} = {k._load(first, k.place('i_nh', memory, tile), tile)}.to(tl.float32)",
        ]
        marks = k.pointer(f"marks[{i}]", f"{name}_marks")
        place = k.place("(first_chunk + i_t // C) * H + i_h", memory, tile)
        body += [
            f"        tl.store({marks} + {place}, {carries[name]}{k.mask(tile, *k.once(tile))})",
        ]
        last = k.pointer(f"lasts[{i}]", f"{name}_last")
        after += [
            f"    tl.store({last} + {k.place('i_nh', memory, tile)}, {carries[name]}"
            f"{k.mask(tile, *k.once(tile))})",
        ]
    body = ["if SAVE:", "    if i_t % C == 0:", *body]
    after = [f"if {k.flag('WANT_LAST', 'output_final_state')}:", *after]
    ((_, o_node),) = plan.outputs
    given = {leaf: carries[name] for name, _, leaf, _ in plan.carries}
    roots = [o_node, *(c[3] for c in plan.carries)]
    out = k.statements(nodes, tiles, roots, given, plan)
    body += out.lines
    body.append(_store_result(k, out, o_node, plan, launcher.output, spec.outputs[0].value.shape,
                              partial=schedule.partial_output))  # fmt: skip
    body.append(_next_states(carries, plan, out))
    return k.finish("forward", "One token after the other: outputs, and the states after them.",
                    body=body, after=after)  # fmt: skip


def backward_kernel(spec: RecurrenceSpec, schedule: StepSchedule, launcher: StepNames) -> StepText:
    """The kernel in reverse: chunk by chunk the states before every token once more, then the gradients."""
    k = _Kernel(spec, schedule, launcher)
    plan, forward = schedule.backward, schedule.forward
    nodes = k.nodes(plan)
    replays = needs_states(plan)
    tiles = k.blocks([plan, forward] if replays else [plan])
    states = {s.name: s for s in spec.states}
    d_states = {name: k.names.unique(f"b_d_{name}") for name in states}
    reverse = {name: (leaf, after) for name, way, leaf, after in plan.carries if way == "reverse"}
    after_lines: list[str] = []
    for i, (name, state) in enumerate(states.items()):
        memory, tile = k.state_axes(state)
        final = k.pointer(f"d_lasts[{i}]", f"d_{name}_last")
        at = k.place("i_nh", memory, tile)
        mask = k.mask(tile, *k.once(tile))
        other = ", other=0.0" if mask else ""
        first = k.pointer(f"d_firsts[{i}]", f"d_{name}_first")
        k.before += [
            f"{d_states[name]} = {k.full_tile(tile, '0.0')}",
            f"if {k.flag(f'HAS_D_{name}', f'd_finals[{i}] is not None')}:",
            f"    {d_states[name]} = tl.load({final} + {at}{mask}{other}).to(tl.float32)",
        ]
        place = "i_nh" if not k.once(tile) else "(i_n.to(tl.int64) * BLOCKS + i_block) * H + i_h"
        after_lines += [
            f"if {k.flag(f'WANT_D_{name}', f'initial_states[{i}] is not None')}:",
            f"    tl.store({first} + {k.place(place, memory, tile)}, {d_states[name]}{k.mask(tile)})",
        ]
    reload: list[str] = []
    replay: list[str] = []
    before_token: list[str] = []
    past: dict[str, str] = {}
    if replays:
        running = {name: k.names.unique(f"b_{name}") for name in states}
        past = {name: k.names.unique(f"b_{name}_before") for name in states}
        needed = plan.live([i for _, i in plan.outputs] + [after for _, after in reverse.values()])
        leaves = {name: leaf for name, way, leaf, _ in plan.carries if way == "forward"}
        for i, (name, state) in enumerate(states.items()):
            memory, tile = k.state_axes(state)
            marks = k.pointer(f"marks[{i}]", f"{name}_marks")
            at = k.place("i_ch * H + i_h", memory, tile)
            reload.append(f"{running[name]} = {k._load(marks, at, tile)}")
            if leaves[name] not in needed:
                continue
            kept = k.pointer(f"kept[{i}]", f"{name}_kept")
            place = _kept_place(k, tile)
            replay.append(f"tl.store({kept} + {place}, {running[name]})")
            before_token.append(f"{past[name]} = tl.load({kept} + {place})")
        out = k.statements(
            k.nodes(forward), tiles, [c[3] for c in forward.carries],
            {leaf: running[name] for name, _, leaf, _ in forward.carries}, forward,
        )  # fmt: skip
        replay += out.lines
        replay.append(_next_states(running, forward, out))
    given = {leaf: d_states[name] for name, (leaf, _) in reverse.items()}
    for name, way, leaf, _ in plan.carries:
        if way == "forward" and name in past:
            given[leaf] = past[name]
    roots = [i for _, i in plan.outputs] + [after for _, after in reverse.values()]
    out = k.statements(nodes, tiles, roots, given, plan)
    body = [*before_token, *out.lines]
    leaf_of = {gradient_name(n): n for n in plan.nodes if n.op in ("input", "param")}
    leaf_of |= {gradient_name(n): n for n in forward.nodes if n.op in ("input", "param")}
    for result, node in plan.outputs:
        leaf = leaf_of[result]
        name = str(leaf.attr("name"))
        argument = launcher.gradients[name] + ("_rows" if leaf.attr("row") is not None else "")
        dims = spec.input(name).dims[1 if leaf.attr("row") is not None else 0 :]
        rows = (launcher.counts[name], int(str(leaf.attr("row")))) if leaf.attr("row") is not None else None
        if leaf.op == "input":
            body.append(_store_result(k, out, node, plan, argument, dims,
                                      partial=result in schedule.partial_gradients, rows=rows))  # fmt: skip
        else:
            total = k.names.unique(f"b_sum_{launcher.gradients[name]}")
            tile = nodes[node].axes
            k.before.append(f"{total} = {k.full_tile(tile, '0.0')}")
            body.append(f"{total} += {out.full(node, tile)}")
            place = "i_nh"
            if k.split is not None and result in schedule.partial_gradients:
                place = "(i_n.to(tl.int64) * BLOCKS + i_block) * H + i_h"
            if rows is not None:
                place = f"({place}) * {rows[0]} + {rows[1]}"
            at = k.place(place, memory_axes(dims), tile)
            after_lines.append(f"tl.store({k.pointer(argument, argument)} + {at}, {total}{k.mask(tile)})")
    names = list(reverse)
    values = [out.full(reverse[n][1], nodes[reverse[n][0]].axes) for n in names]
    body.append(f"{', '.join(d_states[n] for n in names)} = {', '.join(values)}")
    return k.finish("backward", "From the last token to the first: the gradients of every input and state.",
                    body=body, after=after_lines, reload=reload, replay=replay, reverse=True)  # fmt: skip


def _store_result(
    k: _Kernel, out: StepStatements, n: int, plan: ChunkPlan, argument: str, dims: Sequence[Dim], *,
    partial: bool, rows: tuple[int, int] | None = None,
) -> str:  # fmt: skip
    """The store of a value of every token: a partial sum to a place of its own."""
    node = plan.nodes[n]
    value, tile = out.full(n, ()), tile_axes(node.axes, k.split)
    place = "i_token * H + i_h"
    more: tuple[str, ...] = ()
    if k.split is not None and partial:
        place = "(i_token * BLOCKS + i_block) * H + i_h"
    elif k.split is not None and k.split not in tile:
        more = ("i_block == 0",)
    if rows is not None:
        place = f"({place}) * {rows[0]} + {rows[1]}"
    pointer = k.pointer(argument, argument)
    at = k.place(place, memory_axes(dims), tile)
    return f"tl.store({pointer} + {at}, {value}.to({pointer}.dtype.element_ty){k.mask(tile, *more)})"


def _next_states(carries: Mapping[str, str], plan: ChunkPlan, out: StepStatements) -> str:
    """All states at once: one may become what another was."""
    after = {name: (leaf, i) for name, _, leaf, i in plan.carries}
    values = [out.full(after[n][1], out.nodes[after[n][0]].axes) for n in carries]
    return f"{', '.join(carries.values())} = {', '.join(values)}"


def _kept_place(k: _Kernel, tile: Axes) -> str:
    """Where a program keeps a state before a token: whole tiles, padding included, one after the other."""
    lengths = [k.length(a) for a in tile]
    terms = [" * ".join(["(tl.program_id(0).to(tl.int64) * C + i)", *lengths])]
    for i, axis in enumerate(tile):
        terms.append(" * ".join([f"tl.arange(0, {k.length(axis)}){index(tile, axis)}", *lengths[i + 1 :]]))
    return " + ".join(terms)


def memory_axes(dims: Sequence[Dim]) -> Axes:
    """The axes of a declared tensor in their order in memory; the columns of a square one by another name."""
    kept = [d for d in dims if d != 1]
    if len(kept) == 2 and kept[0] == kept[1]:
        return family(kept[0])[:2]
    return tuple(str(d) for d in kept)


def repr_of(x: float) -> str:
    return f"float('{x}')" if x in (float("inf"), float("-inf")) else repr(x)


def without_unused(before: Sequence[str], rest: Sequence[str]) -> list[str]:
    """The lines without offsets and masks of axes that nothing mentions."""
    text = "\n".join(rest)
    kept: list[str] = []
    for line in reversed(before):
        found = re.match(r"([om]_\w+) = ", line)
        if found and not re.search(rf"\b{found[1]}\b", text):
            continue
        kept.append(line)
        text += "\n" + line
    return kept[::-1]
