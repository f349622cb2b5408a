"""The plan of a compiled op as users see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from linalg_dsl.ops.artefacts import Artefacts
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.step_form import StepForm

if TYPE_CHECKING:
    from linalg_dsl.codegen.schedule.kernel_plan import KernelPlan
    from linalg_dsl.planner.step_verdict import StepExplanation
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
        *,
        dtype: str = "bfloat16",
        target: str = "sm_90",
    ) -> Explanation | StepExplanation:
        """Verdict, derivation, chunk equations, costs, schedule, stability.

        B, T and H turn costs into totals, and the list of kernels into the launches of such a call (K and V
        128 where they are not given): their sizes, what they move, and the reasons. Raises ``ArgumentError``
        for an unknown dtype or target.
        """
        form = self.artefacts.form
        if isinstance(form, StepForm):
            return self._explain_step(form, (B, T, H), (K, V))
        from linalg_dsl.codegen.schedule.describe import chosen_chunk, schedule_lines
        from linalg_dsl.planner.verdict import DEFAULT_SIZE, explain

        kernels = self.kernels
        key, value = K or DEFAULT_SIZE, V or DEFAULT_SIZE
        chunk = self.chunk_size or chosen_chunk(kernels, K=key, V=value, dtype=dtype, target=target)
        schedule: Sequence[str] = [line.removeprefix("  ") for line in str(kernels).splitlines()[1:]]
        if B is not None and T is not None and H is not None:
            schedule = schedule_lines(
                kernels, B=B, T=T, H=H, K=key, V=value, dtype=dtype, target=target, chunk_size=self.chunk_size
            )
        return explain(
            self.canonical,
            self.forward,
            self.backward,
            B,
            T,
            H,
            K,
            V,
            chunk_size=chunk,
            schedule=schedule,
        )

    def _explain_step(
        self, form: StepForm, calls: tuple[int | None, ...], sizes: tuple[int | None, int | None]
    ) -> StepExplanation:
        from linalg_dsl.codegen.schedule.step_split import schedule
        from linalg_dsl.planner.step_verdict import StepExplanation

        chosen = schedule(self.forward, self.backward)
        return StepExplanation(form, self.forward, self.backward, calls, sizes, (str(chosen),))

    def to_latex(self) -> str:
        """The derivation as LaTeX."""
        return self.explain().to_latex()

    def __str__(self) -> str:
        return f"{self.forward}\n\n{self.backward}"
