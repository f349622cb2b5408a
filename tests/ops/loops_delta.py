"""The delta rule and its relatives: one token of one head, as the papers have it."""

from __future__ import annotations

import torch
from loop_kit import At, Result, Step, columns, outer, root, rows, unit
from torch import Tensor


def plain(S: Tensor, x: At) -> Result:
    """A read after the update with q, scaled by 1 / sqrt(K)."""
    return S.T @ x.q / root(x.q), {"S": S}


def towards(S: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """S with what stands under k moved towards v by beta."""
    return S + beta * outer(k, v - S.T @ k)


def delta_rule(x: At, past: At) -> Result:
    return plain(towards(past.S, x.k, x.v, x.beta), x)


def delta_rule_negative(x: At, past: At) -> Result:
    return plain(towards(past.S, x.k, x.v, 2 * torch.sigmoid(x.b)), x)


def gated_delta_rule(x: At, past: At) -> Result:
    return plain(towards(x.g.exp() * past.S, x.k, x.v, x.beta), x)


def kda(x: At, past: At) -> Result:
    return plain(towards(rows(x.g.exp(), past.S), x.k, x.v, x.beta), x)


def efla(x: At, past: At) -> Result:
    """The flow dS/dt = -k kT S + k vT over a time beta, with the matrix exponential."""
    transition = torch.linalg.matrix_exp(-x.beta * outer(x.k, x.k))
    square = x.k @ x.k
    return plain(transition @ past.S + (1 - torch.exp(-x.beta * square)) / square * outer(x.k, x.v), x)


def kaczmarz(x: At, past: At) -> Result:
    return plain(towards(past.S, x.k, x.v, x.eta / (x.k @ x.k + 1e-6)), x)


def comba(x: At, past: At) -> Result:
    S = x.g.exp() * past.S + x.beta * outer(x.k, x.v - past.S.T @ x.p)
    return S.T @ (x.q - x.d * x.k) / root(x.q), {"S": S}


def comba_decayed(x: At, past: At) -> Result:
    decayed = x.g.exp() * past.S
    S = decayed + x.beta * outer(x.k, x.v - decayed.T @ x.p)
    return S.T @ (x.q - x.d * x.k) / root(x.q), {"S": S}


def q_delta(x: At, past: At) -> Result:
    decayed = x.g.exp() * past.S
    return plain(decayed + x.beta * outer(x.k, x.v - decayed.T @ (x.k + x.lam * x.q)), x)


def gdn2(x: At, past: At) -> Result:
    decayed = rows(x.g.exp(), past.S)
    return plain(decayed - outer(x.k, decayed.T @ (x.b * x.k)) + outer(x.k, x.w * x.v), x)


def iplr(x: At, past: At) -> Result:
    return plain(past.S + outer(x.b, past.S.T @ x.a) + outer(x.k, x.v), x)


def dplr(x: At, past: At) -> Result:
    return plain(rows(x.g.exp(), past.S) + outer(x.b, past.S.T @ x.a) + outer(x.k, x.v), x)


def rwkv7(x: At, past: At) -> Result:
    kappa = unit(x.k * x.xi)
    key = x.k * torch.lerp(torch.ones_like(x.a), x.a, x.alpha)
    w = torch.exp(-torch.sigmoid(x.w) * 2.718281828459045**-0.5)
    S = rows(w, past.S) - outer(x.a * kappa, past.S.T @ kappa) + outer(key, x.v)
    return S.T @ x.r + (x.r * x.rho * key).sum() * x.v, {"S": S}


def delta_product(x: At, past: At) -> Result:
    S = past.S
    for k, v, beta in zip(x.k, x.v, x.beta, strict=True):
        S = towards(S, k, v, beta)
    return plain(S, x)


def gated_delta_product(x: At, past: At) -> Result:
    S = x.g.exp() * past.S
    for k, v, beta in zip(x.k, x.v, x.beta, strict=True):
        S = towards(S, k, v, beta)
    return plain(S, x)


def eda(x: At, past: At) -> Result:
    decayed = rows(x.g.exp(), past.S)
    erased = decayed - x.gamma * outer(x.e, decayed.T @ x.e)
    return plain(towards(erased, x.k, x.v, x.beta), x)


def mom(x: At, past: At) -> Result:
    chosen = towards_gated(past.S, x)
    return x.w * (chosen.T @ x.q) / root(x.q), {"S": chosen}


def towards_gated(S: Tensor, x: At) -> Tensor:
    """The gated delta rule where the router's c is 1, the memory as it was where it is 0."""
    decayed = (x.c * x.g).exp() * S
    return decayed + x.c * x.beta * outer(x.k, x.v - decayed.T @ x.k)


def dgd(x: At, past: At) -> Result:
    S = past.S - outer(x.k, past.S.T @ x.k) - x.eta * outer(x.k, x.u)
    return S.T @ x.q, {"S": S}


def gated_oja(x: At, past: At) -> Result:
    decayed = columns(past.S, x.g.exp())
    return plain(decayed + x.beta * outer(x.k - decayed @ x.v, x.v), x)


def gated_oja_channel(x: At, past: At) -> Result:
    decayed = columns(past.S, x.g.exp())
    return plain(decayed + outer(x.k - decayed @ x.v, x.beta * x.v), x)


def mdn(x: At, past: At) -> Result:
    M = x.h.exp() * past.M - x.eta * outer(x.k, x.v - past.S.T @ x.p)
    S = x.g.exp() * past.S - x.beta * M
    return S.T @ x.q / root(x.q), {"M": M, "S": S}


def mdn_lagged(x: At, past: At) -> Result:
    M = x.h.exp() * past.M - x.eta * outer(x.k, x.v - past.S.T @ x.p)
    S = x.g.exp() * past.S - x.beta * past.M
    return S.T @ x.q / root(x.q), {"M": M, "S": S}


def titans_linear(x: At, past: At) -> Result:
    gradient = outer(x.k, past.W.T @ x.k - x.v)
    Z = x.eta * past.Z - x.theta * gradient
    W = (1 - x.alpha) * past.W + Z
    return W.T @ x.q, {"Z": Z, "W": W}


def ttt_linear(x: At, past: At) -> Result:
    """A step along the gradient of |Wt k + b - v|^2 / 2, by hand."""
    residual = past.W.T @ x.k + past.b - x.v
    W, b = past.W - x.eta * outer(x.k, residual), past.b - x.eta * residual
    return W.T @ x.q + b, {"W": W, "b": b}


DELTA: dict[str, Step] = {
    "delta_rule": delta_rule,
    "delta_rule_negative": delta_rule_negative,
    "gated_delta_rule": gated_delta_rule,
    "kda": kda,
    "efla": efla,
    "kaczmarz": kaczmarz,
    "comba": comba,
    "comba_decayed": comba_decayed,
    "q_delta": q_delta,
    "gdn2": gdn2,
    "iplr": iplr,
    "dplr": dplr,
    "rwkv7": rwkv7,
    "delta_product": delta_product,
    "gated_delta_product": gated_delta_product,
    "eda": eda,
    "mom": mom,
    "dgd": dgd,
    "gated_oja": gated_oja,
    "gated_oja_channel": gated_oja_channel,
    "mdn": mdn,
    "mdn_lagged": mdn_lagged,
    "titans_linear": titans_linear,
    "ttt_linear": ttt_linear,
}
