"""Recurrences inside of a model of projections: compiled, checkpointed, exported, saved, stepped, copied."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from runtime_cases import inputs_of, op_of, worst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import linalg_dsl
from linalg_dsl.ops.op import CompiledOp

TWO_NORMS = """
recurrence two_norms
input q, k : [K]
input v : [V]
input g : log gate
state c : scalar
n_t = exp(g_t) n_{t-1} + k_t
c_t = exp(g_t) c_{t-1} + 1
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t / (1 + abs(n_tᵀ q_t) + c_t)
"""
NAMES = ("two_norms", "value_erase", "mlstm", "mdn")
"""A normaliser of two states, the value side, a running maximum, coupled states."""
WIDTH, H, K, V = 6, 2, 4, 3


def op_named(name: str) -> CompiledOp:
    return (
        linalg_dsl.compile(TWO_NORMS, backend="torch")
        if name == "two_norms"
        else op_of(name, backend="torch")
    )


class Model(nn.Module):
    """Every input a projection of x, in its range; the output projected back; states handed through."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op_named(name)
        like = inputs_of(self.op, 1, 1, H, K, V)[0]
        assert all(d.timed for d in self.op.spec.inputs)
        self.shapes = [tuple(x.shape[2:]) for x in like]
        self.inner = nn.ModuleList(nn.Linear(WIDTH, math.prod(s)) for s in self.shapes)
        self.outer = nn.Linear(H * V, WIDTH)

    def projected(self, x: Tensor) -> list[Tensor]:
        made = []
        for layer, shape, decl in zip(self.inner, self.shapes, self.op.spec.inputs, strict=True):
            y = layer(x).unflatten(-1, shape)
            if decl.kind == "log_gate":
                y = -nn.functional.softplus(y)
            elif decl.dims:
                y = nn.functional.normalize(y, dim=-1)
            else:
                y = torch.sigmoid(y)
            made.append(y)
        return made

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        o, last = self.op(*self.projected(x), initial_state=state, output_final_state=True)
        return self.outer(o.flatten(2)), last


def drawn(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(seed))


def flat(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def trained(model: Model, run: Any, x: Tensor, state: Any = None) -> list[Tensor]:
    """Output, final states and the gradients of all weights."""
    y, last = run(x, state)
    loss = torch.stack([y.square().mean(), *(s.sin().mean() for s in flat(last))]).sum()
    weights = list(model.parameters())
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return [y.detach(), *(s.detach() for s in flat(last)), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_model_is_compiled_twice_whatever_its_sizes(name: str) -> None:
    """fullgraph, forward and backward, with and without checkpoints, states handed in."""
    model = Model(name)

    def kept(x: Tensor, state: Any) -> Any:
        return checkpoint(model, x, state, use_reentrant=False)

    for inner in (model, kept):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        fast: Any = torch.compile(inner, fullgraph=True, backend="aot_eager")
        for B, T in ((2, 17), (3, 33), (7, 5)):
            _, before = model(drawn(B, 3, 9))
            state = torch.utils._pytree.tree_map(Tensor.detach, before)
            assert (
                worst(trained(model, fast, drawn(B, T), state), trained(model, model, drawn(B, T), state))
                < 1e-5
            )
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_exported_saved_and_copied(name: str) -> None:
    model = Model(name)
    batch, time = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("time", min=2, max=4096)

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)[0]
            return y

    program = torch.export.export(Only(), (drawn(2, 17),), dynamic_shapes=({0: batch, 1: time},))
    room = io.BytesIO()
    torch.export.save(program, room)
    torch.save(model, room2 := io.BytesIO())
    room.seek(0)
    room2.seek(0)
    wanted = [model(drawn(3, 40))[0]]
    for other in (
        torch.export.load(room).module(),
        torch.load(room2, weights_only=False),
        copy.deepcopy(model),
    ):
        found = other(drawn(3, 40))
        assert worst([found if isinstance(found, Tensor) else found[0]], wanted) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_model_decodes_in_place(name: str) -> None:
    model = Model(name)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def step(x: Tensor, state: Any) -> Any:
        o, after = model.op.step(*model.projected(x), state=state)
        return model.outer(o.flatten(2)), after

    fast: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = drawn(2, 6)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        wanted, last = model(x)
        state = model.op.new_state(2, H, K=K, V=V)
        outputs = []
        for t in range(x.shape[1]):
            y, state = fast(x[:, t : t + 1], state)
            outputs.append(y)
    assert worst([torch.cat(outputs, 1), *flat(state)], [wanted, *flat(last)]) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
