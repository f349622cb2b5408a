"""Random expressions of a wanted shape, and random specs of them: for what treats any spec alike.

Their numbers are wild (powers of anything, ranges up to 1e20): for printing, parsing, planning. Recurrences
whose numbers stay ordinary are in ``strategies_lines``.
"""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Dim, Expr, Shape
from linalg_dsl.language.spec import Const, Equation, Input, Interval, RecurrenceSpec, State

K1: Shape = ("K", 1)
V1: Shape = ("V", 1)
KK: Shape = ("K", "K")
KV: Shape = ("K", "V")
KNOWN = {ex.SCALAR, K1, V1, KK, KV, *((c, r) for r, c in (K1, V1, KV))}
"""Shapes of which there are random expressions."""
INPUTS = (
    Input("q", ("K",)),
    Input("k_tilde", ("K",), unit=True),
    Input("v", ("V",)),
    Input("g", (), "log_gate", Interval(None, 0.0, True, False)),
    Input("f", ("K",), "gate", Interval(0.0, 1.0, True, True)),
    Input("α", ("K",), "log_gate", Interval(None, 2.5, True, False)),
    Input("beta", (), range=Interval(0.0, 2.0)),
    Input("x1", (), range=Interval(-1e-07, 1e20, False, False)),
    Input("kk", ("n", "K")),
    Input("vv", (2, "V")),
    Input("bb", ("n",), range=Interval(0.0, None, False, True)),
    Input("u", ("K",), timed=False),
    Input("gamma", (), "gate", Interval(0.0, 1.0, True, False), timed=False),
    Input("Mk", ("K", "K")),
    Input("X", ("K", "V"), range=Interval(None, 1.0, True, False)),
    Input("N", ("V", "V")),
    Input("gv", ("V",), "log_gate", Interval(None, 0.0, True, False)),
    Input("gx", ("K", "V"), "gate", Interval(-1.0, 1.0, True, True)),
    Input("gn", ("n",), "gate", Interval(0.0, 1.0, False, False)),
    Input("A", ("K", "V"), "log_gate", Interval(None, 0.0, True, False), timed=False),
)
CONSTS = (
    Const("n", ex.number(2)),
    Const("scale", ex.divide(ex.ONE, ex.call("sqrt", (ex.Symbol("K", ex.SCALAR, None),)))),
)
LEAVES: dict[Shape, list[Expr]] = {
    ex.SCALAR: [
        ex.Symbol("g", ex.SCALAR), ex.Symbol("beta", ex.SCALAR), ex.Symbol("x1", ex.SCALAR),
        ex.Symbol("bb", ex.SCALAR, 0, 1), ex.Symbol("gamma", ex.SCALAR, None),
        ex.Symbol("scale", ex.SCALAR, None), ex.Symbol("gn", ex.SCALAR, 0, 0), ex.Symbol("g", ex.SCALAR, -1),
    ],
    K1: [ex.Symbol("q", K1), ex.Symbol("k_tilde", K1), ex.Symbol("f", K1), ex.Symbol("α", K1),
         ex.Symbol("kk", K1, 0, 0), ex.Symbol("u", K1, None), ex.Symbol("q", K1, -1),
         ex.Symbol("kk", K1, -1, 1)],
    V1: [ex.Symbol("v", V1), ex.Symbol("vv", V1, 0, 1), ex.Symbol("gv", V1), ex.Symbol("v", V1, -1)],
    KK: [ex.Symbol("Mk", KK), ex.outer(ex.Symbol("q", K1), ex.Symbol("u", K1, None))],
    KV: [ex.Symbol("X", KV), ex.Symbol("gx", KV), ex.Symbol("A", KV, None), ex.Symbol("X", KV, -1),
         ex.outer(ex.Symbol("q", K1), ex.Symbol("v", V1))],
}  # fmt: skip

numbers = st.fractions(min_value=-20, max_value=20, max_denominator=64).map(ex.Number)


