"""Random lines of every class whose numbers stay ordinary, as text over one set of declarations."""

from __future__ import annotations

from hypothesis import strategies as st

DECLARATIONS = """
input q, r : [K]
input k, p : [K] unit
input v, u : [V]
input g : log gate
input a : log gate [K]
input f : gate [K]
input c : log gate [V]
input d : gate [V] in (-1, 1)
input e : gate [K] in [-1, 1]
input n : gate in [0, 1]
input x, y : scalar
input beta : scalar in (0, 1)
param w : [K]
param gamma : scalar
const scale = 1 / sqrt(K)
"""
GATES = st.sampled_from([
    "exp(g_t)", "diag(exp(a_t))", "exp(g_t) diag(exp(a_t))", "sigmoid(x_t)^(1/16)", "diag(f_t)",
    "sigmoid(gamma)", "diag(exp(a_t)) sigmoid(y_t)", "diag(1 - 0.5 beta_t f_t)",
    "exp(beta_t g_t)", "diag(exp(a_t / (1 + beta_t)))",
])  # fmt: skip
ERASES = st.sampled_from([
    "beta_t k_t k_tᵀ", "beta_t k_t p_tᵀ", "0.5 p_t p_tᵀ", "x_t p_t (w ⊙ k_t)ᵀ", "tanh(y_t) k_t k_tᵀ",
    "beta_t l2norm(r_t) l2norm(r_t)ᵀ",
])  # fmt: skip
WRITES = st.sampled_from([
    "k_t v_tᵀ", "beta_t k_t v_tᵀ", "p_t (u_t ⊙ v_t)ᵀ", "diag(f_t) k_t u_tᵀ", "(1 - f_t) v_tᵀ",
    "x_t r_t softmax(u_t)ᵀ", "k_t tanh(v_t + y_t)ᵀ",
])  # fmt: skip
READS = st.sampled_from([
    "S_tᵀ q_t", "scale S_tᵀ q_t", "S_{t-1}ᵀ q_t", "silu(u_t) ⊙ (S_tᵀ q_t)", "S_tᵀ (q_t - 0.3 p_t)",
    "scale (S_{t-1} + diag(w) k_t v_tᵀ)ᵀ q_t", "S_tᵀ q_t - S_{t-1}ᵀ r_t", "x_t S_tᵀ q_t + y_t v_t",
])  # fmt: skip


SIGNED = st.sampled_from([
    "n_t", "diag(e_t)", "(1 - 2 beta_t)", "tanh(x_t)", "diag(tanh(r_t)) exp(g_t)", "(-0.7)",
    "diag(1 - 2 f_t)",
])  # fmt: skip
VALUE_GATES = st.sampled_from(["diag(exp(c_t))", "diag(d_t)", "diag(sigmoid(u_t))", "diag(exp(c_t)) n_t"])
VALUE_ERASES = st.sampled_from([
    "beta_t v_t v_tᵀ", "0.3 v_t u_tᵀ", "tanh(y_t) l2norm(u_t) l2norm(v_t)ᵀ", "beta_t (d_t ⊙ v_t) u_tᵀ",
])  # fmt: skip
ACROSS = st.sampled_from([
    "S_tᵀ q_t", "S_t u_t", "S_{t-1} v_t + q_t", "silu(q_t) ⊙ (S_t u_t)", "S_t u_t - S_{t-1} v_t",
    "n_t S_{t-1} u_t",
])  # fmt: skip


@st.composite
def wider_updates(choose: st.DrawFn) -> str:
    """A line with gates on either axis, of either sign, and erases along one of them, or no decay at all."""
    key_gate = choose(st.one_of(st.just(""), GATES, SIGNED))
    value_gate = choose(st.one_of(st.just(""), VALUE_GATES))
    left, right = [key_gate] if key_gate else [], [value_gate] if value_gate else []
    kind = choose(st.sampled_from(["none", "key", "value", "low rank"]))
    if kind == "key":  # an erase reads the state after the gate of the other axis
        left.insert(0, f"(I - {choose(ERASES)})")
    if kind == "value":
        right.append(f"(I - {choose(VALUE_ERASES)})")
    past = " ".join([*left, "S_{t-1}", *right])
    if kind == "low rank":
        past = choose(st.sampled_from(["p_t k_tᵀ S_{t-1}", "S_{t-1} (0.5 v_t u_tᵀ)"]))
    return " + ".join([past, *choose(st.lists(WRITES, min_size=1, max_size=2, unique=True))])


