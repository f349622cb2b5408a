"""The models that comparisons are made of, all with the same sizes, and the sizes themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from linalg_dsl.nn.lm import LM

PATTERNS: dict[str, str] = {
    "softmax": "full",
    "linear": "linear",
    "scalar_gla": "simple_gla",
    "gla": "gla",
    "delta": "delta",
    "gated_delta": "gdn",
    "invented": "invented",
    "delta_full": "delta full@mid,last",
    "gated_delta_window": "gdn window(16)@mid,last",
}
"""Nine models by name: softmax attention, six recurrences, two hybrids."""
HYBRIDS = ("delta_full", "gated_delta_window")

INVENTED = """
# A delta rule that lets go as much as it does not replace: beta near 1 keeps all other associations.
recurrence invented

input q, d : [K]
input k    : [K] unit
input v    : [V]
input beta : scalar in (0, 1)
const scale = 1 / sqrt(K)

a_t = exp(-(1 - beta_t) softplus(d_t))
S_t = (I - beta_t k_t k_tᵀ) diag(a_t) S_{t-1} + beta_t k_t v_tᵀ
o_t = scale S_tᵀ q_t
"""


@dataclass(frozen=True)
class Size:
    """Of a model; ``init_std`` of its weights, times ``residual_gain`` of those that add to the residual
    stream where there are several layers.

    So every block begins near the identity: a second layer that begins at random hides what the first one
    finds, and at toy size a hybrid then learns what its attention can do alone, and no more.
    """

    hidden: int = 64
    heads: int = 1
    head_dim: int = 16
    layers: int = 1
    mlp_ratio: float = 0.0
    conv: int = 4
    init_std: float = 0.1
    residual_gain: float = 0.1


def build(
    name: str,
    size: Size,
    vocab_size: int,
    seed: int,
    device: torch.device | str = "cpu",
    layers: Mapping[str, Any] | None = None,
) -> LM:
    """A model of ``PATTERNS`` or of any layer pattern, its parameters drawn from ``seed``.

    A hybrid has at least two layers, one of each kind.

    Softmax layers get the short convolution that the recurrences have, so that none is at a disadvantage in
    seeing the token before. The state of a head is head_dim x head_dim for all.
    """
    pattern = PATTERNS.get(name, name)
    layers_of = max(size.layers, 2) if name in HYBRIDS else size.layers
    torch.manual_seed(seed)
    model = LM(
        vocab_size, size.hidden, pattern, num_layers=layers_of, num_heads=size.heads,
        head_dim=size.head_dim, value_dim=size.head_dim, layers={"invented": INVENTED, **(layers or {})},
        mlp_ratio=size.mlp_ratio, conv_size=size.conv, attention_conv_size=size.conv, init_std=size.init_std,
        residual_std=size.init_std * size.residual_gain if layers_of > 1 else None,
    )  # fmt: skip
    return model.to(device)
