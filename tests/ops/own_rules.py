"""Recurrences that stand in no paper and no catalogue, each beside one token of it in plain torch.

Products of factors on either side in odd orders, reads before, between and after, substeps, shifts, coupled
states, gates of both signs and exact zeros, states of every shape; in the notations of several papers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from loop_kit import At, Result, columns, outer, rows, unit

diag = torch.diag
sigmoid, tanh, relu = torch.sigmoid, torch.tanh, torch.relu
softplus = torch.nn.functional.softplus


def eye(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(x.shape[0], dtype=x.dtype)


RULES: dict[str, tuple[str, Callable[[At, At], Result]]] = {}


def rule(text: str) -> Callable[[Callable[[At, At], Result]], Callable[[At, At], Result]]:
    """Adds a rule; the function under it is one token."""

    def add(step: Callable[[At, At], Result]) -> Callable[[At, At], Result]:
        name = step.__name__
        RULES[name] = f"recurrence {name}\n{text.lstrip()}", step
        return step

    return add


COMMON = "input q, k, p : [K]\ninput v, u : [V]\n"


@rule(
    COMMON
    + """
input g : log gate [K]
input b : scalar in (0, 2)
S_t = diag(exp(g_t)) (I - b_t p_t k_tᵀ) S_{t-1} (I - 0.3 u_t u_tᵀ) + k_t v_tᵀ
o_t = S_tᵀ q_t
"""
)
def both_sides(x: At, s: At) -> Result:
    S = rows(x.g.exp(), (eye(x.k) - x.b * outer(x.p, x.k)) @ s.S @ (eye(x.u) - 0.3 * outer(x.u, x.u)))
    S = S + outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


@rule(
    COMMON
    + """
input g : log gate [K]
input r : log gate [V]
input b : scalar in (0, 1)
S_t = (I - b_t k_t k_tᵀ) diag(exp(g_t)) S_{t-1} diag(exp(r_t)) + b_t k_t v_tᵀ
o_t = S_{t-1}ᵀ q_t + (p_tᵀ k_t) v_t
"""
)
def separable_before(x: At, s: At) -> Result:
    S = (eye(x.k) - x.b * outer(x.k, x.k)) @ rows(x.g.exp(), columns(s.S, x.r.exp())) + x.b * outer(x.k, x.v)
    return s.S.T @ x.q + (x.p @ x.k) * x.v, {"S": S}


@rule(
    COMMON
    + """
input a : gate in (-1, 1)
input b : scalar in (0, 2)
S_t = a_t (I - b_t k_t k_tᵀ) (I - p_t p_tᵀ / 4) S_{t-1} + b_t k_t v_tᵀ
o_t = S_tᵀ q_t - S_{t-1}ᵀ p_t
"""
)
def signed_two_reads(x: At, s: At) -> Result:
    S = x.a * (eye(x.k) - x.b * outer(x.k, x.k)) @ (eye(x.k) - outer(x.p, x.p) / 4) @ s.S + x.b * outer(
        x.k, x.v
    )
    return S.T @ x.q - s.S.T @ x.p, {"S": S}


@rule(
    COMMON
    + """
input a : gate [K] in [0, 1]
S_t = diag(a_t) S_{t-1} + k_t v_tᵀ + p_{t-1} u_tᵀ
o_t = u_t ⊙ (S_tᵀ q_t)
"""
)
def zeros_and_shift(x: At, s: At) -> Result:
    S = rows(x.a, s.S) + outer(x.k, x.v) + outer(x.before.p, x.u)
    return x.u * (S.T @ x.q), {"S": S}


@rule("""
const n = 2
input q : [K]
input k : [n, K] unit
input v : [n, V]
input b : [n] in (0, 2)
input g : log gate
S_t = exp(g_t) S_{t-1}
for j in 1..n:
    S_t = S_t - b_{t,j} k_{t,j} (k_{t,j}ᵀ S_t - v_{t,j}ᵀ)
