"""Packed sequences: every class against the step loop, offsets as data that nothing looks at or keeps."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from runtime_cases import CLASSES, OWN, call, inputs_of, op_of, with_gradients, worst
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops import catalogue_names
from linalg_dsl.ops.replay import Replay

BOUNDS = [0, 0, 5, 5, 22, 23, 40, 40]
"""Empty sequences first, in the middle and last; one of a token, some shorter and one longer than a chunk."""


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", CLASSES)
def test_each_sequence_is_run_by_itself(name: str, kind: torch.dtype) -> None:
    op = op_of(name, backend="torch", chunk_size=16)
    tensors, states = inputs_of(op, 1, 40, 2, 5, 3, N=len(BOUNDS) - 1, dtype=torch.float64)
    offsets = torch.tensor(BOUNDS, dtype=kind)
    results, grads = with_gradients(op, tensors, states, cu_seqlens=offsets)
    wanted, d_wanted = with_gradients(op.reference, tensors, states, cu_seqlens=offsets)
    assert worst([*results, *grads], [*wanted, *d_wanted]) < 1e-10
    for n in (0, 2, 6):  # an empty one hands on what it was given
        assert all(torch.equal(x[n], s[n]) for x, s in zip(results[1:], states, strict=True))
    hinted = call(op, tensors, states, cu_seqlens=offsets, cu_seqlens_cpu=offsets.clone(), max_seqlen=17)
    assert all(torch.equal(a, b) for a, b in zip(hinted, results, strict=True))


@pytest.mark.parametrize("name", CLASSES)
def test_a_batch_of_several_rows_cannot_be_packed(name: str) -> None:
    op = op_of(name, backend="torch")
    tensors, _ = inputs_of(op, 2, 9, 2, 5, 3)
    with pytest.raises(ArgumentError, match=f"{name}: with cu_seqlens the batch must be 1, got 2"):
        op(*tensors, cu_seqlens=torch.tensor([0, 9]))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["gated_delta_rule", "looking_back", "own_scan"])
def test_offsets_that_change_in_place_are_read_anew(name: str, backend: str) -> None:
    op = op_of(name, backend=backend, chunk_size=16)
    tensors, states = inputs_of(op, 1, 20, 1, 4, 3, N=3)
    offsets = torch.tensor([0, 4, 9, 20])
    call(op, tensors, states, cu_seqlens=offsets)
    offsets.copy_(torch.tensor([0, 0, 18, 20]))
    changed = call(op, tensors, states, cu_seqlens=offsets)
    fresh = call(op, tensors, states, cu_seqlens=torch.tensor([0, 0, 18, 20]))
    assert all(torch.equal(a, b) for a, b in zip(changed, fresh, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_launching_looks_at_no_data(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have none: item(), tolist(), bool() and shapes that depend on data raise."""
    op = op_of(name, backend="triton", chunk_size=16)
    for stage in op.stage_ops:
        module = stage.operator("triton").module
        launched: list[str] = []
        monkeypatch.setattr(
            module.Call, "launch", lambda self, kernel, *rest, log=launched: log.append(kernel.__name__)
        )
        for kernel in ("packed_tables_kernel",):
            monkeypatch.setattr(module, kernel, defaultdict(lambda: lambda *a, **k: None))
        sizes = {"K": 4, "V": 3, "n": 2}
        with FakeTensorMode():
            offsets = torch.zeros(4, dtype=torch.int32) if packed else None
            lead = (1, 40, 2) if packed else (2, 40, 2)
            tensors = tuple(
                torch.empty(
                    *(lead if d.timed else (2,)),
                    *(sizes[str(a)] if isinstance(a, str) else a for a in d.dims),
                )
                for d in stage.spec.inputs
            )
            states = tuple(
                torch.empty(3 if packed else 2, 2, *(sizes[str(a)] for a in s.dims))
                for s in stage.spec.states
            )
            consts = (1.0,) * len(module.CONSTS)
            o, finals, kept = module.forward(tensors, states, consts, offsets, True, True)
            module.backward(tensors, states, consts, offsets, kept, o, finals)
        assert len(launched) >= 2


