"""The plan of a compiled op as users see it: of one stage, or stage after stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linalg_dsl.algebra.expr import Dim, Number
from linalg_dsl.codegen.launch_sizes import Launches
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.ops.artefacts import Artefacts
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.precision import Precision
from linalg_dsl.planner.stages import Stage, Stages
from linalg_dsl.planner.step_form import StepForm

if TYPE_CHECKING:
    from linalg_dsl.codegen.emit.trace import Trace
    from linalg_dsl.codegen.schedule.call_shape import Call as Asked
    from linalg_dsl.codegen.schedule.kernel_plan import KernelPlan
    from linalg_dsl.codegen.schedule.predict import Prediction
    from linalg_dsl.codegen.targets import Target
    from linalg_dsl.planner.step_verdict import StepExplanation
    from linalg_dsl.planner.verdict import Explanation
    from linalg_dsl.planner.work import Work
    from linalg_dsl.report.parts import Call, Part


@dataclass(frozen=True)
class StagePlan:
    """Canonical form, forward and backward chunk plans of one stage."""

    artefacts: Artefacts
    chunk_size: int | None = None
    emit: Callable[[str, Trace], str] | None = field(default=None, compare=False, repr=False)
    """Gives the module of a backend, and fills a trace of it."""
    schedule: str = "walk"
    super_chunk: int | None = None
    invariant: bool = False
    launch: Launches = ()

    @property
    def canonical(self) -> CanonicalRecurrence:
        return self.artefacts.canonical

    @property
    def precision(self) -> Precision:
        """How it is carried out so that its digits last. ``ArgumentError`` where there is no chunk form."""
        return self.artefacts.precision

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

        wide = self.precision.solve == "float32"
        return cut(lower(self.forward, self.backward), wide_solve=wide)

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
                kernels, B=B, T=T, H=H, K=key, V=value, dtype=dtype, target=target,
                chunk_size=self.chunk_size, invariant=self.invariant, schedule=self.schedule,
                super_chunk=self.super_chunk, launch=self.launch,
                tokens=self._most_tokens(key, value, dtype),
            )  # fmt: skip
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

    def _most_tokens(self, key: int, value: int, dtype: str) -> int | None:
        """The most tokens of a chunk that precision allows; None for any number."""
        channels = {"K": key, "V": value}[self.precision.axis]
        if self.chunk_size is not None or dtype != "float32" or channels > len(self.precision.shortest):
            return None
        return self.precision.shortest[channels - 1]

    def work(self, K: int, V: int, element_bytes: int = 2, chunk: int | None = None) -> Work:
        """FLOPs and bytes per token and head; by default in the chunks that run."""
        from linalg_dsl.codegen.schedule.describe import chosen_chunk
        from linalg_dsl.planner.work import work_of

        form, chunk = self.artefacts.form, chunk or self.chunk_size
        if isinstance(form, StepForm):
            chunk = 1
        elif chunk is None:
            chunk = chosen_chunk(self.kernels, K=K, V=V, dtype="bfloat16")
        return work_of(form, self.forward, self.backward, chunk, K, V, element_bytes)

    def predictions(
        self, B: int, T: int, H: int, K: int, V: int, dtype: str, target: Target
    ) -> tuple[tuple[str, str, Prediction], ...]:
        """(forward or backward, kernel, prediction) of every launch; none where there is no chunk form."""
        from linalg_dsl.codegen.schedule.describe import schedule_call

        if isinstance(self.artefacts.form, StepForm):
            return ()
        return schedule_call(self.kernels, self._asked(B, T, H, K, V, dtype), target).predictions

    def _asked(self, B: int, T: int, H: int, K: int, V: int, dtype: str) -> Asked:
        """A dense call with the options of this plan."""
        from linalg_dsl.codegen.schedule.call_shape import Call

        options = (self.chunk_size, self.invariant, self.schedule, self.super_chunk, self.launch)
        return Call(B, T, H, K, V, dtype, *options)

    def part(self, call: Call) -> Part:
        """What an HTML page shows of this stage."""
        from linalg_dsl.report.parts import make_part

        if self.emit is None:
            raise InternalError("a plan without its emitter has no code to show")
        found = self.explain(call.B, call.T, call.H, call.K, call.V, dtype=call.dtype, target=call.target)
        plans = (self.forward, self.backward)
        asked = self._asked(call.B, call.T, call.H, call.K, call.V, call.dtype)
        if not isinstance(self.artefacts.form, StepForm):
            asked = replace(asked, tokens=self._most_tokens(call.K, call.V, call.dtype))
        return make_part(found, self.artefacts.form, plans, call, self.emit, asked)

    def _explain_step(
        self, form: StepForm, calls: tuple[int | None, ...], sizes: tuple[int | None, int | None]
    ) -> StepExplanation:
        from linalg_dsl.codegen.schedule.step_split import schedule
        from linalg_dsl.planner.step_verdict import StepExplanation

        chosen = schedule(self.forward, self.backward)
        return StepExplanation(form, self.forward, self.backward, calls, sizes, (str(chosen),))

    def __str__(self) -> str:
        return f"{self.forward}\n\n{self.backward}"


@dataclass(frozen=True)
class Plan:
    """What an op was made of: ``steps`` and the plan of each stage, one for most recurrences."""

    steps: Stages
    stages: tuple[StagePlan, ...]

    @property
    def canonical(self) -> CanonicalRecurrence:
        return self._whole.canonical

    @property
    def precision(self) -> Precision:
        """How it is carried out so that its digits last; of several stages ask each of ``stages``."""
        return self._whole.precision

    @property
    def forward(self) -> ChunkPlan:
        return self._whole.forward

    @property
    def backward(self) -> ChunkPlan:
        return self._whole.backward

    @property
    def kernels(self) -> KernelPlan:
        """The kernels that carry out both plans on a GPU."""
        return self._whole.kernels

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
    ) -> PlanExplanation:
        """Verdict, derivation, chunk equations, costs, schedule, stability, stage after stage.

        B, T and H turn costs into totals, and the list of kernels into the launches of such a call (K and V
        128 where they are not given): their sizes, what they move, and the reasons. Raises ``ArgumentError``
        for an unknown dtype or target.
        """
        parts = [
            plan.explain(B, T, H, *self._sizes(stage, K, V), dtype=dtype, target=target)
            for plan, stage in zip(self.stages, self.steps.stages, strict=True)
        ]
        return PlanExplanation(self.steps, tuple(parts))

    def launches(self) -> tuple[int, int]:
        """How many kernels a forward and a backward launch on a GPU."""
        counts = [
            (1, 1)
            if isinstance(plan.artefacts.form, StepForm)
            else (len(plan.kernels.forward), len(plan.kernels.backward))
            for plan in self.stages
        ]
        return sum(f for f, _ in counts), sum(b for _, b in counts)

    def launch_names(self) -> Iterator[tuple[str, str, str]]:
        """(stage, kernel, family) of every kernel that a call can launch."""
        from linalg_dsl.codegen.schedule.step_split import STEP_KERNELS
        from linalg_dsl.codegen.schedule.two_level import kernel_names, two_level, why_one_level

        for plan in self.stages:
            stage = plan.artefacts.spec.name
            if isinstance(plan.artefacts.form, StepForm):
                yield from ((stage, name, "step") for name in STEP_KERNELS)
                continue
            kernels = plan.kernels
            two = None if plan.schedule == "walk" or why_one_level(kernels.plan) else two_level(kernels)
            yield from ((stage, *pair) for pair in kernel_names(kernels, two))

    def sized_stages(self, K: int, V: int) -> Iterator[tuple[StagePlan, int, int]]:
        """The stages, each with its own K and V where those of the whole are given."""
        for plan, stage in zip(self.stages, self.steps.stages, strict=True):
            key, value = self._sizes(stage, K, V)
            yield plan, key or K, value or V

    def to_latex(self) -> str:
        """The derivation as LaTeX."""
        return self.explain().to_latex()

    def to_html(
        self,
        path: str | os.PathLike[str],
        B: int = 8,
        T: int = 2048,
        H: int = 16,
        K: int = 128,
        V: int = 128,
        *,
        dtype: str = "bfloat16",
        target: str = "sm_90",
    ) -> Path:
        """Writes the derivation, drawings, costs and code as one HTML file; gives its path.

        Costs, bytes and launches are those of a dense call with these sizes. The file holds everything that
        it shows: no scripts, no network. Raises ``ArgumentError`` for an unknown dtype or target.
        """
        from linalg_dsl.report.page import make_page
        from linalg_dsl.report.parts import Call

        parts = [
            plan.part(Call(B, T, H, key, value, dtype, target))
            for plan, key, value in self.sized_stages(K, V)
        ]
        verdict = PlanExplanation(self.steps, tuple(p.explanation for p in parts)).verdict
        target_path = Path(path)
        target_path.write_text(make_page(self.steps, verdict, parts), encoding="utf-8")
        return target_path

    def _repr_latex_(self) -> str:
        return self.to_latex()

    def _repr_html_(self) -> str:
        from linalg_dsl.report.page import snippet

        out = []
        for plan in self.stages:
            found = plan.explain()
            lines = [(e.left, e.right) for e in found.forward_equations]
            out.append(snippet(lines, found.verdict))
        return "".join(out)

    def __str__(self) -> str:
        own = [str(plan) for plan in self.stages]
        return "\n\n".join(own if self.steps.is_whole else [str(self.steps), *own])

    @property
    def _whole(self) -> StagePlan:
        if not self.steps.is_whole:
            raise ArgumentError(f"{self.steps.spec.name} runs in several stages: ask each of plan.stages")
        return self.stages[0]

    def _sizes(self, stage: Stage, K: int | None, V: int | None) -> tuple[int | None, int | None]:
        """K and V of a stage, of which either may be another axis of the whole."""
        if self.steps.is_whole:
            return K, V
        known: dict[Dim, int | None] = {"K": K, "V": V}
        known |= {c.name: int(c.value.value) for c in self.steps.spec.consts if isinstance(c.value, Number)}
        known |= {d: d for _, d in stage.axes if isinstance(d, int)}
        axes = dict(stage.axes)
        return known.get(axes.get("K", "K")), known.get(axes.get("V", "V"))


@dataclass(frozen=True)
class PlanExplanation:
    """Prints what each stage hands to the next, then the explanation of every stage."""

    steps: Stages
    stages: tuple[Explanation | StepExplanation, ...]

    @property
    def verdict(self) -> str:
        """What the recurrence compiles to, in one line."""
        if self.steps.is_whole:
            return self.stages[0].verdict
        count = "one stage" if len(self.stages) == 1 else f"{len(self.stages)} stages"
        return f"{self.steps.spec.name}: {count}: " + "; ".join(s.verdict for s in self.stages)

    @property
    def schedule(self) -> tuple[str, ...]:
        """The kernels of every stage."""
        return tuple(line for stage in self.stages for line in stage.schedule)

    def __str__(self) -> str:
        if self.steps.is_whole:
            return str(self.stages[0])
        steps = "\n".join(f"  {line}" for line in self.steps.headline)
        parts = [self.verdict, f"one after the other\n{steps}"]
        for i, (stage, found) in enumerate(zip(self.steps.stages, self.stages, strict=True), 1):
            axes = ", ".join(f"{a} is {b} of {self.steps.spec.name}" for a, b in stage.axes if a != b)
            title = f"stage {i} of {len(self.stages)}: {stage.spec.name}{f' ({axes})' if axes else ''}"
            parts.append(f"{title}\n{'=' * len(title)}\n\n{found}")
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data: ``name``, ``verdict``, ``steps``, and one entry per stage.

        ``steps`` says in words what stages hand to each other, and is empty where there is only one.
        """
        whole = self.steps.is_whole
        return {
            "name": self.steps.spec.name,
            "verdict": self.verdict,
            "steps": [] if whole else list(self.steps.headline),
            "stages": [stage.to_dict() for stage in self.stages],
        }

    def to_latex(self) -> str:
        """The line, form (1) and the chunk equations; of several stages each under a heading of its own."""
        if self.steps.is_whole:
            return self.stages[0].to_latex()
        parts = []
        for stage, found in zip(self.steps.stages, self.stages, strict=True):
            name = stage.spec.name.replace("_", "\\_")
            parts.append(f"\\subsection*{{{name}}}\n{found.to_latex()}")
        return "\n".join(parts)
