"""States that are not [K, V] become stages that are, where these have a chunk form."""

from __future__ import annotations

import os

import pytest
import torch

import linalg_dsl
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.classes import find_form
from linalg_dsl.planner.stages import single
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.planner.two_axes import with_two_axes

CHUNKED = {
    "delta rule of a vector": (
        "linear + rank 1",
        """
input w : [K] unit
input eta : scalar in (0, 1)
state d : [K] = 1
d_t = d_{t-1} + eta_t w_t (1 - d_{t-1}ᵀ w_t)
o_t = d_t
""",
    ),
    "gate, dot, quotient, read before": (
        "diagonal gate + rank 1",
        """
input w, p : [K] unit
input a : log gate [K]
state d : [K] = 0.5
d_t = exp(a_t) ⊙ d_{t-1} / 2 - p_t dot(w_t, d_{t-1}) / 3 + w_t
o_t = p_t ⊙ d_{t-1} + w_t / (p_t + 2)
""",
    ),
    "normaliser": (
        "scalar gate",
        """
input k, q : [V]
input a : log gate
state n : [V]
n_t = exp(a_t) n_{t-1} + exp(k_t) + 1
o_t = n_tᵀ q_t
""",
    ),
    "square, erased": (
        "diagonal gate + rank 1",
        """
input k, q : [K] unit
input g : log gate [K]
input beta : scalar in (0, 1)
state P : [K, K] = 0.25
P_t = (I - beta_t k_t k_tᵀ) diag(exp(g_t)) P_{t-1} + beta_t k_t q_tᵀ
o_t = P_tᵀ q_t
""",
    ),
    "square, erased along its second axis": (
        "diagonal gate + rank 1 on the value side",
        """
input k, q : [K] unit
input g : log gate [K]
state P : [K, K]
P_t = P_{t-1} diag(exp(g_t)) (I - k_t k_tᵀ) + k_t q_tᵀ
o_t = P_t q_t
""",
    ),
    "square along V": (
        "linear",
        """
input k, q : [V]
state P : [V, V]
P_t = P_{t-1} + k_t q_tᵀ
o_t = P_{t-1} q_t
""",
    ),
    "slots": (
        "diagonal gate on the value side",
        """
const n = 3
input k : [K]
input w : [n]
input a : log gate [n]
state A : [K, n]
A_t = A_{t-1} diag(exp(a_t)) + k_t w_tᵀ
o_t = A_t w_t
""",
    ),
}

STEPPED = {
    "elements that never meet": (
        "the elements of h never meet: there is no product to make of chunks, and token after token it moves "
        "no more than its inputs and outputs",
        """
input x : [V]
input a : log gate [V]
state h : [V]
h_t = exp(a_t) ⊙ h_{t-1} + x_t
o_t = h_t
""",
    ),
    "no linear update": (
        "the state h is more than scaled, read along vectors and written to, and a chunk form is linear in "
        "its state",
        """
input x : [V]
state h : [V]
h_t = max(h_{t-1}, x_t)
o_t = h_t
""",
    ),
    "a state and its transpose": (
        "rows and columns of P meet, as in P + Pᵀ: a chunk form keeps its two axes apart",
        """
input k : [K]
state P : [K, K]
P_t = P_{t-1} / 2 + P_{t-1}ᵀ / 4 + k_t k_tᵀ
o_t = P_t k_t
""",
    ),
    "both axes of a square state": (
        "in k_t k_tᵀ P_{t-1} k_V_t k_V_tᵀ the state is erased along both axes: a map that is low rank on "
        "both sides has no chunk form",
        """
input k : [K] unit
state P : [K, K]
P_t = (I - k_t k_tᵀ) P_{t-1} (I - k_t k_tᵀ) + k_t k_tᵀ
o_t = P_t k_t
""",
    ),
    "a third axis": (
        "the state P is [K, K], and what it meets has the axis V too: a chunk form has two axes",
        """
input k : [K] unit
input v : [V]
state P : [K, K]
P_t = P_{t-1} + k_t k_tᵀ
o_t = (k_tᵀ P_t k_t) v_t
""",
    ),
    "a number": (
        "the state c is one number per head: there is no product to make of chunks",
        """
input v : [V]
input a : scalar
state c : scalar
c_t = a_t c_{t-1} + 1
o_t = c_t v_t
""",
    ),
}


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off: tests/gpu has these kernels"
)


def _op(name: str, body: str) -> CompiledOp:
    return linalg_dsl.compile(f"recurrence r\n{body}")


@pytest.mark.parametrize("name", CHUNKED)
def test_these_have_chunk_forms_and_are_right(name: str) -> None:
    kind, body = CHUNKED[name]
    op = _op(name, body)
    (stage,) = op.plan.explain().stages
    assert stage.to_dict()["class"] == kind
    assert not stage.to_dict()["proof"][0].startswith("not proved")
    for options in ({"T": 37, "K": 9, "V": 6}, {"K": 1, "V": 2, "cu_seqlens": [0, 5, 5, 19]}):
        report = op.check(B=2, H=2, dtype=torch.float64, **options)
        assert report.ok, report


@pytest.mark.parametrize("name", STEPPED)
def test_these_have_none_and_the_reason_says_so(name: str) -> None:
    reason, body = STEPPED[name]
    spec = parse(f"recurrence r\n{body}")
    stage = single(spec).stages[0]
    assert with_two_axes(stage) is stage
    form = find_form(spec, {})
    assert isinstance(form, StepForm)
    assert form.reasons == (reason,)


@interpreted
@pytest.mark.parametrize("name", ["delta rule of a vector", "normaliser", "square, erased"])
def test_their_kernels_are_right(name: str) -> None:
    op = linalg_dsl.compile(f"recurrence r\n{CHUNKED[name][1]}", backend="triton")
    report = op.check(B=1, T=20, H=1, K=5, V=4)
    assert report.ok, report


@interpreted
def test_an_output_may_be_called_like_a_gradient() -> None:
    spec = """
recurrence r
input q, k : [K]
input v : [V]
output d_v
S_t = S_{t-1} + k_t v_tᵀ
d_v_t = S_tᵀ q_t
"""
    for backend in ("torch", "triton"):
        report = linalg_dsl.compile(spec, backend=backend).check(B=1, T=9, H=1, K=5, V=4)
        assert report.ok, report


@interpreted
def test_a_param_may_be_what_is_written() -> None:
    spec = """
recurrence r
input q, k : [K]
input beta : scalar
param u : [V]
S_t = S_{t-1} / 2 + beta_t k_t uᵀ
o_t = S_tᵀ q_t
"""
    report = linalg_dsl.compile(spec, backend="triton").check(B=1, T=20, H=2, K=5, V=4)
    assert report.ok, report
