"""Sums of log gates: what a product with 0 and 1 rounds of them comes out as a factor of the result.

A log gate of -60 is -86.5617 to base 2, of which tf32 has -86.5: kernels on an H200 gave 1.5053e-27 for
1.44236e-27, where all terms of the sum had one sign.
"""

from __future__ import annotations

import pytest
import torch
from gpu_arithmetic import cut_tf32, needs_the_interpreter, take_bfloat16

import linalg_dsl
from linalg_dsl import driver, ops
from linalg_dsl.testing import Extremes, PropertyError, Shape, Subject, make_case
from linalg_dsl.testing.properties_reference import check_case

RESULT = "d initial_state"


def check(dtype: torch.dtype) -> float:
    op = linalg_dsl.compile(ops.gla.spec, backend="triton")
    mine = Subject.of_op(op, dtypes=(dtype,))
    case = make_case(mine, Shape(1, 4, 4, 16, 33), seed=1, extremes=Extremes(gates="resets"))
    _, nearest = check_case(mine, case)
    assert nearest is not None
    return nearest.ratio


@needs_the_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strong_gates_of_small_heads_keep_the_digits_of_their_sums(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_bfloat16(monkeypatch)
    cut_tf32(monkeypatch)
    check(dtype)


@needs_the_interpreter
def test_ten_bits_of_them_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    take_bfloat16(monkeypatch)
    cut_tf32(monkeypatch)
    emit, ours, one = driver.emit, "self.sums = self.precision", 'self.sums = "TF32"'  # no word for halves
    monkeypatch.setattr(driver, "emit", lambda *given: emit(*given).replace(ours, one))
    with pytest.raises(PropertyError) as error:
        check(torch.bfloat16)
    assert error.value.tensor == RESULT
    assert error.value.got == pytest.approx(error.value.expected * 2 ** (86.5617 - 86.5), rel=1e-3)
