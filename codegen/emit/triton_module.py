"""A kernel plan as one Python module: Triton kernels, and the functions that launch them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from linalg_dsl.codegen.emit.kernel_text import KernelText, Memory
from linalg_dsl.codegen.emit.names import Names, ascii_text
from linalg_dsl.codegen.emit.render import functions_of, render, template_text
from linalg_dsl.codegen.emit.signature import (
    axis_source,
    equations,
    given_outputs,
    head_counts,
    literal,
    output_dims,
    output_like,
    output_shape,
    row_count,
    run_time_consts,
    sized,
    tuple_text,
)
from linalg_dsl.codegen.emit.trace import Trace
from linalg_dsl.codegen.emit.triton_boundary import boundary_tensors
from linalg_dsl.codegen.emit.triton_kernel import KernelPrinter
from linalg_dsl.codegen.emit.triton_levels import RESERVED, LevelsPrinter, LevelsText
from linalg_dsl.codegen.launch_sizes import Launches, sizes_of
from linalg_dsl.codegen.options import NanExact
from linalg_dsl.codegen.schedule import table
from linalg_dsl.codegen.schedule.alone import lone_transform
from linalg_dsl.codegen.schedule.call_shape import is_crowded, plan_class, score_count, summed_axis
from linalg_dsl.codegen.schedule.cut import cut
from linalg_dsl.codegen.schedule.descriptors import capabilities
from linalg_dsl.codegen.schedule.kernel_plan import (
    SEGMENT,
    Direction,
    Kernel,
    KernelPlan,
    leaves_last_states,
    tile_kinds,
)
from linalg_dsl.codegen.schedule.lower import lower
from linalg_dsl.codegen.schedule.two_level import first_walk, kernel_names, why_one_level
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.precision import Precision, precision

_SIZES = {"K": "self.key", "V": "self.value"}


@dataclass(frozen=True, slots=True)
class TritonModule:
    """What templates/triton_module.py.jinja asks for."""

    title: str
    version: str
    equations: tuple[str, ...]
    name_literal: str
    input_names: str
    inputs_ascii: str
    const_names: str
    timed: str
    dims: str
    states: str
    output_dims: str
    output_shape: str
    partial_rows: bool
    library: tuple[str, ...]
    kernels: tuple[str, ...]
    inputs: str
    consts: str
    outputs: tuple[str, ...]
    output: str
    output_like: int
    wide: bool
    cotangents: tuple[str, ...]
    forward_buffers: tuple[str, ...]
    forward_launches: tuple[str, ...]
    residuals: str
    residual_count: int
    backward_buffers: tuple[str, ...]
    backward_launches: tuple[str, ...]
    gradients: tuple[str, ...]
    first_timed: int
    head_counts: str
    key_from: int
    key_axis: int
    value_from: int
    value_axis: int
    summed: str
    state_dims: str
    state_shape: str
    solve_precision: str
    wide_solve: bool
    shortest: str
    erased: str
    step: str
    chunk_size: int
    decay: str
    rank: int
    crowded: bool
    score_count: int
    state_count: str
    segment: int
    exact: bool
    invariant: bool
    table: tuple[str, ...]
    levels: LevelsText | None
    sizes: str
    described: str


def kernel_plan(forward: ChunkPlan, backward: ChunkPlan, digits: Precision | None = None) -> KernelPlan:
    """The kernels of both plans, with the digits that were chosen."""
    return cut(lower(forward, backward), wide_solve=digits is not None and digits.solve == "float32")


def emit_triton(
    canonical: CanonicalRecurrence,
    forward: ChunkPlan,
    backward: ChunkPlan,
    chunk_size: int | None = None,
    invariant: bool = False,
    wide: bool = False,
    handed: tuple[str, ...] = (),
    trace: Trace | None = None,
    schedule: str = "walk",
    super_chunk: int | None = None,
    launch: Launches = (),
    nan_exact: NanExact = True,
) -> str:
    """The text of a module with ``forward`` and ``backward`` over whole sequences.

    ``chunk_size``: a power of two from 16 to 256, or None for the table's choice at each call.
    ``invariant``: nothing about a call but K, V, dtype and device decides how it is computed. ``wide``: the
    output is float32. ``handed``: inputs whose types do not decide that of the operands of products.
    ``trace`` takes up what the names in the kernels stand for. ``schedule``: "walk", "two_level" (with
    super-chunks of ``super_chunk`` chunks, None for a choice at each call), or "auto" for a choice between
    them at each call. ``launch``: sizes in place of the tables'. ``nan_exact``: whether NaN of some tokens
    is kept from outputs of others of their chunk ("gradients": from gradients too). The text depends on
    nothing but the arguments and this package's version. Raises
    ``ArgumentError`` where there is no such schedule.
    """
    if chunk_size is not None and (chunk_size < 16 or chunk_size > 256 or chunk_size & (chunk_size - 1)):
        raise ArgumentError(
            f"chunk_size: expected a power of two from 16 to 256 for Triton, got {chunk_size}"
        )
    plan = kernel_plan(forward, backward, precision(canonical))
    forced = schedule == "two_level"
    levels = forced or (schedule == "auto" and not invariant and not why_one_level(plan.plan))
    emitter = _Emitter(
        canonical, plan, chunk_size, invariant, wide, handed, levels, forced, super_chunk, launch, nan_exact
    )
    text = emitter.run()
    if trace is not None:
        trace |= emitter.values
    return text


class _Emitter:
    def __init__(
        self,
        canonical: CanonicalRecurrence,
        plan: KernelPlan,
        chunk_size: int | None,
        invariant: bool,
        wide: bool,
        handed: tuple[str, ...],
        levels: bool,
        forced: bool,
        super_chunk: int | None,
        launch: Launches = (),
        nan_exact: NanExact = True,
    ) -> None:
        self.nan_exact = nan_exact
        self.canonical = canonical
        self.spec: RecurrenceSpec = canonical.spec
        self.rec = canonical.recurrences[0]
        self.plan = plan
        self.values: Trace = {}
        self.chunk_size = chunk_size
        self.digits = precision(canonical)
        self.stepped = chunk_size is None and bool(self.digits.shortest)
        self.invariant = invariant
        self.wide = wide
        self.handed = handed
        self.has_levels = levels
        self.forced = forced
        self.super_chunk = super_chunk
        self.asked = launch
        self.consts = run_time_consts(self.spec, plan.plan)
        self.counts = {i.name: row_count(i, dict(canonical.consts)) for i in self.spec.inputs}
        names = Names(
            reserved=(
                "call", "tensors", "consts", "cu_seqlens", "dry", "save", "residuals",
                "initial_state", "initial_states", "final_state", "final_states", "output_final_state",
                "d_o", "d_state", "d_finals", "d_final_state", "d_initial_state", "d_final_states",
                "d_initial_states", *boundary_tensors(plan),
                *RESERVED,
            )
        )  # fmt: skip
        self.inputs = {i.name: names.unique(i.name) for i in self.spec.inputs}
        self.const_args = {c: names.unique(c) for c in self.consts}
        self.outputs = {o: names.unique(o) for o in self.rec.outputs}
        self.cotangents = {o: names.unique(f"d_{o}") for o in self.rec.outputs}
        self.gradients = {i: names.unique(f"d_{a}") for i, a in self.inputs.items()}
        self.buffers = {b.node: names.unique(b.name) for b in plan.buffers}
        self.order = {i.name: n for n, i in enumerate(self.spec.inputs)}
        self.title = names.unique(self.spec.name)

    def run(self) -> str:
        spec, plan = self.spec, self.plan
        memory = self._memory()
        state_dims = tuple(map(str, spec.states[0].dims))
        described = self._described()
        printed = {
            k.name: KernelPrinter(
                plan,
                k,
                memory,
                self.title,
                state_dims,
                self._short(),
                stepped=self.stepped,
                nan_exact=self.nan_exact == "gradients" or (bool(self.nan_exact) and k in plan.forward),
                described=f"{self.title}_{k.name}" in described,
            ).run()
            for k in (*plan.forward, *plan.backward)
        }
        self.values = {text.name: text.values for text in printed.values()}
        levels = None
        if self.has_levels:
            levels = LevelsPrinter(
                plan, memory, self.title, state_dims, self._short(), self._launch_walk, self.stepped
            )
            self.values |= levels.trace
        token = next(i for i, decl in enumerate(spec.inputs) if decl.timed)
        key, value = axis_source(spec, "K"), axis_source(spec, "V")
        saved = [b for b in plan.buffers if b.saved]
        boundaries = [k.boundary for k in plan.backward if k.boundary]
        extra = boundary_tensors(plan)
        decay, rank = plan_class(plan.plan)
        numbers = dict(self.canonical.consts)
        dims = sized(output_dims(spec), numbers)
        used = frozenset().union(*(p.library for p in printed.values()), levels.library if levels else ())
        return render(
            "triton_module.py.jinja",
            TritonModule(
                title=ascii_text(spec.name),
                version=version("linalg_dsl"),
                equations=equations(spec),
                name_literal=f'"{ascii(spec.name)[1:-1]}"',
                input_names=literal(i.name for i in spec.inputs),
                inputs_ascii=literal(self.inputs.values()),
                const_names=literal(self.consts),
                timed=repr(tuple(i.timed for i in spec.inputs)),
                dims=repr(tuple(sized(i.dims, numbers) for i in spec.inputs)),
                states=literal(s.name for s in spec.states),
                output_dims=repr(dims),
                output_shape=output_shape(dims, "call."),
                partial_rows=self._has_unused_rows(),
                library=library_functions(used),
                kernels=(*(p.text.rstrip() for p in printed.values()), *(levels.kernels if levels else ())),
                inputs=", ".join(self.inputs.values()),
                consts=", ".join(self.const_args.values()),
                outputs=tuple(self.outputs.values()),
                output=given_outputs(self.outputs.values()),
                output_like=output_like(spec, self.handed),
                wide=self.wide,
                cotangents=tuple(self.cotangents.values()),
                forward_buffers=(
                    *(self._allocation(b.node) for b in plan.buffers if self._made_forward(b.node)),
                    *(levels.allocations() if levels else ()),
                ),
                forward_launches=self._launches(
                    plan.forward, "forward", printed, levels.forward_lines() if levels else ()
                ),
                residuals=", ".join(self.buffers[b.node] for b in saved),
                residual_count=len(saved),
                backward_buffers=(
                    *(self._allocation(b.node) for b in plan.buffers if not self._made_forward(b.node)),
                    *(
                        f"{d} = call.gradient({self.order[i]})"
                        for i, d in self.gradients.items()
                        if self._has_gradient(i)
                    ),
                    *(f"{name} = {made}" for name, made in extra.items()),
                ),
                backward_launches=self._launches(
                    plan.backward, "reverse", printed, levels.backward_lines() if levels else ()
                ),
                gradients=tuple(self._gradient(i, memory) for i in self.gradients),
                first_timed=token,
                head_counts=head_counts(spec),
                key_from=key[0],
                key_axis=key[1],
                value_from=value[0],
                value_axis=value[1],
                summed=_SIZES[summed_axis(plan)],
                state_dims=", ".join(state_dims),
                state_shape=", ".join(_SIZES[d] for d in state_dims),
                solve_precision=f'"{self.digits.transform}"',
                wide_solve=self.digits.solve == "float32",
                shortest=repr(self.digits.shortest) if self.stepped else "",
                erased=_SIZES[self.digits.axis],
                step="self.step" if self.stepped else "self.chunk",
                chunk_size=self.chunk_size or 0,
                decay=repr(decay),
                rank=rank,
                crowded=is_crowded(plan.plan),
                score_count=score_count(plan.plan),
                state_count=", states=len(STATES)" if len(spec.states) > 1 else "",
                segment=SEGMENT,
                exact=any(b.exact for b in boundaries) or self.invariant,
                invariant=self.invariant,
                table=table_functions(),
                levels=levels.text(self.super_chunk, self.forced) if levels else None,
                sizes=self._sizes(levels),
                described=repr(described) if described else "",
            ),
        )

    def _sizes(self, levels: LevelsPrinter | None) -> str:
        """What is asked of the kernels, by their names in the module."""
        kernels = kernel_names(self.plan, levels.two if levels else None)
        asked = {n: sizes_of(self.asked, self.spec.name, n, f).as_tuple for n, f in kernels}
        return repr({f"{self.title}_{n}": sizes for n, sizes in asked.items() if any(sizes)})

    def _described(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """The walks that can load by descriptors, by their names in the module: where, whether asked to."""
        found = {}
        for kernel in (*self.plan.forward, *self.plan.backward):
            asked = sizes_of(self.asked, self.spec.name, kernel.name, kernel.family).tma
            found[f"{self.title}_{kernel.name}"] = (
                capabilities(self.plan, kernel, asked, self.invariant),
                bool(asked),
            )
        return {name: (majors, asked) for name, (majors, asked) in found.items() if majors}

    def _short(self) -> bool:
        """Whether chunks are as short as the table has them for many erases."""
        return self.chunk_size is None or self.chunk_size <= 32

    # -- where values lie -----------------------------------------------------------------------------
    def _memory(self) -> dict[int, Memory]:
        out: dict[int, Memory] = {}
        only_saved = {b.node for b in self.plan.buffers if b.only_saved}
        wide = {b.node for b in self.plan.buffers if b.element == "float32"}
        for n, node in enumerate(self.plan.plan.nodes):
            if node.op in ("input", "param"):
                name = str(node.attr("name"))
                row = node.attr("row")
                out[n] = Memory(
                    self.inputs[name], f"R_{self.inputs[name]}", self.counts[name] or 1, int(row or 0)
                )
            elif node.op == "const":
                out[n] = Memory(self.const_args[str(node.attr("name"))])
            elif node.op == "cotangent":
                out[n] = Memory(self.cotangents[str(node.attr("name"))])
        by_blocks = {b.node for b in self.plan.buffers if b.shares}
        for n, name in self.buffers.items():
            count = f"P_{name}" if n in by_blocks else None
            by_chunks = self.plan.plan.nodes[n].axes == ("t",)
            out[n] = Memory(
                name, saved_only=n in only_saved, float32=n in wide, shares=count, by_chunks=by_chunks
            )
        for result, n in self.plan.results:
            if n in out:
                continue
            if result in self.outputs:
                out[n] = Memory(self.outputs[result])
                continue
            name, _, row_text = result.removeprefix("d_").partition("[")
            out[n] = Memory(
                self.gradients[name], None, self.counts[name] or 1, int(row_text.rstrip("]") or 0)
            )
        return out

    def _allocation(self, n: int) -> str:
        b = next(b for b in self.plan.buffers if b.node == n)
        made = f'call.buffer("{"".join(b.axes)}", {b.element == "compute"})'
        if b.shares:
            walk = next(k for k in (*self.plan.forward, *self.plan.backward) if n in k.stores)
            loads = tuple_text(map(repr, tile_kinds(self.plan.plan.nodes, walk)))
            made = f'call.shares({self.title}_{walk.name}, "{walk.split}", {loads})'
        return f"{self.buffers[n]} = {made}{' if save else None' if b.only_saved else ''}"

    def _made_forward(self, n: int) -> bool:
        return any(n in k.stores for k in self.plan.forward)

    def _has_gradient(self, name: str) -> bool:
        return any(r == f"d_{name}" or r.startswith(f"d_{name}[") for r, _ in self.plan.results)

    def _gradient(self, name: str, memory: Mapping[int, Memory]) -> str:
        """What the launcher returns for one tensor; a value with several names was written once."""
        nodes = [n for r, n in self.plan.results if r == f"d_{name}" or r.startswith(f"d_{name}[")]
        if not nodes:
            return "None"
        i, own = self.order[name], self.gradients[name]
        written = {memory[n].argument for n in nodes if n in memory} - {own}
        if not written:
            return f"call.finish({i}, {own})"
        if len(nodes) > 1:
            raise InternalError(f"rows of the gradient of {name} are also another value")
        return f"call.finish({i}, {written.pop()}.clone())"

    def _has_unused_rows(self) -> bool:
        """Whether a gradient [n, D] has rows that no kernel writes."""
        return any(
            self.counts[i.name] > sum(r.startswith(f"d_{i.name}[") for r, _ in self.plan.results)
            for i in self.spec.inputs
        )

    # -- launches -------------------------------------------------------------------------------------
    def _launches(
        self, kernels: Sequence[Kernel], direction: Direction, printed: Mapping[str, KernelText],
        before: Sequence[str],
    ) -> tuple[str, ...]:  # fmt: skip
        """The lines that start these kernels, with those ``before`` the first walk in a direction."""
        first = first_walk(kernels, direction) if before else None
        out: list[str] = []
        for kernel in kernels:
            out += before if kernel is first else ()
            out.append(self._launch(printed[kernel.name]))
        return tuple(out)

    def _launch(self, text: KernelText) -> str:
        kernel = text.kernel
        if kernel.family == "prep":
            more = f", tiles={len(wide)}" if (wide := [t for t in text.loads if t != "ts"]) else ""
            blocks = lone_transform(self.plan.plan.nodes, kernel)
            more += f", blocks={blocks}" if blocks and self._short() else ""
            return f"call.prep({text.name}, {kernel not in self.plan.forward}, {self._operands(text)}{more})"
        return self._launch_walk(text, *self._ends(kernel), "")

    def _launch_walk(self, text: KernelText, first: str, last: str, more: str) -> str:
        """A walk from the state ``first``, which leaves its last one in ``last``."""
        if text.tiles:
            more += f", tiles={tuple_text(f'({t.tensor}, {t.axes!r})' for t in text.tiles)}"
        return (
            f'call.walk({text.name}, "{text.kernel.split}", {tuple_text(map(repr, text.loads))}, '
            f"{self._operands(text, f', {first}, {last}')}{more})"
        )

    def _ends(self, kernel: Kernel) -> tuple[str, str]:
        """The tensors that a walk starts from and leaves its last states in: as many as there are states."""
        two, last = self.has_levels, leaves_last_states(self.plan, kernel)
        if kernel in self.plan.forward:
            return (
                "(super_first,)" if two else "initial_states",
                "NO_STATES" if not last else "(super_last,)" if two else "final_states or NO_STATES",
            )
        if kernel.direction == "forward":
            first = "(super_starts if call.super_chunk else initial_state,)"
            return first if two else "initial_states", "NO_STATES"
        return (
            "(super_first,)" if two else "d_final_states",
            "NO_STATES" if not last else "(super_last,)" if two else "d_initial_states",
        )

    def _operands(self, text: KernelText, states: str = "") -> str:
        """The tensors and numbers of a launch; ``states`` stand between them."""
        kernel = text.kernel
        scalars = tuple_text(text.scalars)
        ratios = [str(i) for i, a in enumerate(self.inputs.values()) if f"R_{a}" in text.constants]
        only_saved = {self.buffers[b.node] for b in self.plan.buffers if b.only_saved}
        forward = kernel in self.plan.forward
        spare = next(iter(self.outputs.values()))
        tensors = tuple_text(
            f"{t} if save else {spare}" if forward and t in only_saved else t for t in text.tensors
        )
        rest = "".join(f", {r}" for r in ratios)
        more = ", SAVE=save" if "SAVE" in text.constants else ""
        for b in self.plan.buffers:
            name = self.buffers[b.node]
            if b.shares and f"P_{name}" in text.constants:
                more += f", P_{name}={name}.shape[2]"
        return f"{tensors}{states}, {scalars}{rest}{more}"


def library_functions(wanted: Iterable[str]) -> tuple[str, ...]:
    """The tile functions of these names and those that they call, in the library's order."""
    sources, calls = _library()
    todo, found = list(wanted), set[str]()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += calls[name]
    return tuple(text for name, text in sources.items() if name in found)


@functools.cache
def _library() -> tuple[Mapping[str, str], Mapping[str, tuple[str, ...]]]:
    text = template_text("tile_library.py")
    functions = functions_of(text)
    calls = {
        name: tuple(
            n.func.id
            for n in ast.walk(ast.parse(source))
            if isinstance(n, ast.Call)
            and isinstance(n.func, ast.Name)
            and n.func.id in functions
            and n.func.id != name
        )
        for name, source in functions.items()
    }
    return functions, calls


@functools.cache
def table_functions() -> tuple[str, ...]:
    """The functions of the block-size table, as text: one place for the facts, modules that stand alone."""
    return tuple(functions_of(Path(table.__file__).read_text(encoding="utf-8")).values())
