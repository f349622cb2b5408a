"""The two kernels of a step class as text: over the tokens, and in reverse with the states replayed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.codegen.emit.render import render
from linalg_dsl.codegen.emit.trace import Values, values_of
from linalg_dsl.codegen.emit.triton_statements import Tile
from linalg_dsl.codegen.emit.triton_step_memory import PER_BLOCK, StepMemory, StepNames, memory_axes
from linalg_dsl.codegen.emit.triton_step_statements import StepStatements, tile_axes
from linalg_dsl.codegen.schedule.step_split import StepSchedule, needs_states
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.adjoint import gradient_name
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.plan import ChunkPlan, Node

_CONSTANTS = (
    "EVEN", "C", "U", "W", "BLOCK", "BLOCKS", "STAGES", "ORDERED", "SAVE", "PRECISION", "K", "V", "KP", "VP",
)  # fmt: skip
_OTHER_FIELDS = ("name", "doc", "pointers", "scalars", "constants", "before", "reverse", "rounds")


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
    values: Values


@dataclass(frozen=True, slots=True)
class _Step:
    """What templates/step.py.jinja asks for."""

    name: str
    doc: str
    pointers: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]
    before: tuple[str, ...]
    reverse: bool
    rounds: str
    loads: tuple[str, ...]
    keep: tuple[str, ...]
    reload: tuple[str, ...]
    replay_loads: tuple[str, ...]
    replay: tuple[str, ...]
    starts: tuple[str, ...]
    set_out: tuple[str, ...]
    ahead: tuple[str, ...]
    take_start: tuple[str, ...]
    take_up: tuple[str, ...]
    held: tuple[str, ...]
    hold: tuple[str, ...]
    again: tuple[str, ...]
    last: tuple[str, ...]
    out: tuple[str, ...]
    body: tuple[str, ...]
    stores: tuple[str, ...]
    after: tuple[str, ...]


class _Kernel:
    """What both kernels have in common; ``parts`` are the lines of the template's places."""

    def __init__(
        self, spec: RecurrenceSpec, schedule: StepSchedule, launcher: StepNames, *, reverse: bool
    ) -> None:
        self.reverse = reverse
        self.spec = spec
        self.schedule = schedule
        self.launcher = launcher
        self.memory = StepMemory(spec, schedule, launcher)
        self.states = {s.name: s for s in spec.states}
        self.values: Values = {}
        self.parts: dict[str, list[str]] = {f.name: [] for f in fields(_Step) if f.name not in _OTHER_FIELDS}

    def __getitem__(self, part: str) -> list[str]:
        return self.parts[part]

    def statements(
        self,
        plan: ChunkPlan,
        tiles: Mapping[str, Tile],
        roots: Iterable[int],
        given: Mapping[int, str],
        group: Mapping[str, str],
    ) -> StepStatements:
        """Those of ``StepMemory.statements``, and a note of what their names stand for."""
        out = self.memory.statements(plan, tiles, roots, given, group)
        self.values |= values_of(plan, out.text)
        return out

    def store_result(
        self,
        out: StepStatements,
        n: int,
        argument: str,
        dims: Sequence[Dim],
        *,
        partial: bool,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """The store of a value of every token: a partial sum to a place of its own."""
        memory = self.memory
        tile = out.nodes[n].axes
        entry, entries = ("i_block * H + i_h", "BLOCKS * H") if partial else ("i_h", "H")
        if rows is not None:
            entry, entries = f"({entry}) * {rows[0]} + {rows[1]}", f"{entries} * {rows[0]}"
        more = () if partial else memory.once(tile)
        self.store_tokens(argument, entry, entries, memory_axes(dims), tile, out.full(n, tile), *more)

    def store_tokens(
        self, argument: str, entry: str, entries: str, axes: Axes, tile: Axes, value: str, *more: str
    ) -> None:
        """The store of a value of every token; vectors of a group are one tile, stored together."""
        memory = self.memory
        if len(tile) != 1:
            self["body"].append(memory.store_row(argument, entry, entries, axes, tile, value, *more))
            return
        rows, pointer = memory.names.unique(f"out_{argument}"), memory.pointer(argument)
        row = f"({value}.to({pointer}.dtype.element_ty),)"
        self["out"].append(rows)
        self["body"].append(f"{rows} = {f'{row} + {rows}' if self.reverse else f'{rows} + {row}'}")
        self["stores"].append(memory.store_group(argument, entry, entries, axes, rows, *more))

    def text(self, name: str, doc: str) -> StepText:
        memory, reverse = self.memory, self.reverse
        rest = [line for lines in self.parts.values() for line in lines]
        before = without_unused(memory.before, rest)
        words = set(re.findall(r"\w+", "\n".join([*before, *rest])))
        wanted = {"U", "BLOCKS", "STAGES", "ORDERED", "EVEN"} | (
            {"C", "W"} if reverse else {"C", "SAVE"} if self["keep"] else set()
        )
        constants = (*(c for c in _CONSTANTS if c in words | wanted), *memory.ratios, *memory.flags)
        made = _Step(
            name=f"{self.launcher.title}_{name}",
            doc=doc,
            pointers=tuple(memory.pointers.values()),
            scalars=tuple(memory.scalars.values()),
            constants=constants,
            before=tuple(before),
            reverse=reverse,
            rounds="W" if self["last"] else "W - 1",
            **{part: tuple(lines) for part, lines in self.parts.items()},
        )
        return StepText(
            made.name, render("step.py.jinja", made), tuple(memory.pointers), tuple(memory.scalars),
            constants, tuple(memory.flags.items()), frozenset(memory.library), self.values,
        )  # fmt: skip


def forward_kernel(spec: RecurrenceSpec, schedule: StepSchedule, launcher: StepNames) -> StepText:
    """The kernel over the tokens: outputs, states after, and the states before every C-th token."""
    k = _Kernel(spec, schedule, launcher, reverse=False)
    memory, plan = k.memory, schedule.forward
    tiles = memory.tiles([plan], each=1)  # its sums are over the other axis: all of a column in one thread
    carries = {name: memory.names.unique(f"b_{name}") for name in k.states}
    saves = needs_states(schedule.backward)
    k["after"].append(f"if {memory.flag('WANT_LAST', 'output_final_state')}:")
    for i, (name, state) in enumerate(k.states.items()):
        axes, tile = memory.state_axes(state)
        carry, once = carries[name], memory.once(tile)
        first, last = (memory.pointer(f"{at}s[{i}]", f"{name}_{at}") for at in ("first", "last"))
        memory.before += [
            f"{carry} = {memory.start(tile, state.start)}",
            f"if {memory.flag(f'HAS_{name}', f'firsts[{i}] is not None')}:",
            f"    {carry} = {memory.load(first, 'i_nh', axes, tile)}.to(tl.float32)",
        ]
        k["after"].append(f"    {memory.store(last, 'i_nh', axes, tile, carry, *once)}")
        if saves:
            marks = memory.pointer(f"marks[{i}]", f"{name}_mark")
            k["keep"].append(memory.store(marks, "i_ch * H + i_h", axes, tile, carry, *once))
    roots = [*(i for _, i in plan.outputs), *(c[3] for c in plan.carries)]
    names, k.parts["loads"] = memory.group_tiles(plan, roots)
    given = {leaf: carries[name] for name, _, leaf, _ in plan.carries}
    out = k.statements(plan, tiles, roots, given, names)
    k["body"].extend(out.lines)
    shape = spec.outputs[0].value.shape
    for name, node in plan.outputs:
        k.store_result(out, node, launcher.outputs[name], shape, partial=schedule.partial_output)
    k["body"].append(next_states(carries, plan, "forward", out, live=True))
    return k.text("forward", "One token after the other: outputs, and the states after them.")


def backward_kernel(spec: RecurrenceSpec, schedule: StepSchedule, launcher: StepNames) -> StepText:
    """The kernel in reverse: chunk by chunk the states before every token once more, then the gradients."""
    k = _Kernel(spec, schedule, launcher, reverse=True)
    memory, plan = k.memory, schedule.backward
    replays = needs_states(plan)
    # sums over either axis: threads in both directions
    tiles = memory.tiles([plan, schedule.forward] if replays else [plan], each=4)
    d_states = {name: memory.names.unique(f"b_d_{name}") for name in k.states}
    for i, (name, state) in enumerate(k.states.items()):
        axes, tile = memory.state_axes(state)
        once = memory.once(tile)
        last, first = (memory.pointer(f"d_{at}s[{i}]", f"d_{name}_{at}") for at in ("last", "first"))
        memory.before += [
            f"{d_states[name]} = {memory.filled(tile, '0.0')}",
            f"if {memory.flag(f'HAS_D_{name}', f'd_lasts[{i}] is not None')}:",
            f"    {d_states[name]} = {memory.load(last, 'i_nh', axes, tile, *once)}.to(tl.float32)",
        ]
        place = PER_BLOCK if once else "i_nh"
        k["after"].extend(
            [
                f"if {memory.flag(f'WANT_D_{name}', f'd_firsts[{i}] is not None')}:",
                f"    {memory.store(first, place, axes, tile, d_states[name])}",
            ]
        )
    reverse = {name: (leaf, after) for name, way, leaf, after in plan.carries if way == "reverse"}
    products = k.schedule.products
    roots = [i for name, i in plan.outputs if name not in products] + [*k.schedule.factors]
    roots += [after for _, after in reverse.values()]
    names, k.parts["loads"] = memory.group_tiles(plan, roots)
    given = {leaf: d_states[name] for name, (leaf, _) in reverse.items()}
    if replays:
        given |= _replay(k, tiles, plan.live(roots), names)
    memory.token = "(U - 1 - w * W - i)"
    out = k.statements(plan, tiles, roots, given, names)
    k["body"].extend(out.lines)
    leaves = {gradient_name(n): n for n in schedule.forward.nodes if n.op in ("input", "param")}
    for result, node in plan.outputs:
        if result not in products:
            _store_gradient(k, out, result, node, leaves[result])
    for node in k.schedule.factors:
        axes = out.nodes[node].axes
        value, more = out.full(node, axes), memory.once(axes)
        k.store_tokens(k.launcher.factors[node], "i_h", "H", axes, axes, value, *more)
    k["body"].append(next_states(d_states, plan, "reverse", out, live=True))
    return k.text("backward", "From the last token to the first: the gradients of inputs and states.")


def _replay(
    k: _Kernel, tiles: Mapping[str, Tile], needed: frozenset[int], names: dict[str, str]
) -> dict[int, str]:
    """The lines that go over a chunk once more for the states at each token; gives their names, by node.

    Before every W-th token they are kept in registers where a chunk is one group, else in memory, and within
    W tokens in registers, each with the state that it becomes where a gradient reads that. ``names``: the
    tuples of the group in reverse, to which those are added that only the states need.
    """
    memory, forward, backward = k.memory, k.schedule.forward, k.schedule.backward
    running = {name: memory.names.unique(f"b_{name}") for name in k.states}
    carries = {name: (leaf, after) for name, way, leaf, after in backward.carries if way == "forward"}
    leaves = {leaf for leaf, _ in carries.values()}
    found: dict[int, str] = {}
    for i, (name, state) in enumerate(k.states.items()):
        axes, tile = memory.state_axes(state)
        now, start = running[name], memory.names.unique(f"start_{name}")
        marks = memory.pointer(f"marks[{i}]", f"{name}_mark")
        k["reload"].append(f"{now} = {memory.load(marks, 'i_ch * H + i_h', axes, tile)}")
        kept = memory.kept(memory.pointer(f"kept[{i}]", f"{name}_kept"), tile)
        k["keep"].append(f"tl.store({kept}, {now})")
        k["take_up"].append(f"{now} = tl.load({kept})")
        k["starts"].append(start)
        k["set_out"].append(f"{start} = {start} + ({now},)")
        k["take_start"].append(f"{now} = {start}[U // W - 1 - w]")
        leaf, after = carries[name]
        reads_next = after in needed and after not in leaves and backward.nodes[after].op != "number"
        if leaf not in needed and not reads_next:
            continue
        every = memory.names.unique(f"every_{name}")
        k["held"].append(every)
        k["hold"].append(f"{every} = {every} + ({now},)")
        if leaf in needed:
            found[leaf] = memory.names.unique(f"b_{name}_before")
            k["body"].append(f"{found[leaf]} = {every}[W - 1 - i]")
        if reads_next:
            found[after] = memory.names.unique(f"b_{name}_after")
            k["body"].append(f"{found[after]} = {every}[W - i]")
            k["last"].append(f"{every} = {every} + ({now},)")
    roots = [after for _, _, _, after in forward.carries]
    given = {leaf: running[name] for name, _, leaf, _ in forward.carries}
    own, k.parts["replay_loads"] = memory.group_tiles(forward, roots)
    for key, every in own.items():
        if key not in names:
            names[key] = memory.names.unique(every)
            line = next(x for x in k["replay_loads"] if x.startswith(f"{every} = "))
            k["loads"].append(re.sub(rf"\b{every}\b", names[key], line))
    for part, token, group in (
        ("replay", "u", own), ("ahead", "u", names), ("again", "(U - (w + 1) * W + i)", names)
    ):  # fmt: skip
        memory.token = token
        out = k.statements(forward, tiles, roots, given, group)
        k[part].extend(out.lines)
        k[part].append(next_states(running, forward, "forward", out))
    return found


def _store_gradient(k: _Kernel, out: StepStatements, result: str, n: int, leaf: Node) -> None:
    """An input's gradient is stored at its token, a param's added up over them."""
    memory = k.memory
    name, row = str(leaf.attr("name")), leaf.attr("row")
    argument, dims, rows = k.launcher.gradients[name], k.spec.input(name).dims, None
    if row is not None:
        argument, dims, rows = f"{argument}_rows", dims[1:], (k.launcher.counts[name], int(str(row)))
    partial = result in k.schedule.partial_gradients
    if leaf.op == "input":
        k.store_result(out, n, argument, dims, partial=partial, rows=rows)
        return
    tile = tile_axes(leaf.axes, k.schedule.split)
    total = memory.names.unique(f"b_sum_{argument}")
    memory.before.append(f"{total} = {memory.filled(tile, '0.0')}")
    factors: list[str] = []
    while (inner := _without_factor(out, n, leaf.axes)) is not None:  # of all tokens: once, behind the loop
        n, factor = inner
        factors.append(factor)
    k["body"].append(f"{total} += tl.where(live, {out.full(n, tile)}, 0.0)")
    k["after"].extend(f"{total} = {total} * {factor}" for factor in factors)
    place = PER_BLOCK if partial else "i_nh"
    if rows is not None:
        place = f"({place}) * {rows[0]} + {rows[1]}"
    k["after"].append(memory.store(memory.pointer(argument), place, memory_axes(dims), tile, total))


def _without_factor(out: StepStatements, n: int, axes: Axes) -> tuple[int, str] | None:
    """A product as what changes from token to token and what does not, where the former has all axes."""
    node = out.nodes[n]
    if node.op != "mul":
        return None
    for inner, factor in (node.args, node.args[::-1]):
        whole = set(out.nodes[inner].axes) == set(axes) and inner not in out.fixed
        if whole and (out.nodes[factor].op == "number" or factor in out.fixed):
            return inner, out.value(factor, node.axes)
    return None


def next_states(
    carries: Mapping[str, str], plan: ChunkPlan, way: str, out: StepStatements, live: bool = False
) -> str:
    """All states at once: one may become what another was. A token that is not there leaves them alone."""
    after = {name: (leaf, i) for name, direction, leaf, i in plan.carries if direction == way}
    values = [out.full(after[n][1], out.nodes[after[n][0]].axes) for n in carries]
    if live:
        values = [f"tl.where(live, {x}, {now})" for x, now in zip(values, carries.values(), strict=True)]
    return f"{', '.join(carries.values())} = {', '.join(values)}"


def without_unused(before: Sequence[str], rest: Sequence[str]) -> list[str]:
    """The lines without offsets and masks of axes that nothing mentions."""
    words = set(re.findall(r"\w+", "\n".join(rest)))
    kept: list[str] = []
    for line in reversed(before):
        found = re.match(r"([om]_\w+) = ", line)
        if found and found[1] not in words:
            continue
        kept.append(line)
        words |= set(re.findall(r"\w+", line))
    return kept[::-1]
