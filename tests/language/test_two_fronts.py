"""An expression written the same way in Python and in text means the same."""

# mypy: ignore-errors

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import linalg_dsl.language.builder as ld
from linalg_dsl.language.parser import parse

Shape = tuple[str, str]
SCALAR, KEY, VALUE, MATRIX = ("1", "1"), ("K", "1"), ("V", "1"), ("K", "V")
SUM, PRODUCT, FACTOR = range(3)
"""The loosest operator that a piece of text may have outside parentheses."""

Both = tuple[str, str]
LEAVES: dict[Shape, list[Both]] = {
    SCALAR: [("g", "g_t"), ("a", "a_t"), ("gamma", "gamma"), ("c", "c"), ("2", "2"), ("0.5", "0.5")],
    KEY: [
        ("q", "q_t"),
        ("k", "k_t"),
        ("kk[1]", "kk_{t,2}"),
        ("u", "u"),
        ("ld.prev(k)", "k_{t-1}"),
        ("ld.prev(kk)[0]", "kk_{t-1,1}"),
        ("(M @ q)", "(M_t q_t)"),
        ("n", "n_{t-1}"),
    ],
    VALUE: [("v", "v_t"), ("(X.T @ k)", "(X_tᵀ k_t)")],
    MATRIX: [("ld.outer(k, v)", "outer(k_t, v_t)"), ("X", "X_t"), ("ld.exp(G)", "exp(G_t)")],
}


@st.composite
def written(draw: st.DrawFn, shape: Shape, level: int, depth: int) -> Both:
    """An expression in Python and in text, sign for sign."""
    if shape not in LEAVES:
        inner = draw(written((shape[1], shape[0]), FACTOR, depth - 1))
        return f"{inner[0]}.T", f"{inner[1]}ᵀ"
    kinds = ["leaf"]
    if depth > 0:
        kinds = ["group", "call"]
        kinds += ["power"] if shape == SCALAR else []
        kinds += ["scale", "divide", "product"] * (level <= PRODUCT)
        kinds += ["plus", "minus", "negate"] * (level <= SUM)

    def part(of: Shape, at: int) -> Both:
        return draw(written(of, at, depth - 1))

    match draw(st.sampled_from(kinds)):
        case "leaf":
            return draw(st.sampled_from(LEAVES[shape]))
        case "group":
            x = part(shape, SUM)
            return f"({x[0]})", f"({x[1]})"
        case "call":
            x = part(shape, SUM)
            function = draw(st.sampled_from(["exp", "tanh", "sigmoid"]))
            return f"ld.{function}({x[0]})", f"{function}({x[1]})"
        case "power":
            x = part(SCALAR, SUM)
            exponent = draw(st.sampled_from(["2", "-1", "0.5"]))
            return f"ld.exp({x[0]}) ** {exponent}", f"exp({x[1]})^{exponent}"
        case "scale":
            x, y = part(SCALAR, FACTOR), part(shape, FACTOR)
            sign = draw(st.sampled_from([" ", " * ", " · "]))
            if x[1][0].isdigit() and y[1][0].isdigit():
                sign = " * "
            return f"{x[0]} * {y[0]}", f"{x[1]}{sign}{y[1]}"
        case "divide":
            x, y = part(shape, PRODUCT), part(SCALAR, FACTOR)
            return f"{x[0]} / ({y[0]} + 3 * g)", f"{x[1]} / ({y[1]} + 3 g_t)"
        case "product":
            middle = draw(st.sampled_from(["K", "V"]))
            left: Shape = (shape[0], "1") if shape == MATRIX else ("1", middle)
            right: Shape = ("1", shape[1]) if shape == MATRIX else (middle, "1")
            if shape in (KEY, VALUE):
                other = "V" if shape == KEY else "K"
                left, right = (shape[0], other), (other, "1")
            x, y = part(left, FACTOR), part(right, FACTOR)
            return f"{x[0]} @ {y[0]}", draw(st.sampled_from([f"{x[1]} {y[1]}", f"{x[1]} @ {y[1]}"]))
        case "plus":
            x, y = part(shape, SUM), part(shape, PRODUCT)
            return f"{x[0]} + {y[0]}", f"{x[1]} + {y[1]}"
        case "minus":
            x, y = part(shape, SUM), part(shape, PRODUCT)
            return f"{x[0]} - {y[0]}", f"{x[1]} - {y[1]}"
        case _:
            x = part(shape, PRODUCT)
            return f"-{x[0]}", f"-{x[1]}"


HEAD = """recurrence f
input q, k : [K]
input v : [V]
input g : log gate
input a : scalar in (0, 1)
input kk : [2, K]
input M : [K, K]
input X : [K, V]
input G : log gate [K, V]
param u : [K]
param gamma : scalar
const c = 3
state S : [K, V]
state n : [K]
"""


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(written(MATRIX, PRODUCT, 4), written(KEY, SUM, 3), written(VALUE, SUM, 4))
def test_the_same_signs_mean_the_same(update: Both, side: Both, read: Both) -> None:
    def f(
        S: object,
        n: ld.State(ld.K),
        q: ld.K,
        k: ld.K,
        v: ld.V,
        g: ld.LogGate,
        a: ld.Scalar(0, 1),
        kk: ld.Vectors(2, ld.K),
        M: ld.Matrix(ld.K, ld.K),
        X: ld.Matrix(ld.K, ld.V),
        G: ld.LogGate(ld.K, ld.V),
        u: ld.Param(ld.K),
        gamma: ld.Param(),
        c: object = 3,
    ) -> object:
        names = {**locals(), "ld": ld}
        new = S + eval(update[0], names)
        return new, ld.tanh(n + eval(side[0], names)), new.T @ q + eval(read[0], names)

    f.__annotations__ = {n: a for n, a in f.__annotations__.items() if n not in ("S", "c", "return")}
    text = f"{HEAD}S_t = S_{{t-1}} + {update[1]}\nn_t = tanh(n_{{t-1}} + {side[1]})\n"
    text += f"o_t = S_tᵀ q_t + {read[1]}"
    assert ld.recurrence(f).spec == parse(text)
