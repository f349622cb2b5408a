"""The torch module of a step class: right at every length, packed, with shared heads; readable."""

from __future__ import annotations

import ast

import pytest
import step_cases
import torch
from step_cases import PACKED, TEXTS, StepCase

from linalg_dsl.codegen.emit.torch_step import emit_torch_step
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.draw import GateKind, draw
from linalg_dsl.planner.step_form import step_form
from linalg_dsl.planner.step_plan import step_backward


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(("T", "K", "V"), [(9, 3, 5), (4, 4, 1)])
def test_every_result_agrees_with_the_step_loop(name: str, T: int, K: int, V: int) -> None:
    found = step_cases.case(name)
    bad = {
        n: e
        for n, e in step_cases.errors(found, found.module("torch", 4), 2, T, 2, K, V).items()
        if not e < 1e-10
    }
    assert not bad


@pytest.mark.parametrize("name", TEXTS)
def test_packed_sequences_with_empty_ones(name: str) -> None:
    found = step_cases.case(name)
    errors = step_cases.errors(found, found.module("torch", 2), 1, 9, 2, 3, 4, offsets=PACKED)
    assert max(errors.values()) < 1e-10


@pytest.mark.parametrize("name", ["two_sided", "mamba1", "mlstm", "rows", "slots"])
@pytest.mark.parametrize("T", [0, 1])
def test_no_token_and_one_token_without_an_initial_state(name: str, T: int) -> None:
    found = step_cases.case(name)
    errors = step_cases.errors(found, found.module("torch"), 2, T, 2, 3, 4, initial=False)
    assert max(errors.values()) < 1e-10


@pytest.mark.parametrize("name", TEXTS)
def test_heads_may_be_shared(name: str) -> None:
    found = step_cases.case(name)
    shared = {d.name: 2 for d in found.spec.inputs[1::2]} | {d.name: 1 for d in found.spec.inputs[2::4]}
    errors = step_cases.errors(found, found.module("torch", 4), 1, 5, 4, 3, 4, heads=shared)
    assert max(errors.values()) < 1e-10


@pytest.mark.parametrize("name", ["undecayed_erase", "rows", "slots", "mdn"])
@pytest.mark.parametrize("gates", ["strong", "resets", "zero"])
def test_gates_of_any_size(name: str, gates: GateKind) -> None:
    found = step_cases.case(name)
    errors = step_cases.errors(found, found.module("torch", 4), 1, 9, 1, 3, 4, gates=gates)
    assert max(errors.values()) < 1e-10


FORGETFUL = """
recurrence forgetful
input q : [K]
input v : [V]
input h : [n, K]
input x : scalar
const n = 2
state z : [K, n] = 0.5
state S : [V, K] = 0.5
state M : [K, V]
z_t = 0 x_t z_{t-1} + x_t h_tᵀ
S_t = 0 x_t S_{t-1}
M_t = 0 M_{t-1} + z_t z_tᵀ q_t v_tᵀ
o_t = silu(v_t + S_t q_t) + M_tᵀ q_t
"""


def test_states_that_a_constant_clears() -> None:
    """Gradients of what was before are numbers, not tensors, however a state lies in memory."""
    found = StepCase(step_form(parse(FORGETFUL)))
    errors = step_cases.errors(found, found.module("torch", 2), 2, 5, 2, 3, 4)
    assert max(errors.values()) < 1e-10


def text_of(name: str) -> str:
    form = step_cases.case(name).form
    return emit_torch_step(form, form.plan, step_backward(form.plan))


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_ascii_short_and_the_same_again(name: str) -> None:
    text = text_of(name)
    assert text.isascii()
    assert text == text_of(name)
    assert max(map(len, text.splitlines())) <= 120
    tree = ast.parse(text)
    token = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.endswith("_token")]
    assert [f.name for f in token] == ["forward_token", "backward_token"]
    assert all(f.end_lineno is not None and f.end_lineno - f.lineno < 80 for f in token)


def test_one_token_reads_as_the_line() -> None:
    text = text_of("undecayed_erase")
    assert "S_next = g.exp()[..., None, :] * S + x + k[..., None] * (b[..., None] * v)[..., None, :]" in text
    assert "return o, S_next" in text


def test_dry_runs_give_the_shapes() -> None:
    found = step_cases.case("mlstm")
    module = found.module("torch")
    tensors = tuple(draw(found.spec, 2, 5, 2, 3, 4).values())
    o, finals, marks = module.forward(
        tensors, (None,) * 3, (0.5,) * len(module.CONSTS), None, True, True, dry=True
    )
    assert o.shape == (2, 5, 2, 4)
    assert [tuple(x.shape) for x in finals] == [(2, 2), (2, 2, 3, 4), (2, 2, 3)]
    assert all(m.dtype == torch.float64 for m in marks)
