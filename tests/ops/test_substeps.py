"""Substeps run as micro-tokens or written out: the same recurrence either way, chosen by cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import linalg_dsl
from linalg_dsl.codegen.schedule.levels import step_time
from linalg_dsl.codegen.targets import TARGETS
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw
from linalg_dsl.planner.micro_tokens import (
    BANDWIDTH,
    BYTE,
    RATE,
    UNITS,
    choose_substeps,
    micro_tokens,
)
from linalg_dsl.planner.split import split
from linalg_dsl.planner.stages import Stage

HEAD = """
recurrence steps
const n = 2
input q, u : [K]
input k : [n, K] unit
input v : [n, V]
input w : [V]
input beta : [n] in (0, 1)
input g : log gate
input f : log gate [K]
input a : gate in (0, 0.9)
input c : scalar in (0, 1)
param gamma : log gate
"""
DELTA = "S_t = S_t - beta_{t,j} k_{t,j} (k_{t,j}ᵀ S_t - v_{t,j}ᵀ)"
READ = "o_t = S_tᵀ q_t"


def _text(start: str, body: str = DELTA, read: str = READ) -> str:
    before = f"S_t = {start}\n" if start else ""
    return f"{HEAD}{before}for j in 1..n:\n    {body}\n{read}\n"


LAID_OUT = {
    "nothing_before": _text(""),
    "log_gate": _text("exp(g_t) S_{t-1}"),
    "channels": _text("diag(exp(c_t f_t)) S_{t-1}"),
    "linear_gate": _text("a_t S_{t-1}"),
    "param": _text("exp(gamma) S_{t-1}"),
    "erase_and_write": _text("(I - c_t u_t u_tᵀ) diag(exp(f_t)) S_{t-1} + c_t u_t w_tᵀ"),
    "gate_in_both": _text("exp(g_t) S_{t-1}", f"{DELTA} + (1 - exp(g_t)) k_{{t,j}} w_tᵀ"),
    "query_in_both": _text(
        "exp(g_t) S_{t-1}", DELTA.replace("beta_{t,j} k", "beta_{t,j} c_t k"), "o_t = c_t S_tᵀ q_t + w_t"
    ),
    "plain_write": _text("S_{t-1} + u_t w_tᵀ", "S_t = S_t + k_{t,j} v_{t,j}ᵀ"),
}
WRITTEN_OUT = {
    "reads_the_past": _text("exp(g_t) S_{t-1}", read="o_t = S_{t-1}ᵀ q_t"),
    "const_decay": _text("0.9 S_{t-1}"),
    "a_row_by_number": _text("S_{t-1} + k_{t,1} w_tᵀ"),
    "past_inside": _text(
        "exp(g_t) S_{t-1}", "S_t = exp(g_t) S_t + k_{t,j} v_{t,j}ᵀ + k_{t,j} (S_{t-1}ᵀ k_{t,j})ᵀ"
    ),
}


def _stage(text: str) -> Stage:
    (stage,) = split(parse(text)).stages
    return stage


@pytest.mark.parametrize("packed", [None, [0, 0, 7, 8, 40, 40]])
@pytest.mark.parametrize("substeps", ["micro", "expand"])
@pytest.mark.parametrize("name", LAID_OUT)
def test_both_ways_are_the_recurrence(name: str, substeps: str, packed: list[int] | None) -> None:
    op = linalg_dsl.compile(LAID_OUT[name], backend="torch", chunk_size=16, substeps=substeps)
    assert op.stages.is_whole == (substeps == "expand")
    report = op.check(T=40, K=4, V=3, dtype=torch.float64, device="cpu", cu_seqlens=packed, heads={"q": 1})
    assert report.ok, str(report)


@pytest.mark.parametrize("name", LAID_OUT)
def test_the_stage_of_micro_tokens_is_a_recurrence(name: str) -> None:
    micro = micro_tokens(_stage(LAID_OUT[name]))
    assert micro is not None
    assert parse(str(micro.spec)) == micro.spec
    assert "for " not in str(micro.spec)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_what_has_no_micro_tokens_is_written_out(name: str) -> None:
    stage = _stage(WRITTEN_OUT[name])
    assert micro_tokens(stage) is None
    assert choose_substeps(stage) is stage
    with pytest.raises(ArgumentError, match="steps: its substeps cannot be laid out as micro-tokens"):
        choose_substeps(stage, "micro")


def test_gates_before_the_loop_are_one_at_all_but_the_first() -> None:
    micro = micro_tokens(_stage(LAID_OUT["erase_and_write"]))
    assert micro is not None
    laid = dict(zip(micro.arguments, micro.layouts, strict=True))
    assert laid == {
        "q": "repeat", "u": "repeat", "k": "rows", "v": "rows", "w": "repeat", "beta": "rows",
        "g": "repeat", "f": 0.0, "a": "repeat", "c": 0.0, "gamma": "param",
    }  # fmt: skip
    linear = micro_tokens(_stage(LAID_OUT["linear_gate"]))
    assert linear is not None
    gate = linear.spec.input("a")
    assert (gate.range.high, gate.range.high_open) == (1.0, False)
    both = micro_tokens(_stage(LAID_OUT["gate_in_both"]))
    assert both is not None
    assert [(a, x) for a, x in zip(both.arguments, both.layouts, strict=True) if a == "g"] == [
        ("g", "repeat"), ("g", 0.0),
    ]  # fmt: skip
    assert "g_first" in {i.name for i in both.spec.inputs}


def test_cost_decides() -> None:
    """Scores grow with the square of the number of substeps written out, and only four erases are taken."""

    def chosen(n: int) -> Stage:
        return choose_substeps(_stage(chosen_text(n)))

    assert chosen(2).layouts == ()
    assert chosen(4).layouts != ()
    assert chosen(6).note.endswith("written out: no chunk form")
    told = str(linalg_dsl.compile(chosen_text(6)).plan.explain())
    assert "6 micro-tokens at a cost of" in told
    assert "k by rows" in told
    assert "g, then 0" in told


def test_the_cost_of_a_byte_is_that_of_schedules() -> None:
    """One rate of products and one of memory: those by which walks are chosen."""
    target = TARGETS["sm_90"]
    rows = 1e9
    work = 2 * 64 * rows * 64  # of one product [64, rows] x [rows, 64]
    us = step_time((1, 0, 0), rows, 64, 64, 2, 0, target.bandwidth) - 0.38  # type: ignore[arg-type]
    assert work / us == pytest.approx(RATE)
    assert (target.units, target.bandwidth) == (UNITS, BANDWIDTH)
    assert pytest.approx(RATE * UNITS / BANDWIDTH) == BYTE


def chosen_text(n: int) -> str:
    return catalogue_text("gated_delta_product").replace("const n = 2", f"const n = {n}")


def test_the_number_of_substeps_is_that_of_the_rows_and_of_the_const() -> None:
    op = linalg_dsl.compile(chosen_text(3), backend="torch", substeps="micro")
    for n in (3, 5):
        spec = parse(chosen_text(n))
        x: list[Any] = list(draw(spec, 1, 9, 2, 4, 3).values())
        given = {} if n == 3 else {"n": n}
        want = linalg_dsl.compile(spec, backend="reference")(*x)
        torch.testing.assert_close(op(*x, **given), want)
    with pytest.raises(ArgumentError, match="axis n is 5, expected 3"):
        op(*x)
    with pytest.raises(ArgumentError, match="substeps is one of micro, expand, got 'often'"):
        linalg_dsl.compile(chosen_text(3), substeps="often")


def test_torch_compile_of_micro_tokens() -> None:
    op = linalg_dsl.compile(chosen_text(4), backend="torch", substeps="micro")
    x = list(draw(op.spec, 1, 20, 2, 4, 3).values())
    torch._dynamo.reset()
    fast = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(fast(*x), op(*x))
