"""The driver: from what a user wrote to a torch op, stage by stage.

text or Python function -> RecurrenceSpec           language.parser, language.builder
RecurrenceSpec          -> Stages                   planner.split, a RecurrenceSpec each;
                                                    planner.micro_tokens, planner.two_axes
RecurrenceSpec          -> CanonicalRecurrence      planner.canonical; where there is none
                        -> StepForm                 planner.step_form
CanonicalRecurrence     -> ChunkPlan (forward)      planner.chunkwise
StepForm                -> ChunkPlan of one token   planner.step_plan
ChunkPlan               -> ChunkPlan (backward)     planner.adjoint
both plans              -> source of a module       codegen.emit
source                  -> registered torch op      ops.library, ops.op
RecurrenceSpec          -> DecodeForm               planner.decode_form, of one token in any class
DecodeForm              -> source that decodes      codegen.emit.torch_decode, codegen.emit.triton_decode
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linalg_dsl.codegen.launch_sizes import check_names, read_launches
from linalg_dsl.codegen.options import CompileOptions, NanExact
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.spec import RecurrenceSpec

_NOTED: set[str] = set()

if TYPE_CHECKING:
    from linalg_dsl.codegen.emit.trace import Trace
    from linalg_dsl.language.builder import PythonRecurrence
    from linalg_dsl.ops.artefacts import Artefacts, Passes
    from linalg_dsl.ops.op import CompiledOp
    from linalg_dsl.ops.plan_view import Plan
    from linalg_dsl.planner.decode_form import DecodeForm
    from linalg_dsl.planner.stages import Stages
    from linalg_dsl.planner.step_form import StepForm


def compile(
    spec: RecurrenceSpec | PythonRecurrence | str | Path,
    backend: str = "auto",
    chunk_size: int | None = None,
    schedule: str | None = None,
    state_layout: str | None = None,
    reverse: bool = False,
    invariant: bool = False,
    strict: bool = False,
    debug: bool = False,
    tune: bool = False,
    substeps: str | None = None,
    super_chunk: int | None = None,
    launch: Mapping[str, Mapping[str, int]] | None = None,
    nan_exact: NanExact = True,
) -> CompiledOp:
    """Compiles a recurrence: a spec, a function under ``@recurrence``, a text, or the path of a file.

    Everything up to the backward plan is derived now, so mistakes are reported here (``DslError``); the
    module of a backend is written at the first call that needs it. Options: ``CompileOptions``.
    """
    options = CompileOptions(
        backend, chunk_size, schedule or "walk", invariant, strict, debug, substeps, reverse, state_layout,
        super_chunk, read_launches(launch), tune, nan_exact,
    )  # fmt: skip
    op = assemble(read_spec(spec), options)
    op.derive()
    if options.launch:
        check_names(options.launch, op.plan.launch_names(), op.spec.name)
    return op


def read_spec(source: RecurrenceSpec | PythonRecurrence | str | Path) -> RecurrenceSpec:
    """The spec of any of the forms in which a recurrence may be given."""
    match source:
        case RecurrenceSpec():
            return source
        case Path():
            from linalg_dsl.language.parser import parse

            return parse(source.read_text(encoding="utf-8"), origin=str(source))
        case str():
            from linalg_dsl.language.parser import parse

            if source.endswith((".rec", ".py")) and "\n" not in source:
                raise ArgumentError(f"a str is read as a recurrence; for the file pass Path({source!r})")
            return parse(source)
        case _:
            spec = getattr(source, "spec", None)
            if not isinstance(spec, RecurrenceSpec):
                raise ArgumentError(
                    "compile takes a RecurrenceSpec, a function under @recurrence, a text or a Path, "
                    f"got {type(source).__name__}"
                )
            return spec


def derive(spec: RecurrenceSpec, options: CompileOptions, consts: Mapping[str, float]) -> Artefacts:
    """The spec in canonical form and its chunk plans, with the given consts as numbers."""
    from linalg_dsl.codegen.schedule.two_level import check_two_level
    from linalg_dsl.ops.artefacts import Artefacts
    from linalg_dsl.planner.adjoint import backward
    from linalg_dsl.planner.chunkwise import derive as chunk_form
    from linalg_dsl.planner.classes import find_form
    from linalg_dsl.planner.step_form import StepForm, step_plan
    from linalg_dsl.planner.step_plan import step_backward

    form = find_form(spec, consts)
    if isinstance(form, StepForm):
        if options.schedule == "two_level":
            raise ArgumentError(f"schedule two_level needs a chunk form, and {form.spec.name} has none")
        _note_slower_path(form, options)
        token = step_plan(form)
        return Artefacts(spec, form, token, step_backward(token))
    forward = chunk_form(form)
    if options.schedule == "two_level":
        check_two_level(forward)
    return Artefacts(spec, form, forward, backward(forward))


def emit(artefacts: Artefacts, backend: str, options: CompileOptions, trace: Trace | None = None) -> str:
    """The text of a backend's module; ``trace`` takes up which value each name in it holds."""
    from linalg_dsl.planner.step_form import StepForm

    plans = (artefacts.forward, artefacts.backward)
    form = artefacts.form
    if isinstance(form, StepForm):
        return _emit_step(form, artefacts, backend, options, trace)
    match backend:
        case "torch":
            from linalg_dsl.codegen.emit.torch_module import emit_torch

            return emit_torch(form, *plans, chunk_size=options.chunk_size, wide=options.wide, trace=trace)
        case "triton":
            from linalg_dsl.codegen.emit.triton_module import emit_triton

            given = _triton_options(options)
            given |= {"schedule": options.schedule, "nan_exact": options.nan_exact}
            return emit_triton(form, *plans, **given, super_chunk=options.super_chunk, trace=trace)
        case _:
            raise InternalError(f"no module for backend {backend}")


