"""Calls that are like earlier ones: what is recorded, when it is not used, what Triton's launcher gets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_cases import TEXTS
from replays import count_replays, profiled
from torch import Tensor

import linalg_dsl
from linalg_dsl.ops import replay as replay_module
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.replay import Buffer, CompiledLaunch, Recorder, ReplayCache, _together, describe


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often something was replayed."""
    return count_replays(monkeypatch)


def pair(name: str) -> tuple[CompiledOp, CompiledOp]:
    text = TEXTS.get(name) or catalogue_text(name)
    return linalg_dsl.compile(text, backend="triton"), linalg_dsl.compile(text, backend="torch")


def close(found: Any, wanted: Any) -> None:
    for x, y in zip(flat(found), flat(wanted), strict=True):
        assert x.dtype == y.dtype
        assert torch.allclose(x, y, atol=1e-4, rtol=1e-4)


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [x for r in results for x in flat(r)]


@pytest.mark.parametrize("name", ["gla", "delta_rule", "longhorn"])
def test_a_forward_call_is_replayed_with_its_own_tensors(name: str, counted: list[int]) -> None:
    op, exact = pair(name)
    for i in range(5):
        tensors = draw(op.spec, 1, 5, 2, 3, 4, dtype=torch.float32, seed=i)
        state = torch.randn(1, 2, 3, 4)
        options = {"initial_state": state, "output_final_state": True}
        close(op(**tensors, **options), exact(**tensors, **options))
    assert len(counted) == 3  # the first is looked at, the second recorded
    tensors = draw(op.spec, 1, 6, 2, 3, 4, dtype=torch.float32)
    for _ in range(2):  # another length is another call
        close(op(**tensors), exact(**tensors))
    assert len(counted) == 3


@pytest.mark.parametrize("name", ["gla", "delta_rule", "longhorn"])
def test_a_packed_call_is_replayed_with_what_its_offsets_hold_now(name: str, counted: list[int]) -> None:
    op, exact = pair(name)
    op = op.with_options(chunk_size=16)
    tensors = draw(op.spec, 1, 40, 2, 3, 4, dtype=torch.float32)
    state = torch.randn(4, 2, 3, 4)
    offsets = torch.tensor([0, 0, 7, 9, 40], dtype=torch.int32)
    options: dict[str, Any] = {"initial_state": state, "output_final_state": True, "cu_seqlens": offsets}
    for cuts in ([0, 7, 9], [0, 7, 9], [0, 7, 9], [20, 20, 39], [40, 40, 40], [1, 2, 3]):
        offsets[1:4] = torch.tensor(cuts)  # in place: nothing that was made of them may be kept
        close(op(**tensors, **options), exact(**tensors, **options))
    assert len(counted) == 4
    offsets[2] = 41
    with pytest.raises(linalg_dsl.ArgumentError, match="cu_seqlens must rise from 0 to T = 40"):
        op(**tensors, **options)
    close(op(**tensors), exact(**tensors))  # without offsets it is another call
    assert len(counted) == 4
    options["cu_seqlens"] = torch.tensor([0, 13, 40])
    options["initial_state"] = state[:2]
    close(op(**tensors, **options), exact(**tensors, **options))
    assert len(counted) == 4


