"""What the stages before the kernels made of one spec, and the plan as the user sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan
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


@dataclass(frozen=True)
class Stages:
    """The stages that a compiled op runs when it first needs them (module-level functions: it pickles).

    ``derive`` gives the artefacts for given values of consts, ``emit`` the text of a backend's module.
    """

    derive: Callable[[RecurrenceSpec, CompileOptions, Mapping[str, float]], Artefacts]
    emit: Callable[[Artefacts, str, CompileOptions], str]
