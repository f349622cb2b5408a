"""What the generated PyTorch modules of chunks and of single tokens have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.codegen.emit.names import ascii_text
from linalg_dsl.codegen.emit.render import render
from linalg_dsl.codegen.emit.signature import (
    axis_source,
    equations,
    literal,
    output_dims,
    output_like,
    sized,
    tuple_text,
)
from linalg_dsl.codegen.emit.torch_helpers import WIDTH, library_import
from linalg_dsl.language.spec import RecurrenceSpec


@dataclass(frozen=True, slots=True)
class PrintedFunction:
    """One generated function: the names of its arguments, its statements, and what it returns."""

    args: tuple[str, ...]
    lines: tuple[str, ...]
    result: str
    doc: str


@dataclass(frozen=True, slots=True)
class TorchModule:
    """What templates/torch_module.py.jinja asks for."""

    title: str
    way: str
    version: str
    equations: tuple[str, ...]
    note: str
    library: str
    name_literal: str
    input_names: str
    const_names: str
    states: str
    layout: tuple[str, ...]
    unit: str
    inputs: tuple[str, ...]
    forward_args: tuple[str, ...]
    forward_lines: tuple[str, ...]
    forward_result: str
    forward_doc: str
    backward_args: tuple[str, ...]
    backward_lines: tuple[str, ...]
    backward_result: str
    backward_doc: str
    shared: PrintedFunction | None


@dataclass(frozen=True, slots=True)
class TorchText:
    """A module over whole sequences: ``unit`` is what its two functions are of, "chunk" or "token".

    ``inputs``: their names in the functions; ``gradients``: which have one; ``numbers``: fixed consts;
    ``used``: the functions of the library that the statements call; ``shared``: the function that forward and
    backward call, if there is one; ``shortest``: of ``planner.precision``, empty where the caller says how
    long chunks are.
    """

    spec: RecurrenceSpec
    unit: str
    way: str
    note: str
    chunk: int
    consts: tuple[str, ...]
    states: tuple[str, ...]
    numbers: dict[str, float]
    wide: bool
    inputs: tuple[str, ...]
    gradients: Sequence[bool]
    used: Collection[str]
    forward: PrintedFunction
    backward: PrintedFunction
    shared: PrintedFunction | None = None
    shortest: tuple[str, tuple[int, ...]] = ("K", ())

    def text(self) -> str:
        spec, forward, backward = self.spec, self.forward, self.backward
        return render(
            "torch_module.py.jinja",
            TorchModule(
                title=ascii_text(spec.name),
                way=self.way,
                version=version("linalg_dsl"),
                equations=equations(spec),
                note=self.note,
                library=library_import([*self.used, f"run_{self.unit}s", f"reverse_{self.unit}s"]),
                name_literal=literal([spec.name])[1:-2],
                input_names=literal(i.name for i in spec.inputs),
                const_names=literal(self.consts),
                states=literal(self.states),
                layout=tuple(self._layout()),
                unit=self.unit,
                inputs=self.inputs,
                forward_args=forward.args,
                forward_lines=forward.lines,
                forward_result=forward.result,
                forward_doc=forward.doc,
                backward_args=backward.args,
                backward_lines=backward.lines,
                backward_result=backward.result,
                backward_doc=backward.doc,
                shared=self.shared,
            ),
        )

    def _layout(self) -> list[str]:
        """The entries, as many to a line as fit."""
        spec = self.spec

        def axes(dims: Sequence[Dim]) -> str:
            return tuple_text(f'"{d}"' if isinstance(d, str) else str(d) for d in sized(dims, self.numbers))

        where = {a: axis_source(spec, a) for a in ("K", "V") if any(a in i.dims for i in spec.inputs)}
        found = {
            "timed": _flags([i.timed for i in spec.inputs]),
            "states": tuple_text(axes(s.dims) for s in spec.states),
            "starts": tuple_text(_float(s.start) for s in spec.states),
            "output": axes(output_dims(spec)),
            "outputs": str(len(spec.outputs)),
            "sizes": "{" + ", ".join(f'"{a}": ({i}, {at})' for a, (i, at) in where.items()) + "}",
            "like": str(output_like(spec)),
            "wide": repr(self.wide),
            "chunk": str(self.chunk),
            "shortest": _text_of_shortest(*self.shortest),
            "gradients": _flags(self.gradients),
            "resets": _flags([i.kind == "log_gate" for i in spec.inputs]),
        }
        if len(spec.outputs) == 1:
            del found["outputs"]
        if self.unit == "chunk":
            del found["starts"]  # a state is handed in where it does not start at 0
        else:
            del found["shortest"]  # nothing is taken from the state before a chunk
            del found["resets"]  # no product of matrices mixes tokens
        lines = [""]
        for entry in (f'"{key}": {value},' for key, value in found.items()):
            if len(lines[-1]) + len(entry) >= WIDTH:
                lines.append("")
            lines[-1] = f"{lines[-1]} {entry}".lstrip()
        return lines


def _flags(flags: Sequence[bool]) -> str:
    """A tuple of truth values; ``(True,) * 8`` where all are one."""
    if len(flags) > 2 and len(set(flags)) == 1:
        return f"({flags[0]},) * {len(flags)}"
    return tuple_text(map(repr, flags))


def _float(x: float) -> str:
    return f'float("{x}")' if x in (float("inf"), float("-inf")) else repr(x)


def _text_of_shortest(axis: str, lengths: tuple[int, ...]) -> str:
    counted = tuple(range(1, len(lengths) + 1))
    text = f"tuple(range(1, {len(lengths) + 1}))" if lengths and lengths == counted else repr(lengths)
    return f'("{axis}", {text})'
