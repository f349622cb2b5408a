"""Stages whose one state has not the axes [K, V], as stages that have: chunk forms know no others.

A state [K, K] is one of [K, V] whose V is as long as K: every vector that acts along its second axis is named
a second time, along V. A vector state that a product contracts (``n_tᵀ q_t``, ``w_tᵀ d_{t-1}``) is a matrix
with one column: V is an axis of length 1, and a vector that holds a one stands where the state is written or
read as it is. A vector state whose elements never meet stays what it is: token after token costs it no more
than its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from linalg_dsl.algebra.expr import (
    Call,
    Diag,
    Dim,
    Expr,
    Hadamard,
    Identity,
    Iterate,
    Product,
    Quotient,
    Sum,
    Symbol,
    Transpose,
    add,
    diag,
    divide,
    hadamard,
    mul,
    number,
    power,
    transpose,
)
from linalg_dsl.algebra.rules import BIG_DIMS, split_inner_products
from linalg_dsl.algebra.traverse import mentions, rebuild, symbols
from linalg_dsl.errors import DslError
from linalg_dsl.language.spec import Equation, Input, RecurrenceSpec
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.ops import OTHER
from linalg_dsl.planner.stages import ONES, Stage, single


def with_two_axes(stage: Stage) -> Stage:
    """The stage on a state [K, V] where that gives it a chunk form; else the stage as it is."""
    spec = stage.spec
    if len(spec.states) != 1 or spec.states[0].dims in (("K", "V"), ("V", "K")):
        return stage
    try:
        made = _made(stage)
        canonicalise(made.spec)
    except (_NoSuchForm, DslError):
        return stage
    return made


def obstacles(spec: RecurrenceSpec) -> tuple[str, ...]:
    """Why a recurrence whose one state is not [K, V] has no chunk form; empty where it has one."""
    try:
        canonicalise(_made(single(spec).stages[0]).spec)
    except _NoSuchForm as reason:
        return (str(reason),)
    except DslError as missing:
        return tuple(m.message for m in missing.mistakes)
    return ()


def _made(stage: Stage) -> Stage:
    spec = stage.spec
    name, dims = spec.states[0].name, spec.states[0].dims
    if not dims:
        raise _NoSuchForm(f"the state {name} is one number per head: there is no product to make of chunks")
    if any(d not in BIG_DIMS for d in dims):
        raise _NoSuchForm(f"the state {name} has an axis of its own beside those that K and V stand for")
    across = OTHER[str(dims[0])]
    if any(across in i.dims for i in spec.inputs):
        raise _NoSuchForm(
            f"the state {name} is [{', '.join(map(str, dims))}], and what it meets has the axis {across} "
            "too: a chunk form has two axes"
        )
    return _square(stage) if len(dims) == 2 else _column(stage)


class _NoSuchForm(Exception):
    """The expressions do not tell two axes apart, or a vector state is more than read and scaled."""


# -- [K, K] --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Tagged:
    """An expression whose every non-trivial axis is a number that ``_Axes`` knows."""

    expr: Expr
    rows: int
    cols: int
    children: tuple[_Tagged, ...] = ()


SINGLE, OWN, ACROSS = 0, 1, 2
"""Axes of length 1, along the state's first axis, and along its second."""


class _Axes:
    """Which axes of the nodes of expressions are one: a union of sets of numbers."""

    def __init__(self, state: str, dim: str) -> None:
        self.state = state
        self.dim = dim
        self.parent = [SINGLE, OWN, ACROSS]

    def find(self, axis: int) -> int:
        while self.parent[axis] != axis:
            axis = self.parent[axis]
        return axis

    def join(self, x: int, y: int) -> None:
        low, high = sorted((self.find(x), self.find(y)))
        if low == high:
            return
        if high <= ACROSS:
            raise _NoSuchForm(
                f"rows and columns of {self.state} meet, as in {self.state} + {self.state}ᵀ: a chunk form "
                "keeps its two axes apart"
            )
        self.parent[high] = low

    def tag(self, expr: Expr) -> _Tagged:
        match expr:
            case Symbol(name=self.state):
                return _Tagged(expr, OWN, ACROSS)
            case Identity():
                axis = self._axis(expr.dim)
                return _Tagged(expr, axis, axis)
            case Transpose(arg):
                inner = self.tag(arg)
                return _Tagged(expr, inner.cols, inner.rows, (inner,))
            case Diag(arg):
                inner = self.tag(arg)
                return _Tagged(expr, inner.rows, inner.rows, (inner,))
            case Product():
                return self._product(expr)
            case _ if expr.children:
                return self._elementwise(expr)
            case _:
                rows, cols = (self._axis(d) for d in expr.shape)
                return _Tagged(expr, rows, cols)

    def _axis(self, dim: Dim) -> int:
        if dim == 1:
            return SINGLE
        self.parent.append(len(self.parent))
        return self.parent[-1]

    def _product(self, expr: Product) -> _Tagged:
        children = tuple(map(self.tag, expr.factors))
        rows = cols = SINGLE
        for child in children:
            if child.expr.is_scalar:
                continue
            if self.find(rows) == SINGLE and self.find(cols) == SINGLE:
                rows, cols = child.rows, child.cols
                continue
            self.join(cols, child.rows)
            cols = child.cols
        return _Tagged(expr, rows, cols, children)

    def _elementwise(self, expr: Expr) -> _Tagged:
        children = tuple(map(self.tag, expr.children))
        shaped = [c for c in children if not c.expr.is_scalar]
        for child in shaped[1:]:
            self.join(shaped[0].rows, child.rows)
            self.join(shaped[0].cols, child.cols)
        if expr.is_scalar or not shaped:
            return _Tagged(expr, SINGLE, SINGLE, children)
        return _Tagged(expr, shaped[0].rows, shaped[0].cols, children)

    def name_of(self, axis: int) -> Dim:
        found = self.find(axis)
        return 1 if found == SINGLE else OTHER[self.dim] if found == ACROSS else self.dim