o_t = S_tᵀ q_t
""")
def two_substeps(x: At, s: At) -> Result:
    S = x.g.exp() * s.S
    for j in range(2):
        S = S - x.b[j] * outer(x.k[j], x.k[j] @ S - x.v[j])
    return S.T @ x.q, {"S": S}


@rule("""
input q, d : [K]
input k : [2, K]
input v : [2, V]
input w : log gate [K]
S_t = diag(exp(w_t)) (S_{t-1} - 0.2 d_t d_tᵀ S_{t-1})
for j in 1..2:
    S_t = S_t (I - 0.1 v_{t,j} v_{t,j}ᵀ) + k_{t,j} v_{t,j}ᵀ
o_t = S_tᵀ q_t
""")
def substeps_on_the_other_side(x: At, s: At) -> Result:
    S = rows(x.w.exp(), s.S - 0.2 * outer(x.d, x.d @ s.S))
    for j in range(2):
        S = S @ (eye(x.v[j]) - 0.1 * outer(x.v[j], x.v[j])) + outer(x.k[j], x.v[j])
    return S.T @ x.q, {"S": S}


@rule(
    COMMON
    + """
input m : log gate
input a : log gate
input e : scalar in (0, 1)
M_t = exp(m_t) M_{t-1} + e_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ
S_t = exp(a_t) S_{t-1} + M_t
o_t = S_tᵀ q_t + M_tᵀ p_t
"""
)
def momentum_two_reads(x: At, s: At) -> Result:
    M = x.m.exp() * s.M + x.e * outer(x.k, x.v - s.S.T @ x.k)
    S = x.a.exp() * s.S + M
    return S.T @ x.q + M.T @ x.p, {"S": S, "M": M}


@rule(
    COMMON
    + """
input a, b, c : log gate
A_t = exp(a_t) A_{t-1} + k_t v_tᵀ
B_t = exp(b_t) B_{t-1} + 0.5 A_{t-1}
C_t = exp(c_t) C_{t-1} - 0.25 B_t
o_t = C_tᵀ q_t + A_{t-1}ᵀ p_t
"""
)
def chain_of_three(x: At, s: At) -> Result:
    A = x.a.exp() * s.A + outer(x.k, x.v)
    B = x.b.exp() * s.B + 0.5 * s.A
    C = x.c.exp() * s.C - 0.25 * B
    return C.T @ x.q + s.A.T @ x.p, {"A": A, "B": B, "C": C}


@rule(
    COMMON
    + """
input g : log gate [K, V]
S_t = exp(g_t) ⊙ S_{t-1} + k_t v_tᵀ - p_t u_tᵀ
o_t = S_tᵀ q_t
"""
)
def full_gate_two_writes(x: At, s: At) -> Result:
    S = x.g.exp() * s.S + outer(x.k, x.v) - outer(x.p, x.u)
    return S.T @ x.q, {"S": S}


@rule("""
input f, c, z : [V]
h_t = sigmoid(f_t) ⊙ h_{t-1} + (1 - sigmoid(f_t)) ⊙ c_t
o_t = tanh(z_t) ⊙ h_t + h_{t-1}
state h : [V]
""")
def vector_scan(x: At, s: At) -> Result:
    h = sigmoid(x.f) * s.h + (1 - sigmoid(x.f)) * x.c
    return tanh(x.z) * h + s.h, {"h": h}


@rule("""
input q, k : [K]
input v : [V]
input N : [V, V]
S_t = 0.2 S_{t-1} N_t + k_t v_tᵀ
o_t = S_tᵀ q_t
""")
def dense_on_the_right(x: At, s: At) -> Result:
    S = 0.2 * s.S @ x.N + outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


@rule("""
input q, k : [K]
input v : [V]
input M : [K, K]
S_t = S_{t-1} - 0.1 M_tᵀ (M_t S_{t-1} - k_t v_tᵀ)
o_t = S_{t-1}ᵀ q_t
""")
def least_squares(x: At, s: At) -> Result:
    S = s.S - 0.1 * x.M.T @ (x.M @ s.S - outer(x.k, x.v))
    return s.S.T @ x.q, {"S": S}


@rule(
    COMMON
    + """
