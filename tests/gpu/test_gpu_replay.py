"""Calls with gradients on a GPU, replayed: the bits of the operator, with launches past Triton's search."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_cases import CLASSES, op_of, random_like, with_gradients
from test_gpu_runtime import offsets, on_gpu, same

from linalg_dsl.ops import replay as replay_module
from linalg_dsl.ops.op import CompiledOp

pytestmark = pytest.mark.gpu
CALLS = 5


def sums(op: CompiledOp, tensors: Any, states: Any, **extra: Any) -> Any:
    results, _ = with_gradients(op, tensors, states, **extra)
    weights = [w.cuda() for w in random_like(results)]
    return with_gradients(op, tensors, states, weights, **extra)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_replayed_gradients_have_the_bits_of_the_operator(
    name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, other = op_of(name, backend="triton"), op_of(name, backend="triton")
    bounds = [0, 5, 5, 200, 300]
    for seed in range(CALLS):
        tensors, states = on_gpu(op, 1, 300, 2, 64, 64, seed=seed, N=len(bounds) - 1 if packed else None)
        extra = {"cu_seqlens": offsets(bounds)} if packed else {}
        found = sums(op, tensors, states, **extra)
        with monkeypatch.context() as patch:
            patch.setenv(replay_module.ENVIRONMENT_VARIABLE, "0")
            patch.setattr("linalg_dsl.ops.quick_gradients.is_plain", lambda: False)
            wanted = sums(other, tensors, states, **extra)
        assert same([*found[0], *found[1]], [*wanted[0], *wanted[1]])


def test_a_side_stream_and_a_graph_take_their_own() -> None:
    op = op_of("gated_delta_rule", backend="triton")
    tensors, _ = on_gpu(op, 2, 200, 2, 64, 64)
    leaves = [x.requires_grad_() for x in tensors]

    def run() -> Any:
        return torch.autograd.grad(op(*leaves).float().square().sum(), leaves)

    wanted = [run() for _ in range(CALLS)][-1]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        apart = [run() for _ in range(CALLS)][-1]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    graph.replay()
    torch.cuda.synchronize()
    assert same(list(wanted), list(apart))
    assert same(list(wanted), list(kept))
