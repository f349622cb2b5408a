"""The certificate: worst errors, proofs, a kept input, a counterexample; the model that judges elements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from faulty import FAULTS, subject

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.testing import Extremes, Shape, Subject, load_case, make_case, save_case
from linalg_dsl.testing.cases import run
from linalg_dsl.testing.certificate import Certificate, certify
from linalg_dsl.testing.compare import allowance, decays
from linalg_dsl.testing.floor import chunk_floor, relative_errors
from linalg_dsl.testing.oracle import exact
from linalg_dsl.testing.properties_reference import check_case


def test_op_check_without_a_case_is_a_certificate(tmp_path: Path) -> None:
    op = linalg_dsl.compile(ops.gla.spec, backend="torch")
    found = op.check(draws=4, device="cpu")
    assert isinstance(found, Certificate)
    assert found.ok, str(found)
    assert found.draws == 4
    assert [r.name for r in found.rows][:3] == ["o", "final state", "d q"]
    data = json.loads(json.dumps(found.as_dict()))
    assert all(0 <= row["of_allowed"] <= 1 and row["ulps"] >= 0 for row in data["rows"])
    assert any("exponent" in line for line in found.proved)
    assert {c["gates"] for c in found.curves} >= {"mild", "strong", "resets"}
    assert all(c["error"] < 1e-5 and c["floor"] >= 2.0**-24 for c in found.curves)
    kept = found.keep(tmp_path / "worst.pt")
    check_case(Subject.of_op(op), load_case(op.spec, kept))


def test_a_certificate_of_wrong_code_has_the_smallest_counterexample(tmp_path: Path) -> None:
    wrong = subject(FAULTS["matches_reference"])
    found = certify(wrong, dtype=torch.float64, draws=3, curves=False)
    assert not found.ok
    assert found.failure is not None
    assert "T 1 H 1 K 1 V 1" in found.failure.shape
    assert "TOO LARGE" in str(found)
    assert "likely" in str(found)
    case = load_case(wrong.spec, found.keep(tmp_path / "worst.pt"))
    with pytest.raises(AssertionError):
        check_case(wrong, case)


def test_a_case_on_disk_is_the_case(tmp_path: Path) -> None:
    op = linalg_dsl.compile(ops.gla.spec, backend="torch")
    shape = Shape(1, 8, 2, 3, 2, (3, 0, 5))
    ends = Extremes(gates="resets")
    made = make_case(Subject.of_op(op), shape, seed=3, extremes=ends, heads={"k": 1})
    save_case(made, tmp_path / "case.pt")
    again = load_case(op.spec, tmp_path / "case.pt")
    assert str(again) == str(made)
    for mine, theirs in ((made.tensors, again.tensors), (made.weights, again.weights)):
        assert all(torch.equal(x, theirs[n]) for n, x in mine.items())
    with pytest.raises(ArgumentError, match="was saved for gla with the inputs"):
        load_case(ops.delta_rule.spec, tmp_path / "case.pt")
    (tmp_path / "other.pt").write_bytes(b"nothing")
    with pytest.raises(ArgumentError, match="is no saved case"):
        load_case(op.spec, tmp_path / "other.pt")
    with pytest.raises(ArgumentError, match="cannot read"):
        load_case(op.spec, tmp_path / "missing.pt")


def test_the_condition_of_a_difference_is_its_size_over_what_is_left() -> None:
    """Keys that are erased again: what is left is small, and its error is that of what was there."""
    text = (
        "recurrence kept\ninput k : [K] unit\ninput v : [V]\ninput beta : scalar in (0, 1)\n"
        "S_t = (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ\no_t = S_tᵀ k_t\n"
    )
    found = Subject.of_op(linalg_dsl.compile(parse(text), backend="torch"), dtypes=(torch.float32,))
    ends = Extremes(keys="identical", scalars="high end")
    case = make_case(found, Shape(1, 12, 1, 1, 3), extremes=ends, cotangents="final state")
    oracle = exact(case)
    gradient = oracle.want["d initial_state"].abs().max()
    assert float(gradient) < 1e-12  # twelve tokens that each leave a 256th
    assert float(oracle.condition["d initial_state"].max()) > 1e3 * float(gradient)
    results = run(found, case)
    assert float((results["d initial_state"].double() - oracle.want["d initial_state"]).abs().max()) < float(
        allowance(found, case, oracle, "d initial_state").max()
    )


def test_what_feeds_a_decay_is_known_from_the_spec() -> None:
    assert decays(ops.gated_delta_rule.spec) == {"g"}
    assert decays(ops.sigmoid_gla.spec) >= {"a"}
    assert "k" not in decays(ops.kda.spec)


@pytest.mark.parametrize("name", ["gla", "delta_rule"])
def test_the_floor_of_bfloat16_is_that_of_eight_bits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    op = linalg_dsl.compile(getattr(ops, name).spec, backend="torch")
    found = Subject.of_op(op, dtypes=(torch.bfloat16,))
    case = make_case(found, Shape(1, 48, 1, 16, 16), dtype=torch.bfloat16)
    want = exact(case).want
    floor = chunk_floor(case, want)
    print({n: f"{x:.1e}" for n, x in floor.items()})
    assert all(2e-4 < x < 2e-2 for x in floor.values()), floor
    errors = relative_errors(case, run(found, case), want)
    assert all(error < 2 * floor[n] for n, error in errors.items())
