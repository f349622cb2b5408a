"""Drawn inputs keep what a spec promises, in every type."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from linalg_dsl.algebra.expr import Symbol, add, mul, number, outer, transpose
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import Const, Equation, Input, Interval, RecurrenceSpec, State
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.promises import check_promises

INPUTS = (
    Input("q", ("K",)),
    Input("k", ("K",), unit=True),
    Input("p", ("n", "K"), unit=True),
    Input("v", ("V",)),
    Input("g", (), "log_gate"),
    Input("f", ("K",), "log_gate", range=Interval(-5.0, 0.0, False, False)),
    Input("up", (), "log_gate", range=Interval(None, 2.0)),
    Input("a", ("K",), "gate", range=Interval(0.0, 1.0)),
    Input("s", (), "gate", range=Interval(-1.0, 1.0)),
    Input("beta", (), range=Interval(0.0, 2.0)),
    Input("c", (), range=Interval(1.0, None)),
    Input("d", (), range=Interval(None, -1.0)),
    Input("u", ("K",), timed=False),
    Input("gamma", (), range=Interval(0.0, 1.0), timed=False),
)
k, q, v = Symbol("k", ("K", 1)), Symbol("q", ("K", 1)), Symbol("v", ("V", 1))
SPEC = RecurrenceSpec(
    "sample",
    INPUTS,
    (Const("n", number(3)),),
    (State("S"),),
    (Equation("S", add([Symbol("S", ("K", "V"), time=-1), outer(k, v)])),),
    (Equation("o", mul([transpose(Symbol("S", ("K", "V"))), q])),),
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gates", get_args(GateKind))
def test_promises_are_kept(gates: GateKind, dtype: torch.dtype) -> None:
    x = draw(SPEC, 2, 50, 3, 8, 5, dtype=dtype, gates=gates, seed=1)
    assert list(x) == [i.name for i in INPUTS]
    for decl in INPUTS:
        value = x[decl.name].double()
        assert x[decl.name].dtype == dtype
        low, high = decl.range.low, decl.range.high
        if decl.kind == "log_gate" and high is None:
            high = 0.0
            assert (value <= high).all(), decl.name
        elif high is not None:
            assert (value < high if decl.range.high_open else value <= high).all(), decl.name
        if low is not None:
            closed = decl.kind == "gate" or not decl.range.low_open
            assert (value >= low if closed else value > low).all(), decl.name
        if decl.unit:
            assert (value.norm(dim=-1) <= 1 + 2 * torch.finfo(dtype).eps).all(), decl.name


def test_shapes_follow_the_declarations() -> None:
    x = draw(SPEC, 2, 7, 4, 8, 5, heads={"k": 2, "u": 1})
    assert x["k"].shape == (2, 7, 2, 8)
    assert x["p"].shape == (2, 7, 4, 3, 8)
    assert x["u"].shape == (1, 8)
    assert x["gamma"].shape == (4,)
    assert [tuple(s.shape) for s in draw_state(SPEC, 2, 4, 8, 5)] == [(2, 4, 8, 5)]


def test_the_seed_alone_decides_the_numbers() -> None:
    first, again = draw(SPEC, 1, 5, 2, 4, 4, seed=5), draw(SPEC, 1, 5, 2, 4, 4, seed=5)
    other = draw(SPEC, 1, 5, 2, 4, 4, seed=6)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["q"], other["q"])
    short = draw(SPEC, 1, 5, 2, 4, 4, seed=5, dtype=torch.float16)
    assert torch.equal(first["q"].half(), short["q"])


def test_gate_kinds_differ_as_documented() -> None:
    drawn = {kind: draw(SPEC, 2, 200, 2, 4, 4, gates=kind)["g"] for kind in get_args(GateKind)}
    assert not drawn["zero"].any()
    assert -0.2 < drawn["mild"].mean() < -0.01
    assert drawn["slow"].min() > -0.01
    assert set(drawn["strong"].flatten().tolist()) == {0.0, -1e-7, -1.0, -10.0, -60.0}
    assert (drawn["resets"] == -math.inf).any()
    assert torch.isfinite(drawn["strong"]).all()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="gates is one of"):
        draw(SPEC, 1, 1, 1, 1, 1, gates="wild")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="has no input 'kk'"):
        draw(SPEC, 1, 1, 1, 1, 1, heads={"kk": 1})


EVERY_KIND = parse("""recurrence every_kind
const n = 3
input q, k : [K]
input v : [V]
input M : [K, K]
input N : [V, V]
input X : [K, V]
input gv : log gate [V]
input gx : log gate [K, V]
input gn : log gate [n] in (-inf, 2]
input s : gate [V] in (-1, 1)
input r : gate [K, V] in [0, 1]
input w : gate in [-0.5, 0.25]
input h : gate in (-1, 0)
param A : [K, V]
state z : [n] = -inf
z_t = max(z_{t-1}, gn_{t-1})
m_t = m_{t-1} + v_{t-1}ᵀ v_t
S_t = r_t ⊙ (M_t S_{t-1} N_t) + X_t + k_t (s_t ⊙ gv_t)ᵀ / m_t + exp(gx_t) + w_t h_t A
o_t = S_tᵀ q_t
""")


@pytest.mark.parametrize("gates", get_args(GateKind))
def test_gates_and_matrices_of_every_kind_keep_their_promises(gates: GateKind) -> None:
    x = draw(EVERY_KIND, 2, 60, 2, 6, 5, gates=gates)
    check_promises(EVERY_KIND, list(x.values()))
    assert x["gx"].shape == x["r"].shape == x["X"].shape == (2, 60, 2, 6, 5)
    assert x["A"].shape == (2, 6, 5)
    assert x["gn"].shape == (2, 60, 2, 3)


def test_signed_gates_have_both_signs_and_zeros_only_as_resets() -> None:
    for gates in get_args(GateKind):
        x = draw(EVERY_KIND, 2, 200, 2, 6, 5, gates=gates)
        for name in ("s", "w"):
            assert (x[name] < 0).any(), (name, gates)
            assert (x[name] > 0).any(), (name, gates)
        for name in ("s", "r"):
            assert (x[name] == 0).any().item() == (gates == "resets"), (name, gates)


def test_some_tokens_of_a_gate_that_may_grow_grow() -> None:
    assert (draw(EVERY_KIND, 2, 50, 2, 6, 5)["gn"] > 0).any()
    assert not (draw(EVERY_KIND, 2, 50, 2, 6, 5)["gv"] > 0).any()


def test_products_of_square_matrices_stay_in_bounds() -> None:
    x = draw(EVERY_KIND, 1, 100, 1, 16, 16)
    product = torch.eye(16, dtype=torch.float64)
    for t in range(100):
        product = x["M"][0, t, 0] @ product
    assert product.norm() < 10


def test_what_is_carried_is_drawn_in_order() -> None:
    drawn = draw_state(EVERY_KIND, 2, 4, 6, 5)
    assert EVERY_KIND.carried == ("z", "m", "S", "v_prev", "gn_prev")
    assert [tuple(x.shape) for x in drawn] == [(2, 4, 3), (2, 4), (2, 4, 6, 5), (2, 4, 5), (2, 4, 3)]
    assert (drawn[4] <= 2).all()


@pytest.mark.parametrize(("name", "value"), [("s", -1.0), ("r", -1e-3), ("w", 0.3), ("h", 0.0), ("gn", 2.5)])
def test_a_broken_promise_of_a_gate_is_named(name: str, value: float) -> None:
    x = draw(EVERY_KIND, 1, 4, 1, 6, 5)
    x[name].view(-1)[3] = value
    with pytest.raises(ArgumentError, match=f"every_kind: {name} promises values in"):
        check_promises(EVERY_KIND, list(x.values()))
