"""The plan of a compiled op as users see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linalg_dsl.ops.artefacts import Artefacts
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan


@dataclass(frozen=True)
class Plan:
    """Canonical form, forward and backward chunk plans of one recurrence."""

    artefacts: Artefacts

    @property
    def canonical(self) -> CanonicalRecurrence:
        return self.artefacts.canonical

    @property
    def forward(self) -> ChunkPlan:
        return self.artefacts.forward

    @property
    def backward(self) -> ChunkPlan:
        return self.artefacts.backward

    def explain(
        self,
        B: int | None = None,
        T: int | None = None,
        H: int | None = None,
        K: int | None = None,
        V: int | None = None,
    ) -> Any:
        """Verdict, derivation, chunk equations, costs and stability; sizes make the costs numbers."""
        from linalg_dsl.planner.verdict import explain

        return explain(self.canonical, self.forward, self.backward, B=B, T=T, H=H, K=K, V=V)

    def to_latex(self) -> str:
        """The derivation as LaTeX."""
        return str(self.explain().to_latex())

    def __str__(self) -> str:
        return f"{self.forward}\n\n{self.backward}"
