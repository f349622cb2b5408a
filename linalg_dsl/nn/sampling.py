"""The next token from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError


def pick(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token for each row of logits [N, vocabulary]: the likeliest at temperature 0, else drawn."""
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ArgumentError(
            "temperature must be at least 0, top_k at least 1, top_p in (0, 1]; "
            f"got {temperature}, {top_k}, {top_p}"
        )
    if temperature == 0:
        return logits.argmax(-1)
    scaled = logits.float() / temperature
    if top_k is not None:
        least = scaled.topk(min(top_k, scaled.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if top_p is not None:
        ordered, index = scaled.sort(-1, descending=True)
        chance = ordered.softmax(-1)
        beyond = chance.cumsum(-1) - chance >= top_p
        scaled = scaled.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    return torch.multinomial(scaled.softmax(-1), 1, generator=generator).squeeze(1)
