"""Every property holds of what is right and is broken by a fault of its own; failures say what is wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from faulty import FAULTS, SPEC, gated, subject

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.artefacts import Artefacts
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.testing import (
    PROPERTIES,
    NotApplicable,
    PropertyError,
    Subject,
    assert_op_matches_reference,
    run_one,
    run_properties,
)

OF_OPS = {"chunk_size_invariance", "transposition_symmetry", "reductions", "offsets_do_not_wrap"}


def small(name: str) -> dict[str, int]:
    return {"examples": 3 if name in ("matches_reference", "finite_where_the_recurrence_is") else 1}


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("entry", ["simple_gla", "hgrn"])
def test_a_property_holds_of_generated_code(entry: str, name: str) -> None:
    op = linalg_dsl.compile(getattr(ops, entry).spec, backend="torch")
    try:
        PROPERTIES[name](Subject.of_op(op), **small(name))
    except NotApplicable:
        if name == "offsets_do_not_wrap":
            return  # of kernels: tests/testing/test_offsets.py
        assert entry == "hgrn"
        assert name in ("reductions", "chunk_size_invariance", "linearity", "scaling_laws")


def test_conditions_are_found_where_a_state_is_read_in_several_ways() -> None:
    """A stage with two outputs, of which the loss may need one only."""
    op = linalg_dsl.compile(ops.hla.spec, backend="torch")
    assert any(len(s.spec.outputs) > 1 for s in op.stage_ops)
    PROPERTIES["matches_reference"](Subject.of_op(op), seed=400, examples=1)


def test_faults_are_known_for_every_property() -> None:
    assert set(FAULTS) | OF_OPS == set(PROPERTIES)


@pytest.mark.parametrize("name", FAULTS)
def test_a_property_holds_of_a_loop_in_plain_torch(name: str) -> None:
    PROPERTIES[name](subject(), **small(name))


@pytest.mark.parametrize("name", FAULTS)
def test_a_property_is_broken_by_its_fault(name: str) -> None:
    with pytest.raises(PropertyError) as caught:
        PROPERTIES[name](subject(FAULTS[name]), examples=12)
    error = caught.value
    assert error.property == name
    assert error.subject == "mine"
    assert error.tensor in str(error)
    assert error.cause
    assert json.loads(json.dumps(error.failure.as_dict()))["seed"] == error.seed
    assert "T " in error.shape
    again = pickle.loads(pickle.dumps(PropertyError(replace(error.failure, details={}))))
    assert str(again) == str(error)


def mutant(entry: str, change: Callable[[str], str]) -> Subject:
    """An op whose module text is changed, given the options it is compiled with."""
    good = linalg_dsl.compile(getattr(ops, entry).spec, backend="torch")

    def emit(artefacts: Artefacts, backend: str, options: CompileOptions) -> str:
        return change(good.passes.emit(artefacts, backend, options))

    return Subject.of_op(CompiledOp(good.spec, good.options, replace(good.passes, emit=emit), good.stages))


def changed(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


def test_what_is_wrong_from_the_second_chunk_on_is_seen_in_other_chunk_sizes() -> None:
    """The output is a thousandth too large there."""
    call = "return run_chunks(forward_chunk, LAYOUT, call, dry)"
    late = (
        "found = run_chunks(forward_chunk, LAYOUT, call, dry)\n"
        "    found[0][:, LAYOUT['chunk'] :] *= 1.001\n"
        "    return found"
    )
    wrong = mutant("gla", changed(call, late))
    with pytest.raises(PropertyError):
        PROPERTIES["matches_reference"](wrong)
    with pytest.raises(PropertyError, match="a boundary between chunks"):
        PROPERTIES["chunk_size_invariance"](wrong)


def test_a_fault_on_one_side_is_seen_in_the_transposed_recurrence() -> None:
    good = linalg_dsl.compile(ops.gated_delta_rule.spec, backend="torch")

    def emit(artefacts: Artefacts, backend: str, options: CompileOptions) -> str:
        text = good.passes.emit(artefacts, backend, options)
        turned = artefacts.spec.states[0].dims != ("K", "V")
        return text.replace("return o,", "return 1.01 * o,") if turned else text

    op = CompiledOp(good.spec, good.options, replace(good.passes, emit=emit), good.stages)
    with pytest.raises(PropertyError, match="recurrence gives other numbers"):
        PROPERTIES["transposition_symmetry"](Subject.of_op(op), examples=1)


def test_a_wrong_gate_is_seen_in_a_reduction() -> None:
    good = linalg_dsl.compile(ops.kda.spec, backend="torch")

    def call(**x: object) -> object:
        return good(**{**x, "g": 1.01 * x["g"]})  # type: ignore[operator]

    wrong = replace(Subject.of_op(good), call=call)
    with pytest.raises(PropertyError, match="KDA with equal gates"):
        PROPERTIES["reductions"](wrong)


def test_the_first_failure_comes_back_as_small_as_it_can_be() -> None:
    with pytest.raises(PropertyError) as caught:
        PROPERTIES["matches_reference"](subject(FAULTS["matches_reference"]), seed=3)
    shape = caught.value.details["case"].shape
    assert (shape.B, shape.T, shape.H, shape.K, shape.V) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (FAULTS["split_and_continue"], "the initial state is ignored"),
        (FAULTS["matches_reference"], "d k is 1.001 times"),
        (lambda **x: gated(**{**x, "q": x["q"].detach()}), "d q is 0 throughout"),
    ],
)
def test_a_failure_names_its_likely_cause(fault: Callable[..., object], cause: str) -> None:
    with pytest.raises(PropertyError, match=cause):
        PROPERTIES["matches_reference"](subject(fault, gradients=("q", "k", "v", "g")))


def test_a_report_says_what_became_of_every_property() -> None:
    report = run_properties(subject(FAULTS["causality"]), only=["causality", "reductions"], budget_s=5)
    assert not report.ok
    assert report.failed == ("causality",)
    assert [o.status for o in report.outcomes] == ["failed", "not applicable"]
    assert "outputs before token" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["properties"][0]["failure"]["tensor"] == "o"

    def broken(**x: object) -> object:
        raise KeyError("nothing works")

    crashed = run_one(subject(broken), "determinism")
    assert crashed.status == "crashed"
    assert "nothing works" in crashed.message
    with pytest.raises(ArgumentError, match="there is no property 'speed'"):
        run_properties(subject(), only=["speed"])


def test_foreign_code_with_other_names_and_fewer_claims() -> None:
    def theirs(query, key, value, gk, h0=None):  # type: ignore[no-untyped-def]
        return gated(query, key, value, gk, h0)[0]

    names = {"q": "query", "k": "key", "v": "value", "g": "gk", "initial_state": "h0"}
    found = Subject.of_callable(theirs, SPEC, names=names, initial_state=True, sizes=((4, 4),), heads=(2,))
    assert_op_matches_reference(found, examples=4)
    with pytest.raises(NotApplicable, match="takes or gives no state"):
        PROPERTIES["split_and_continue"](found)
    with pytest.raises(NotApplicable, match="takes no packed"):
        PROPERTIES["packed_equals_separate"](found)
    with pytest.raises(ArgumentError, match="gated has no input 'x'"):
        Subject.of_callable(theirs, SPEC, names={"x": "query"})
    assert found.wanted == ("q", "k", "v", "g", "initial_state")
    assert replace(found, gradients=("q",)).wanted == ("q",)
