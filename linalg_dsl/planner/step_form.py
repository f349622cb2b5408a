"""``StepForm``: a recurrence that is computed token after token, and why it has no faster class.

*scan*: no sum over an axis feeds the carry, so every element of the state goes its own way.
*sequential*: the state reads itself through a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from linalg_dsl.algebra.expr import Expr, Power, Symbol
from linalg_dsl.algebra.normalise import Normaliser
from linalg_dsl.algebra.traverse import symbols, walk
from linalg_dsl.errors import DslError
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import Equation, RecurrenceSpec
from linalg_dsl.planner.constants import Constants, find_constants
from linalg_dsl.planner.plan import ChunkPlan, PlanBuilder
from linalg_dsl.planner.step_values import Before, StepExpressions, dimension, state_axes

StepClass = Literal["scan", "sequential"]
CONTRACTIONS = frozenset({"contract", "sum", "amax"})


@dataclass(frozen=True, slots=True)
class StepForm:
    """``reasons`` say why no chunk form was found; ``consts`` are those fixed as numbers, by name."""

    spec: RecurrenceSpec
    name: StepClass
    plan: ChunkPlan
    reasons: tuple[str, ...] = ()
    consts: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.spec.name}: {self.name}"]
        lines += [f"const {name} = {value:g}" for name, value in self.consts]
        lines += [f"  {e.target}_t = {show_expr(e.value)}" for e in (*self.spec.updates, *self.spec.outputs)]
        return "\n".join([*lines, *(f"  no chunk form: {reason}" for reason in self.reasons)])


def step_form(
    spec: RecurrenceSpec,
    consts: Mapping[str, float] | None = None,
    reasons: tuple[str, ...] = (),
    before: Before | None = None,
) -> StepForm:
    """The step form of a legal spec; ``consts`` are values that replace the declared ones.

    ``before``: the states that hold shifted inputs, by their name and row.

    Raises DslError where no input says how large an axis is, ArgumentError on unknown consts.
    """
    _check_axes(spec)
    constants = find_constants(spec, consts or {})
    kept = _run_time(spec, constants)
    plan = _Derivation(spec, constants, kept, before or {}).run()
    fixed = sorted(_used(spec, constants) - kept)
    return StepForm(
        spec, classify(plan), plan, reasons, tuple((c, float(constants.values[c])) for c in fixed)
    )


def step_plan(form: StepForm) -> ChunkPlan:
    """The plan of one token: values without ``t``, a carry per state."""
    return form.plan


def classify(plan: ChunkPlan) -> StepClass:
    """``sequential`` where a sum over an axis of something read from a state feeds a state."""
    depends: list[bool] = []
    for node in plan.nodes:
        depends.append(node.op == "carry" or any(depends[a] for a in node.args))
    feeding = plan.live(after for _, _, _, after in plan.carries)
    reads = any(plan.nodes[i].op in CONTRACTIONS and depends[i] for i in feeding)
    return "sequential" if reads else "scan"


class _Derivation:
    def __init__(
        self, spec: RecurrenceSpec, constants: Constants, kept: frozenset[str], before: Before
    ) -> None:
        self.b = PlanBuilder()
        self.spec = spec
        self.constants = constants
        self.kept = kept
        self.past = {
            s.name: self.b.add_node("carry", (), state_axes(s.dims), s.name, name=s.name, direction="forward")
            for s in spec.states
        }
        self.next: dict[str, int] = {}
        self.updates = {e.target: e for e in spec.updates}
        normaliser = Normaliser(constants.sizes)
        self.values = StepExpressions(self.b, spec, normaliser, self.past, self.present, before)

    def run(self) -> ChunkPlan:
        b = self.b
        carries = [(s.name, "forward", self.past[s.name], self.present(s.name)) for s in self.spec.states]
        outputs = [(e.target, b.label(self._value(e), e.target)) for e in self.spec.outputs]
        return b.finish(self.spec.name, carries, outputs)

    def present(self, name: str) -> int:
        """A state after the token; the language lets no state's present read itself."""
        if name not in self.next:
            self.next[name] = self.b.label(self._value(self.updates[name]), f"{name}_next")
        return self.next[name]

    def _value(self, equation: Equation) -> int:
        return self.values.full(self.constants.substitute(equation.value, self.kept))


def _check_axes(spec: RecurrenceSpec) -> None:
    declared = {d for i in spec.inputs for d in i.dims}
    for state in spec.states:
        for dim in state.dims:
            if dimension(str(dim)) in ("K", "V") and dim not in declared:
                raise DslError.single(
                    "E962",
                    f"no input of {spec.name} has the axis {dim}, so no call could say how large it is",
                    spec.updates[0].span,
                    f"declare an input or param [{dim}]",
                )


def _run_time(spec: RecurrenceSpec, constants: Constants) -> frozenset[str]:
    """Consts that stay numbers of a call: those of the outputs alone, in no exponent."""
    fixed = {s.name for e in spec.updates for s in symbols(e.value)} | set(constants.sizes)
    for equation in spec.outputs:
        for node in walk(equation.value):
            if isinstance(node, Power):
                fixed |= {s.name for s in symbols(node.exponent)}
    return frozenset(c for c in constants.values if c not in fixed)


def _used(spec: RecurrenceSpec, constants: Constants) -> frozenset[str]:
    """Consts with a known value that an equation or a dimension needs."""
    equations: list[Expr] = [e.value for e in (*spec.updates, *spec.outputs)]
    named = {s.name for e in equations for s in symbols(e) if isinstance(s, Symbol)}
    return frozenset(c for c in constants.values if c in named or c in constants.sizes)
