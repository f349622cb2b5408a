"""Syntax → ``RecurrenceSpec``: declarations, then states, then equations, then the whole."""

from __future__ import annotations

from typing import TypeVar

from linalg_dsl.algebra import expr as ex
from linalg_dsl.errors import InternalError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.declarations import Names, const_entry
from linalg_dsl.language.equations import Equations
from linalg_dsl.language.linearity import check_linear
from linalg_dsl.language.mistakes import Mistakes
from linalg_dsl.language.names import DIMENSIONS, RESERVED
from linalg_dsl.language.scope import Scope, lost_lines, show_ref
from linalg_dsl.language.spec import Const, Input, RecurrenceSpec, State
from linalg_dsl.language.states import assigns_of, find_states, infer_shapes
from linalg_dsl.language.terms import Evaluator
from linalg_dsl.language.values import Value
from linalg_dsl.source import Span

AnyStatement = TypeVar("AnyStatement", bound=syn.Statement)
LARGEST_TOTAL = 20_000
"""Terms of all equations together, bindings substituted."""


def resolve(document: syn.Document, mistakes: Mistakes) -> RecurrenceSpec:
    """The spec of a document; raises ``DslError`` with all mistakes, those of the parser included.

    Where the inferred shape of the only state leads to mistakes, the default may be what was meant: the
    reading with fewer mistakes is reported.
    """
    reading = _Resolver(document, mistakes.copy())
    spec = reading.spec()
    if reading.mistakes.found and reading.inferred_another:
        default = _Resolver(document, mistakes.copy(), infer_states=False)
        second = default.spec()
        if len(default.mistakes.found) <= len(reading.mistakes.found):
            reading, spec = default, second
    reading.mistakes.raise_if_any()
    if spec is None:
        raise InternalError("no spec and no mistake")
    return spec


