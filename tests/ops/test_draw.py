"""Drawn inputs keep what a spec promises, in every type."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from linalg_dsl.algebra.expr import Symbol, add, mul, number, outer, transpose
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import Const, Equation, Input, Interval, RecurrenceSpec, State
from linalg_dsl.ops.draw import GateKind, draw, draw_state

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
