"""States go in and out of a call as one tensor or as a named tuple; modules take and give tuples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from op_cases import compiled
from torch.library import opcheck

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import Equation, RecurrenceSpec, State
from linalg_dsl.ops.carried import given_states, start_state
from linalg_dsl.ops.library import register
from linalg_dsl.ops.states import pack_states, state_tuple

TWO_SUMS = """
import torch

NAME = "two_sums"
BACKEND = "torch"
INPUTS = ("q", "k", "v", "g", "beta")
CONSTS = ()
TIMED = (True, True, True, True, True)
STATES = ("S", "n\\u0302")
OUTPUT_DIMS = ("V",)


def forward(tensors, initial_states, consts, cu_seqlens, output_final_state, save, dry=False):
    v, beta = tensors[2], tensors[4]
    finals = tuple(x.sum(1) if s is None else x.sum(1) + s for x, s in zip((v, beta), initial_states))
    return v * beta[..., None], finals if output_final_state else None, []


def backward(tensors, initial_states, consts, cu_seqlens, residuals, d_o, d_finals, dry=False):
    v, beta = tensors[2], tensors[4]
    d_v, d_beta = d_o * beta[..., None], (d_o * v).sum(-1)
    for d, whole in zip((d_v, d_beta), d_finals):
        if whole is not None:
            d += whole[:, None]
    zeros = [torch.zeros_like(x) for x in tensors]
    zeros[2], zeros[4] = d_v, d_beta
    return zeros, tuple(map(initial_gradient, d_finals, initial_states))


def initial_gradient(d, state):
    return None if state is None else torch.zeros_like(state) if d is None else d.clone()
"""


def two_states() -> RecurrenceSpec:
    spec = compiled("gated_delta").spec
    states = (State("S", ("V",)), State("n\u0302", ()))
    return replace(spec, states=states, updates=(spec.updates[0], Equation("n\u0302", spec.updates[0].value)))


@pytest.mark.parametrize("given", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("wanted", [True, False])
def test_an_operator_of_several_states(given: tuple[bool, bool], wanted: bool) -> None:
    operator = register(two_states(), TWO_SUMS)
    torch.manual_seed(0)
    shapes = ((2, 5, 1, 4), (2, 5, 1, 4), (2, 5, 1, 3), (2, 5, 1), (2, 5, 1))
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    wide = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 1, 3), (2, 1))]
    initials = [x if there else None for x, there in zip(wide, given, strict=True)]
    handle = getattr(torch.ops.linalg_dsl, operator.name)
    consts = [float("nan")] * len(two_states().consts)
    args = (*tensors, *initials, consts, None, wanted, True)
    assert set(opcheck(handle.default, args).values()) == {"SUCCESS"}
    o, first, second, kept = handle(*args)
    assert kept == []
    torch.testing.assert_close(o, tensors[2] * tensors[4][..., None])
    if not wanted:
        assert first.numel() == second.numel() == 0
        return
    for got, x, start in zip((first, second), (tensors[2], tensors[4]), initials, strict=True):
        torch.testing.assert_close(got, x.sum(1) if start is None else x.sum(1) + start)
    leaves = [tensors[2], tensors[4], *(x for x in initials if x is not None)]
    found = torch.autograd.grad(first.sum() + 2 * second.sum() + 3 * o.sum(), leaves)
    torch.testing.assert_close(found[0], (1 + 3 * tensors[4][..., None]).expand_as(found[0]))
    torch.testing.assert_close(found[1], 2 + 3 * tensors[2].sum(-1))
    assert [float(x.flatten()[0]) for x in found[2:]] == [
        w for w, has in zip((1, 2), given, strict=True) if has
    ]


def test_a_named_tuple_holds_several_states_in_order() -> None:
    spec = two_states()
    states = (torch.zeros(3), torch.ones(3))
    packed = pack_states(spec, states)
    assert packed._fields == ("S", "n\u0302")
    assert packed[1] is states[1]
    for given in (packed, states, list(states), {"S": states[0], "n\u0302": states[1]}):
        assert given_states(spec, given) == states
    assert given_states(spec, {"n\u0302": states[1]}) == (None, states[1])
    assert given_states(spec, None) == (None, None)
    one = compiled("gated_delta").spec
    assert pack_states(one, states[:1]) is states[0]
    assert given_states(one, states[0]) == given_states(one, states[:1]) == states[:1]


def test_what_is_no_state_is_refused_with_what_was_expected() -> None:
    spec, x = two_states(), torch.zeros(1)
    other = state_tuple(replace(spec, states=(State("S"), State("m"))))(x, x)
    for given, text in (
        (x, "initial_state must hold one tensor each of S, n\u0302, got a Tensor"),
        ((x,), "got 1"),
        ((x, 3.0), "initial_state: n\u0302 must be a floating-point tensor, got float"),
        ((x, x.long()), "got torch.int64"),
        ({"m": x}, "has 'm', which is no state; they are S, n\u0302"),
        (other, "has the fields S, m, expected S, n\u0302"),
        (7, "got a int"),
    ):
        with pytest.raises(ArgumentError, match=text):
            given_states(spec, given)


def test_a_declared_start_is_handed_in() -> None:
    start = start_state(
        State("m", ("V",), -float("inf")), {"N": 2, "H": 3, "V": 4}, torch.zeros(1).bfloat16()
    )
    assert start.shape == (2, 3, 4)
    assert start.dtype == torch.float32
    assert bool((start == -float("inf")).all())
