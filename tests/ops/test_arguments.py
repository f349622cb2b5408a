"""Wrong arguments of every kind: one clear error that names the argument, before anything is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_cases import inputs_of, op_of
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.stage_op import StageOp

NAMES = ("gated_delta_rule", "mixed_reads", "looking_back", "own_scan", "delta_product")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a stage was run")

    monkeypatch.setattr(StageOp, "run", run)


def refuse(op: CompiledOp, message: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        op(*args, **kwargs)
    assert str(caught.value).startswith(f"{op.spec.name}: ") or op.spec.name in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_named_when_it_is_wrong(name: str) -> None:
    op = op_of(name, backend="torch")
    tensors, _ = inputs_of(op, 2, 9, 4, 5, 3)
    named = {d.name: x for d, x in zip(op.spec.inputs, tensors, strict=True)}
    for decl in op.spec.inputs:
        n, x = decl.name, named[decl.name]

        def wrong(message: str, value: Any, n: str = n) -> None:
            refuse(op, f"{n} {message}", **{**named, n: value})

        wrong("must be a tensor", 1.0)
        wrong("must be a tensor", None)
        wrong(r"must be \[.*, got shape", x[..., None])
        wrong(r"must be \[.*, got shape", x[0])
        for kind in (torch.int32, torch.int64, torch.bool, torch.complex64):
            wrong(f"must be float16, bfloat16, float32 or float64, got {kind}", x.to(kind))
        elsewhere = x.to("meta")
        with pytest.raises(
            ArgumentError, match=rf"{op.spec.name}: \w+ is on (meta|cpu), expected (cpu|meta)"
        ):
            op(**{**named, n: elsewhere})
        wrong("has 3 heads; a head count divides the largest, 4", x[:, :, :3] if decl.timed else x[:3])
        wrong("has 0 heads", x[:, :, :0] if decl.timed else x[:0])
        if decl.timed:
            with pytest.raises(ArgumentError, match=r"\w+ has B, T = \(2, [89]\), expected \(2, [89]\)"):
                op(**{**named, n: x[:, :8]})
            with pytest.raises(ArgumentError, match=r"\w+ has B, T = \([12], 9\), expected \([12], 9\)"):
                op(**{**named, n: x[:1]})
        if decl.dims and isinstance(decl.dims[-1], str):
            with pytest.raises(ArgumentError, match=rf"axis {decl.dims[-1]} (is \d|of \w+ is empty)"):
                op(**{**named, n: x[..., :0]})
        refuse(op, f"missing .*{n}", **{m: y for m, y in named.items() if m != n})
    axis = op.spec.inputs[0].dims[-1]
    other = next(d.name for d in reversed(op.spec.inputs) if d.dims and d.dims[-1] == axis)
    with pytest.raises(
        ArgumentError, match=f"{other} .* axis {axis} is 1., expected|axis {axis} is 6, expected"
    ):
        op(**{**named, other: torch.cat([named[other]] * 2, -1)})


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_nobody_knows(name: str) -> None:
    op = op_of(name, backend="torch")
    tensors, _ = inputs_of(op, 2, 9, 4, 5, 3)
    count = len(tensors)
    refuse(op, rf"takes {count} tensors .* got {count + 1}", *tensors, tensors[0])
    first = op.spec.inputs[0].name
    refuse(op, f"{first} is given twice", *tensors, **{first: tensors[0]})
    refuse(op, "has no argument 'gait'", *tensors, gait=tensors[0])
    refuse(op, "missing", *tensors[:-1])
    for const in op.spec.consts:
        refuse(op, f"const {const.name} must be a number, got Tensor", *tensors, **{const.name: tensors[0]})
        refuse(op, f"const {const.name} must be finite", *tensors, **{const.name: float("inf")})


@pytest.mark.parametrize("name", NAMES)
def test_states_of_the_wrong_shape_type_or_place(name: str) -> None:
    op = op_of(name, backend="torch")
    tensors, states = inputs_of(op, 2, 9, 4, 5, 3)

    def given(wrong: Tensor) -> Any:
        return wrong if len(states) == 1 else [*states[:-1], wrong]

    last = states[-1]
    refuse(
        op,
        r"initial_state.* must be \[N, H, .*\] = \(2, 4.*got shape",
        *tensors,
        initial_state=given(last[:1]),
    )
    refuse(op, r"initial_state.* must be \[N, H", *tensors, initial_state=given(last[:, :2]))
    refuse(op, r"initial_state.* must be \[N, H", *tensors, initial_state=given(last[..., None]))
    refuse(op, r"initial_state.* must be \[N, H", *tensors, initial_state=given(last[..., :2]))
    refuse(
        op,
        "initial_state.* must be a floating-point tensor, got torch.int64",
        *tensors,
        initial_state=given(last.long()),
    )
    refuse(op, "initial_state.* is on meta, expected cpu", *tensors, initial_state=given(last.to("meta")))
    refuse(op, "initial_state", *tensors, initial_state=3.0)
    refuse(op, "initial_state.* got 5", *tensors, initial_state=[last] * 5)
    refuse(op, "initial_state has 'Z', which is no state", *tensors, initial_state={"Z": last})
    if len(states) > 1:
        refuse(op, "initial_state must hold one tensor each of", *tensors, initial_state=last)


@pytest.mark.parametrize("name", NAMES)
def test_offsets_of_the_wrong_shape_type_place_or_order(name: str) -> None:
    op = op_of(name, backend="torch", debug=True)
    tensors, _ = inputs_of(op, 1, 9, 4, 5, 3)
    right = torch.tensor([0, 4, 9])
    refuse(op, "must be an int32 or int64 tensor, got torch.float32", *tensors, cu_seqlens=right.float())
    refuse(op, "must be an int32 or int64 tensor, got list", *tensors, cu_seqlens=[0, 9])
    refuse(op, r"cu_seqlens must be \[N \+ 1\]", *tensors, cu_seqlens=right[None])
    refuse(op, r"cu_seqlens must be \[N \+ 1\]", *tensors, cu_seqlens=right[:0])
    refuse(op, "cu_seqlens is on meta, expected cpu", *tensors, cu_seqlens=right.to("meta"))
    for wrong in ([1, 9], [0, 8], [0, 5, 4, 9], [0, 10]):
        refuse(op, "cu_seqlens must rise from 0 to T = 9", *tensors, cu_seqlens=torch.tensor(wrong))
    refuse(op, "cu_seqlens_cpu needs cu_seqlens", *tensors, cu_seqlens_cpu=right)
    refuse(
        op, "cu_seqlens_cpu must be a tensor on the CPU", *tensors, cu_seqlens=right, cu_seqlens_cpu=[0, 9]
    )
    refuse(op, "cu_seqlens_cpu has shape", *tensors, cu_seqlens=right, cu_seqlens_cpu=right[1:])
    refuse(op, "max_seqlen must be an int", *tensors, cu_seqlens=right, max_seqlen=9.0)
    refuse(
        op,
        r"initial_state.*= \(2, 4",
        *tensors,
        cu_seqlens=right,
        initial_state=inputs_of(op, 1, 9, 4, 5, 3)[1],
    )


def test_numbers_that_want_gradients_are_numbers() -> None:
    """torch itself refuses whole numbers that want gradients, so none can come in."""
    with pytest.raises(RuntimeError, match="floating point"):
        torch.zeros(3, dtype=torch.int64).requires_grad_()


@pytest.mark.parametrize("name", NAMES)
def test_right_arguments_are_run(name: str) -> None:
    op = op_of(name, backend="torch")
    tensors, states = inputs_of(op, 2, 9, 4, 5, 3)
    with pytest.raises(AssertionError, match="a stage was run"):
        op(*tensors, initial_state=states if len(states) > 1 else states[0])
