"""Work before a first use, which is off by default, on a GPU: calls are right, and all was compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_cases import CLASSES, inputs_of, op_of, with_gradients, worst

from linalg_dsl.ops import first_use
from linalg_dsl.ops.op import CompiledOp

# what spills at every size is said in a warning of its own, which is no fault of the call
pytestmark = pytest.mark.gpu
OFFSETS = [0, 0, 100, 131]


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Switches it on; of every round of compiling how many launches it was asked for."""
    monkeypatch.setenv(first_use.ENVIRONMENT_VARIABLE, "1")
    asked: list[int] = []
    compile_all = first_use.compile_side_by_side

    def counted(module: Any, launches: Any) -> list[int]:
        asked.append(len(launches))
        return compile_all(module, launches)

    monkeypatch.setattr(first_use, "compile_side_by_side", counted)
    return asked


def both_ways(op: CompiledOp, exact: CompiledOp, H: int, packed: bool) -> tuple[Any, Any]:
    """Results and gradients of the kernels, and of the torch backend in float64."""
    tensors, states = inputs_of(op, 1, 131, H, 32, 48, N=len(OFFSETS) - 1 if packed else None)
    given: dict[str, Any] = {"cu_seqlens": torch.tensor(OFFSETS)} if packed else {}
    there = {n: x.cuda() for n, x in given.items()}
    found = with_gradients(op, [x.cuda() for x in tensors], [x.cuda() for x in states], **there)
    wide = with_gradients(exact, [x.double() for x in tensors], [x.double() for x in states], **given)
    return [x.cpu() for x in (*found[0], *found[1])], [*wide[0], *wide[1]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_a_prepared_call_is_right(name: str, packed: bool, prepared: list[int]) -> None:
    # number of heads that no other test has: the operators of a text are one in a process
    op, exact = op_of(name, backend="triton", nan_exact=False), op_of(name, backend="torch")
    found, wanted = both_ways(op, exact, 3 + packed, packed)
    assert worst(found, wanted) < 1e-3
    assert sum(prepared) > 0
    again = len(prepared)
    found, _ = both_ways(op, exact, 3 + packed, packed)
    assert len(prepared) == again
    assert worst(found, wanted) < 1e-3


def test_a_captured_call_is_not_prepared(prepared: list[int]) -> None:
    op = op_of("gla", backend="triton", chunk_size=32)
    tensors = [x.cuda() for x in inputs_of(op, 1, 64, 5, 32, 32)[0]]
    assert first_use.compiles(tensors[0].device)
    with torch.no_grad():
        op(*tensors)
    before = len(prepared)
    assert before
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        assert not first_use.compiles(tensors[0].device)
        op(*tensors)
    assert len(prepared) == before
