"""The plans of one token as one Python module: two Triton kernels, and the functions that launch them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.codegen.emit.names import Names, ascii_text
from linalg_dsl.codegen.emit.render import functions_of, render
from linalg_dsl.codegen.emit.signature import (
    axis_source,
    equations,
    given_outputs,
    head_counts,
    literal,
    output_dims,
    output_like,
    row_count,
    run_time_consts,
    sized,
    tuple_text,
)
from linalg_dsl.codegen.emit.trace import Trace
from linalg_dsl.codegen.emit.triton_module import library_functions
from linalg_dsl.codegen.emit.triton_step_kernel import StepText, backward_kernel, forward_kernel
from linalg_dsl.codegen.emit.triton_step_memory import StepNames
from linalg_dsl.codegen.launch_sizes import Launches, sizes_of
from linalg_dsl.codegen.schedule import step_table
from linalg_dsl.codegen.schedule.step_split import STEP_KERNELS, StepSchedule, needs_states, schedule
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.planner.step_values import dimension

CHUNK = 32
VECTOR_CHUNK = 8
"""Tokens between two saved states where the caller does not say; the second where all states are vectors or
scalars: then those of a whole chunk fit into registers, and nothing is kept in memory between."""


@dataclass(frozen=True, slots=True)
class TritonStepModule:
    """What templates/step_module.py.jinja asks for."""

    title: str
    version: str
    equations: tuple[str, ...]
    schedule: str
    name_literal: str
    input_names: str
    inputs_ascii: str
    const_names: str
    timed: str
    dims: str
    states: str
    state_dims: str
    state_count: int
    state_layouts: tuple[str, ...]
    whole_states: str
    output_dims: str
    library: tuple[str, ...]
    kernels: tuple[str, ...]
    inputs: str
    consts: str
    outputs: tuple[str, ...]
    output: str
    dry_output: str
    output_type: str
    partial_output: bool
    products: bool
    saves: bool
    forward_launch: str
    forward_kernel: str
    backward_kernel: str
    sizes: str
    cotangents: tuple[str, ...]
    backward_buffers: tuple[str, ...]
    backward_launch: str
    gradients: tuple[str, ...]
    dry_gradients: str
    partial_rows: bool
    first_timed: int
    head_counts: str
    key: str
    value: str
    chunk_size: int
    own_dims: str
    cut: str
    square: str
    blocks: str
    split: str
    least: int
    invariant: bool
    table: tuple[str, ...]


def emit_triton_step(
    form: StepForm,
    forward: ChunkPlan,
    backward: ChunkPlan,
    chunk_size: int | None = None,
    invariant: bool = False,
    wide: bool = False,
    handed: tuple[str, ...] = (),
    launch: Launches = (),
    trace: Trace | None = None,
) -> str:
    """The text of a module with ``forward`` and ``backward`` over whole sequences.

    ``chunk_size``: tokens between two saved states. ``invariant``: nothing about a call but K, V, dtype and
    device decides how it is computed. ``wide``: the output is float32. ``handed``: inputs whose types do
    not decide that of the output. ``launch``: sizes in place of the table's. ``trace`` takes up what the
    names in the kernels stand for. The text depends on nothing but the arguments and this package's version.
    """
    default = VECTOR_CHUNK if all(len(s.dims) < 2 for s in form.spec.states) else CHUNK
    like = output_like(form.spec, handed)
    kind = "torch.float32" if wide else f"tensors[{like}].dtype"
    emitter = StepEmitter(form, schedule(forward, backward), chunk_size or default, invariant, kind, launch)
    text = emitter.run()
    if trace is not None:
        trace |= emitter.values
    return text


class StepEmitter:
    """What the modules of step kernels have in common: names, sizes, launches."""

    def __init__(
        self,
        form: StepForm,
        plan: StepSchedule,
        chunk: int,
        invariant: bool,
        output_type: str,
        launch: Launches = (),
    ) -> None:
        self.spec: RecurrenceSpec = form.spec
        self.plan = plan
        self.values: Trace = {}
        self.chunk = chunk
        self.invariant = invariant
        self.output_type = output_type
        self.asked = launch
        self.numbers = dict(form.consts)
        self.consts = run_time_consts(self.spec, plan.forward, plan.backward)
        names = Names(
            reserved=(
                "call", "tensors", "consts", "cu_seqlens", "dry", "save", "residuals", "initial_states",
                "output_final_state", "firsts", "lasts", "marks", "kept", "d_o", "d_firsts", "d_lasts",
                "d_finals", "d_initials",
            )
        )  # fmt: skip
        spec = self.spec
        self.inputs = {i.name: names.unique(i.name) for i in spec.inputs}
        self.const_args = {c: names.unique(c) for c in self.consts}
        self.outputs = {e.target: names.unique(e.target) for e in spec.outputs}
        self.cotangents = {e.target: names.unique(f"d_{e.target}") for e in spec.outputs}
        self.gradients = {i: names.unique(f"d_{a}") for i, a in self.inputs.items()}
        self.order = {i.name: n for n, i in enumerate(spec.inputs)}
        self.counts = {i.name: row_count(i, self.numbers) for i in spec.inputs}
        self.product_factors = {n: names.unique(f"factor_{i}") for i, n in enumerate(plan.factors, 1)}
        dims = {d for i in spec.inputs for d in i.dims} | {d for s in spec.states for d in s.dims}
        rows = {str(d): self._number(d) for d in dims - {"K", "V"}}
        self.launcher = StepNames(
            names.unique(spec.name), self.inputs, self.const_args, self.outputs, self.cotangents,
            self.product_factors,
            self.gradients, rows, self.counts,
        )  # fmt: skip

    def run(self) -> str:
        spec, plan = self.spec, self.plan
        first = forward_kernel(spec, plan, self.launcher)
        second = backward_kernel(spec, plan, self.launcher)
        self.values = {text.name: text.values for text in (first, second)}
        saves = needs_states(plan.backward)
        whole = tuple(plan.split is not None and plan.split not in s.dims for s in spec.states)
        out = output_dims(spec)
        held = [s.dims for s in spec.states] + [
            i.dims for i in spec.inputs if not i.timed and len(i.dims) == 2 and self.counts[i.name] == 0
        ]
        cut = {"K": "self.key", "V": "self.value", None: "0"}[plan.split]
        return render(
            "step_module.py.jinja",
            TritonStepModule(
                title=ascii_text(spec.name),
                version=version("linalg_dsl"),
                equations=equations(spec),
                schedule=str(plan).removeprefix("step: ")[0].upper() + str(plan).removeprefix("step: ")[1:],
                name_literal=f'"{ascii(spec.name)[1:-1]}"',
                input_names=literal(i.name for i in spec.inputs),
                inputs_ascii=literal(self.inputs.values()),
                const_names=literal(self.consts),
                timed=repr(tuple(i.timed for i in spec.inputs)),
                dims=repr(tuple(self.dims(i.dims) for i in spec.inputs)),
                states=literal(s.name for s in spec.states),
                state_dims=repr(tuple(self.dims(s.dims) for s in spec.states)),
                state_count=len(spec.states),
                state_layouts=tuple(
                    f"{ascii_text(s.name)} [{', '.join(['N', 'H', *map(str, s.dims)])}]" for s in spec.states
                ),
                whole_states=repr(whole),
                output_dims=repr(self.dims(out)),
                library=library_functions(first.library | second.library),
                kernels=(first.text.rstrip(), second.text.rstrip()),
                inputs=", ".join(self.inputs.values()),
                consts=", ".join(self.const_args.values()),
                outputs=tuple(self.outputs.values()),
                output=given_outputs(self.outputs.values()),
                dry_output=given_outputs(
                    [f"call.result(OUTPUT_DIMS, {self.output_type})"] * len(self.outputs)
                ),
                output_type=self.output_type,
                partial_output=plan.partial_output,
                products=bool(plan.products),
                saves=saves,
                forward_launch=self._launch(first),
                forward_kernel=first.name,
                backward_kernel=second.name,
                sizes=self._sizes(first, second),
                cotangents=tuple(self.cotangents.values()),
                backward_buffers=(*self._buffers(), *self._kept(second)),
                backward_launch=self._launch(second),
                gradients=tuple(self._gradient(i) for i in self.inputs),
                dry_gradients=", ".join(
                    f"torch.empty_like({a})" if self._leaves(i) else "None" for i, a in self.inputs.items()
                ),
                partial_rows=self._has_unused_rows(),
                first_timed=next(i for i, decl in enumerate(spec.inputs) if decl.timed),
                head_counts=head_counts(spec),
                key=self.size("K"),
                value=self.size("V"),
                chunk_size=self.chunk,
                own_dims=repr(tuple(self.dims([d for d in dims if d != plan.split]) for dims in held)),
                cut=cut,
                square=self.square(),
                blocks=f"({cut} + self.block - 1) // self.block" if plan.split else "1",
                split=repr(plan.split),
                least=16 if self.factors() else 1,
                invariant=self.invariant,
                table=tuple(functions_of(Path(step_table.__file__).read_text(encoding="utf-8")).values()),
            ),
        )

    # -- shapes ---------------------------------------------------------------------------------------
    def _number(self, dim: Dim) -> int:
        return dim if isinstance(dim, int) else int(self.numbers[dim])

    def dims(self, dims: Sequence[Dim]) -> tuple[str | int, ...]:
        return sized(dims, self.numbers)

    def size(self, axis: str) -> str:
        try:
            i, at = axis_source(self.spec, axis)
        except ArgumentError:
            return "1"  # no tensor has this axis
        return f"tensors[{i}].shape[{at}]"

    def factors(self) -> list[Axes]:
        """The axes of the matrices that are multiplied by matrices."""
        return [
            p.nodes[x].axes
            for p in (self.plan.forward, self.plan.backward)
            for n in p.nodes
            if n.op == "contract" and len({a for x in n.args for a in p.nodes[x].axes}) == 3
            for x in n.args
        ]

    def square(self) -> str:
        """The elements of the largest square one among them."""
        sizes = {"K": "self.key * self.key", "V": "self.value * self.value"}
        found = [sizes[a] for a in sizes if any(set(map(dimension, f)) == {a} for f in self.factors())]
        return f"max({', '.join(found)})" if len(found) > 1 else next(iter(found), "0")

    # -- gradients ------------------------------------------------------------------------------------
    def _leaves(self, name: str) -> list[str]:
        """The names of the gradients of one tensor: whole, or of rows."""
        found = [r for r, _ in self.plan.backward.outputs]
        return [r for r in found if r == f"d_{name}" or r.startswith(f"d_{name}[")]

    def _is_partial(self, result: str) -> bool:
        return result in self.plan.partial_gradients

    def _written(self, name: str) -> list[tuple[str, bool]]:
        """(name of the buffer, whether it has partial sums) of each buffer of a gradient."""
        leaves = [r for r in self._leaves(name) if r not in self.plan.products]
        own = self.gradients[name]
        buffers = [(own, self._is_partial(r)) for r in leaves if "[" not in r]
        rows = [self._is_partial(r) for r in leaves if "[" in r]
        return buffers + ([(f"{own}_rows", any(rows))] if rows else [])

    def _buffers(self) -> list[str]:
        lines = []
        for name in self.inputs:
            dims = repr(self.dims(self.spec.input(name).dims))
            lines += [
                f"{buffer} = call.gradient({self.order[name]}, {partial}, {dims})"
                for buffer, partial in self._written(name)
            ]
        for node, buffer in self.product_factors.items():
            (axis,) = self.plan.backward.nodes[node].axes
            lines.append(f"{buffer} = call.factor({self.dims([dimension(axis)])!r})")
        return lines

    def _gradient(self, name: str) -> str:
        i = self.order[name]
        if pair := self.plan.products.get(f"d_{name}"):
            factors = ", ".join(self.product_factors[n] for n in pair)
            return f"call.finish({i}, False, call.products({factors}))"
        written = self._written(name)
        if not written:
            return "None"
        if len({partial for _, partial in written}) == 1:
            return f"call.finish({i}, {written[0][1]}, {', '.join(b for b, _ in written)})"
        return " + ".join(f"call.finish({i}, {partial}, {b})" for b, partial in written)

    def _has_unused_rows(self) -> bool:
        """Whether a gradient [n, D] has rows that the kernel does not write."""
        for decl in self.spec.inputs:
            rows = [r for r in self._leaves(decl.name) if "[" in r]
            if rows and len(rows) < self.counts[decl.name]:
                return True
        return False

    def _kept(self, text: StepText) -> list[str]:
        used = [t for t in text.tensors if t.startswith("kept[")]
        if not used:
            return []
        items = (
            f"call.kept({self.dims(s.dims)!r})" if f"kept[{i}]" in used else "None"
            for i, s in enumerate(self.spec.states)
        )
        return [f"kept = [{', '.join(items)}]"]

    # -- launches -------------------------------------------------------------------------------------
    def _sizes(self, *texts: StepText) -> str:
        """What is asked of the kernels, by their names in the module."""
        asked = [
            (text.name, sizes_of(self.asked, self.spec.name, kernel, "step").as_tuple)
            for text, kernel in zip(texts, STEP_KERNELS, strict=True)
        ]
        return repr({name: sizes for name, sizes in asked if any(sizes)})

    def _launch(self, text: StepText) -> str:
        ratios = [str(i) for i, a in enumerate(self.inputs.values()) if f"R_{a}" in text.constants]
        flags = [f"{n}={v}" for n, v in text.flags]
        if "SAVE" in text.constants:
            flags.append("SAVE=bool(residuals)")
        rest = "".join(f", {x}" for x in (*ratios, *flags))
        return f"call.step({text.name}, {tuple_text(text.tensors)}, {tuple_text(text.scalars)}{rest})"
