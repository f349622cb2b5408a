"""A recurrence and its transpose, K and V swapped in every declaration, give the same numbers.

For S' = S^T every factor is transposed and stands on the other side: key-side transitions become value-side
ones, erases become left vectors, reads S^T q become S' q.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from recurrences import PUBLISHED, WIDER
from torch import Tensor

from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.evaluate import run_backward, run_plan
from linalg_dsl.testing.strategies_lines import DECLARATIONS, READS, updates
from linalg_dsl.testing.transpose import renamed, transposed

SIZES = {"K": 4, "V": 3}


def run(spec: RecurrenceSpec, tensors: dict[str, Tensor], start: Tensor, scale: float) -> dict[str, Tensor]:
    """Output, final state and all gradients of a fixed loss, states with their axes as plans have them."""
    forward = derive(canonicalise(spec))
    values: dict[str, Tensor | float] = {**tensors, "scale": scale}
    o, final = run_plan(forward, values, start, 5)
    grads = run_backward(backward(forward), forward, values, start, 5, o.cos(), final.sin())
    return {"o": o, "final": final, **{f"d_{n}": x for n, x in grads.items()}}


def compare(spec: RecurrenceSpec) -> None:
    T = 11
    tensors = draw(spec, 2, T, 2, SIZES["K"], SIZES["V"], dtype=torch.float64, seed=3)
    (declared,) = draw_state(spec, 2, 2, SIZES["K"], SIZES["V"], dtype=torch.float64)
    start = declared if spec.states[0].dims[0] == "K" else declared.mT
    scale = SIZES["K"] ** -0.5
    want = run(spec, tensors, start, scale)
    for other in (renamed(spec), transposed(renamed(spec))):
        found = run(other, tensors, start.mT, scale)
        assert found.keys() == want.keys()
        for name, x in want.items():
            got = found[name].mT if name in ("final", "d_initial_state") else found[name]
            assert got.shape == x.shape
            assert (got - x).abs().max() <= 1e-10 * max(float(x.abs().max()), 1e-6), name


@pytest.mark.parametrize("name", PUBLISHED | WIDER)
def test_the_transposed_recurrence_gives_the_same_numbers(name: str) -> None:
    compare(parse((PUBLISHED | WIDER)[name].text(name)))


@given(updates(), READS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_so_do_random_lines(update: str, read: str) -> None:
    compare(parse(f"recurrence drawn\n{DECLARATIONS}\nS_t = {update}\no_t = {read}\n"))


@pytest.mark.parametrize("name", ["kda", "comba", "rwkv6", "eda"])
def test_transposing_twice_gives_the_recurrence_back(name: str) -> None:
    spec = parse(PUBLISHED[name].text(name))
    again = transposed(renamed(transposed(renamed(spec))))
    assert again.updates == spec.updates
    assert again.states == spec.states
