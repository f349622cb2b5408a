"""Calls with gradients that are like earlier ones: the same bits as by the operator, and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from op_cases import TEXTS
from replays import count_replays
from torch import Tensor

import linalg_dsl
from linalg_dsl.ops import replay as replay_module
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.op import CompiledOp

CALLS = 4
NAMES = ["gla", "longhorn"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often something was replayed."""
    return count_replays(monkeypatch)


def op_of(name: str) -> CompiledOp:
    return linalg_dsl.compile(TEXTS.get(name) or catalogue_text(name), backend="triton")


def run(op: CompiledOp, seed: int, *, H: int = 2, heads: dict[str, int] | None = None, **options: Any) -> Any:
    """Outputs and gradients of one call, with a loss that takes every output."""
    tensors = draw(op.spec, 1, 7, H, 3, 4, dtype=torch.float32, seed=seed)
    for n, h in (heads or {}).items():
        tensors[n] = tensors[n][:, :, :h]
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    generator = torch.Generator().manual_seed(seed)
    state: Tensor | None = None
    if options.pop("handed", False):
        count = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else 1
        state = torch.randn(count, H, 3, 4, generator=generator).requires_grad_()
    results = op(**leaves, initial_state=state, **options)
    results = [results] if isinstance(results, Tensor) else list(results)
    wanted = [*leaves.values(), *([] if state is None else [state])]
    loss = sum(((x * torch.randn(x.shape, generator=generator)).sum() for x in results), torch.zeros(()))
    grads = torch.autograd.grad(loss, wanted)
    return [x.detach() for x in results], list(grads)


def long_way(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setenv(replay_module.ENVIRONMENT_VARIABLE, "0")
        return run(*args, **options)


def assert_same(found: Any, wanted: Any) -> None:
    for x, y in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"handed": True, "output_final_state": True},
    "packed": {"handed": True, "output_final_state": True, "cu_seqlens": torch.tensor([0, 3, 3, 7])},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_a_replayed_call_are_those_of_the_operator(
    name: str, case: str, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, other, options = op_of(name), op_of(name), CASES[case]
    for seed in range(CALLS):
        assert_same(run(op, seed, **options), long_way(monkeypatch, other, seed, **options))
    # a forward is replayed from the third call on; its backward is first seen in the second, so one later
    assert len(counted) == (CALLS - 2) + (CALLS - 3)


def test_who_watches_launches_sees_those_of_a_call_that_would_be_replayed(counted: list[int]) -> None:
    from linalg_dsl.ops.tune import modules_of, sizes_set, watched

    op = op_of("gla")
    for seed in range(CALLS):
        run(op, seed)
    before = len(counted)
    modules = modules_of(op)
    with watched(modules) as seen:
        run(op, 0)
    assert {name.split("_")[1] for name in seen.launches} == {"fwd", "bwd"}
    with sizes_set(modules, {}):
        run(op, 0)
    assert len(counted) == before
    run(op, 0)
    assert len(counted) == before + 2


def test_sums_over_shared_heads_are_replayed(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    op, other = op_of("gated_delta_rule"), op_of("gated_delta_rule")
    options: dict[str, Any] = {"H": 4, "heads": {"q": 2, "k": 2}}
    for seed in range(CALLS):
        assert_same(run(op, seed, **options), long_way(monkeypatch, other, seed, **options))
    assert len(counted) == (CALLS - 2) + (CALLS - 3)


def test_a_state_that_nobody_uses_and_an_output_that_nobody_uses() -> None:
    op = op_of("gla")
    tensors = {n: x.requires_grad_() for n, x in draw(op.spec, 1, 7, 2, 3, 4, dtype=torch.float32).items()}
    found: list[Any] = []
    for _ in range(CALLS):
        o, state = op(**tensors, output_final_state=True)
        found.append(
            (
                torch.autograd.grad(o.sum(), list(tensors.values()), retain_graph=True),
                torch.autograd.grad(state.sum(), list(tensors.values()), allow_unused=True),
            )
            if len(found) % 2
            else None
        )
    kept = [x for x in found if x is not None]
    for (a, b), (c, d) in pairwise(kept):
        assert all(map(torch.equal, a, c))
        assert all(map(torch.equal, b, d))
    assert not kept[0][1][0].any()  # q does not reach the state


def test_a_second_derivative_is_refused_and_a_changed_input_noticed() -> None:
    op = op_of("gla")
    for seed in range(CALLS):
        tensors = {
            n: x.requires_grad_()
            for n, x in draw(op.spec, 1, 7, 2, 3, 4, dtype=torch.float32, seed=seed).items()
        }
        (d,) = torch.autograd.grad(op(**tensors).square().sum(), tensors["q"], create_graph=True)
        with pytest.raises(RuntimeError, match="no derivative of its own"):
            torch.autograd.grad(d.sum(), tensors["v"])
        o = op(**tensors)
        with torch.no_grad():
            tensors["v"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(o.sum(), tensors["v"])


def test_of_strided_inputs_the_originals_are_kept(counted: list[int]) -> None:
    op = op_of("gla")
    for seed in range(CALLS):
        drawn = draw(op.spec, 1, 7, 2, 3, 4, dtype=torch.float32, seed=seed)
        base = drawn["q"].transpose(1, 2).contiguous().requires_grad_()
        kept: list[int] = []

        def pack(x: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(x.data_ptr())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o = op(**{**drawn, "q": base.transpose(1, 2)})
        assert base.data_ptr() in kept
        (d,) = torch.autograd.grad(o.square().sum(), base)
        again = drawn["q"].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(op(**{**drawn, "q": again}).square().sum(), again)
        assert torch.equal(d, wanted.transpose(1, 2))
    assert counted


def test_checkpoints_autocast_and_one_tensor_given_twice() -> None:
    op = op_of("gla")
    tensors = draw(op.spec, 1, 7, 2, 4, 4, dtype=torch.float32)
    for _ in range(CALLS):
        q = tensors["q"].clone().requires_grad_()
        same = {**tensors, "q": q, "k": q}
        (d,) = torch.autograd.grad(op(**same).sum(), q)
        apart = {**tensors, "q": q, "k": q.detach().clone().requires_grad_()}
        parts = torch.autograd.grad(op(**apart).sum(), [apart["q"], apart["k"]])
        assert torch.allclose(d, parts[0] + parts[1])
        again = torch.utils.checkpoint.checkpoint(lambda x: op(**{**tensors, "q": x}), q, use_reentrant=False)
        (e,) = torch.autograd.grad(again.sum(), q)
        assert torch.equal(e, torch.autograd.grad(op(**{**tensors, "q": q}).sum(), q)[0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (f,) = torch.autograd.grad(op(**{**tensors, "q": q}).sum(), q)
        assert torch.equal(e, f)
