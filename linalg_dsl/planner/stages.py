"""A recurrence of several states as stages: recurrences of their own that feed each other.

The states that need each other's past are one component, and each component is a stage: an ordinary
``RecurrenceSpec`` whose inputs are inputs of the whole, values of the token before (shifts) or what
earlier stages hand over. What a later stage or the output reads of an earlier state is the output of
that state's stage (``planner/state_reads.py`` says what a read is). A stage has as many outputs as there are
reads that need not wait for each other (``planner/joined_runs.py``). Elementwise work stands in the equations
of the stage that uses it; what no stage can do, since its axes are not the stage's or nothing linear is left
to do, is a step on tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from linalg_dsl.algebra.expr import Dim, Expr
from linalg_dsl.errors import InternalError
from linalg_dsl.language.printer import show_expr, show_float
from linalg_dsl.language.spec import RecurrenceSpec


@dataclass(frozen=True, slots=True)
class _OneValue:
    """A step that makes the value ``name``, and is told in one line."""

    name: str

    @property
    def made(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def headline(self) -> tuple[str, ...]:
        return (str(self),)


@dataclass(frozen=True, slots=True)
class Shift(_OneValue):
    """``name``: the value ``of`` at the token before.

    Before the first token of a sequence stands the carried tensor ``first`` of the call, or ``start``
    where it is not handed in. ``carries``: its last token is part of what the call hands on.
    """

    of: str
    first: str
    start: float = 0.0
    carries: bool = False

    def __str__(self) -> str:
        return f"{self.name}_t = {self.of}_{{t-1}}, from {self.first} or {show_float(self.start)}"


@dataclass(frozen=True, slots=True)
class TokenStep(_OneValue):
    """``name``: an expression of values at one token, computed in float32.

    ``dims``: its axes, of the whole recurrence. ``timed`` is false where it is made of params only.
    """

    value: Expr
    dims: tuple[Dim, ...]
    timed: bool = True

    def __str__(self) -> str:
        return f"{self.name}{'_t' if self.timed else ''} = {show_expr(self.value)}"


@dataclass(frozen=True, slots=True)
class PerToken(_OneValue):
    """``name``: the param ``of`` at every token, in float32, so that its gradients from several stages are
    added token by token (``planner/shared_params.py``)."""

    of: str

    def __str__(self) -> str:
        return f"{self.name}_t = {self.of}, whose gradients from the stages are added token by token"


Layout = Literal["rows", "repeat", "param"] | float
"""How an argument of n rows or a single one becomes n tokens: each row is a token; all n are the same; a
param has no tokens; a number: the first is the argument, the others are that number."""
ONES = "1"
"""The argument of a stage that is a vector of ones, on an axis of length 1."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One recurrence: ``arguments`` are the values of its inputs, in order, ``results`` those of its outputs.

    ``axes``: the axis of the whole recurrence that each axis of the stage is; 1 for an axis that only the
    stage has, on which its state is the column that the whole recurrence has as a vector. ``keeps``: its
    final states are those of the call (of runs that share an update, the first). With ``layouts``, one
    for each argument, every token is n tokens of the stage, n the rows of those laid out by rows, and the
    output is that of the last of n. ``note`` says what was chosen, and why.
    """

    spec: RecurrenceSpec
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    axes: tuple[tuple[str, Dim], ...] = ()
    keeps: bool = True
    layouts: tuple[Layout, ...] = ()
    note: str = field(default="", compare=False)

    @property
    def made(self) -> tuple[str, ...]:
        return self.results

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.spec.states)

    @property
    def column(self) -> str | None:
        """The axis of length 1, the last of the state, that the whole recurrence does not have."""
        return next((a for a, d in self.axes if d == 1), None)

    @property
    def headline(self) -> tuple[str, ...]:
        """What it computes of what, then its equations."""
        axes = "".join(f", {a} is {b}" for a, b in self.axes if a != b)
        given = ", ".join(map(_laid_out, self.arguments, self.layouts) if self.layouts else self.arguments)
        lines = [f"{', '.join(f'{r}_t' for r in self.results)} = {self.spec.name}({given}){axes}:"]
        lines += [f"    ({self.note})"] if self.note else []
        equations = (*self.spec.updates, *self.spec.outputs)
        return (*lines, *(f"    {e.target}_t = {show_expr(e.value)}" for e in equations))

    def __str__(self) -> str:
        text = "\n".join(f"    {line}".rstrip() for line in str(self.spec).rstrip().splitlines())
        return f"{self.headline[0]}\n{text}"


Step = Shift | TokenStep | PerToken | Stage


@dataclass(frozen=True, slots=True)
class Stages:
    """The steps of a recurrence in an order in which every value is made before it is used.

    Values are the inputs and params of ``spec`` and the names of the steps; ``output`` is the value that
    the call gives. ``fixed``: consts on whose values the steps depend. ``reverse``: the tokens of every
    sequence are turned around before the first step, and those of the output after the last.
    """

    spec: RecurrenceSpec
    steps: tuple[Step, ...]
    output: str
    fixed: tuple[tuple[str, float], ...] = ()
    reverse: bool = False

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(s for s in self.steps if isinstance(s, Stage))

    @property
    def is_whole(self) -> bool:
        """Whether the recurrence is one stage, itself, and nothing is done before or after it."""
        if self.reverse or len(self.steps) != 1:
            return False
        return self.stages != () and self.stages[0].spec is self.spec

    @property
    def headline(self) -> tuple[str, ...]:
        """What is done one after the other."""
        steps = tuple(line for step in self.steps for line in step.headline)
        return ("from the last token of every sequence to the first:", *steps) if self.reverse else steps

    def __str__(self) -> str:
        return "\n".join([f"stages of {self.spec.name}", *(f"  {s}" for s in self.steps)])


def _laid_out(argument: str, layout: Layout) -> str:
    match layout:
        case "rows":
            return f"{argument} by rows"
        case "repeat" | "param":
            return argument
        case fill:
            return f"{argument}, then {show_float(float(fill))}"


def single(spec: RecurrenceSpec) -> Stages:
    """The recurrence as one stage."""
    names = tuple(i.name for i in spec.inputs)
    output = spec.outputs[0].target
    return Stages(spec, (Stage(spec, names, (output,)),), output)


def verify(stages: Stages) -> None:
    """Raises ``InternalError`` where a value is used before it is made, or a state is not handed on once."""
    known = {i.name for i in stages.spec.inputs}
    carried = {s.name for s in stages.spec.states}
    kept: list[str] = []
    for step in stages.steps:
        match step:
            case Shift(of=of) | PerToken(of=of):
                _need(known, (of,), step.name)
            case TokenStep(value=value):
                _need(known, _value_names(value), step.name)
            case Stage():
                _need(known | {ONES}, step.arguments, step.spec.name)
                if len(step.arguments) != len(step.spec.inputs):
                    raise InternalError(f"stage {step.spec.name} has {len(step.spec.inputs)} inputs")
                if len(step.results) != len(step.spec.outputs):
                    raise InternalError(f"stage {step.spec.name} has {len(step.spec.outputs)} outputs")
                if not set(step.states) <= carried:
                    raise InternalError(f"stage {step.spec.name} has a state of its own")
                kept += step.states if step.keeps else ()
        for made in step.made:
            if made in known:
                raise InternalError(f"{made} is made twice")
            known.add(made)
    if sorted(kept) != sorted(carried):
        raise InternalError(f"final states of {sorted(kept)}, expected {sorted(carried)}")
    if stages.output not in known:
        raise InternalError(f"nothing makes the output {stages.output}")


def _value_names(value: Expr) -> Sequence[str]:
    from linalg_dsl.algebra.traverse import symbols

    return [s.name for s in symbols(value) if s.time is not None]


def _need(known: set[str], names: Iterable[str], user: str) -> None:
    if missing := [n for n in names if n not in known]:
        raise InternalError(f"{user} uses {missing[0]} before it is made")
