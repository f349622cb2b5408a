"""Other libraries' operators on the same tensors: what a measurement is set beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attention_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention of [B, T, H, D] tensors, by torch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2)


def peer_call(name: str) -> Callable[..., Tensor] | None:
    """fla-core's operator for a catalogue entry, on that entry's inputs; None where there is none."""
    try:
        return _PEERS[name]() if name in _PEERS else None
    except ImportError:
        return None


def _linear_attention() -> Callable[..., Tensor]:
    from fla.ops.linear_attn import chunk_linear_attn

    return lambda q, k, v: _first(chunk_linear_attn(q, k, v, normalize=False))


def _simple_gla() -> Callable[..., Tensor]:
    from fla.ops.simple_gla import chunk_simple_gla

    return lambda q, k, v, g: _first(chunk_simple_gla(q, k, v, g=g))


def _gla() -> Callable[..., Tensor]:
    from fla.ops.gla import chunk_gla

    return lambda q, k, v, g: _first(chunk_gla(q, k, v, g))


def _rwkv6() -> Callable[..., Tensor]:
    from fla.ops.rwkv6 import chunk_rwkv6

    return lambda r, k, v, w, u: _first(chunk_rwkv6(r, k, v, w, u.to(r.dtype)))


def _delta_rule() -> Callable[..., Tensor]:
    from fla.ops.delta_rule import chunk_delta_rule

    return lambda q, k, v, beta: _first(chunk_delta_rule(q, k, v, beta.to(q.dtype)))


def _gated_delta_rule() -> Callable[..., Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda q, k, v, g, beta: _first(chunk_gated_delta_rule(q, k, v, g, beta.to(q.dtype)))


def _kda() -> Callable[..., Tensor]:
    from fla.ops.kda import chunk_kda

    return lambda q, k, v, g, beta: _first(chunk_kda(q, k, v, g, beta.to(q.dtype)))


def _dplr() -> Callable[..., Tensor]:
    from fla.ops.generalized_delta_rule.dplr import chunk_dplr_delta_rule

    return lambda q, k, v, a, b, g: _first(chunk_dplr_delta_rule(q, k, v, a, b, g.to(q.dtype)))


def _first(result: Any) -> Tensor:
    out: Tensor = result[0]
    return out


_PEERS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "linear_attention": _linear_attention,
    "simple_gla": _simple_gla,
    "gla": _gla,
    "rwkv6": _rwkv6,
    "delta_rule": _delta_rule,
    "gated_delta_rule": _gated_delta_rule,
    "kda": _kda,
    "dplr": _dplr,
}
"""Entries with an operator of the same meaning; each takes the entry's inputs in their order."""
