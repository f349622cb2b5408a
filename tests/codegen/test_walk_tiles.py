"""Walks that load their tiles by tensor descriptors: the same as by pointers, and where they do not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from module_files import module_of_text
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.codegen.targets import TARGETS, launches
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.op import CompiledOp

ASKED = {"walk": {"tma": 1}}


def compiled(name: str, **options: Any) -> CompiledOp:
    return ld.compile(catalogue_text(name), backend="triton", **options)


def module_of(op: CompiledOp) -> ModuleType:
    return op.stage_ops[0].operator("triton").module


class Watch:
    """Of every walk how many of its tiles came by descriptors."""

    def __init__(self, op: CompiledOp, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, int] = {}
        call: Any = module_of(op).Call
        original = call.descriptors

        def watched(own: Any, kernel: Any, *rest: Any) -> Any:
            out = original(own, kernel, *rest)
            name = kernel.fn.__name__.removeprefix(f"{op.spec.name}_")
            self.found[name] = len(out) if out else 0
            return out

        monkeypatch.setattr(call, "descriptors", watched)


def results(op: CompiledOp, tensors: dict[str, Tensor], state: Tensor | None, **options: Any) -> list[Tensor]:
    """o, the final states, and the gradients of everything; every state begins as ``state``."""
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    first = [] if state is None else [state.clone().requires_grad_() for _ in op.spec.states]
    o, last = op(
        **leaves,
        initial_state=first[0] if len(first) == 1 else first or None,
        output_final_state=True,
        **options,
    )
    lasts = [last] if isinstance(last, Tensor) else [*last]
    torch.manual_seed(0)
    target = sum((x * torch.randn_like(x)).sum() for x in (o, *lasts))
    assert isinstance(target, Tensor)
    return [
        o.detach(),
        *(x.detach() for x in lasts),
        *torch.autograd.grad(target, [*leaves.values(), *first]),
    ]


def alike(one: list[Tensor], other: list[Tensor]) -> None:
    """But for rounding: products of tiles that lie otherwise in memory may add up in another order."""
    for i, (x, y) in enumerate(zip(one, other, strict=True)):
        assert x.shape == y.shape
        off = float((x - y).abs().max()) if x.numel() else 0.0
        assert off <= 1e-5 * (1.0 + float(y.abs().max())), f"result {i} is off by {off}"


def drawn(op: CompiledOp, T: int = 21, H: int = 2, K: int = 20, V: int = 12, B: int = 2) -> dict[str, Tensor]:
    return draw(op.spec, B, T, H, K, V, dtype=torch.float32, seed=3)


def test_both_ways_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole numbers, whose sums are exact in whatever order."""
    plain = compiled("linear_attention", chunk_size=16)
    op = compiled("linear_attention", chunk_size=16, launch=ASKED)
    watch = Watch(op, monkeypatch)
    tensors = {n: (3 * x).round() for n, x in drawn(op, T=37, K=16).items()}
    state = torch.randn(2, 2, 16, 12).mul(3).round()

    def bits(made: CompiledOp) -> list[Tensor]:
        leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        o, last = made(**leaves, initial_state=state, output_final_state=True)
        d_o, d_last = o.detach().round().clamp(-4, 4), last.detach().clamp(-4, 4)
        return [o.detach(), last.detach(), *torch.autograd.grad((o, last), [*leaves.values()], (d_o, d_last))]

    for x, y in zip(bits(op), bits(plain), strict=True):
        assert torch.equal(x, y)
    assert all(watch.found.values())


