"""Recurrences of coupled states: some by hand, and random ones for hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from linalg_dsl.algebra.traverse import symbols
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec

_INPUTS = """
input q, x : [K]
input k, p, y : [K] unit
input v, z : [V]
input u : [V] unit
input g, h, f : log gate
input a : log gate [K]
input r : log gate [V]
input s : gate in (-1, 1)
input b, c, d, e : scalar in (0, 1)
"""
_BODIES = {
    "momentum": """
state M, S : [K, V]
M_t = exp(h_t) M_{t-1} - c_t k_t (v_t - S_{t-1}ᵀ p_t)ᵀ
S_t = exp(g_t) S_{t-1} - b_t M_t
o_t = S_tᵀ q_t
""",
    "nesterov": """
state M, S : [K, V]
M_t = b_t M_{t-1} - c_t k_t (v_t - S_{t-1}ᵀ p_t - b_t M_{t-1}ᵀ p_t)ᵀ
S_t = exp(g_t) S_{t-1} - M_t
o_t = S_tᵀ q_t
""",
    "three": """
state A, B, C : [K, V]
A_t = exp(g_t) A_{t-1} + k_t v_tᵀ - b_t k_t (p_tᵀ C_{t-1})
B_t = exp(h_t) B_{t-1} + c_t A_t
C_t = exp(f_t) C_{t-1} + d_t B_{t-1} - e_t A_{t-1} + y_t z_tᵀ
o_t = C_tᵀ q_t + B_{t-1}ᵀ x_t + 0.5 A_tᵀ q_t
""",
    "four_one_way": """
state A, B, C, D : [K, V]
A_t = exp(g_t) A_{t-1} + k_t v_tᵀ
B_t = s_t B_{t-1} + c_t A_t
C_t = C_{t-1} + d_t B_t
D_t = exp(f_t) D_{t-1} + e_t C_{t-1} + b_t A_{t-1}
o_t = D_tᵀ q_t
""",
    "two_time_scales": """
state A, B : [K, V]
A_t = diag(exp(a_t)) A_{t-1} + b_t k_t (v_t - A_{t-1}ᵀ k_t - B_{t-1}ᵀ k_t)ᵀ
B_t = exp(g_t) B_{t-1} + c_t k_t (v_t - A_{t-1}ᵀ k_t - B_{t-1}ᵀ k_t)ᵀ
o_t = A_tᵀ q_t + d_t B_{t-1}ᵀ x_t
""",
    "gates_of_their_own": """
state A, B : [V, K]
A_t = exp(g_t) diag(exp(r_t)) A_{t-1} - b_t u_t (u_tᵀ (diag(exp(r_t)) A_{t-1} + B_{t-1}) - k_tᵀ) + v_t p_tᵀ
B_t = diag(exp(r_t + f_t)) B_{t-1} - c_t u_t (u_tᵀ A_{t-1}) + 0.5 z_t y_tᵀ
o_t = A_t q_t + B_t x_t
""",
    "plain_sum": """
state A, B : [K, V]
A_t = A_{t-1} + k_t v_tᵀ
B_t = B_{t-1} + A_{t-1}
o_t = B_tᵀ q_t
""",
    "signed": """
state M, S : [K, V]
M_t = s_t M_{t-1} - c_t k_t (v_t - S_{t-1}ᵀ p_t)ᵀ
S_t = exp(g_t) S_{t-1} + b_t M_{t-1}
o_t = S_tᵀ q_t + M_{t-1}ᵀ x_t
""",
    "value_side": """
state M, S : [K, V]
M_t = exp(h_t) M_{t-1} - c_t (k_t - S_{t-1} u_t) u_tᵀ
S_t = exp(g_t) S_{t-1} + b_t M_t
o_t = S_tᵀ q_t
""",
    "value_first": """
state M, S : [V, K]
M_t = exp(h_t) M_{t-1} - c_t (v_t - S_{t-1} k_t) k_tᵀ
S_t = exp(g_t) S_{t-1} + b_t M_t
o_t = S_t q_t
""",
    "common_channel": """
state M, S : [K, V]
M_t = exp(h_t) diag(exp(a_t)) M_{t-1} - c_t k_t (v_t - S_{t-1}ᵀ p_t)ᵀ
S_t = diag(exp(a_t)) S_{t-1} + b_t M_t
o_t = S_tᵀ q_t
""",
    "separable": """
