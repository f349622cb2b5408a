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
    on_gpu = copy.deepcopy(on_cpu).cuda()
    x = torch.randn(2, 150, 64)
    want = on_cpu(x)
    got = on_gpu(x.cuda())
    torch.testing.assert_close(got.cpu(), want, rtol=2e-3, atol=2e-3)
    want.square().sum().backward()
    got.square().sum().backward()
    there = dict(on_gpu.named_parameters())
    here = dict(on_cpu.named_parameters())
    for n, a in here.items():
        b = there[n]
        assert a.grad is not None, n
        assert b.grad is not None, n
        error = (a.grad - b.grad.cpu()).norm()
        assert error < 5e-3 * (_size(n, here) + 1e-4), n


def _size(name: str, params: Mapping[str, torch.nn.Parameter]) -> float:
    """The norm of a gradient, or of a bias's what it would be if the tokens' terms had signs of their own.

    A bias that shifts what a running maximum takes out again (RWKV-4's k, sLSTM's i) has the gradient 0 in
    exact arithmetic: all its digits are rounding of terms that cancel, so those are what it is measured by.
    They are d_t of d bias = sum d_t and of d weight = sum d_t x_t^T beside it. The x_t are normal numbers of
    as many channels as the weight has columns, so |d weight|^2 is about that many times sum |d_t|^2.
    """
    grad, weight = params[name].grad, params.get(name.removesuffix("bias") + "project.weight")
    assert grad is not None
    if not name.endswith(".bias") or weight is None or weight.grad is None:
        return float(grad.norm())
    columns: int = weight.shape[1]
    return max(float(grad.norm()), float(weight.grad.norm()) / math.sqrt(columns))


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