@pytest.mark.parametrize(
    "name",
    ["linear_attention", "simple_gla", "gla", "gated_delta_rule", "rwkv7", "gated_oja", "mdn"],
)
def test_both_ways_give_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T is no multiple of the chunk, K and V none of their blocks."""
    plain, op = compiled(name, chunk_size=16), compiled(name, chunk_size=16, launch=ASKED)
    watch = Watch(op, monkeypatch)
    tensors = drawn(op)
    state = torch.randn(2, 2, 20, 12)
    alike(results(op, tensors, state), results(plain, tensors, state))
    assert set(watch.found) == {
        k.name for k in op.plan.kernels.forward + op.plan.kernels.backward if k.family == "walk"
    }
    assert all(watch.found.values())


def test_blocks_and_shared_heads_are_found_by_their_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"walk": {"tma": 1, "block": 16}}
    plain = compiled("gated_delta_rule", chunk_size=16, launch={"walk": {"block": 16}})
    op = compiled("gated_delta_rule", chunk_size=16, launch=sizes)
    watch = Watch(op, monkeypatch)
    tensors = drawn(op, T=17, H=2, K=20, V=24)
    tensors["q"], tensors["k"] = tensors["q"][:, :, :1].contiguous(), tensors["k"][:, :, :1].contiguous()
    state = torch.randn(2, 2, 20, 24)
    alike(results(op, tensors, state), results(plain, tensors, state))
    assert all(watch.found.values())


def test_two_levels_begin_inside_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"chunk_size": 16, "schedule": "two_level", "super_chunk": 2}
    plain, op = compiled("simple_gla", **options), compiled("simple_gla", **options, launch=ASKED)
    watch = Watch(op, monkeypatch)
    tensors = drawn(op, T=60)
    state = torch.randn(2, 2, 20, 12)
    alike(results(op, tensors, state), results(plain, tensors, state))
    assert watch.found["fwd_walk"]


def refused(
    op: CompiledOp, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """That a call loads by pointers, and gives the bits that it then does."""
    watch = Watch(op, monkeypatch)
    plain = op.with_options(launch=())
    for x, y in zip(
        results(op, tensors, None, **options), results(plain, tensors, None, **options), strict=True
    ):
        assert torch.equal(x, y)
    assert watch.found
    assert not any(watch.found.values())


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule"])
def test_packed_sequences_have_whole_chunks_by_boxes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the end of a sequence stands the next one, not the end of the tensor: of NaN none comes over."""
    op, plain = compiled(name, chunk_size=16, launch=ASKED), compiled(name, chunk_size=16)
    watch = Watch(op, monkeypatch)
    offsets = torch.tensor([0, 0, 39, 46, 78, 100], dtype=torch.int32)
    tensors, state = drawn(op, B=1, T=100), torch.randn(5, 2, 20, 12)
    alike(results(op, tensors, state, cu_seqlens=offsets), results(plain, tensors, state, cu_seqlens=offsets))
    assert all(watch.found.values())
    for x in tensors.values():
        x[:, 39:46] = float("nan")
    o, d_state, d_q = (results(op, tensors, state, cu_seqlens=offsets)[i] for i in (0, -1, 2))
    inside = torch.zeros(100, dtype=torch.bool)
    inside[39:46] = True
    for x in (o, d_q):
        assert x[:, ~inside].isfinite().all()
        assert x[:, inside].isnan().any()
    assert d_state[[0, 1, 3, 4]].isfinite().all()


def test_offsets_that_fall_let_no_box_or_pointer_leave_the_tensors() -> None:
    """On a GPU nothing looks at them: a sequence of a negative length has no chunks, whole or ragged."""
    op = compiled("simple_gla", chunk_size=16, launch=ASKED)
    module = module_of(op)
    tensors = tuple(drawn(op, B=1, T=100).values())
    wrong = torch.tensor([0, 90, 3, 100], dtype=torch.int32)
    o, last, _ = module.forward(tensors, (None,), (1.0,) * len(module.CONSTS), wrong, True, True)
    assert o.isfinite().all()
    assert not last[0][1].any()  # as of an empty sequence


def test_rows_that_are_no_multiple_of_16_bytes_are_loaded_by_pointers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = compiled("linear_attention", chunk_size=16, launch=ASKED)
    refused(op, drawn(op, K=18), monkeypatch)


def test_tensors_that_begin_between_16_bytes_are_loaded_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    op = compiled("linear_attention", chunk_size=16, launch=ASKED)
    watch = Watch(op, monkeypatch)
    tensors = drawn(op, T=20)
    room = torch.empty(tensors["q"].numel() + 1)
    odd = room[1:].view_as(tensors["q"]).copy_(tensors["q"])
    assert odd.data_ptr() % 16
    alike([op(**{**tensors, "q": odd})], [op(**tensors)])
    assert watch.found["fwd_walk"]  # of the second call
    op(**{**tensors, "q": odd})
    assert not watch.found["fwd_walk"]