def test_replay_can_be_switched_off(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(replay_module.ENVIRONMENT_VARIABLE, "0")
    op, exact = pair("gla")
    tensors = draw(op.spec, 1, 5, 2, 3, 4, dtype=torch.float32)
    for _ in range(4):
        close(op(**tensors), exact(**tensors))
    assert not counted


def test_tensors_that_were_one_are_two_in_a_call_that_is_alike(counted: list[int]) -> None:
    op, exact = pair("gla")
    tensors = draw(op.spec, 1, 4, 2, 3, 4, dtype=torch.float32)
    for _ in range(3):
        op(tensors["k"], tensors["k"], tensors["v"], tensors["g"])
    close(op(**tensors), exact(**tensors))
    state = torch.zeros(1, 2, 3, 4)
    token = {n: x[:, :1] for n, x in tensors.items()}
    for _ in range(3):
        op.step(token["k"], token["k"], token["v"], token["g"], state=state)
    given = token.values()
    close(op.step(*given, state=state.clone()), exact.step(*given, state=state.clone()))


def test_views_are_copied_as_before(counted: list[int]) -> None:
    op, exact = pair("gla")
    for i in range(5):
        tensors = draw(op.spec, 1, 4, 2, 3, 4, dtype=torch.float32, seed=i)
        tensors["k"] = tensors["k"].mT.contiguous().mT
        tensors["v"] = tensors["v"][:, :1].expand(1, 4, 2, 4)
        close(op(**tensors), exact(**tensors))
    assert len(counted) == 3


def test_a_call_with_gradients_is_not_replayed(counted: list[int]) -> None:
    op, exact = pair("gla")
    tensors = draw(op.spec, 1, 4, 2, 3, 4, dtype=torch.float32)
    for _ in range(4):
        op(**tensors)
    before = len(counted)
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    found = torch.autograd.grad(op(**leaves).square().sum(), list(leaves.values()))
    wanted = torch.autograd.grad(exact(**leaves).square().sum(), list(leaves.values()))
    close(found, wanted)
    assert len(counted) == before
    with torch.no_grad():
        op(**leaves)
    with torch.inference_mode():
        op(**leaves)
    assert len(counted) == before + 2


def test_modes_and_transforms_see_the_registered_operator(counted: list[int]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    op, _ = pair("gla")
    tensors = draw(op.spec, 1, 4, 2, 3, 4, dtype=torch.float32)
    for _ in range(3):
        op(**tensors)
        op.step(**{n: x[:, :1] for n, x in tensors.items()}, state=torch.zeros(1, 2, 3, 4))
    before = len(counted)
    with FlopCounterMode(display=False):
        op(**tensors)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = {n: mode.from_tensor(x) for n, x in tensors.items()}
        assert op(**fake).shape == (1, 4, 2, 4)
        o, _ = op.step(**fake, state=mode.from_tensor(torch.zeros(1, 2, 3, 4)))
        assert o.shape == (1, 4, 2, 4)
    with pytest.raises(RuntimeError, match=r"torch\.vmap"):
        torch.vmap(lambda q: op(q, tensors["k"], tensors["v"], tensors["g"]))(tensors["q"][None])
    assert len(counted) == before


def test_mistakes_are_still_found() -> None:
    op, _ = pair("gla")
    tensors = draw(op.spec, 1, 4, 2, 3, 4, dtype=torch.float32)
    for _ in range(4):
        op(**tensors)
    with pytest.raises(linalg_dsl.ArgumentError, match=r"v has B, T"):
        op(**{**tensors, "v": tensors["v"][:, :3]})
    with pytest.raises(linalg_dsl.ArgumentError, match="missing g"):
        op(tensors["q"], tensors["k"], tensors["v"])


# -- parts --------------------------------------------------------------------------------------------


def test_what_a_call_is_like() -> None:
    x = torch.zeros(8, 4)
    same = describe([x])
    assert same is not None
    assert same == describe([x])
    flat = x.flatten()
    others = [x.double(), x[:, :3], x.mT, flat[4:28].view(6, 4), flat[1:25].view(6, 4), flat[2:26].view(6, 4)]
    keys = {d[0] for d in (describe([y]) for y in [x, *others]) if d is not None}
    assert len(keys) == 7
    assert describe([torch.nn.Parameter(x)]) is None
    with torch.no_grad():
        assert describe([torch.nn.Parameter(x), None]) is not None


def test_a_cache_keeps_what_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_LARGEST", 2)
    cache = ReplayCache()
    assert [cache.is_due(("a",)) for _ in range(2)] == [False, True]
    cache.keep(("a",), None)
    assert not cache.is_due(("a",))
    assert cache.get(("a",)) is None
    cache.is_due(("b",))
    cache.is_due(("c",))
    assert set(cache.found) == {("c",)}


class FakeKernel:
    """A jit function whose compiled kernel notes what its launcher gets."""

    arg_names = ("p_x", "p_y", "p_o", "scale", "H", "K", "BLOCK")

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.slow = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, num_warps: int, num_stages: int, **constants: Any) -> Any:
            self.slow += 1
            return SimpleNamespace(
                run=lambda *a: self.seen.append(a), function=77, packed_metadata=(num_warps, 1, 0)
            )

        return start


def test_a_compiled_kernel_gets_grid_stream_addresses_and_constants_in_order() -> None:
    kernel = FakeKernel()
    x, y = torch.zeros(4), torch.zeros(4)
    part = y[2:]
    table = torch.arange(3)
    with Recorder({id(x): (0, 0), id(part): (1, 8)}, 2) as recorder:
        o = torch.empty(5)
        recorder.launch(kernel, 6, (x, part, o, 0.5, 2), {"BLOCK": 16, "K": 3}, 4, 1)
        recorder.launch(kernel, 6, (x, table, o, 0.5, 2), {"BLOCK": 16, "K": 3}, 4, 1)
    made = recorder.replay((o,), x)
    assert made is not None
    assert isinstance(made.launches[0], CompiledLaunch)
    a, b = torch.zeros(4), torch.zeros(4)
    (out,) = made([a, b], [a.data_ptr(), b.data_ptr()])
    head = (6, 1, 1, 0, 77, (4, 1, 0), None, None, None)
    assert kernel.seen[0] == (*head, a.data_ptr(), b.data_ptr() + 8, out.data_ptr(), 0.5, 2, 3, 16)
    assert kernel.seen[1][10] is table
    assert out.shape == (5,)
    assert out is not o
    assert kernel.slow == 2


def test_a_profiler_of_triton_sees_its_own_launches() -> None:
    kernel = FakeKernel()
    x = torch.zeros(4)
    with Recorder({id(x): (0, 0)}, 1) as recorder:
        o = torch.empty(5)
        recorder.launch(kernel, 6, (x, x, o, 0.5, 2), {"BLOCK": 16, "K": 3}, 4, 1)
    made = recorder.replay((o,), x)
    assert made is not None

    with profiled():
        made([x], [x.data_ptr()])
    assert (kernel.slow, len(kernel.seen)) == (2, 0)


def test_operations_between_launches_are_carried_out_again() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with Recorder({id(x): (0, 0)}, 1) as recorder:
        o = torch.zeros(4)
        y = (x + o).view(2, 2).sum(1)
        z = torch.cat([y, y * 3.0])
    made = recorder.replay((z, o), x)
    assert made is not None
    other = x + 10
    found = made([other], [other.data_ptr()])
    assert torch.equal(found[0], torch.tensor([23.0, 27.0, 69.0, 81.0]))
    assert torch.equal(found[1], torch.zeros(4))


def test_what_depends_on_data_or_changes_it_is_not_replayed() -> None:
    x = torch.ones(4)
    strange = torch.ones(4)  # of no leaf: another call may have another
    works: list[Callable[[], Tensor]] = [
        lambda: torch.zeros(4) + x[0].item(),
        lambda: torch.zeros(4).add_(x),
        lambda: x + strange,
        lambda: torch.topk(x, 2)[0],
        lambda: torch.rand(4),
    ]
    for work in works:
        with Recorder({id(x): (0, 0)}, 1) as recorder:
            o = work()
        assert recorder.replay((o,), x) is None
    with Recorder({id(x): (0, 0)}, 1) as recorder:
        o = torch.zeros(4)
    made = recorder.replay((o,), x)
    assert made is not None
    assert torch.equal(made([x], [0])[0], torch.zeros(4))
    assert recorder.replay((x,), x) is None


def test_what_is_between_kernels_is_one_buffer() -> None:
    cpu = torch.device("cpu")
    sizes = [((5,), torch.float32), ((3, 7), torch.bfloat16), ((2,), torch.float32), ((1,), torch.int64)]
    made = [Buffer(shape, kind, cpu, False) for shape, kind in sizes]
    made.append(Buffer((4,), torch.float32, cpu, True))
    kept, moved = _together(made, {2})
    assert kept == [made[2], made[4], Buffer((768,), torch.uint8, cpu, False)]
    assert moved == [(2, 0), (2, 256), (0, 0), (2, 512), (1, 0)]
