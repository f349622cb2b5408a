"""The plan of a compiled op as users see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from linalg_dsl.ops.artefacts import Artefacts
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan

if TYPE_CHECKING:
    from linalg_dsl.codegen.schedule.kernel_plan import KernelPlan
    from linalg_dsl.planner.verdict import Explanation


@dataclass(frozen=True)
class Plan:
    """Canonical form, forward and backward chunk plans of one recurrence."""

    artefacts: Artefacts
    chunk_size: int | None = None

    @property
    def canonical(self) -> CanonicalRecurrence:
        return self.artefacts.canonical

    @property
    def forward(self) -> ChunkPlan:
        return self.artefacts.forward

    @property
    def backward(self) -> ChunkPlan:
        return self.artefacts.backward

    @property
    def kernels(self) -> KernelPlan:
        """The kernels that carry out both plans on a GPU."""
        from linalg_dsl.codegen.schedule.cut import cut
        from linalg_dsl.codegen.schedule.lower import lower

        return cut(lower(self.forward, self.backward))

    def explain(
        self,
        B: int | None = None,
        T: int | None = None,
        H: int | None = None,
        K: int | None = None,
        V: int | None = None,
    ) -> Explanation:
        """Verdict, derivation, chunk equations, costs, schedule, stability; sizes make the costs totals."""
        from linalg_dsl.planner.verdict import explain

        schedule = [line.removeprefix("  ") for line in str(self.kernels).splitlines()[1:]]
        return explain(
            self.canonical,
            self.forward,
            self.backward,
            B,
            T,
            H,
            K,
            V,
            chunk_size=self.chunk_size,
            schedule=schedule,
        )

    def to_latex(self) -> str:
        """The derivation as LaTeX."""
        return self.explain().to_latex()

    def __str__(self) -> str:
        return f"{self.forward}\n\n{self.backward}"
