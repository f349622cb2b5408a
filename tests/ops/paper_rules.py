"""Published rules as their papers write them, each with its class and one token of it in plain torch.

None of the texts is that of a catalogue entry: the state lies as in the paper (V x K where it does), letters,
orders, subscripts and signs are the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from loop_kit import At, Result, Step, columns, outer, rows

relu = torch.nn.functional.relu


@dataclass(frozen=True)
class Rule:
    """``kind``: what each stage compiles to, as ``explain`` says it before its arrow."""

    text: str
    step: Step
    kind: str


RULES: dict[str, Rule] = {}


def rule(kind: str, text: str) -> None:
    """Adds a rule whose step is the function named after it, defined right before."""
    name = text.split(maxsplit=2)[1]
    RULES[name] = Rule(text, globals()[name], kind)


# 2102.11174, equations 17 to 19: fast weights W [V, K], v̄ what is stored, a write of the difference
def fast_weights(x: At, past: At) -> Result:
    W = past.W + x.β * outer(x.v - past.W @ x.k, x.k)
    return W @ x.q, {"W": W}


rule(
    "linear + rank 1",
    """recurrence fast_weights
input q, k : [K]
input v : [V]
input β : scalar in (0, 1)
v̄_t = W_{t-1} k_t
W_t = W_{t-1} + β_t (v_t − v̄_t) k_t^T
y_t = W_t q_t
output y
""",
)


# 2406.06484: S [V, K], products from the right
def deltanet(x: At, past: At) -> Result:
    S = past.S @ (torch.eye(x.k.shape[0], dtype=x.k.dtype) - x.β * outer(x.k, x.k)) + x.β * outer(x.v, x.k)
    return S @ x.q, {"S": S}


rule(
    "linear + rank 1",
    """recurrence deltanet
input q : [K]
input k : [K] unit
input v : [V]
input β : scalar in (0, 2)
state S : [V, K]
S_t = S_{t-1}(I − β_t k_t k_t^⊤) + β_t v_t k_t^⊤
o_t = S_t q_t
""",
)


# 2412.06464, equation 10
def gated_deltanet(x: At, past: At) -> Result:
    erased = past.S - x.β * outer(past.S @ x.k, x.k)
    S = x.α * erased + x.β * outer(x.v, x.k)
    return S @ x.q, {"S": S}


rule(
    "scalar gate + rank 1",
    """recurrence gated_deltanet
input q, k : [K] unit
input v : [V]
input α : gate in (0, 1)
input β : scalar in (0, 1)
state S : [V, K]
S_t = S_{t−1} (α_t (I − β_t k_t k_tᵀ)) + β_t v_t k_tᵀ
o_t = S_t q_t
""",
)


# 2510.26692, equation 1
def kimi_delta(x: At, past: At) -> Result:
    decayed = rows(x.α, past.S)
    S = decayed + x.β * outer(x.k, x.v - decayed.T @ x.k)
    return S.T @ x.q, {"S": S}


rule(
    "diagonal gate + rank 1",
    """recurrence kimi_delta
input q, k : [K] unit
input v : [V]
input α : gate [K]
input β : scalar in (0, 1)
S_t = (I − β_t k_t k_t^⊤) Diag(α_t) S_{t−1} + β_t k_t v_t^⊤
o_t = S_t^⊤ q_t
""",
)


# 2312.06635, section 4: rows of the state are scaled by an outer product with ones
def gated_linear(x: At, past: At) -> Result:
    S = rows(x.α, past.S) + outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


rule(
    "diagonal gate",
    """recurrence gated_linear
input q, k : [K]
input v : [V]
input α : gate [K] in (0, 1)
G_t = outer(α_t, v_t ⊙ 0 + 1)
S_t = G_t ⊙ S_{t-1} + k_t v_t^⊤
o_t = (q_t^⊤ S_t)^⊤
""",
)


# 2405.21060 with a step size, h in place of S, the skip D
def ssd(x: At, past: At) -> Result:
    h = torch.exp(x.Δ * x.A) * past.h + x.Δ * outer(x.B, x.x)
    return h.T @ x.C + x.D * x.x, {"h": h}


rule(
    "scalar gate",
    """recurrence ssd
input x : [V]
input B, C : [K]
input Δ : scalar in (0, 2)
param A : scalar in (-2, 0)
param D : scalar
h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t^⊤
y_t = h_t^⊤ C_t + D x_t
output y
""",
)


# 2404.05892, Eagle and Finch: the read stands before the update, diag(u) on the token's own write
def finch(x: At, past: At) -> Result:
    write = outer(x.k, x.v)
    return (rows(x.u, write) + past.wkv).T @ x.r, {"wkv": rows(x.w, past.wkv) + write}


rule(
    "diagonal gate",
    """recurrence finch
