"""At special gates an entry is another one, to rounding; normalisers and maxima are what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linalg_dsl import ops

pytestmark = pytest.mark.filterwarnings("ignore:.* has no chunk form:UserWarning")

B, T, H, K, V = 1, 40, 2, 5, 4


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.fixture
def x() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, T, H, *shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(B, T, H, *shape, generator=generator, dtype=torch.float64)

    unit = torch.nn.functional.normalize
    g = -uniform()
    return {
        "q": normal(K), "k": unit(normal(K), dim=-1), "p": unit(normal(K), dim=-1), "v": normal(V),
        "g": g, "g_K": -uniform(K), "wide": g[..., None].expand(B, T, H, K), "beta": uniform(),
        "eta": uniform(), "raw": normal(), "zero": torch.zeros(B, T, H, dtype=torch.float64),
        "one": torch.ones(B, T, H, dtype=torch.float64),
        "no_param": torch.zeros(H, dtype=torch.float64),
    }  # fmt: skip


def test_gates_of_all_channels_alike_are_one_gate(x: dict[str, Tensor]) -> None:
    q, k, v, g, wide, beta = (x[n] for n in ("q", "k", "v", "g", "wide", "beta"))
    close(ops.kda(q, k, v, wide, beta), ops.gated_delta_rule(q, k, v, g, beta))
    close(ops.gla(q, k, v, wide), ops.simple_gla(q, k, v, g))


def test_gdn2_is_kda_and_gla_at_special_gates(x: dict[str, Tensor]) -> None:
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g_K", "beta"))
    per_key, per_value = beta[..., None].expand_as(q), beta[..., None].expand_as(v)
    close(ops.gdn2(q, k, v, g, per_key, per_value), ops.kda(q, k, v, g, beta))
    close(ops.gdn2(q, k, v, g, 0 * q, torch.ones_like(v)), ops.gla(q, k, v, g))


def test_without_decay_the_gated_delta_rule_is_the_delta_rule(x: dict[str, Tensor]) -> None:
    q, k, v, beta = (x[n] for n in ("q", "k", "v", "beta"))
    close(ops.gated_delta_rule(q, k, v, x["zero"], beta), ops.delta_rule(q, k, v, beta))


def test_one_step_of_gated_delta_product_is_the_gated_delta_rule(x: dict[str, Tensor]) -> None:
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    single = (k[..., None, :], v[..., None, :])
    close(
        ops.gated_delta_product(q, *single, g, beta[..., None], n=1), ops.gated_delta_rule(q, k, v, g, beta)
    )
    close(ops.delta_product(q, *single, beta[..., None], n=1), ops.delta_rule(q, k, v, beta))


def test_without_the_query_q_delta_is_the_gated_delta_rule(x: dict[str, Tensor]) -> None:
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    close(ops.q_delta(q, k, v, g, beta, x["no_param"]), ops.gated_delta_rule(q, k, v, g, beta))


def test_mamba2_is_simple_gla(x: dict[str, Tensor]) -> None:
    q, k, v, dt = (x[n] for n in ("q", "k", "v", "eta"))
    a = torch.tensor([0.3, -1.0], dtype=torch.float64)
    g = -dt * a.exp()
    found = ops.mamba2(v, dt, k, q, a, x["no_param"])
    close(found, ops.simple_gla(q, k, dt[..., None] * v, g, scale=1.0))


def test_momentum_without_memory_is_the_delta_rule_that_erases_the_undecayed_state(
    x: dict[str, Tensor],
) -> None:
    q, k, p, v, g, beta, eta = (x[n] for n in ("q", "k", "p", "v", "g", "beta", "eta"))
    forgets = torch.full_like(g, -torch.inf)
    plain = ops.comba(q, k, p, v, g, beta * eta, x["no_param"])
    close(ops.mdn(q, k, p, v, g, forgets, beta, eta), plain)


def test_gated_oja_is_kda_transposed(x: dict[str, Tensor]) -> None:
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g_K", "beta"))
    # the states are each other's transposes; a read with a unit vector shows one row
    _, state = ops.gated_oja(v, v, k, g, beta, output_final_state=True)
    _, turned = ops.kda(q, k, v, g, beta, output_final_state=True)
    close(state, turned.mT)


def test_gated_oja_with_equal_strengths_is_gated_oja(x: dict[str, Tensor]) -> None:
    q, v, key, g, beta = (x[n] for n in ("q", "v", "k", "g_K", "beta"))
    found = ops.gated_oja_channel(q, q, key, g, beta[..., None].expand_as(key))
    close(found, ops.gated_oja(q, q, key, g, beta))
    assert found.shape[-1] == K != v.shape[-1]


def test_a_delta_rule_that_writes_apart_and_erases_nothing_is_linear_attention(x: dict[str, Tensor]) -> None:
    q, k, v = (x[n] for n in ("q", "k", "v"))
    nothing = torch.zeros_like(k)
    close(ops.iplr(q, k, v, k, nothing), ops.linear_attention(q, k, v))
    close(ops.dplr(q, k, v, k, nothing, x["wide"]), ops.simple_gla(q, k, v, x["g"]))


def test_the_two_combas_differ_by_the_decay_of_what_is_erased(x: dict[str, Tensor]) -> None:
    q, k, p, v, g, beta = (x[n] for n in ("q", "k", "p", "v", "g", "beta"))
    d = torch.tensor([0.5, -0.2], dtype=torch.float64)
    decayed = g.exp()[..., None] * p
    close(ops.comba(q, k, decayed, v, g, beta, d), ops.comba_decayed(q, k, p, v, g, beta, d))
    close(ops.comba_decayed(q, k, k, v, g, beta, x["no_param"]), ops.gated_delta_rule(q, k, v, g, beta))


def test_spellings_of_gates_and_strengths(x: dict[str, Tensor]) -> None:
    q, k, v, raw, g, beta = (x[n] for n in ("q", "k", "v", "raw", "g", "beta"))
    log_gate = torch.nn.functional.logsigmoid(raw) / 16
    close(ops.sigmoid_gla(q, k, v, raw), ops.simple_gla(q, k, v, log_gate))
    close(ops.iplr(q, k, v, -k, k), ops.dplr(q, k, v, -k, k, 0 * x["wide"]))
    close(ops.delta_rule_negative(q, k, v, raw), ops.delta_rule(q, k, v, 2 * torch.sigmoid(raw)))
    close(ops.lightning(q, k, v, -g[0, 0]), ops.retnet(q, k, v, g[0, 0].exp()))
    close(ops.efla(q, k, v, beta), ops.delta_rule(q, k, v, 1 - torch.exp(-beta)))
    long_key = 3 * k
    close(ops.kaczmarz(q, long_key, v, beta, eps=1e-60), ops.delta_rule(q, long_key, v, beta / 9))
    constant = x["g_K"][0, 0]
    close(
        ops.rwkv5(q, k, v, constant, constant),
        ops.rwkv6(q, k, v, constant.expand(B, T, H, K), constant),
    )


def test_a_positive_signed_gate_is_a_gate(x: dict[str, Tensor]) -> None:
    q, k, v, g = (x[n] for n in ("q", "k", "v", "g"))
    close(ops.mamba2_negative(q, k, v, g.exp()), ops.simple_gla(q, k, v, g))


def test_mamba3_without_the_trapezoid_is_mamba2(x: dict[str, Tensor]) -> None:
    q, k, v, dt = (x[n] for n in ("q", "k", "v", "eta"))
    a = torch.tensor([0.3, -1.0], dtype=torch.float64)
    close(ops.mamba3(q, k, v, dt, x["one"], a), ops.mamba2(v, dt, k, q, a, x["no_param"]))


def test_eda_that_erases_nothing_is_kda(x: dict[str, Tensor]) -> None:
    q, k, p, v, g, beta = (x[n] for n in ("q", "k", "p", "v", "g_K", "beta"))
    close(ops.eda(q, k, p, v, g, beta, x["zero"]), ops.kda(q, k, v, g, beta))


def test_preconditioners_that_stay_at_one_leave_the_delta_rule(x: dict[str, Tensor]) -> None:
    q, k, v, g, beta, zero = (x[n] for n in ("q", "k", "v", "g", "beta", "zero"))
    close(ops.osdn(q, k, v, beta, zero), ops.delta_rule(q, k, v, beta))
    # x^(-r / (1 + |r|)) is 1 for every r where x is 1
    close(ops.pgdn(q, k, v, g, g, beta, beta, x["no_param"], x=1.0), ops.gated_delta_rule(q, k, v, g, beta))
    close(
        ops.pkda(q, k, v, x["g_K"], g, beta, beta, x["no_param"], x=1.0),
        ops.kda(q, k, v, x["g_K"], beta),
    )


def test_titans_is_momentum_with_other_names(x: dict[str, Tensor]) -> None:
    q, k, v, g, eta, beta = (x[n] for n in ("q", "k", "v", "g", "eta", "beta"))
    found = ops.titans_linear(q, k, v, g.exp(), eta, beta)
    close(found, ops.mdn(q, k, k, v, torch.log1p(-beta), g, -x["one"], -eta, scale=1.0))


def test_a_memory_that_is_always_chosen_is_the_gated_delta_rule(x: dict[str, Tensor]) -> None:
    q, k, v, g, beta, one, zero = (x[n] for n in ("q", "k", "v", "g", "beta", "one", "zero"))
    close(ops.mom(q, k, v, g, beta, one, one), ops.gated_delta_rule(q, k, v, g, beta))
    _, kept = ops.mom(q, k, v, g, beta, zero, one, output_final_state=True)
    close(kept, torch.zeros_like(kept))


def test_raven_that_routes_to_every_slot_is_gated_slot_attention(x: dict[str, Tensor]) -> None:
    q, k, v, g = (x[n] for n in ("q", "k", "v", "g"))
    slots = torch.rand(B, T, H, 3, dtype=torch.float64)
    close(ops.raven(q, k, v, g, slots, m=3), ops.gsa(q, k, v, g[..., None] * slots, m=3))


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
