"""Every entry says what its paper says, is right, and is a function of linalg_dsl.ops."""

from __future__ import annotations

import inspect
import pickle
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from catalogue_cases import (
    STEPS,
    assert_close,
    by_hand,
    by_op,
    by_reference,
    classes_of,
    make_call,
    spec_of,
    with_gradients,
)

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops import catalogue_names
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.reference import reference

# tests below are about right results; which class an entry has is tested by itself
pytestmark = pytest.mark.filterwarnings("ignore:.* has no chunk form:UserWarning")

K, V = 5, 4
ABSTRACT = "Form taken from the abstract; not compared with the paper's text."
FROM_ABSTRACTS = {"bd_lru", "blurry_window", "ccq", "dgd", "eda", "h_lru", "osdn", "raven"}


def test_every_entry_has_a_loop_written_by_hand() -> None:
    assert set(catalogue_names()) <= set(STEPS)


@pytest.mark.parametrize("name", catalogue_names())
def test_an_entry_says_what_it_is(name: str) -> None:
    spec = spec_of(name)
    assert spec.name == name
    source = r"arXiv \d{4}\.\d{5}|github\.com/\w+/\w+|flash-linear-attention pull request \d+|Nested Learning"
    assert re.search(source, spec.doc)
    for part in ("Side: ", "Order: ", "Read: "):
        assert part in spec.doc
    assert (ABSTRACT in " ".join(spec.doc.split())) == (name in FROM_ABSTRACTS)


@pytest.mark.parametrize("name", catalogue_names())
def test_an_entry_prints_as_itself(name: str) -> None:
    assert parse(str(spec_of(name))) == spec_of(name)


@pytest.mark.parametrize("name", catalogue_names())
def test_an_entry_is_what_the_paper_says(name: str) -> None:
    call = make_call(name, 1, 7, 2, K, V, seed=2)
    assert_close(with_gradients(call, by_reference(call)), with_gradients(call, by_hand(call)), 1e-11)


@pytest.mark.parametrize("name", catalogue_names())
def test_an_entry_starts_as_the_paper_says(name: str) -> None:
    call = make_call(name, 1, 5, 1, K, V, seed=3)
    blank = {s.name: torch.full_like(call.states[s.name], s.start) for s in call.spec.states}
    o, _ = reference(call.spec, call.tensors, consts=call.consts)
    torch.testing.assert_close(o, by_hand(call, blank)[0])


@pytest.mark.parametrize("gates", ["mild", "resets"])
@pytest.mark.parametrize("name", catalogue_names())
def test_the_torch_module_agrees_with_the_step_loop_in_every_gradient(name: str, gates: Any) -> None:
    call = make_call(name, 1, 37, 2, K, V, gates=gates, seed=1)
    found = with_gradients(call, by_op(call, getattr(ops, name), backend="torch"))
    assert_close(found, with_gradients(call, by_reference(call)), 1e-10)


@cache
def in_short_chunks(name: str, backend: str) -> CompiledOp:
    return linalg_dsl.compile(spec_of(name), backend=backend, chunk_size=16)


@pytest.mark.parametrize("name", catalogue_names())
def test_the_torch_module_agrees_over_several_chunks(name: str) -> None:
    call = make_call(name, 2, 37, 1, 3, 6, seed=5)
    found = with_gradients(call, by_op(call, in_short_chunks(name, "torch")))
    assert_close(found, with_gradients(call, by_reference(call)), 1e-10)


@pytest.mark.parametrize("shape", [(1, 37, 2, K, V), (1, 20, 1, 3, 6)], ids=["37-2-5-4", "20-1-3-6"])
@pytest.mark.parametrize("name", catalogue_names())
def test_the_kernels_agree_with_the_step_loop_in_every_gradient(
    name: str, shape: tuple[int, int, int, int, int]
) -> None:
    call = make_call(name, *shape, seed=4).to(torch.float32)
    exact = call.to(torch.float64)
    found = with_gradients(call, by_op(call, in_short_chunks(name, "triton")))
    assert_close(found, with_gradients(exact, by_reference(exact)), 5e-5)


@pytest.mark.parametrize("name", catalogue_names())
def test_the_torch_module_of_an_entry_is_short(name: str) -> None:
    """Forward and backward, without empty lines and comments; loops and helpers are the library's."""
    op = linalg_dsl.compile(spec_of(name))
    texts = [module.text for module in op.modules("torch")] + [op.program_text or ""]
    for text in texts:
        lines = [x for x in text.splitlines() if x.strip() and not x.lstrip().startswith("#")]
        assert len(lines) < 120
        assert max(map(len, lines), default=0) <= 130


@pytest.mark.parametrize("name", catalogue_names())
def test_from_line_to_both_modules_in_seconds(name: str) -> None:
    linalg_dsl.compile(ops.kda.spec).source(backend="triton")  # pays for the imports
    began = time.process_time()
    op = linalg_dsl.compile(catalogue_text(name))
    assert "def backward(" in op.source("backward", backend="triton")
    assert "def backward(" in op.source("backward", backend="torch")
    assert time.process_time() - began < 3


@cache
def page() -> str:
    return (Path(__file__).parents[2] / "docs" / "catalogue.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", catalogue_names())
def test_an_entry_has_the_class_that_its_page_names(name: str) -> None:
    row = next(line for line in page().splitlines() if line.startswith(f"| `{name}`"))
    assert row.split(" | ")[-2] == classes_of(name)


def test_a_const_can_be_given_in_the_call() -> None:
    x: dict[str, Any] = {**draw(spec_of("sigmoid_gla"), 1, 20, 1, K, V)}
    o = ops.sigmoid_gla(**x, tau=4.0, scale=1.0)
    gate = torch.nn.functional.logsigmoid(x["a"]) / 4
    torch.testing.assert_close(o, ops.simple_gla(x["q"], x["k"], x["v"], gate, scale=1.0))


def test_the_function_documents_itself() -> None:
    function = ops.rwkv6
    assert list(inspect.signature(function).parameters)[:5] == ["r", "k", "v", "w", "u"]
    doc = inspect.getdoc(function)
    assert doc is not None
    assert "arXiv 2404.05892" in doc
    assert "w: [B, T, H, K], log decay" in doc
    assert "u: [H, K]" in doc
    assert "S_t = diag(exp(w_t)) S_{t-1} + k_t v_tᵀ" in doc
    assert "State:\n    S: [N, H, K, V]\n" in doc
    several = inspect.getdoc(ops.mlstm)
    assert several is not None
    assert "State (a named tuple):\n    m: [N, H]\n    C: [N, H, K, V]\n    n: [N, H, K]\n" in several


def test_a_function_is_made_once_and_survives_pickling() -> None:
    assert ops.gla is ops.gla
    assert pickle.loads(pickle.dumps(ops.gla)) is ops.gla
    assert ops.gla.op() is ops.gla.op()
    assert isinstance(ops.gla.op(), type(linalg_dsl.compile(ops.gla.spec)))


def test_names_outside_the_catalogue() -> None:
    assert not hasattr(ops, "gated_delta_rules")
    assert set(catalogue_names()) < set(dir(ops))
    with pytest.raises(ArgumentError, match="did you mean gated_delta_rule"):
        catalogue_text("gated_delta_rules")
    with pytest.raises(ArgumentError, match=re.escape("no recurrence '../../setup'")):
        catalogue_text("../../setup")
