"""The driver: from what a user wrote to a torch op, stage by stage.

text or Python function -> RecurrenceSpec           language.parser, language.builder
RecurrenceSpec          -> Stages                   planner.split: a RecurrenceSpec each
RecurrenceSpec          -> CanonicalRecurrence      planner.canonical
CanonicalRecurrence     -> ChunkPlan (forward)      planner.chunkwise
ChunkPlan               -> ChunkPlan (backward)     planner.adjoint
both plans              -> source of a module       codegen.emit
source                  -> registered torch op      ops.library, ops.op
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.spec import RecurrenceSpec

if TYPE_CHECKING:
    from linalg_dsl.language.builder import PythonRecurrence
    from linalg_dsl.ops.artefacts import Artefacts
    from linalg_dsl.ops.op import CompiledOp


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
) -> CompiledOp:
    """Compiles a recurrence: a spec, a function under ``@recurrence``, a text, or the path of a file.

    Everything up to the backward plan is derived now, so mistakes are reported here (``DslError``); the
    module of a backend is written at the first call that needs it. Options: ``CompileOptions``.
    """
    _refuse(state_layout=state_layout not in (None, "kv"), reverse=reverse, tune=tune)
    options = CompileOptions(backend, chunk_size, schedule, invariant, strict, debug)
    op = _op(read_spec(spec), options)
    op.derive()
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
    from linalg_dsl.ops.artefacts import Artefacts
    from linalg_dsl.planner.adjoint import backward
    from linalg_dsl.planner.canonical import canonicalise
    from linalg_dsl.planner.chunkwise import derive as chunk_form

    canonical = canonicalise(spec, consts)
    forward = chunk_form(canonical)
    return Artefacts(spec, canonical, forward, backward(forward))


def emit(artefacts: Artefacts, backend: str, options: CompileOptions) -> str:
    """The text of a backend's module."""
    plans = (artefacts.canonical, artefacts.forward, artefacts.backward)
    match backend:
        case "torch":
            from linalg_dsl.codegen.emit.torch_module import emit_torch

            return emit_torch(*plans, chunk_size=options.chunk_size, wide=options.wide)
        case "triton":
            from linalg_dsl.codegen.emit.triton_module import emit_triton

            return emit_triton(
                *plans,
                chunk_size=options.chunk_size,
                invariant=options.invariant,
                wide=options.wide,
                handed=options.handed,
            )
        case _:
            raise InternalError(f"no module for backend {backend}")


def _op(spec: RecurrenceSpec, options: CompileOptions) -> CompiledOp:
    from linalg_dsl.ops.artefacts import Passes
    from linalg_dsl.ops.op import CompiledOp
    from linalg_dsl.planner.split import split

    return CompiledOp(spec, options, Passes(derive, emit), split(spec))


def _refuse(**asked: Any) -> None:
    for option, wanted in asked.items():
        if wanted:
            raise ArgumentError(f"compile: the option {option} is not supported yet")
