"""What the stages before the kernels made of one spec, and the plan as the user sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from linalg_dsl.algebra.expr import Dim, Number
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.decode_form import DecodeForm
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.precision import Precision, precision
from linalg_dsl.planner.stages import Shift, Stage, Stages
from linalg_dsl.planner.step_form import StepForm


@dataclass(frozen=True)
class Artefacts:
    """A spec on its way to a kernel; with a step form the plans are of one token."""

    spec: RecurrenceSpec
    form: CanonicalRecurrence | StepForm
    forward: ChunkPlan
    backward: ChunkPlan

    @property
    def canonical(self) -> CanonicalRecurrence:
        """Form (1). Raises ``ArgumentError`` where there is none."""
        if isinstance(self.form, StepForm):
            raise ArgumentError(f"{self.spec.name} has no chunk form: {'; '.join(self.form.reasons)}")
        return self.form

    @property
    def precision(self) -> Precision:
        """How the chunk plan is carried out so that its digits last. Raises as ``canonical`` does."""
        return precision(self.canonical)


@dataclass(frozen=True, slots=True)
class Module:
    """The generated module of one stage; ``axes`` says which axis of the whole its K and V are."""

    name: str
    text: str
    axes: tuple[tuple[str, Dim], ...]

    def sizes(self, spec: RecurrenceSpec, sizes: Mapping[str, int]) -> dict[str, int]:
        """K and V of the stage, where K, V of the whole are given and other axes are consts of ``spec``."""
        known: dict[Dim, int] = {d: d for _, d in self.axes if isinstance(d, int)}
        known |= {c.name: int(c.value.value) for c in spec.consts if isinstance(c.value, Number)}
        known.update(sizes)
        return {**sizes, **{a: known[d] for a, d in self.axes if d in known}}


@dataclass(frozen=True)
class Passes:
    """What a compiled op runs when it first needs it (module-level functions: it pickles).

    ``derive`` gives the artefacts for given values of consts, ``emit`` the text of a
    backend's module, and fills a ``trace`` where one is handed in (``codegen.emit.trace``); ``decode`` gives
    the form of one token for given values of consts and the text of the module that decodes.
    """

    derive: Callable[[RecurrenceSpec, CompileOptions, Mapping[str, float]], Artefacts]
    emit: Callable[..., str]
    decode: Callable[[RecurrenceSpec, Mapping[str, float], str, CompileOptions], tuple[DecodeForm, str]]


def stage_options(options: CompileOptions, stages: Stages, stage: Stage) -> CompileOptions:
    """Those of the op; what is handed from stage to stage is in full precision."""
    declared = {i.name for i in stages.spec.inputs}
    pairs = zip(stage.spec.inputs, stage.arguments, strict=True)
    made = {s.name: s.of for s in stages.steps if isinstance(s, Shift)}
    handed = tuple(d.name for d, a in pairs if made.get(a, a) not in declared)
    return replace(options, wide=stage.results != (stages.output,), handed=handed)
