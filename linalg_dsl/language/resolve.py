"""Syntax → ``RecurrenceSpec``: what names mean, what is a state, whether the update is linear.

Each equation is evaluated twice. As written, with bindings as symbols, which finds all mistakes and
gives ``spec.written``; then with bindings substituted, which gives ``updates`` and ``outputs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Expr, Shape, show_shape
from linalg_dsl.errors import InternalError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.declarations import Entry, Names, const_entry, shape_of
from linalg_dsl.language.mistakes import Mistakes, nearest
from linalg_dsl.language.names import DIMENSIONS, RESERVED, ascii_name
from linalg_dsl.language.spec import Const, Equation, Input, RecurrenceSpec, State
from linalg_dsl.language.terms import Evaluator, Value
from linalg_dsl.source import Span

LARGEST_TOTAL = 20_000
"""Terms of all equations together, bindings substituted."""


def resolve(document: syn.Document, mistakes: Mistakes) -> RecurrenceSpec:
    """The spec of a document; raises ``DslError`` with all mistakes, those of the parser included."""
    spec = _Resolver(document, mistakes).spec()
    mistakes.raise_if_any()
    if spec is None:
        raise InternalError("no spec and no mistake")
    return spec


class _Resolver:
    def __init__(self, document: syn.Document, mistakes: Mistakes) -> None:
        self.document = document
        self.mistakes = mistakes
        self.names = Names(mistakes)
        self.syntax_failed = bool(mistakes.found)
        self.assigns = _of(document, syn.Assign)
        self.loops = _of(document, syn.Loop)
        self.inputs: list[Input] = []
        self.consts: list[Const] = []
        self.states: dict[str, State] = {}
        self.output = "o"
        self.values: dict[str, Value] = {}
        """Bindings and outputs above the equation in hand, as symbols."""
        self.expanded: dict[str, Expr] = {}
        self.updated: set[str] = set()
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
        self.find_states()
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
        self.check_complete()
        return RecurrenceSpec(
            self.document.name,
            tuple(self.inputs),
            tuple(self.consts),
            tuple(self.states.values()),
            tuple(self.updates),
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
            message, hint = f"`{_show(ref)}` is not a constant", "numbers, functions, K, V and earlier consts"
            self.add("E409", message, ref.span, hint)
        elif ref.name in {c.name for c in _of(self.document, syn.ConstDecl)}:
            self.add("E409", f"const `{ref.name}` is used before its value is known", ref.span)
        else:
            self.unknown(ref)
        return None

    # -- which names are states ---------------------------------------------------------------
    def find_states(self) -> None:
        """A state is what refers to its own past, straight or through bindings."""
        reads: dict[str, set[tuple[str, int]]] = {}
        for assign in self.assigns:
            found = reads.setdefault(assign.name, set())
            found.update((r.name, r.index.time) for r in _refs(assign.value) if r.index)
        for assign in self.assigns:
            name = assign.name
            if name in self.names.entries or not _reaches(name, reads):
                continue
            entry = Entry("state", shape_of(("K", "V")), assign.span, ("K", "V"))
            if self.names.declare(name, entry):
                self.states[name] = State(name, span=assign.span)
        for state in list(self.states.values())[1:]:
            first = next(iter(self.states))
            message = f"`{state.name}` is a second state beside `{first}`: not supported yet"
            self.add("E901", message, state.span)

    # -- equations ----------------------------------------------------------------------------
    def equation(self, assign: syn.Assign) -> Value | None:
        """Checks one equation and enters what it defines."""
        name, entry = assign.name, self.names.entries.get(assign.name)
        if name in RESERVED:
            self.add("E204", f"`{name}` is reserved and cannot be assigned", assign.span)
            return None
        if entry and entry.role in ("input", "param", "const"):
            message = f"`{name}` is declared as {_article(entry.role)} and cannot be assigned"
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
        value = Evaluator(self.lookup, self.mistakes)(assign.value)
        if entry and (entry.role != "state" or name in self.updated):
            hint = "give the first result a name of its own"
            self.add(
                "E205", f"`{name}_t` is assigned twice", assign.span, hint, (("first here", entry.span),)
            )
            return value
        is_state = bool(entry)
        if not is_state:
            role: Callable[..., Entry] = Entry
            kind = "output" if name == self.output else "binding"
            self.names.declare(name, role(kind, value.shape if value else None, assign.span))
        self.updated.add(name)
        if value is None:
            return None
        if is_state:
            self.update(assign, value)
        elif name == self.output:
            self.read(assign, value)
        else:
            self.values[name] = value
        if not self.mistakes.found:
            self.enter(assign, value, is_state)
        return value

    def update(self, assign: syn.Assign, value: Value) -> None:
        shape = self.names.entries[assign.name].shape
        self.linear(assign, value)
        if shape is not None and value.shape != shape:
            hint = _shape_hint(value.shape, shape, assign.name)
            message = (
                f"the state `{assign.name}` is {show_shape(shape)}, its update is {show_shape(value.shape)}"
            )
            self.add("E308", message, assign.value.span or assign.span, hint)

    def linear(self, assign: syn.Assign, value: Value) -> None:
        if not value.nonlinear:
            return
        shape = self.names.entries[assign.name].shape
        where = value.nonlinear.span or assign.span
        if shape is not None and 1 in shape:
            message = f"a nonlinear recurrence of the vector state `{assign.name}`: not supported yet"
            self.add("E908", message, where)
            return
        message = f"the update of `{assign.name}` is not linear in it: `{_crop(value.nonlinear.term)}`"
        hint = "a chunk form exists only where every term holds S_{t-1} once, outside functions"
        self.add("E405", message, where, hint.replace("S_", assign.name + "_"))

    def read(self, assign: syn.Assign, value: Value) -> None:
        if value.nonlinear:
            term = _crop(value.nonlinear.term)
            message = f"a function of what is read from the state, `{term}`, is not supported yet"
            self.add("E907", message, value.nonlinear.span or assign.span, "apply it to the output outside")
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
        if full is None:
            raise InternalError(f"{assign.name} cannot be expanded")
        if is_state:
            self.updates.append(Equation(assign.name, full.expr, assign.span))
            return
        self.expanded[assign.name] = full.expr
        if assign.name == self.output:
            self.outputs.append(Equation(assign.name, full.expr, assign.span))

    # -- names in expressions -----------------------------------------------------------------
    def substitute(self, ref: syn.Ref) -> Value | None:
        if ref.name in self.expanded:
            known = self.values.get(ref.name, Value(ex.ZERO))
            return replace(known, expr=self.expanded[ref.name], depth=1, size=1)
        return self.lookup(ref)

    def lookup(self, ref: syn.Ref) -> Value | None:
        """The symbol behind a name; None where a mistake is (or was) reported."""
        name, index = ref.name, ref.index
        if name == "I" or name in DIMENSIONS:
            if index is not None:
                self.add("E203", f"`{name}` has no time index", ref.span, f"write `{name}`")
                return None
            return Value(ex.ONE, unit=True) if name == "I" else Value(ex.Symbol(name, ex.SCALAR, None))
        entry = self.names.entries.get(name)
        if entry is None:
            self.missing(ref)
            return None
        if entry.role in ("param", "const"):
            if index is not None:
                self.add(
                    "E203", f"`{name}` is {_article(entry.role)} and has no time index", ref.span, f"write `{name}`",
                    (("declared here", entry.span),),
                )  # fmt: skip
                return None
            return None if entry.shape is None else Value(ex.Symbol(name, entry.shape, None))
        if index is None:
            self.add("E202", f"`{name}` changes with the token", ref.span, f"write `{name}_t`")
            return None
        if index.time > 0:
            self.add("E408", f"`{_show(ref)}` lies in the future", ref.span, "a recurrence reads t and t-1")
            return None
        match entry.role:
            case "input":
                return self.input_at(ref, entry, index)
            case "state":
                return self.state_at(ref, entry, index)
            case _:
                return self.binding_at(ref, entry, index)

    def input_at(self, ref: syn.Ref, entry: Entry, index: syn.Index) -> Value | None:
        if index.time < 0:
            self.add("E902", f"the shift `{_show(ref)}` is not supported yet", ref.span,
                     f"pass the shifted tensor as an input of its own, such as `{ref.name}_prev`")  # fmt: skip
            return None
        if entry.shape is None:
            return None
        if index.row is None:
            return Value(ex.Symbol(ref.name, entry.shape))
        row = self.row(ref, entry, index.row)
        if row is None:
            return None
        shape = (entry.dims[1], 1) if len(entry.dims) == 2 else ex.SCALAR
        return Value(ex.Symbol(ref.name, shape, 0, row))

    def row(self, ref: syn.Ref, entry: Entry, row: int | str) -> int | None:
        """The row counted from 0."""
        if not entry.dims or entry.dims[0] in DIMENSIONS:
            self.add("E307", f"`{ref.name}` has no rows", ref.span, f"write `{ref.name}_t`",
                     (("declared here", entry.span),))  # fmt: skip
            return None
        count = entry.dims[0]
        rows = count if isinstance(count, int) else self.names.counts[count]
        if isinstance(row, str):
            if row not in self.names.counts:
                known = {loop.variable for loop in self.loops}
                if row not in known:
                    self.add("E307", f"`{row}` is no row", ref.span, f"a number from 1 to {rows}, or a const")
                return None
            row = self.names.counts[row]
        if not 1 <= row <= rows:
            self.add("E307", f"`{ref.name}` has rows 1 to {rows}, not {row}", ref.span, None,
                     (("declared here", entry.span),))  # fmt: skip
            return None
        return row - 1

    def state_at(self, ref: syn.Ref, entry: Entry, index: syn.Index) -> Value | None:
        name = ref.name
        if index.row is not None:
            self.add("E307", f"the state `{name}` has no rows to pick", ref.span)
            return None
        if index.time < -1:
            self.add(
                "E902",
                f"`{_show(ref)}`: only one step back is supported",
                ref.span,
                f"write `{name}_{{t-1}}`",
            )
            return None
        if index.time == 0 and name not in self.updated and not self.loops:
            self.add("E401", f"`{name}_t` is used before it is defined", ref.span,
                     f"the state before the update is `{name}_{{t-1}}`")  # fmt: skip
            return None
        if entry.shape is None:
            return None
        return Value(ex.Symbol(name, entry.shape, index.time), degree=1)

    def binding_at(self, ref: syn.Ref, entry: Entry, index: syn.Index) -> Value | None:
        if index.time < 0:
            hint = "declare the shifted tensor as an input of its own"
            self.add("E902", f"the shift `{_show(ref)}` of a binding is not supported yet", ref.span, hint)
            return None
        if index.row is not None:
            self.add("E307", f"`{ref.name}` has no rows", ref.span, "only [n, K], [n, V] and [n] inputs have")
            return None
        if entry.shape is None:
            return None
        known = self.values.get(ref.name)
        symbol = ex.Symbol(ref.name, entry.shape)
        return replace(known, expr=symbol) if known else Value(symbol)

    # -- names that are not there -------------------------------------------------------------
    def missing(self, ref: syn.Ref) -> None:
        later = next((a for a in self.assigns if a.name == ref.name), None)
        if later is not None and ref.index is not None and ref.index.time == 0:
            itself = later.name not in self.values and later.span and ref.span
            message = f"`{ref.name}_t` is used before it is defined"
            hint = "move its equation up"
            if itself and later.span and ref.span and later.span.line == ref.span.line:
                hint = f"what an equation reads of its own past is `{ref.name}_{{t-1}}`"
            self.add("E402", message, ref.span, hint, (("defined here", later.span),))
            return
        if later is not None and ref.index is not None and ref.index.time < 0:
            self.add("E902", f"the shift `{_show(ref)}` of a binding is not supported yet", ref.span)
            return
        self.unknown(ref)

    def unknown(self, ref: syn.Ref) -> None:
        """E201 with the nearest name, or E209 for names run together. Silent if a line was lost."""
        known = {*self.names.entries, *(a.name for a in self.assigns)}
        apart = _split_run(ref, known | {"I"})
        if apart:
            self.add(
                "E209",
                f"`{_show(ref)}` is one name",
                ref.span,
                f"did you mean `{apart}`? A product needs a space",
            )
            return
        if ref.name in ("T", "t") or ref.name in RESERVED - {"I", "K", "V"}:
            hint = {"T": "the transpose is written after a name: `k_tᵀ`, `k_t^T` or `k_t.T`", "t": None}.get(
                ref.name, f"a function has its argument in parentheses: `{ref.name}(x_t)`"
            )
            self.add("E201", f"`{ref.name}` is reserved and has no value", ref.span, hint)
            return
        if self.lost(ref.name):
            return
        spelled = {ascii_name(k): k for k in known}
        close = spelled.get(ascii_name(ref.name)) or nearest(ref.name, sorted(known))
        if close is None:
            close = nearest(ref.name, sorted(RESERVED - {"t", "T", "inf"}))
        hint = f"did you mean `{close}`?" if close else f"declare it: `input {ref.name} : ...`"
        self.add("E201", f"unknown name `{ref.name}`", ref.span, hint)

    def lost(self, name: str) -> bool:
        """Whether a statement that could not be read may have declared the name."""
        if not self.syntax_failed:
            return False
        spans = [m.span for m in self.mistakes.found if m.span]
        lines = [s.text.split("\n")[s.line - 1] for s in spans]
        return any(name in line for line in lines)

    # -- the whole ----------------------------------------------------------------------------
    def check_complete(self) -> None:
        if self.syntax_failed or self.loops:
            return
        if not self.states:
            self.no_state()
        for state in self.states.values():
            if state.name not in self.updated:
                message = f"the state `{state.name}` is declared but never updated"
                self.add("E404", message, state.span, f"write `{state.name}_t = ...`")
        if self.output not in self.updated:
            others = [a.name for a in self.assigns if a.name not in self.states]
            hint = f"write `{self.output}_t = S_tᵀ q_t`"
            if others and self.output == "o":
                hint += f"; if `{others[-1]}_t` is the output, declare `output {others[-1]}`"
            self.add("E403", f"there is no output `{self.output}_t`", self.document.span, hint)
        elif self.output in self.states:
            self.add("E403", f"the output `{self.output}` is a state", self.states[self.output].span,
                     "give the read of the state a name of its own: `o_t = S_tᵀ q_t`")  # fmt: skip

    def no_state(self) -> None:
        present = next((a for a in self.assigns if any(
            r.name == a.name and r.index == syn.Index(0) for r in _refs(a.value))), None)  # fmt: skip
        hint = "the past of a state is written `S_{t-1}`"
        if present is not None:
            hint += f": did you mean `{present.name}_{{t-1}}` on the right?"
        self.add("E404", "there is no state: no equation refers to its own past", self.document.span, hint)


def _of(document: syn.Document, kind: type) -> list:  # type: ignore[type-arg]
    return [s for s in document.statements if isinstance(s, kind)]


def _refs(node: syn.Node) -> Iterator[syn.Ref]:
    """All names in an expression; shared nodes once."""
    todo, seen = [node], {id(node)}
    while todo:
        one = todo.pop()
        if isinstance(one, syn.Ref):
            yield one
        for child in syn.children(one):
            if id(child) not in seen:
                seen.add(id(child))
                todo.append(child)


def _reaches(name: str, reads: dict[str, set[tuple[str, int]]]) -> bool:
    """Whether the value of a name depends on its own past through names at t."""
    todo, seen = [name], {name}
    while todo:
        for other, time in reads.get(todo.pop(), ()):
            if other == name and time < 0:
                return True
            if time == 0 and other not in seen:
                seen.add(other)
                todo.append(other)
    return False


def _split_run(ref: syn.Ref, known: set[str]) -> str | None:
    """``k_t v_t`` for the word ``k_tv_t``, if every part is a known name."""
    parts = ref.name.split("_t")
    if len(parts) < 2 or not all(p in known for p in parts):
        return None
    last = _show(syn.Ref(parts[-1], ref.index))
    return " ".join([*(f"{p}_t" for p in parts[:-1]), last])


def _show(ref: syn.Ref) -> str:
    if ref.index is None:
        return ref.name
    time = "t" if ref.index.time == 0 else f"t{ref.index.time:+d}"
    if ref.index.row is not None:
        return f"{ref.name}_{{{time},{ref.index.row}}}"
    return f"{ref.name}_t" if time == "t" else f"{ref.name}_{{{time}}}"


def _shape_hint(got: Shape, wanted: Shape, name: str) -> str | None:
    if got == (wanted[1], wanted[0]):
        return f"transpose it, or declare `state {name} : [{got[0]}, {got[1]}]`"
    if 1 in got and got != ex.SCALAR:
        dim = got[0] if got[1] == 1 else got[1]
        return f"for a state that is a vector declare `state {name} : [{dim}]`"
    return None


def _article(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


def _crop(term: str) -> str:
    return term if len(term) <= 80 else term[:77] + "..."
