"""Sizes of launches that are asked for: checked when an op is compiled, and what its kernels then have."""

from __future__ import annotations

from typing import Any

import pytest

import linalg_dsl as ld
from linalg_dsl.codegen.launch_sizes import LaunchSizes, joined, read_launches, sizes_of
from linalg_dsl.codegen.targets import TARGETS, launches


def sizes(name: str, **options: Any) -> dict[str, tuple[int, int, int]]:
    """(block, warps, stages) of every kernel on an H200, or (0, ...) where nothing is split."""
    text = ld.compile(getattr(ld.ops, name).spec, backend="triton", **options).module_text("triton")
    call: dict[str, Any] = {"key": 128, "value": 128, "dtype": "bfloat16", "batch": 8, "length": 256}
    found = launches(text, TARGETS["sm_90"], heads=16, **call)
    return {
        x.kernel.fn.__name__.removeprefix(f"{name}_"): (
            dict(x.constants).get("BLOCK", dict(x.constants).get("KB", 0)), x.warps, x.stages
        )
        for x in found
    }  # fmt: skip


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


def test_a_kernel_has_the_sizes_that_it_was_asked_to_have() -> None:
    usual = sizes("gla")
    asked = sizes(
        "gla",
        launch={"walk": {"warps": 8}, "fwd_walk": {"block": 32, "stages": 2}, "fwd_prep": {"block": 16}},
    )
    assert asked["fwd_walk"] == (32, 8, 2)
    assert asked["fwd_prep"] == (16, usual["fwd_prep"][1], 1)
    for name in ("bwd_reverse_v", "bwd_forward_k", "bwd_reverse_k"):
        assert asked[name] == (usual[name][0], 8, usual[name][2])
    assert asked["bwd_gradients"] == usual["bwd_gradients"]


def test_a_block_is_no_wider_than_what_it_splits() -> None:
    found = sizes("mamba1", launch={"step": {"block": 512}})
    assert found["forward"][0] == 128


def test_kernels_of_two_levels_can_be_asked() -> None:
    found = sizes(
        "gla", schedule="two_level", launch={"fwd_super_states": {"warps": 8}, "super_scan": {"warps": 4}}
    )
    assert found["fwd_super_states"][1] == 8
    assert found["super_scan"][1] == 4


def test_the_name_of_a_stage_counts_before_that_of_a_kind() -> None:
    given = read_launches({"walk": {"warps": 8}, "a.fwd_walk": {"warps": 2}, "fwd_walk": {"block": 32}})
    assert sizes_of(given, "a", "fwd_walk", "walk") == LaunchSizes(32, 2)
    assert sizes_of(given, "b", "fwd_walk", "walk") == LaunchSizes(32, 8)
    assert sizes_of(given, "b", "fwd_prep", "prep") == LaunchSizes()


def test_what_was_found_gives_way_to_what_was_asked_for() -> None:
    found = read_launches({"walk": {"tma": 1, "warps": 4}, "fwd_walk": {"block": 32}})
    own = read_launches({"walk": {"warps": 8}, "prep": {"warps": 2}})
    assert dict(joined(found, own)) == {
        "walk": LaunchSizes(warps=8, tma=1), "fwd_walk": LaunchSizes(32), "prep": LaunchSizes(warps=2)
    }  # fmt: skip


def test_explain_says_what_was_asked_for() -> None:
    op = ld.compile(ld.ops.gla.spec, launch={"fwd_walk": {"block": 32, "warps": 8}})
    lines = op.plan.explain(B=8, T=2048, H=16, K=128, V=128).schedule
    at = next(i for i, line in enumerate(lines) if line.startswith("fwd_walk"))
    assert "4 blocks of 32" in lines[at]
    assert "8 warps" in lines[at]
    assert "  block 32, warps 8: as asked for" in lines[at:]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"fwd": {"warps": 4}}, "launch: gla has no kernel 'fwd'; it has fwd_prep, fwd_walk, "),
        ({"walk": {"warp": 4}}, "launch: walk: expected block, warps, stages or tma, got 'warp'"),
        ({"walk": {"warps": 3}}, "launch: walk: warps is one of 1, 2, 4, 8, 16, got 3"),
        ({"walk": {"warps": True}}, "launch: walk: warps is one of 1, 2, 4, 8, 16, got True"),
        ({"fwd_prep": {"stages": 2}}, "launch: fwd_prep: a prep has no loop over chunks, and so no stages"),
        ({"walk": {"tma": 2}}, "launch: walk: tma is one of 0, 1, got 2"),
        ({"prep": {"tma": 1}}, "launch: prep: only walks take tma, which copies tiles of their loops"),
        ({"bwd_gradients": {"tma": 1}}, "launch: bwd_gradients: only walks take tma"),
        ({"walk": {"block": 8}}, "launch: walk: blocks of products are 16 or more, got 8"),
        ({"walk": 4}, "launch: walk: expected a mapping from block, warps, stages, tma to numbers"),
        ([("walk", 4)], "launch: expected a mapping from a kernel's name to its sizes"),
    ],
)
def test_what_cannot_be_is_refused(launch: Any, message: str) -> None:
    with pytest.raises(ld.ArgumentError, match=message.replace("(", r"\(")):
        ld.compile(ld.ops.gla.spec, launch=launch)


def test_other_backends_launch_nothing() -> None:
    with pytest.raises(ld.ArgumentError, match="launch is for the triton backend"):
        ld.compile(ld.ops.gla.spec, backend="torch", launch={"walk": {"warps": 4}})
