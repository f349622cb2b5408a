"""The recurrence over indeterminates, stepped token by token from the spec (``algebra.exact``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.exact import Value, total
from linalg_dsl.algebra.traverse import symbols
from linalg_dsl.algebra.unroll import unroll
from linalg_dsl.errors import InternalError
from linalg_dsl.language.spec import Equation, RecurrenceSpec
from linalg_dsl.planner.form import CanonicalRecurrence

Matrix = tuple[tuple[Value, ...], ...]
_ZERO, _ONE = Value.number(0), Value.number(1)


class Leaves:
    """The indeterminates: one per entry of an input, a param, the state at the start, a run-time const."""

    def __init__(self, canonical: CanonicalRecurrence, sizes: Mapping[str, int]) -> None:
        self.spec = canonical.spec
        self.fixed = {name: rational(value) for name, value in canonical.consts}
        self.sizes = dict(sizes)
        self.positive = {i.name for i in self.spec.inputs if i.kind == "gate" or (i.range.low or -1) >= 0}

    def size(self, dim: ex.Dim) -> int:
        if isinstance(dim, int):
            return dim
        if dim in self.sizes:
            return self.sizes[dim]
        if dim in self.fixed:
            return int(self.fixed[dim])
        raise InternalError(f"the dimension {dim} has no size")

    def entry(self, name: str, *at: int) -> Value:
        """One entry of an input, at (token, row, element) as far as it has them."""
        return Value.free(self.place(name, *at), name in self.positive)

    @staticmethod
    def place(name: str, *at: int) -> str:
        """What an entry is called: ``k[2,1]``, counted from 1."""
        return f"{name}[{','.join(str(i + 1) for i in at)}]" if at else name

    def const(self, name: str) -> Value:
        if name in self.fixed:
            return Value.number(self.fixed[name])
        return Value.free(name, True)


def step_through(spec: RecurrenceSpec, leaves: Leaves, tokens: int) -> dict[str, Matrix]:
    """Outputs [tokens, V] and, as ``<state>_C``, the states after the last token."""
    states = {
        s.name: tuple(
            tuple(leaves.entry(f"{s.name}_0", i, j) for j in range(leaves.size(s.dims[1])))
            for i in range(leaves.size(s.dims[0]))
        )
        for s in spec.states
    }
    rows: dict[str, list[tuple[Value, ...]]] = {e.target: [] for e in spec.outputs}
    for token in range(tokens):
        after: dict[str, Matrix] = {}
        for equation in _by_presents(spec):
            known = {**states, **after}
            after[equation.target] = _Step(leaves, token, states, known).value(equation.value)
        step = _Step(leaves, token, states, after)
        for equation in spec.outputs:
            rows[equation.target].append(tuple(row[0] for row in step.value(equation.value)))
        states = after
    return {**{n: tuple(r) for n, r in rows.items()}, **{f"{n}_C": m for n, m in states.items()}}


def _by_presents(spec: RecurrenceSpec) -> list[Equation]:
    """The updates, those first whose presents others need."""
    todo, order = list(spec.updates), []
    while todo:
        unknown = {e.target for e in todo}
        needs = [{s.name for s in symbols(e.value) if s.time == 0} for e in todo]
        ready = next(e for e, names in zip(todo, needs, strict=True) if not names & unknown - {e.target})
        order.append(ready)
        todo.remove(ready)
    return order


def evaluate(spec: RecurrenceSpec, leaves: Leaves, expr: ex.Expr) -> Matrix:
    """An expression at the first token, where the past of a state is its start."""
    states = {
        s.name: tuple(
            tuple(leaves.entry(f"{s.name}_0", i, j) for j in range(leaves.size(s.shape[1])))
            for i in range(leaves.size(s.shape[0]))
        )
        for s in spec.states
    }
    return _Step(leaves, 0, states, states).value(expr)


class _Step:
    """Evaluates expressions of one token as matrices."""

    def __init__(
        self, leaves: Leaves, token: int, before: Mapping[str, Matrix], after: Mapping[str, Matrix]
    ) -> None:
        self.leaves = leaves
        self.token = token
        self.before = before
        self.after = after
        self.inputs = {i.name: i for i in leaves.spec.inputs}

    def value(self, e: ex.Expr) -> Matrix:
        match e:
            case ex.Number(value):
                return ((Value.number(rational(value)),),)
            case ex.Symbol():
                return self._symbol(e)
            case ex.Identity(dim):
                n = range(self.leaves.size(dim))
                return tuple(tuple(_ONE if i == j else _ZERO for j in n) for i in n)
            case ex.Sum(terms):
                return self._fold(terms, lambda a, b: a + b)
            case ex.Hadamard(factors):
                return self._fold(factors, lambda a, b: a * b)
            case ex.Product(factors):
                made = self.value(factors[0])
                for factor in factors[1:]:
                    made = _matmul(made, self.value(factor))
                return made
            case ex.Quotient(numerator, denominator):
                return self._fold((numerator, denominator), lambda a, b: a * b.power(-1))
            case ex.Power(base, exponent):
                return self._power(self.value(base), exponent)
            case ex.Transpose(arg):
                return tuple(zip(*self.value(arg), strict=True))
            case ex.Diag(arg):
                column = self.value(arg)
                n = range(len(column))
                return tuple(tuple(column[i][0] if i == j else _ZERO for j in n) for i in n)
            case ex.Call(function, args):
                return self._call(function, [self.value(a) for a in args])
            case ex.Iterate():
                return self.value(unroll(e, self.leaves.fixed))
            case _:
                raise InternalError(f"no exact value for {type(e).__name__}")

    def _symbol(self, symbol: ex.Symbol) -> Matrix:
        name = symbol.name
        if name in self.after:
            return self.after[name] if symbol.time == 0 else self.before[name]
        if name not in self.inputs:
            return ((self.leaves.const(name),),)
        token = (self.token,) if self.inputs[name].timed else ()
        if isinstance(symbol.row, str):
            raise InternalError(f"{name} stands in a loop that is not written out")
        row = () if symbol.row is None else (symbol.row,)
        shape = [self.leaves.size(d) for d in symbol.dims]
        dims = [d for d in self.inputs[name].dims if d != 1][len(row) :]
        ranges = [range(shape[0]), range(shape[1])]

        def entry(i: int, j: int) -> Value:
            return self.leaves.entry(name, *token, *row, *(i, j)[: len(dims)])

        return tuple(tuple(entry(i, j) for j in ranges[1]) for i in ranges[0])

    def _fold(self, terms: Sequence[ex.Expr], join: Callable[[Value, Value], Value]) -> Matrix:
        made = self.value(terms[0])
        for term in terms[1:]:
            made = _elementwise(join, made, self.value(term))
        return made

    def _power(self, base: Matrix, exponent: ex.Expr) -> Matrix:
        if isinstance(exponent, ex.Number):
            return _map(lambda x: x.power(rational(exponent.value)), base)
        ((p,),) = self.value(exponent)
        return _map(lambda x: (p * x.log()).exp(), base)

    def _call(self, function: str, args: list[Matrix]) -> Matrix:
        match function:
            case "min" | "max":
                name = {"min": "minimum", "max": "maximum"}[function]
                return _elementwise(lambda a, b: Value.opaque(name, a, b), *args)
            case "clamp":
                low = _elementwise(lambda a, b: Value.opaque("maximum", a, b), args[0], args[1])
                return _elementwise(lambda a, b: Value.opaque("minimum", a, b), low, args[2])
            case "sum":
                return ((total(row[0] for row in args[0]),),)
            case "dot":
                return ((total(a[0] * b[0] for a, b in zip(*args, strict=True)),),)
            case "l2norm":
                square = total(row[0] * row[0] for row in args[0]) + rational(ex.L2NORM_EPS)
                return _map(lambda x: x * square.power(Fraction(-1, 2)), args[0])
            case "softmax":
                whole = total(row[0].exp() for row in args[0])
                return _map(lambda x: x.exp() * whole.power(-1), args[0])
            case _:
                return _map(lambda x: x.function(function), args[0])


def rational(value: float | Fraction) -> Fraction:
    """The number that was meant: plans hold floats, specs fractions."""
    if abs(float(value)) < 1e-6:
        return Fraction(repr(float(value)))
    return Fraction(value).limit_denominator(10**9)


def _map(f: Callable[[Value], Value], x: Matrix) -> Matrix:
    return tuple(tuple(f(v) for v in row) for row in x)


def _elementwise(join: Callable[[Value, Value], Value], x: Matrix, y: Matrix) -> Matrix:
    """Scalars stand for every element."""
    if len(x) == len(x[0]) == 1:
        return _map(lambda v: join(x[0][0], v), y)
    if len(y) == len(y[0]) == 1:
        return _map(lambda v: join(v, y[0][0]), x)
    return tuple(tuple(join(a, b) for a, b in zip(r, s, strict=True)) for r, s in zip(x, y, strict=True))


def _matmul(x: Matrix, y: Matrix) -> Matrix:
    if len(x) == len(x[0]) == 1 or (len(y) == len(y[0]) == 1 and len(x[0]) != 1):
        return _elementwise(lambda a, b: a * b, x, y)
    columns = list(zip(*y, strict=True))
    return tuple(tuple(total(a * b for a, b in zip(row, col, strict=True)) for col in columns) for row in x)
