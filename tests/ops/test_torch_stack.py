"""Recurrences of every class inside of what torch users have: compile, export, autocast, checkpoints."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_cases import CLASSES, OWN, call, inputs_of, op_of, random_like, with_gradients
from torch import Tensor, nn
from torch.library import opcheck

import linalg_dsl
from linalg_dsl.ops import library

SOME = ("gated_delta_rule", "looking_back", "own_scan")


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_inductor_takes_any_length_and_batch_without_a_third_graph() -> None:
    op = op_of("gated_delta_rule", backend="torch")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def model(tensors: list[Tensor], states: list[Tensor]) -> list[Tensor]:
        o, last = call(op, tensors, states)
        return [2 * o, last]

    fast: Any = torch.compile(model, fullgraph=True)
    for B, T in ((2, 40), (3, 41), (4, 130), (2, 7), (5, 64)):
        tensors, states = inputs_of(op, B, T, 2, 5, 3)
        leaves = [x.requires_grad_() for x in (*tensors, *states)]
        found, wanted = (f(tensors, states) for f in (fast, model))
        grads = [torch.autograd.grad([x.sin().sum() for x in r], leaves) for r in (found, wanted)]
        for got, want in zip([*found, *grads[0]], [*wanted, *grads[1]], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_batch_of_one_has_one_graph_for_one_chunk_and_many() -> None:
    """What kernels leave per chunk lies in a row: that there is one chunk would be taken for a constant."""
    op = op_of("simple_gla", backend="triton", chunk_size=64)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast: Any = torch.compile(op, fullgraph=True, backend="aot_eager")
    for T in (70, 50, 64, 131):
        tensors, _ = inputs_of(op, 1, T, 2, 4, 4)
        leaves = [x.requires_grad_() for x in tensors]
        found, wanted = (torch.autograd.grad(f(*leaves).sin().sum(), leaves) for f in (fast, op))
        assert same([*found], [*wanted])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("name", ["mixed_reads", "value_erase", "own_scan", "both_sides"])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(name: str, packed: bool) -> None:
    op = op_of(name, backend="torch", chunk_size=16)
    tensors, states = inputs_of(op, 1 if packed else 2, 20, 2, 5, 3, N=3 if packed else None)
    offsets = torch.tensor([0, 0, 7, 20]) if packed else None
    given = [x.requires_grad_() for x in (*tensors, *states)]
    handle = getattr(torch.ops.linalg_dsl, op.operator("torch").name).default
    consts = [math.nan] * len(op.spec.consts)
    assert set(opcheck(handle, (*given, consts, offsets, True, True)).values()) == {"SUCCESS"}


class Mixer(nn.Module):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.op = op_of(name, backend="torch", **options)

    def forward(self, tensors: list[Tensor], states: list[Tensor]) -> list[Tensor]:
        return call(self.op, tensors, states)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_export_with_any_batch_and_length(name: str, reverse: bool) -> None:
    model = Mixer(name, reverse=reverse)
    tensors, states = inputs_of(model.op, 2, 40, 2, 5, 3)
    batch, time = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("time", min=2, max=4096)
    shapes = (
        [{0: batch, 1: time} if d.timed else {} for d in model.op.spec.inputs],
        [{0: batch} for _ in states],
    )
    program = torch.export.export(model, (tensors, states), dynamic_shapes=shapes)
    longer = inputs_of(model.op, 3, 77, 2, 5, 3)
    assert same(program.module()(*longer), model(*longer))


@pytest.mark.parametrize("name", SOME)
def test_autocast_changes_nothing(name: str) -> None:
    op = op_of(name, backend="torch")
    given = inputs_of(op, 2, 20, 2, 5, 3)
    results, grads = with_gradients(op, *given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, d_mixed = with_gradients(op, *given)
    assert same([*mixed, *d_mixed], [*results, *grads])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_checkpoints_give_the_same_gradients(name: str, reentrant: bool) -> None:
    op = op_of(name, backend="torch", reverse=True)
    tensors, states = inputs_of(op, 1, 20, 2, 5, 3, N=2)
    offsets = torch.tensor([0, 7, 20])

    def checkpointed(*x: Tensor, initial_state: Any, output_final_state: bool) -> Any:
        count = len(x)
        states = [initial_state] if isinstance(initial_state, Tensor) else initial_state

        def run(*y: Tensor) -> Any:
            o, last = op(
                *y[:count],
                initial_state=y[count] if len(y) == count + 1 else y[count:],
                output_final_state=True,
                cu_seqlens=offsets,
            )
            return (o, last) if isinstance(last, Tensor) else (o, *last)

        o, *lasts = torch.utils.checkpoint.checkpoint(run, *x, *states, use_reentrant=reentrant)
        return o, lasts

    results, grads = with_gradients(op, tensors, states, cu_seqlens=offsets)
    leaves = [x.clone().requires_grad_() for x in (*tensors, *states)]
    again = call(checkpointed, leaves[: len(tensors)], leaves[len(tensors) :])
    torch.autograd.backward(again, random_like(again))  # the reentrant kind takes no other way
    assert same([*again, *(x.grad for x in leaves if x.grad is not None)], [*results, *grads])


@pytest.mark.parametrize("name", CLASSES)
def test_strides_do_not_matter(name: str) -> None:
    """Transposed, with gaps, from the middle of a larger tensor, and one head or row for all."""
    op = op_of(name, backend="torch")
    tensors, states = inputs_of(op, 2, 20, 2, 5, 3)

    def check(strange: list[Tensor], odd: list[Tensor]) -> None:
        found, d_found = with_gradients_in_place(op, strange, odd)
        plain = [x.detach().contiguous() for x in strange], [x.detach().contiguous() for x in odd]
        wanted, d_wanted = with_gradients(op, *plain)
        assert same([*found, *d_found], [*wanted, *d_wanted])

    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x for x in tensors]
    check(turned, [s.transpose(0, 1).contiguous().transpose(0, 1) for s in states])
    gaps = [torch.stack([x, x], -1)[..., 0] for x in tensors]
    check(gaps, [torch.stack([s, s], -1)[..., 0] for s in states])
    inner = [
        torch.cat([x, x, x], 1)[:, 7:27] if d.timed else x
        for x, d in zip(tensors, op.spec.inputs, strict=True)
    ]
    check(inner, states)
    spread = [x[:1].expand_as(x) if d.timed else x for x, d in zip(tensors, op.spec.inputs, strict=True)]
    check(spread, [s[:, :1].expand_as(s) for s in states])


def with_gradients_in_place(op: Any, tensors: list[Tensor], states: list[Tensor]) -> Any:
    """As ``with_gradients``, of views with the strides that they have."""
    leaves = [x.detach().requires_grad_() for x in (*tensors, *states)]
    strides = [x.stride() for x in (*tensors, *states)]
    assert [x.stride() for x in leaves] == strides
    results = call(op, leaves[: len(tensors)], leaves[len(tensors) :])
    return [x.detach() for x in results], list(torch.autograd.grad(results, leaves, random_like(results)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_copies_are_the_same_op(name: str, reverse: bool) -> None:
    op = op_of(name, backend="torch", reverse=reverse)
    given = inputs_of(op, 1, 9, 2, 5, 3)
    model = Mixer(name, reverse=reverse)
    for other in (
        copy.deepcopy(op),
        copy.copy(op),
        pickle.loads(pickle.dumps(op)),
        copy.deepcopy(model).op,
        pickle.loads(pickle.dumps(model)).op,
    ):
        assert (other.spec, other.options) == (op.spec, op.options)
        assert same(call(other, *given), call(op, *given))


def test_states_are_saved_and_copied(tmp_path: Path) -> None:
    """Named tuples too, whose classes are made as they are needed: in checkpoints, between processes."""
    for name in ("gated_delta_rule", "looking_back"):
        op = op_of(name, backend="torch")
        tensors, _ = inputs_of(op, 1, 9, 2, 5, 3)
        last: Any = op(*tensors, output_final_state=True)[1]
        torch.save({"state": last}, tmp_path / "state.pt")
        for other in (
            torch.load(tmp_path / "state.pt", weights_only=False)["state"],
            pickle.loads(pickle.dumps(last)),
            copy.deepcopy(last),
        ):
            assert type(other) is type(last)
            assert torch.equal(op(*tensors, initial_state=other), op(*tensors, initial_state=last))
        assert isinstance(last, Tensor) or last._fields == op.spec.carried


def test_inference_mode_and_no_grad_keep_nothing() -> None:
    for name in SOME:
        op = op_of(name, backend="torch")
        tensors, states = inputs_of(op, 1, 9, 2, 5, 3)
        wanted = call(op, tensors, states)
        leaves = [x.requires_grad_() for x in tensors]
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                found = call(op, leaves, states)
            assert not any(x.requires_grad for x in found)
            assert same(found, wanted)


def test_a_state_is_no_part_of_the_inputs() -> None:
    """It stays as it is when they are overwritten: by the next tokens, say."""
    for name in CLASSES:
        op = op_of(name, backend="torch")
        for T in (9, 0):
            tensors, states = inputs_of(op, 1, T, 2, 5, 3)
            lasts = call(op, tensors, states)[1:]
            kept = [x.clone() for x in lasts]
            for x in (*tensors, *states):
                x.fill_(7.0)
            assert same(lasts, kept)


def test_threads_may_be_the_first_to_call() -> None:
    """Everything from the derivation on happens in eight threads at once, and is registered once."""
    text = OWN["looking_back"].replace("recurrence looking_back", "recurrence first_of_threads")
    op = linalg_dsl.compile(text.replace("1 + n_t", "3 + n_t"), backend="torch")
    given = inputs_of(op, 1, 20, 2, 5, 3)
    start, results, failures = threading.Barrier(8), [], []

    def run() -> None:
        try:
            start.wait()
            fresh = pickle.loads(pickle.dumps(op))
            results.append(with_gradients(fresh, *given))
            results.append(with_gradients(op, *given))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    first = results[0]
    assert all(same([*r[0], *r[1]], [*first[0], *first[1]]) for r in results)
    names = [n for n in library._REGISTERED if n.startswith("first_of_threads")]
    assert len(names) == len(op.stage_ops)


def test_a_graph_can_be_gone_through_twice() -> None:
    for name in SOME:
        op = op_of(name, backend="torch")
        tensors, states = inputs_of(op, 1, 9, 2, 5, 3)
        leaves = [x.requires_grad_() for x in tensors]
        o = call(op, leaves, states)[0]
        grads = [torch.autograd.grad(o.sum(), leaves, retain_graph=True, allow_unused=True) for _ in range(2)]
        assert same(list(grads[0]), list(grads[1]))
