"""What compiled kernels cannot be put under is refused by name; the reference takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_cases import inputs_of, op_of
from torch import Tensor

NAMES = ("gated_delta_rule", "looking_back", "own_scan")


@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_refused(name: str) -> None:
    op = op_of(name, backend="torch")
    tensors = [x.expand(2, *x.shape) for x in inputs_of(op, 1, 4, 2, 3, 2)[0]]
    with pytest.raises(RuntimeError, match=rf"{name}: torch.vmap over .* is not supported"):
        torch.vmap(lambda *x: op(*x))(*tensors)
    assert torch.vmap(lambda *x: op.reference(*x))(*tensors).shape[0] == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transform", ["grad", "jacrev", "jvp"])
def test_function_transforms_are_refused(name: str, transform: str) -> None:
    op = op_of(name, backend="torch")
    tensors = inputs_of(op, 1, 4, 2, 3, 2)[0]

    def loss(x: Tensor) -> Tensor:
        out: Tensor = op(x, *tensors[1:])
        return out.sum()

    runs: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(loss)(tensors[0]),
        "jacrev": lambda: torch.func.jacrev(loss)(tensors[0]),
        "jvp": lambda: torch.func.jvp(loss, (tensors[0],), (tensors[0],)),
    }
    with pytest.raises(RuntimeError, match=rf"{name}: .* not supported.*op\.reference"):
        runs[transform]()


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_refused_and_the_reference_has_them(name: str) -> None:
    op = op_of(name, backend="torch")
    tensors = [x.requires_grad_() for x in inputs_of(op, 1, 3, 1, 2, 2, dtype=torch.float64)[0]]
    first = torch.autograd.grad(op(*tensors).square().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"{name}.*op\.reference"):
        torch.autograd.backward(torch.stack([x.square().sum() for x in first]).sum())
    assert torch.autograd.gradgradcheck(lambda *x: op.reference(*x), tensors)
