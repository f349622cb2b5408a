"""Causality, equal runs and independence of the batch: values over the whole catalogue, bits in kernels."""

from __future__ import annotations

import pytest
import torch
from runtime_cases import KERNELS, OWN, call, inputs_of, op_of, random_like, with_gradients, worst
from torch import Tensor

from linalg_dsl.ops import catalogue_names
from linalg_dsl.ops.op import CompiledOp

CUT = 13
LENGTH = 20


def other_future(op: CompiledOp, tensors: list[Tensor]) -> list[Tensor]:
    """The same tokens before the cut and, from there on, those of another draw."""
    others = inputs_of(op, tensors[0].shape[0], LENGTH, 2, 4, 3, seed=50, dtype=tensors[0].dtype)[0]
    return [
        torch.cat([x[:, :CUT], y[:, CUT:]], 1) if d.timed else x
        for x, y, d in zip(tensors, others, op.spec.inputs, strict=True)
    ]


def prefix_loss(results: list[Tensor]) -> list[Tensor]:
    """Cotangents of the outputs before the cut alone."""
    weights = random_like(results)
    weights[0][:, CUT:] = 0
    return [weights[0], *(torch.zeros_like(w) for w in weights[1:])]


@pytest.mark.parametrize("name", [*catalogue_names(), *OWN])
def test_the_future_and_the_rest_of_the_batch_change_nothing(name: str) -> None:
    op = op_of(name, backend="torch", chunk_size=8)
    tensors, states = inputs_of(op, 2, LENGTH, 2, 4, 3, dtype=torch.float64)
    results, grads = with_gradients(op, tensors, states)
    again, d_again = with_gradients(op, tensors, states)
    assert all(torch.equal(a, b) for a, b in zip([*results, *grads], [*again, *d_again], strict=True))

    weights = prefix_loss(results)
    _, before = with_gradients(op, tensors, states, weights)
    changed = other_future(op, tensors)
    later, after = with_gradients(op, changed, states, weights)
    assert worst([later[0][:, :CUT]], [results[0][:, :CUT]]) < 1e-11
    for d, e, x in zip(before, after, [*op.spec.inputs, *states], strict=True):
        timed = getattr(x, "timed", False)
        assert worst([e[:, :CUT] if timed else e], [d[:, :CUT] if timed else d]) < 1e-10
        assert not timed or not (d[:, CUT:].any() or e[:, CUT:].any())

    one = [x[1:] if d.timed else x for x, d in zip(tensors, op.spec.inputs, strict=True)]
    assert worst(call(op, one, [s[1:] for s in states]), [x[1:] for x in results]) < 1e-11


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_do_not_see_the_future_in_any_bit(name: str) -> None:
    """One chunk of 16 tokens and a ragged one; also fewer tokens than before."""
    op = op_of(name, backend="triton", chunk_size=16, invariant=True)
    tensors, states = inputs_of(op, 1, LENGTH, 1, 4, 3)
    changed = inputs_of(op, 1, LENGTH, 1, 4, 3, seed=50)[0]
    timed = [d.timed for d in op.spec.inputs]
    mixed = [
        torch.cat([x[:, :CUT], y[:, CUT:]], 1) if t else x
        for x, y, t in zip(tensors, changed, timed, strict=True)
    ]
    short = [x[:, :CUT] if t else x for x, t in zip(tensors, timed, strict=True)]
    weights = prefix_loss(call(op, tensors, states))
    results, grads = with_gradients(op, tensors, states, weights)
    cut = [weights[0][:, :CUT], *weights[1:]]
    for other, those in ((mixed, weights), (short, cut)):
        found, d_found = with_gradients(op, other, states, those)
        assert torch.equal(found[0][:, :CUT], results[0][:, :CUT])
        for i, (d, e) in enumerate(zip(grads, d_found, strict=True)):
            if i < len(timed) and timed[i]:
                assert torch.equal(e[:, :CUT], d[:, :CUT]), op.spec.inputs[i].name
                assert not e[:, CUT:].any()
            else:
                assert torch.equal(e, d)
