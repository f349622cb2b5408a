"""Syntax → ``RecurrenceSpec``: what names mean, what is a state, whether the update is linear.

Each equation is evaluated twice. As written, with bindings as symbols, which finds all mistakes and
gives ``spec.written``; then with bindings substituted, which gives ``updates`` and ``outputs``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Expr, Shape, show_shape
from linalg_dsl.errors import InternalError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.declarations import Entry, Names, Role, const_entry
from linalg_dsl.language.graph import components
from linalg_dsl.language.inference import infer
from linalg_dsl.language.linearity import check_linear
from linalg_dsl.language.mistakes import Mistakes
from linalg_dsl.language.names import DIMENSIONS, RESERVED
from linalg_dsl.language.scope import Scope, article, lost_lines, show_ref
from linalg_dsl.language.spec import Const, Equation, Input, RecurrenceSpec, State
from linalg_dsl.language.terms import DEEPEST, Evaluator
from linalg_dsl.language.values import Value
from linalg_dsl.source import Span

AnyStatement = TypeVar("AnyStatement", bound=syn.Statement)
MOST_STATES = 16
DEFAULT: Shape = ("K", "V")
"""The shape of a state about which nothing is known."""
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
        self.assigns = _of(document, syn.Assign)
        self.loops = _of(document, syn.Loop)
        self.scope = Scope(self.names, mistakes, self.assigns, self.loops, lost_lines(mistakes))
        self.inputs: list[Input] = []
        self.consts: list[Const] = []
        self.states: dict[str, State] = {}
        self.output = "o"
        self.changes: dict[str, tuple[Value, Span | None]] = {}
        """The update of every state, with its place."""
        self.expanded: dict[str, Expr] = {}
        self.written: list[Equation] = []
        self.updates: list[Equation] = []
        self.outputs: list[Equation] = []

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
        if not self.find_states():
            return None
        self.infer_shapes()
        for loop in self.loops:
            hint = "for a fixed small n write the steps out as a product, with rows `k_{t,1}`, `k_{t,2}`"
            self.add("E903", "substeps are not supported yet", loop.span, hint)
        size = 0
        for assign in self.assigns:
            value = self.equation(assign)
            size += value.size if value else 0
            if size > LARGEST_TOTAL:
                self.add("E107", f"the equations expand to more than {LARGEST_TOTAL} terms", assign.span)
                return None
        check_linear(self.changes, self.state_shapes(), self.mistakes)
        self.check_complete()
        order = list(self.states)
        return RecurrenceSpec(
            self.document.name,
            tuple(self.inputs),
            tuple(self.consts),
            tuple(self.states.values()),
            tuple(sorted(self.updates, key=lambda e: order.index(e.target))),
            tuple(self.outputs),
            tuple(self.written),
            self.document.doc,
        )

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

    # -- which names are states ---------------------------------------------------------------
    def find_states(self) -> bool:
        """Enters all states; False if there are too many.

        A state is what some equation reads at t - 1 and what depends on that value itself, straight or
        through other names.
        """
        reads: dict[str, set[tuple[str, int]]] = {}
        for assign in self.assigns:
            found = reads.setdefault(assign.name, set())
            found.update((r.name, r.index.time) for r in syn.refs(assign.value) if r.index)
        together = components({name: {n for n, _ in found} for name, found in reads.items()})
        carried = {
            other
            for name, found in reads.items()
            for other, time in found
            if time < 0 and together.get(other) == together[name]
        }
        if not carried and not self.states:  # S_t = S_t + ... is a slip, and S a state all the same
            carried = {name for name, found in reads.items() if (name, 0) in found}
        for assign in self.assigns:
            name = assign.name
            if name not in carried or name in self.names.entries or name in RESERVED:
                continue
            if self.names.declare(name, Entry("state", None, assign.span)):
                self.states[name] = State(name, (), span=assign.span)
        if len(self.states) > MOST_STATES:
            place = list(self.states.values())[MOST_STATES].span
            self.add("E107", f"more than {MOST_STATES} states", place, "one text holds one recurrence")
            return False
        return True

    def infer_shapes(self) -> None:
        """Gives every state a shape that has none yet."""
        equations = [(a.name, a.value) for a in self.assigns if a.value.depth <= DEEPEST]
        shapes = {name: self.names.entries[name].shape for name in self.states}
        for name, shape in infer(equations, self.declared_shape, shapes).items():
            self.inferred_another = shape != DEFAULT and len(self.states) == 1
            if not self.infer_states:
                shape = DEFAULT
            dims = tuple(d for d in shape if d != 1) if 1 in shape else shape
            self.states[name] = replace(self.states[name], dims=dims)
            self.names.entries[name] = replace(self.names.entries[name], shape=shape, dims=dims)

    def declared_shape(self, ref: syn.Ref) -> Shape | None:
        """Of an input, param, const or dimension; None for other names."""
        entry = self.names.entries.get(ref.name)
        if ref.name in DIMENSIONS:
            return ex.SCALAR
        if entry is None or entry.role == "state":
            return None
        if ref.index and ref.index.row is not None:
            return (entry.dims[1], 1) if len(entry.dims) == 2 else ex.SCALAR
        return entry.shape

    def state_shapes(self) -> dict[str, Shape]:
        entries = {name: self.names.entries[name].shape for name in self.states}
        return {name: shape for name, shape in entries.items() if shape is not None}

    # -- equations ----------------------------------------------------------------------------
    def equation(self, assign: syn.Assign) -> Value | None:
        """Checks one equation and enters what it defines."""
        name, entry = assign.name, self.names.entries.get(assign.name)
        if name in RESERVED:
            self.add("E204", f"`{name}` is reserved and cannot be assigned", assign.span)
            return None
        if entry and entry.role in ("input", "param", "const"):
            message = f"`{name}` is declared as {article(entry.role)} and cannot be assigned"
            self.add(
                "E406",
                message,
                assign.span,
                "give the result a name of its own",
                (("declared here", entry.span),),
            )
            return None
        if assign.index != syn.Index(0):
            self.add("E407", f"an equation gives `{name}_t`", assign.span, f"write `{name}_t = ...`")
        self.scope.target = name
        value = Evaluator(self.scope.lookup, self.mistakes)(assign.value)
        if entry and (entry.role != "state" or name in self.scope.updated):
            hint = "give the first result a name of its own"
            self.add(
                "E205", f"`{name}_t` is assigned twice", assign.span, hint, (("first here", entry.span),)
            )
            return value
        is_state = bool(entry)
        if not is_state:
            role: Role = "output" if name == self.output else "binding"
            self.names.declare(name, Entry(role, value.shape if value else None, assign.span))
        self.scope.updated.add(name)
        if value is None:
            return None
        if is_state:
            self.update(assign, value)
        elif name == self.output:
            self.read(assign, value)
        else:
            self.scope.values[name] = value
        if not self.mistakes.found:
            self.enter(assign, value, is_state)
        return value

    def update(self, assign: syn.Assign, value: Value) -> None:
        shape = self.names.entries[assign.name].shape
        self.changes[assign.name] = (value, assign.span)
        if shape is not None and value.shape != shape:
            hint = _shape_hint(value.shape, shape, assign.name)
            message = (
                f"the state `{assign.name}` is {show_shape(shape)}, its update is {show_shape(value.shape)}"
            )
            self.add("E308", message, assign.value.span or assign.span, hint)

    def read(self, assign: syn.Assign, value: Value) -> None:
        rows, cols = value.shape
        if cols != 1 or value.unit:
            hint = f"write the column: `{assign.name}_t = S_tᵀ q_t`" if rows == 1 else None
            self.add(
                "E308", f"the output is a column, not {show_shape(value.shape)}", assign.value.span, hint
            )

    def enter(self, assign: syn.Assign, value: Value, is_state: bool) -> None:
        """The equation as written and with bindings substituted."""
        self.written.append(Equation(assign.name, value.expr, assign.span))
        full = Evaluator(self.substitute, self.mistakes)(assign.value)
        if full is None:  # numbers behind bindings: division by zero, out of bounds
            return
        if is_state:
            self.updates.append(Equation(assign.name, full.expr, assign.span))
            return
        self.expanded[assign.name] = full.expr
        if assign.name == self.output:
            self.outputs.append(Equation(assign.name, full.expr, assign.span))

    def substitute(self, ref: syn.Ref) -> Value | None:
        if ref.name in self.expanded:
            known = self.scope.values.get(ref.name, Value(ex.ZERO))
            return replace(known, expr=self.expanded[ref.name], depth=1, size=1)
        return self.scope.lookup(ref)

    # -- the whole ----------------------------------------------------------------------------
    def check_complete(self) -> None:
        if self.loops or self.scope.lost_equation():
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


def _shape_hint(got: Shape, wanted: Shape, name: str) -> str | None:
    if got == (wanted[1], wanted[0]):
        return f"transpose it, or declare `state {name} : [{got[0]}, {got[1]}]`"
    if 1 in got and got != ex.SCALAR:
        dim = got[0] if got[1] == 1 else got[1]
        return f"for a state that is a vector declare `state {name} : [{dim}]`"
    return None