class _Resolver:
    def __init__(self, document: syn.Document, mistakes: Mistakes, infer_states: bool = True) -> None:
        self.infer_states = infer_states
        self.inferred_another = False
        """Whether the only state got another shape than [K, V] without a declaration."""
        self.document = document
        self.mistakes = mistakes
        self.names = Names(mistakes)
        self.steps = [s for s in document.statements if isinstance(s, syn.Assign | syn.Loop)]
        self.assigns = assigns_of(self.steps)
        loops = _of(document, syn.Loop)
        self.scope = Scope(self.names, mistakes, self.assigns, loops, lost_lines(mistakes))
        self.inputs: list[Input] = []
        self.consts: list[Const] = []
        self.states: dict[str, State] = {}
        self.output = "o"

    def add(
        self,
        code: str,
        message: str,
        span: Span | None,
        hint: str | None = None,
        related: tuple[tuple[str, Span | None], ...] = (),
    ) -> None:
        self.mistakes.add(code, message, span, hint, related)

    def spec(self) -> RecurrenceSpec | None:
        self.declare()
        if not find_states(self.steps, self.names, self.states, self.mistakes):
            return None
        self.inferred_another = infer_shapes(self.steps, self.names, self.states, not self.infer_states)
        equations = Equations(self.names, self.scope, self.mistakes, self.output)
        size = 0
        for step in self.steps:
            size += equations.read(step)
            if size > LARGEST_TOTAL:
                self.add("E107", f"the equations expand to more than {LARGEST_TOTAL} terms", step.span)
                return None
        entries = {name: self.names.entries[name].shape for name in self.states}
        shapes = {name: shape for name, shape in entries.items() if shape is not None}
        check_linear(equations.changes, shapes, self.mistakes)
        self.check_complete()
        order = list(self.states)
        spec = RecurrenceSpec(
            self.document.name,
            tuple(self.inputs),
            tuple(self.consts),
            tuple(self.states.values()),
            tuple(sorted(equations.updates, key=lambda e: order.index(e.target))),
            tuple(equations.outputs),
            tuple(equations.written),
            self.document.doc,
        )
        if not self.mistakes.found:
            self.check_carried(spec)
        return spec

    def check_carried(self, spec: RecurrenceSpec) -> None:
        """What a shift hands on has a name beside the states."""
        for shifted in spec.shifted:
            name = f"{shifted.name}_prev"
            if name in self.states:
                message = f"the shift of `{shifted.name}` is handed on as `{name}`, which is a state"
                self.add("E205", message, self.states[name].span, "rename the state")

    # -- declarations -------------------------------------------------------------------------
    def declare(self) -> None:
        name = self.document.name
        if name.endswith("_t") or name in RESERVED:
            self.add("E204", f"`{name}` cannot name a recurrence", self.document.span)
        for const in _of(self.document, syn.ConstDecl):
            self.const(const)
        for declared in _of(self.document, syn.InputDecl):
            found = self.names.input(declared)
            if found:
                self.inputs.append(found)
        for declared_state in _of(self.document, syn.StateDecl):
            state = self.names.state(declared_state)
            if state:
                self.states[state.name] = state
        outputs = _of(self.document, syn.OutputDecl)
        for output in outputs[1:]:
            self.add("E205", "a second output", output.span, "one output per recurrence")
        if outputs:
            self.output = outputs[0].name

    def const(self, declared: syn.ConstDecl) -> None:
        value = Evaluator(self.const_lookup, self.mistakes)(declared.value)
        const = Const(declared.name, value.expr if value else ex.ZERO, declared.span)
        if value and (value.unit or not value.expr.is_scalar):
            self.add("E409", f"const {declared.name} is a matrix", declared.value.span, "a const is a number")
        if not self.names.declare(declared.name, const_entry(const)):
            return
        self.consts.append(const)
        match const.value:
            case ex.Number(n) if n.denominator == 1 and 1 <= n <= 64 and value:
                self.names.counts[const.name] = int(n)

    def const_lookup(self, ref: syn.Ref) -> Value | None:
        entry = self.names.entries.get(ref.name)
        if ref.index is None and ref.name in DIMENSIONS:
            return Value(ex.Symbol(ref.name, ex.SCALAR, None))
        if ref.index is None and entry and entry.role == "const":
            return Value(ex.Symbol(ref.name, ex.SCALAR, None))
        declared = {s.name for s in self.document.statements if isinstance(s, syn.InputDecl)}
        if ref.name in declared or ref.index is not None:
            hint = "a const may use numbers, functions, K, V and earlier consts"
            self.add("E409", f"`{show_ref(ref)}` is not a constant", ref.span, hint)
        elif ref.name in {c.name for c in _of(self.document, syn.ConstDecl)}:
            self.add("E409", f"const `{ref.name}` is used before its value is known", ref.span)
        else:
            self.scope.unknown(ref)
        return None

    # -- the whole ----------------------------------------------------------------------------
    def check_complete(self) -> None:
        if self.scope.lost_equation():
            return
        if not self.document.statements:
            self.add(
                "E101",
                "the text holds no equation",
                self.document.span,
                "the smallest recurrence is `S_t = S_{t-1} + k_t v_tᵀ`, `o_t = S_tᵀ q_t`",
            )
            return
        if all(entry.role != "state" for entry in self.names.entries.values()):
            self.no_state()
        for state in self.states.values():
            if state.name not in self.scope.updated:
                message = f"the state `{state.name}` is declared but never updated"
                self.add("E404", message, state.span, f"write `{state.name}_t = ...`")
        if self.output not in self.scope.updated:
            others = [a.name for a in self.assigns if a.name not in self.states]
            hint = f"write `{self.output}_t = S_tᵀ q_t`"
            if others and self.output == "o":
                hint += f"; if `{others[-1]}_t` is the output, declare `output {others[-1]}`"
            self.add("E403", f"there is no output `{self.output}_t`", self.document.span, hint)
        elif self.output in self.states:
            self.add("E403", f"the output `{self.output}` is a state", self.states[self.output].span,
                     "give the read of the state a name of its own: `o_t = S_tᵀ q_t`")  # fmt: skip

    def no_state(self) -> None:
        hint = "the past of a state is written `S_{t-1}`"
        self.add("E404", "there is no state: no equation refers to its own past", self.document.span, hint)


def _of(document: syn.Document, kind: type[AnyStatement]) -> list[AnyStatement]:
    return [s for s in document.statements if isinstance(s, kind)]
