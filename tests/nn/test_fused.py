"""Fused passes around a recurrence give what the plain formulas give, here in Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.nn import fused
from linalg_dsl.nn.conv import ShortConvolution

pytest.importorskip("triton")


@pytest.mark.parametrize(("tokens", "channels", "groups"), [(1, 5, 1), (7, 8, 3), (150, 128, 2)])
@pytest.mark.parametrize(("silu", "norm"), [(False, None), (True, None), (True, 1e-6), (False, 1e-6)])
def test_a_convolution_with_what_follows(
    tokens: int, channels: int, groups: int, silu: bool, norm: float | None
) -> None:
    torch.manual_seed(tokens)
    conv = ShortConvolution(channels * groups, 4)
    x = torch.randn(2, tokens, channels * groups, requires_grad=True)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        assert weight is conv.weight
        y = conv(x)[0]
        y = F.silu(y) if silu else y
        if norm is None:
            return y
        heads = y.view(2, tokens, groups, channels)
        return (heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + norm)).flatten(2)

    want = plain(x, conv.weight)
    got = fused.convolve(x, conv.weight, channels, silu, norm)
    torch.testing.assert_close(got, want)
    probe = torch.randn_like(want)
    leaves = [x, conv.weight]
    for a, b in zip(
        torch.autograd.grad(got, leaves, probe), torch.autograd.grad(want, leaves, probe), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "kind"), [((2, 3, 2, 5), torch.float32), ((1, 70, 2, 128), torch.bfloat16)]
)
def test_the_norm_and_the_gate(shape: tuple[int, ...], kind: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(shape[-1], 1e-5)
    with torch.no_grad():
        norm.weight.normal_()
    o = torch.randn(shape, dtype=kind, requires_grad=True)
    gate = torch.randn(*shape[:2], shape[2] * shape[3], dtype=kind, requires_grad=True)
    want = norm(o.float()).flatten(2) * F.silu(gate.float())
    got = fused.norm_and_gate(o, gate, norm.weight, 1e-5)
    assert got.dtype == kind
    leaves = [o, gate, norm.weight]
    probe = torch.randn_like(want).to(kind)
    pairs = zip(
        (got, *torch.autograd.grad(got, leaves, probe)),
        (want, *torch.autograd.grad(want, leaves, probe.float())),
        strict=True,
    )
    for a, b in pairs:
        near = 1e-4 if kind == torch.float32 else 2e-2
        torch.testing.assert_close(a.float(), b.float(), rtol=near, atol=near)


@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "mamba2", "rwkv7", "hgrn", "retnet"])
def test_a_fused_layer_is_the_same_layer(name: str) -> None:
    torch.manual_seed(0)
    plain = ld.nn.Mixer(name, 16, 2, backend="torch")
    other = ld.nn.Mixer(name, 16, 2, backend="torch", fused=True)
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    x = torch.randn(2, 21, 16)
    (want, state), (got, last) = (m(x, return_state=True) for m in (plain, other))
    torch.testing.assert_close(got, want)
    for a, b in zip(last.memory, state.memory, strict=True):
        torch.testing.assert_close(a, b)
    for n, tail in state.tails.items():
        torch.testing.assert_close(last.tails[n], tail)
    for y in (want, got):
        y.square().sum().backward()
    grads = dict(other.named_parameters())
    for n, p in plain.named_parameters():
        torch.testing.assert_close(grads[n].grad, p.grad, rtol=1e-3, atol=1e-4)
    continued = other(x[:, :3], last, return_state=True)[0]
    torch.testing.assert_close(continued, plain(x[:, :3], state, return_state=True)[0])
    offsets = torch.tensor([0, 5, 21])
    torch.testing.assert_close(other(x[:1], cu_seqlens=offsets), plain(x[:1], cu_seqlens=offsets))


def test_under_autocast_products_are_short() -> None:
    torch.manual_seed(0)
    layer = ld.nn.Mixer("delta_rule", 16, 2, backend="torch", fused=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(1, 9, 16))
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_a_compiler_sees_the_plain_formulas() -> None:
    torch.manual_seed(0)
    layer = ld.nn.Mixer("linear_attention", 16, 2, backend="torch", fused=True)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(1, 9, 16)
    torch.testing.assert_close(compiled(x), layer(x))
