"""The plan of one token as a module that decodes: one Triton kernel, and the function that launches it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from linalg_dsl.codegen.emit.names import ascii_text
from linalg_dsl.codegen.emit.render import functions_of, render
from linalg_dsl.codegen.emit.signature import (
    equations,
    head_counts,
    literal,
    output_dims,
    output_like,
)
from linalg_dsl.codegen.emit.triton_decode_kernel import decode_kernel
from linalg_dsl.codegen.emit.triton_module import library_functions
from linalg_dsl.codegen.emit.triton_step import StepEmitter
from linalg_dsl.codegen.schedule import step_table
from linalg_dsl.codegen.schedule.step_split import decode_schedule
from linalg_dsl.planner.decode_form import DecodeForm
from linalg_dsl.planner.step_plan import contracted


@dataclass(frozen=True, slots=True)
class TritonDecodeModule:
    """What templates/decode_module.py.jinja asks for."""

    title: str
    version: str
    equations: tuple[str, ...]
    name_literal: str
    input_names: str
    inputs_ascii: str
    const_names: str
    timed: str
    dims: str
    state_dims: str
    states: str
    state_layouts: tuple[str, ...]
    output_dims: str
    library: tuple[str, ...]
    kernel: str
    kernel_name: str
    inputs: str
    consts: str
    output: str
    output_type: str
    partial_output: bool
    pointers: str
    scalars: str
    ratios: str
    flags: str
    first_timed: int
    head_counts: str
    key: str
    value: str
    own_dims: str
    whole_dims: str
    cut: str
    square: str
    shared: bool
    least: int
    invariant: bool
    table: tuple[str, ...]


def emit_triton_decode(decode: DecodeForm, invariant: bool = False) -> str:
    """The text of a module with ``step``.

    ``invariant``: nothing about a call but K, V, dtype and device decides how it is computed. The text
    depends on the arguments and this package's version alone.
    """
    return _Emitter(decode, invariant).text()


class _Emitter(StepEmitter):
    def __init__(self, decode: DecodeForm, invariant: bool) -> None:
        plan = decode_schedule(contracted(decode.form.plan))
        kind = f"tensors[{output_like(decode.spec)}].dtype"
        super().__init__(decode.form, plan, 1, invariant, kind)
        self.decode = decode

    def text(self) -> str:
        spec, plan = self.spec, self.plan
        kernel = decode_kernel(spec, plan, self.launcher)
        out = self.dims(output_dims(spec))
        held = [s.dims for s in spec.states] + [
            i.dims for i in spec.inputs if not i.timed and len(i.dims) == 2 and self.counts[i.name] == 0
        ]
        split = [dims for dims in held if plan.split in dims]
        ratios = [i for i, a in enumerate(self.inputs.values()) if f"R_{a}" in kernel.constants]
        return render(
            "decode_module.py.jinja",
            TritonDecodeModule(
                title=ascii_text(spec.name),
                version=version("linalg_dsl"),
                equations=equations(self.decode.spec),
                name_literal=f'"{ascii(spec.name)[1:-1]}"',
                input_names=literal(i.name for i in spec.inputs),
                inputs_ascii=literal(self.inputs.values()),
                const_names=literal(self.consts),
                timed=repr(tuple(i.timed for i in spec.inputs)),
                dims=repr(tuple(self.dims(i.dims) for i in spec.inputs)),
                states=literal(s.name for s in spec.states),
                state_dims=repr(tuple(self.dims(s.dims) for s in spec.states)),
                state_layouts=tuple(
                    f"{ascii_text(s.name)} [{', '.join(['P', 'H', *map(str, s.dims)])}]" for s in spec.states
                ),
                output_dims=repr(out),
                library=library_functions(kernel.library),
                kernel=kernel.text.rstrip(),
                kernel_name=kernel.name,
                inputs=", ".join(self.inputs.values()),
                consts=", ".join(self.const_args.values()),
                output=next(iter(self.outputs.values())),
                output_type=self.output_type,
                partial_output=plan.partial_output,
                pointers=", ".join(kernel.tensors),
                scalars=", ".join(kernel.scalars),
                ratios=", ".join(map(str, ratios)),
                flags=", ".join(f"{n}={v}" for n, v in kernel.flags),
                first_timed=next(i for i, decl in enumerate(spec.inputs) if decl.timed),
                head_counts=head_counts(spec),
                key=self.size("K"),
                value=self.size("V"),
                own_dims=repr(tuple(self.dims([d for d in dims if d != plan.split]) for dims in split)),
                whole_dims=repr(tuple(self.dims(dims) for dims in held if dims not in split)),
                cut={"K": "self.key", "V": "self.value", None: "0"}[plan.split],
                square=self.square(),
                shared=any(plan.split is not None and plan.split not in s.dims for s in spec.states),
                least=16 if self.factors() else 1,
                invariant=self.invariant,
                table=tuple(functions_of(Path(step_table.__file__).read_text(encoding="utf-8"))[f]
                            for f in ("padded", "choose_decode")),
            ),
        )  # fmt: skip
