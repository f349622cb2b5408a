"""Strategies give what they promise, shrink to the smallest, and the fuzzer saves what it finds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import linalg_dsl
from linalg_dsl import testing
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.promises import check_promises
from linalg_dsl.testing import Case, Failure, PropertyError, Shape, fuzz
from linalg_dsl.testing.degrees import linear_in, scalings
from linalg_dsl.testing.extremes import GATES, KEYS, SCALARS, VALUES, applicable
from linalg_dsl.testing.strategies import CLASSES


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_gives_specs_that_read_back(kind: str) -> None:
    @settings(max_examples=15)
    @given(testing.specs((kind,)))
    def read_back(spec: RecurrenceSpec) -> None:
        assert parse(str(spec)) == spec
        used = str(spec).split("\n\n", 2)[-1]
        assert all(d.name in used for d in spec.inputs)

    read_back()


def test_recurrences_shrink_to_linear_attention() -> None:
    found = find(testing.specs(), lambda spec: True, settings=settings(database=None))
    assert "S_t = S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ q_t" in str(found)


def test_shapes_shrink_to_one_token() -> None:
    found = find(testing.shapes(), lambda s: True, settings=settings(database=None))
    assert found == Shape(1, 1, 1, 1, 1)
    packed = find(testing.shapes(), lambda s: s.lengths is not None, settings=settings(database=None))
    assert sum(packed.lengths or ()) == packed.T


@settings(max_examples=40)
@given(st.data())
def test_inputs_keep_the_promises_of_the_spec(data: st.DataObject) -> None:
    text = (
        "recurrence wide\ninput k : [K] unit\ninput v : [V]\ninput g : log gate in (-inf, 0.5]\n"
        "input f : gate [K] in (-1, 1)\ninput n : gate in [0, 1]\ninput beta : scalar in (0, 2)\n"
        "S_t = n_t exp(g_t) diag(f_t) S_{t-1} + beta_t k_t v_tᵀ\no_t = S_tᵀ k_t\n"
    )
    spec = parse(text)
    assert applicable(spec) == {"gates": GATES, "keys": KEYS, "scalars": SCALARS, "values": VALUES}
    case: Case = data.draw(testing.inputs(spec, (torch.float32, torch.bfloat16)))
    check_promises(spec, list(case.tensors.values()))
    assert case.weights["o"].dtype == case.dtype


def test_without_hypothesis_a_strategy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("linalg_dsl.testing.strategies")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"pip install 'linalg-dsl\[testing\]'"):
        testing.specs  # noqa: B018
    with pytest.raises(AttributeError):
        testing.nothing  # noqa: B018


def test_degrees_decide_what_is_linear() -> None:
    from linalg_dsl import ops

    assert linear_in(ops.gated_delta_rule.spec) == (("v",), ("S",))
    assert linear_in(ops.kda.spec) == (("v",), ("S",))
    assert {law.inputs[0][0] for law in scalings(ops.gated_delta_rule.spec)} == {"q", "v"}
    assert {law.inputs[0][0] for law in scalings(ops.gla.spec)} == {"q", "k", "v"}
    assert linear_in(ops.lstm.spec) is None


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "BATCH", 4)


@pytest.mark.filterwarnings("ignore:.* has no chunk form:UserWarning")
@pytest.mark.usefixtures("few")
def test_the_fuzzer_runs_and_counts(tmp_path: Path) -> None:
    lines: list[str] = []
    tally = fuzz.run(0.0005, 7, tmp_path, classes=("chunk",), kernels=0.0, say=lines.append)
    assert tally.specs >= 1
    assert not tally.failures, lines
    assert "seed 7 (torch)" in lines[0]


@pytest.mark.usefixtures("few")
def test_the_fuzzer_saves_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(subject: object, case: Case) -> None:
        found = Failure("drawn", "check", case.seed, str(case), "o", (0,), 1.0, 2.0, 0.1, "a test")
        raise PropertyError(found)

    monkeypatch.setattr(fuzz, "check_case", wrong)
    tally = fuzz.run(0.0005, 3, tmp_path, classes=("chunk",), kernels=0.0, say=lambda line: None)
    assert tally.failures == ["torch wrong o"]
    saved = tmp_path / "torch_seed3.rec"
    spec = linalg_dsl.parse(saved.read_text(encoding="utf-8"))
    assert "S_t = S_{t-1} + k_t v_tᵀ" in str(spec)
    assert testing.load_case(spec, saved.with_suffix(".pt")).shape.T >= 1
    assert "likely    a test" in saved.with_suffix(".txt").read_text(encoding="utf-8")