@st.composite
def updates(choose: st.DrawFn) -> str:
    """A line of the chunk classes, gates and erases in any order."""
    erases = choose(st.lists(ERASES, max_size=2))
    factors = [f"(I - {e})" for e in erases]
    if choose(st.booleans()):
        factors.insert(choose(st.integers(0, len(factors))), choose(GATES))
    past = " ".join([*factors, "S_{t-1}"])
    if len(erases) == 1 and choose(st.booleans()):
        gate = choose(GATES)
        past = f"{gate} S_{{t-1}} - {erases[0]} S_{{t-1}}"
    return " + ".join([past, *choose(st.lists(WRITES, min_size=1, max_size=2, unique=True))])


VECTOR_GATES = st.sampled_from(["f_t", "sigmoid(r_t)", "exp(a_t)", "e_t", "tanh(r_t)"])
NORMALISED = st.sampled_from([
    "S_tᵀ q_t / max(abs(z_tᵀ q_t), 1)", "S_tᵀ q_t / (1 + (z_tᵀ q_t)^2)", "S_tᵀ (q_t / (1 + z_tᵀ z_t))",
])  # fmt: skip
MORE_DECLARATIONS = """
input h : [2]
input kk : [2, K]
input vv : [2, V]
input b : [2] in (0, 1)
input A : log gate [K, V]
"""


@st.composite
def several_states(choose: st.DrawFn) -> str:
    """The lines of a recurrence beyond one matrix state: each kind has its own, gates and writes vary."""
    gate, write = choose(GATES), choose(WRITES)
    erase = choose(ERASES)
    vector = choose(VECTOR_GATES)
    match choose(
        st.sampled_from(
            ["normaliser", "momentum", "vector", "scalar", "shift", "substeps", "slots", "full", "two sides",
             "fed", "maximum"]
        )
    ):  # fmt: skip
        case "normaliser":
            states = f"S_t = {gate} S_{{t-1}} + k_t v_tᵀ\nz_t = {gate} z_{{t-1}} + k_t"
            return f"{states}\no_t = {choose(NORMALISED)}"
        case "momentum":
            return (
                f"M_t = exp(g_t) M_{{t-1}} + beta_t k_t (v_t - S_{{t-1}}ᵀ k_t)ᵀ\n"
                f"S_t = {gate} S_{{t-1}} + 0.5 M_t\no_t = S_tᵀ q_t"
            )
        case "vector":
            read = choose(st.sampled_from(["z_t", "q_t ⊙ z_t", "tanh(z_t)", "z_{t-1}"]))
            return f"z_t = {vector} ⊙ z_{{t-1}} + (1 - f_t) ⊙ k_t\no_t = {read}"
        case "scalar":
            return "s_t = sigmoid(x_t) s_{t-1} + q_tᵀ k_t\no_t = s_t v_t"
        case "shift":
            return f"S_t = {gate} S_{{t-1}} + {write} + beta_t k_{{t-1}} v_{{t-1}}ᵀ\no_t = {choose(READS)}"
        case "substeps":
            head = f"S_t = {gate} S_{{t-1}}\n" if choose(st.booleans()) else ""
            return (
                f"{head}for j in 1..2:\n"
                f"    S_t = S_t - b_{{t,j}} kk_{{t,j}} (kk_{{t,j}}ᵀ S_t - vv_{{t,j}}ᵀ)\no_t = S_tᵀ q_t"
            )
        case "slots":
            return (
                f"state P : [K, 2]\nstate S : [2, V]\nP_t = {gate} P_{{t-1}} + k_t h_tᵀ\n"
                "S_t = exp(g_t) S_{t-1} + h_t v_tᵀ\no_t = S_tᵀ softmax(P_tᵀ q_t)"
            )
        case "full":
            return f"S_t = exp(A_t) ⊙ S_{{t-1}} + {write}\no_t = {choose(READS)}"
        case "two sides":
            return (
                f"S_t = {gate} (I - {erase}) S_{{t-1}} (I - {choose(VALUE_ERASES)}) + {write}\no_t = S_tᵀ q_t"
            )
        case "fed":
            return (
                f"z_t = f_t ⊙ z_{{t-1}} + (1 - f_t) ⊙ (k_t ⊙ k_t)\n"
                f"S_t = {gate} S_{{t-1}} + (k_t / (1 + z_tᵀ z_t)) v_tᵀ\no_t = {choose(READS)}"
            )
        case _:
            return (
                "m_t = max(m_{t-1} + g_t, x_t)\n"
                "S_t = exp(m_{t-1} + g_t - m_t) S_{t-1} + exp(x_t - m_t) k_t v_tᵀ\no_t = S_tᵀ q_t"
            )