def test_a_loop_without_stages_is_loaded_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    op = compiled("linear_attention", chunk_size=16, launch={"walk": {"tma": 1, "stages": 1}})
    watch = Watch(op, monkeypatch)
    op(**drawn(op, T=20))
    assert watch.found == {"fwd_walk": 0}


def test_chunks_shorter_than_their_tiles_are_loaded_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    op = compiled("delta_rule", launch=ASKED)
    watch = Watch(op, monkeypatch)
    tensors = drawn(op, T=17, H=1, B=1, K=4, V=4)
    alike(results(op, tensors, None), results(op.with_options(launch=()), tensors, None))
    assert not any(watch.found.values())


def test_empty_calls_have_no_descriptors() -> None:
    op = compiled("linear_attention", launch=ASKED)
    state = torch.randn(2, 2, 20, 12)
    o, last = op(**drawn(op, T=0), initial_state=state, output_final_state=True)
    assert o.shape == (2, 0, 2, 12)
    assert torch.equal(last, state)


def test_a_call_is_replayed_with_descriptors_of_its_tensors() -> None:
    op = compiled("gla", chunk_size=16, launch=ASKED)
    plain = op.with_options(launch=())
    for seed in range(4):
        tensors = draw(op.spec, 2, 21, 3, 20, 12, dtype=torch.float32, seed=seed)
        alike([op(**tensors)], [plain(**tensors)])


def test_an_exported_file_has_both_ways(tmp_path: Path) -> None:
    op = compiled("simple_gla", chunk_size=16, launch=ASKED)
    path = op.export(tmp_path / "described.py")
    exported: Any = module_of_text(tmp_path, "described", path.read_text(encoding="utf-8"))
    tensors = drawn(op)
    alike([exported.simple_gla(*tensors.values())], [op.with_options(launch=())(**tensors)])


TRAIN: dict[str, Any] = {
    "key": 128, "value": 128, "dtype": "bfloat16", "batch": 8, "length": 2048, "heads": 16
}  # fmt: skip


def described(op: CompiledOp, target: str = "sm_90", **shape: Any) -> dict[str, tuple[int, int, int]]:
    """(block, warps, stages) of every walk of a call that loads by descriptors."""
    return {
        x.kernel.fn.__name__.removeprefix(f"{op.spec.name}_"): (dict(x.constants)["BLOCK"], x.warps, x.stages)
        for x in launches(op.module_text("triton"), TARGETS[target], **{**TRAIN, **shape})
        if dict(x.constants).get("TMA")
    }


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (
            "gated_delta_rule",
            {"fwd_walk": (64, 4, 3), "bwd_forward_k": (128, 8, 3), "bwd_reverse_k": (64, 4, 2)},
        ),
        ("comba", {"bwd_forward_k": (128, 8, 3), "bwd_reverse_k": (64, 4, 2)}),
        ("simple_gla", {"bwd_forward_k": (64, 4, 3)}),  # (128, 8, 3) takes more memory than there is
        ("linear_attention", {"bwd_forward_k": (128, 8, 3), "bwd_reverse_v": (128, 8, 3)}),
        ("delta_rule", {"fwd_walk": (64, 4, 3)}),
        ("kda", {}),
    ],
)
def test_walks_that_gained_by_descriptors_take_them_at_their_best_sizes(
    name: str, sizes: dict[str, tuple[int, int, int]]
) -> None:
    op = compiled(name)
    assert described(op) == sizes
    assert described(op, "sm_100") == described(op, "gfx942") == described(op, "sm_80") == {}
    off = op.with_options(launch=ld.compile(op.spec, launch={"walk": {"tma": 0}}).options.launch)
    assert "DESCRIBED" not in off.module_text("triton")


@pytest.mark.usefixtures("compiling")
def test_unasked_only_where_registers_are_short() -> None:
    op = compiled("gated_delta_rule")
    assert set(described(op, key=256, value=256)) == {"bwd_forward_k"}
    assert described(compiled("linear_attention"), key=256, value=256) == {}
    assert described(op, key=64, value=64) == {}
    assert described(op, batch=1, length=32768) == {}  # blocks of 16
    assert described(op, dtype="float32") == {}
    assert described(op, key=100) == {}  # rows of 200 bytes
    assert described(compiled("gated_delta_rule", invariant=True)) == {}
    asked = compiled("gated_delta_rule", launch=ASKED)
    assert len(described(asked, key=64, value=64)) == 4
    assert described(asked, key=100) == {}


