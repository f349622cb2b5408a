"""``RecurrenceSpec``: what a user declared, checked, with names and shapes resolved."""

from __future__ import annotations

from dataclasses import dataclass, field

from linalg_dsl.algebra.expr import Dim, Expr, Number, Shape
from linalg_dsl.algebra.traverse import scalars_first, symbols
from linalg_dsl.errors import InternalError
from linalg_dsl.source import Span


@dataclass(frozen=True, slots=True)
class Interval:
    """A promised range of every element; ``None`` is unbounded; open ends exclude the bound."""

    low: float | None = None
    high: float | None = None
    low_open: bool = True
    high_open: bool = True


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor per token (``timed``) or per head (a param).

    ``dims`` as declared: () scalar, ("K",), ("n", "K"), ("n",) ...; ``kind`` is ``"plain"``,
    ``"log_gate"`` (natural log) or ``"gate"`` (linear space). ``range`` is the promised range: a log
    gate without one has (-inf, 0], a gate (0, 1]. ``unit`` promises a Euclidean norm of at most 1.
    """

    name: str
    dims: tuple[Dim, ...]
    kind: str = "plain"
    range: Interval = Interval()
    unit: bool = False
    timed: bool = True
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def shape(self) -> Shape:
        """As a matrix: a vector is a column, [n, D] has n rows."""
        return shape_of(self.dims)


def shape_of(dims: tuple[Dim, ...]) -> Shape:
    """Of at most two dimensions as a matrix: a vector is a column, a scalar 1 x 1."""
    match dims:
        case ():
            return (1, 1)
        case (d,):
            return (d, 1)
        case (n, d):
            return (n, d)
    raise InternalError(f"a tensor with the axes {dims}")


@dataclass(frozen=True, slots=True)
class Const:
    """A number fixed at compile time; ``value`` may use K, V, T-free arithmetic and other consts."""

    name: str
    value: Expr
    span: Span | None = field(default=None, compare=False, repr=False)
    number: float | None = field(default=None, init=False, compare=False, repr=False)
    """What ``value`` is, where it is a number as written: a float, as torch.compile traces no fraction."""

    def __post_init__(self) -> None:
        if isinstance(self.value, Number):
            object.__setattr__(self, "number", float(self.value.value))


@dataclass(frozen=True, slots=True)
class State:
    """A carried tensor: shape as declared, (K, V) by default; ``start`` is its value before t = 1."""

    name: str
    dims: tuple[Dim, ...] = ("K", "V")
    start: float = 0.0
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def shape(self) -> Shape:
        """As a matrix: a vector is a column."""
        return shape_of(self.dims)


@dataclass(frozen=True, slots=True)
class Equation:
    """``target_t = value``: a binding, the update of a state, or the output."""

    target: str
    value: Expr
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceSpec:
    """The recurrence a user wrote.

    ``inputs`` holds inputs and params in declaration order: the order of a call. ``updates`` (one per
    state, in the order of ``states``) and ``outputs`` have every binding substituted, so the same
    recurrence written with and without bindings is equal; ``written`` keeps the equations as the user
    wrote them, in order, for printing and for the derivation.

    ``Symbol(state, time=-1)`` is a state before the token, ``time=0`` after it. An update may use the past
    of every state and the present of others, but never, straight or through others, its own. A timed
    input with ``time=-1`` is its value at the token before (a shift).

    Specs are equal up to the places of scalars in products: a binding that holds one may bring it to
    another place than the same line without the binding.
    """

    name: str
    inputs: tuple[Input, ...]
    consts: tuple[Const, ...]
    states: tuple[State, ...]
    updates: tuple[Equation, ...]
    outputs: tuple[Equation, ...]
    written: tuple[Equation, ...] = field(default=(), compare=False)
    doc: str = field(default="", compare=False)
    _shifted: tuple[Input, ...] | None = field(default=None, init=False, repr=False, compare=False)
    """``shifted``, once it has been asked for: every call of an op does."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecurrenceSpec) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        equations = [(e.target, scalars_first(e.value)) for e in (*self.updates, *self.outputs)]
        return (self.name, self.inputs, self.consts, self.states, tuple(equations))

    def input(self, name: str) -> Input:
        return next(i for i in self.inputs if i.name == name)

    @property
    def shifted(self) -> tuple[Input, ...]:
        """The inputs that some equation takes from the token before, in declaration order."""
        if self._shifted is None:
            used = (s for e in (*self.updates, *self.outputs) for s in symbols(e.value))
            names = {s.name for s in used if s.time == -1}
            object.__setattr__(self, "_shifted", tuple(i for i in self.inputs if i.name in names))
        return self._shifted or ()

    @property
    def carried(self) -> tuple[str, ...]:
        """What a sequence hands on: the states, and ``<name>_prev`` for every shifted input."""
        return (*(s.name for s in self.states), *(f"{i.name}_prev" for i in self.shifted))

    def _repr_html_(self) -> str:
        """The equations as MathML, for a notebook."""
        from linalg_dsl.language.mathml import to_mathml

        rows = "".join(f"<div>{to_mathml(line)}</div>" for line in self._lines())
        return f"<div><strong>{self.name}</strong>{rows}</div>"

    def _repr_latex_(self) -> str:
        """The equations as LaTeX, for a notebook."""
        from linalg_dsl.language.latex import to_latex

        rows = " \\\\\n".join(to_latex(line).replace("=", "&=", 1) for line in self._lines())
        return f"\\begin{{align*}}\n{rows}\n\\end{{align*}}"

    def _lines(self) -> list[str]:
        from linalg_dsl.language.printer import show_expr  # printer imports this module

        written = self.written or (*self.updates, *self.outputs)
        return [f"{e.target}_t = {show_expr(e.value)}" for e in written]

    def __str__(self) -> str:
        """The text that ``parse`` reads back to an equal spec."""
        from linalg_dsl.language.printer import show_spec  # printer imports this module

        return show_spec(self)
