"""What the stages before the kernels made of one spec, and the plan as the user sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from linalg_dsl.algebra.expr import Dim, Number
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


@dataclass(frozen=True, slots=True)
class Module:
    """The generated module of one stage; ``axes`` says which axis of the whole its K and V are."""

    name: str
    text: str
    axes: tuple[tuple[str, Dim], ...]

    def sizes(self, spec: RecurrenceSpec, sizes: Mapping[str, int]) -> dict[str, int]:
        """K and V of the stage, where K, V of the whole are given and other axes are consts of ``spec``."""
        plain = {c.name: int(c.value.value) for c in spec.consts if isinstance(c.value, Number)}
        known = {**plain, **sizes}
        return {**sizes, **{a: known[d] for a, d in self.axes if isinstance(d, str) and d in known}}


@dataclass(frozen=True)
class Passes:
    """What a compiled op runs when it first needs it (module-level functions: it pickles).

    ``derive`` gives the artefacts for given values of consts, ``emit`` the text of a backend's module.
    """

    derive: Callable[[RecurrenceSpec, CompileOptions, Mapping[str, float]], Artefacts]
    emit: Callable[[Artefacts, str, CompileOptions], str]
