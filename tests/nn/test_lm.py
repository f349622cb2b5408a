"""The small decoder: cached generation equals the full forward, files, packing, sampling, torch.compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.errors import ArgumentError
from linalg_dsl.nn.attention import Attention
from linalg_dsl.nn.sampling import pick

KINDS = ["full", "window(3)", "delta", "gla", "mamba3", "mlstm", "hgrn"]


def model(pattern: str, **options: Any) -> ld.nn.LM:
    torch.manual_seed(0)
    return ld.nn.LM(31, 16, pattern, **{"num_heads": 2, "init_std": 0.3, **options})


def test_blocks_that_add_nothing_at_first(tmp_path: Path) -> None:
    ids = torch.randint(31, (2, 11))
    for options in ({}, {"mlp_ratio": 0.0}):
        lm = model("delta full", residual_std=0.0, **options)
        torch.testing.assert_close(lm(ids).logits, lm.head(lm.norm(lm.embed(ids))), rtol=0, atol=0)
        lm(ids, targets=ids).loss.backward()
        ends = [x for n, x in lm.named_parameters() if n.endswith("mixer.out.weight")]
        assert len(ends) == 2
        assert all(x.grad is not None and x.grad.any() for x in ends)  # and learn all the same
    lm = model("delta", residual_std=0.02)
    assert 0.01 < lm.get_parameter("layers.0.mixer.out.weight").std().item() < 0.04
    assert ld.nn.LM.load(lm.save(tmp_path / "model"))._saved == lm._saved


def stepwise(lm: ld.nn.LM, ids: Tensor, first: int) -> Tensor:
    out = lm(ids[:, :first], use_cache=True)
    logits = [out.logits]
    for t in range(first, ids.shape[1]):
        out = lm(ids[:, t : t + 1], out.past_key_values, use_cache=True)
        logits.append(out.logits)
    assert out.past_key_values.get_seq_length() == ids.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_what_the_full_forward_gives(kind: str) -> None:
    lm = model(f"{kind}*2", attention_conv_size=3)
    ids = torch.randint(31, (2, 11))
    whole = lm(ids).logits
    for first in (1, 2, 7):
        torch.testing.assert_close(stepwise(lm, ids, first), whole, rtol=1e-4, atol=1e-5)
    pieces = lm(ids[:, :4], use_cache=True)
    rest = lm(ids[:, 4:], pieces.past_key_values).logits  # several tokens after a state
    torch.testing.assert_close(torch.cat([pieces.logits, rest], 1), whole, rtol=1e-4, atol=1e-5)
    packed = lm(ids.flatten()[None], cu_seqlens=torch.tensor([0, 11, 11, 22])).logits
    torch.testing.assert_close(packed[0], whole.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_prompts_of_all_lengths_generate_as_each_alone() -> None:
    lm = model("delta window(3) full")
    prompts = [torch.randint(31, (n,)) for n in (7, 1, 4)]
    together = lm.generate(prompts, 6)
    for prompt, found in zip(prompts, together, strict=True):
        assert torch.equal(lm.generate(prompt[None], 6)[0], found)
        assert found.shape == (prompt.shape[0] + 6,)
    ids = prompts[0][None]
    for _ in range(6):  # without a cache
        ids = torch.cat([ids, lm(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(ids[0], together[0])


def test_generation_stops_at_the_end_token_and_follows_its_seed() -> None:
    lm = model("delta")
    prompt = torch.randint(31, (2, 3))
    plain = lm.generate(prompt, 8)
    end = int(plain[0, 4])
    stopped = lm.generate(prompt, 8, eos_token_id=end)
    assert bool((stopped[0, 4:] == end).all())
    drawn = [
        lm.generate(prompt, 8, temperature=1.0, top_k=5, generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_drawing_keeps_to_the_likeliest() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, -9.0]]).repeat(200, 1)
    assert set(pick(logits, 1.0, top_k=2).tolist()) == {0, 1}
    assert set(pick(logits, 1.0, top_p=0.6).tolist()) == {0}
    assert set(pick(logits).tolist()) == {0}
    with pytest.raises(ArgumentError, match="top_p in \\(0, 1\\]"):
        pick(logits, 1.0, top_p=0.0)


def test_sequences_of_a_cache_can_be_chosen() -> None:
    lm = model("delta full")
    ids = torch.randint(31, (3, 5))
    cache = lm(ids, use_cache=True).past_key_values
    token = torch.randint(31, (2, 1))
    chosen = lm(token, cache.select(torch.tensor([2, 2]))).logits
    alone = lm(torch.cat([ids[[2, 2]], token], 1)).logits[:, -1:]
    torch.testing.assert_close(chosen, alone, rtol=1e-4, atol=1e-5)
    assert cache.bytes() > 0


def test_gradients_reach_every_parameter_of_a_hybrid() -> None:
    lm = model("delta*2 window(3) gdn full@1", tie_embeddings=False)
    ids = torch.randint(31, (2, 9))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    loss = lm(ids, targets=targets).loss
    assert loss is not None
    loss.backward()
    assert not [n for n, p in lm.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]


def test_a_model_is_written_and_read(tmp_path: Path) -> None:
    own = tmp_path / "own.rec"
    own.write_text(str(ld.ops.kda.spec), encoding="utf-8")
    lm = model(
        f"{own} delta_product(n=3) window(4) mine",
        layers={"mine": ld.ops.comba},
        mixers={"mine": {"conv_size": 0}},
    )
    lm.save(tmp_path / "model")
    own.unlink()  # the texts of specs are in the file
    again = ld.nn.LM.load(tmp_path / "model")
    ids = torch.randint(31, (2, 9))
    assert torch.equal(again(ids).logits, lm(ids).logits)
    assert again.head.weight is again.embed.weight
    replaced = model(
        "mine", layers={"mine": ld.ops.retnet}, mixers={"mine": {"inputs": {"gamma": lambda: torch.ones(2)}}}
    )
    with pytest.raises(ArgumentError, match="replaced inputs"):
        replaced.save(tmp_path / "no")


def test_one_graph_under_torch_compile() -> None:
    lm = model("delta", mlp_ratio=0)
    ids = torch.randint(31, (2, 9))
    compiled: Any = torch.compile(lm, fullgraph=True, backend="eager")
    out = compiled(ids, targets=ids)
    torch.testing.assert_close(out.logits, lm(ids).logits)
    out.loss.backward()
    assert lm.embed.weight.grad is not None


@pytest.mark.parametrize("window", [1, 3, 5, 40])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_window_is_attention_under_a_mask(window: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    layer = Attention(16, 4, window=window, num_kv_heads=kv_heads, rotary=False).double()
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    q, k, v = (f(x).view(2, 13, -1, 4).transpose(1, 2) for f in (layer.q, layer.k, layer.v))
    k, v = (y.repeat_interleave(4 // kv_heads, dim=1) for y in (k, v))
    i, j = torch.arange(13)[:, None], torch.arange(13)
    seen = (j <= i) & (j > i - window)
    weights = (q @ k.mT / 2).masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(layer(x), layer.out((weights @ v).transpose(1, 2).flatten(2)))


def test_rotary_attention_sees_distances_only() -> None:
    torch.manual_seed(0)
    layer = Attention(16, 2).double()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    y, state = layer(x[:, :4], return_state=True)
    later = state._replace(seen=state.seen)
    a = layer(x[:, 4:], later)
    assert not torch.allclose(a, layer(x[:, 4:]))
    torch.testing.assert_close(torch.cat([y, a], 1), layer(x))


def test_wrong_arguments_say_so() -> None:
    lm = model("delta")
    with pytest.raises(ArgumentError, match="input_ids must be \\[B, T\\]"):
        lm(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="a cache of 0 layers for 1"):
        lm(torch.zeros(1, 1, dtype=torch.int64), ld.nn.Cache(()))
    with pytest.raises(ArgumentError, match="mixers names 'gdn'; the pattern has delta"):
        model("delta", mixers={"gdn": {}})
    with pytest.raises(ArgumentError, match="num_kv_heads 3 does not divide num_heads 4"):
        Attention(16, 4, num_kv_heads=3)
    with pytest.raises(ArgumentError, match="rotary needs an even head_dim"):
        Attention(15, 5)
    with pytest.raises(ArgumentError, match="a list of tensors \\[T\\] with T >= 1"):
        lm.generate([torch.zeros(0, dtype=torch.int64)], 2)
    _, state = Attention(16, 2)(torch.zeros(1, 2, 16), return_state=True)
    with pytest.raises(ArgumentError, match="rows of a batch"):
        Attention(16, 2)(torch.zeros(1, 2, 16), state, cu_seqlens=torch.tensor([0, 2]))
