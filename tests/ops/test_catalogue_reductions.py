"""At special gates an entry is another one, to rounding; normalisers and maxima are what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linalg_dsl import ops
from linalg_dsl.testing.reductions import REDUCTIONS, B, H, Reduction, T, shared_values

pytestmark = pytest.mark.filterwarnings("ignore:.* has no chunk form:UserWarning")

K, V = 5, 4


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.fixture
def x() -> dict[str, Tensor]:
    return shared_values(0, K, V)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: r.title)
def test_an_entry_is_another_one_at_special_inputs(reduction: Reduction) -> None:
    values = reduction.inputs(0, K, V)
    found = []
    for side in reduction.sides:
        options = {**side.consts, **({"output_final_state": True} if side.state else {})}
        result = getattr(ops, side.entry)(**side.tensors(values), **options)
        found.append(side.pick(result[1] if side.state else result))
    close(found[0], found[1])


def test_a_memory_that_is_never_chosen_stays_empty(x: dict[str, Tensor]) -> None:
    q, k, v, g, beta, one, zero = (x[n] for n in ("q", "k", "v", "g", "beta", "one", "zero"))
    _, kept = ops.mom(q, k, v, g, beta, zero, one, output_final_state=True)
    close(kept, torch.zeros_like(kept))


def causal_softmax(logits: Tensor) -> Tensor:
    """[B, T, H, D] to weights [B, H, D, T, T] of the tokens s <= t, for every channel."""
    by_channel = logits.permute(0, 2, 3, 1)[..., None, :].expand(B, H, logits.shape[-1], T, T)
    return by_channel.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)


def test_lightnet_weighs_tokens_by_a_softmax(x: dict[str, Tensor]) -> None:
    q, v = x["q"], x["v"]
    logits = 5 * x["q"].flip(1)
    states = torch.einsum("bhdts,bshv->bthdv", causal_softmax(logits), v)
    close(ops.lightnet(q, logits, v, scale=1.0), torch.einsum("bthd,bthdv->bthv", q, states))


def test_abc_attends_to_softmax_averages(x: dict[str, Tensor]) -> None:
    q, k, v = x["q"], x["k"], x["v"]
    logits = 5 * x["q"][..., :3].flip(1)
    weights = causal_softmax(logits)
    keys = torch.einsum("bhmts,bshk->bthmk", weights, k)
    values = torch.einsum("bhmts,bshv->bthmv", weights, v)
    attention = torch.einsum("bthk,bthmk->bthm", q, keys).softmax(-1)
    close(ops.abc(q, k, v, logits, m=3, scale=1.0), torch.einsum("bthm,bthmv->bthv", attention, values))


def test_mlstm_is_what_it_would_be_without_the_running_maximum(x: dict[str, Tensor]) -> None:
    q, k, v, i, f = x["q"], x["k"], x["v"], x["raw"], 2 + x["raw"].flip(1)
    total = torch.nn.functional.logsigmoid(f).cumsum(1)
    weights = torch.exp(total[:, :, None] - total[:, None] + i[:, None])
    weights = weights * torch.ones(T, T, dtype=torch.float64).tril()[None, :, :, None]
    scores = weights * torch.einsum("bthk,bshk->btsh", q, k) * K**-0.5
    numerator = torch.einsum("btsh,bshv->bthv", scores, v)
    close(ops.mlstm(q, k, v, i, f), numerator / scores.sum(2).abs().clamp_min(1)[..., None])


def test_rwkv4_is_an_average_of_values(x: dict[str, Tensor]) -> None:
    k, v = x["v"].flip(1), x["v"]
    w = torch.rand(H, V, dtype=torch.float64)
    u = torch.randn(H, V, dtype=torch.float64)
    t = torch.arange(T, dtype=torch.float64)
    age = (t[:, None] - t[None] - 1)[:, :, None, None]
    logits = k[0][None] - age * w
    own = (u + k[0])[:, None] * torch.eye(T, dtype=torch.float64)[..., None, None]
    logits = torch.where(age >= 0, logits, torch.where(age == -1, own, -torch.inf))
    close(ops.rwkv4(k, v, w, u)[0], torch.einsum("tshv,shv->thv", logits.softmax(1), v[0]))


def test_hla_is_a_double_sum_over_pairs(x: dict[str, Tensor]) -> None:
    q, k, v = x["q"], x["k"], x["v"]
    mask = torch.ones(T, T, dtype=torch.float64).tril()[None, :, :, None]
    scores = torch.einsum("bthk,bshk->btsh", q, k) * mask
    # o_t = sum over i <= t of (q_t k_i) sum over j <= i of (k_i q_j) v_j, less j < i that G takes out
    later = torch.einsum("bihk,bjhk->bijh", k, q) * mask.transpose(1, 2)
    found = ops.hla(q, k, v)
    close(found, torch.einsum("btih,bijh,tj,bjhv->bthv", scores, later, mask[0, :, :, 0], v))


def test_second_moments_without_history_leave_the_query(x: dict[str, Tensor]) -> None:
    """ccq whose covariance starts at I and stays there is the gated delta rule: k = 0 adds nothing to it."""
    q, k, v, beta = (x[n] for n in ("q", "k", "v", "beta"))
    start = (
        torch.eye(K, dtype=torch.float64).expand(B, H, K, K),
        torch.randn(B, H, K, V, dtype=torch.float64),
    )
    found = ops.ccq(q, 0 * k, v, x["zero"], beta, initial_state=start)
    close(found, torch.einsum("bthk,bhkv->bthv", q, start[1]) * K**-0.5)
