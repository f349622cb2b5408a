"""Calls on a GPU: no waits, every launch configuration, graphs, streams, bits, packings, sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from runtime_cases import CLASSES, call, inputs_of, op_of, random_like, with_gradients, worst
from torch import Tensor

from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.selfcheck import Launch, known_answer, lanes_class

pytestmark = pytest.mark.gpu
PACKED = [0, 0, 5, 5, 200, 201, 513, 700, 700]
RUNS, LONG, MANY, EVERY = 100, 2**17, 1, 1
WHEN_DRY = {"RUNS": 3, "LONG": 2**7, "MANY": 64, "EVERY": 9}
"""Where there is no GPU (stand_in/dry.py): ``MANY`` divides, of ``EVERY`` so many lanes one is tried."""


def on_gpu(
    op: CompiledOp, B: int, T: int, H: int, K: int, V: int, **options: Any
) -> tuple[list[Tensor], ...]:
    """Wide inputs in bfloat16 as in training, gates and states in float32."""
    kind = options.pop("kind", torch.bfloat16)
    tensors, states = inputs_of(op, B, T, H, K, V, **options)
    wide = [d.kind == "plain" and d.timed and d.dims != () for d in op.spec.inputs]
    moved = [x.cuda().to(kind if w else torch.float32) for x, w in zip(tensors, wide, strict=True)]
    return moved, [s.cuda() for s in states]


def offsets(bounds: list[int]) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device="cuda")


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_a_call_never_waits_for_the_device(name: str, packed: bool) -> None:
    op = op_of(name, backend="triton")
    tensors, states = on_gpu(op, 1, 700, 2, 64, 64, N=len(PACKED) - 1 if packed else None)
    extra: dict[str, Any] = {"cu_seqlens": offsets(PACKED)} if packed else {}
    results, grads = with_gradients(op, tensors, states, **extra)
    weights = [w.cuda() for w in random_like(results)]
    with waiting_is_an_error():
        with_gradients(op, tensors, states, weights, **extra)
    assert all(x.isfinite().all() for x in (*results, *grads))


@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (256, 128)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CLASSES)
def test_every_launch_configuration_gives_right_numbers(name: str, kind: torch.dtype, K: int, V: int) -> None:
    """Each by itself: the tables' answers for every number of programs, and both ways of keeping states."""
    op = op_of(name, backend="triton")
    units = torch.cuda.get_device_properties(0).multi_processor_count
    for stage in op.stage_ops:
        stage_sizes = {"K": K, "V": V, "n": 2}
        like = tuple(
            torch.zeros(
                (
                    *((1, 1, 2) if d.timed else (2,)),
                    *(a if isinstance(a, int) else stage_sizes[a] for a in d.dims),
                ),
                dtype=kind if d.kind == "plain" and d.dims else torch.float32,
                device="cuda",
            )
            for d in stage.spec.inputs
        )
        module, exact = stage.operator("triton").module, stage.operator("torch").module
        lanes = sorted({lanes_class(n, units) for n in range(1, 2 * units)})
        for launch in [Launch((1,) * len(like), n, every) for n in lanes[::EVERY] for every in (True, False)]:
            if launch.every_state or hasattr(module, "keep_every_state"):
                known_answer(stage.spec, module, exact, like, {}, stage.options.handed, launch)


@pytest.mark.parametrize("name", CLASSES)
def test_a_captured_graph_of_both_directions_follows_its_inputs(name: str) -> None:
    op = op_of(name, backend="triton")
    tensors, states = on_gpu(op, 1, 700, 2, 64, 64, N=len(PACKED) - 1)
    cu = offsets(PACKED)
    leaves = [x.requires_grad_() for x in (*tensors, *states)]

    def run() -> list[Tensor]:
        results = call(op, leaves[: len(tensors)], leaves[len(tensors) :], cu_seqlens=cu)
        return [*results, *torch.autograd.grad([r.float().square().sum() for r in results], leaves)]

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    with torch.no_grad():
        for x in leaves:
            x.mul_(0.7)
    cu.copy_(offsets([0, 100, 100, 300, 301, 302, 303, 699, 700]))
    graph.replay()
    assert same(found, run())