@pytest.mark.parametrize("name", [*catalogue_names(), *OWN, "reversed"])
def test_a_call_looks_at_no_data(name: str) -> None:
    chosen: dict[str, Any] = {"reverse": True} if name == "reversed" else {"chunk_size": 8}
    op = op_of("looking_back" if name == "reversed" else name, backend="torch", **chosen)
    tensors, states = inputs_of(op, 1, 40, 2, 5, 3, N=3)
    mode = FakeTensorMode()
    fake = [mode.from_tensor(x) for x in (*tensors, *states, torch.tensor([0, 3, 5, 40]))]
    with mode:
        found = call(op, fake[: len(tensors)], fake[len(tensors) : -1], cu_seqlens=fake[-1])
    assert found[0].shape[:3] == (1, 40, 2)
    assert [x.shape for x in found[1:]] == [s.shape for s in states]


@pytest.mark.parametrize("name", ["gla", "value_erase", "own_scan"])
@pytest.mark.parametrize("packed", [True, False])
def test_no_kernel_is_compiled_anew_for_another_packing_or_length(
    name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 20 packings of 4096 tokens or 20 lengths make kernels be compiled for, on 132 multiprocessors."""
    whole = 2 if name == "own_scan" else 1  # kernels of steps are others where every group has all its tokens
    for invariant, most in ((True, 1), (False, 4 if packed else whole)):
        op = op_of(name, backend="triton", invariant=invariant)
        module = op.operator("triton").module
        seen: dict[str, set[str]] = {}

        def launch(self: Any, kernel: Any, *given: Any, seen: dict[str, set[str]] = seen) -> None:
            _, _, _, _, ratios, more, warps, stages = given
            kinds = seen.setdefault(kernel.__name__, set())
            kinds.add(f"{self.constants(kernel, ratios, more)} {warps} {stages}")

        monkeypatch.setattr(module, "device_limits", lambda device: (132, 232448, False))
        monkeypatch.setattr(module.Call, "launch", launch)
        like = inputs_of(op, 1, 1, 1, 64, 64)[0]
        numbers = random.Random(3)
        for _ in range(20):
            cuts = sorted(numbers.choices(range(4097), k=numbers.randrange(1, 60)))
            T, offsets = (4096, torch.tensor([0, *cuts, 4096])) if packed else (1 + cuts[0], None)
            tensors = tuple(
                x.expand(1, T, 4, *x.shape[3:]) if d.timed else x.expand(4, *x.shape[1:])
                for x, d in zip(like, op.spec.inputs, strict=True)
            )
            consts = (1.0,) * len(module.CONSTS)
            o, finals, kept = module.forward(tensors, (None,), consts, offsets, True, True)
            module.backward(tensors, (None,), consts, offsets, kept, o, finals)
        assert max(map(len, seen.values())) <= most


def test_torch_compile_takes_other_packings_as_they_are() -> None:
    op = op_of("own_scan", backend="torch")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast: Any = torch.compile(op, fullgraph=True, backend="aot_eager")
    numbers = random.Random(3)
    for i in range(8):
        length = 40 + 7 * i
        cuts = sorted(numbers.choices(range(length + 1), k=2 + i))
        tensors, states = inputs_of(op, 1, length, 2, 5, 3, N=len(cuts) + 1)
        offsets = torch.tensor([0, *cuts, length])
        found, wanted = (call(f, tensors, states, cu_seqlens=offsets) for f in (fast, op))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("name", ["gla", "own_scan"])
def test_tokens_of_no_sequence_are_zero_and_wrong_offsets_leave_no_tensor(name: str) -> None:
    """Offsets on a GPU are not looked at; here a module is called past the check that CPU tensors have."""
    op = op_of(name, backend="triton", chunk_size=16)
    module = op.operator("triton").module
    whole, _ = inputs_of(op, 1, 40, 2, 4, 3)
    tensors = tuple(x.contiguous() for x in whole)
    consts = (0.5,) * len(module.CONSTS)
    inner = tuple(
        x[:, 7:31].contiguous() if d.timed else x for x, d in zip(tensors, op.spec.inputs, strict=True)
    )

    def both(given: tuple[Tensor, ...], cuts: list[int]) -> list[Tensor]:
        offsets = torch.tensor(cuts)
        o, last, kept = module.forward(given, (None,), consts, offsets, True, True)
        grads, _ = module.backward(given, (None,), consts, offsets, kept, torch.ones_like(o), None)
        return [o, *last, *grads]

    found, wanted = both(tensors, [7, 12, 31]), both(inner, [0, 5, 24])
    for cuts in ([-9, 12, 99], [40, 0, 40], [3, 30, 20, 40], [0, 50, 40]):
        both(tensors, cuts)
    for x, y in zip(found, wanted, strict=True):
        if x.shape == y.shape:
            assert torch.equal(x, y)
        else:
            assert torch.equal(x[:, 7:31], y)
            assert not x[:, :7].any()
            assert not x[:, 31:].any()


@pytest.mark.parametrize(("name", "count"), [("simple_gla", 5_000), ("own_scan", 70_000)])
def test_thousands_of_sequences_of_one_token(name: str, count: int) -> None:
    op = op_of(name, backend="torch")
    tensors, _ = inputs_of(op, 1, count, 1, 2, 2)
    o = op(*tensors, cu_seqlens=torch.arange(count + 1, dtype=torch.int32))
    if name == "simple_gla":
        q, k, v, _ = tensors
        wanted = 2**-0.5 * (q * k).sum(-1, keepdim=True) * v
    else:
        x, c, _, b = tensors
        wanted = c * b * x
    torch.testing.assert_close(o, wanted)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_one_kernel_makes_the_tables_the_order_and_the_zeros(kind: torch.dtype) -> None:
    """Of sequences between tokens that belong to none; the longest first, the earlier of two alike."""
    module: Any = op_of("gla", backend="triton").operator("triton").module
    bounds = [3, 3, 8, 30, 31, 36, 36, 38]
    lengths = [b - a for a, b in pairwise(bounds)]
    results = [torch.full((1, 40, n), float("nan"), dtype=t) for n, t in ((2, torch.float32),) * 4]
    results += [torch.full((40, n, 2), float("nan"), dtype=torch.float16) for n in (1, 3, 5)]
    launches: list[Any] = []

    def launch(kernel: Any, *given: Any) -> None:
        launches.append(kernel)
        module.launch_kernel(kernel, *given)

    starts, first, owner, order = module.packed_tables(
        torch.tensor(bounds, dtype=kind), 40, 16, 40 // 16 + 7, results, launch
    )
    assert starts.tolist() == bounds
    assert first.tolist() == [b // 16 + n for n, b in enumerate(bounds)]
    assert order.tolist() == sorted(range(7), key=lambda n: -lengths[n])
    found = [[i for i, n in enumerate(owner.tolist()) if n == m] for m in range(7)]
    assert found == [
        [f + i for i in range(-(-n // 16))] for f, n in zip(first.tolist(), lengths, strict=False)
    ]
    for x in results:
        rows = x.reshape(40, -1)
        assert not rows[:3].any()
        assert not rows[38:].any()
        assert rows[3:38].isnan().all()
    assert len(launches) == 2  # six tensors at a time


def test_a_packed_call_has_one_launch_more_than_a_dense_one_and_fills_nothing() -> None:
    """In both directions, as replayed: what it was slow by was host time of many small ones."""
    op = op_of("gated_delta_rule", backend="triton", chunk_size=16)
    counts = []
    for offsets in (None, torch.tensor([0, 20, 40])):
        tensors, _ = inputs_of(op, 2 if offsets is None else 1, 20 if offsets is None else 40, 2, 5, 3)
        leaves = [x.requires_grad_() for x in tensors]
        for _ in range(3):
            torch.autograd.grad(op(*leaves, cu_seqlens=offsets).sum(), leaves)
        quick = op.stage_ops[0].quick_gradients
        replays = [list(cache.found.values())[-1] for cache in (quick.forwards, quick.backwards)]
        assert all(isinstance(r, Replay) for r in replays)
        counts.append([len(r.launches) for r in replays if isinstance(r, Replay)])
        assert not any(b.zero for r in replays if isinstance(r, Replay) for b in r.buffers)
    assert counts[1] == [n + 1 for n in counts[0]]


def test_the_longest_sequence_runs_first_and_the_bits_do_not_know() -> None:
    """Walks take the order from a table: with another one the results are the same."""
    op = op_of("gla", backend="triton", chunk_size=16)
    module: Any = op.operator("triton").module
    tensors, states = inputs_of(op, 1, 40, 2, 5, 3, N=len(BOUNDS) - 1)
    given = (tuple(tensors), tuple(states), (1.0,) * len(module.CONSTS), torch.tensor(BOUNDS))
    orders: list[list[int]] = []

    def turned(kernel: Any, programs: int, arguments: Any, constants: Any, *rest: Any) -> None:
        module.launch_kernel(kernel, programs, arguments, constants, *rest)
        if kernel is module.packed_tables_kernel:
            order = arguments[4]
            orders.append(order.tolist())
            order.copy_(order.flip(0))

    want, (state,), _ = module.forward(*given, True, False)
    found, (other,), _ = module.forward(*given, True, False, launch=turned)
    assert orders[0][:3] == [3, 5, 1]
    assert torch.equal(want, found)
    assert torch.equal(state, other)
