"""Generated Triton kernels, in the interpreter, against the float64 step loop: every output and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_cases import TEXTS, assert_close, carried, case, errors

import linalg_dsl as ld
from linalg_dsl import driver
from linalg_dsl.ops.draw import GateKind, draw, draw_state


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_every_entry_equals_the_step_loop(name: str) -> None:
    """Gates with resets (-inf, -1e4, -60) where there are gates; K and V odd and unequal, a ragged end."""
    op, tensors, state = case(name, 2, 37, 1, 12, 7, "resets")
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize("gates", ["mild", "strong"])
def test_the_carried_boundary_term_equals_the_exact_one(
    name: str, gates: GateKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past eight chunks, on the way that calls take whose states would fill a GiB."""
    monkeypatch.setattr(driver, "emit", lambda *a, emit=driver.emit: carried(emit(*a)))
    op = ld.compile(f"{TEXTS[name]}\n", backend="triton", chunk_size=16)
    _, tensors, state = case(name, 1, 200, 1, 17, 16, gates)
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize(
    "name", ["linear_attention", "simple_gla", "rwkv6", "gated_delta_rule", "kda", "dplr"]
)
def test_packed_sequences_with_empty_ones_and_shared_heads_equal_the_step_loop(name: str) -> None:
    op, _, _ = case(name, 1, 1, 2, 5, 9)
    cu = torch.tensor([0, 0, 5, 5, 21, 70, 71, 71])
    few = {i.name: 1 for i in op.spec.inputs if "K" in i.dims and i.kind == "plain"}
    tensors = draw(op.spec, 1, 71, 2, 5, 9, dtype=torch.float32, seed=6, heads=few)
    (state,) = draw_state(op.spec, 7, 2, 5, 9, dtype=torch.float32)
    assert_close(errors(op, tensors, state, cu))


@pytest.mark.parametrize(
    ("name", "T"), [("gated_delta_rule", T) for T in (1, 15, 16, 17)] + [("gla", 1), ("gla", 150)]
)
def test_lengths_around_the_chunk_and_past_the_exact_boundaries(name: str, T: int) -> None:
    op, tensors, state = case(name, 1, T, 1, 17, 16, "strong")
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize("name", ["gated_delta_rule", "dplr", "simple_gla"])
def test_gradients_of_the_final_state_alone(name: str) -> None:
    op, tensors, state = case(name, 1, 33, 2, 3, 7)
    assert_close(errors(op, tensors, state, loss="state"))
    assert_close(errors(op, tensors, None, loss="output"))


def test_no_tokens_hand_the_state_on() -> None:
    op, tensors, state = case("gated_delta_rule", 2, 0, 2, 4, 4)
    o, final = op(**tensors, initial_state=state, output_final_state=True)
    assert o.shape == (2, 0, 2, 4)
    assert torch.equal(final, state)


def test_one_by_one() -> None:
    op, tensors, state = case("kda", 1, 1, 1, 1, 1)
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_later_tokens_change_no_bit_of_earlier_outputs(name: str) -> None:
    op, tensors, _ = case(name, 1, 40, 1, 8, 8)
    whole = op(**tensors)
    changed = {n: t.clone() for n, t in tensors.items()}
    for t in changed.values():
        t[:, 21:] *= 0.5
    assert torch.equal(op(**changed)[:, :21], whole[:, :21])
    assert not torch.equal(op(**changed)[:, 21:], whole[:, 21:])


def test_the_same_call_gives_the_same_bits() -> None:
    op, tensors, state = case("kda", 1, 40, 2, 8, 8)
    assert torch.equal(op(**tensors, initial_state=state), op(**tensors, initial_state=state))


def test_half_precision_stays_within_its_bound() -> None:
    op, tensors, state = case("gated_delta_rule", 1, 50, 2, 16, 16)
    low = {n: t.half() for n, t in tensors.items()}
    found = errors(op, low, state)
    assert_close({n: e for n, e in found.items() if not n.startswith("d_")}, 1e-2)
    assert_close({n: e for n, e in found.items() if n.startswith("d_")}, 2e-2)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("o_t[:, None] >= o_t[None, :]", "o_t[:, None] >= 0"),
        ("if HAS_FIRST:", "if False:"),
        ("if WANT_LAST:", "if False:"),
    ],
)
def test_a_broken_kernel_is_seen(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself can fail: causality, the initial state, a result never written."""

    def emit(*a: Any) -> str:
        text = original(*a)
        assert right in text
        return text.replace(right, wrong)

    original = driver.emit
    monkeypatch.setattr(driver, "emit", emit)
    op = ld.compile(f"{TEXTS['linear_attention']}\n# {wrong}\n", backend="triton", chunk_size=16)
    _, tensors, state = case("linear_attention", 1, 20, 1, 4, 4)
    with pytest.raises(AssertionError, match="relative errors"):
        assert_close(errors(op, tensors, state))


def test_invariant_calls_give_a_sequence_the_same_bits_alone_in_a_batch_and_packed() -> None:
    _, tensors, _ = case("gated_delta_rule", 3, 40, 2, 8, 8)
    op = ld.compile(TEXTS["gated_delta_rule"], backend="triton", invariant=True)
    batch = op(**tensors)
    alone = op(**{n: t[1:2] for n, t in tensors.items()})
    packed = op(**{n: t.flatten(0, 1)[None] for n, t in tensors.items()}, cu_seqlens=torch.arange(4) * 40)
    assert torch.equal(alone[0], batch[1])
    assert torch.equal(packed[0, 40:80], batch[1])


def test_opcheck_of_the_triton_operator_on_packed_sequences() -> None:
    op, _, _ = case("gated_delta_rule", 1, 1, 1, 4, 4)
    tensors = draw(op.spec, 1, 20, 2, 5, 3, dtype=torch.float32)
    (state,) = draw_state(op.spec, 3, 2, 5, 3, dtype=torch.float32)
    handle = getattr(torch.ops.linalg_dsl, op.operator("triton").name).default
    given = [t.requires_grad_() for t in (*tensors.values(), state)]
    offsets = torch.tensor([0, 0, 7, 20])
    found = torch.library.opcheck(handle, (*given, [math.nan], offsets, True, True))
    assert set(found.values()) == {"SUCCESS"}


def test_a_number_per_token_beside_a_padded_axis() -> None:
    """k minus the sum of its channels is not zero on the padding of K, where both of its operands are."""
    op = ld.compile(
        "recurrence centred\ninput q, k : [K]\ninput v : [V]\ny_t = k_t - sum(k_t)\n"
        "f_t = y_t rsqrt(y_tᵀ y_t + 1)\nS_t = S_{t-1} + f_t v_tᵀ\no_t = S_tᵀ q_t\n",
        backend="triton",
    )
    assert op.check(B=1, T=20, H=1, K=5, V=4).ok
