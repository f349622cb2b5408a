from __future__ import annotations

import pytest
import torch
from recurrences import ALL

from linalg_dsl.algebra.expr import ZERO
from linalg_dsl.language.parser import parse
from linalg_dsl.language.printer import show_expr
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.evaluate import run_plan
from linalg_dsl.planner.residual import as_residuals

TWO_STEPS = """recurrence two_steps
input q : [K]
input k, p : [K] unit
input v, x : [V]
input b, c : scalar in (0, 2)
S_t = (I - c_t p_t p_t^T) ((I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T) + c_t p_t x_t^T
o_t = S_t^T q_t
"""


def shown(text: str) -> tuple[list[str], list[str]]:
    (rec,) = canonicalise(parse(text)).recurrences
    given, rest = as_residuals(rec.written, rec.sigma)
    return [show_expr(x) for x in given], [show_expr(x) for x in rest]


def test_the_delta_rule_solves_for_its_error() -> None:
    assert shown(ALL["gated_delta_rule"].text("r")) == (["-v_t"], ["0"])


def test_a_write_of_its_own_stays() -> None:
    assert shown(ALL["dplr"].text("r")) == (["0"], ["v_t", "0"])


def test_steps_one_after_the_other_have_an_error_each() -> None:
    given, rest = shown(TWO_STEPS)
    assert sorted(given) == ["-v_t", "-x_t"]
    assert rest == ["0", "0"]


@pytest.mark.parametrize("text", [ALL["gated_delta_rule"].text("r"), TWO_STEPS])
def test_a_step_of_zero_size_writes_nothing(text: str) -> None:
    spec = parse(text)
    tensors = draw(spec, B=1, T=6, H=1, K=4, V=3, dtype=torch.float64, seed=0)
    for decl in spec.inputs:
        if decl.dims == () and decl.kind == "plain":
            tensors[decl.name][:, 2:4] = 0.0
    canonical = canonicalise(spec)
    numbers = {c.name: 0.5 for c in spec.consts}  # 1 / sqrt(4)
    assert any(w != ZERO for w in canonical.recurrences[0].written)
    o, last = run_plan(derive(canonical), {**tensors, **numbers}, chunk_size=6)
    expected, end = reference(spec, tensors, output_final_state=True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(last, end)
