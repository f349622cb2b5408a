"""reverse=True runs the recurrence from the last token of every sequence to the first."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_cases import CLASSES, call, inputs_of, op_of, with_gradients, worst
from torch import Tensor

from linalg_dsl.codegen.cache import load_module
from linalg_dsl.ops.op import CompiledOp

BOUNDS = [0, 0, 5, 22, 23, 23]


def turned(op: CompiledOp, tensors: list[Tensor], bounds: list[int]) -> list[Tensor]:
    """Every sequence from its last token to its first, where it stands."""
    order = [t for a, b in pairwise(bounds) for t in reversed(range(a, b))]
    return [x[:, order] if d.timed else x for x, d in zip(tensors, op.spec.inputs, strict=True)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_it_is_the_recurrence_on_tokens_turned_around(name: str, packed: bool) -> None:
    forward, op = op_of(name, backend="torch"), op_of(name, backend="torch", reverse=True)
    B, T, bounds = (1, 23, BOUNDS) if packed else (2, 23, [0, 23])
    N = len(bounds) - 1 if packed else None
    tensors, states = inputs_of(op, B, T, 2, 5, 3, N=N, dtype=torch.float64)
    offsets: dict[str, Any] = {"cu_seqlens": torch.tensor(bounds)} if packed else {}
    results, grads = with_gradients(op, tensors, states, **offsets)

    def by_hand(*given: Tensor, **options: Any) -> Any:
        o, last = forward(*turned(op, list(given), bounds), **options)
        order = [t for a, b in pairwise(bounds) for t in reversed(range(a, b))]
        return o[:, order], last

    wanted, d_wanted = with_gradients(by_hand, tensors, states, **offsets)
    assert worst([*results, *grads], [*wanted, *d_wanted]) < 1e-11
    loop, d_loop = with_gradients(op.reference, tensors, states, **offsets)
    assert worst([*results, *grads], [*loop, *d_loop]) < 1e-10


@pytest.mark.parametrize("name", ["gated_delta_rule", "looking_back", "own_scan"])
def test_continuing_from_the_end_is_the_whole(name: str) -> None:
    """The initial state comes after the last token: the end of a sequence is run first."""
    op = op_of(name, backend="torch", reverse=True)
    tensors, states = inputs_of(op, 2, 40, 2, 5, 3, dtype=torch.float64)
    timed = [d.timed for d in op.spec.inputs]
    whole = call(op, tensors, states)
    for cut in (1, 17, 39):
        ahead, behind = (
            [x[:, s] if t else x for x, t in zip(tensors, timed, strict=True)]
            for s in (slice(cut), slice(cut, None))
        )
        late = call(op, behind, states)
        early = call(op, ahead, late[1:])
        assert worst([torch.cat([early[0], late[0]], 1), *early[1:]], whole) < 1e-11


def test_it_checks_itself_and_says_what_it_does() -> None:
    op = op_of("gla", backend="torch", reverse=True)
    assert op.check(T=50, K=4, V=3).ok
    assert op.check(K=4, V=3, cu_seqlens=[0, 0, 20, 50], dtype=torch.bfloat16).ok
    assert "from the last token of every sequence to the first" in str(op.plan.explain())
    assert "q = q.flip(1)" in op.source(backend="torch")


def test_kernels_run_it_too() -> None:
    op = op_of("gated_delta_rule", backend="triton", chunk_size=16, reverse=True)
    assert op.check(K=4, V=3, H=1, cu_seqlens=[0, 3, 20]).ok


def test_a_file_of_it_stands_alone(tmp_path: Path) -> None:
    op = op_of("mixed_reads", backend="torch", reverse=True)
    tensors, states = inputs_of(op, 1, 23, 2, 5, 3, N=len(BOUNDS) - 1)
    path = op.export(tmp_path / "mine.py", backend="torch")
    function = load_module("mine", path.read_text(encoding="utf-8")).mixed_reads
    given = {"cu_seqlens": torch.tensor(BOUNDS)}
    for got, want in zip(
        call(function, tensors, states, **given), call(op, tensors, states, **given), strict=True
    ):
        assert torch.equal(got, want)


def test_wrong_offsets_are_shown_as_they_were_given() -> None:
    op = op_of("gla", backend="torch", reverse=True)
    tensors, _ = inputs_of(op, 1, 9, 2, 5, 3)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to T = 9, got \[0, 8\]"):
        op(*tensors, cu_seqlens=torch.tensor([0, 8]))
