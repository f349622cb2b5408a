"""Recurrences that nobody has published against loops written beside the text; mistakes under carets."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from loop_kit import run_loop
from own_rules import RULES
from torch import Tensor

import linalg_dsl
from linalg_dsl.errors import DslError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.draw import draw, draw_state

T, H, K, V = 11, 2, 5, 3
KERNELS = (
    "three_reads_of_one", "gated_by_another_memory", "own_cell", "regression", "zeros_and_shift",
    "full_gate_two_writes", "decayed_read",
)  # fmt: skip


def test_there_are_forty() -> None:
    assert len(RULES) == 40


@pytest.mark.parametrize("name", RULES)
def test_output_states_and_every_gradient_are_those_of_the_loop(name: str) -> None:
    _compare(name, "torch", torch.float64, 1e-12, chunk_size=4)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_agree_with_the_loop(name: str) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on the GPU: tests/gpu")
    _compare(name, "triton", torch.float32, 2e-5)


def _compare(name: str, backend: str, dtype: torch.dtype, bound: float, **options: Any) -> None:
    text, step = RULES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some have no chunk form
        op = linalg_dsl.compile(text, backend=backend, **options)
    spec = op.spec
    tensors = [x.requires_grad_() for x in draw(spec, 1, T, H, K, V, dtype=dtype, seed=3).values()]
    drawn = draw_state(spec, 1, H, K, V, dtype=dtype)
    states = [x.detach().nan_to_num(neginf=0.0).requires_grad_() for x in drawn]
    o, last = op(*tensors, initial_state=states if len(states) > 1 else states[0], output_final_state=True)
    finals = [last] if isinstance(last, Tensor) else list(last)
    found = [o, *finals[: len(spec.states)]]
    exact = [x.detach().double().requires_grad_() for x in (*tensors, *states)]
    wanted = _loop(spec, step, exact)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in wanted]
    grads = torch.autograd.grad(
        found, [*tensors, *states], [w.to(x.dtype) for w, x in zip(weights, found, strict=True)],
        allow_unused=True,
    )  # fmt: skip
    right = torch.autograd.grad(wanted, exact, weights, allow_unused=True)
    labels = ["o", *(s.name for s in spec.states), *(f"d {i.name}" for i in spec.inputs)]
    labels += [f"d initial {n}" for n in spec.carried]
    for label, got, want in zip(labels, (*found, *grads), (*wanted, *right), strict=True):
        x, y = (torch.zeros(()) if z is None else z.detach().double() for z in (got, want))
        assert float((x - y).norm()) <= bound * max(float(y.norm()), 1e-6), label


def _loop(spec: RecurrenceSpec, step: Any, leaves: list[Tensor]) -> list[Tensor]:
    """The output and the last states by the rule's own step."""
    named = dict(zip((i.name for i in spec.inputs), leaves, strict=False))
    carried = leaves[len(named) :]
    timed = {i.name: named[i.name] for i in spec.inputs if i.timed}
    params = {i.name: named[i.name] for i in spec.inputs if not i.timed}
    start = {s.name: x for s, x in zip(spec.states, carried, strict=False)}
    before = {i.name: x for i, x in zip(spec.shifted, carried[len(start) :], strict=True)}
    o, finals = run_loop(step, timed, params, start, before)
    return [o, *(finals[s.name] for s in spec.states)]


HEAD = "recurrence r\ninput q, k : [K]\ninput v : [V]\ninput b : scalar in (0, 1)\n"


@pytest.mark.parametrize(
    ("text", "code", "term"),
    [
        ("S_t = tanh(S_{t-1}) + k_t v_tᵀ\no_t = S_tᵀ q_t", "E405", "tanh(S_{t-1})"),
        ("S_t = S_{t-1} S_{t-1}ᵀ k_t v_tᵀ\no_t = S_tᵀ q_t", "E405", "S_{t-1} S_{t-1}ᵀ k_t v_tᵀ"),
        ("S_t = S_{t-1} + k_t softmax(S_{t-1}ᵀ k_t)ᵀ\no_t = S_tᵀ q_t", "E405", "softmax(S_{t-1}ᵀ k_t)"),
        ("S_t = S_{t-1} / (1 + k_tᵀ S_{t-1} v_t) + k_t v_tᵀ\no_t = S_tᵀ q_t", "E405",
         "S_{t-1} / (1 + k_tᵀ S_{t-1} v_t)"),
        ("S_t = exp(k_tᵀ S_{t-1} v_t) S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t", "E405", "exp(k_tᵀ S_{t-1} v_t)"),
        ("A_t = A_{t-1} B_{t-1}ᵀ k_t v_tᵀ + k_t v_tᵀ\nB_t = B_{t-1} + A_t\no_t = B_tᵀ q_t", "E405",
         "A_{t-1} B_{t-1}ᵀ k_t v_tᵀ"),
        ("S_t = S_{t-1} + k_t v_tᵀ\nM_t = max(M_{t-1}, S_t)\no_t = M_tᵀ q_t", "E405", "max(M_{t-1}, S_t)"),
        ("S_t = S_{t-1} + v_t k_tᵀ\no_t = S_tᵀ q_t", "E301", "v_t k_tᵀ"),
        ("S_t = diag(v_t) S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t", "E302", "S_{t-1}"),
        ("S_t = S_{t-1} + k_t v_tᵀ\no_t = S_t q_t", "E302", "q_t"),
        ("S_t = S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ", "E308", "S_tᵀ"),
        ("S_t = l2norm(S_{t-1}) + k_t v_tᵀ\no_t = S_tᵀ q_t", "E305", "l2norm(S_{t-1})"),
        ("S_t = S_{t-2} + k_t v_tᵀ\no_t = S_tᵀ q_t", "E902", "S_{t-2}"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_under_a_caret(text: str, code: str, term: str) -> None:
    with pytest.raises(DslError) as caught:
        linalg_dsl.compile(f"{HEAD}{text}\n", backend="torch")
    mistake = caught.value.mistakes[0]
    assert mistake.code == code
    lines = str(caught.value).splitlines()
    carets = lines[2]
    assert lines[1][carets.index("^") : carets.rindex("^") + 1] == term
