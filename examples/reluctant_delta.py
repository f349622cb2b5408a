"""An operator found in no paper, from its line of mathematics to training.

    python examples/reluctant_delta.py

A delta rule whose decay depends on the strength of its erase: a token that replaces one association
(beta near 1) lets the others stand, one that replaces little lets every key channel fade at the rate
that it asks for. It is written twice, here in Python and in reluctant_delta.rec as text; both give the
same spec. Then a one-layer model learns to recall: key-value pairs go by, and a query asks for a value.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import linalg_dsl as ld

TEXT = Path(__file__).with_suffix(".rec")


@ld.recurrence
def reluctant_delta(
    S, q: ld.K, k: ld.K.unit, v: ld.V, d: ld.K, beta: ld.Scalar(0, 1), scale=1 / ld.sqrt(ld.K)
):
    a = ld.exp(-(1 - beta) * ld.softplus(d))
    S = (ld.I - beta * ld.outer(k, k)) @ ld.diag(a) @ S + beta * ld.outer(k, v)
    return S, scale * S.T @ q


class Recall(nn.Module):
    """Symbols in, one memory of the kind above, symbols out."""

    def __init__(self, symbols: int, width: int = 32) -> None:
        super().__init__()
        self.op = ld.compile(reluctant_delta)
        self.embed = nn.Embedding(symbols, width)
        # a value is stored under the symbol before it, so the key looks one token back
        self.q, self.k, self.v, self.d = (nn.Linear(width, width) for _ in range(4))
        self.beta = nn.Linear(width, 1)
        self.out = nn.Linear(width, symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.embed(symbols)
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        k = nn.functional.normalize(self.k(before), dim=-1)
        one_head = [y.unsqueeze(2) for y in (self.q(x), k, self.v(x), self.d(x))]
        o = self.op(*one_head, torch.sigmoid(self.beta(x)))
        return self.out(o.squeeze(2))


def batch(
    generator: torch.Generator, size: int = 16, pairs: int = 6, symbols: int = 16
) -> tuple[Tensor, Tensor]:
    """Pairs (key, value) with distinct keys, then one key as the query; the answer is its value."""
    keys = torch.stack([torch.randperm(symbols, generator=generator)[:pairs] for _ in range(size)])
    values = torch.randint(symbols, (size, pairs), generator=generator)
    asked = torch.randint(pairs, (size, 1), generator=generator)
    told = torch.stack([keys, values + symbols], dim=-1).flatten(1)
    return torch.cat([told, keys.gather(1, asked)], dim=1), values.gather(1, asked).squeeze(1)


def main(steps: int = 200) -> float:
    assert reluctant_delta.spec == ld.parse(TEXT.read_text(encoding="utf-8"))
    op = ld.compile(TEXT)
    print(op.plan.explain())
    print(op.check(B=2, T=100, H=2, K=16, V=8))

    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Recall(symbols=32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    right = 0.0
    for step in range(1, steps + 1):
        told, answer = batch(generator)
        logits = model(told)[:, -1, :16]
        loss = cross_entropy(logits, answer)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        right = 0.95 * right + 0.05 * float((logits.argmax(-1) == answer).float().mean())
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, recalled {right:.0%}")
    return right


if __name__ == "__main__":
    main()