input r, k : [K]
input v : [V]
input w : gate [K]
param u : [K]
state wkv : [K, V]
wkv_t = Diag(w_t) · wkv_{t-1} + k_t · v_t^T
o_t = (Diag(u) · k_t · v_t^T + wkv_{t-1})^T r_t
""",
)


# 2503.14456, equations 15 to 20: S [V, K], the removal key normalised, its rate per channel
def goose(x: At, past: At) -> Result:
    removal = x.κ / torch.sqrt(x.κ @ x.κ + 1e-6)
    S = past.S @ (torch.diag(x.w) - outer(removal, x.a * removal)) + outer(x.v, x.k)
    return S @ x.r + (x.r @ (x.ρ * x.k)) * x.v, {"S": S}


rule(
    "diagonal gate + rank 1",
    """recurrence goose
input r, k, κ : [K]
input a : [K] in (0, 1)
input v : [V]
input w : gate [K]
param ρ : [K]
state S : [V, K]
κ̂_t = κ_t / sqrt(κ_tᵀ κ_t + 1e-6)
S_t = S_{t-1} (diag(w_t) − κ̂_t (a_t ⊙ κ̂_t)ᵀ) + v_t k_tᵀ
p_t = S_t r_t + (r_tᵀ (ρ ⊙ k_t)) v_t
output p
""",
)


# 2506.02475: a scalar minus a rank one, the query corrected by the key
def comba_paper(x: At, past: At) -> Result:
    erase = x.b * x.β
    S = x.α * past.S - erase * outer(past.S @ x.k, x.k) + x.β * outer(x.v, x.k)
    return S @ (x.q - x.d * x.k), {"S": S}


rule(
    "scalar gate + rank 1",
    """recurrence comba_paper
input q, k : [K] unit
input v : [V]
input α, β, b : scalar in (0, 1)
param d : scalar in (0, 1)
state S : [V, K]
β̃_t = b_t ⊙ β_t
S_t = S_{t-1} (α_t − β̃_t k_t k_tᵀ) + β_t v_t k_tᵀ
o_t = S_t (q_t − d k_t)
""",
)


# fla pull request 729: the delta rule on the value side
def oja(x: At, past: At) -> Result:
    decayed = columns(past.S, x.α)
    S = decayed + x.β * outer(x.k - decayed @ x.v, x.v)
    return S.T @ x.q, {"S": S}


rule(
    "diagonal gate + rank 1 on the value side",
    """recurrence oja
input q, k : [K]
input v : [V] unit
input α : gate [V]
input β : scalar in (0, 1)
S_t = S_{t−1} Diag(α_t) (I − β_t v_t v_t^⊤) + β_t k_t v_t^⊤
o_t = S_t^⊤ q_t
""",
)


# 2502.10297, equation 5: the product of two householder-like steps written out
def two_householders(x: At, past: At) -> Result:
    H = past.H + x.β * outer(x.k, x.v - past.H.T @ x.k)
    H = H + x.γ * outer(x.l, x.w - H.T @ x.l)
    return H.T @ x.q, {"H": H}


rule(
    "linear + rank 2",
    """recurrence two_householders
input q : [K]
input k, l : [K] unit
input v, w : [V]
input β, γ : scalar in (0, 2)
A_t = (I − γ_t l_t l_tᵀ) (I − β_t k_t k_tᵀ)
B_t = (I − γ_t l_t l_tᵀ) β_t k_t v_tᵀ + γ_t l_t w_tᵀ
H_t = A_t H_{t-1} + B_t
o_t = H_tᵀ q_t
""",
)


# 2605.05838: the momentum is written first, then taken up
def momentum(x: At, past: At) -> Result:
    M = x.μ * past.M - x.η * outer(x.k, x.v - past.S.T @ x.p)
    S = x.α * past.S - x.β * M
    return S.T @ x.q, {"M": M, "S": S}


rule(
    "stacked 2 x 2 + rank 1",
    """recurrence momentum
input q : [K]
input k, p : [K] unit
input v : [V]
input α, μ : gate in (0, 1)
input η, β : scalar in (0, 1)
M_t = μ_t M_{t−1} − η_t k_t (v_t − S_{t−1}^⊤ p_t)^⊤
S_t = α_t S_{t−1} − β_t M_t
o_t = S_t^⊤ q_t
""",
)


# 2501.00663, equations 13 and 14 for a linear memory M [V, K] and surprise S
def titans(x: At, past: At) -> Result:
    S = x.η * past.S - x.θ * outer(past.M @ x.k - x.v, x.k)
    M = (1 - x.α) * past.M + S
    return M @ x.q, {"S": S, "M": M}


rule(
    "stacked 2 x 2 + rank 1",
    """recurrence titans
