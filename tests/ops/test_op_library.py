"""Compiled recurrences are well-behaved torch operators."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from op_cases import TEXTS, compiled, expected, gradients, leaves, worst_error
from torch.library import opcheck

import linalg_dsl
from linalg_dsl.errors import InternalError
from linalg_dsl.ops.library import register


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(name: str, packed: bool) -> None:
    op = compiled(name, chunk_size=16)
    tensors, state = leaves(op, 1 if packed else 2, 20, 2, 5, 3, N=3 if packed else None)
    offsets = torch.tensor([0, 0, 7, 20]) if packed else None
    handle = getattr(torch.ops.linalg_dsl, op.operator("torch").name).default
    consts = [math.nan] * len(op.spec.consts)
    assert set(opcheck(handle, (*tensors, state, consts, offsets, True, True)).values()) == {"SUCCESS"}
    assert set(opcheck(handle, (*tensors, None, consts, offsets, False, True)).values()) == {"SUCCESS"}


def test_opcheck_with_strange_strides_and_groups_of_heads() -> None:
    op = compiled("gated_delta", chunk_size=16)
    tensors, state = leaves(op, 2, 20, 4, 5, 3, heads={"q": 2, "beta": 1}, dtype=torch.bfloat16)
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    handle = getattr(torch.ops.linalg_dsl, op.operator("torch").name).default
    assert set(opcheck(handle, (*turned, state, [math.nan], None, True, True)).values()) == {"SUCCESS"}


def test_opcheck_of_the_backward_operator() -> None:
    op = compiled("gated_delta", chunk_size=16)
    tensors, state = (
        [x.detach() for x in y] if isinstance(y, list) else y.detach() for y in leaves(op, 2, 20, 2, 5, 3)
    )
    name = op.operator("torch").name
    o, last, kept = getattr(torch.ops.linalg_dsl, name)(*tensors, state, [math.nan], None, True, True)
    handle = getattr(torch.ops.linalg_dsl, f"{name}_backward").default
    for d_last in (None, last):
        args = (*tensors, state, [math.nan], None, True, kept, o, d_last)
        assert set(opcheck(handle, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["gated_delta", "bonus"])
def test_torch_compile_with_any_length(name: str) -> None:
    op = linalg_dsl.compile(TEXTS[name])  # not run before: everything is made while tracing
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def model(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, last = op(*args[:-1], initial_state=args[-1], output_final_state=True)
        return 2 * o, last

    fast = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (40, 41, 130):
        tensors, state = leaves(op, 2, tokens, 2, 5, 3)
        for got, want in zip(fast(*tensors, state), model(*tensors, state), strict=True):
            assert torch.equal(got, want)
        loss = [f(*tensors, state)[0].sin().sum() + f(*tensors, state)[1].sum() for f in (fast, model)]
        grads = [torch.autograd.grad(x, [*tensors, state]) for x in loss]
        for got, want in zip(*grads, strict=True):
            assert torch.equal(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_torch_compile_of_packed_sequences_and_consts() -> None:
    op = compiled("gated_delta")
    torch._dynamo.reset()

    def model(offsets: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = op(*args, cu_seqlens=offsets, scale=0.5)
        return out

    fast = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for bounds in ([0, 3, 20], [0, 0, 9, 30]):
        tensors, _ = leaves(op, 1, bounds[-1], 2, 5, 3)
        offsets = torch.tensor(bounds)
        assert torch.equal(fast(offsets, *tensors), model(offsets, *tensors))


def test_torch_export() -> None:
    op = compiled("gated_delta")

    class Mixer(torch.nn.Module):
        def forward(self, q, k, v, g, beta):  # type: ignore[no-untyped-def]
            return op(q, k, v, g, beta)

    tensors = tuple(x.detach() for x in leaves(op, 2, 40, 2, 5, 3)[0])
    time = torch.export.Dim("time", min=2, max=4096)
    shapes = tuple({1: time} for _ in tensors)
    program = torch.export.export(Mixer(), tensors, dynamic_shapes=shapes)
    longer = tuple(x.detach() for x in leaves(op, 2, 77, 2, 5, 3)[0])
    assert torch.equal(program.module()(*longer), op(*longer))


def test_autocast_does_not_change_the_types_inside() -> None:
    op = compiled("gated_delta")
    tensors, state = leaves(op, 2, 70, 2, 5, 3, dtype=torch.float32)
    plain = gradients(op, tensors, state, (1.0, 1.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = gradients(op, tensors, state, (1.0, 1.0))
    for got, want in zip(mixed, plain, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    op = compiled("gated_delta")
    tensors, state = leaves(op, 1, 40, 2, 5, 3)

    def model(*x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = op(*x, initial_state=state)
        return out

    def checkpointed(*x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(model, *x, use_reentrant=reentrant)
        return out

    assert len(_gradients(checkpointed, tensors)) == len(tensors)
    for got, want in zip(_gradients(checkpointed, tensors), _gradients(model, tensors), strict=True):
        assert torch.equal(got, want)


def _gradients(run: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for x in tensors:
        x.grad = None
    torch.autograd.backward(run(*tensors).sum())
    return [x.grad for x in tensors if x.grad is not None]


def test_fake_tensors_need_no_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = compiled("gated_delta")
    with FakeTensorMode():
        tensors = [torch.empty(2, 50, 2, 5, dtype=torch.bfloat16)] * 2
        tensors += [torch.empty(2, 50, 2, 3, dtype=torch.bfloat16), *[torch.empty(2, 50, 2)] * 2]
        o, last = op(*tensors, output_final_state=True)
        assert (o.shape, o.dtype) == ((2, 50, 2, 3), torch.bfloat16)
        assert (last.shape, last.dtype) == ((2, 2, 5, 3), torch.float32)


def test_gradients_without_saved_residuals() -> None:
    """A forward told to save nothing can still be differentiated: it runs once more."""
    op = compiled("gated_delta", chunk_size=16)
    tensors, state = leaves(op, 2, 40, 2, 5, 3)
    operator = getattr(torch.ops.linalg_dsl, op.operator("torch").name)
    o, _, kept = operator(*tensors, state, [math.nan], None, True, False)
    assert not kept
    assert o.grad_fn is not None

    def bare(
        *args: torch.Tensor, initial_state: torch.Tensor, output_final_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, last, _ = operator(*args, initial_state, [math.nan], None, output_final_state, False)
        return o, last

    found = gradients(bare, tensors, state, (1.0, 1.0))  # type: ignore[arg-type]
    assert worst_error(found, expected(op, tensors, state, (1.0, 1.0))) < 1e-10


def test_the_same_text_is_registered_once() -> None:
    first = linalg_dsl.compile(TEXTS["bonus"]).operator("torch")
    second = linalg_dsl.compile(TEXTS["bonus"]).operator("torch")
    assert first is second
    assert first.name.startswith("bonus_")
    assert hasattr(torch.ops.linalg_dsl, first.name)
    other = linalg_dsl.compile(TEXTS["bonus"], chunk_size=7).operator("torch")
    assert other.name != first.name


def test_a_module_for_other_inputs_is_refused() -> None:
    text = compiled("bonus").module_text("torch") + "\n# another text\n"
    with pytest.raises(InternalError, match="takes"):
        register(compiled("gated_delta").spec, text)
