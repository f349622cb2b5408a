"""The forward and backward chunk plans as one plain PyTorch module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.signature import given_outputs, row_count, run_time_consts, tuple_text
from linalg_dsl.codegen.emit.torch_layout import PrintedFunction, TorchText
from linalg_dsl.codegen.emit.torch_printer import ChunkPrinter
from linalg_dsl.codegen.emit.torch_shared import SharedValues, name_list, shared_values
from linalg_dsl.codegen.emit.torch_solve import Systems
from linalg_dsl.codegen.emit.torch_text import ATOM, Text
from linalg_dsl.codegen.emit.trace import Trace
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.precision import precision

CHUNK = 64
CHANNEL_CHUNK = 64
"""Tokens per chunk where the caller does not say; the second with a decay per channel."""
LONG = 70
"""Statements of forward and backward beyond which what both compute stands in a function of its own."""
_WORD = re.compile(r"[A-Za-z_]\w*")


def emit_torch(
    canonical: CanonicalRecurrence,
    forward: ChunkPlan,
    backward: ChunkPlan,
    chunk_size: int | None = None,
    wide: bool = False,
    trace: Trace | None = None,
) -> str:
    """The text of a module with ``forward`` and ``backward`` over whole sequences.

    ``wide``: the output has the type of the state, not that of an input. ``trace`` takes up
    what the names in the functions stand for. The text depends on nothing but the arguments and this
    package's version.
    """
    spec = canonical.spec
    states = [name for name, _, _, _ in forward.carries]
    consts = run_time_consts(spec, forward, backward)
    numbers = dict(canonical.consts)
    found = _Functions(spec, forward, backward, consts, numbers)
    values = shared_values(forward, backward) if found.length > LONG else None
    if values is not None:
        found = min(
            _Functions(spec, forward, backward, consts, numbers, values), found, key=lambda f: f.length
        )
    if trace is not None:
        trace |= found.trace
    digits = precision(canonical)
    return TorchText(
        spec,
        unit="chunk",
        way="the chunkwise form",
        note="Inside a chunk a token value is [B, H, C, D], a score [B, H, C, C] (row t, column s), a state "
        "[B, H, K, V].",
        chunk=chunk_size or default_chunk(canonical),
        consts=consts,
        states=tuple(states),
        numbers=numbers,
        wide=wide,
        inputs=tuple(found.inputs),
        gradients=[g != "None" for g in found.gradients],
        used=found.used,
        forward=found.forward,
        backward=found.backward,
        shared=found.shared,
        shortest=(digits.axis, digits.shortest if chunk_size is None else ()),
    ).text()


class _Functions:
    """The printed functions of a chunk: forward and backward, and the values that both need where asked."""

    def __init__(
        self,
        spec: RecurrenceSpec,
        forward: ChunkPlan,
        backward: ChunkPlan,
        consts: tuple[str, ...],
        numbers: Mapping[str, float],
        values: SharedValues | None = None,
    ) -> None:
        self.spec = spec
        self.consts = consts
        self.numbers = numbers
        names = [name for name, _, _, _ in forward.carries]
        several = "" if len(names) == 1 else "s"
        self.carried = {("carry", n): f"S_{n}" if several else "S" for n in names}
        self.arguments: list[str] = []
        self.handed: dict[int, Text] = {}
        self.systems: Systems = {}
        self.shared: PrintedFunction | None = None
        shared = None if values is None else self._print_shared(backward, values)
        ahead = self._function(forward, nodes=None if values is None else values.in_forward)
        back = self._print_backward(forward, backward)
        after = [node for _, _, _, node in forward.carries]
        count = len(forward.outputs)
        texts = ahead.printer.run([*(node for _, node in forward.outputs), *after])
        outputs, states = texts[:count], texts[count:]
        self.inputs = ahead.inputs
        printed = {"forward_chunk": ahead, "backward_chunk": back}
        bodies = [own.body() for own in printed.values()]
        if shared is not None:
            printed = {"chunk_values": shared, **printed}
            bodies = self._with_call(shared, [ahead, back], bodies)
        self.forward = PrintedFunction(
            tuple(ahead.args),
            bodies[0],
            f"{given_outputs(o.code for o in outputs)}, {tuple_text(x.code for x in states)}",
            f"The output rows of one chunk and the state{several} after it.",
        )
        self.backward = PrintedFunction(
            tuple(back.args),
            bodies[1],
            f"{tuple_text(self.d_states)}, {tuple_text(self.gradients)}",
            f"The gradient of the state{several} before one chunk, and those of its inputs in their order.",
        )
        self.trace = {name: own.printer.values() for name, own in printed.items()}
        self.used = set[str]().union(*(own.printer.used for own in printed.values()))

    @property
    def length(self) -> int:
        """Statements of all functions."""
        functions = (self.forward, self.backward, *([self.shared] if self.shared else []))
        return sum(len(f.lines) for f in functions)

    def _print_shared(self, backward: ChunkPlan, values: SharedValues) -> _Function:
        own = self._function(backward)
        self.handed = dict(zip(values.handed, own.printer.run(values.handed), strict=True))
        self.systems = own.printer.systems
        self.arguments = own.args
        return own

    def _print_backward(self, forward: ChunkPlan, backward: ChunkPlan) -> _Function:
        more = {("carry_reverse", n): f"d{name}" for (_, n), name in self.carried.items()}
        more |= {("cotangent", output): f"d_{output}" for output, _ in forward.outputs}
        own = self._function(backward, more)
        count = len(self.carried)
        before = {name: node for name, direction, _, node in backward.carries if direction == "reverse"}
        gradients = dict(backward.outputs)
        rows = {node for name, node in gradients.items() if name.endswith("]")}
        texts = own.printer.run([*(before[n] for _, n in self.carried), *gradients.values()], short=rows)
        parts = dict(zip(gradients, texts[count:], strict=True))
        self.d_states = [
            f"torch.zeros_like({name})" if text.scalar else text.code
            for name, text in zip(own.args[count:], texts[:count], strict=False)
        ]
        self.gradients = [own.gradient(decl, parts) for decl in self.spec.inputs]
        return own

    def _with_call(
        self, shared: _Function, callers: Sequence[_Function], bodies: Sequence[tuple[str, ...]]
    ) -> list[tuple[str, ...]]:
        """The bodies of forward and backward after a call of the shared function, which is written here.

        What only the forward takes stands first in what the shared function returns, what only the backward
        takes last.
        """
        made = dict.fromkeys(t.code for t in (*self.handed.values(), *self.systems.values()) if not t.scalar)
        results = (tuple_text(self.d_states), tuple_text(self.gradients))
        ahead, back = (set(_WORD.findall("\n".join((*body, *results)))) for body in bodies)
        names = [n for n in made if n not in shared.args]
        first = [n for n in names if n in ahead and n not in back]
        both = [n for n in names if n in ahead and n in back]
        last = [n for n in names if n in back and n not in ahead]
        body = shared.body()
        words = set(_WORD.findall("\n".join(body)))
        asks = tuple(a for a in shared.args if a in words)
        doc = "What the forward and the backward of a chunk both need."
        self.shared = PrintedFunction(asks, body, name_list([*first, *both, *last], indent=" " * 11), doc)
        made_bodies = []
        for own, body, taken in zip(
            callers,
            bodies,
            ([*first, *both, *["*_"][: len(last)]], [*["*_"][: len(first)], *both, *last]),
            strict=True,
        ):
            known = self._known(own)
            call = name_list(taken, f" = chunk_values({', '.join(known[a] for a in asks)})")
            made_bodies.append((*call.splitlines(), *body))
        return made_bodies

    def _function(
        self,
        plan: ChunkPlan,
        more: Mapping[tuple[str, str], str] = MappingProxyType({}),
        nodes: Mapping[int, int] | None = None,
    ) -> _Function:
        """A function whose first arguments are states and ``more``, given what the shared one hands on.

        ``nodes``: the numbers of handed values in ``plan``, where they are others.
        """
        reserved = [t.code for t in (*self.handed.values(), *self.systems.values())]
        own = _Function(self.spec, plan, self.consts, self.numbers, {**self.carried, **more}, reserved)
        known = self._known(own)
        given = {}
        for i, text in self.handed.items():
            at = i if nodes is None else nodes.get(i)
            if at is not None:
                given[at] = Text(known.get(text.code, text.code), ATOM, text.axes, text.number, text.scalar)
        own.printer.give(given, self.systems)
        return own

    def _known(self, own: _Function) -> dict[str, str]:
        """The names in a function of the arguments of the shared one."""
        count, more = len(self.carried), len(own.args) - len(self.arguments)
        return dict(zip(self.arguments, (*own.args[:count], *own.args[count + more :]), strict=False))


class _Function:
    """Argument names and the printer of one chunk function."""

    def __init__(
        self,
        spec: RecurrenceSpec,
        plan: ChunkPlan,
        consts: tuple[str, ...],
        numbers: Mapping[str, float],
        leading: Mapping[tuple[str, str], str],
        reserved: Iterable[str],
    ) -> None:
        self.names = names = Names(reserved=("K", "V"))
        leaves = {key: names.unique(name) for key, name in leading.items()}
        self.first, *_ = first = list(leaves.values())
        self.inputs = []
        for decl in spec.inputs:
            leaves["input" if decl.timed else "param", decl.name] = name = names.unique(decl.name)
            self.inputs.append(name)
        last = []
        for const in consts:
            leaves["const", const] = name = names.unique(const)
            last.append(name)
        self.args = [*first, *self.inputs, *last]
        names.reserve(reserved)
        counts = {decl.name: row_count(decl, numbers) for decl in spec.inputs}
        self.printer = ChunkPrinter(plan, leaves, names, self.first, counts)

    def gradient(self, decl: Input, parts: Mapping[str, Text]) -> str:
        """One gradient of the input's shape: rows stacked, zero where unused; "None" where there is none."""
        whole = parts.get(f"d_{decl.name}")
        if whole is not None:
            return whole.code
        rows = [parts.get(f"d_{decl.name}[{j}]") for j in range(self.printer.row_counts[decl.name])]
        used = [row.code for row in rows if row is not None]
        if not used:
            return "None"
        zero = f"torch.zeros_like({used[0]})"
        stacked = ", ".join(zero if row is None else row.code for row in rows)
        name = self.names.unique(f"d_{decl.name}")
        self.printer.lines.append(f"{name} = torch.stack([{stacked}], {-len(decl.dims)})")
        return name

    def body(self) -> tuple[str, ...]:
        """The statements, after the sizes that they mention."""
        sizes = [f"K, V = {self.first}.shape[-2:]"] if self.printer.sizes else []
        return (*sizes, *self.printer.lines)


def default_chunk(canonical: CanonicalRecurrence) -> int:
    """Tokens per chunk where the caller does not say."""
    return CHANNEL_CHUNK if canonical.recurrences[0].decay.kind == "channel" else CHUNK
