"""op.check: reports what is right, and sees what is wrong."""

from __future__ import annotations

import json
import math

import pytest
import torch
from op_cases import TEXTS, compiled, leaves

import linalg_dsl
from linalg_dsl import driver
from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops import check
from linalg_dsl.ops.artefacts import Artefacts, Passes
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.check import (
    CheckRow,
    derived_floors,
    expected_largest,
    reference_results,
    short_operand_results,
)
from linalg_dsl.ops.op import CompiledOp


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_check_passes(name: str, dtype: torch.dtype) -> None:
    report = compiled(name).check(T=70, K=5, V=3, dtype=dtype, device="cpu")
    assert report.ok, str(report)
    names = [d.name for d in compiled(name).spec.inputs]
    assert [r.name for r in report.rows] == [
        "o",
        "final state",
        *(f"d {n}" for n in [*names, "initial_state"]),
    ]
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


def test_check_of_packed_sequences_grouped_heads_and_consts() -> None:
    packed = compiled("gated_delta").check(cu_seqlens=[0, 0, 20, 65], device="cpu")
    assert packed.ok
    assert "T 65" in packed.shape
    assert compiled("gated_delta").check(H=4, heads={"q": 2}, T=20, device="cpu").ok
    assert compiled("sigmoid_gate").check(T=20, consts={"tau": 3.0}, device="cpu").ok
    assert compiled("gated_delta").check(T=0, device="cpu").ok
    with pytest.raises(ArgumentError, match="must start at 0"):
        compiled("gated_delta").check(cu_seqlens=[1, 2])


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("return (d_s,), (d_q, d_k, d_v, d_g, d_beta)", "d q"),
        ("return o, (s_next,)", "o"),
    ],
)
def test_check_sees_a_wrong_module(line: str, rows: str) -> None:
    good = compiled("gated_delta")
    text = good.module_text("torch")
    assert line in text
    bad = line.replace("(d_q,", "(1.001 * d_q,") if "d_q" in line else line.replace(" o,", " 1.001 * o,")

    def derive(spec: object, options: object, consts: object) -> Artefacts:
        return good.artefacts()

    stages = Passes(derive, lambda artefacts, backend, options: text.replace(line, bad), driver.decode)
    report = CompiledOp(good.spec, good.options, stages).check(T=20, device="cpu")
    assert not report.ok
    assert report.worst.name == rows
    assert [r.name for r in report.rows if not r.ok] == [rows]
    assert "TOO LARGE" in str(report)
    assert report.as_dict()["ok"] is False


def test_nan_is_never_within_a_bound() -> None:
    assert not CheckRow("o", math.nan, 0.0, 1.0).ok
    assert not CheckRow("o", 0.0, math.nan, 1.0).ok
    assert CheckRow("o", 0.5, 1.0, 1.0).ok


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_loop_with_short_operands_is_the_recurrence(name: str, packed: bool) -> None:
    """With operands that are not shortened it gives what the step loop gives."""
    op = compiled(name)
    offsets = [0, 0, 7, 20] if packed else None
    tensors, state = leaves(op, 1 if packed else 2, 20, 4, 5, 3, N=3 if packed else None, heads={"k": 2})
    named = {d.name: x for d, x in zip(op.spec.inputs, tensors, strict=True)} | {"initial_state": state}
    o, last = op(
        *tensors,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=None if offsets is None else torch.tensor(offsets),
    )
    weights = [torch.cos(o.detach()), torch.sin(last.detach())]
    (want_o, want_last), want = reference_results(op, named, weights, offsets, None)
    found = short_operand_results(op, named, weights, torch.float64, offsets, None)
    for got, expect in zip(found, [want_o, want_last, *want], strict=True):
        torch.testing.assert_close(got, expect, rtol=1e-10, atol=1e-10)


def test_what_amplifies_rounding_is_held_to_twice_the_loop_with_short_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for bound in ("output_bound", "gradient_bound"):
        monkeypatch.setattr(check, bound, lambda backend, dtype: 1e-9)
    report = compiled("gated_delta").check(T=40, K=5, V=3, dtype=torch.bfloat16, device="cpu")
    assert report.ok, str(report)
    measured = [r for r in report.rows if r.conditioning is not None]
    assert {"o", "d k"} <= {r.name for r in measured}
    for row in measured:
        assert row.conditioning is not None
        assert 1e-4 < row.conditioning[0] < 5e-2
    assert "step loop of this precision" in str(report)
    exact = compiled("gated_delta").check(T=40, dtype=torch.float64, device="cpu", gates="mild")
    assert all(r.conditioning is None for r in exact.rows)  # float64 has no excuse


def test_a_norm_of_one_number_has_a_gradient_that_float32_cannot_hold() -> None:
    # x / sqrt(x x + 1e-6) is nearly the sign of x: what is left of its derivative is rounding
    text = (
        "recurrence signs\ninput q, k : [K]\ninput v : [V]\n"
        "S_t = 0.5 S_{t-1} + l2norm(k_t) v_tᵀ\no_t = S_tᵀ q_t\n"
    )
    report = linalg_dsl.compile(text, backend="torch").check(B=1, T=1, H=1, K=1, V=1, device="cpu")
    (row,) = (r for r in report.rows if r.name == "d k")
    assert row.l2 > row.bound
    assert row.conditioning is not None
    assert report.ok


def test_an_error_beyond_the_conditioning_is_too_large() -> None:
    assert CheckRow("o", 1.9e-2, 1e-3, 1e-2, (1e-2, 1e-3)).ok
    assert not CheckRow("o", 2.1e-2, 1e-3, 1e-2, (1e-2, 1e-3)).ok
    assert not CheckRow("o", math.nan, 1e-3, 1e-2, (1.0, 1.0)).ok


def test_coupled_states_have_the_floor_that_is_derived_for_them() -> None:
    """Rows of the report and no others; of one state, and in types that are not short, there is none."""
    op = linalg_dsl.compile(catalogue_text("mdn"))
    floors = derived_floors(op, torch.bfloat16)
    names = {d.name for d in op.spec.inputs} | {"initial_state M", "initial_state S"}
    assert set(floors) == {"o", "final state M", "final state S", *(f"d {n}" for n in names)}
    assert 1.1e-2 < floors["d p"] < 1.3e-2
    assert floors["d p"] == pytest.approx(8 * derived_floors(op, torch.float16)["d p"])  # 8 bits, and 11
    assert derived_floors(op, torch.float32) == {}
    assert derived_floors(compiled("gated_delta"), torch.bfloat16) == {}
    assert derived_floors(linalg_dsl.compile(catalogue_text("kalman")), torch.bfloat16) == {}


@pytest.mark.parametrize("shape", [(2, 300, 2, 48), (2, 500, 3)])
def test_the_largest_of_normal_errors_is_what_is_expected(shape: tuple[int, ...]) -> None:
    found = []
    for seed in range(20):
        error = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found.append(float(error.abs().max()) / expected_largest(error, by_token=True))
    assert max(found) < 1.25
    assert sum(found) / len(found) > 0.6


def test_errors_of_one_head_alone_are_expected_there() -> None:
    """Heads stand behind tokens: in the order of memory every block would hold some of every head."""
    error = torch.randn(1, 640, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error[:, :, :3] = 0
    largest = float(error.abs().max())
    assert largest < 1.25 * expected_largest(error, by_token=True)
    assert expected_largest(error, by_token=False) < 0.75 * expected_largest(error, by_token=True)
    assert expected_largest(error[:, :10], by_token=True) == 0.0  # too few to tell
