"""The plan of one token as a plain PyTorch module that decodes: a few tokens from states, in place."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from linalg_dsl.codegen.emit.names import ascii_text
from linalg_dsl.codegen.emit.render import render
from linalg_dsl.codegen.emit.signature import (
    axis_source,
    equations,
    literal,
    output_dims,
    output_like,
    run_time_consts,
    sized,
    tuple_text,
)
from linalg_dsl.codegen.emit.torch_helpers import helper_sources
from linalg_dsl.codegen.emit.torch_step import StepFunction, turned_text
from linalg_dsl.planner.decode_form import DecodeForm
from linalg_dsl.planner.step_plan import contracted


@dataclass(frozen=True, slots=True)
class TorchDecodeModule:
    """What templates/torch_decode_module.py.jinja asks for."""

    title: str
    version: str
    equations: tuple[str, ...]
    name_literal: str
    input_names: str
    const_names: str
    timed: str
    states: str
    token_args: tuple[str, ...]
    token_lines: tuple[str, ...]
    token_result: str
    inputs: tuple[str, ...]
    state_layouts: tuple[str, ...]
    output_shape: str
    output_like: int
    first_timed: int
    size_names: str
    size_sources: tuple[str, ...]
    helpers: tuple[str, ...]


def emit_torch_decode(decode: DecodeForm) -> str:
    """The text of a module with ``step``; it depends on the form and this package's version alone."""
    form = decode.form
    plan, spec = contracted(form.plan), form.spec
    numbers = dict(form.consts)
    consts = run_time_consts(spec, plan)
    token = StepFunction(spec, plan, consts, numbers, backward=False)
    ((_, o_node),) = plan.outputs
    o, *after = token.run([o_node, *(c[3] for c in plan.carries)])
    names = [s.name for s in spec.states]
    dims = output_dims(spec)
    axes = [a for a in ("K", "V") if any(a in i.dims for i in spec.inputs)]
    return render(
        "torch_decode_module.py.jinja",
        TorchDecodeModule(
            title=ascii_text(spec.name),
            version=version("linalg_dsl"),
            equations=equations(decode.spec),
            name_literal=f'"{ascii(spec.name)[1:-1]}"',
            input_names=literal(i.name for i in spec.inputs),
            const_names=literal(consts),
            timed=tuple_text(repr(i.timed) for i in spec.inputs),
            states=literal(names),
            token_args=tuple(token.args),
            token_lines=token.body(),
            token_result=", ".join(
                [
                    turned_text(o, dims),
                    *(token.turned_state(s, x) for s, x in zip(names, after, strict=True)),
                ]
            ),
            inputs=tuple(token.inputs),
            state_layouts=tuple(
                f"{token.leaves['carry', s.name]} [{', '.join(['P', 'H', *map(str, s.dims)])}]"
                for s in spec.states
            ),
            output_shape=tuple_text(
                ["batch", "length", "heads", *(token.size(d) for d in sized(dims, numbers))]
            ),
            output_like=output_like(decode.spec),
            first_timed=next(i for i, decl in enumerate(spec.inputs) if decl.timed),
            size_names=", ".join(["batch", "length", "heads", *axes]),
            size_sources=tuple(f"tensors[{i}].shape[{at}]" for i, at in (axis_source(spec, a) for a in axes)),
            helpers=helper_sources(token.printer.used),
        ),
    )