@st.composite
def expressions(draw: st.DrawFn, shape: Shape, depth: int) -> Expr:
    """An expression of inputs, params and consts, of one of the shapes above or their transposes."""
    if shape not in (ex.SCALAR, K1, V1, KK, KV):
        return ex.transpose(draw(expressions((shape[1], shape[0]), depth)))
    kinds = ["leaf"]
    if depth > 0:
        kinds = ["sum", "scale", "sum", "product", "negate", "quotient"]
        kinds += ["call", "power", "hadamard"] if shape != KK else []
        kinds += ["diag"] if shape == KK else []
    deeper = expressions(shape, depth - 1)
    scalars = expressions(ex.SCALAR, depth - 1)
    match draw(st.sampled_from(kinds)):
        case "leaf":
            return draw(leaves(shape))
        case "sum":
            terms = draw(st.lists(deeper, min_size=2, max_size=3))
            if draw(st.booleans()):
                terms.insert(draw(st.integers(0, len(terms))), draw(scalars))
            return ex.add(terms)
        case "scale":
            return ex.mul((draw(scalars), draw(deeper)))
        case "product":
            middles: list[Dim] = ["K", "V"] if shape == ex.SCALAR else ["K", "V", 1]
            middle = draw(st.sampled_from(middles))
            if (shape[0], middle) not in KNOWN or (middle, shape[1]) not in KNOWN:
                middle = "K"
            left = draw(expressions((shape[0], middle), depth - 1))
            drawn = [left, draw(expressions((middle, shape[1]), depth - 1))]
            if draw(st.booleans()):
                drawn.insert(draw(st.integers(0, 2)), draw(scalars))
            return ex.mul(drawn)
        case "negate":
            return ex.negate(draw(deeper))
        case "quotient":
            below = draw(scalars.filter(lambda e: e != ex.ZERO and not _is_zero(e)))
            return ex.divide(draw(deeper), below)
        case "call":
            function = draw(
                st.sampled_from(["exp", "sigmoid", "softplus", "tanh", "min", "clamp", "l2norm", "sum"])
            )
            return draw(calls(function, shape, depth))
        case "power":
            base = draw(deeper.filter(lambda e: not isinstance(e, ex.Number)))
            return ex.power(
                base, draw(st.one_of(numbers, scalars.filter(lambda e: not isinstance(e, ex.Number))))
            )
        case "hadamard":
            return ex.hadamard(draw(st.lists(deeper, min_size=2, max_size=3)))
        case _:
            return ex.diag(draw(expressions(K1, depth - 1)))


@st.composite
def calls(draw: st.DrawFn, function: str, shape: Shape, depth: int) -> Expr:
    deeper, scalars = expressions(shape, depth - 1), expressions(ex.SCALAR, depth - 1)
    match function:
        case "min":
            return ex.call(function, (draw(deeper), draw(scalars)))
        case "clamp":
            return ex.call(function, (draw(deeper), draw(scalars), draw(scalars)))
        case "l2norm" if shape in (K1, V1):
            return ex.call(function, (draw(deeper),))
        case "sum" if shape == ex.SCALAR:
            return ex.call(function, (draw(expressions(draw(st.sampled_from([K1, V1])), depth - 1)),))
        case "l2norm" | "sum":
            return ex.call("exp", (draw(deeper),))
        case _:
            return ex.call(function, (draw(deeper),))


@st.composite
def leaves(draw: st.DrawFn, shape: Shape) -> Expr:
    match shape:
        case (1, 1) if draw(st.booleans()):
            return draw(numbers)
        case _:
            return draw(st.sampled_from(LEAVES[shape]))


def _is_zero(expr: Expr) -> bool:
    match expr:
        case ex.Number(value) | ex.Product((ex.Number(value), *_)):
            return value == Fraction(0)
        case _:
            return False


STARTS = st.sampled_from([0.0, 0.5, -1e-3, float("-inf"), float("inf")])
NAMES = st.sampled_from(["r", "gated_rule", "ψ2"])


@st.composite
def specs_of_one_state(draw: st.DrawFn) -> RecurrenceSpec:
    """A spec with a state [K, V], linear in it, with reads of all kinds."""
    past, now = ex.Symbol("S", KV, -1), ex.Symbol("S", KV, 0)
    terms = [ex.mul((draw(expressions(ex.SCALAR, 1)), past))] if draw(st.booleans()) else []
    terms += [ex.mul((draw(expressions(KK, draw(st.integers(0, 2)))), past))]
    terms += [ex.outer(draw(expressions(K1, 2)), draw(expressions(V1, 1)))]
    order = draw(st.permutations(terms))
    reads = [ex.mul((ex.transpose(draw(st.sampled_from([past, now]))), draw(expressions(K1, 1))))]
    if draw(st.booleans()):
        reads.append(draw(expressions(V1, 2)))
    return RecurrenceSpec(
        draw(NAMES),
        INPUTS,
        CONSTS,
        (State("S", ("K", "V"), draw(STARTS)),),
        (Equation("S", ex.add(order)),),
        (Equation(draw(st.sampled_from(["o", "y"])), ex.add(reads)),),
    )


