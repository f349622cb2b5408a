"""Recurrences with several states, states of all shapes, and functions of what is read, as users write them.

Each text stands with the names, axes and starts of its states.
"""

from __future__ import annotations

from linalg_dsl.algebra.expr import Dim

INF = float("inf")
States = list[tuple[str, tuple[Dim, ...], float]]

TEXTS: dict[str, tuple[str, States]] = {
    "gated_oja": (
        """
input q, k : [K]
input v : [V] unit
input a : log gate [V]
input beta : scalar in (0, 1)
S_t = S_{t-1} diag(exp(a_t)) (I - beta_t v_t v_tᵀ) + beta_t k_t v_tᵀ
o_t = S_tᵀ q_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "state_V_K": (
        """
input q : [K]
input k : [K] unit
input v : [V]
input beta : scalar in (0, 1)
S_t = S_{t-1} (I - beta_t k_t k_tᵀ) + beta_t v_t k_tᵀ
o_t = S_t q_t
""",
        [("S", ("V", "K"), 0.0)],
    ),
    "normalised_linear_attention": (
        """
input q, k : [K]
input v : [V]
φq_t = elu(q_t) + 1
φk_t = elu(k_t) + 1
S_t = S_{t-1} + φk_t v_tᵀ
z_t = z_{t-1} + φk_t
o_t = S_tᵀ φq_t / (z_tᵀ φq_t + 1e-6)
""",
        [("S", ("K", "V"), 0.0), ("z", ("K",), 0.0)],
    ),
    "mlstm": (
        """
input q, k : [K]
input v : [V]
input f : log gate
input i : scalar
state m = -inf
m_t = max(f_t + m_{t-1}, i_t)
keep_t = exp(f_t + m_{t-1} - m_t)
add_t = exp(i_t - m_t)
S_t = keep_t S_{t-1} + add_t k_t v_tᵀ
n_t = keep_t n_{t-1} + add_t k_t
o_t = S_tᵀ q_t / max(abs(n_tᵀ q_t), exp(-m_t))
""",
        [("m", (), -INF), ("S", ("K", "V"), 0.0), ("n", ("K",), 0.0)],
    ),
    "gsa": (
        """
const n = 8
input q, k : [K]
input v : [V]
input g : log gate [n]
state A : [K, n]
state B : [n, V]
A_t = A_{t-1} diag(exp(g_t)) + k_t (1 - exp(g_t))ᵀ
B_t = diag(exp(g_t)) B_{t-1} + (1 - exp(g_t)) v_tᵀ
o_t = B_tᵀ softmax(A_tᵀ q_t)
""",
        [("A", ("K", "n"), 0.0), ("B", ("n", "V"), 0.0)],
    ),
    "abc": (
        """
const n = 8
input q, k : [K]
input v : [V]
input s : [n]
state z = -inf
z_t = log(exp(z_{t-1}) + exp(s_t))
w_t = exp(s_t - z_t)
decay_t = exp(z_{t-1} - z_t)
A_t = A_{t-1} diag(decay_t) + k_t w_tᵀ
B_t = diag(decay_t) B_{t-1} + w_t v_tᵀ
o_t = B_tᵀ softmax(A_tᵀ q_t)
""",
        [("z", ("n",), -INF), ("A", ("K", "n"), 0.0), ("B", ("n", "V"), 0.0)],
    ),
    "mamba1": (
        """
input B, C : [K]
input x : [V]
input delta : [V] > 0
param A : [K, V]
param D : [V]
S_t = exp(-exp(A) diag(delta_t)) ⊙ S_{t-1} + B_t (delta_t ⊙ x_t)ᵀ
o_t = S_tᵀ C_t + D ⊙ x_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "elementwise_gate": (
        """
input q, k : [K]
input v : [V]
input g : log gate [K, V]
S_t = exp(g_t) ⊙ S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "longhorn": (
        """
input q, k : [K]
input x : [V]
input beta : [V] > 0
delta_t = beta_t / (1 + (k_tᵀ k_t) beta_t)
S_t = (1 - (k_t ⊙ k_t) delta_tᵀ) ⊙ S_{t-1} + k_t (delta_t ⊙ x_t)ᵀ
o_t = S_tᵀ q_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "hgrn": (
        """
input c : [V]
input f : gate [V]
h_t = f_t ⊙ h_{t-1} + (1 - f_t) ⊙ c_t
o_t = h_t
""",
        [("h", ("V",), 0.0)],
    ),
    "rg_lru": (
        """
input x : [V]
input i : [V] in (0, 1)
input a : log gate [V]
h_t = exp(a_t) ⊙ h_{t-1} + sqrt(1 - exp(2 a_t)) ⊙ i_t ⊙ x_t
o_t = h_t
""",
        [("h", ("V",), 0.0)],
    ),
    "rwkv4": (
        """
input k, v : [V]
param w : [V] > 0
param u : [V]
state p = -inf
m_t = max(p_{t-1}, u + k_t)
p_t = max(p_{t-1} - w, k_t)
n_t = exp(p_{t-1} - w - p_t) ⊙ n_{t-1} + exp(k_t - p_t) ⊙ v_t
d_t = exp(p_{t-1} - w - p_t) ⊙ d_{t-1} + exp(k_t - p_t)
above_t = exp(p_{t-1} - m_t) ⊙ n_{t-1} + exp(u + k_t - m_t) ⊙ v_t
below_t = exp(p_{t-1} - m_t) ⊙ d_{t-1} + exp(u + k_t - m_t)
o_t = above_t / below_t
""",
        [("p", ("V",), -INF), ("n", ("V",), 0.0), ("d", ("V",), 0.0)],
    ),
    "momentum_delta": (
        """
input q, k, p : [K] unit
input v : [V]
input mu, alpha, beta, eta : scalar in (0, 1)
M_t = mu_t M_{t-1} - eta_t k_t (v_tᵀ - p_tᵀ S_{t-1})
S_t = alpha_t S_{t-1} - beta_t M_t
o_t = S_tᵀ q_t
""",
        [("M", ("K", "V"), 0.0), ("S", ("K", "V"), 0.0)],
    ),
    "pgdn": (
        """
input q, k : [K] unit
input v : [V]
input g, ga : log gate
input beta, ba : scalar in (0, 1)
A_t = exp(ga_t) A_{t-1} + ba_t k_t ⊙ k_t
k̃_t = k_t / (A_t + 0.5)
R_t = exp(g_t) S_{t-1}
S_t = R_t + beta_t k̃_t (v_tᵀ - k_tᵀ R_t)
o_t = S_tᵀ q_t
""",
        [("A", ("K",), 0.0), ("S", ("K", "V"), 0.0)],
    ),
    "osdn": (
        """
input q, k : [K] unit
input v : [V]
input beta, eta : scalar in (0, 1)
k2_t = k_t ⊙ k_t
d_t = d_{t-1} + eta_t k2_t (1 - k2_tᵀ d_{t-1})
S_t = S_{t-1} + beta_t (d_t ⊙ k_t) (v_tᵀ - k_tᵀ S_{t-1})
o_t = S_tᵀ q_t
""",
        [("d", ("K",), 0.0), ("S", ("K", "V"), 0.0)],
    ),
    "lightnet": (
        """
input q, kappa : [K]
input v : [V]
state z = -inf
z_t = log(exp(z_{t-1}) + exp(kappa_t))
S_t = diag(exp(z_{t-1} - z_t)) S_{t-1} + exp(kappa_t - z_t) v_tᵀ
o_t = S_tᵀ q_t
""",
        [("z", ("K",), -INF), ("S", ("K", "V"), 0.0)],
    ),
    "dense": (
        """
input q, k : [K]
input v : [V]
input M : [K, K]
input N : [V, V]
S_t = M_t S_{t-1} N_t + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "signed_gates": (
        """
input q, k : [K]
input v : [V]
input f : gate [K] in (-1, 1)
input r : gate in [0, 1]
S_t = r_t diag(f_t) S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "two_layers": (
        """
input q, k, p : [K]
input v : [V]
A_t = A_{t-1} + k_t v_tᵀ
u_t = silu(A_tᵀ q_t)
B_t = B_{t-1} + p_t u_tᵀ
o_t = B_{t-1}ᵀ q_t + u_t
""",
        [("A", ("K", "V"), 0.0), ("B", ("K", "V"), 0.0)],
    ),
    "counts_tokens": (
        """
input q, k : [K]
input v : [V]
c_t = c_{t-1} + 1
S_t = (1 - 1/c_t) S_{t-1} + (1/c_t) k_t v_tᵀ
o_t = q_tᵀ S_t v_t
""",
        [("c", (), 0.0), ("S", ("K", "V"), 0.0)],
    ),
    "reads_on_the_key_side": (
        """
const n = 3
input q : [V]
input k : [K]
input v : [V]
input r : [n, K]
S_t = S_{t-1} + k_t v_tᵀ
o_t = r_t S_t q_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "mamba3": (
        """
input B, C : [K]
input x : [V]
input delta : scalar > 0
input lam : scalar in (0, 1)
param A : scalar > 0
α_t = exp(-A delta_t)
S_t = α_t S_{t-1} + (1 - lam_t) delta_t α_t B_{t-1} x_{t-1}ᵀ + lam_t delta_t B_t x_tᵀ
o_t = S_tᵀ C_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "shifted_bindings": (
        """
input q, k : [K]
input v : [V]
input g : log gate [K]
param mu : [K] in (0, 1)
k̂_t = l2norm(mu ⊙ k_t)
x_t = mu ⊙ k̂_t + (1 - mu) ⊙ k̂_{t-1}
S_t = diag(exp(g_{t-1})) S_{t-1} + x_t v_tᵀ
o_t = S_tᵀ q_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "gated_delta_product": (
        """
const n = 3
input q : [K]
input k : [n, K] unit
input v : [n, V]
input g : log gate
input beta : [n] in (0, 2)
S_t = exp(g_t) S_{t-1}
for j in 1..n:
    S_t = S_t - beta_{t,j} k_{t,j} (k_{t,j}ᵀ S_t - v_{t,j}ᵀ)
o_t = S_tᵀ q_t
""",
        [("S", ("K", "V"), 0.0)],
    ),
    "substeps_of_everything": (
        """
const n = 2
input q : [K]
input k : [n, K] unit
input v : [n, V]
input a : log gate [n]
input beta : [n] in (0, 1)
m_t = m_{t-1} + 1
for i in 1..n:
    m_t = max(m_t, beta_{t,i} + q_tᵀ k_{t,i})
x_t = q_t / m_t
for j in 1..2:
    y_t = l2norm(k_{t,j} + k_{t-1,j})
    R_t = exp(a_{t,j}) S_t
    S_t = R_t - beta_{t,j} y_t (y_tᵀ R_t - v_{t,j}ᵀ) / m_t
for l in 1..3:
    S_t = (I - x_t x_tᵀ / 20) S_t + x_t v_{t,1}ᵀ + 0.1 S_{t-1}
o_t = S_tᵀ x_t + S_{t-1}ᵀ q_t
""",
        [("m", (), 0.0), ("S", ("K", "V"), 0.0)],
    ),
    "read_of_the_last_token": (
        """
input q, k : [K]
input v : [V]
state u : [V]
u_t = S_{t-1}ᵀ q_t
S_t = S_{t-1} + k_t (v_t - 0.5 u_{t-1})ᵀ
o_t = S_tᵀ q_t
""",
        [("u", ("V",), 0.0), ("S", ("K", "V"), 0.0)],
    ),
}


def text(name: str) -> str:
    return f"recurrence {name}{TEXTS[name][0]}"
