"""Checks declarations: names, dimensions, promises; the table of what each name is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Dim, Shape
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.mistakes import Mistakes, nearest
from linalg_dsl.language.names import DIMENSIONS, RESERVED, ascii_name
from linalg_dsl.language.printer import default_range
from linalg_dsl.language.spec import Const, Input, Interval, State, shape_of
from linalg_dsl.source import Span

MOST_ROWS = 64
SQUARES: tuple[tuple[Dim, ...], ...] = (("K", "K"), ("V", "V"), ("K", "V"))
"""Inputs with two of the state's axes."""


Role = Literal["input", "param", "const", "state", "binding", "output"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name is; ``shape`` is None where a mistake left it unknown."""

    role: Role
    shape: Shape | None
    span: Span | None
    dims: tuple[Dim, ...] = ()


class Names:
    """All names of one recurrence."""

    def __init__(self, mistakes: Mistakes) -> None:
        self.mistakes = mistakes
        self.entries: dict[str, Entry] = {}
        self.counts: dict[str, int] = {}
        """Consts whose value is a whole number: what a dimension may be."""
        self._spelled: dict[str, str] = {}

    def declare(self, name: str, entry: Entry) -> bool:
        """Adds a name; False and a mistake where it cannot be one."""
        add = self.mistakes.add
        if name in RESERVED:
            add("E204", f"`{name}` is reserved and cannot be declared", entry.span, "take another name")
            return False
        if name.endswith("_t"):
            hint = f"declare `{name[:-2]}`, and write `{name}` in the equations"
            add("E207", f"`{name}` is declared with its time index", entry.span, hint)
            return False
        before = self.entries.get(name)
        if before is not None:
            add("E205", f"`{name}` is declared twice", entry.span, None, (("first here", before.span),))
            return False
        spelling = ascii_name(name)
        other = self._spelled.get(spelling)
        if other is not None:
            add(
                "E206",
                f"`{name}` and `{other}` are both `{spelling}` in generated code",
                entry.span,
                "rename one of them",
                (("the other one", self.entries[other].span),),
            )
            return False
        self._spelled[spelling] = name
        self.entries[name] = entry
        return True

    # -- dimensions ---------------------------------------------------------------------------
    def dim(self, dim: syn.DimName) -> Dim | None:
        """K, V, a count, or the name of a const that is one."""
        name, span = dim
        if isinstance(name, int):
            if 1 <= name <= MOST_ROWS:
                return name
            self.mistakes.add("E208", f"a dimension of {name}", span, f"from 1 to {MOST_ROWS}")
            return None
        if name in DIMENSIONS or name in self.counts:
            return name
        if name in self.entries and self.entries[name].role == "const":
            message = f"`{name}` is no whole number from 1 to {MOST_ROWS}"
            self.mistakes.add(
                "E208",
                message,
                span,
                f"declare `const {name} = 2`",
                (("declared here", self.entries[name].span),),
            )
            return None
        close = nearest(name, [*DIMENSIONS, *self.counts])
        hint = f"did you mean {close}?" if close else f"K, V, a number, or a const: `const {name} = 2`"
        self.mistakes.add("E208", f"unknown dimension `{name}`", span, hint)
        return None

    def dims(self, dims: tuple[syn.DimName, ...]) -> tuple[Dim, ...] | None:
        out = [self.dim(d) for d in dims]
        return None if None in out else tuple(d for d in out if d is not None)

    # -- inputs and params --------------------------------------------------------------------
    def input(self, declared: syn.InputDecl) -> Input | None:
        """The input, entered into the table; None (entered without a shape) after a mistake."""
        before = len(self.mistakes.found)
        dims = self.dims(declared.dims)
        if dims is not None:
            self._check_kind(declared, dims)
            self._check_promises(declared, dims)
        sound = dims is not None and len(self.mistakes.found) == before
        out = None
        if dims is not None and sound:
            promised = declared.range or default_range(declared.kind)
            out = Input(
                declared.name, dims, declared.kind, promised, declared.unit, declared.timed, declared.span
            )
        role: Role = "input" if declared.timed else "param"
        entry = Entry(role, out.shape if out else None, declared.span, dims or ())
        return out if self.declare(declared.name, entry) else None

    def _check_kind(self, declared: syn.InputDecl, dims: tuple[Dim, ...]) -> None:
        counted = [d not in DIMENSIONS for d in dims]
        span = _first_span(declared)
        what = f"[{', '.join(map(str, dims))}]"
        if len(dims) == 2 and counted == [False, True]:
            hint = f"rows come first: [{dims[1]}, {dims[0]}]"
            self.mistakes.add("E208", f"an input of shape {what}", span, hint)
            return
        if declared.kind == "plain":
            allowed = len(dims) < 2 or (len(dims) == 2 and counted == [True, False]) or dims in SQUARES
        else:
            allowed = len(dims) < 2 or dims == ("K", "V")
        if not allowed:
            word = {"plain": "", "log_gate": "log gate ", "gate": "gate "}[declared.kind]
            keyword = "input" if declared.timed else "param"
            hint = "a gate is a scalar, [K], [V], [n] or [K, V]"
            if declared.kind == "plain":
                hint = "an input is a scalar, [K], [V], [n], [n, K], [n, V], [K, K], [V, V] or [K, V]"
            if dims == ("V", "K"):
                hint = f"declare [K, V], and write `{declared.name}_tᵀ` for the transpose"
            self.mistakes.add(
                "E208", f"`{keyword} {declared.name} : {word}{what}` has no such shape", span, hint
            )

    def _check_promises(self, declared: syn.InputDecl, dims: tuple[Dim, ...]) -> None:
        add = self.mistakes.add
        vector = bool(dims) and dims[-1] in DIMENSIONS
        if declared.unit and (not vector or declared.kind != "plain"):
            message = f"`unit` is a promise of vectors, and `{declared.name}` is none"
            add("E502", message, declared.unit_span, "for numbers write a range, such as `in [-1, 1]`")
        promised = declared.range
        if promised is None:
            return
        if _is_empty(promised):
            add("E501", "this range holds no number", declared.range_span)

    # -- states -------------------------------------------------------------------------------
    def state(self, declared: syn.StateDecl) -> State | None:
        """The state, entered into the table; without ``dims`` where they are left to its update."""
        dims = None if declared.dims is None else self.dims(declared.dims)
        unknown = declared.dims is not None and dims is None
        if dims is not None and len(dims) > 2:
            span = declared.dims[2][1] if declared.dims else declared.span
            self.mistakes.add("E208", "a state has at most two dimensions", span)
            dims, unknown = None, True
        shape = None if dims is None else shape_of(dims)
        if not self.declare(declared.name, Entry("state", shape, declared.span, dims or ())):
            return None
        return None if unknown else State(declared.name, dims or (), declared.start, declared.span)


def const_entry(const: Const) -> Entry:
    return Entry("const", ex.SCALAR, const.span)


def _first_span(declared: syn.InputDecl) -> Span | None:
    spans = [s for _, s in declared.dims if s]
    return spans[0].cover(spans[-1]) if spans else declared.span


def _is_empty(promised: Interval) -> bool:
    low, high = promised.low, promised.high
    if low == float("inf") or high == float("-inf"):
        return True
    if low is None or high is None:
        return False
    return low > high or (low == high and (promised.low_open or promised.high_open))
