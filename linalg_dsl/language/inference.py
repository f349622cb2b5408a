"""The shape of a state that declares none: what its update shows of it.

Everything is guessed from the leaves up with the states' shapes unknown, again and again until the guesses
stay. In a sum the terms without a state count most. A state that is only ever added to scalars is a
scalar; what remains open is as in a [K, V] matrix. A wrong guess does no harm: all shapes are checked
afterwards, and a declaration comes before any guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Dim, Expr, Shape
from linalg_dsl.language import syntax as syn

_OTHER: dict[Dim | None, Dim] = {"K": "V", "V": "K"}


@dataclass(frozen=True, slots=True)
class Guess:
    """Rows and columns as far as known; ``sure``: no guess is in it."""

    rows: Dim | None = None
    cols: Dim | None = None
    sure: bool = False

    @property
    def is_scalar(self) -> bool:
        return (self.rows, self.cols) == ex.SCALAR

    @property
    def is_open(self) -> bool:
        """Nothing is known."""
        return self.rows is None and self.cols is None

    @property
    def turned(self) -> Guess:
        return Guess(self.cols, self.rows, self.sure)

    def unsure(self) -> Guess:
        return Guess(self.rows, self.cols)


OPEN = Guess()
ONE = Guess(1, 1, True)


def known(shape: Shape | None) -> Guess:
    return OPEN if shape is None else Guess(*shape, True)


def alike(parts: Sequence[Guess]) -> Guess:
    """Of a sum or another operation on one shape, where scalars may stand beside anything."""
    shaped = [p for p in parts if not p.is_scalar and not p.is_open]
    for part in shaped:
        if part.sure:
            return part if all(p.sure for p in parts) else part.unsure()
    if not shaped:
        return Guess(1, 1, all(p.sure for p in parts)) if any(p.is_scalar for p in parts) else OPEN
    rows = next((p.rows for p in shaped if p.rows is not None), None)
    cols = next((p.cols for p in shaped if p.cols is not None), None)
    if any(p.is_scalar for p in parts):  # 1 - kᵀ n: rather a scalar than a row
        if rows is None and cols == 1:
            rows = 1
        elif cols is None and rows == 1:
            cols = 1
    return Guess(rows, cols)


def product(left: Guess, right: Guess) -> Guess:
    if left.is_scalar:
        return right
    if right.is_scalar:
        return left
    if left.cols is not None and right.rows is not None and left.cols != right.rows:
        return OPEN  # a mistake, reported elsewhere
    return Guess(left.rows, right.cols, left.sure and right.sure)


def quotient(above: Guess, below: Guess) -> Guess:
    return above if below.is_scalar else alike([above, below])


def call(function: str, args: Sequence[Guess]) -> Guess:
    match function:
        case "sum" | "dot":
            return ONE
        case "diag" if args:
            return Guess(args[0].rows, args[0].rows, args[0].sure)
        case "outer" if len(args) == 2:
            return Guess(args[0].rows, args[1].rows, args[0].sure and args[1].sure)
        case _:
            return alike(args)


def finished(guess: Guess) -> Shape:
    """The shape a guess stands for, open axes filled."""
    rows, cols = guess.rows, guess.cols
    if rows == 1 and cols != 1:  # a row is none: the check of its shape says so
        return ("K", "V")
    if rows is None and cols == 1:
        rows = "K"
    cols = _OTHER.get(rows, "V") if cols is None else cols
    rows = _OTHER.get(cols, "K") if rows is None else rows
    return (rows, cols)


def infer(
    equations: Sequence[tuple[str, syn.Node]],
    shape_of: Callable[[syn.Ref], Shape | None],
    states: Mapping[str, Shape | None],
) -> dict[str, Shape]:
    """The shapes of those ``states`` that have none; ``equations`` in order, bindings among them."""
    fixed: dict[str, Shape] = {name: shape for name, shape in states.items() if shape is not None}
    while True:
        guesses = _settle(equations, shape_of, states, fixed)
        left = [name for name in states if name not in fixed]
        partly = [name for name in left if guesses[name].rows is None or guesses[name].cols is None]
        if not partly:
            return {n: finished(guesses[n]) for n, shape in states.items() if shape is None}
        # matrices first: what vectors read from them then has a shape
        rank = {n: (1 in (guesses[n].rows, guesses[n].cols), guesses[n].is_open) for n in partly}
        first = min(rank.values())
        fixed |= {n: finished(guesses[n]) for n in partly if rank[n] == first}


def _settle(
    equations: Sequence[tuple[str, syn.Node]],
    shape_of: Callable[[syn.Ref], Shape | None],
    states: Mapping[str, Shape | None],
    fixed: Mapping[str, Shape],
) -> dict[str, Guess]:
    """Guesses for all names that no further pass changes."""
    guesses = dict.fromkeys(states, OPEN)
    guesses |= {name: Guess(*shape, states[name] is not None) for name, shape in fixed.items()}
    for _ in range(len(states) + 2):
        before = dict(guesses)
        one_pass = _Pass(guesses, shape_of)
        met: set[str] = set()
        for name, node in equations:
            guess = one_pass.of(node)
            if name in fixed:
                continue
            if name in met:  # a state with substeps has several equations
                guess = alike([guesses[name], guess])
            met.add(name)
            guesses[name] = guess.unsure() if name in states else guess
        if guesses == before:
            break
    return guesses


class _Pass:
    """Guesses of syntax, shared nodes once."""

    def __init__(self, names: Mapping[str, Guess], shape_of: Callable[[syn.Ref], Shape | None]) -> None:
        self.names = names
        self.shape_of = shape_of
        self.done: dict[int, Guess] = {}

    def of(self, node: syn.Node) -> Guess:
        found = self.done.get(id(node))
        if found is None:
            found = self.done[id(node)] = self.guess(node)
        return found

    def guess(self, node: syn.Node) -> Guess:
        match node:
            case syn.Num():
                return ONE
            case syn.Ref(name, _):
                return self.names[name] if name in self.names else known(self.shape_of(node))
            case syn.Total(terms):
                return alike([self.of(t) for t in terms])
            case syn.Chain(first, rest):
                out = self.of(first)
                for sign, factor in rest:
                    right = self.of(factor)
                    if sign == "/":
                        out = quotient(out, right)
                    elif sign == "" or out.is_scalar or right.is_scalar:
                        out = product(out, right)
                    else:
                        out = alike([out, right])
                return out
            case syn.Transposed(arg):
                return self.of(arg).turned
            case syn.Minus(arg) | syn.Raised(arg, _):
                return self.of(arg)
            case syn.Apply(function, args):
                return call(function, [self.of(a) for a in args])
            case _:
                return OPEN


def shown_by(update: Expr, state: str) -> Shape:
    """What would be inferred for a single state from its update, bindings substituted."""

    def of(expr: Expr) -> Guess:
        match expr:
            case ex.Symbol(name, _, _, _) if name == state:
                return OPEN
            case ex.Sum(terms):
                return alike([of(t) for t in terms])
            case ex.Product(factors):
                out = of(factors[0])
                for factor in factors[1:]:
                    out = product(out, of(factor))
                return out
            case ex.Hadamard(factors):
                return alike([of(f) for f in factors])
            case ex.Quotient(above, below):
                return quotient(of(above), of(below))
            case ex.Transpose(arg):
                return of(arg).turned
            case ex.Power(base, _):
                return of(base)
            case ex.Diag(arg):
                return call("diag", [of(arg)])
            case ex.Call(function, args):
                return call(function, [of(a) for a in args])
            case ex.Iterate(_, _, _, start, body):
                return alike([of(start), of(body)])
            case _:
                return known(expr.shape)

    return finished(of(update).unsure())
