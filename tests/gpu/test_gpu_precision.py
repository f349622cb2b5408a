"""Digits on a GPU at the nasty ends: short types within twice their floor, float32 as on a CPU."""

from __future__ import annotations

import pytest
import torch

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.planner import precision
from linalg_dsl.testing import Extremes, Shape, Subject, make_case
from linalg_dsl.testing.digits import measured
from linalg_dsl.testing.draws import tame
from linalg_dsl.testing.extremes import applicable
from linalg_dsl.testing.properties_precision import LEAST_SHORT

pytestmark = pytest.mark.gpu

NASTY = (
    Extremes(),
    Extremes(gates="slow"),
    Extremes(gates="strong"),
    Extremes(gates="resets"),
    Extremes(keys="nearly identical"),
    Extremes(keys="nearly identical", scalars="high end"),
    Extremes(keys="orthogonal", scalars="one"),
    Extremes(values="mixed sizes"),
)


def _cases(name: str, shape: Shape, dtype: torch.dtype) -> tuple[Subject, list[Extremes]]:
    op = linalg_dsl.compile(getattr(ops, name).spec, backend="triton")
    choices, plain = applicable(op.spec), Extremes()
    kinds = ("gates", "keys", "scalars", "values")
    kept = [e for e in NASTY if all(k in choices or getattr(e, k) == getattr(plain, k) for k in kinds)]
    return Subject.of_op(op, device="cuda", dtypes=(dtype,)), kept


@pytest.mark.parametrize("wide", [False, True], ids=["usual", "wide_solve"])
@pytest.mark.parametrize(
    "name", ["linear_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda"]
)
def test_bfloat16_costs_at_most_twice_its_floor(
    name: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prints the part of twice the floor; below the rounding of the outputs nothing is asked.

    Erases along keys that are alike keep it with a wide solve only (docs/precision.md): as plans are, T and
    what it is applied to have 8 bits, and there they are printed.
    """
    monkeypatch.setattr(precision, "WIDE_SOLVE", wide)
    shape = Shape(1, 160, 2, 64, 64)
    subject, drawn = _cases(name, shape, torch.bfloat16)
    erases = bool(linalg_dsl.compile(getattr(ops, name).spec).plan.precision.shortest)
    if wide and not erases:
        pytest.skip("nothing is solved")
    for ends in drawn:
        case = make_case(subject, shape, seed=3, dtype=torch.bfloat16, extremes=ends)
        if not tame(case):
            continue
        found = list(measured(subject, [case]))
        print(max(found, key=lambda d: d.part))
        alike = erases and ends.keys == "nearly identical"
        for digits in found if wide or not alike else ():
            assert digits.error <= max(2 * LEAST_SHORT, digits.allowed), str(digits)


@pytest.mark.parametrize(
    ("name", "K"), [("comba_decayed", 4), ("delta_rule", 4), ("delta_rule", 32), ("gla", 32)]
)
def test_float32_keeps_its_digits_at_the_nasty_ends(name: str, K: int) -> None:
    shape = Shape(1, 130, 1, K, 16)
    subject, drawn = _cases(name, shape, torch.float32)
    for ends in (*drawn, *([Extremes(values="denormal")] if K < 16 else [])):
        case = make_case(subject, shape, seed=3, dtype=torch.float32, extremes=ends)
        if not tame(case):
            continue
        found = max(measured(subject, [case]), key=lambda d: d.part)
        print(found)
        assert found.part <= 1, str(found)
