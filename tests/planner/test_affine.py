"""A chunk's affine map of its state, in float64: what it does, how it composes, and its adjoint."""

from __future__ import annotations

import pytest
import torch
from catalogue_sets import IN_DEPTH
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import SIDES, TEXTS
from torch import Tensor

from linalg_dsl.errors import InternalError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.draw import GateKind, draw
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.affine import affine_map
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.evaluate import run_backward, run_plan
from linalg_dsl.planner.evaluate_affine import chunk_maps, compose, sequence_map
from linalg_dsl.planner.plan import ChunkPlan

ALL = {**TEXTS, **SIDES}
B, H, K, V = 2, 2, 5, 3
CONSTS = {"scale": 0.7, "tau": 4.0}


def worst(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-12))


def drawn(
    name: str, T: int, gates: GateKind, seed: int
) -> tuple[ChunkPlan, dict[str, Tensor | float], Tensor]:
    spec = parse(ALL[name])
    tensors = draw(spec, B, T, H, K, V, dtype=torch.float64, gates=gates, seed=seed)
    state = torch.randn(B, H, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return derive(canonicalise(spec)), {**tensors, **CONSTS}, state


@given(
    name=st.sampled_from(sorted(ALL)),
    T=st.integers(1, 14),
    chunk=st.integers(1, 6),
    gates=st.sampled_from(["mild", "strong", "resets"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_composed_maps_give_the_final_state_and_its_gradient(
    name: str, T: int, chunk: int, gates: GateKind, seed: int
) -> None:
    plan, tensors, state = drawn(name, T, gates, seed)
    whole = sequence_map(plan, tensors, chunk)
    _, final = run_plan(plan, tensors, state, chunk)
    assert isinstance(final, Tensor)
    assert worst(whole(state), final) < 1e-12
    d_final = torch.randn_like(state)
    grads = run_backward(backward(plan), plan, tensors, state, chunk, None, d_final)
    d_initial = grads["initial_state"]
    assert isinstance(d_initial, Tensor)
    assert worst(whole.adjoint(d_final), d_initial) < 1e-12


@pytest.mark.parametrize("name", sorted(ALL))
def test_composition_is_associative_and_agrees_with_one_long_chunk(name: str) -> None:
    plan, tensors, state = drawn(name, 9, "mild", 3)
    first, second, third = chunk_maps(plan, tensors, 3)
    left = compose(third, compose(second, first))
    right = compose(compose(third, second), first)
    (whole,) = chunk_maps(plan, tensors, 9)
    for composed in (left, right):
        assert worst(composed(state), whole(state)) < 1e-12
        if whole.matrix is not None and composed.matrix is not None:
            assert worst(composed.matrix, whole.matrix) < 1e-12


@pytest.mark.parametrize(
    ("name", "erased", "along"),
    [
        ("linear_attention", None, ()), ("simple_gla", None, ()), ("gla", None, ("K",)),
        ("value_gate", None, ("V",)), ("separable_gate", None, ("K", "V")), ("delta_rule", "K", ()),
        ("gated_delta_rule", "K", ()), ("kda", "K", ()), ("separable_delta", "K", ("V",)),
        ("gated_oja", "V", ()), ("low_rank_alone", "K", ()),
    ],
)  # fmt: skip
def test_maps_are_as_small_as_the_class_allows(name: str, erased: str | None, along: tuple[str, ...]) -> None:
    """A vector or a number of decays without erases, a matrix on the erased axis with them."""
    found = affine_map(derive(canonicalise(parse(ALL[name]))))
    assert (found.erased, found.along) == (erased, along)
    assert (found.matrix is None) == (erased is None)
    if name == "linear_attention":
        assert found.factors is None


def test_every_entry_of_the_catalogue_in_depth_has_a_map() -> None:
    assert set(IN_DEPTH) <= set(ALL)


def test_a_plan_without_the_carry_has_no_map() -> None:
    with pytest.raises(InternalError, match="has 0 carries reverse"):
        affine_map(derive(canonicalise(parse(ALL["gla"]))), "reverse")
