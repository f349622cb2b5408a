"""Recurrences of no catalogue: random products of random factors against a loop beside the text."""

from __future__ import annotations

import warnings

import random_rules
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from random_rules import SIZES, Rule
from torch import Tensor

import linalg_dsl
from linalg_dsl.language.parser import parse

T, H = 11, 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_rules.rules(), st.sampled_from([1, 4, 16]), st.integers(0, 2**20))
def test_values_and_gradients_are_those_of_the_loop(rule: Rule, chunk: int, seed: int) -> None:
    note(rule.text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op = linalg_dsl.compile(rule.text, backend="torch", chunk_size=chunk)
    assert parse(str(op.spec)) == op.spec
    tensors = {n: x.requires_grad_() for n, x in random_rules.inputs(rule, T, H, seed).items()}
    generator = torch.Generator().manual_seed(seed)
    sizes = (SIZES[a] for a in rule.layout)
    start = torch.randn(1, H, *sizes, generator=generator, dtype=torch.float64).requires_grad_()
    want = random_rules.run(rule, tensors, start)
    o, final = op(**tensors, initial_state={"S": start}, output_final_state=True)
    found = (o, final if isinstance(final, Tensor) else final.S)
    leaves = {**tensors, "S_0": start}
    given = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in want]
    pairs = {"o": (found[0], want[0]), "S": (found[1], want[1])}
    for name, got, right in zip(leaves, *(_gradients(r, leaves, given) for r in (found, want)), strict=True):
        pairs[name] = (got, right)
    for name, (got, right) in pairs.items():
        size = max(1.0, right.abs().max().item())
        assert (got - right).abs().max().item() < 1e-10 * size, (name, str(op.plan.explain()).splitlines()[0])


def _gradients(
    results: tuple[Tensor, Tensor], leaves: dict[str, Tensor], given: list[Tensor]
) -> tuple[Tensor, ...]:
    found = torch.autograd.grad(results, list(leaves.values()), given, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves.values(), strict=True))