input g : log gate
n_t = exp(g_t) n_{t-1} + k_t
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
o_t = (S_tᵀ q_t) / max(abs(n_tᵀ q_t), 1)
state n : [K]
"""
)
def normalised(x: At, s: At) -> Result:
    n = x.g.exp() * s.n + x.k
    S = x.g.exp() * s.S + outer(x.k, x.v)
    return (S.T @ x.q) / (n @ x.q).abs().clamp_min(1), {"n": n, "S": S}


@rule("""
const m = 3
input q, k : [K]
input v : [V]
input a : log gate [m]
state A : [K, m]
state B : [m, V]
A_t = A_{t-1} diag(exp(a_t)) + k_t (1 - exp(a_t))ᵀ
B_t = diag(exp(a_t)) B_{t-1} + (1 - exp(a_t)) v_tᵀ
o_t = B_tᵀ softmax(0.5 A_tᵀ q_t)
""")
def slots(x: At, s: At) -> Result:
    a = x.a.exp()
    A = columns(s.A, a) + outer(x.k, 1 - a)
    B = rows(a, s.B) + outer(1 - a, x.v)
    return B.T @ torch.softmax(0.5 * A.T @ x.q, 0), {"A": A, "B": B}


@rule(
    COMMON
    + """
state S : [V, K]
input w : log gate [K]
input b : scalar in (0, 1)
S_t = S_{t-1} diag(exp(w_t)) (I - b_t k_t k_tᵀ) + b_t v_t k_tᵀ
o_t = S_t (q_t - 0.3 k_t)
"""
)
def transposed_layout(x: At, s: At) -> Result:
    S = columns(s.S, x.w.exp()) @ (eye(x.k) - x.b * outer(x.k, x.k)) + x.b * outer(x.v, x.k)
    return S @ (x.q - 0.3 * x.k), {"S": S}


@rule(
    COMMON
    + """
state S : [V, K]
input w : log gate [V]
S_t = (I - 0.2 v_t v_tᵀ) diag(exp(w_t)) S_{t-1} + u_t k_tᵀ
o_t = S_tᵀ v_t + S_{t-1}ᵀ u_t
"""
)
def read_along_the_erased_axis(x: At, s: At) -> Result:
    S = (eye(x.v) - 0.2 * outer(x.v, x.v)) @ rows(x.w.exp(), s.S) + outer(x.u, x.k)
    return S.T @ x.v + s.S.T @ x.u, {"S": S}


@rule(
    COMMON
    + """
input r : [K]
S_t = k_t (p_tᵀ S_{t-1}) + r_t (q_tᵀ S_{t-1}) / 2 + k_t v_tᵀ
o_t = S_tᵀ q_t
"""
)
def low_rank_alone(x: At, s: At) -> Result:
    S = outer(x.k, x.p @ s.S) + outer(x.r, x.q @ s.S) / 2 + outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


@rule(
    COMMON
    + """
input a : scalar
input w : [K]
param l : scalar
alpha_t = exp(-softplus(a_t + l))
β_t = sigmoid(w_t)
kb_t = l2norm(k_t)
S_t = alpha_t (S_{t-1} - kb_t (β_t ⊙ kb_t)ᵀ S_{t-1}) + kb_t v_tᵀ
o_t = S_tᵀ q_t
"""
)
def gate_by_channel_of_an_erase(x: At, s: At) -> Result:
    al, kb = torch.exp(-softplus(x.a + x.l)), unit(x.k)
    S = al * (s.S - outer(kb, (sigmoid(x.w) * kb) @ s.S)) + outer(kb, x.v)
    return S.T @ x.q, {"S": S}


@rule(
    COMMON
    + """