def decode(
    spec: RecurrenceSpec, consts: Mapping[str, float], backend: str, options: CompileOptions
) -> tuple[DecodeForm, str]:
    """The form of one token, whatever the class, and the text of the module that decodes."""
    from linalg_dsl.planner.decode_form import decode_form

    form = decode_form(spec, consts)
    match backend:
        case "torch":
            from linalg_dsl.codegen.emit.torch_decode import emit_torch_decode

            return form, emit_torch_decode(form)
        case "triton":
            from linalg_dsl.codegen.emit.triton_decode import emit_triton_decode

            return form, emit_triton_decode(form, options.invariant)
        case _:
            raise InternalError(f"no module for backend {backend}")


def _emit_step(
    form: StepForm, artefacts: Artefacts, backend: str, options: CompileOptions, trace: Trace | None
) -> str:
    plans = (form, artefacts.forward, artefacts.backward)
    match backend:
        case "torch":
            from linalg_dsl.codegen.emit.torch_step import emit_torch_step

            return emit_torch_step(*plans, chunk_size=options.chunk_size, wide=options.wide, trace=trace)
        case "triton":
            from linalg_dsl.codegen.emit.triton_step import emit_triton_step

            return emit_triton_step(*plans, **_triton_options(options), trace=trace)
        case _:
            raise InternalError(f"no module for backend {backend}")


def _triton_options(options: CompileOptions) -> dict[str, Any]:
    return {
        "chunk_size": options.chunk_size,
        "invariant": options.invariant,
        "wide": options.wide,
        "handed": options.handed,
        "launch": options.launch,
    }


def _note_slower_path(form: StepForm, options: CompileOptions) -> None:
    """Says once per recurrence that its states are walked through token after token, and why."""
    if form.name != "sequential":
        return  # a scan is what its class promises
    reason = "; ".join(form.reasons)
    text = f"{form.spec.name} has no chunk form and is computed token after token: {reason}"
    if options.strict:
        raise ArgumentError(f"{text}; strict=True forbids that")
    if text not in _NOTED:
        _NOTED.add(text)
        warnings.warn(text, stacklevel=_callers())


def _callers() -> int:
    """The stack level of the line outside this package that asked for a compilation."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("linalg_dsl"):
        frame, level = frame.f_back, level + 1
    return level


def assemble(spec: RecurrenceSpec, options: CompileOptions, passes: Passes | None = None) -> CompiledOp:
    """Splits a spec into stages and gives the op that runs them; ``passes`` in place of this module's."""
    from linalg_dsl.ops.artefacts import Passes
    from linalg_dsl.ops.op import CompiledOp

    return CompiledOp(spec, options, passes or Passes(derive, emit, decode), into_stages(spec, options))


def into_stages(spec: RecurrenceSpec, options: CompileOptions) -> Stages:
    """The recurrences of one stage that a spec is run as."""
    from linalg_dsl.planner.micro_tokens import choose_substeps
    from linalg_dsl.planner.split import split
    from linalg_dsl.planner.stages import Stage
    from linalg_dsl.planner.two_axes import with_two_axes

    stages = split(spec)
    steps = [
        with_two_axes(choose_substeps(s, options.substeps)) if isinstance(s, Stage) else s
        for s in stages.steps
    ]
    return replace(stages, steps=tuple(steps))


def make_plan(spec: RecurrenceSpec, options: CompileOptions | None = None) -> Plan:
    """What ``compile(spec).plan`` is, without an op: torch is not imported."""
    from linalg_dsl.ops.artefacts import stage_options
    from linalg_dsl.ops.plan_view import Plan, StagePlan

    options = options or CompileOptions()
    stages = into_stages(spec, options)
    plans = []
    for stage in stages.stages:
        own = stage_options(options, stages, stage)
        found = derive(stage.spec, own, {})
        asked = (options.schedule, options.super_chunk, options.invariant, options.launch)
        plans.append(StagePlan(found, options.chunk_size, partial(_traced, found, own), *asked))
    return Plan(stages, tuple(plans))


def _traced(artefacts: Artefacts, options: CompileOptions, backend: str, trace: Trace) -> str:
    return emit(artefacts, backend, options, trace)