state M, S : [K, V]
M_t = diag(exp(a_t)) M_{t-1} diag(exp(r_t)) - c_t k_t (v_t - diag(exp(r_t)) S_{t-1}ᵀ diag(exp(a_t)) p_t)ᵀ
S_t = exp(g_t) diag(exp(a_t)) S_{t-1} diag(exp(r_t)) + b_t M_t
o_t = S_tᵀ q_t
""",
    "across": """
state M, S : [K, V]
M_t = exp(h_t) M_{t-1} - c_t k_t (v_t - S_{t-1}ᵀ p_t)ᵀ
S_t = exp(g_t) S_{t-1} + b_t M_t
o_t = S_t u_t + M_{t-1} v_t
""",
    "erases_both": """
state M, S : [K, V]
M_t = (I - c_t k_t k_tᵀ) exp(h_t) M_{t-1} + k_t v_tᵀ
S_t = (I - b_t p_t p_tᵀ) (exp(g_t) S_{t-1} + d_t M_t)
o_t = S_tᵀ q_t
""",
    "reads_a_present": """
state M, S : [K, V]
M_t = exp(h_t) M_{t-1} + k_t (v_t - S_{t-1}ᵀ k_t)ᵀ
S_t = exp(g_t) S_{t-1} + b_t y_t (z_t - M_tᵀ p_t)ᵀ + c_t M_{t-1}
o_t = S_tᵀ q_t
""",
}


def of(name: str, body: str) -> RecurrenceSpec:
    """The recurrence of these lines, with those inputs that they use."""
    spec = parse(f"recurrence {name}\n{_INPUTS}{body}")
    used = {s.name for e in (*spec.updates, *spec.outputs) for s in symbols(e.value)}
    return replace(spec, inputs=tuple(i for i in spec.inputs if i.name in used))


BY_HAND = {name: of(name, body) for name, body in _BODIES.items()}

_GATES = st.sampled_from(["exp(g_t)", "exp(h_t)", "exp(f_t)", "s_t", "b_t", "(1 - c_t)", "0.5", "1"])
_COUPLINGS = st.sampled_from(["b_t", "-c_t", "(d_t - e_t)", "s_t", "0.5", "-1", "1", "exp(h_t)"])
_LEFT, _READ = ("k_t", "p_t", "y_t"), ("k_t", "p_t", "(p_t - k_t)")


@st.composite
def random_stacks(draw: st.DrawFn) -> RecurrenceSpec:
    """Two to four states in a random triangular coupling, of pasts and presents, with up to three erases."""
    n = draw(st.integers(2, 4))
    names = draw(st.permutations(["A", "B", "C", "D"]))[:n]
    common = draw(st.sampled_from(["", "", "diag(exp(a_t)) "]))
    lines, erases = [], 0
    for i, name in enumerate(names):
        terms = [] if draw(st.integers(0, 5)) == 0 else [f"{draw(_GATES)} {common}{name}_{{t-1}}"]
        needed = draw(st.integers(0, i - 1)) if i else -1
        for j, other in enumerate(names[:i]):  # a state takes up those above it, and one of them in any case
            match draw(st.sampled_from([*([] if j == needed else [""]), "past", "present"])):
                case "past":
                    terms.append(f"{draw(_COUPLINGS)} {common}{other}_{{t-1}}")
                case "present":
                    terms.append(f"{draw(_COUPLINGS)} {other}_t")
        if i == 0 or draw(st.booleans()):
            terms.append(f"{draw(_COUPLINGS)} {draw(st.sampled_from(_LEFT))} v_tᵀ")
        if erases < 3 and draw(st.booleans()):
            erases += 1
            read = draw(st.sampled_from(names))
            left, along = draw(st.sampled_from(_LEFT)), draw(st.sampled_from(_READ))
            terms.append(
                f"{draw(st.sampled_from(['-b_t', '-c_t', '-0.5']))} {left} ({read}_{{t-1}}ᵀ {along})ᵀ"
            )
        lines.append(f"{name}_t = {' + '.join(terms)}")
    reads = [f"{names[-1]}_tᵀ q_t"]
    for name in names:
        time = draw(st.sampled_from(["", "", "_t", "_{t-1}"]))
        reads += [f"{draw(_COUPLINGS)} {name}{time}ᵀ {draw(st.sampled_from(['q_t', 'x_t']))}"] if time else []
    layout = f"state {', '.join(names)} : [K, V]"
    return of("random_stack", "\n".join([layout, *lines, f"o_t = {' + '.join(reads)}", ""]))