input g : log gate in (-inf, 1]
S_t = exp(g_t) (I - p_t p_tᵀ / 8) S_{t-1} + v_tᵀ u_t k_t v_tᵀ
o_t = S_tᵀ q_t
"""
)
def grows(x: At, s: At) -> Result:
    S = x.g.exp() * (eye(x.p) - outer(x.p, x.p) / 8) @ s.S + (x.v @ x.u) * outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


@rule(
    COMMON
    + """
input g : log gate [K]
input h : log gate
M_t = exp(h_t) M_{t-1} + k_t v_tᵀ
S_t = diag(exp(g_t)) S_{t-1} + p_t (M_tᵀ p_t - S_{t-1}ᵀ p_t)ᵀ / 3
o_t = S_tᵀ q_t
"""
)
def one_state_teaches_the_other(x: At, s: At) -> Result:
    M = x.h.exp() * s.M + outer(x.k, x.v)
    S = rows(x.g.exp(), s.S) + outer(x.p, M.T @ x.p - s.S.T @ x.p) / 3
    return S.T @ x.q, {"M": M, "S": S}


@rule("""
input q, k : [K]
input v : [V]
input g : log gate
state P : [K, K]
P_t = exp(g_t) P_{t-1} + k_t k_tᵀ
S_t = exp(g_t) S_{t-1} + (P_{t-1} k_t) v_tᵀ
o_t = S_tᵀ P_t q_t
""")
def second_moments(x: At, s: At) -> Result:
    P = x.g.exp() * s.P + outer(x.k, x.k)
    S = x.g.exp() * s.S + outer(s.P @ x.k, x.v)
    return S.T @ (P @ x.q), {"P": P, "S": S}


@rule(
    COMMON
    + """
input w : log gate [V]
param g : log gate [K]
S_t = diag(exp(g)) S_{t-1} diag(exp(w_t)) + k_t v_tᵀ
o_t = S_tᵀ q_t + S_{t-1}ᵀ (p_t ⊙ k_t)
"""
)
def param_gate_and_value_gate(x: At, s: At) -> Result:
    S = columns(rows(x.g.exp(), s.S), x.w.exp()) + outer(x.k, x.v)
    return S.T @ x.q + s.S.T @ (x.p * x.k), {"S": S}


@rule(
    COMMON
    + """
input b : scalar in (0, 1)
S_t = (I - b_t (k_t + p_{t-1}) (k_t + p_{t-1})ᵀ / 4) S_{t-1} + b_t k_{t-1} v_tᵀ
o_t = S_tᵀ q_{t-1}
"""
)
def everything_shifted(x: At, s: At) -> Result:
    e = x.k + x.before.p
    S = s.S - x.b * outer(e, e @ s.S) / 4 + x.b * outer(x.before.k, x.v)
    return S.T @ x.before.q, {"S": S}


@rule(
    COMMON
    + """
input c : scalar
z_t = max(z_{t-1}, c_t)
S_t = exp(z_{t-1} - z_t) S_{t-1} + exp(c_t - z_t) k_t v_tᵀ
o_t = S_tᵀ q_t
state z : scalar = -inf
"""
)
def running_maximum(x: At, s: At) -> Result:
    z = torch.maximum(s.z, x.c)
    S = torch.exp(s.z - z) * s.S + torch.exp(x.c - z) * outer(x.k, x.v)
    return S.T @ x.q, {"z": z, "S": S}


@rule(
    COMMON
    + """
