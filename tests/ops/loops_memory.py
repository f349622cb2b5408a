"""Rules with a normaliser, slots or a side state: one token of one head, as the papers have it."""

from __future__ import annotations

import torch
from loop_kit import At, Result, Step, columns, outer, phase, root, rows
from torch import Tensor
from torch.nn.functional import elu, layer_norm


def normalised_linear_attention(x: At, past: At) -> Result:
    fq, fk = elu(x.q) + 1, elu(x.k) + 1
    S, n = past.S + outer(fk, x.v), past.n + fk
    return S.T @ fq / (n @ fq), {"S": S, "n": n}


def based(x: At, past: At) -> Result:
    S, n = past.S + outer(x.k, x.v), past.n + x.k
    return S.T @ x.q / (n @ x.q + 1e-12), {"S": S, "n": n}


def rebased(x: At, past: At) -> Result:
    def feature(z: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return (gamma * layer_norm(z, z.shape, eps=1e-5) + beta) ** 2

    fq, fk = feature(x.q, x.gamma_q, x.beta_q), feature(x.k, x.gamma_k, x.beta_k)
    S, n = past.S + outer(fk, x.v), past.n + fk
    return S.T @ fq / (n @ fq + 1e-5), {"S": S, "n": n}


def mlstm(x: At, past: At) -> Result:
    log_f = torch.log(torch.sigmoid(x.f))
    m = torch.maximum(log_f + past.m, x.i)
    keep, take = torch.exp(log_f + past.m - m), torch.exp(x.i - m)
    k = x.k / root(x.k)
    C = keep * past.C + take * outer(k, x.v)
    n = keep * past.n + take * k
    return C.T @ x.q / torch.maximum(torch.abs(n @ x.q), torch.exp(-m)), {"m": m, "C": C, "n": n}


def rwkv4(x: At, past: At) -> Result:
    """Without the maximum: numerator and denominator as they are, then brought to the stored form."""
    size = torch.exp(past.m)
    numerator, denominator = past.n * size, past.d * size
    own = torch.exp(x.u + x.k)
    o = (numerator + own * x.v) / (denominator + own)
    m = torch.maximum(past.m - x.w, x.k)
    after = torch.exp(-m)
    n = (torch.exp(-x.w) * numerator + torch.exp(x.k) * x.v) * after
    d = (torch.exp(-x.w) * denominator + torch.exp(x.k)) * after
    return o, {"m": m, "n": n, "d": d}


def lightnet(x: At, past: At) -> Result:
    z = torch.logaddexp(past.z, x.k)
    S = rows(torch.exp(past.z - z), past.S) + outer(torch.exp(x.k - z), x.v)
    return S.T @ x.q / root(x.q), {"z": z, "S": S}


def _slots(x: At, past: At, keep: Tensor, take: Tensor) -> Result:
    """Both slot memories after a token, and attention over them."""
    H = columns(past.H, keep) + outer(x.k, take)
    G = rows(keep, past.G) + outer(take, x.v)
    weights = torch.softmax(H.T @ x.q / root(x.q), dim=0)
    return G.T @ weights, {"H": H, "G": G}


def abc(x: At, past: At) -> Result:
    z = torch.logaddexp(past.z, x.s)
    o, states = _slots(x, past, torch.exp(past.z - z), torch.exp(x.s - z))
    return o, {"z": z, **states}


def gsa(x: At, past: At) -> Result:
    return _slots(x, past, x.g.exp(), 1 - x.g.exp())


def raven(x: At, past: At) -> Result:
    keep = torch.exp(x.f * x.r)
    return _slots(x, past, keep, 1 - keep)


def blurry_window(x: At, past: At) -> Result:
    gate = x.r * phase(x)
    keys = columns(torch.complex(past.X, past.Y), gate) + outer(x.k, x.w)
    values = rows(gate, torch.complex(past.E, past.F)) + outer(x.w, x.v)
    weights = torch.softmax(keys.real.T @ x.q / root(x.q), dim=0)
    states = {"X": keys.real, "Y": keys.imag, "E": values.real, "F": values.imag}
    return values.real.T @ weights, states


def _preconditioned(x: At, past: At, decayed: Tensor) -> Result:
    A = x.h.exp() * past.A + x.eta * x.k**2
    r = torch.log(A + 1e-6) - x.center
    key = x.k * 1.5 ** (-r / (1 + r.abs()))
    S = decayed + x.beta * outer(key, x.v - decayed.T @ x.k)
    return S.T @ x.q / root(x.q), {"A": A, "S": S}


def pgdn(x: At, past: At) -> Result:
    return _preconditioned(x, past, x.g.exp() * past.S)


def pkda(x: At, past: At) -> Result:
    return _preconditioned(x, past, rows(x.g.exp(), past.S))


def osdn(x: At, past: At) -> Result:
    S = past.S + x.beta * outer(past.d * x.k, x.v - past.S.T @ x.k)
    # half the squared factor by which the residual shrinks; d takes a step against its gradient
    square = x.k**2
    d = past.d + x.eta * (1 - past.d @ square) * square
    return S.T @ x.q / root(x.q), {"d": d, "S": S}


def kalman(x: At, past: At) -> Result:
    """Prediction and correction of a filter whose covariance is diagonal, P = diag(1 / lam)."""
    covariance = x.a**2 / past.lam + x.p
    gain = covariance * x.k / ((covariance * x.k) @ x.k + 1 / x.r)
    predicted = x.a * past.S
    S = predicted + outer(gain, x.v - predicted.T @ x.k)
    return S.T @ x.q / root(x.q), {"lam": 1 / covariance + x.r * x.k**2, "S": S}


def hla(x: At, past: At) -> Result:
    P = past.P + outer(x.k, x.k)
    C = past.C + outer(x.q, x.v)
    G = past.G + outer(x.k, x.k) @ past.C
    return x.q @ (P @ C - G), {"P": P, "C": C, "G": G}


def ccq(x: At, past: At) -> Result:
    P = x.g.exp() * past.P + outer(x.k, x.k)
    decayed = x.g.exp() * past.S
    S = decayed + x.beta * outer(x.k, x.v - decayed.T @ x.k)
    return (P.T @ x.q) @ S / root(x.q), {"P": P, "S": S}


MEMORY: dict[str, Step] = {
    "normalised_linear_attention": normalised_linear_attention,
    "based": based,
    "rebased": rebased,
    "mlstm": mlstm,
    "rwkv4": rwkv4,
    "lightnet": lightnet,
    "abc": abc,
    "gsa": gsa,
    "raven": raven,
    "blurry_window": blurry_window,
    "pgdn": pgdn,
    "pkda": pkda,
    "osdn": osdn,
    "kalman": kalman,
    "hla": hla,
    "ccq": ccq,
}