@dataclass
class _Renamed:
    """Rebuilds tagged expressions; ``used`` are the inputs so far, by name and axes."""

    spec: RecurrenceSpec
    axes: _Axes
    used: dict[tuple[str, tuple[Dim, ...]], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        self.declared = {i.name: i for i in spec.inputs}
        self.taken = {*self.declared, *(c.name for c in spec.consts), *(s.name for s in spec.states)}
        self.taken |= {o.target for o in spec.outputs}

    def __call__(self, tagged: _Tagged) -> Expr:
        expr, axes = tagged.expr, self.axes
        match expr:
            case Symbol(name=name):
                shape = (axes.name_of(tagged.rows), axes.name_of(tagged.cols))
                return replace(expr, name=self._name(name, expr, shape), dims=shape)
            case Identity():
                return replace(expr, dim=axes.name_of(tagged.rows))
            case _:
                return rebuild(expr, [self(c) for c in tagged.children])

    def _name(self, name: str, expr: Symbol, shape: tuple[Dim, Dim]) -> str:
        if name not in self.declared:
            return name
        dims = self.declared[name].dims
        picked = shape[:1] if expr.row is not None else tuple(d for d in shape if d != 1)
        new = (*dims[: len(dims) - len(picked)], *picked) if dims else ()
        if new == ("V", "K"):  # inputs with both axes are [K, V]
            raise _NoSuchForm(
                f"{name} acts on both axes of {self.axes.state}, which a chunk form cannot show"
            )
        if (name, new) not in self.used:
            across = OTHER[self.axes.dim]
            wanted = name if across not in new else f"{name}_{across}"
            while wanted in self.taken and wanted != name:
                wanted += "2"
            self.taken.add(wanted)
            self.used[name, new] = wanted
        return self.used[name, new]

    def inputs(self) -> Sequence[tuple[str, Input]]:
        """(the input of before, the input), in the order of before."""
        order = list(self.declared)
        found = sorted(self.used.items(), key=lambda item: (order.index(item[0][0]), item[1]))
        return [(old, replace(self.declared[old], name=new, dims=dims)) for (old, dims), new in found]


def _square(stage: Stage) -> Stage:
    spec = stage.spec
    state = spec.states[0]
    own = str(state.dims[0])
    axes = _Axes(state.name, own)
    update, *outputs = (axes.tag(e.value) for e in (*spec.updates, *spec.outputs))
    axes.join(update.rows, OWN)
    axes.join(update.cols, ACROSS)
    renamed = _Renamed(spec, axes)
    made = replace(
        spec,
        updates=(replace(spec.updates[0], value=renamed(update)),),
        outputs=tuple(replace(e, value=renamed(x)) for e, x in zip(spec.outputs, outputs, strict=True)),
        states=(replace(state, dims=(own, OTHER[own])),),
        written=(),
    )
    inputs = renamed.inputs()
    given = dict(zip((i.name for i in spec.inputs), stage.arguments, strict=True))
    layout = dict(zip((i.name for i in spec.inputs), stage.layouts, strict=False))
    return replace(
        stage,
        spec=replace(made, inputs=tuple(i for _, i in inputs)),
        arguments=tuple(given[old] for old, _ in inputs),
        layouts=tuple(layout[old] for old, _ in inputs) if stage.layouts else (),
        axes=_axes_with(stage, own, dict(stage.axes).get(own, own)),
    )


# -- vectors -------------------------------------------------------------------------------------------
class _Column:
    """Expressions of a vector state as those of a matrix with one column."""

    def __init__(self, state: str, dims: tuple[Dim, Dim], ones: str) -> None:
        self.state = state
        self.dims = dims
        self.ones = Symbol(ones, (dims[1], 1), None)
        self.contracts = False
        self.nonlinear = _NoSuchForm(
            f"the state {state} is more than scaled, read along vectors and written to, and a chunk form is "
            "linear in its state"
        )

    def holds(self, expr: Expr) -> bool:
        return mentions(expr, lambda s: s.name == self.state)

    def column(self, expr: Expr) -> Expr:
        """Of a column: the matrix of which it is the only column."""
        if not self.holds(expr):
            return expr if expr.is_scalar else mul((expr, transpose(self.ones)))
        match expr:
            case Symbol():
                return replace(expr, dims=self.dims)
            case Sum(terms) if not any(t.is_scalar and self.holds(t) for t in terms):
                kept = map(self.column, filter(self.holds, terms))
                return add((*kept, self.column(add(t for t in terms if not self.holds(t)))))
            case Product(factors):
                return self._product(factors)
            case Hadamard(factors):
                inside, beside = self._one(factors)
                return mul((diag(hadamard(beside)), self.column(inside)))
            case Quotient(top, bottom) if not self.holds(bottom):
                if bottom.is_scalar:
                    return divide(self.column(top), bottom)
                return mul((diag(power(bottom, number(-1))), self.column(top)))
            case Iterate(name, index, count, start, body):
                return Iterate(name, index, count, self.column(start), self.column(body), span=expr.span)
            case _:
                raise self.nonlinear

    def row(self, expr: Expr) -> Expr:
        """Of a scalar: the row of which it is the only element."""
        if not self.holds(expr):
            return mul((expr, transpose(self.ones)))
        self.contracts = True
        match expr:
            case Sum(terms):
                return add(map(self.row, terms))
            case Product(factors):
                scalars, _ = split_inner_products(factors)
                if len(scalars) == 1:
                    return self._inner(list(factors))
                holder, beside = self._one(scalars)
                return mul((*beside, self.row(holder)))
            case Call("dot", (x, y)):
                return self.row(mul((transpose(x), y)))
            case Quotient(top, bottom) if not self.holds(bottom):
                return divide(self.row(top), bottom)
            case _:
                raise self.nonlinear

    def _inner(self, factors: list[Expr]) -> Expr:
        if not self.holds(factors[-1]):
            factors = [transpose(f) for f in reversed(factors)]
        if any(map(self.holds, factors[:-1])):
            raise self.nonlinear
        return mul((*factors[:-1], self.column(factors[-1])))

    def _product(self, factors: Sequence[Expr]) -> Expr:
        scalars, chain = split_inner_products(factors)
        inside = [s for s in scalars if self.holds(s)]
        beside = [s for s in scalars if not self.holds(s)]
        if not inside and chain and not any(map(self.holds, chain[:-1])):
            if len(chain) > 1 and any(1 in f.shape for f in chain[:-1]):
                self.contracts = True
            return mul((*beside, *chain[:-1], self.column(chain[-1])))
        if len(inside) != 1 or any(map(self.holds, chain)):
            raise self.nonlinear
        return mul((*beside, *chain, self.row(inside[0])))

    def _one(self, factors: Sequence[Expr]) -> tuple[Expr, list[Expr]]:
        """The one factor that holds the state, and the others."""
        inside = [f for f in factors if self.holds(f)]
        if len(inside) != 1:
            raise self.nonlinear
        return inside[0], [f for f in factors if f is not inside[0]]

    def read(self, expr: Expr) -> Expr:
        """An output as a column: of the length of the state, or with one element."""
        terms = expr.terms if isinstance(expr, Sum) else (expr,)
        if expr.is_scalar:
            return add(transpose(self.row(t)) for t in terms)
        if expr.shape[1] != 1:
            raise self.nonlinear
        return add(mul((self.column(t), self.ones)) if self.holds(t) else t for t in terms)


def _column(stage: Stage) -> Stage:
    spec = stage.spec
    state = spec.states[0]
    own = str(state.dims[0])
    across = OTHER[own]
    taken = {i.name for i in spec.inputs} | {c.name for c in spec.consts} | {s.name for s in spec.states}
    taken |= {e.target for e in spec.outputs}
    name = "one"
    while name in taken:
        name += "s"
    lifted = _Column(state.name, (own, across), name)
    update = spec.updates[0]
    updates = (Equation(update.target, lifted.column(update.value), update.span),)
    outputs = tuple(Equation(e.target, lifted.read(e.value), e.span) for e in spec.outputs)
    if not lifted.contracts:
        raise _NoSuchForm(
            f"the elements of {state.name} never meet: there is no product to make of chunks, and token "
            "after token it moves no more than its inputs and outputs"
        )
    if across in {s.name for e in (update, *spec.outputs) for s in symbols(e.value)}:
        raise _NoSuchForm(f"{state.name} is [{own}] and its equations use the number {across}")
    made = replace(
        spec,
        inputs=(*spec.inputs, Input(name, (across,), timed=False)),
        updates=updates,
        outputs=outputs,
        states=(replace(state, dims=(own, across)),),
        written=(),
    )
    return replace(
        stage,
        spec=made,
        arguments=(*stage.arguments, ONES),
        layouts=(*stage.layouts, "param") if stage.layouts else (),
        axes=_axes_with(stage, across, 1),
    )


def _axes_with(stage: Stage, axis: str, size: Dim) -> tuple[tuple[str, Dim], ...]:
    return tuple(sorted((dict(stage.axes) | {axis: size}).items()))
