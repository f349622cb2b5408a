"""Random recurrences as text, mostly well shaped, from a small grammar of terms."""

from __future__ import annotations

from hypothesis import strategies as st

HEADER = """recurrence drawn
const n = 2
const c = 0.5
input k, q, p : [K]
input v, w : [V]
input beta : scalar in (0, 1)
input g : log gate
input h : log gate [K]
input x : [n, K]
input y : [n, V]
input z : [n]
"""
Text = st.SearchStrategy[str]
LEAVES = {
    "key": ["k_t", "q_t", "p_t"],
    "value": ["v_t", "w_t"],
    "scalar": [
        "beta_t",
        "exp(g_t)",
        "c",
        "0.5",
        "(k_tᵀ q_t)",
        "-2",
        "sum(k_t)",
        "dot(v_t, w_t)",
        "z_{t,1}",
        "1/K",
    ],
    "square": ["I", "diag(exp(h_t))", "(k_t k_tᵀ)", "exp(g_t) I"],
    "matrix": ["S_{t-1}", "(k_t v_tᵀ)", "(x_tᵀ y_t)"],
}
RULES = {
    "key": [
        "({key} + {key})", "({scalar} {key})", "({key} ⊙ {key})", "({square} {key})", "exp({key})",
        "({key} / {scalar})", "(x_tᵀ z_t)", "({key} - 1)", "l2norm({key})",
    ],
    "value": [
        "({value} - {value})", "({scalar} {value})",
        "({value} ⊙ {value})", "(S_{{t-1}}ᵀ {key})", "(y_tᵀ z_t)",
        "({matrix}ᵀ {key})",
    ],
    "scalar": [
        "({scalar} + {scalar})", "({key}ᵀ {key})", "sigmoid({scalar})", "({scalar} {scalar})",
        "(k_tᵀ S_{{t-1}} v_t)",
    ],
    "square": [
        "({square} - {square})", "({square} {square})",
        "diag({key})", "({key} {key}ᵀ)", "({scalar} {square})",
        "(x_tᵀ diag(z_t) x_t)", "({scalar} + {square})",
    ],
    "matrix": [
        "({matrix} + {matrix})", "({square} {matrix})", "({key} {value}ᵀ)", "({scalar} {matrix})",
        "({matrix} ⊙ ({key} {value}ᵀ))", "({matrix} / {scalar})", "(x_tᵀ (y_t - x_t {matrix}))",
        "({matrix} diag({value}))", "({matrix} ({value} {value}ᵀ))", "({matrix} (I - {value} {value}ᵀ))",
    ],
}  # fmt: skip


@st.composite
def texts(draw_from: st.DrawFn, kind: str, depth: int) -> str:
    """An expression of a kind, at most so deep."""
    if depth == 0 or draw_from(st.integers(0, 3)) == 0:
        return draw_from(st.sampled_from(LEAVES[kind]))
    rule = draw_from(st.sampled_from(RULES[kind]))
    parts = {k: f"\0{k}\0" for k in LEAVES}
    pieces = rule.format(**parts).split("\0")
    return "".join(draw_from(texts(p, depth - 1)) if p in LEAVES else p for p in pieces)


UPDATES = st.tuples(st.sampled_from(["exp(g_t)", "diag(exp(h_t))", "0.9"]), texts("matrix", 3)).map(
    lambda t: f"S_t = {t[0]} S_{{t-1}} + {t[1]}"
)
OUTPUTS = st.one_of(
    st.just("S_tᵀ q_t"),
    st.tuples(texts("key", 2), texts("value", 2)).map(lambda t: f"S_tᵀ {t[0]} + {t[1]}"),
)
