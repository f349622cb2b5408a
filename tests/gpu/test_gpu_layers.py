"""Layers on the GPU: the same as on the CPU, in every kind of step, and cheap beside their kernels."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import pytest
import torch

import linalg_dsl as ld
from linalg_dsl.ops.catalogue import catalogue_names
from linalg_dsl.study import training
from linalg_dsl.study.tasks import Recall
from linalg_dsl.study.training import Recipe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", catalogue_names())
@pytest.mark.filterwarnings("ignore:.* is computed token after token")
def test_a_layer_gives_on_the_gpu_what_it_gives_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    consts = {c.name: {"m": 16, "n": 2}[c.name] for c in getattr(ld.ops, name).spec.consts if c.name in "mn"}
    on_cpu = ld.nn.Mixer(name, 64, 2, head_dim=32, value_dim=32, consts=consts)
    on_gpu, exact = copy.deepcopy(on_cpu).cuda(), copy.deepcopy(on_cpu).double()
    x = torch.randn(2, 150, 64)
    want, got, true = on_cpu(x), on_gpu(x.cuda()), exact(x.double())
    torch.testing.assert_close(got.cpu(), want, rtol=2e-3, atol=2e-3)
    for o in (want, got, true):
        o.square().sum().backward()
    grads = [{n: _gradient(n, p) for n, p in m.named_parameters()} for m in (exact, on_cpu, on_gpu)]
    sizes, rounding, errors = grads[0], _differences(*grads[:2]), _differences(grads[0], grads[2])
    for n, error in errors.items():
        assert error <= 5e-3 * float(sizes[n].norm()) + ROUNDINGS * _rounding(n, rounding, sizes), n


ROUNDINGS = 10
"""How much more than the CPU's rounding in float32 the GPU's may be: it adds up in another order."""


def _gradient(name: str, param: torch.nn.Parameter) -> torch.Tensor:
    assert param.grad is not None, name
    return param.grad.double().cpu()


def _differences(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {n: float((a[n] - b[n]).norm()) for n in a}


def _rounding(name: str, rounding: Mapping[str, float], sizes: Mapping[str, torch.Tensor]) -> float:
    """What float32 on the CPU leaves of a gradient, against float64.

    Some gradients are nothing else: those of biases that a running maximum takes out again (RWKV-4's k,
    sLSTM's i), and nearly those of OSDN's eta, whose effect the output norm takes out. A bias has few
    elements and may be lucky, so the weight beside it counts, too: d bias = sum d_t and d weight =
    sum d_t x_t^T with normal numbers x_t of as many channels as the weight has columns, so its error is about
    sqrt(columns) times as large.
    """
    weight = name.removesuffix("bias") + "project.weight"
    if not name.endswith(".bias") or weight not in rounding:
        return rounding[name]
    return max(rounding[name], rounding[weight] / math.sqrt(sizes[weight].shape[1]))


def test_cached_generation_equals_the_full_forward() -> None:
    torch.manual_seed(0)
    model = ld.nn.LM(97, 128, "delta gdn window(32) kda full@last", num_layers=5, init_std=0.2).cuda()
    prompts = [torch.randint(97, (n,), device="cuda") for n in (70, 1, 133)]
    for prompt, found in zip(prompts, model.generate(prompts, 20), strict=True):
        ids = prompt[None]
        for _ in range(20):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        assert (found == ids[0]).float().mean() > 0.95  # ties may fall either way


def test_training_under_autocast_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = ld.nn.LM(64, 128, "gdn full", num_layers=2).cuda()
    ids = torch.randint(64, (8, 128), device="cuda")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            out = model(ids, targets=ids.roll(-1, 1))
        optimiser.zero_grad()
        out.loss.backward()
        optimiser.step()
        losses.append(float(out.loss))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_captured_step_trains_as_an_ordinary_one(bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Recall(pairs=8, tellings=2, symbols=64)
    recipe = Recipe(steps=12, batch=16, bfloat16=bfloat16)
    curves = []
    for ordinary in (3, 100):
        monkeypatch.setattr(training._Update, "_ORDINARY_STEPS", ordinary)
        torch.manual_seed(0)
        model = ld.nn.LM(task.vocab_size, 64, "delta gla full", num_layers=3, num_heads=2).cuda()
        curves.append(training.train(model, task, recipe, every=1).curve)
    captured, plain = ([loss for _, loss, _ in curve] for curve in curves)
    assert captured == pytest.approx(plain, rel=2e-2 if bfloat16 else 1e-4)
    assert captured[-1] < captured[0]


@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "mamba2"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_fused_layer_is_the_same_layer(name: str, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    made = {"head_dim": 64, "value_dim": 64, "device": "cuda", "dtype": kind}
    plain, fused = (ld.nn.Mixer(name, 128, 2, fused=f, **made) for f in (False, True))  # type: ignore[arg-type]
    fused.load_state_dict(plain.state_dict())
    exact = copy.deepcopy(plain).double().cpu()
    x = torch.randn(2, 150, 128, device="cuda", dtype=kind)
    want, plainly, got = exact(x.double().cpu()), plain(x), fused(x)
    for y in (want, plainly, got):
        y.square().sum().backward()
    here, there = dict(plain.named_parameters()), dict(fused.named_parameters())
    for n, p in exact.named_parameters():
        true = _gradient(n, p)
        allowed = 1e-4 * float(true.norm()) + 2 * float((true - _gradient(n, here[n])).norm())
        assert float((true - _gradient(n, there[n])).norm()) <= allowed, n
    assert (got.cpu() - want).norm() <= 1e-5 * want.norm() + 2 * (plainly.cpu() - want).norm()
