"""Decoding on a GPU: every entry, pools, types, streams, graphs, no waiting, replayed calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from runtime_cases import OWN
from torch import Tensor

import linalg_dsl
from linalg_dsl import driver
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.catalogue import catalogue_names, catalogue_text
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.op import CompiledOp

pytestmark = pytest.mark.gpu
BIG = 8192
WHEN_DRY = {"BIG": 32}


SMALLER = {"abc": 16.0, "gsa": 16.0, "raven": 16.0, "blurry_window": 16.0}
"""Consts m of a call; with their own these are slow in the interpreter only."""


def op_of(name: str, **options: Any) -> CompiledOp:
    spec = parse(catalogue_text(name), f"{name}.rec")
    return driver.assemble(spec, CompileOptions(**options))


def listed(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def error(found: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double().cpu()
    return float((found.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", catalogue_names())
def test_every_entry_decodes_as_its_recurrence(name: str, dtype: torch.dtype) -> None:
    consts: dict[str, Any] = {"m": SMALLER[name]} if name in SMALLER else {}
    op, exact = op_of(name), op_of(name, backend="torch")
    tensors = draw(op.spec, 3, 4, 2, 40, 24, dtype=dtype, consts=consts, device="cuda")
    wide = {n: x.double().cpu() for n, x in tensors.items()}
    state, truth = None, None
    for begin, end in ((0, 1), (1, 2), (2, 4)):
        given, right = (
            {n: x[:, begin:end] if op.spec.input(n).timed else x for n, x in t.items()}
            for t in (tensors, wide)
        )
        o, state = op.step(**given, **consts, state=state)
        wanted, truth = exact.step(**right, **consts, state=truth)
        assert error(o, wanted) < (1e-4 if dtype == torch.float32 else 2e-2)
    for x, y in zip(listed(state), listed(truth), strict=True):
        assert error(x, y) < (1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (60, 100), (128, 128), (256, 256), (512, 512)])
@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_oja", "mlstm", "mamba1"])
def test_head_sizes_and_numbers_of_tokens(name: str, K: int, V: int) -> None:
    op, exact = op_of(name), op_of(name, backend="torch")
    for batch, tokens in ((1, 1), (2, 3), (70, 1)):
        tensors = draw(op.spec, batch, tokens, 2, K, V, dtype=torch.float32, device="cuda")
        o, state = op.step(**tensors)
        wanted, truth = exact.step(**{n: x.double().cpu() for n, x in tensors.items()})
        assert error(o, wanted) < 1e-4
        for x, y in zip(listed(state), listed(truth), strict=True):
            assert error(x, y) < 1e-4


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("name", ["gla", "gated_oja", "mlstm"])
def test_a_pool_with_padding_and_rejected_tokens(name: str, layout: str, storage: torch.dtype) -> None:
    op, exact = op_of(name, state_layout=layout), op_of(name, backend="torch", state_layout=layout)
    tensors = draw(op.spec, 5, 3, 2, 64, 48, dtype=torch.bfloat16, device="cuda")
    states = draw_state(op.spec, 9, 2, 64, 48, dtype=torch.float32)
    kept = [x.abs().mT if layout == "vk" and x.dim() == 4 else x.abs() for x in states]
    pool = [x.to("cuda", storage).contiguous() for x in kept]
    before = [x.clone() for x in pool]
    truth = [x.double().cpu() for x in pool]
    slots = torch.tensor([8, -1, 0, 3, 99], dtype=torch.int32)
    counts = torch.tensor([3, 3, 0, 1, 3])
    named: Any = (lambda x: x[0]) if len(pool) == 1 else (lambda x: op.state_type(*x))
    o, _ = op.step(**tensors, state=named(pool), slots=slots.cuda(), accepted=counts.cuda())
    there = {
        n: x[:4].double().cpu() if op.spec.input(n).timed else x.double().cpu() for n, x in tensors.items()
    }
    wanted, _ = exact.step(**there, state=named(truth), slots=slots[:4], accepted=counts[:4])
    assert error(o[:4], wanted) < 2e-2
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert o[4].isnan().all()  # a slot that the pool does not have
    for x, y, old in zip(pool, truth, before, strict=True):
        assert error(x, y) < 2e-2
        assert torch.equal(x[[0, 1, 2, 4, 5, 6, 7]], old[[0, 1, 2, 4, 5, 6, 7]])


def test_steps_are_the_same_bits_alone_and_in_a_batch() -> None:
    op = op_of("gated_delta_rule", invariant=True)
    tensors = draw(op.spec, 64, 1, 4, 128, 128, dtype=torch.bfloat16, device="cuda")
    state = torch.randn(64, 4, 128, 128, device="cuda")
    alone = state[7:8].clone()
    o, _ = op.step(**tensors, state=state)
    one, _ = op.step(**{n: x[7:8] for n, x in tensors.items()}, state=alone)
    assert torch.equal(o[7:8], one)
    assert torch.equal(state[7:8], alone)


def test_no_step_and_no_call_from_a_pool_waits_for_the_device() -> None:
    op = op_of("gated_delta_rule")
    tensors = draw(op.spec, 4, 1, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(9, 4, 64, 64, device="cuda")
    slots, counts = torch.tensor([3, -1, 0, 1], device="cuda"), torch.tensor([1, 0, 1, 1], device="cuda")
    long = draw(op.spec, 4, 70, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
    options = {"initial_state": pool, "slots": slots, "output_final_state": True}
    for strict in (False, False, False, True, True):
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            op.step(**tensors, state=pool, slots=slots)
            op.step(**tensors, state=pool, slots=slots, accepted=counts)
            op(**long, **options)
            op(**long, state_positions=[20, 64])
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_steps_with_other_slots() -> None:
    op = op_of("gated_delta_rule")
    tensors = draw(op.spec, 3, 1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    start = torch.randn(6, 2, 64, 64, device="cuda")
    pool, slots = start.clone(), torch.tensor([0, 1, 2], device="cuda")
    op.step(**tensors, state=pool, slots=slots)
    op.step(**tensors, state=pool, slots=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = op.step(**tensors, state=pool, slots=slots)
    for rows in ([5, -1, 3], [4, 0, -1]):
        pool.copy_(start)
        slots.copy_(torch.tensor(rows))
        tensors["v"].normal_()
        graph.replay()
        fresh = start.clone()
        wanted, _ = op.step(**{n: x.clone() for n, x in tensors.items()}, state=fresh, slots=slots)
        assert torch.equal(o, wanted)
        assert torch.equal(pool, fresh)


def test_replayed_calls_keep_to_the_current_stream() -> None:
    op = op_of("gla")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    tensors = draw(op.spec, 2, 300, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        wanted = [op(**tensors) for _ in range(4)][-1]
        big = torch.randn(BIG, BIG, device="cuda")
        for _ in range(4):
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                late = {n: x.clone() for n, x in tensors.items()}
                for _ in range(3):
                    big = big @ big * 1e-5  # what the call has to wait for
                late["v"].copy_(tensors["v"])
                found = op(**late)
            side.synchronize()
            assert torch.equal(found, wanted)


def test_several_threads_replay_at_once() -> None:
    op = op_of("gla")
    tensors = [draw(op.spec, 1, 70, 2, 64, 64, dtype=torch.float32, seed=i, device="cuda") for i in range(4)]
    exact = op_of("gla", backend="torch")
    wanted = [exact(**{n: x.cpu() for n, x in t.items()}) for t in tensors]
    bad: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if error(op(**tensors[i]), wanted[i]) > 1e-3:
                bad.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


@pytest.mark.parametrize("name", ["linear_attention", "gla", "delta_rule", "kda", "gated_oja", "longhorn"])
def test_replayed_calls_give_the_bits_of_the_first(name: str) -> None:
    op = op_of(name)
    for length in (64, 100):
        calls = []
        for seed in (0, 1, 0, 1, 0):
            tensors = draw(op.spec, 2, length, 2, 64, 64, dtype=torch.bfloat16, seed=seed, device="cuda")
            calls.append(op(**tensors, output_final_state=True))
        for i in (2, 3, 4):
            for x, y in zip(calls[i], calls[i - 2], strict=True):
                assert torch.equal(x, y)
        assert op.stage_ops[0].quick.cache.found
    assert any(op._quick._known.values()) if op._quick else False


def test_launches_of_ours_are_those_of_triton() -> None:
    """A profiler makes them go Triton's way; the bits are the same."""
    from triton import knobs

    op = op_of("delta_rule")
    tensors = draw(op.spec, 2, 100, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        ours = [op(**tensors) for _ in range(4)][-1]
        seen: list[Any] = []
        knobs.runtime.launch_enter_hook.add(seen.append)
        try:
            theirs = op(**tensors)
        finally:
            knobs.runtime.launch_enter_hook.remove(seen.append)
    assert torch.equal(ours, theirs)
    assert len(seen) >= 2


def test_torch_compile_with_inductor_steps_in_place() -> None:
    op = linalg_dsl.compile(catalogue_text("gla"))
    tensors = draw(op.spec, 4, 1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    start = torch.randn(4, 2, 64, 64, device="cuda")
    one, other = start.clone(), start.clone()

    def run(pool: Tensor, *given: Tensor) -> Tensor:
        o: Tensor = op.step(*given, state=pool)[0]
        return o.float().square()

    wanted = run(one, *tensors.values())
    found = torch.compile(run, fullgraph=True)(other, *tensors.values())
    assert torch.allclose(found, wanted)
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "mlstm", "longhorn"])
def test_packed_calls_are_replayed_with_what_their_offsets_hold_now(name: str) -> None:
    op, exact = op_of(name), op_of(name, backend="torch")
    tensors = draw(op.spec, 1, 300, 2, 64, 64, dtype=torch.float32, device="cuda")
    wide = {n: x.double().cpu() for n, x in tensors.items()}
    offsets = torch.tensor([0, 0, 100, 130, 300], dtype=torch.int32, device="cuda")
    kinds = [[0, 0, 100, 130, 300], [0, 0, 100, 130, 300], [0, 0, 100, 130, 300], [0, 64, 64, 299, 300]]
    for strict, cuts in zip((False, False, False, True), kinds, strict=True):
        offsets.copy_(torch.tensor(cuts, dtype=torch.int32))
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            with torch.no_grad():
                o, last = op(**tensors, cu_seqlens=offsets, output_final_state=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        wanted, ends = exact(**wide, cu_seqlens=torch.tensor(cuts), output_final_state=True)
        assert error(o, wanted) < 1e-3
        for x, y in zip(listed(last), listed(ends), strict=True):
            assert error(x, y) < 1e-3


@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "own_scan"])
def test_tokens_of_no_sequence_are_zero(name: str) -> None:
    op = linalg_dsl.compile(OWN[name]) if name in OWN else op_of(name)
    tensors = draw(op.spec, 1, 300, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    o = op(**leaves, cu_seqlens=torch.tensor([10, 90, 250], device="cuda"))
    grads = torch.autograd.grad(o.float().square().sum(), list(leaves.values()))
    timed = [g for g, d in zip(grads, op.spec.inputs, strict=True) if d.timed]
    for x in (o, *timed):
        assert not x[:, :10].any()
        assert not x[:, 250:].any()
        assert x[:, 10:250].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "name", ["linear_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda", "gated_oja"]
)
def test_nan_and_infinity_of_later_tokens_leave_no_trace(name: str, dtype: torch.dtype) -> None:
    op = op_of(name)
    tensors = draw(op.spec, 1, 200, 2, 64, 64, dtype=dtype, device="cuda")
    clean = op(**tensors)
    for decl in op.spec.inputs:
        for value, at in ((float("nan"), 150), (float("inf"), 128)) if decl.timed else ():
            x = tensors[decl.name].clone()
            x[0, at, 1].view(-1)[-1] = value
            o = op(**{**tensors, decl.name: x})
            assert torch.equal(o[:, :at], clean[:, :at])
            assert torch.equal(o[:, :, 0], clean[:, :, 0])
            assert not o[0, at, 1].isfinite().all()
            if decl.name == "q":  # which no later token reads; 128 begins a chunk
                assert o[:, at + 1 :].isfinite().all()
