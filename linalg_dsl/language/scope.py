"""What a name in an equation stands for, and what to say where it stands for nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from linalg_dsl.algebra import expr as ex
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.declarations import Entry, Names
from linalg_dsl.language.mistakes import MOST_NAMES, Mistakes, nearest
from linalg_dsl.language.names import DIMENSIONS, RESERVED, ascii_name
from linalg_dsl.language.values import Value
from linalg_dsl.source import Span


@dataclass(frozen=True, slots=True)
class Running:
    """The loop around the equation in hand: its index, the state it updates, its declared count."""

    index: str
    state: str
    count: int


@dataclass(slots=True)
class Scope:
    """The names that the equation in hand may use, and how."""

    names: Names
    mistakes: Mistakes
    assigns: list[syn.Assign]
    loops: list[syn.Loop]
    lost_lines: tuple[str, ...]
    values: dict[str, Value] = field(default_factory=dict)
    """Bindings above the equation in hand, with what is known of their expansion."""
    target: str = ""
    """What the equation in hand defines."""
    running: Running | None = None
    ended: set[str] = field(default_factory=set)
    """Bindings of loops that lie above."""
    updated: set[str] = field(default_factory=set)
    """States and other names whose equations stand above."""
    _present: dict[str, set[str]] = field(default_factory=dict)
    """What every equation reads at t; filled when it is first asked for."""

    def add(
        self,
        code: str,
        message: str,
        span: Span | None,
        hint: str | None = None,
        related: tuple[tuple[str, Span | None], ...] = (),
    ) -> None:
        self.mistakes.add(code, message, span, hint, related)

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
            if index is not None and (index.time is not None or entry.role == "const"):
                self.without_time(ref, entry)
                return None
            return self.param_at(ref, entry, None if index is None else index.row)
        if index is None:
            self.add("E202", f"`{name}` changes with the token", ref.span, f"write `{name}_t`")
            return None
        if index.time is None:
            hint = f"write `{name}_t` or `{name}_{{t-1}}`"
            if entry.role == "input" and entry.dims and entry.dims[0] not in DIMENSIONS:
                hint = f"a row of an input has its time, too: `{name}_{{t,{index.row}}}`"
            self.add("E103", f"`{index.row}` is not an index of `{name}`", ref.span, hint)
            return None
        if index.time > 0:
            self.add(
                "E408", f"`{show_ref(ref)}` lies in the future", ref.span, "a recurrence reads t and t-1"
            )
            return None
        match entry.role:
            case "input":
                return self.input_at(ref, entry, index)
            case "state":
                return self.state_at(ref, entry, index)
            case _:
                return self.binding_at(ref, entry, index)

    def without_time(self, ref: syn.Ref, entry: Entry) -> None:
        """A mistake: a param or const with a time index."""
        row = ref.index.row if ref.index is not None and entry.role == "param" else None
        message = f"`{ref.name}` is {article(entry.role)} and has no time index"
        hint = f"write `{ref.name}`" if row is None else f"write `{ref.name}_{{{row}}}` for its row"
        self.add("E203", message, ref.span, hint, (("declared here", entry.span),))

    def param_at(self, ref: syn.Ref, entry: Entry, row: int | str | None) -> Value | None:
        """A param or const, or a row of a param."""
        if entry.shape is None:
            return None
        if row is None:
            return Value(ex.Symbol(ref.name, entry.shape, None))
        return self.row_of(ref, entry, row, None)

    def input_at(self, ref: syn.Ref, entry: Entry, index: syn.Index) -> Value | None:
        time = index.time or 0
        if time < -1:
            self.too_far(ref)
            return None
        if entry.shape is None:
            return None
        if index.row is None:
            return Value(ex.Symbol(ref.name, entry.shape, time), is_shifted=time < 0)
        found = self.row_of(ref, entry, index.row, time)
        return None if found is None else replace(found, is_shifted=time < 0)

    def row_of(self, ref: syn.Ref, entry: Entry, wanted: int | str, time: int | None) -> Value | None:
        """A row of an input at a time, or of a param."""
        row = self.row(ref, entry, wanted)
        if row is None:
            return None
        shape = (entry.dims[1], 1) if len(entry.dims) == 2 else ex.SCALAR
        return Value(ex.Symbol(ref.name, shape, time, row))

    def too_far(self, ref: syn.Ref) -> None:
        hint = f"write `{ref.name}_{{t-1}}`, or pass the shifted tensor as an input of its own"
        self.add("E902", f"`{show_ref(ref)}`: only one step back is supported", ref.span, hint)

    def row(self, ref: syn.Ref, entry: Entry, row: int | str) -> int | str | None:
        """The row counted from 0, or the index of the loop around."""
        if not entry.dims or entry.dims[0] in DIMENSIONS:
            whole = ref.name if entry.role == "param" else f"{ref.name}_t"
            self.add("E307", f"`{ref.name}` has no rows", ref.span, f"write `{whole}`",
                     (("declared here", entry.span),))  # fmt: skip
            return None
        count = entry.dims[0]
        rows = count if isinstance(count, int) else self.names.counts[count]
        if isinstance(row, str):
            if self.running and row == self.running.index:
                if self.running.count <= rows:
                    return syn.INDEX
                message = f"the loop has {self.running.count} substeps, `{ref.name}` {rows} rows"
                self.add("E307", message, ref.span, None, (("declared here", entry.span),))
                return None
            if row not in self.names.counts:
                if any(m.code == "E903" for m in self.mistakes.found):
                    return None  # the index of a loop that is refused
                hint = f"a number from 1 to {rows}, a const, or the index of the loop around"
                self.add("E307", f"`{row}` is no row", ref.span, hint)
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
        time = index.time or 0
        if time < -1:
            self.add("E902", f"`{show_ref(ref)}`: only one step back is supported", ref.span,
                     f"write `{name}_{{t-1}}`")  # fmt: skip
            return None
        is_running = self.running is not None and self.running.state == name
        if time == 0 and name not in self.updated and not is_running:
            if self.lost(name):
                return None
            hint = self.order_hint(name)
            if ref.span and re.match(r"\s?[-\u2212]\s?1\b", ref.span.text[ref.span.end :]):
                hint = f"an index of several signs stands in braces: `{name}_{{t-1}}`"
            self.add("E401", f"`{name}_t` is used before it is defined", ref.span, hint)
            return None
        if entry.shape is None:
            return None
        return Value(ex.Symbol(name, entry.shape, time), states=frozenset({name}))

    def order_hint(self, name: str) -> str:
        """What to do about a state's present that is not known in the equation in hand."""
        here = self.target
        if self.mistakes.full:
            return ""
        if any(name == a.name for loop in self.loops for a in loop.body) and here != name:
            return f"`{name}_t` is known below its loop"
        if here == name or all(a.name != name for a in self.assigns):
            return f"the state before the update is `{name}_{{t-1}}`"
        if here in self.needed_by(name):
            return (
                f"`{name}_t` needs `{here}_t` itself: one of the two takes the other's past, "
                f"as in `{name}_{{t-1}}`"
            )
        return f"move the equation of `{name}_t` up, or read its past, `{name}_{{t-1}}`"

    def needed_by(self, name: str) -> set[str]:
        """The names whose present that of a name needs, straight or through others."""
        if not self._present:
            for assign in self.assigns:
                present = {r.name for r in syn.refs(assign.value) if r.index and r.index.time == 0}
                self._present.setdefault(assign.name, set()).update(present)
        todo, seen = [name], set[str]()
        while todo:
            for other in self._present.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen

    def binding_at(self, ref: syn.Ref, entry: Entry, index: syn.Index) -> Value | None:
        if ref.name in self.ended:
            message = f"`{ref.name}_t` is defined inside a loop and ends with it"
            self.add("E402", message, ref.span, None, (("defined here", entry.span),))
            return None
        if index.row is not None:
            self.add("E307", f"`{ref.name}` has no rows", ref.span, "only [n, K], [n, V] and [n] inputs have")
            return None
        if entry.shape is None:
            return None
        known, time = self.values.get(ref.name), index.time or 0
        symbol = ex.Symbol(ref.name, entry.shape, time)
        if time < 0 and not self.may_be_shifted(ref, known):
            return None
        return replace(known, expr=symbol, is_shifted=time < 0) if known else Value(symbol)

    def may_be_shifted(self, ref: syn.Ref, known: Value | None) -> bool:
        """Whether ``x_{t-1}`` of a binding is made of inputs at t - 1 alone."""
        if ref.index is not None and (ref.index.time or 0) < -1:
            self.too_far(ref)
            return False
        if known is None:
            if not self.mistakes.found:
                self.add("E902", f"the output `{show_ref(ref)}` cannot be shifted", ref.span)
            return False
        if known.states:
            message = f"`{show_ref(ref)}` is a shift of what depends on the state `{min(known.states)}`"
            hint = f"to carry it to the next token, declare it: `state {ref.name}`"
            self.add("E902", message, ref.span, hint)
            return False
        if known.is_shifted:
            self.add("E902", f"`{show_ref(ref)}` shifts what is shifted already", ref.span,
                     "a recurrence reads t and t-1")  # fmt: skip
            return False
        return True

    # -- names that are not there -------------------------------------------------------------
    def missing(self, ref: syn.Ref) -> None:
        later = next((a for a in self.assigns if a.name == ref.name), None)
        if later is not None and ref.index is not None and (ref.index.time or 0) <= 0:
            message = f"`{ref.name}_t` is used before it is defined"
            hint = "move its equation up"
            self.add("E402", message, ref.span, hint, (("defined here", later.span),))
            return
        self.unknown(ref)

    def unknown(self, ref: syn.Ref) -> None:
        """E201 with the nearest name, or E209 for names run together. Silent if a line was lost."""
        if self.mistakes.full:
            return
        known = {*self.names.entries, *(a.name for a in self.assigns)}
        apart = _split_run(ref, known | {"I"})
        if apart:
            self.add(
                "E209",
                f"`{show_ref(ref)}` is one name",
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
        if row := self._row_meant(ref):
            self.add("E201", f"unknown name `{ref.name}`", ref.span, f"did you mean the row `{row}`?")
            return
        spelled = {ascii_name(k): k for k in sorted(known)[:MOST_NAMES]}
        close = spelled.get(ascii_name(ref.name)) or nearest(ref.name, sorted(known))
        if close is None:
            close = nearest(ref.name, sorted(RESERVED - {"t", "T", "inf"}))
        hint = (
            f"did you mean `{close}`?"
            if close
            else f"declare it, `input {ref.name} : ...`, or give `{ref.name}_t = ...`"
        )
        self.add("E201", f"unknown name `{ref.name}`", ref.span, hint)

    def _row_meant(self, ref: syn.Ref) -> str | None:
        """``U_{1}`` for ``U_1``, ``k_{t,1}`` for ``k_1_t``, if that has rows."""
        word, _, number = ref.name.rpartition("_")
        entry = self.names.entries.get(word)
        if entry is None or not number.isdigit() or not entry.dims or entry.dims[0] in DIMENSIONS:
            return None
        return f"{word}_{{{number}}}" if entry.role == "param" else f"{word}_{{t,{number}}}"

    def lost(self, name: str) -> bool:
        """Whether a statement that could not be read may have declared or defined the name."""
        word = rf"(?<!\w){re.escape(name)}(?=_t\b|_[{{<]|\[|(?!\w))"
        return any(
            re.search(word, line) if _declares(line) else re.match(r"\s*" + word, line)
            for line in self.lost_lines
        )

    def lost_equation(self) -> bool:
        """Whether an equation could not be read."""
        return any(not _declares(line) for line in self.lost_lines)


def lost_lines(mistakes: Mistakes) -> tuple[str, ...]:
    """The lines with mistakes, asked after parsing: those that could not be read."""
    spans = [m.span for m in mistakes.found if m.span]
    return tuple(s.text.split("\n")[s.line - 1] for s in spans)


def _declares(line: str) -> bool:
    return bool(re.match(r"\s*[^\W\d_]+\s+[^\W\d_]", line)) and ("=" not in line or "const" in line)


def _split_run(ref: syn.Ref, known: set[str]) -> str | None:
    """``k_t v_t`` for the word ``k_tv_t``, if every part is a known name."""
    parts = ref.name.split("_t")
    if len(parts) < 2 or not all(p in known for p in parts):
        return None
    last = show_ref(syn.Ref(parts[-1], ref.index))
    return " ".join([*(f"{p}_t" for p in parts[:-1]), last])


def show_ref(ref: syn.Ref) -> str:
    if ref.index is None:
        return ref.name
    if ref.index.time is None:
        return f"{ref.name}_{{{ref.index.row}}}"
    time = "t" if ref.index.time == 0 else f"t{ref.index.time:+d}"
    if ref.index.row is not None:
        return f"{ref.name}_{{{time},{ref.index.row}}}"
    return f"{ref.name}_t" if time == "t" else f"{ref.name}_{{{time}}}"


def article(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"
