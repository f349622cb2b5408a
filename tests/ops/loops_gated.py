"""Linear attention, gated relatives and state spaces: one token of one head, as the papers have it."""

from __future__ import annotations

import torch
from loop_kit import At, Result, Step, columns, outer, phase, root, rows, unit
from torch import Tensor
from torch.nn.functional import softplus


def plain(S: Tensor, x: At) -> Result:
    """A read after the update with q, scaled by 1 / sqrt(K)."""
    return S.T @ x.q / root(x.q), {"S": S}


def linear_attention(x: At, past: At) -> Result:
    return plain(past.S + outer(x.k, x.v), x)


def retnet(x: At, past: At) -> Result:
    return plain(x.gamma * past.S + outer(x.k, x.v), x)


def lightning(x: At, past: At) -> Result:
    return plain(torch.exp(-x.slope) * past.S + outer(x.k, x.v), x)


def simple_gla(x: At, past: At) -> Result:
    return plain(x.g.exp() * past.S + outer(x.k, x.v), x)


def sigmoid_gla(x: At, past: At) -> Result:
    return plain(torch.sigmoid(x.a) ** (1 / 16) * past.S + outer(x.k, x.v), x)


def gla(x: At, past: At) -> Result:
    return plain(rows(x.g.exp(), past.S) + outer(x.k, x.v), x)


def hgrn2(x: At, past: At) -> Result:
    return plain(rows(x.f, past.S) + outer(1 - x.f, x.v), x)


def rwkv6(x: At, past: At) -> Result:
    read = past.S + rows(x.u, outer(x.k, x.v))
    return read.T @ x.r / root(x.r), {"S": rows(x.w.exp(), past.S) + outer(x.k, x.v)}


def mamba2(x: At, past: At) -> Result:
    A = -torch.exp(x.a)
    S = torch.exp(x.dt * A) * past.S + outer(x.B, x.dt * x.x)
    return S.T @ x.C + x.d * x.x, {"S": S}


def mamba2_negative(x: At, past: At) -> Result:
    return plain(x.a * past.S + outer(x.k, x.v), x)


def rodimus(x: At, past: At) -> Result:
    strength = softplus(x.g)
    tau = torch.sigmoid(x.h)
    key = unit(x.k) * strength**tau
    S = rows(torch.exp(-strength * tau), past.S) + outer(key, x.i * x.v)
    return S.T @ x.q, {"S": S}


def mamba3(x: At, past: At) -> Result:
    alpha = torch.exp(-torch.exp(x.a) * x.dt)
    beta = (1 - x.lam) * x.dt * alpha
    gamma = x.lam * x.dt
    S = alpha * past.S + beta * outer(x.before.k, x.before.v) + gamma * outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


def dfw(x: At, past: At) -> Result:
    S = outer(torch.sigmoid(x.z), torch.sigmoid(x.f)) * past.S + outer(x.k, x.v)
    return S.T @ x.q, {"S": S}


def longhorn(x: At, past: At) -> Result:
    step = x.beta / (1 + x.beta * (x.k @ x.k))
    S = (1 - outer(x.k**2, step)) * past.S + outer(x.k, step * x.x)
    return S.T @ x.q, {"S": S}


def mamba1(x: At, past: At) -> Result:
    A = -torch.exp(x.a)
    S = torch.exp(columns(A, x.dt)) * past.S + outer(x.B, x.dt * x.x)
    return S.T @ x.C + x.d * x.x, {"S": S}


def gateloop(x: At, past: At) -> Result:
    gate = torch.complex(x.r * x.c, x.r * x.s)
    S = gate[:, None] * torch.complex(past.X, past.Y) + outer(x.k, x.v)
    return (S.T @ x.q.to(S.dtype)).real / root(x.q), {"X": S.real, "Y": S.imag}


def hgrn(x: At, past: At) -> Result:
    h = x.f * past.h + (1 - x.f) * x.c
    return h, {"h": h}


def rg_lru(x: At, past: At) -> Result:
    a = torch.exp(-8 * softplus(x.lam) * x.r)
    h = a * past.h + torch.sqrt(1 - a**2) * (x.i * x.x)
    return h, {"h": h}


def _complex(re: Tensor, im: Tensor) -> Tensor:
    return torch.complex(re, im)


