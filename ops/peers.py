"""Other libraries' operators on the same tensors: what a measurement is set beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from linalg_dsl.ops.bench import Shape


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


def recorded_rows(names: Sequence[str], shape: Shape, passes: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of others' operators as they were measured elsewhere (``peers.json``), where that was done."""
    text = files("linalg_dsl.ops").joinpath("peers.json").read_text(encoding="utf-8")
    data = json.loads(text)
    sizes = asdict(shape)
    rows = []
    for row in data["rows"]:
        if row["name"] not in (*names, "attention") or row["passes"] not in passes:
            continue
        if any(row[n] != size for n, size in sizes.items()):
            continue
        empty = {"launches": None, "flops": 0.0, "moved": 0.0, "flop_share": 0.0, "byte_share": 0.0}
        empty |= {"predicted": None, "verdict": None, "right": None, "device": data["card"]}
        source = f"{row['operator'].rstrip(')')}, {data['card']} {data['date']})"
        rows.append({**empty, **row, "operator": source})
    return rows


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


def _retnet() -> Callable[..., Tensor]:
    from fla.ops.retention import chunk_retention

    return lambda q, k, v, gamma: _first(chunk_retention(q, k, v))


def _hgrn2() -> Callable[..., Tensor]:
    from fla.ops.gla import chunk_gla

    return lambda q, f, v: _first(chunk_gla(q, (1 - f).to(q.dtype), v, f.log()))


def _iplr() -> Callable[..., Tensor]:
    from fla.ops.generalized_delta_rule import chunk_iplr_delta_rule

    return lambda q, k, v, a, b: _first(chunk_iplr_delta_rule(q, k, v, a, b))


def _gdn2() -> Callable[..., Tensor]:
    from fla.ops.gdn2 import chunk_gdn2

    return lambda *given: _first(chunk_gdn2(*given))


def _first(result: Any) -> Tensor:
    out: Tensor = result[0]
    return out


_PEERS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "linear_attention": _linear_attention,
    "retnet": _retnet,
    "hgrn2": _hgrn2,
    "iplr": _iplr,
    "gdn2": _gdn2,
    "simple_gla": _simple_gla,
    "gla": _gla,
    "rwkv6": _rwkv6,
    "delta_rule": _delta_rule,
    "gated_delta_rule": _gated_delta_rule,
    "kda": _kda,
    "dplr": _dplr,
}
"""Entries with an operator of the same meaning; each takes the entry's inputs in their order."""
