"""What the stages before the kernels made of one spec, and the plan as the user sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan


@dataclass(frozen=True)
class Artefacts:
    """A spec on its way to a kernel."""

    spec: RecurrenceSpec
    canonical: CanonicalRecurrence
    forward: ChunkPlan
    backward: ChunkPlan


@dataclass(frozen=True)
class Stages:
    """The stages that a compiled op runs when it first needs them (module-level functions: it pickles).

    ``derive`` gives the artefacts for given values of consts, ``emit`` the text of a backend's module.
    """

    derive: Callable[[RecurrenceSpec, CompileOptions, Mapping[str, float]], Artefacts]
    emit: Callable[[Artefacts, str, CompileOptions], str]