def lru(x: At, past: At) -> Result:
    size = torch.exp(-torch.exp(x.nu))
    gate = size * phase(x)
    drive = torch.sqrt(1 - size**2) * (_complex(x.B_re, x.B_im) @ x.u.to(gate.dtype))
    h = gate * _complex(past.x, past.y) + drive
    return (_complex(x.C_re, x.C_im).T @ h).real + x.D * x.u, {"x": h.real, "y": h.imag}


def s4d(x: At, past: At) -> Result:
    h = x.r * phase(x) * _complex(past.x, past.y) + _complex(x.b_re, x.b_im) * x.u
    return (_complex(x.c_re, x.c_im) @ h).real + x.d * x.u, {"x": h.real, "y": h.imag}


def s5(x: At, past: At) -> Result:
    gate = x.r * phase(x)
    h = gate * _complex(past.x, past.y) + _complex(x.B_re, x.B_im) @ x.u.to(gate.dtype)
    return (_complex(x.C_re, x.C_im).T @ h).real + x.D * x.u, {"x": h.real, "y": h.imag}


def hgrn_complex(x: At, past: At) -> Result:
    h = x.f * phase(x) * _complex(past.x, past.y) + (1 - x.f) * _complex(x.u, x.w)
    return h.real, {"x": h.real, "y": h.imag}


def gru(x: At, past: At) -> Result:
    h = past.h
    z, r = torch.sigmoid(x.z + h @ x.R_z), torch.sigmoid(x.r + h @ x.R_r)
    h = z * h + (1 - z) * torch.tanh(x.n + r * (h @ x.R_n))
    return h, {"h": h}


def lstm(x: At, past: At) -> Result:
    i, f, g = (torch.sigmoid(a + past.h @ R) for a, R in ((x.i, x.R_i), (x.f, x.R_f), (x.g, x.R_g)))
    c = f * past.c + i * torch.tanh(x.z + past.h @ x.R_z)
    h = g * torch.tanh(c)
    return h, {"c": c, "h": h}


def slstm(x: At, past: At) -> Result:
    """Without the maximum: cell and normaliser as they are, then brought to the stored form."""
    size = torch.exp(past.m)
    i = torch.exp(x.i + past.h @ x.R_i)
    f = torch.sigmoid(x.f + past.h @ x.R_f)
    c = f * past.c * size + i * torch.tanh(x.z + past.h @ x.R_z)
    n = f * past.n * size + i
    h = torch.sigmoid(x.g + past.h @ x.R_g) * c / n
    m = torch.maximum(torch.log(f) + past.m, torch.log(i))
    return h, {"m": m, "c": c * torch.exp(-m), "n": n * torch.exp(-m), "h": h}


def h_lru(x: At, past: At) -> Result:
    h = x.a * past.h + x.b * past.p + x.i * x.x
    return h, {"p": past.h, "h": h}


def bd_lru(x: At, past: At) -> Result:
    block = torch.stack([torch.stack([x.a, x.b]), torch.stack([x.c, x.d])])
    pair = torch.einsum("ijv,jv->iv", block, torch.stack([past.x, past.y])) + torch.stack([x.u, x.w])
    return x.w_x * pair[0] + x.w_y * pair[1], {"x": pair[0], "y": pair[1]}


GATED: dict[str, Step] = {
    "linear_attention": linear_attention,
    "retnet": retnet,
    "lightning": lightning,
    "simple_gla": simple_gla,
    "sigmoid_gla": sigmoid_gla,
    "gla": gla,
    "hgrn2": hgrn2,
    "rwkv5": rwkv6,  # the same line; only its decay is constant
    "rwkv6": rwkv6,
    "mamba2": mamba2,
    "mamba2_negative": mamba2_negative,
    "rodimus": rodimus,
    "mamba3": mamba3,
    "dfw": dfw,
    "longhorn": longhorn,
    "mamba1": mamba1,
    "gateloop": gateloop,
    "hgrn": hgrn,
    "rg_lru": rg_lru,
    "lru": lru,
    "s4d": s4d,
    "s5": s5,
    "hgrn_complex": hgrn_complex,
    "gru": gru,
    "lstm": lstm,
    "slstm": slstm,
    "h_lru": h_lru,
    "bd_lru": bd_lru,
}