input a, b : scalar in (-1, 1)
A_t = a_t A_{t-1} + 0.5 b_t B_{t-1} + k_t v_tᵀ
B_t = b_t B_{t-1} + p_t (u_t - A_{t-1}ᵀ p_t)ᵀ / 4
o_t = A_tᵀ q_t
"""
)
def coupled_through_an_erase(x: At, s: At) -> Result:
    A = x.a * s.A + 0.5 * x.b * s.B + outer(x.k, x.v)
    B = x.b * s.B + outer(x.p, x.u - s.A.T @ x.p) / 4
    return A.T @ x.q, {"A": A, "B": B}


@rule("""
input q, k : [2, K]
input v : [2, V]
input g : log gate
S_t = exp(g_t) S_{t-1} + k_tᵀ v_t
o_t = S_tᵀ (q_{t,1} - q_{t,2})
""")
def rank_two_write(x: At, s: At) -> Result:
    S = x.g.exp() * s.S + x.k.T @ x.v
    return S.T @ (x.q[0] - x.q[1]), {"S": S}


@rule(
    COMMON
    + """
input d : scalar in (0, 1)
S_t = d_t S_{t-1} + (1 - d_t) k_t v_tᵀ
W_t = W_{t-1} + p_t (relu(S_tᵀ p_t) - u_t)ᵀ
o_t = W_tᵀ q_t ⊙ sigmoid(S_{t-1}ᵀ q_t)
"""
)
def gated_by_another_memory(x: At, s: At) -> Result:
    S = x.d * s.S + (1 - x.d) * outer(x.k, x.v)
    W = s.W + outer(x.p, relu(S.T @ x.p) - x.u)
    return (W.T @ x.q) * sigmoid(s.S.T @ x.q), {"S": S, "W": W}


@rule(
    COMMON
    + """
input g : log gate [K]
S_t = diag(exp(g_t)) S_{t-1} - k_t (p_tᵀ diag(exp(g_t)) S_{t-1}) / 5 + k_t v_tᵀ
o_t = (diag(exp(g_t)) S_{t-1})ᵀ q_t
"""
)
def decayed_read(x: At, s: At) -> Result:
    D = rows(x.g.exp(), s.S)
    S = D - outer(x.k, x.p @ D) / 5 + outer(x.k, x.v)
    return D.T @ x.q, {"S": S}


@rule("""
input B, C : [K]
input x : [V]
input dt : [V] in (0, 1)
param A : [K, V]
param D : [V]
h_t = exp(-exp(A) diag(dt_t)) ⊙ h_{t-1} + B_t (dt_t ⊙ x_t)ᵀ
y_t = h_tᵀ C_t + D ⊙ x_t
output y
""")
def selective(x: At, s: At) -> Result:
    h = torch.exp(columns(-x.A.exp(), x.dt)) * s.h + outer(x.B, x.dt * x.x)
    return h.T @ x.C + x.D * x.x, {"h": h}


@rule("""
input x, r : [V]
param U, W : [V, V]
state h : [V]
h_t = tanh(x_t + Uᵀ h_{t-1}) ⊙ sigmoid(r_t + W h_{t-1})
o_t = h_t
""")
def own_cell(x: At, s: At) -> Result:
    h = tanh(x.x + x.U.T @ s.h) * sigmoid(x.r + x.W @ s.h)
    return h, {"h": h}


@rule(
    COMMON
    + """
input g : log gate
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ softmax(S_t u_t)
"""
)
def read_of_a_read(x: At, s: At) -> Result:
    S = x.g.exp() * s.S + outer(x.k, x.v)
    return S.T @ torch.softmax(S @ x.u, 0), {"S": S}


@rule(
    COMMON
    + """
input e : scalar in (0, 1)
S_t = S_{t-1} - e_t k_t (k_tᵀ S_{t-1} - v_tᵀ) (I - u_t u_tᵀ / 4)
o_t = S_tᵀ q_t
"""
)
def projected_residual(x: At, s: At) -> Result:
    S = s.S - x.e * outer(x.k, (x.k @ s.S - x.v) @ (eye(x.u) - outer(x.u, x.u) / 4))
    return S.T @ x.q, {"S": S}


@rule("""
param f : log gate
input q, k : [K]
input v : [V]
S_<t> = exp(f) S_<t-1> + k_<t> v_<t>^T
o_<t> = S_<t>^T q_<t>
""")
def brackets(x: At, s: At) -> Result:
    S = x.f.exp() * s.S + outer(x.k, x.v)
    return x.q @ S, {"S": S}


@rule("""
input q, k : [K]
input v : [V]
input a : gate
S[t] = a[t] * S[t-1] + outer(k[t], v[t])
o[t] = S[t].T @ q[t]
""")
def code_notation(x: At, s: At) -> Result:
    S = x.a * s.S + outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


@rule(
    COMMON
    + """