DIMS: tuple[tuple[Dim, ...], ...] = (
    (), ("K",), ("V",), ("n",), ("K", "V"), ("V", "K"), ("K", "n"), ("n", "V"), ("V", "V"),
)  # fmt: skip


@st.composite
def specs_of_several_states(draw: st.DrawFn) -> RecurrenceSpec:
    """States of all shapes, declared in any order, each feeding those below; loops; functions of reads."""
    states: list[State] = []
    updates: dict[str, Expr] = {}
    for i in range(draw(st.integers(1, 4))):
        state = State(f"z{i}", draw(st.sampled_from(DIMS)), draw(STARTS))
        updates[state.name] = draw(state_updates(state, states))
        states.append(state)
    read = draw(state_reads(states))
    declared = draw(st.permutations(states))
    return RecurrenceSpec(
        draw(NAMES),
        INPUTS,
        CONSTS,
        tuple(declared),
        tuple(Equation(s.name, updates[s.name]) for s in declared),
        (Equation(draw(st.sampled_from(["o", "y"])), read),),
    )


@st.composite
def state_updates(draw: st.DrawFn, state: State, fed: list[State]) -> Expr:
    """Linear in a matrix state; any function of a vector or scalar one, and of what feeds it."""
    shape = state.shape
    past = ex.Symbol(state.name, shape, -1)
    value = draw(state_steps(past, fed))
    if not draw(st.booleans()):
        return value
    running = ex.Symbol(state.name, shape, 0)
    count = draw(st.sampled_from([ex.number(2), ex.Symbol("n", ex.SCALAR, None)]))
    rows = {K1: "kk", V1: "vv", ex.SCALAR: "bb"}
    body = draw(state_steps(running, fed))
    if shape in rows:
        body = ex.add((body, ex.Symbol(rows[shape], shape, draw(st.sampled_from([0, -1])), "j")))
    start = draw(st.sampled_from([value, past]))
    return ex.iterate(state.name, "j", count, start, body)


@st.composite
def state_steps(draw: st.DrawFn, before: ex.Symbol, fed: list[State]) -> Expr:
    shape = before.shape
    scale = draw(expressions(ex.SCALAR, 1))
    terms = [ex.mul((scale, before))]
    if shape in LEAVES:
        terms.append(draw(expressions(shape, 1)))
    for other in fed:
        if other.shape == shape and draw(st.booleans()):
            terms.append(ex.Symbol(other.name, shape, draw(st.sampled_from([0, -1]))))
    total = ex.add(draw(st.permutations(terms)))
    if 1 not in shape:
        return total
    match draw(st.sampled_from(["linear", "tanh", "max", "hadamard", "quotient"])):
        case "linear":
            return total
        case "max":
            return ex.call("max", (total, before))
        case "hadamard":
            return ex.hadamard((before, total))
        case "quotient":
            return ex.divide(total, ex.add((ex.ONE, ex.mul((ex.transpose(before), before)))))
        case function:
            return ex.call(function, (total,))


@st.composite
def state_reads(draw: st.DrawFn, states: list[State]) -> Expr:
    """A column or a scalar: a function of what is read from some states."""
    shape = draw(st.sampled_from([V1, K1, ex.SCALAR]))
    terms = [draw(expressions(shape, 1))]
    for state in states:
        symbol = ex.Symbol(state.name, state.shape, draw(st.sampled_from([0, -1])))
        for matrix in (symbol, ex.transpose(symbol)):
            if matrix.shape == shape:
                terms.append(matrix)
            elif matrix.shape[0] == shape[0] and (matrix.shape[1], 1) in (K1, V1):
                terms.append(ex.mul((matrix, draw(expressions((matrix.shape[1], 1), 1)))))
    total = ex.add(terms)
    match draw(st.sampled_from(["plain", "silu", "softmax", "quotient"])):
        case "softmax" if shape != ex.SCALAR:
            return ex.call("softmax", (total,))
        case "silu":
            return ex.call("silu", (total,))
        case "quotient":
            return ex.divide(draw(expressions(shape, 1)), ex.call("max", (ex.call("abs", (total,)), ex.ONE)))
        case _:
            return total