@pytest.mark.usefixtures("compiling")
def test_calls_without_descriptors_have_the_sizes_of_pointers() -> None:
    """Of rows that are no whole 16 bytes, say: registers are enough for fewer numbers beside addresses."""
    op, plain = compiled("gated_delta_rule"), compiled("gated_delta_rule", launch={"walk": {"tma": 0}})
    for shape in ({"key": 100}, {"key": 64, "value": 64}, {"batch": 1}):
        found, other = (
            [
                (x.kernel.fn.__name__, dict(x.constants).get("BLOCK"), x.warps, x.stages)
                for x in launches(each.module_text("triton"), TARGETS["sm_90"], **{**TRAIN, **shape})
            ]
            for each in (op, plain)
        )
        assert found == other


@pytest.mark.parametrize(
    ("target", "some"), [("sm_80", False), ("sm_90", True), ("sm_100", True), ("gfx942", False)]
)
def test_devices_without_such_copies_load_by_pointers(
    target: str, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    text = compiled("delta_rule", launch=ASKED).module_text("triton")
    call: dict[str, Any] = {
        "key": 128,
        "value": 64,
        "dtype": "bfloat16",
        "batch": 2,
        "length": 100,
        "heads": 4,
    }
    found = [x for x in launches(text, TARGETS[target], **call) if "TMA" in dict(x.constants)]
    assert found
    for launch in found:
        tiles = {n: kind for n, kind in launch.signature if kind.startswith("tensordesc")}
        assert dict(launch.constants)["TMA"] == bool(tiles) == some
    if some:
        walk = next(x for x in found if x.kernel.fn.__name__.endswith("fwd_walk"))
        kinds = dict(walk.signature)
        chunk, block = (dict(walk.constants)[n] for n in ("C", "BLOCK"))
        assert kinds["tile_k"] == f"tensordesc<bf16[1, 1, {chunk}, 128]>"
        assert kinds["tile_v"] == f"tensordesc<bf16[1, 1, {chunk}, {block}]>"


def test_explain_says_how_tiles_are_loaded() -> None:
    op = ld.compile(ld.ops.gla.spec, launch={"fwd_walk": {"tma": 1}})
    shape: dict[str, Any] = {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128}
    lines = op.plan.explain(**shape).schedule
    start = next(i for i, line in enumerate(lines) if line.startswith("fwd_walk"))
    assert any("TMA" in line and "descriptors" in line for line in lines[start : start + 13])
    other = op.plan.explain(**shape, target="sm_80").schedule
    assert any("sm_80 has no such copies" in line for line in other)
    assert not any("TMA" in line for line in ld.compile(ld.ops.gla.spec).plan.explain(**shape).schedule)


def test_explain_says_why_a_walk_takes_descriptors_unasked() -> None:
    op = ld.compile(ld.ops.gated_delta_rule.spec)
    shape: dict[str, Any] = {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128}

    def lines(kernel: str, **more: Any) -> list[str]:
        found = op.plan.explain(**{**shape, **more}).schedule
        start = next(i for i, line in enumerate(found) if line.startswith(f"{kernel}:"))
        end = next((i for i in range(start + 1, len(found)) if found[i][0] != " "), len(found))
        return [found[start], *(line for line in found[start:end] if "TMA" in line or "addresses" in line)]

    keeps = lines("bwd_forward_k")
    assert "8 warps, 3 stages" in keeps[0]
    assert "128 programs" in keeps[0]
    assert "by descriptors" in keeps[1]
    assert "addresses of 6 tiles" in keeps[2]
    assert "registers are short" in keeps[2]
    assert "4 warps, 2 stages" in lines("bwd_reverse_k")[0]
    assert "leaves registers for addresses" in lines("bwd_forward_k", K=64, V=64)[1]
    assert "whole 16 bytes" in lines("bwd_forward_k", K=100)[1]
    assert "registers are short" in lines("fwd_walk")[2]
    assert len(lines("bwd_reverse_v")) == 1
    assert "only where asked for" in lines("bwd_forward_k", target="sm_100")[1]
    linear = ld.compile(ld.ops.linear_attention.spec).plan.explain(**shape).schedule
    assert any("copies and products alone" in line for line in linear)
