"""Faults that neighbouring projects had, replayed on recurrences of every class; numbers are their issues."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernel_cases import embedded
from runtime_cases import CLASSES, call, inputs_of, op_of, random_like, with_gradients, worst
from torch import Tensor

import linalg_dsl
from linalg_dsl.ops.op import CompiledOp

GATED = ("simple_gla", "gla", "gated_delta_rule", "mixed_reads", "value_erase", "looking_back", "own_scan")
GROWING = """
recurrence growing
input q, k : [K]
input v : [V]
input g : log gate {axis} in (-inf, 200]
S_t = {gate} S_{{t-1}} + k_t v_tᵀ
o_t = S_tᵀ q_t
"""


def with_gate(op: CompiledOp, tensors: list[Tensor], value: float) -> list[Tensor]:
    return [
        torch.full_like(x, value) if d.kind == "log_gate" else x
        for x, d in zip(tensors, op.spec.inputs, strict=True)
    ]


def exact(op: CompiledOp, tensors: list[Tensor], states: list[Tensor], **options: Any) -> list[Tensor]:
    """Results and gradients of the step loop in float64 on the same numbers."""
    results, grads = with_gradients(
        op.reference, [x.double() for x in tensors], [s.double() for s in states], **options
    )
    return [*results, *grads]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", GATED)
def test_steep_gates_stay_finite(name: str, kind: torch.dtype) -> None:
    """99, 111, 792: -60 or -50 at every step, in lengths that leave ragged chunks."""
    op = op_of(name, backend="torch")
    for T, gate in ((64, -60.0), (65, -50.0)):
        tensors, states = inputs_of(op, 1, T, 2, 8, 6, dtype=kind)
        tensors = with_gate(op, tensors, gate)
        results, grads = with_gradients(op, tensors, states)
        bound = 2e-2 if kind == torch.bfloat16 else 2e-5
        assert worst([*results, *grads], exact(op, tensors, states)) < bound


@pytest.mark.parametrize("name", ["gated_delta_rule", "own_scan"])
def test_kernels_with_steep_gates_stay_finite(name: str) -> None:
    """792: a ragged chunk whose mask would meet an infinity."""
    op = op_of(name, backend="triton", chunk_size=16)
    tensors, states = inputs_of(op, 1, 19, 1, 5, 3)
    tensors = with_gate(op, tensors, -50.0)
    results, grads = with_gradients(op, tensors, states)
    assert worst([*results, *grads], exact(op, tensors, states)) < 5e-5


@pytest.mark.parametrize("name", GATED)
def test_no_decay_is_no_less_accurate(name: str) -> None:
    """104: all gates 0 over many tokens."""
    op = op_of(name, backend="torch")
    tensors, states = inputs_of(op, 1, 300, 1, 8, 6)
    tensors = with_gate(op, tensors, 0.0)
    results = call(op, tensors, states)
    wanted = call(op.reference, [x.double() for x in tensors], [s.double() for s in states])
    assert worst(results, wanted) < 2e-5


@pytest.mark.parametrize(("backend", "T"), [("torch", 64), ("triton", 19)])
@pytest.mark.parametrize(("axis", "gate"), [("", "exp(g_t)"), ("[K]", "diag(exp(g_t))")])
def test_growth_is_what_the_step_loop_has(axis: str, gate: str, backend: str, T: int) -> None:
    """215, 649: positive gates, to infinity where the recurrence goes there, and not before."""
    op = linalg_dsl.compile(GROWING.format(axis=axis, gate=gate), backend=backend)
    (q, k, v, g), states = inputs_of(op, 1, T, 2, 4, 4)
    for value, first in ((2.0, 64), (176.0, 1)):
        gates = torch.zeros_like(g)
        gates[:, :first] = value
        found = call(op, [q, k, v, gates], states)
        wanted = call(op.reference, [x.double() for x in (q, k, v, gates)], [s.double() for s in states])
        limit = torch.finfo(torch.float32).max
        for got, want in zip(found, wanted, strict=True):
            inside = want.abs() < 1e-3 * limit
            assert got[inside].isfinite().all()
            assert worst([got[inside]], [want[inside]]) < 1e-4
            assert (want.abs() < 10 * limit)[got.isfinite()].all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "value_erase", "own_scan"])
def test_every_head_has_its_own_gates(name: str, backend: str) -> None:
    """1084, 1085: three heads are as each is by itself."""
    op = op_of(name, backend=backend, chunk_size=16, invariant=True)
    tensors, states = inputs_of(op, 1, 17, 3, 5, 4)
    results = call(op, tensors, states)
    for h in range(3):
        own = [
            x[:, :, h : h + 1] if d.timed else x[h : h + 1]
            for x, d in zip(tensors, op.spec.inputs, strict=True)
        ]
        alone = call(op, own, [s[:, h : h + 1] for s in states])
        cut = [results[0][:, :, h : h + 1], *(x[:, h : h + 1] for x in results[1:])]
        assert worst(alone, cut) < 1e-5
        assert backend == "torch" or all(torch.equal(a, b) for a, b in zip(alone, cut, strict=True))


@pytest.mark.parametrize("name", CLASSES)
def test_a_loss_of_the_final_state_alone(name: str) -> None:
    """459, 486, 36, 37: gradients that come through the state only, of inputs and of what was handed in."""
    op = op_of(name, backend="torch")
    tensors, states = inputs_of(op, 2, 70, 2, 5, 3, dtype=torch.float64)
    weights = random_like(call(op, tensors, states))
    weights[0].zero_()
    _, grads = with_gradients(op, tensors, states, weights)
    _, wanted = with_gradients(op.reference, tensors, states, weights)
    assert worst(grads, wanted) < 1e-10
    short, last = inputs_of(op, 1, 512, 1, 5, 3, dtype=torch.bfloat16)
    own = random_like(call(op, short, last))
    own[0].zero_()
    _, grads = with_gradients(op, short, last, own)
    doubled = [x.double() for x in short], [s.double() for s in last]
    _, wanted = with_gradients(op.reference, *doubled, [w.double() for w in own])
    for got, want in zip(grads[len(short) :], wanted[len(short) :], strict=True):
        assert worst([got], [want]) < 2e-2


@pytest.mark.parametrize("name", CLASSES)
def test_pieces_and_the_whole_agree_in_gradients_too(name: str) -> None:
    """494, 502, 1140: cut at 1, 63, 64, 65 and before the last, pieces of one to three tokens among them."""
    op = op_of(name, backend="torch")
    tensors, states = inputs_of(op, 1, 70, 2, 4, 3, dtype=torch.float64)
    wanted, d_wanted = with_gradients(op, tensors, states)

    def in_pieces(cuts: list[int], *given: Tensor, initial_state: Any, output_final_state: bool) -> Any:
        state, outputs = initial_state, []
        for a, b in pairwise(cuts):
            part = [x[:, a:b] if d.timed else x for x, d in zip(given, op.spec.inputs, strict=True)]
            o, state = op(*part, initial_state=state, output_final_state=True)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    for cuts in ([0, 1, 3, 6, 70], [0, 63, 64, 65, 70], [0, 69, 70]):
        found, d_found = with_gradients(partial(in_pieces, cuts), tensors, states)
        assert worst([*found, *d_found], [*wanted, *d_wanted]) < 1e-10


@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "value_erase", "own_scan", "both_sides"])
def test_no_state_is_a_state_of_zeros_and_memory_around_is_not_read(name: str) -> None:
    """1003: the same bits with and without the optional argument. 1135, 989, 142: widths that fill no block,
    at odd places in memory, between NaNs."""
    op = op_of(name, backend="triton", chunk_size=16)
    tensors, states = inputs_of(op, 1, 17, 1, 12, 5)
    zeros = [torch.zeros_like(s) for s in states]
    given, d_given = with_gradients(op, tensors, zeros)
    leaves = [embedded(x).requires_grad_() for x in tensors]
    results = call(op, leaves, None)
    grads = torch.autograd.grad(results, leaves, random_like(results))
    for got, want in zip([*results, *grads], [*given, *d_given], strict=False):
        assert torch.equal(got, want)