@pytest.mark.parametrize("name", CLASSES)
def test_inductor_gives_the_bits_of_the_call(name: str) -> None:
    """At any batch and length, from two graphs: one of the first shape, one of all shapes.

    A batch of 1 may have one more, since torch takes a size of 0 or 1 for a constant. Steps on tokens between
    stages are for Inductor to fuse, with sums in its own order: there as near as bfloat16 is.
    """
    op = op_of(name, backend="triton")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # what tests before this one have counted
    fast: Any = torch.compile(op, fullgraph=True)

    def graphs_after(*shapes: tuple[int, int]) -> int:
        for B, T in shapes:
            tensors, states = on_gpu(op, B, T, 2, 64, 64)
            found, wanted = (with_gradients(f, tensors, states) for f in (fast, op))
            if op.stages.is_whole:
                assert same([*found[0], *found[1]], [*wanted[0], *wanted[1]])
            else:
                assert worst([*found[0], *found[1]], [*wanted[0], *wanted[1]]) < 2**-7
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    assert graphs_after((2, 100), (3, 131), (2, 64), (5, 300)) <= 2
    assert graphs_after((1, 64), (1, 131)) <= 3


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "delta_rule", "linear_attention"])
def test_packed_walks_by_boxes_are_those_of_separate_calls(name: str) -> None:
    """At sizes where they take descriptors: whole chunks by boxes, what is left of a sequence by pointers."""
    op = op_of(name, backend="triton")
    bounds = [0, 1500, 1501, 1501, 1532, 2300, 2364, 4096]
    tensors, _ = on_gpu(op, 1, bounds[-1], 16, 128, 128)
    row = [x.requires_grad_() for x in tensors]
    weight = torch.randn_like(op(*row))

    def run(given: list[Tensor], w: Tensor, cu: Tensor | None = None) -> list[Tensor]:
        o = op(*given, cu_seqlens=cu)
        return [o, *torch.autograd.grad(o, given, w)]

    found = [run(row, weight, offsets(bounds)) for _ in range(4)]
    assert all(same(found[0], again) for again in found[1:])
    parts = []
    for a, b in pairwise(bounds):
        if a < b:
            part = [x.detach()[:, a:b].contiguous().requires_grad_() for x in row]
            parts.append(run(part, weight[:, a:b].contiguous()))
    for got, *wanted in zip(found[0], *parts, strict=True):
        want = torch.cat(wanted, 1).float()
        assert (got.float() - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize("name", CLASSES)
def test_a_packed_sequence_has_the_bits_of_the_sequence_alone(name: str) -> None:
    op = op_of(name, backend="triton", invariant=True)
    tensors, states = on_gpu(op, 1, 700, 2, 64, 64, N=len(PACKED) - 1)
    results, grads = with_gradients(op, tensors, states, cu_seqlens=offsets(PACKED))
    weights = random_like(results)
    for n, (begin, end) in enumerate(pairwise(PACKED)):
        rows = slice(n, n + 1)
        own = [x[:, begin:end] if d.timed else x for x, d in zip(tensors, op.spec.inputs, strict=True)]
        cut = [weights[0][:, begin:end], *(w[rows] for w in weights[1:])]
        alone, d_alone = with_gradients(op, own, [s[rows] for s in states], cut)
        assert torch.equal(alone[0], results[0][:, begin:end])
        for d, e, x in zip(d_alone, grads, op.spec.inputs, strict=False):
            assert not x.timed or torch.equal(d, e[:, begin:end])


@pytest.mark.parametrize("name", CLASSES)
def test_a_hundred_runs_have_the_same_bits_and_no_future(name: str) -> None:
    op = op_of(name, backend="triton")
    tensors, states = on_gpu(op, 2, 300, 8, 64, 64)
    results, grads = with_gradients(op, tensors, states)
    for _ in range(RUNS):
        again, d_again = with_gradients(op, tensors, states)
        assert same([*again, *d_again], [*results, *grads])
    others = on_gpu(op, 2, 300, 8, 64, 64, seed=50)[0]
    mixed = [
        torch.cat([x[:, :221], y[:, 221:]], 1) if d.timed else x
        for x, y, d in zip(tensors, others, op.spec.inputs, strict=True)
    ]
    assert torch.equal(call(op, mixed, states)[0][:, :221], results[0][:, :221])


@pytest.mark.parametrize("name", CLASSES)
def test_the_current_stream_is_used(name: str) -> None:
    op = op_of(name, backend="triton")
    tensors, states = on_gpu(op, 1, 300, 2, 64, 64)
    wanted = call(op, tensors, states)
    torch.cuda.synchronize()
    late = [torch.zeros_like(x) for x in tensors]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        for x, y in zip(late, tensors, strict=True):
            x.copy_(y)
        found = call(op, late, states)
    side.synchronize()
    assert same(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CLASSES)
def test_the_device_of_the_tensors_is_used(name: str) -> None:
    op = op_of(name, backend="triton")
    tensors, states = on_gpu(op, 1, 300, 2, 64, 64)
    wanted = with_gradients(op, tensors, states)
    found = with_gradients(op, [x.to("cuda:1") for x in tensors], [x.to("cuda:1") for x in states])
    assert {x.device.index for x in (*found[0], *found[1])} == {1}
    assert same([x.to("cuda:0") for x in (*found[0], *found[1])], [*wanted[0], *wanted[1]])


@pytest.mark.parametrize(("count", "heads"), [(70_000, 1), (2_100, 32)])
@pytest.mark.parametrize("name", CLASSES)
def test_as_many_sequences_as_a_batch_may_have(name: str, count: int, heads: int) -> None:
    """More than 65535 programs, and more than 65535 / 32 sequences."""
    count //= MANY
    op = op_of(name, backend="triton")
    tensors, _ = on_gpu(op, 1, count, heads, 16, 16, kind=torch.float32)
    leaves = [x.requires_grad_() for x in tensors]
    o = op(*leaves, cu_seqlens=torch.arange(count + 1, device="cuda"))
    d = torch.autograd.grad(o.square().sum(), leaves, materialize_grads=True)
    rows = [
        x.detach().transpose(0, 1) if s.timed else x.detach()
        for x, s in zip(tensors, op.spec.inputs, strict=True)
    ]
    rows = [x.requires_grad_() for x in rows]
    batch = op(*rows)  # each as a row of a batch
    e = torch.autograd.grad(batch.square().sum(), rows, materialize_grads=True)
    assert worst([o], [batch.transpose(0, 1)]) < 1e-5
    for got, want, s in zip(d, e, op.spec.inputs, strict=True):
        assert worst([got], [want.transpose(0, 1) if s.timed else want]) < 1e-4


@pytest.mark.parametrize("blocks", [512, 1023, 1024, 1025, 4096])
@pytest.mark.parametrize("name", CLASSES)
def test_many_programs_are_as_few(name: str, blocks: int) -> None:
    blocks = -(-blocks // MANY)
    op = op_of(name, backend="triton", invariant=True)
    tensors, states = on_gpu(op, 1, 64, 1, 128, 128)
    wanted, d_wanted = with_gradients(op, tensors, states)
    rows = [
        x.expand(blocks, *x.shape[1:]) if d.timed else x for x, d in zip(tensors, op.spec.inputs, strict=True)
    ]
    weights = [w.expand(blocks, *w.shape[1:]) for w in random_like(wanted)]
    found, grads = with_gradients(op, rows, [s.expand(blocks, *s.shape[1:]) for s in states], weights)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want.expand_as(got))
    for got, want, d in zip(grads, d_wanted, op.spec.inputs, strict=False):
        assert not d.timed or torch.equal(got, want.expand_as(got))


@pytest.mark.parametrize(("K", "V"), [(256, 64), (64, 256)])
@pytest.mark.parametrize("name", ["linear_attention", "simple_gla", "gated_delta_rule", "gla"])
def test_narrow_blocks_of_uneven_heads(name: str, K: int, V: int) -> None:
    """Where there are many sequences and heads; ptxas made wrong addresses of some of these kernels."""
    report = op_of(name, backend="triton").check(B=-(-70 // MANY), T=100, H=2, K=K, V=V, dtype=torch.bfloat16)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["gated_delta_rule", "value_erase", "own_scan"])
def test_tensors_above_two_to_the_31_elements(name: str) -> None:
    """The last head's last tokens lie past 2^31 elements; they are as they are by themselves."""
    op = op_of(name, backend="triton", invariant=True)
    T, H, D = LONG + 64, 129, 128
    last, _ = on_gpu(op, 1, 64, 1, D, D)
    few = {}
    for x, d in zip(last, op.spec.inputs, strict=True):
        if d.timed:
            full = torch.zeros((1, T, H, *x.shape[3:]), dtype=x.dtype, device="cuda")
            full[:, -64:, -1:] = x
            few[d.name] = full
        else:
            few[d.name] = x.expand(H, *x.shape[1:])
    with torch.no_grad():
        o = op(**few)
        alone = op(*last)
    assert torch.equal(o[:, -64:, -1:], alone)
    assert not o[:, :-64].any()
