"""Checks the equations of a recurrence one by one, from top to bottom, and enters what they define.

Each is evaluated twice. As written, with bindings as symbols, which finds all mistakes and gives
``spec.written``; then with bindings substituted, which gives ``updates`` and ``outputs``. A state with
substeps comes together in pieces: the line before its loops, if there is one, then every loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Expr, Shape, show_shape
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.declarations import Entry, Names, Role
from linalg_dsl.language.mistakes import Mistakes
from linalg_dsl.language.names import LONGEST, RESERVED, is_name
from linalg_dsl.language.scope import Running, Scope, article
from linalg_dsl.language.shifts import shifted
from linalg_dsl.language.spec import Equation
from linalg_dsl.language.terms import Evaluator
from linalg_dsl.language.values import Value, join
from linalg_dsl.source import Span


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a state is so far within the token: as written, and with bindings substituted."""

    value: Value
    full: Expr | None
    span: Span | None


class Equations:
    """Reads the statements in order; results lie in ``written``, ``updates``, ``outputs``."""

    def __init__(self, names: Names, scope: Scope, mistakes: Mistakes, output: str) -> None:
        self.names = names
        self.scope = scope
        self.mistakes = mistakes
        self.output = output
        self.changes: dict[str, tuple[Value, Span | None]] = {}
        """The whole update of every state, with its place."""
        self.expanded: dict[str, Expr] = {}
        self.pieces: dict[str, _Piece] = {}
        self.loops_left = Counter(n for loop in scope.loops for n in {a.name for a in loop.body})
        self.written: list[Equation] = []
        self.updates: list[Equation] = []
        self.outputs: list[Equation] = []

    def read(self, step: syn.Assign | syn.Loop) -> int:
        """Reads one statement; returns how many terms it expands to."""
        if isinstance(step, syn.Loop):
            return self.loop(step)
        value = self.equation(step)
        return value.size if value else 0

    # -- one equation -------------------------------------------------------------------------
    def equation(self, assign: syn.Assign) -> Value | None:
        """Checks one equation and enters what it defines."""
        name, entry = assign.name, self.names.entries.get(assign.name)
        if not self.may_be_assigned(assign):
            return None
        self.scope.target = name
        value = Evaluator(self.scope.lookup, self.mistakes)(assign.value)
        if entry and (entry.role != "state" or name in self.scope.updated or name in self.pieces):
            self.assigned_twice(assign, entry)
            return value
        if entry:
            self.start_or_update(assign, value)
            return value
        role: Role = "output" if name == self.output else "binding"
        self.names.declare(name, Entry(role, value.shape if value else None, assign.span))
        self.scope.updated.add(name)
        if value is None:
            return None
        if name == self.output:
            self.check_output(assign, value)
        else:
            self.scope.values[name] = value
        if not self.mistakes.found:
            self.written.append(Equation(name, value.expr, assign.span))
            self.expand(assign)
        return value

    def may_be_assigned(self, assign: syn.Assign) -> bool:
        name, entry = assign.name, self.names.entries.get(assign.name)
        if name in RESERVED:
            self.mistakes.add("E204", f"`{name}` is reserved and cannot be assigned", assign.span)
            return False
        if entry and entry.role in ("input", "param", "const"):
            message = f"`{name}` is declared as {article(entry.role)} and cannot be assigned"
            hint = "give the result a name of its own"
            self.mistakes.add("E406", message, assign.span, hint, (("declared here", entry.span),))
            return False
        if assign.index != syn.Index(0):
            message = f"an equation gives `{name}_t`"
            self.mistakes.add("E407", message, assign.span, f"write `{name}_t = ...`")
        return True

    def assigned_twice(self, assign: syn.Assign, entry: Entry) -> None:
        hint = "give the first result a name of its own"
        first = (("first here", entry.span),)
        self.mistakes.add("E205", f"`{assign.name}_t` is assigned twice", assign.span, hint, first)

    def check_output(self, assign: syn.Assign, value: Value) -> None:
        rows, cols = value.shape
        if cols != 1 or value.unit:
            hint = f"write the column: `{assign.name}_t = S_tᵀ q_t`" if rows == 1 else None
            message = f"the output is a column, not {show_shape(value.shape)}"
            self.mistakes.add("E308", message, assign.value.span, hint)

    def expand(self, assign: syn.Assign) -> None:
        """A binding or the output, with bindings substituted."""
        full = Evaluator(self.substitute, self.mistakes)(assign.value)
        if full is None:  # numbers behind bindings: division by zero, out of bounds
            return
        self.expanded[assign.name] = full.expr
        if assign.name == self.output:
            self.outputs.append(Equation(assign.name, full.expr, assign.span))

    def substitute(self, ref: syn.Ref) -> Value | None:
        if ref.name in self.expanded and ref.index is not None:
            known = self.scope.values.get(ref.name, Value(ex.ZERO))
            expr = self.expanded[ref.name]
            if (ref.index.time or 0) < 0:
                expr = shifted(expr)
            return replace(known, expr=expr, depth=1, size=1)
        return self.scope.lookup(ref)

    # -- states -------------------------------------------------------------------------------
    def start_or_update(self, assign: syn.Assign, value: Value | None) -> None:
        """The update of a state, or what it is before its substeps."""
        name = assign.name
        if value is None:
            if not self.loops_left[name]:
                self.scope.updated.add(name)
            return
        self.check_shape(assign, value)
        full = None
        if not self.mistakes.found:
            found = Evaluator(self.substitute, self.mistakes)(assign.value)
            full = found.expr if found else None
        self.piece(name, _Piece(value, full, assign.span))

    def piece(self, name: str, piece: _Piece) -> None:
        """Keeps what a state is so far; enters its update where nothing is left to come."""
        self.pieces[name] = piece
        if self.loops_left[name]:
            return
        self.scope.updated.add(name)
        self.changes[name] = (piece.value, piece.span)
        if piece.full is not None:
            self.written.append(Equation(name, piece.value.expr, piece.span))
            self.updates.append(Equation(name, piece.full, piece.span))

    def check_shape(self, assign: syn.Assign, value: Value) -> None:
        shape = self.names.entries[assign.name].shape
        if shape is not None and value.shape != shape:
            hint = _shape_hint(value.shape, shape, assign.name)
            message = (
                f"the state `{assign.name}` is {show_shape(shape)}, its update is {show_shape(value.shape)}"
            )
            self.mistakes.add("E308", message, assign.value.span or assign.span, hint)

    # -- substeps -----------------------------------------------------------------------------
    def loop(self, loop: syn.Loop) -> int:
        """The substeps of one state; bindings may stand above its equation."""
        count = self.loop_head(loop)
        target = self.loop_target(loop)
        if target is None:
            self.scope.updated.update(a.name for a in loop.body)
            return 0
        name, shape = target.name, self.names.entries[target.name].shape
        self.loops_left[name] -= 1
        if name in self.scope.updated:
            self.assigned_twice(target, self.names.entries[name])
            return 0
        before = self.pieces.get(name)
        self.scope.running = Running(loop.variable, name, count or 0)
        local: dict[str, Expr] = {}
        for assign in loop.body[:-1]:
            self.local_binding(assign, local)
        self.scope.target = name
        value = Evaluator(self.scope.lookup, self.mistakes)(target.value)
        found = None
        if value is not None and shape is not None:
            self.check_shape(target, value)
            if count and not self.mistakes.found and value.shape == shape:
                found = self.iterate(loop, target, value, before or _past(name, shape), local)
            size = value.size + (before.value.size if before else 1)
        else:
            size = 0
        self.end_loop(loop)
        if found is not None:
            self.piece(name, found)
        elif not self.loops_left[name]:
            self.scope.updated.add(name)
            if value is not None:
                parts = [value, before.value] if before else [value]
                self.changes[name] = (join(value.expr, parts), target.span)
        return size

    def iterate(
        self,
        loop: syn.Loop,
        target: syn.Assign,
        value: Value,
        before: _Piece | None,
        local: Mapping[str, Expr],
    ) -> _Piece | None:
        """The state after the loop, as written (with bindings of the loop substituted) and in full."""
        name, shape = target.name, value.shape
        start = before or _past(name, shape)
        written = self.evaluator_within(local)(target.value)
        full = Evaluator(self.substitute, self.mistakes)(target.value)
        if written is None or full is None or start.full is None:
            return None
        number: Expr = (
            ex.number(loop.high) if isinstance(loop.high, int) else ex.Symbol(loop.high, ex.SCALAR, None)
        )
        made = ex.iterate(name, syn.INDEX, number, start.value.expr, written.expr)
        whole = ex.iterate(name, syn.INDEX, number, start.full, full.expr)
        joined = join(ex.with_span(made, target.value.span), [start.value, value])
        return _Piece(joined, ex.with_span(whole, target.value.span), start.span or target.span)

    def local_binding(self, assign: syn.Assign, local: dict[str, Expr]) -> None:
        """A name for a part of a substep: it ends with the loop."""
        name = assign.name
        entry = self.names.entries.get(name)
        if not self.may_be_assigned(assign):
            return
        self.scope.target = name
        value = Evaluator(self.scope.lookup, self.mistakes)(assign.value)
        if entry or name == self.output:
            self.assigned_twice(assign, entry or Entry("output", None, None))
            return
        self.names.declare(name, Entry("binding", value.shape if value else None, assign.span))
        if value is None:
            return
        self.scope.values[name] = value
        if self.mistakes.found:
            return
        written = self.evaluator_within(local)(assign.value)
        self.expand(assign)
        if written is not None:
            local[name] = written.expr

    def evaluator_within(self, local: Mapping[str, Expr]) -> Evaluator:
        """Substitutes the bindings of a loop, and leaves all others as symbols."""

        def lookup(ref: syn.Ref) -> Value | None:
            found = self.scope.lookup(ref)
            if found is None or ref.name not in local:
                return found
            return replace(found, expr=local[ref.name], depth=1, size=1)

        return Evaluator(lookup, self.mistakes)

    def end_loop(self, loop: syn.Loop) -> None:
        self.scope.running = None
        for assign in loop.body[:-1]:
            self.scope.ended.add(assign.name)

    def loop_head(self, loop: syn.Loop) -> int | None:
        """Checks ``for j in 1..n:``; the declared number of substeps."""
        add, name = self.mistakes.add, loop.variable
        if name in RESERVED or not is_name(name):
            add(
                "E204",
                f"`{name}` cannot be the index of a loop",
                loop.span,
                f"a name of at most {LONGEST} letters",
            )
        elif name in self.names.entries:
            place = (("declared here", self.names.entries[name].span),)
            add(
                "E205",
                f"the index `{name}` has the name of something else",
                loop.span,
                "take another one",
                place,
            )
        if loop.low != 1:
            add(
                "E903",
                f"substeps are counted from 1, not from {loop.low}",
                loop.span,
                f"write `for {name} in 1..n:`",
            )
        high = loop.high
        if isinstance(high, str):
            if high in self.names.counts:
                return self.names.counts[high]
            add(
                "E208",
                f"`{high}` is no number of substeps",
                loop.span,
                f"a number, or a const: `const {high} = 2`",
            )
            return None
        if not 1 <= high <= 64:
            add("E208", f"a loop of {high} substeps", loop.span, "from 1 to 64")
            return None
        return high

    def loop_target(self, loop: syn.Loop) -> syn.Assign | None:
        """The equation of the state that a loop updates: the last one of its body."""
        hint = "a loop has an indented body, whose last line is the substep of one state: `S_t = ...`"
        is_state = [self._is_state(a) for a in loop.body]
        if self.scope.lost_equation() and not (is_state and is_state[-1]):
            pass  # what could not be read may have been in it
        elif not loop.body:
            if all(m.span != loop.span for m in self.mistakes.found):  # else its head is at fault
                self.mistakes.add("E903", "a loop without substeps", loop.span, hint)
        elif not is_state[-1]:
            self.mistakes.add("E903", "this loop updates no state in its last line", loop.body[-1].span, hint)
        elif any(is_state[:-1]):
            place = loop.body[is_state.index(True)].span
            self.mistakes.add("E903", "a loop updates one state", place, hint)
        elif self.may_be_assigned(loop.body[-1]):
            return loop.body[-1]
        return None

    def _is_state(self, assign: syn.Assign) -> bool:
        entry = self.names.entries.get(assign.name)
        return entry is not None and entry.role == "state"


def _past(name: str, shape: Shape) -> _Piece:
    """A state at t - 1: where its first loop begins if no line stands before."""
    expr = ex.Symbol(name, shape, -1)
    return _Piece(Value(expr, states=frozenset({name})), expr, None)


def _shape_hint(got: Shape, wanted: Shape, name: str) -> str | None:
    if got == (wanted[1], wanted[0]):
        return f"transpose it, or declare `state {name} : [{got[0]}, {got[1]}]`"
    if 1 in got and got != ex.SCALAR:
        dim = got[0] if got[1] == 1 else got[1]
        return f"for a state that is a vector declare `state {name} : [{dim}]`"
    return None
