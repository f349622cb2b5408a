"""Generated Triton kernels, in the interpreter, against the float64 step loop: every output and gradient."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl import driver
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.op import CompiledOp

RANK_TWO = """
recurrence gated_rank_two
input q, k, p : [K]
input e : [K] unit
input v : [V]
input g : log gate
input beta, gamma : scalar in (0, 1)
S_t = exp(g_t) (I - gamma_t e_t e_tᵀ) (I - beta_t k_t p_tᵀ) S_{t-1} + beta_t k_t v_tᵀ
o_t = S_tᵀ q_t
"""
MANY_ROWS = """
recurrence two_writes
input q : [K]
input k : [2, K]
input v : [2, V]
input a : [K] unit
input b : [K] unit
input z : [V]
input g : log gate [K]
S_t = diag(exp(g_t)) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_tᵀ v_t
o_t = silu(z_t) ⊙ (S_tᵀ l2norm(q_t)) + S_{t-1}ᵀ q_t
"""
ENTRIES = sorted(p.name[:-4] for p in files("linalg_dsl.ops.catalogue").iterdir() if p.name.endswith(".rec"))
TEXTS = {n: (files("linalg_dsl.ops.catalogue") / f"{n}.rec").read_text(encoding="utf-8") for n in ENTRIES}
TEXTS |= {"gated_rank_two": RANK_TWO, "two_writes": MANY_ROWS}


def embedded(x: Tensor) -> Tensor:
    """The same numbers between NaNs: what is read past the ends is seen."""
    flat = torch.full((x.numel() + 64,), float("nan"), dtype=x.dtype)
    flat[32 : 32 + x.numel()] = x.flatten()
    return flat[32 : 32 + x.numel()].view(x.shape)


def relative(got: Tensor, want: Tensor, floor: float) -> float:
    """The worse of the relative error in norm and of the largest error over the largest entry."""
    d = got.double() - want
    if not d.numel():
        return 0.0
    norm = float(d.norm()) / max(float(want.norm()), floor, 1e-30)
    return max(norm, float(d.abs().max()) / max(float(want.abs().max()), floor, 1e-30))


def errors(
    op: CompiledOp,
    tensors: Mapping[str, Tensor],
    state: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    loss: str = "both",
) -> dict[str, float]:
    """Relative error of every output and gradient of the kernels against the step loop in float64."""
    given = {n: embedded(t).requires_grad_() for n, t in tensors.items()}
    exact = {n: t.detach().double().requires_grad_() for n, t in given.items()}
    states = []
    results: list[dict[str, Tensor]] = []
    generator = torch.Generator().manual_seed(3)
    weights: list[Tensor] = []
    for run, values in ((op, given), (op.reference, exact)):
        extra: dict[str, Any] = {}
        if state is not None:
            s0 = embedded(state).to(next(iter(values.values())).dtype).requires_grad_()
            states.append(s0)
            extra["initial_state"] = s0
        if cu_seqlens is not None:
            extra["cu_seqlens"] = cu_seqlens
        o, final = run(**values, output_final_state=True, **extra)
        if not weights:
            weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, final)]
        parts = [(x.double() * w).sum() for x, w in zip((o, final), weights, strict=True)]
        total = parts[0] + parts[1] if loss == "both" else parts[1] if loss == "state" else parts[0]
        wanted = [*values.values(), *([states[-1]] if state is not None else [])]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        names = [f"d_{n}" for n in values] + (["d_initial_state"] if state is not None else [])
        found = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
        results.append({"o": o.detach(), "state": final.detach(), **found})
    got, want = results
    largest = max((float(w.norm()) for n, w in want.items() if n.startswith("d_")), default=0.0)
    return {
        n: relative(got[n], w, 1e-6 * largest if n.startswith("d_") else 0.0) if n in got else float(w.norm())
        for n, w in want.items()
    }


def case(name: str, B: int, T: int, H: int, K: int, V: int, gates: GateKind = "mild", **heads: int) -> Any:
    op = ld.compile(TEXTS[name], backend="triton", chunk_size=16)
    tensors = draw(op.spec, B, T, H, K, V, dtype=torch.float32, gates=gates, seed=5, heads=heads)
    (state,) = draw_state(op.spec, B, H, K, V, dtype=torch.float32)
    return op, tensors, state


def assert_close(found: Mapping[str, float], limit: float = 5e-5) -> None:
    bad = {n: e for n, e in found.items() if not e < limit}
    assert not bad, f"relative errors above {limit}: {bad}"


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
    """Past eight chunks, on the way that long bfloat16 sequences take."""
    monkeypatch.setattr(driver, "emit", lambda *a, emit=driver.emit: carried(emit(*a)))
    op = ld.compile(f"{TEXTS[name]}\n", backend="triton", chunk_size=16)
    _, tensors, state = case(name, 1, 200, 1, 17, 16, gates)
    assert_close(errors(op, tensors, state))


def carried(text: str) -> str:
    changed = text.replace("bytes_each == 4 or self.length <= 8 * self.chunk", "False")
    assert changed != text
    return changed


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
