"""The kernel that decodes, as text: a few tokens from states in a pool, which it updates in place."""

from __future__ import annotations

import re
from dataclasses import dataclass

from linalg_dsl.codegen.emit.render import render
from linalg_dsl.codegen.emit.trace import values_of
from linalg_dsl.codegen.emit.triton_step_kernel import StepText, next_states, without_unused
from linalg_dsl.codegen.emit.triton_step_memory import StepMemory, StepNames, memory_axes
from linalg_dsl.codegen.emit.triton_step_statements import axis_name, index
from linalg_dsl.codegen.schedule.step_split import StepSchedule
from linalg_dsl.language.spec import RecurrenceSpec, State
from linalg_dsl.planner.ops import Axes

_CONSTANTS = ("U", "BLOCK", "BLOCKS", "PARTS", "PRECISION", "K", "V", "KP", "VP", "SLOTS", "ACCEPTED")


@dataclass(frozen=True, slots=True)
class _Decode:
    """What templates/decode.py.jinja asks for."""

    name: str
    doc: str
    pointers: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]
    shared: bool
    whole: str
    before: tuple[str, ...]
    group: tuple[str, ...]
    loads: tuple[str, ...]
    body: tuple[str, ...]
    store: tuple[str, ...]


class DecodeMemory(StepMemory):
    """Addresses of a dense batch by strides: tokens of views are read where they are."""

    def row(self, wanted: str, pointer: str, entry: str, entries: str, memory: Axes, tile: Axes) -> str:
        """Where a tile of this token lies; of inputs the strides of batch and time are arguments."""
        argument = next((a for a, p in self.pointers.items() if p == pointer), "")
        given = argument in self.launcher.inputs.values()
        each = " * ".join([entries, *(self.size(a) for a in memory)])
        if given:
            batch, step = (self._number(f"{argument}.stride({i})", f"{argument}_{n}")
                           for i, n in enumerate(("batch", "token")))  # fmt: skip
        else:
            step = f"({each})" if " " in each and not re.fullmatch(r"\(.*\)", each) else each
            batch = f"(length * {each})"
        key = (pointer, entry, entries, *memory, *tile)
        if key not in self.rows:
            self.rows[key] = self.names.unique(f"at_{wanted}")
            at = self.address(f"{pointer} + i_n.to(tl.int64) * {batch}", entry, memory, tile)
            self.before.append(f"{self.rows[key]} = {at}")
        return f"{self.rows[key]} + (i_first + {self.token}) * {step}"

    def place(self, i: int, state: State) -> str:
        """Where the block of a state lies in its slot."""
        memory, tile = self.state_axes(state)
        places = [at for at, d in enumerate(state.dims, 2) if d != 1]
        states = f"states[{i}]"
        pointer = self.pointer(states, state.name)
        terms = [pointer, f"slot * {self._number(f'{states}.stride(0)', f'{state.name}_row')}"]
        # a pool may lie head by head: then this is the largest stride
        terms.append(f"i_h.to(tl.int64) * {self.flag(f'{state.name}_head', f'{states}.stride(1)')}")
        for at, axis in zip(places, memory, strict=True):
            stride = self.flag(f"{state.name}_stride_{axis_name(axis)}", f"{states}.stride({at})")
            terms.append(f"o_{axis_name(axis)}{index(tile, axis)} * {stride}")
        return " + ".join(terms)

    def _number(self, launcher: str, wanted: str) -> str:
        if launcher not in self.scalars:
            self.scalars[launcher] = self.names.unique(wanted)
        return self.scalars[launcher]


def decode_kernel(spec: RecurrenceSpec, schedule: StepSchedule, launcher: StepNames) -> StepText:
    """The kernel over the tokens; ``spec`` has every carried tensor as a state."""
    memory = DecodeMemory(spec, schedule, launcher)
    memory.names.reserve(
        (
            "slots",
            "accepted",
            "rows",
            "keep",
            "slot",
            "blank",
            "left",
            "SLOTS",
            "ACCEPTED",
            "PARTS",
            "i_part",
            "b_whole",
        )
    )
    plan = schedule.forward
    tiles = memory.tiles([plan])
    shared = False
    store: list[str] = []
    carries: dict[str, str] = {}
    for i, state in enumerate(spec.states):
        carry = carries[state.name] = memory.names.unique(f"b_{state.name}")
        _, tile = memory.state_axes(state)
        place, at = memory.place(i, state), memory.names.unique(f"in_{state.name}")
        pointer = memory.pointers[f"states[{i}]"]
        whole = schedule.split is not None and schedule.split not in tile
        shared |= whole
        memory.before += [
            f"{at} = {place}",
            f"{carry} = tl.load({at}{memory.mask(tile, 'there')}, other=0.0).to(tl.float32)",
        ]
        mask = memory.mask(tile, *(("i_block == BLOCKS - 1",) if whole else ()))
        store.append(f"tl.store({at}, {carry}.to({pointer}.dtype.element_ty){mask})")
    ((o_name, o_node),) = plan.outputs
    roots = [o_node, *(c[3] for c in plan.carries)]
    names, loads = memory.group(plan, roots)
    out = memory.statements(plan, tiles, roots, {leaf: carries[n] for n, _, leaf, _ in plan.carries}, names)
    body = list(out.lines)
    tile = out.nodes[o_node].axes
    entry, entries, more, value = "i_h", "H", memory.once(tile), out.full(o_node, ())
    total = ""
    if schedule.partial_output:  # a part of each block, or the sum of all where one program goes over them
        entry, entries = "(i_block % PARTS) * H + i_h", "PARTS * H"
        more = ("((PARTS > 1) | (i_block == BLOCKS - 1))",)
        total = memory.filled(tile, "0.0")
        body.append(f"b_whole = b_whole + {value} if BLOCKS > PARTS else {value}")
        value = "b_whole"
    value = f"tl.where(there, {value}, blank)"
    dims = memory_axes(spec.outputs[0].value.shape)
    body.append(memory.store_row(launcher.outputs[o_name], entry, entries, dims, tile, value, *more))
    body.append(next_states(carries, plan, "forward", out, live=True))
    before = without_unused(memory.before, [*loads, *body, *store])
    words = set(re.findall(r"\w+", "\n".join([*before, *loads, *body, *store])))
    words |= {"U", "BLOCKS", "SLOTS", "ACCEPTED"} | ({"PARTS"} if total else set())
    constants = (*(c for c in _CONSTANTS if c in words), *memory.ratios, *memory.flags)
    made = _Decode(
        name=f"{launcher.title}_step",
        doc="A few tokens, one after the other: outputs, and in place the states after them.",
        pointers=tuple(memory.pointers.values()),
        scalars=tuple(memory.scalars.values()),
        constants=constants,
        shared=shared,
        whole=total,
        before=tuple(before),
        group=tuple(names.values()),
        loads=tuple(loads),
        body=tuple(body),
        store=tuple(store),
    )
    return StepText(
        made.name, render("decode.py.jinja", made), tuple(memory.pointers), tuple(memory.scalars), constants,
        tuple(memory.flags.items()), frozenset(memory.library), values_of(plan, out.text),
    )  # fmt: skip
