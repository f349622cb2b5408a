"""Calls as careless code makes them: odd memory, mixed gradients, modes, hooks, nothing, wrong things."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_cases import OWN, call, inputs_of, op_of, worst
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.op import CompiledOp

NAMES = ["gated_delta_rule", "mlstm", "lstm", *OWN]


def case(name: str) -> tuple[CompiledOp, list[Tensor], list[Tensor]]:
    op = op_of(name, backend="torch")
    return op, *inputs_of(op, 2, 7, 2, 4, 3)


def cut(op: CompiledOp, tensors: list[Tensor], at: Any) -> list[Tensor]:
    return [x[at] if d.timed else x for x, d in zip(tensors, op.spec.inputs, strict=True)]


def every_other(x: Tensor) -> Tensor:
    """The same numbers, in every other place of every axis."""
    room = torch.full([2 * n for n in x.shape], torch.nan, dtype=x.dtype)
    view = room[tuple(slice(1, None, 2) for _ in x.shape)]
    return view.copy_(x)


def loss_of(results: list[Tensor]) -> Tensor:
    return torch.stack([x.sin().sum() for x in results]).sum()


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_any_strides(name: str) -> None:
    op, tensors, states = case(name)
    wanted = call(op, tensors, states)
    for turn in (every_other, lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0)):
        assert worst(call(op, list(map(turn, tensors)), list(map(turn, states))), wanted) < 1e-6
    one = [x[:1].expand_as(x) if d.timed else x for x, d in zip(tensors, op.spec.inputs, strict=True)]
    o = call(op, one, None)[0]
    assert worst([o[:1]], [o[1:]]) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_for_one_input_at_a_time(name: str) -> None:
    op, tensors, states = case(name)
    leaves = [x.clone().requires_grad_() for x in (*tensors, *states)]
    every = torch.autograd.grad(loss_of(call(op, leaves[: len(tensors)], leaves[len(tensors) :])), leaves)
    for i, wanted in enumerate(every):
        given = [x.clone().requires_grad_(n == i) for n, x in enumerate((*tensors, *states))]
        results = call(op, given[: len(tensors)], given[len(tensors) :])
        torch.autograd.backward(loss_of(results))
        assert [x.grad is not None for x in given] == [n == i for n in range(len(given))]
        found = given[i].grad
        assert found is not None
        assert worst([found], [wanted]) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_do(name: str) -> None:
    op, tensors, states = case(name)
    o, *last = call(op, cut(op, tensors, slice(0, 0)), [s[:0] for s in states])
    assert o.shape[0] == 0
    assert all(x.shape == s[:0].shape for x, s in zip(last, states, strict=True))
    none = [x.clone().requires_grad_() for x in (*cut(op, tensors, (slice(None), slice(0, 0))), *states)]
    o, *last = call(op, none[: len(tensors)], none[len(tensors) :])
    assert o.shape[1] == 0
    assert all(torch.equal(x, s) for x, s in zip(last, states, strict=True))
    grads = torch.autograd.grad([o.sum(), *(x.sum() for x in last)], none, allow_unused=True)
    for grad, x in zip(grads, none, strict=True):
        assert grad is None or grad.shape == x.shape
    assert all(g is not None and bool((g == 1).all()) for g in grads[len(tensors) :])
    with pytest.raises(ArgumentError, match="heads"):
        call(op, [x[:, :, :0] if d.timed else x for x, d in zip(tensors, op.spec.inputs, strict=True)], None)


@pytest.mark.parametrize("name", NAMES)
def test_modes_hooks_and_subclasses(name: str) -> None:
    op, tensors, states = case(name)
    wanted = call(op, tensors, states)
    leaves = [x.clone().requires_grad_() for x in tensors]
    with torch.set_grad_enabled(False):
        assert not call(op, leaves, states)[0].requires_grad
        with torch.enable_grad():
            assert call(op, leaves, states)[0].requires_grad
    with torch.inference_mode():
        made = [x.clone() for x in tensors]
        assert worst(call(op, made, states), wanted) < 1e-6
    assert worst(call(op, made, states), wanted) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        found = call(op, tensors, states)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]
    assert worst(found, wanted) < 1e-6

    class Own(Tensor):
        pass

    assert worst(call(op, [x.as_subclass(Own) for x in tensors], states), wanted) < 1e-6
    seen: list[int] = []
    for i, x in enumerate(leaves):
        x.register_hook(lambda g, i=i: seen.append(i))  # type: ignore[no-untyped-call]
    with torch.autograd.graph.save_on_cpu():
        o = call(op, leaves, states)[0]
    torch.autograd.backward(o.sum(), retain_graph=True)
    once = [x.grad.clone() for x in leaves if x.grad is not None]
    torch.autograd.backward(o.sum())
    assert worst([x.grad for x in leaves if x.grad is not None], [2 * g for g in once]) < 1e-6
    assert sorted(set(seen)) == list(range(len(leaves)))
    changed = [x.clone().requires_grad_() * 1 for x in tensors]
    o = call(op, changed, states)[0]
    changed[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(o.sum())


@pytest.mark.parametrize("name", ["gated_delta_rule", "mlstm", "own_scan"])
def test_what_is_no_tensor_of_numbers_is_named(name: str) -> None:
    op, tensors, states = case(name)
    first, rest = tensors[0], tensors[1:]
    given = op.spec.inputs[0].name
    wrong: tuple[Any, ...] = (
        first.long(), first > 0, first.to(torch.complex64), first.to(torch.float8_e4m3fn), first.numpy(),
        None, first.to_sparse(), first.to("meta"), 1.0, [first],
    )  # fmt: skip
    for bad in wrong:
        with pytest.raises(ArgumentError, match=rf"{op.spec.name}: (\w+ is on|{given}|\w+ must)"):
            call(op, [bad, *rest], states)
    with pytest.raises(ArgumentError, match="dense tensor, got layout"):
        call(op, tensors, [states[0].to_sparse(), *states[1:]])
    with pytest.raises(ArgumentError, match="output_final_state must be True or False, got a str"):
        op(*tensors, output_final_state="yes")
    one = cut(op, tensors, slice(0, 1))
    for cuts in ([0, 5, 3, 7], [1, 4, 7], [0, 3, 6], [0, 3, 8], [0, -1, 7], [0]):
        with pytest.raises(ArgumentError, match="cu_seqlens must rise from 0 to T = 7"):
            op(*one, cu_seqlens=torch.tensor(cuts))
    for offsets in (torch.tensor([0.0, 7.0]), [0, 7], torch.tensor([0, 7], dtype=torch.int16),
                    torch.tensor([[0, 7]]), torch.tensor(7), torch.zeros(0, dtype=torch.int32),
                    torch.tensor([0, 7], device="meta"), torch.tensor([0, 7]).to_sparse()):  # fmt: skip
        with pytest.raises(ArgumentError, match="cu_seqlens"):
            op(*one, cu_seqlens=offsets)
    strided = torch.tensor([0, 9, 3, 9, 7, 9])[::2]
    assert torch.equal(op(*one, cu_seqlens=strided), op(*one, cu_seqlens=strided.contiguous()))
