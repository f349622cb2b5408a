"""Tensors with fewer heads than others: any mix that divides, either way round; nothing is spread."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import linalg_dsl
from linalg_dsl.ops.args import bind
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.replay import Replay

SIDE = """
recurrence side_state
input q, k : [K]
input v : [V]
input w : [K]
state n : [K]
S_t = S_{t-1} + k_t v_tᵀ
n_t = n_{t-1} + w_t
o_t = S_tᵀ q_t
"""
CONSTS: dict[str, dict[str, Any]] = {"gsa": {"m": 3.0}, "abc": {"m": 3.0}}


def compiled(name: str, backend: str) -> CompiledOp:
    return linalg_dsl.compile(catalogue_text(name), backend=backend)


def with_gradients(op: CompiledOp, tensors: dict[str, Tensor], consts: dict[str, Any]) -> list[Tensor]:
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    o = op(**leaves, **consts)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), list(leaves.values()))]


@pytest.mark.parametrize("heads", [{"q": 1, "k": 2}, {"v": 1}, {"q": 1, "k": 2, "v": 4}])
@pytest.mark.parametrize("name", ["gla", "gated_oja", "delta_rule"])
def test_kernels_share_heads_in_any_mix(name: str, heads: dict[str, int]) -> None:
    op, exact = compiled(name, "triton"), compiled(name, "torch")
    tensors = draw(op.spec, 1, 5, 4, 3, 4, dtype=torch.float32, heads=heads)
    found, again = (with_gradients(op, tensors, {}) for _ in range(2))
    wanted = with_gradients(exact, {n: x.double() for n, x in tensors.items()}, {})
    for x, y, z in zip(found, again, wanted, strict=True):
        assert torch.equal(x, y)
        assert torch.allclose(x.double(), z, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gla", "longhorn", "kda"])
def test_nothing_but_kernels_runs_in_a_forward_of_shared_heads(name: str) -> None:
    op = compiled(name, "triton")
    few = {op.spec.inputs[0].name: 1, op.spec.inputs[1].name: 2}
    tensors = draw(op.spec, 1, 5, 4, 3, 4, dtype=torch.float32, heads=few)
    for _ in range(2):
        op(**tensors)
    (made,) = op.stage_ops[0].quick.cache.found.values()
    assert isinstance(made, Replay)  # else something other than allocations and launches was done


@pytest.mark.parametrize("name", ["gsa", "mlstm", "lightnet"])
@pytest.mark.parametrize("which", ["first", "last", "all but the first", "all but the last"])
def test_stages_share_heads(name: str, which: str) -> None:
    op = compiled(name, "torch")
    names = [i.name for i in op.spec.inputs]
    chosen = {"first": names[:1], "last": names[-1:], "all but the first": names[1:]}.get(which, names[:-1])
    consts = CONSTS.get(name, {})
    tensors = draw(op.spec, 2, 6, 4, 3, 5, consts=consts, heads=dict.fromkeys(chosen, 2))
    wide = {n: x.repeat_interleave(4 // x.shape[2], 2) for n, x in tensors.items()}
    found = with_gradients(op, tensors, consts)
    o, *grads = with_gradients(op, wide, consts)
    wanted = [o]
    for grad, x in zip(grads, tensors.values(), strict=True):
        few = x.shape[2]
        wanted.append(grad.reshape(*grad.shape[:2], few, 4 // few, *grad.shape[3:]).sum(3))
    for x, y in zip(found, wanted, strict=True):
        assert torch.allclose(x, y, atol=1e-9)
    both, other = (op(**t, **consts, output_final_state=True) for t in (tensors, wide))
    for x, y in zip((both[0], *both[1]), (other[0], *other[1]), strict=True):
        assert x.shape == y.shape
        assert torch.allclose(x, y, atol=1e-9)


def test_a_stage_runs_with_no_more_heads_than_its_inputs_have() -> None:
    op = compiled("gsa", "torch")
    consts = CONSTS["gsa"]
    tensors = draw(op.spec, 1, 6, 4, 3, 5, consts=consts, heads={"q": 1, "k": 1, "g": 2})
    seen: list[list[int]] = []

    def watched(run: Any, given: Any, *rest: Any) -> Any:
        seen.append([x.shape[2] for x in given if x.dim() > 2])
        return run(given, *rest)

    call = bind(op.spec, (), {**tensors, **consts}, None, None)
    runs = [partial(watched, partial(s.run, "torch", call.consts)) for s in op.stage_ops]
    o, _ = op.run_stages(runs, call, None, False)
    assert o.shape[2] == 4
    assert [max(counts) for counts in seen] == [2, 4]
    _, spread = op.run_stages(runs, call, None, True)  # states that come out are spread, not the inputs
    states = [x for x in spread if x is not None]
    assert seen[2:] == seen[:2]
    assert [x.shape[1] for x in states] == [4, 4]
    # states that go in have heads of their own, which the inputs of a stage go on to share
    initial = [torch.randn(1, 4, *x.shape[2:]) for x in states]
    given = bind(op.spec, (), {**tensors, **consts}, initial, None)
    o, ends = op.run_stages(runs, given, None, True)
    assert seen[4] == seen[0]
    wanted, last = op.reference(**tensors, **consts, initial_state=initial, output_final_state=True)
    for x, y in zip((o, *ends), (wanted, *last), strict=True):
        assert x is not None
        assert torch.allclose(x, y.to(x.dtype), atol=1e-5)


@pytest.mark.parametrize("name", ["gsa", "mlstm"])
def test_kernels_of_a_stage_take_states_with_more_heads_than_inputs(name: str) -> None:
    op, exact = compiled(name, "triton"), compiled(name, "torch")
    consts = CONSTS.get(name, {})
    few = {i.name: 1 for i in op.spec.inputs[:-1]}
    tensors = draw(op.spec, 1, 5, 2, 3, 4, dtype=torch.float32, consts=consts, heads=few)
    _, last = exact(**tensors, **consts, output_final_state=True)
    state = [torch.randn_like(x) for x in last]
    options = {**consts, "initial_state": state, "output_final_state": True}
    leaves = [x.requires_grad_() for x in (*tensors.values(), *state)]

    def results(f: Any) -> list[Tensor]:
        o, last = f(**tensors, **options)
        grads = torch.autograd.grad(o.sum() + sum(x.sum() for x in last), leaves, allow_unused=True)
        return [o, *last, *(torch.zeros(()) if g is None else g for g in grads)]

    for x, y in zip(results(op), results(exact), strict=True):
        assert torch.allclose(x, y, atol=1e-4, rtol=1e-4)


def test_heads_of_what_the_output_does_not_read_count() -> None:
    op = linalg_dsl.compile(SIDE, backend="torch")
    tensors = draw(op.spec, 1, 4, 4, 3, 5, heads={"q": 2, "k": 2, "v": 1})
    o = op(**tensors)
    both, last = op(**tensors, output_final_state=True)
    assert o.shape == (1, 4, 4, 5)
    assert torch.allclose(o, both)
    assert torch.allclose(o, op.reference(**tensors))
    assert last.S.shape == (1, 4, 3, 5)


@pytest.mark.parametrize(("backend", "kind"), [("torch", torch.bfloat16), ("triton", torch.float16)])
@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_oja", "longhorn", "mlstm"])
def test_states_come_in_short_types_and_go_out_in_float32(name: str, backend: str, kind: torch.dtype) -> None:
    op, exact = compiled(name, backend), compiled(name, "torch")
    tensors = draw(op.spec, 1, 5, 2, 3, 4, dtype=torch.float32)
    _, last = exact(**tensors, output_final_state=True)
    states = [x.to(kind) for x in ([last] if isinstance(last, Tensor) else last)]
    short: Any = states[0] if len(states) == 1 else states
    wide: Any = states[0].float() if len(states) == 1 else [x.float() for x in states]
    o, after = op(**tensors, initial_state=short, output_final_state=True)
    wanted, right = exact(**tensors, initial_state=wide, output_final_state=True)
    pairs = [
        (o, wanted),
        *([(after, right)] if isinstance(after, Tensor) else zip(after, right, strict=True)),
    ]
    for x, y in pairs:
        assert x.dtype == torch.float32
        assert torch.allclose(x, y, atol=1e-4, rtol=1e-4)
