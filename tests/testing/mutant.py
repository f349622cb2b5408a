"""Typical faults of kernels, put into plans, generated modules and calls of real entries of the catalogue."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from edits import Edit, NothingToEdit, edited

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.artefacts import Artefacts
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.decode_form import DecodeForm
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.testing import Subject

PlanEdit = Callable[[ChunkPlan], ChunkPlan]


@dataclass(frozen=True)
class Mutant:
    """A fault: where it is put (``entry`` of the catalogue, ``backend``), and what it is, in one line.

    One of ``text`` (edits of the emitted module), ``decode`` (of the module that decodes), ``forward`` or
    ``backward`` (of the chunk plan, before any kernel is made of it) and ``call`` (around the op).
    ``options`` are those of the compilation; ``somewhere``: one of several modules has the fault.
    """

    name: str
    entry: str
    backend: str
    what: str
    text: tuple[Edit, ...] = ()
    decode: tuple[Edit, ...] = ()
    forward: PlanEdit | None = None
    backward: PlanEdit | None = None
    call: Callable[[CompiledOp], Callable[..., Any]] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    somewhere: bool = False

    @property
    def place(self) -> str:
        if self.text:
            return "module"
        if self.decode:
            return "decode module"
        return "call" if self.call else "plan"

    def subject(self) -> Subject:
        """The op with the fault in it, and everything that is claimed of ops. Raises ``NothingToEdit``."""
        good = linalg_dsl.compile(spec_of(self.entry), backend=self.backend, **dict(self.options))
        emit, decode, derive = good.passes.emit, good.passes.decode, good.passes.derive
        own = [s.spec for s in good.stages.stages]

        def wrong_text(artefacts: Artefacts, backend: str, options: CompileOptions, **more: Any) -> str:
            text = emit(artefacts, backend, options, **more)
            # the module that kernels are compared with at first use is as it should be
            if not self.text or backend != self.backend:
                return text
            try:
                return edited(text, self.text)
            except NothingToEdit:
                if artefacts.spec in own and not self.somewhere:
                    raise
                return text  # the transposed recurrence, or a stage that the fault is not in

        def wrong_decode(
            spec: RecurrenceSpec, consts: Mapping[str, float], backend: str, options: CompileOptions
        ) -> tuple[DecodeForm, str]:
            form, text = decode(spec, consts, backend, options)
            return form, edited(text, self.decode) if self.decode and backend == self.backend else text

        def wrong_plan(spec: RecurrenceSpec, options: CompileOptions, consts: Any) -> Artefacts:
            found = derive(spec, options, consts)
            forward = self.forward(found.forward) if self.forward else found.forward
            backward = self.backward(found.backward) if self.backward else found.backward
            return replace(found, forward=forward, backward=backward)

        passes = replace(good.passes, emit=wrong_text, decode=wrong_decode, derive=wrong_plan)
        op = CompiledOp(good.spec, good.options, passes, good.stages)
        subject = Subject.of_op(op)
        if self.call is not None:
            subject = replace(subject, call=self.call(op))
        return replace(subject, name=self.name)

    def verify(self) -> None:
        """Makes every module with its fault. Raises ``NothingToEdit`` where the fault no longer fits."""
        op = self.subject().op
        assert op is not None
        op.source("step" if self.decode else "module", backend=self.backend)


def spec_of(entry: str) -> RecurrenceSpec:
    """The spec of a catalogue entry."""
    found = getattr(ops, entry).spec
    assert isinstance(found, RecurrenceSpec)
    return found


def version(modules: tuple[ModuleType, ...]) -> str:
    """Eight digits that change with what the faults are, not with how their files are laid out."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(ast.dump(ast.parse(inspect.getsource(module))).encode())
    return digest.hexdigest()[:8]
