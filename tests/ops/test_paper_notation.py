"""Published rules typed in their papers' notation: verdict, class, values and gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
from catalogue_cases import assert_close
from loop_kit import run_loop
from paper_rules import RULES
from torch import Tensor

import linalg_dsl
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.catalogue import catalogue_names, catalogue_text
from linalg_dsl.ops.draw import draw

SIZES = {"K": 5, "V": 3}
T, H = 19, 2


def test_no_rule_is_spelled_as_an_entry() -> None:
    lines = {line.strip() for name in catalogue_names() for line in catalogue_text(name).splitlines()}
    for name, rule in RULES.items():
        update = next(x for x in rule.text.splitlines() if "t-1}" in x or "t−1}" in x)
        assert update not in lines, name
    assert len(RULES) >= 15


@pytest.mark.parametrize("name", RULES)
def test_a_rule_as_its_paper_writes_it(name: str) -> None:
    rule = RULES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no slower path than the class has
        op = linalg_dsl.compile(rule.text, backend="torch", chunk_size=8, strict=True)
    verdicts = [s.verdict.split(": ", 1)[1].split(" → ")[0] for s in op.plan.explain().stages]
    assert ", ".join(verdicts) == rule.kind
    spec = op.spec
    assert parse(str(spec)) == spec
    tensors = draw(spec, 1, T, H, SIZES["K"], SIZES["V"], dtype=torch.float64, seed=3)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    sizes = SIZES | {"m": 4}
    start = {
        s.name: torch.zeros(1, H, *(sizes[str(d)] for d in s.dims), dtype=torch.float64) for s in spec.states
    }
    timed = {i.name: leaves[i.name] for i in spec.inputs if i.timed}
    params = {i.name: leaves[i.name] for i in spec.inputs if not i.timed}
    o, finals = op(**leaves, output_final_state=True)
    found = {"o": o} | {s: finals if isinstance(finals, Tensor) else getattr(finals, s) for s in start}
    wanted_o, wanted_finals = run_loop(rule.step, timed, params, start)
    assert_close(
        with_gradients(found, leaves), with_gradients({"o": wanted_o, **wanted_finals}, leaves), 1e-10
    )


def with_gradients(results: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results and, from random cotangents of all, the gradient of every input."""
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(r.shape, generator=generator, dtype=torch.float64) for r in results.values()]
    grads = torch.autograd.grad(list(results.values()), list(leaves.values()), given)
    return results | {f"d {n}": g for n, g in zip(leaves, grads, strict=True)}