input q : [K]
input k : [K] unit
input v : [V]
input α, η, θ : scalar in (0, 1)
state S, M : [V, K]
S_t = η_t S_{t-1} − θ_t (M_{t-1} k_t − v_t) k_t^⊤
M_t = (1 − α_t) M_{t-1} + S_t
y_t = M_t q_t
output y
""",
)


# 2409.07146, slots as rows, S [m, K] and [m, V]
def slots(x: At, past: At) -> Result:
    keys = rows(x.α, past.Kt) + outer(1 - x.α, x.k)
    values = rows(x.α, past.Vt) + outer(1 - x.α, x.v)
    return values.T @ torch.softmax(keys @ x.q, 0), {"Kt": keys, "Vt": values}


rule(
    "diagonal gate, diagonal gate",
    """recurrence slots
const m = 4
input q, k : [K]
input v : [V]
input α : gate [m] in (0, 1)
state Kt : [m, K]
state Vt : [m, V]
Kt_t = Diag(α_t) Kt_{t−1} + (1 − α_t) k_t^T
Vt_t = Diag(α_t) Vt_{t−1} + (1 − α_t) v_t^T
o_t = Vt_t^T softmax(Kt_t q_t)
""",
)


# 2006.16236, equations 16 to 18: a numerator and a normaliser
def transformers_are_rnns(x: At, past: At) -> Result:
    φq, φk = 1 + torch.nn.functional.elu(x.q), 1 + torch.nn.functional.elu(x.k)
    s, z = past.s + outer(φk, x.v), past.z + φk
    return s.T @ φq / (φq @ z), {"s": s, "z": z}


rule(
    "linear, linear",
    """recurrence transformers_are_rnns
input q, k : [K]
input v : [V]
φq_t = elu(q_t) + 1
φk_t = elu(k_t) + 1
s_t = s_{t-1} + φk_t v_tᵀ
z_t = z_{t-1} + φk_t
o_t = (φq_tᵀ s_t)ᵀ / (φq_tᵀ z_t)
""",
)


# 2312.00752, algorithm 2: a gate for every entry
def selective_scan(x: At, past: At) -> Result:
    h = torch.exp(x.A * x.Δ[None, :]) * past.h + outer(x.B, x.Δ * x.x)
    return h.T @ x.C + x.D * x.x, {"h": h}


rule(
    "scan",
    """recurrence selective_scan
input B, C : [K]
input x : [V]
input Δ : [V] in (0, 2)
param A : [K, V] in (-2, 0)
param D : [V]
h_t = exp(A diag(Δ_t)) ⊙ h_{t-1} + B_t (Δ_t ⊙ x_t)^⊤
y_t = h_t^⊤ C_t + D ⊙ x_t
output y
""",
)


# 2603.15569: the token before, with its own weight
def trapezoid(x: At, past: At) -> Result:
    h = x.α * past.h + x.β * outer(x.before.B, x.before.x) + x.γ * outer(x.B, x.x)
    return h.T @ x.C, {"h": h}


rule(
    "scalar gate",
    """recurrence trapezoid
input B, C : [K]
input x : [V]
input α : gate in (0, 1)
input β, γ : scalar in (0, 1)
h_t = α_t h_{t−1} + β_t B_{t−1} x_{t−1}^⊤ + γ_t B_t x_t^⊤
y_t = h_t^⊤ C_t
output y
""",
)


# 2604.21100: a diagonal side state preconditions the key that writes
def preconditioned(x: At, past: At) -> Result:
    A = x.γ * past.A + x.b * x.k**2
    key = x.k / (1 + A)
    decayed = x.α * past.S
    S = decayed + x.β * outer(key, x.v - decayed.T @ x.k)
    return S.T @ x.q, {"A": A, "S": S}


rule(
    "scan, scalar gate + rank 1",
    """recurrence preconditioned
input q : [K]
input k : [K] unit
input v : [V]
input α, γ : gate in (0, 1)
input β, b : scalar in (0, 1)
A_t = γ_t A_{t−1} + b_t k_t²
k̃_t = k_t / (1 + A_t)
S̄_t = α_t S_{t−1}
S_t = S̄_t + β_t k̃_t (v_t − S̄_t^⊤ k_t)^⊤
o_t = S_t^⊤ q_t
""",
)


# 2404.07904: the state outer-expanded, input tied to the forget gate
def hgrn2_paper(x: At, past: At) -> Result:
    h = rows(x.f, past.h) + outer(1 - x.f, x.i)
    return h.T @ x.o, {"h": h}


rule(
    "diagonal gate",
    """recurrence hgrn2_paper
input i : [V]
input f : gate [K] in (0, 1)
input o : [K]
h_t = diag(f_t) h_{t−1} + (1 − f_t) i_tᵀ
y_t = h_t^T o_t
output y
""",
)


# 2210.04243: both axes decay, written as an elementwise product
def decaying_fast_weights(x: At, past: At) -> Result:
    S = outer(torch.sigmoid(x.z), torch.sigmoid(x.f)) * past.S + outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


rule(
    "separable gate",
    """recurrence decaying_fast_weights
input q, k, z : [K]
input v, f : [V]
S_t = (sigmoid(z_t) sigmoid(f_t)ᵀ) ∘ S_{t−1} + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
)
