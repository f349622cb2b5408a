"""Random expressions of a wanted shape, and random specs, for hypothesis."""

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
)
CONSTS = (
    Const("n", ex.number(2)),
    Const("scale", ex.divide(ex.ONE, ex.call("sqrt", (ex.Symbol("K", ex.SCALAR, None),)))),
)
LEAVES: dict[Shape, list[Expr]] = {
    ex.SCALAR: [
        ex.Symbol("g", ex.SCALAR), ex.Symbol("beta", ex.SCALAR), ex.Symbol("x1", ex.SCALAR),
        ex.Symbol("bb", ex.SCALAR, 0, 1), ex.Symbol("gamma", ex.SCALAR, None),
        ex.Symbol("scale", ex.SCALAR, None),
    ],
    K1: [ex.Symbol("q", K1), ex.Symbol("k_tilde", K1), ex.Symbol("f", K1), ex.Symbol("α", K1),
         ex.Symbol("kk", K1, 0, 0), ex.Symbol("u", K1, None)],
    V1: [ex.Symbol("v", V1), ex.Symbol("vv", V1, 0, 1)],
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
        case ("K", "K"):
            return ex.outer(draw(leaves(K1)), draw(leaves(K1)))
        case ("K", "V"):
            return ex.outer(draw(leaves(K1)), draw(leaves(V1)))
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


@st.composite
def specs(draw: st.DrawFn) -> RecurrenceSpec:
    """A spec with a state [K, V], linear in it, with reads of all kinds."""
    past, now = ex.Symbol("S", KV, -1), ex.Symbol("S", KV, 0)
    terms = [ex.mul((draw(expressions(ex.SCALAR, 1)), past))] if draw(st.booleans()) else []
    terms += [ex.mul((draw(expressions(KK, draw(st.integers(0, 2)))), past))]
    terms += [ex.outer(draw(expressions(K1, 2)), draw(expressions(V1, 1)))]
    order = draw(st.permutations(terms))
    reads = [ex.mul((ex.transpose(draw(st.sampled_from([past, now]))), draw(expressions(K1, 1))))]
    if draw(st.booleans()):
        reads.append(draw(expressions(V1, 2)))
    start = draw(st.sampled_from([0.0, 0.5, -1e-3, float("-inf")]))
    return RecurrenceSpec(
        draw(st.sampled_from(["r", "gated_rule", "ψ2"])),
        INPUTS,
        CONSTS,
        (State("S", ("K", "V"), start),),
        (Equation("S", ex.add(order)),),
        (Equation(draw(st.sampled_from(["o", "y"])), ex.add(reads)),),
    )
