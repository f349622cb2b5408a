"""The two kernels of a step class as text: over the tokens, and in reverse with the states replayed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.codegen.emit.render import render
from linalg_dsl.codegen.emit.triton_statements import Tile
from linalg_dsl.codegen.emit.triton_step_memory import PER_BLOCK, StepMemory, StepNames, memory_axes
from linalg_dsl.codegen.emit.triton_step_statements import StepStatements, tile_axes
from linalg_dsl.codegen.schedule.step_split import StepSchedule, needs_states
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.adjoint import gradient_name
from linalg_dsl.planner.plan import ChunkPlan, Node

_CONSTANTS = ("C", "BLOCK", "SAVE", "PRECISION", "K", "V", "KP", "VP")


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
    constants: tuple[str, ...]
    before: tuple[str, ...]
    reverse: bool
    reload: tuple[str, ...]
    replay: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]


class _Kernel:
    """What both kernels have in common."""

    def __init__(self, spec: RecurrenceSpec, schedule: StepSchedule, launcher: StepNames) -> None:
        self.spec = spec
        self.schedule = schedule
        self.launcher = launcher
        self.memory = StepMemory(spec, schedule, launcher)
        self.states = {s.name: s for s in spec.states}
        self.body: list[str] = []
        self.after: list[str] = []
        self.reload: list[str] = []
        self.replay: list[str] = []

    def store_result(
        self,
        out: StepStatements,
        n: int,
        argument: str,
        dims: Sequence[Dim],
        *,
        partial: bool,
        rows: str = "",
    ) -> None:
        """The store of a value of every token: a partial sum to a place of its own."""
        memory = self.memory
        tile = out.nodes[n].axes
        place = "(i_token * BLOCKS + i_block) * H + i_h" if partial else "i_token * H + i_h"
        place = f"({place}){rows}" if rows else place
        pointer = memory.pointer(argument)
        value = f"{out.full(n, ())}.to({pointer}.dtype.element_ty)"
        more = () if partial else memory.once(tile)
        self.body.append(memory.store(pointer, place, memory_axes(dims), tile, value, *more))

    def text(self, name: str, doc: str, *, reverse: bool) -> StepText:
        memory = self.memory
        rest = [*self.body, *self.after, *self.reload, *self.replay]
        before = _without_unused(memory.before, rest)
        words = set(re.findall(r"\w+", "\n".join([*before, *rest])))
        own = [c for c in _CONSTANTS if c in words or (c == "C" and reverse)]
        constants = (*own, "BLOCKS", "STAGES", *memory.ratios, *memory.flags)
        made = _Step(
            name=f"{self.launcher.title}_{name}",
            doc=doc,
            pointers=tuple(memory.pointers.values()),
            scalars=tuple(memory.scalars.values()),
            constants=constants,
            before=tuple(before),
            reverse=reverse,
            reload=tuple(self.reload),
            replay=tuple(self.replay),
            body=tuple(self.body),
            after=tuple(self.after),
        )
        return StepText(
            made.name, render("step.py.jinja", made), tuple(memory.pointers), tuple(memory.scalars),
            constants, tuple(memory.flags.items()), frozenset(memory.library),
        )  # fmt: skip


def forward_kernel(spec: RecurrenceSpec, schedule: StepSchedule, launcher: StepNames) -> StepText:
    """The kernel over the tokens: outputs, states after, and the states before every C-th token."""
    k = _Kernel(spec, schedule, launcher)
    memory, plan = k.memory, schedule.forward
    tiles = memory.tiles([plan])
    carries = {name: memory.names.unique(f"b_{name}") for name in k.states}
    k.body += ["if SAVE:", "    if i_t % C == 0:"]
    k.after.append(f"if {memory.flag('WANT_LAST', 'output_final_state')}:")
    for i, (name, state) in enumerate(k.states.items()):
        axes, tile = memory.state_axes(state)
        carry, once = carries[name], memory.once(tile)
        first, marks, last = (
            memory.pointer(f"{kind}s[{i}]", f"{name}_{kind}") for kind in ("first", "mark", "last")
        )
        memory.before += [
            f"{carry} = {memory.start(tile, state.start)}",
            f"if {memory.flag(f'HAS_{name}', f'firsts[{i}] is not None')}:",
            f"    {carry} = {memory.load(first, 'i_nh', axes, tile)}.to(tl.float32)",
        ]
        place = "(first_chunk + i_t // C) * H + i_h"
        k.body.append(f"        {memory.store(marks, place, axes, tile, carry, *once)}")
        k.after.append(f"    {memory.store(last, 'i_nh', axes, tile, carry, *once)}")
    if not needs_states(schedule.backward):
        k.body = []
        memory.pointers = {e: p for e, p in memory.pointers.items() if not e.startswith("marks[")}
    ((_, o_node),) = plan.outputs
    given = {leaf: carries[name] for name, _, leaf, _ in plan.carries}
    out = memory.statements(plan, tiles, [o_node, *(c[3] for c in plan.carries)], given)
    k.body += out.lines
    shape = spec.outputs[0].value.shape
    k.store_result(out, o_node, launcher.output, shape, partial=schedule.partial_output)
    k.body.append(_next_states(carries, plan, "forward", out))
    return k.text("forward", "One token after the other: outputs, and the states after them.", reverse=False)


def backward_kernel(spec: RecurrenceSpec, schedule: StepSchedule, launcher: StepNames) -> StepText:
    """The kernel in reverse: chunk by chunk the states before every token once more, then the gradients."""
    k = _Kernel(spec, schedule, launcher)
    memory, plan = k.memory, schedule.backward
    replays = needs_states(plan)
    tiles = memory.tiles([plan, schedule.forward] if replays else [plan])
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
        k.after += [
            f"if {memory.flag(f'WANT_D_{name}', f'd_firsts[{i}] is not None')}:",
            f"    {memory.store(first, place, axes, tile, d_states[name])}",
        ]
    reverse = {name: (leaf, after) for name, way, leaf, after in plan.carries if way == "reverse"}
    roots = [i for _, i in plan.outputs] + [after for _, after in reverse.values()]
    given = {leaf: d_states[name] for name, (leaf, _) in reverse.items()}
    if replays:
        given |= _replay(k, tiles, plan.live(roots))
    out = memory.statements(plan, tiles, roots, given)
    k.body += out.lines
    leaves = {gradient_name(n): n for n in schedule.forward.nodes if n.op in ("input", "param")}
    for result, node in plan.outputs:
        _store_gradient(k, out, result, node, leaves[result])
    k.body.append(_next_states(d_states, plan, "reverse", out))
    return k.text(
        "backward", "From the last token to the first: the gradients of inputs and states.", reverse=True
    )


def _replay(k: _Kernel, tiles: Mapping[str, Tile], needed: frozenset[int]) -> dict[int, str]:
    """The lines that go over a chunk once more and keep the states; gives those before a token, by leaf."""
    memory, forward, backward = k.memory, k.schedule.forward, k.schedule.backward
    running = {name: memory.names.unique(f"b_{name}") for name in k.states}
    leaves = {name: leaf for name, way, leaf, _ in backward.carries if way == "forward"}
    found: dict[int, str] = {}
    for i, (name, state) in enumerate(k.states.items()):
        axes, tile = memory.state_axes(state)
        marks = memory.pointer(f"marks[{i}]", f"{name}_mark")
        k.reload.append(f"{running[name]} = {memory.load(marks, 'i_ch * H + i_h', axes, tile)}")
        if leaves[name] not in needed:
            continue
        kept = memory.kept(memory.pointer(f"kept[{i}]", f"{name}_kept"), tile)
        before = found[leaves[name]] = memory.names.unique(f"b_{name}_before")
        k.replay.append(f"tl.store({kept}, {running[name]})")
        k.body.append(f"{before} = tl.load({kept})")
    given = {leaf: running[name] for name, _, leaf, _ in forward.carries}
    out = memory.statements(forward, tiles, [after for _, _, _, after in forward.carries], given)
    k.replay += out.lines
    k.replay.append(_next_states(running, forward, "forward", out))
    return found


def _store_gradient(k: _Kernel, out: StepStatements, result: str, n: int, leaf: Node) -> None:
    """An input's gradient is stored at its token, a param's added up over them."""
    memory = k.memory
    name, row = str(leaf.attr("name")), leaf.attr("row")
    argument, dims, rows = k.launcher.gradients[name], k.spec.input(name).dims, ""
    if row is not None:
        argument, dims, rows = f"{argument}_rows", dims[1:], f" * {k.launcher.counts[name]} + {row}"
    partial = result in k.schedule.partial_gradients
    if leaf.op == "input":
        k.store_result(out, n, argument, dims, partial=partial, rows=rows)
        return
    tile = tile_axes(leaf.axes, k.schedule.split)
    total = memory.names.unique(f"b_sum_{argument}")
    memory.before.append(f"{total} = {memory.filled(tile, '0.0')}")
    k.body.append(f"{total} += {out.full(n, tile)}")
    place = PER_BLOCK if partial else "i_nh"
    place = f"({place}){rows}" if rows else place
    k.after.append(memory.store(memory.pointer(argument), place, memory_axes(dims), tile, total))


def _next_states(carries: Mapping[str, str], plan: ChunkPlan, way: str, out: StepStatements) -> str:
    """All states at once: one may become what another was."""
    after = {name: (leaf, i) for name, direction, leaf, i in plan.carries if direction == way}
    values = [out.full(after[n][1], out.nodes[after[n][0]].axes) for n in carries]
    return f"{', '.join(carries.values())} = {', '.join(values)}"


def _without_unused(before: Sequence[str], rest: Sequence[str]) -> list[str]:
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
