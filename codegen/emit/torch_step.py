"""The plans of one token as a plain PyTorch module: a loop over tokens, and one in reverse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.signature import (
    axis_source,
    given_outputs,
    output_dims,
    row_count,
    run_time_consts,
    tuple_text,
)
from linalg_dsl.codegen.emit.torch_layout import PrintedFunction, TorchText
from linalg_dsl.codegen.emit.torch_step_printer import TokenPrinter
from linalg_dsl.codegen.emit.torch_text import ATOM, Text
from linalg_dsl.codegen.emit.trace import Trace
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.planner.step_values import state_axes

CHUNK = 32
"""Tokens between two saved states where the caller does not say."""


def emit_torch_step(
    form: StepForm,
    forward: ChunkPlan,
    backward: ChunkPlan,
    chunk_size: int | None = None,
    wide: bool = False,
    trace: Trace | None = None,
) -> str:
    """The text of a module with ``forward`` and ``backward`` over whole sequences.

    ``wide``: the output has the type of the states, not that of an input. ``trace`` takes up
    what the names in the functions stand for. The text depends on nothing but the arguments and this
    package's version.
    """
    spec = form.spec
    consts = run_time_consts(spec, forward, backward)
    numbers = dict(form.consts)
    fwd = StepFunction(spec, forward, consts, numbers, backward=False)
    texts = fwd.run([*(i for _, i in forward.outputs), *(c[3] for c in forward.carries)])
    outputs, after = texts[: len(forward.outputs)], texts[len(forward.outputs) :]
    states = [s.name for s in spec.states]
    next_states = [fwd.turned_state(s, x) for s, x in zip(states, after, strict=True)]
    bwd = StepFunction(spec, backward, consts, numbers, backward=True)
    reverse = {c[0]: c[3] for c in backward.carries if c[1] == "reverse"}
    gradients = dict(backward.outputs)
    texts = bwd.run([*(reverse[s] for s in states), *gradients.values()])
    d_states = [bwd.turned_state(s, x) for s, x in zip(states, texts, strict=False)]
    parts = dict(zip(gradients, texts[len(states) :], strict=True))
    grads = [bwd.gradient(decl, parts) for decl in spec.inputs]
    if trace is not None:
        trace |= {"forward_token": fwd.printer.values(), "backward_token": bwd.printer.values()}
    dims = output_dims(spec)
    return TorchText(
        spec,
        unit="token",
        way="one token after the other",
        note="Inside a step a token value is [B, H, D], a scalar [B, H], a matrix [B, H, K, V] (small axes "
        "first).",
        chunk=chunk_size or CHUNK,
        consts=consts,
        states=tuple(states),
        numbers=numbers,
        wide=wide,
        inputs=tuple(fwd.inputs),
        gradients=[g != "None" for g in grads],
        used=fwd.printer.used | bwd.printer.used,
        forward=PrintedFunction(
            tuple(fwd.args),
            fwd.body(),
            ", ".join([given_outputs(turned_text(o, dims) for o in outputs), *next_states]),
            "The output of one token, and the states after it.",
        ),
        backward=PrintedFunction(
            tuple(bwd.args),
            bwd.body(),
            f"{tuple_text(d_states)}, {tuple_text(grads)}",
            "The gradients of the states before one token, and those of its inputs in their order.",
        ),
    ).text()


class StepFunction:
    """Argument names and the printer of one token's function."""

    def __init__(
        self,
        spec: RecurrenceSpec,
        plan: ChunkPlan,
        consts: tuple[str, ...],
        numbers: Mapping[str, float],
        *,
        backward: bool,
    ) -> None:
        self.spec = spec
        self.numbers = numbers
        self.names = names = Names(reserved=("K", "V"))
        self.leaves: dict[tuple[str, str], str] = {}
        first = [(("carry", s.name), s.name) for s in spec.states]
        if backward:
            first += [(("carry_reverse", s.name), f"d{s.name}") for s in spec.states]
            first += [(("cotangent", e.target), f"d_{e.target}") for e in spec.outputs]
        for key, wanted in first:
            self.leaves[key] = names.unique(wanted)
        leading = list(self.leaves.values())
        self.inputs = [names.unique(decl.name) for decl in spec.inputs]
        for decl, name in zip(spec.inputs, self.inputs, strict=True):
            self.leaves["input" if decl.timed else "param", decl.name] = name
        for const in consts:
            self.leaves["const", const] = names.unique(const)
        last = [self.leaves["const", c] for c in consts]
        self.args = [*leading, *self.inputs, *last]
        rows = {str(d): int(d if isinstance(d, int) else numbers.get(d, 0)) for d in _dims(spec)}
        self.printer = TokenPrinter(plan, self.leaves, names, like=leading[0], rows=rows)
        self.before: list[str] = []

    def run(self, roots: Sequence[int]) -> list[Text]:
        """The texts of the roots, after views of states that lie the other way round."""
        for state in self.spec.states:
            if turned(state.dims):
                for kind in ("carry", "carry_reverse"):
                    name = self.leaves.get((kind, state.name))
                    if name is not None:
                        self.before.append(f"{name} = {name}.mT")
        return self.printer.run(roots)

    def size(self, dim: Dim) -> str:
        if isinstance(dim, int):
            return str(dim)
        return dim if dim in ("K", "V") else str(int(self.numbers[dim]))

    def turned_state(self, state: str, value: Text) -> str:
        """The text of a state or its gradient as it lies in memory."""
        dims = next(s.dims for s in self.spec.states if s.name == state)
        like = self.leaves["carry", state]
        # the name stands for a view with the axes of the plan by then
        return turned_text(Text(f"torch.full_like({like}, {value.code})") if value.scalar else value, dims)

    def gradient(self, decl: Input, parts: Mapping[str, Text]) -> str:
        """One gradient of the input's shape: rows stacked, zero where unused; "None" where there is none."""
        whole = parts.get(f"d_{decl.name}")
        rows = [parts.get(f"d_{decl.name}[{j}]") for j in range(row_count(decl, self.numbers))]
        used = [row.code for row in rows if row is not None]
        if not used:
            return "None" if whole is None else whole.code
        zero = f"torch.zeros_like({used[0]})"
        stacked = ", ".join(zero if row is None else row.code for row in rows)
        name = self.names.unique(f"d_{decl.name}")
        sum_of_both = "" if whole is None else f" + {whole.code}"
        self.printer.lines.append(f"{name} = torch.stack([{stacked}], {-len(decl.dims)}){sum_of_both}")
        return name

    def body(self) -> tuple[str, ...]:
        """The statements, after the sizes that they mention."""
        lines = list(self.before)
        for axis in sorted(self.printer.sizes):
            name, at = self._source(axis)
            lines.append(f"{axis} = {name}.shape[{at}]")
        return (*lines, *self.printer.lines)

    def _source(self, axis: str) -> tuple[str, int]:
        i, at = axis_source(self.spec, axis)
        return self.inputs[i], at


def turned(dims: Sequence[Dim]) -> bool:
    """Whether a value with these dimensions lies in memory with its axes the other way round."""
    return len(dims) == 2 and dims[0] != dims[1] and tuple(map(str, dims)) != state_axes(dims)


def turned_text(value: Text, dims: Sequence[Dim]) -> str:
    """The value as it lies in memory; a number fills whatever it is written to."""
    return f"{value.at(ATOM)}.mT" if turned(dims) and not value.scalar else value.code


def _dims(spec: RecurrenceSpec) -> set[Dim]:
    given = {d for i in spec.inputs for d in i.dims} | {d for s in spec.states for d in s.dims}
    return given - {"K", "V"}
