"""Compiled ops on a GPU: errors against the float64 step loop, bits, graphs, tables, large offsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import TEXTS, assert_close, case, errors, short_operand_errors
from module_files import module_of_file
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.op import CompiledOp

pytestmark = pytest.mark.gpu
LONG, MANY = 2**17, 70_000
WHEN_DRY = {"LONG": 2**7, "MANY": 700}


def narrow(spec: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Wide tensors in ``dtype``; gates stay in float32, as recommended."""
    return {
        i.name: tensors[i.name].to(dtype)
        if ("K" in i.dims or "V" in i.dims) and i.kind == "plain"
        else tensors[i.name]
        for i in spec.inputs
    }


def assert_low_precision(
    op: CompiledOp, tensors: dict[str, Tensor], state: Tensor, dtype: torch.dtype
) -> None:
    """Within 1e-2 (gradients 2e-2), or twice what the recurrence itself makes of short operands."""
    low = narrow(op.spec, tensors, dtype)
    found = errors(op, low, state)
    bad = {n: e for n, e in found.items() if not e < (2e-2 if n.startswith("d_") else 1e-2)}
    excuse = short_operand_errors(op, low, state, dtype) if bad else {}
    bad = {n: e for n, e in bad.items() if not e < 2 * excuse[n]}
    assert not bad, f"relative errors {bad}; of a step loop with short operands {excuse}"


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_float32_with_resets(name: str) -> None:
    op, tensors, state = case(name, 2, 131, 2, 40, 24, "resets", chunk_size=None, device="cuda")
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize("gates", ["mild", "strong"])
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "gla", "comba"])
def test_bfloat16(name: str, gates: GateKind) -> None:
    op, tensors, state = case(name, 2, 700, 2, 100, 60, gates, chunk_size=None, device="cuda")
    assert_low_precision(op, tensors, state, torch.bfloat16)


@pytest.mark.parametrize("name", ["gated_delta_rule", "gla"])
def test_float16(name: str) -> None:
    op, tensors, state = case(name, 1, 200, 2, 64, 64, chunk_size=None, device="cuda")
    assert_low_precision(op, tensors, state, torch.float16)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 7), (16, 256), (256, 64), (512, 512)])
@pytest.mark.parametrize("name", ["gated_delta_rule", "gla"])
def test_head_sizes(name: str, K: int, V: int) -> None:
    op, tensors, state = case(name, 1, 65, 1, K, V, chunk_size=None, device="cuda")
    assert_low_precision(op, tensors, state, torch.bfloat16)


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "simple_gla"])
def test_packed_with_empty_sequences_and_shared_heads(name: str) -> None:
    op, _, _ = case(name, 1, 1, 2, 4, 4, chunk_size=None, device="cuda")
    cu = torch.tensor([0, 0, 5, 5, 21, 370, 371, 371], dtype=torch.int32, device="cuda")
    few = {i.name: 2 for i in op.spec.inputs if "K" in i.dims and i.kind == "plain"}
    tensors = draw(op.spec, 1, 371, 4, 24, 40, dtype=torch.float32, seed=6, heads=few, device="cuda")
    (state,) = draw_state(op.spec, 7, 4, 24, 40, dtype=torch.float32, device="cuda")
    assert_close(errors(op, tensors, state, cu))


def test_many_one_token_sequences() -> None:
    op, _, _ = case("gated_delta_rule", 1, 1, 1, 4, 4, chunk_size=None, device="cuda")
    tensors = draw(op.spec, 1, MANY, 1, 16, 16, dtype=torch.float32, device="cuda")
    cu = torch.arange(MANY + 1, device="cuda")
    o = op(**tensors, cu_seqlens=cu)
    expected = (
        0.25 * tensors["beta"][..., None] * (tensors["q"] * tensors["k"]).sum(-1, keepdim=True) * tensors["v"]
    )
    assert torch.allclose(o, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "linear_attention"])
def test_equal_calls_give_equal_bits(name: str) -> None:
    op, tensors, state = case(name, 2, 500, 4, 64, 64, chunk_size=None, device="cuda")
    values = {n: t.requires_grad_() for n, t in narrow(op.spec, tensors, torch.bfloat16).items()}
    runs = []
    for _ in range(10):
        o = op(**values, initial_state=state)
        runs.append((o.detach(), *torch.autograd.grad(o.float().sum(), list(values.values()))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_a_captured_graph_follows_its_inputs() -> None:
    op, tensors, _ = case("gated_delta_rule", 1, 300, 2, 64, 64, chunk_size=None, device="cuda")
    cu = torch.tensor([0, 100, 300], device="cuda")
    op(**tensors, cu_seqlens=cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = op(**tensors, cu_seqlens=cu)
    for t in tensors.values():
        t.mul_(0.7)
    cu.copy_(torch.tensor([0, 17, 300]))
    graph.replay()
    assert torch.equal(o, op(**tensors, cu_seqlens=cu))


def test_an_exported_file_gives_the_same_bits(tmp_path: Path) -> None:
    op, tensors, _ = case("kda", 1, 100, 2, 32, 32, chunk_size=None, device="cuda")
    path = tmp_path / "kernel.py"
    op.export(str(path))
    module = module_of_file(path, "exported")
    consts = (32**-0.5,) * len(module.CONSTS)
    o, _, _ = module.forward(tuple(tensors.values()), (None,), consts, None, False, False)
    assert torch.equal(o, op(**tensors))


def test_offsets_beyond_two_to_the_31() -> None:
    """The last head of the last token lies past 2^31 elements."""
    op = ld.compile(TEXTS["linear_attention"], backend="triton")
    T, H, D = LONG + 5, 129, 128
    k = torch.zeros((1, T, H, D), dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    k[0, -1, -1] = 1
    v[0, -1, -1] = 2
    o = op(k, k, v)
    assert torch.allclose(o[0, -1, -1].float(), torch.full((D,), 2 * D / D**0.5, device="cuda"), rtol=1e-2)
    assert not o[0, :-1].any()