input a, b : log gate [K]
A_t = diag(exp(a_t)) A_{t-1} + k_t v_tᵀ
B_t = diag(exp(b_t)) B_{t-1} + p_t u_tᵀ
o_t = (A_t - 0.5 B_{t-1})ᵀ q_t
"""
)
def difference_of_two(x: At, s: At) -> Result:
    A = rows(x.a.exp(), s.A) + outer(x.k, x.v)
    B = rows(x.b.exp(), s.B) + outer(x.p, x.u)
    return (A - 0.5 * s.B).T @ x.q, {"A": A, "B": B}


@rule("""
input k : [K]
input y, w : scalar
state n : [K]
input g : log gate
n_t = exp(g_t) n_{t-1} + k_t (y_t - k_tᵀ n_{t-1}) / 4
o_t = w_t n_{t-1}
""")
def regression(x: At, s: At) -> Result:
    n = x.g.exp() * s.n + x.k * (x.y - x.k @ s.n) / 4
    return x.w * s.n, {"n": n}


@rule(
    COMMON
    + """
input g : log gate
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
T2_t = T2_{t-1} + p_t (S_{t-1}ᵀ p_t + S_tᵀ k_t)ᵀ
o_t = T2_{t-1}ᵀ q_t - S_tᵀ p_t
"""
)
def three_reads_of_one(x: At, s: At) -> Result:
    S = x.g.exp() * s.S + outer(x.k, x.v)
    T2 = s.T2 + outer(x.p, s.S.T @ x.p + S.T @ x.k)
    return s.T2.T @ x.q - S.T @ x.p, {"S": S, "T2": T2}


@rule(
    COMMON
    + """
input a : gate [V] in (-1, 1)
input g : gate in (-1, 1)
S_t = g_t S_{t-1} diag(a_t) - 0.3 g_t k_t (k_tᵀ S_{t-1}) diag(a_t) + k_t v_tᵀ
o_t = S_tᵀ q_t
"""
)
def signed_on_both(x: At, s: At) -> Result:
    D = x.g * columns(s.S, x.a)
    S = D - 0.3 * outer(x.k, x.k @ D) + outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


@rule("""
const n = 2
input q : [K]
input k : [n, K]
input v : [n, V]
input w : log gate [K]
for j in 1..n:
    S_t = diag(exp(w_t)) S_t + k_{t,j} v_{t,j}ᵀ
o_t = S_tᵀ q_t
""")
def decay_in_every_substep(x: At, s: At) -> Result:
    S = s.S
    for j in range(2):
        S = rows(x.w.exp(), S) + outer(x.k[j], x.v[j])
    return S.T @ x.q, {"S": S}


@rule(
    COMMON
    + """
input m, a : scalar in (0, 1)
Z_t = m_t Z_{t-1} - p_t (S_{t-1}ᵀ p_t)ᵀ / 3 + k_t v_tᵀ
S_t = (1 - a_t) S_{t-1} + Z_{t-1}
o_t = S_{t-1}ᵀ q_t + u_t
"""
)
def late_momentum(x: At, s: At) -> Result:
    Z = x.m * s.Z - outer(x.p, s.S.T @ x.p) / 3 + outer(x.k, x.v)
    S = (1 - x.a) * s.S + s.Z
    return s.S.T @ x.q + x.u, {"Z": Z, "S": S}
