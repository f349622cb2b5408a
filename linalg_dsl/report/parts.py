"""What the page shows of one stage, put together from its plans and its generated code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from linalg_dsl.codegen.emit.trace import Trace
from linalg_dsl.codegen.schedule.call_shape import Call as Asked
from linalg_dsl.codegen.schedule.call_shape import CallShape
from linalg_dsl.codegen.schedule.cut import cut
from linalg_dsl.codegen.schedule.describe import KernelSchedule, ScanSchedule, schedule_call
from linalg_dsl.codegen.schedule.lower import lower
from linalg_dsl.codegen.schedule.step_split import schedule as step_schedule
from linalg_dsl.codegen.targets import find_target
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.equations import Equation, Writer
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.origins import Origins, find_origins
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.precision import precision
from linalg_dsl.planner.step_cost import INTERVAL
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.planner.step_verdict import StepExplanation, TokenWriter
from linalg_dsl.planner.verdict import Explanation
from linalg_dsl.planner.work import Work, work_of
from linalg_dsl.report.code import Function, functions
from linalg_dsl.report.launches import Launch, chunk_launches, step_launches

CHUNKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Call:
    """The dense call that costs and schedules are told of."""

    B: int = 8
    T: int = 2048
    H: int = 16
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    target: str = "sm_90"

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} = {getattr(self, n)}" for n in "BTHKV")
        return f"{sizes}, {self.dtype}, {self.target}"


@dataclass(frozen=True)
class Part:
    """One stage. ``work`` is its work by chunk size; a step form has one, under 1.

    ``levels``: why a call goes over sequences on one level or on two; empty for a step form.
    """

    spec: RecurrenceSpec
    explanation: Explanation | StepExplanation
    call: Call
    chunk: int
    origins: Origins
    launches: tuple[Launch, ...]
    schedules: tuple[KernelSchedule | ScanSchedule, ...]
    levels: str
    code: Mapping[str, tuple[Function, ...]]
    work: Mapping[int, Work]

    @property
    def equations(self) -> tuple[Equation, ...]:
        return self.origins.equations


def make_part(
    explanation: Explanation | StepExplanation,
    form: CanonicalRecurrence | StepForm,
    plans: tuple[ChunkPlan, ChunkPlan],
    call: Call,
    emit: Callable[[str, Trace], str],
    asked: Asked,
) -> Part:
    """``emit`` gives the module of a backend and fills a trace; ``asked``: ``call`` with the options that the
    user has fixed."""
    forward, backward = plans
    writer: type[Writer] = TokenWriter if isinstance(form, StepForm) else Writer
    origins = find_origins(form.spec, forward, backward, writer)
    schedules: tuple[KernelSchedule | ScanSchedule, ...] = ()
    levels = ""
    if isinstance(form, StepForm):
        chunk = asked.chunk_size or INTERVAL
        shape = CallShape(call.B, call.T, call.H, call.K, call.V, call.dtype, chunk)
        launches = step_launches(form, step_schedule(forward, backward), shape, origins, chunk)
        chunks: Sequence[int] = (1,)
    else:
        kernels = cut(lower(forward, backward), wide_solve=precision(form).solve == "float32")
        found = schedule_call(kernels, asked, find_target(call.target))
        chunk, levels = found.shape.chunk, found.levels.line
        launches = chunk_launches(kernels, found, origins)
        schedules = (*found.forward, *found.backward)
        chunks = sorted({*CHUNKS, chunk})
    code = {}
    for backend in ("torch", "triton"):
        trace: Trace = {}
        text = emit(backend, trace)
        code[backend] = functions(text, trace, origins)
    work = {c: work_of(form, forward, backward, c, call.K, call.V) for c in chunks}
    return Part(form.spec, explanation, call, chunk, origins, launches, schedules, levels, code, work)
