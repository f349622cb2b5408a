"""Makes the ``RecurrenceSpec`` of one stage: its inputs, axes and consts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from linalg_dsl.algebra.expr import Dim, Expr, Identity, Product, Symbol, mul
from linalg_dsl.algebra.rules import BIG_DIMS, is_small, split_inner_products
from linalg_dsl.algebra.traverse import mentions, rebuild, symbols, transform, walk
from linalg_dsl.errors import DslError
from linalg_dsl.language.names import LONGEST, free_name
from linalg_dsl.language.spec import Const, Equation, Input, Interval, RecurrenceSpec, State
from linalg_dsl.planner.stages import Stage, Step, TokenStep


@dataclass
class StageMaker:
    """``unique`` names a value, ``emit`` takes a step that a stage needs before it."""

    spec: RecurrenceSpec
    unique: Callable[[str], str]
    emit: Callable[[Step], None]
    values: dict[str, Input] = field(default_factory=dict)
    """Every value so far, declared in the axes of the whole recurrence; in the order of arguments."""
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.values |= {i.name: i for i in self.spec.inputs}
        self.consts = {c.name: c for c in self.spec.consts}

    # -- values -------------------------------------------------------------------------------------
    def shifted(self, name: str, of: str) -> None:
        """Declares a value at the token before: what its input promises, or 0."""
        decl = self.values[of]
        wide = decl.range if decl.range == Interval() else _with_zero(decl.range)
        self.values[name] = replace(decl, name=name, range=wide)

    def token_step(self, name: str, value: Expr) -> TokenStep:
        """A step on tokens (or params) alone, declared as a value."""
        timed = any(self.values[s.name].timed for s in symbols(value) if s.name in self.values)
        dims = tuple(d for d in value.shape if d != 1)
        self.values[name] = Input(name, dims, timed=timed)
        return TokenStep(name, value, dims, timed)

    # -- stages -------------------------------------------------------------------------------------
    def stage(
        self,
        states: Sequence[State],
        updates: Sequence[Equation],
        output: Equation,
        result: str,
        keeps: bool,
    ) -> Stage:
        """The stage of these states; all expressions are of states, values and consts."""
        axes = self._axes(states, [*updates, output])
        hoist = _Hoist(self, {s.name for s in states}, axes)
        equations = [replace(e, value=hoist.lift(e.value)) for e in (*updates, output)]
        used = {s.name for e in equations for s in symbols(e.value)}
        inputs = [v for v in self.values.values() if v.name in used]
        if not any(v.timed for v in inputs):  # something must say how many tokens there are
            inputs.insert(0, min((i for i in self.spec.inputs if i.timed), key=lambda i: len(i.dims)))
        all_dims = [*(v.dims for v in inputs), *(s.dims for s in states)]
        shown = {d for dims in all_dims for d in dims if isinstance(d, str)}
        rename = _Renaming({a: b for a, b in axes.items() if a in shown or a in BIG_DIMS})
        spec = RecurrenceSpec(
            self._stage_name(states),
            tuple(rename.input(v) for v in inputs),
            self._consts_of(equations, shown, rename),
            tuple(replace(s, dims=rename.dims(s.dims)) for s in states),
            tuple(rename.equation(e) for e in equations[:-1]),
            (rename.equation(equations[-1]),),
        )
        back = tuple((axes[d], d) for d in dict.fromkeys(shown) if d in axes)
        self.values[result] = Input(result, tuple(d for d in output.value.shape if d != 1))
        return Stage(spec, tuple(v.name for v in inputs), (result,), tuple(sorted(back)), keeps)

    def _stage_name(self, states: Sequence[State]) -> str:
        base = "_".join([self.spec.name, *(s.name for s in states)])[: LONGEST - 4]
        return free_name(base, self.names)

    def _axes(self, states: Sequence[State], equations: Sequence[Equation]) -> dict[str, str]:
        """What each axis of the whole recurrence is in the stage: K, V, or itself where it is unrolled."""
        axes: dict[str, str] = {}
        for state in sorted(states, key=lambda s: -len(s.dims)):
            for dim, wanted in zip(state.dims, BIG_DIMS if len(state.dims) == 2 else state.dims, strict=True):
                if isinstance(dim, str) and dim not in axes and wanted in BIG_DIMS:
                    _claim(axes, dim, str(wanted), state)
        used = [self.values[n] for n in self._value_names(equations)]
        picked = {s.name for e in equations for s in symbols(e.value) if s.row is not None}
        rows = {
            v.dims[0]
            for v in used
            if (len(v.dims) == 2 and is_small(v.dims[0])) or (v.dims and v.name in picked)
        }
        all_dims = [*(s.dims for s in states), *(v.dims for v in used)]
        vectors = [d for dims in all_dims for d in dims if isinstance(d, str) and d not in rows]
        for dim in dict.fromkeys(vectors):  # big axes first take the place of their own name
            if dim in BIG_DIMS and dim not in axes and dim not in axes.values():
                axes[dim] = dim
        for dim in dict.fromkeys(vectors):
            free = [b for b in BIG_DIMS if b not in axes.values()]
            if dim not in axes and free and dim not in BIG_DIMS:
                axes[dim] = free[0]
        for dim in (d for v in used for d in v.dims if isinstance(d, str) and is_small(d)):
            axes.setdefault(dim, dim)  # unrolled
        return axes

    def _value_names(self, equations: Iterable[Equation]) -> list[str]:
        found = dict.fromkeys(s.name for e in equations for s in symbols(e.value))
        return [n for n in found if n in self.values]

    # -- consts -------------------------------------------------------------------------------------
    def _consts_of(
        self, equations: Sequence[Equation], shown: set[str], rename: _Renaming
    ) -> tuple[Const, ...]:
        """The consts that the equations and axes need, and those in their values."""
        need = {s.name for e in equations for s in symbols(e.value) if s.time is None}
        need |= {d for d in shown if rename.axes.get(d, d) == d}
        for const in reversed(self.spec.consts):
            if const.name in need:
                need |= {s.name for s in symbols(const.value)}
        return tuple(replace(c, value=rename.expr(c.value)) for c in self.spec.consts if c.name in need)

    def depends_on(self, name: str) -> set[str]:
        """The axes in the value of a const, or the axis itself."""
        if name not in self.consts:
            return {name} if name in BIG_DIMS else set()
        inner = (self.depends_on(s.name) for s in symbols(self.consts[name].value))
        return set().union(*inner)


class _Hoist:
    """Takes out of a stage's equations what mentions axes that the stage does not have."""

    def __init__(self, maker: StageMaker, states: set[str], axes: dict[str, str]) -> None:
        self.maker = maker
        self.states = states
        self.axes = axes
        self.done: dict[Expr, Symbol] = {}

    def lift(self, expr: Expr) -> Expr:
        if not self._strange(expr):
            return expr
        parts: tuple[Expr, ...] = expr.children
        if isinstance(expr, Product):
            parts = self._factors(expr)
        if parts and all(self._fits(p) for p in parts):
            lifted = [self.lift(p) for p in parts]
            return mul(lifted) if isinstance(expr, Product) else rebuild(expr, lifted)
        if not self._fits(expr) or mentions(expr, lambda s: s.name in self.states):
            raise DslError.single(
                "E970",
                f"this has an axis that the state {min(self.states)} lacks, and nothing reduces it before it "
                "meets the state",
                expr.span,
            )
        return self._step(expr)

    def _factors(self, expr: Product) -> tuple[Expr, ...]:
        """Inner products, and the chain with factors joined across axes that the stage lacks."""
        scalars, chain = split_inner_products(expr.factors)
        joined: list[Expr] = []
        for factor in chain:
            if joined and not self._fits(joined[-1]):
                joined[-1] = mul((joined[-1], factor))
            else:
                joined.append(factor)
        return (*scalars, *joined) if len(scalars) + len(joined) > 1 else expr.factors

    def _strange(self, expr: Expr) -> bool:
        """Whether something in it has another axis, or is a const that depends on one."""
        return any(not self._known(n) for n in walk(expr))

    def _known(self, node: Expr) -> bool:
        match node:
            case Symbol(time=None, name=name) if node.is_scalar and name not in self.maker.values:
                return self.maker.depends_on(name) <= set(self.axes)
            case Symbol(name=name, row=row) if row is not None and name in self.maker.values:
                rows = self.maker.values[name].dims[0]
                return self.axes.get(str(rows), rows) == rows and self._fits(node)
            case Symbol() | Identity():
                return self._fits(node)
            case _:
                return True

    def _fits(self, expr: Expr) -> bool:
        """Whether the stage has its axes; an input cannot have the axes [V, K]."""
        value = self.maker.values.get(expr.name) if isinstance(expr, Symbol) else None
        if value is not None and [self.axes.get(str(d)) for d in value.dims] == ["V", "K"]:
            return False
        return all(isinstance(d, int) or d in self.axes for d in expr.shape)

    def _step(self, expr: Expr) -> Symbol:
        if expr not in self.done:
            step = self.maker.token_step(self.maker.unique("x"), expr)
            self.maker.emit(step)
            self.done[expr] = Symbol(step.name, expr.shape, 0 if step.timed else None)
        return self.done[expr]


