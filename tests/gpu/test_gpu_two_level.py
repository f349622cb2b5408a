"""Two levels on a GPU: errors against the float64 step loop, equal bits, packed sequences, graphs."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import SIDES, TEXTS, assert_close, errors

import linalg_dsl as ld
from linalg_dsl.ops.draw import draw, draw_state

pytestmark = pytest.mark.gpu
RUNS, LONG = 20, 3000
WHEN_DRY = {"RUNS": 2, "LONG": 700}
ALL = {**TEXTS, **SIDES}


@pytest.mark.parametrize("name", sorted(ALL))
def test_float32_with_resets(name: str) -> None:
    op = ld.compile(ALL[name], backend="triton", schedule="two_level", super_chunk=2)
    tensors = draw(op.spec, 2, 331, 2, 40, 24, dtype=torch.float32, gates="resets", seed=5, device="cuda")
    (state,) = draw_state(op.spec, 2, 2, 40, 24, dtype=torch.float32, device="cuda")
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize("name", ["linear_attention", "gla", "gated_delta_rule", "kda", "dplr", "gated_oja"])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (256, 64)])
def test_bfloat16_is_as_near_as_one_level_is(name: str, K: int, V: int) -> None:
    """The matrix of K = 256 goes through memory by rows."""
    found = {}
    for schedule in ("walk", "two_level"):
        op = ld.compile(ALL[name], backend="triton", schedule=schedule)
        tensors = draw(op.spec, 1, LONG, 2, K, V, dtype=torch.float32, seed=5, device="cuda")
        low = {
            d.name: tensors[d.name].bfloat16() if d.kind == "plain" and d.dims else tensors[d.name]
            for d in op.spec.inputs
        }
        (state,) = draw_state(op.spec, 1, 2, K, V, dtype=torch.float32, device="cuda")
        found[schedule] = errors(op, low, state)
    bad = {n: (e, found["walk"][n]) for n, e in found["two_level"].items() if e > 2 * found["walk"][n] + 2e-3}
    assert not bad


@pytest.mark.parametrize("name", ["simple_gla", "kda"])
def test_equal_calls_give_equal_bits(name: str) -> None:
    op = ld.compile(ALL[name], backend="triton", schedule="two_level")
    tensors = draw(op.spec, 1, 5000, 2, 128, 128, dtype=torch.float32, seed=5, device="cuda")
    first = op(**tensors, output_final_state=True)
    for _ in range(RUNS):
        again = op(**tensors, output_final_state=True)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_packed_sequences() -> None:
    op = ld.compile(ALL["gated_delta_rule"], backend="triton", schedule="two_level", super_chunk=3)
    cu = torch.tensor([0, 0, 5, 700, 701, 2000, 2000], device="cuda")
    tensors = draw(op.spec, 1, 2000, 2, 64, 64, dtype=torch.float32, seed=5, device="cuda")
    (state,) = draw_state(op.spec, 6, 2, 64, 64, dtype=torch.float32, device="cuda")
    assert_close(errors(op, tensors, state, cu))


def test_a_cuda_graph_replays_it() -> None:
    op = ld.compile(ALL["kda"], backend="triton", schedule="two_level")
    tensors = draw(op.spec, 1, 3000, 2, 64, 64, dtype=torch.float32, seed=5, device="cuda")
    want = op(**tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(**tensors)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
