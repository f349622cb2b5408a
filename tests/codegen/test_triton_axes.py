"""Kernels of transitions and gates on either side of the state, in the interpreter, against the step loop."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import SIDES, assert_close, carried, errors
from recurrences import WIDER

import linalg_dsl as ld
from linalg_dsl import driver
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.op import CompiledOp


def compiled(name: str) -> CompiledOp:
    text = SIDES[name] if name in SIDES else WIDER[name].text(name)
    return ld.compile(text, backend="triton", chunk_size=16)


def check(
    name: str, T: int, gates: GateKind, *, B: int = 1, H: int = 1, K: int = 12, V: int = 7, loss: str = "both"
) -> None:
    op = compiled(name)
    tensors = draw(op.spec, B, T, H, K, V, dtype=torch.float32, gates=gates, seed=5)
    (state,) = draw_state(op.spec, B, H, K, V, dtype=torch.float32)
    assert_close(errors(op, tensors, state, loss=loss))


@pytest.mark.parametrize("name", sorted(SIDES.keys() | WIDER.keys()))
def test_every_form_equals_the_step_loop(name: str) -> None:
    """Gates with resets where there are gates; K and V odd and unequal, a ragged end."""
    check(name, 37, "resets", B=2)


@pytest.mark.parametrize("gates", ["mild", "strong"])
@pytest.mark.parametrize("name", sorted(SIDES))
def test_mild_and_strong_gates_at_heads_wider_than_a_block(name: str, gates: GateKind) -> None:
    check(name, 33, gates, K=19, V=33)


@pytest.mark.parametrize("T", [1, 15, 16, 17])
@pytest.mark.parametrize("name", ["gated_oja", "separable_delta"])
def test_lengths_around_the_chunk(name: str, T: int) -> None:
    check(name, T, "strong", K=5, V=17)


@pytest.mark.parametrize("name", sorted(SIDES))
def test_no_tokens_hand_the_states_on(name: str) -> None:
    op = compiled(name)
    tensors = draw(op.spec, 2, 0, 2, 4, 3, dtype=torch.float32)
    (state,) = draw_state(op.spec, 2, 2, 4, 3, dtype=torch.float32)
    state.requires_grad_()
    o, final = op(**tensors, initial_state=state, output_final_state=True)
    assert o.shape == (2, 0, 2, 3)
    assert torch.equal(final, state)
    (d_state,) = torch.autograd.grad((final * 2).sum(), state)
    assert torch.equal(d_state, torch.full_like(state, 2))


@pytest.mark.parametrize("name", ["gated_oja", "separable_delta", "kda_read_across"])
def test_gradients_of_the_final_state_alone(name: str) -> None:
    check(name, 33, "mild", K=3, V=7, loss="state")


@pytest.mark.parametrize("name", sorted(SIDES))
def test_packed_sequences_with_empty_ones_and_shared_heads(name: str) -> None:
    op = compiled(name)
    cu = torch.tensor([0, 0, 5, 5, 21, 70, 71, 71])
    few = {i.name: 1 for i in op.spec.inputs if "K" in i.dims and i.kind == "plain"}
    tensors = draw(op.spec, 1, 71, 2, 5, 9, dtype=torch.float32, seed=6, heads=few)
    (state,) = draw_state(op.spec, 7, 2, 5, 9, dtype=torch.float32)
    assert_close(errors(op, tensors, state, cu))


@pytest.mark.parametrize("gates", ["mild", "strong"])
@pytest.mark.parametrize("name", ["gated_oja", "scalar_gated_oja", "separable_gate", "separable_delta"])
def test_carried_boundary_terms_equal_exact_ones(
    name: str, gates: GateKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past eight chunks, whichever walk comes first, on the way that calls take whose states fill a GiB."""
    monkeypatch.setattr(driver, "emit", lambda *a, emit=driver.emit: carried(emit(*a)))
    op = ld.compile(f"{SIDES[name]}\n", backend="triton", chunk_size=16)
    tensors = draw(op.spec, 1, 200, 1, 17, 16, dtype=torch.float32, gates=gates, seed=5)
    (state,) = draw_state(op.spec, 1, 1, 17, 16, dtype=torch.float32)
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize("name", ["gated_oja", "separable_delta"])
def test_later_tokens_change_no_bit_of_earlier_outputs(name: str) -> None:
    op = compiled(name)
    tensors = draw(op.spec, 1, 40, 1, 8, 8, dtype=torch.float32)
    whole = op(**tensors)
    changed = {n: t.clone() for n, t in tensors.items()}
    for t in changed.values():
        t[:, 21:] *= 0.5
    assert torch.equal(op(**changed)[:, :21], whole[:, :21])
    assert not torch.equal(op(**changed)[:, 21:], whole[:, 21:])
