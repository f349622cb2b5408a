"""NaN and infinity in kernels as a GPU runs them: its max and min drop NaN, its products take bfloat16.

In the interpreter, which is made to do the same (gpu_arithmetic.py); tests/gpu has the cards' own.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gpu_arithmetic import needs_the_interpreter, take_bfloat16
from nan_in_functions import lost_nan

import linalg_dsl
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw

pytestmark = needs_the_interpreter
CHOICES = """
recurrence choices
input q, k : [K]
input v, x, y, z : [V]
input g : log gate
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
o_t = (max(x_t, 0.5) + min(y_t, x_t) + clamp(z_t, 0, 1) + max(relu(y_t), elu(z_t))) ⊙ (S_tᵀ q_t)
"""
LARGEST = """
recurrence largest
input x, y : [V]
input c : scalar
h_t = max(min(h_{t-1}, y_t), x_t)
o_t = h_t * max(c_t, 0.5) + relu(y_t)
"""


@pytest.fixture
def bfloat16_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    take_bfloat16(monkeypatch)


def test_functions_hand_nan_on_where_those_of_torch_do(tmp_path: Path) -> None:
    assert lost_nan(tmp_path, "cpu") == []


@pytest.mark.parametrize("text", [CHOICES, LARGEST])
@pytest.mark.parametrize("decode", [False, True])
def test_no_choice_between_numbers_loses_nan(text: str, decode: bool) -> None:
    op = linalg_dsl.compile(text, backend="triton")
    tensors = draw(op.spec, 1, 3, 1, 4, 3, dtype=torch.float32)
    for name, x in tensors.items():
        bad = x.clone()
        bad[0, 1].view(-1)[-1] = math.nan
        given = {**tensors, name: bad}
        o, wanted = op.step(**given)[0] if decode else op(**given), op.reference(**given)
        assert torch.equal(o.isfinite(), wanted.isfinite()), name


def test_a_log_gate_that_is_nan_is_no_reset(bfloat16_operands: None) -> None:
    spoil_one_by_one("simple_gla", "g")


@pytest.mark.parametrize(("name", "only"), [("delta_rule", "v"), ("gated_oja", "qkv")])
def test_tiles_that_come_by_the_unit_matrix_keep_what_is_not_finite(
    name: str, only: str, bfloat16_operands: None
) -> None:
    """0 times it, of the unit matrix, reached the other tokens of the chunk."""
    spoil_one_by_one(name, only)


def spoil_one_by_one(name: str, only: str) -> None:
    """The bits of earlier tokens and of the other head stay; not finite is what is so in the step loop."""
    op = linalg_dsl.compile(catalogue_text(name), backend="triton", chunk_size=16)
    tensors = draw(op.spec, 1, 20, 2, 32, 32, dtype=torch.bfloat16)
    clean = op(**tensors)
    for n in only:
        for value, at in ((math.nan, 9), (math.inf, 0)):
            x = tensors[n].clone()
            x[0, at, 1].view(-1)[-1] = value
            given = {**tensors, n: x}
            found, wanted = op(**given), op.reference(**{m: z.double() for m, z in given.items()})
            assert torch.equal(found[:, :at], clean[:, :at])
            assert torch.equal(found[:, :, 0], clean[:, :, 0])
            assert torch.equal(found.isfinite(), wanted.isfinite())