@dataclass(frozen=True)
class _Renaming:
    """Axes of the whole recurrence to those of a stage."""

    axes: dict[str, str]

    def dims(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(self.axes.get(d, d) if isinstance(d, str) else d for d in dims)

    def input(self, decl: Input) -> Input:
        return replace(decl, dims=self.dims(decl.dims))

    def equation(self, equation: Equation) -> Equation:
        return replace(equation, value=self.expr(equation.value))

    def expr(self, expr: Expr) -> Expr:
        return transform(expr, self._node)

    def _node(self, node: Expr) -> Expr:
        match node:
            case Identity(dim) if isinstance(dim, str):
                return replace(node, dim=self.axes.get(dim, dim))
            case Symbol(name=name, time=None) if name in self.axes and node.is_scalar:
                return replace(node, name=self.axes[name])
            case Symbol(dims=(rows, cols)):
                return replace(node, dims=(self.dims((rows,))[0], self.dims((cols,))[0]))
            case _:
                return node


def _claim(axes: dict[str, str], dim: str, wanted: str, state: State) -> None:
    if wanted in axes.values():
        taken = next(d for d, b in axes.items() if b == wanted)
        raise DslError.single(
            "E970", f"{state.name} has the axis {dim} beside {taken}: states of one stage share two axes",
            state.span,
        )  # fmt: skip
    axes[dim] = wanted


def _with_zero(interval: Interval) -> Interval:
    low, high = interval.low, interval.high
    if low is not None and low >= 0:
        interval = replace(interval, low=0.0, low_open=False)
    if high is not None and high <= 0:
        interval = replace(interval, high=0.0, high_open=False)
    return interval
