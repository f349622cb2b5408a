"""Kernels of coupled states in Triton's interpreter and their PyTorch modules, against the step loop."""

from __future__ import annotations

from functools import cache
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from kernel_cases import relative
from stacked_recurrences import BY_HAND, random_stacks
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.errors import InternalError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.op import CompiledOp

Loss = Literal["output", "states", "both"]
C = 16


@cache
def compiled(name: str, backend: str) -> CompiledOp:
    return ld.compile(BY_HAND[name], backend=backend, chunk_size=C)


def errors(
    op: CompiledOp, T: int, *, loss: Loss = "both", cuts: tuple[int, ...] = (), shared: bool = False
) -> dict[str, float]:
    """Of outputs, final states and every gradient; K != V, nonzero states at the start.

    ``cuts``: where a packed batch is cut into sequences; ``shared``: q and k have one head for two.
    """
    dtype = torch.float32 if op.options.backend == "triton" else torch.float64
    B, H, K, V = 1, 2, 5, 3
    tensors = draw(op.spec, B, T, H, K, V, dtype=dtype, seed=5)
    if shared:
        tensors |= {n: x[:, :, :1].contiguous() for n, x in tensors.items() if n in ("q", "k")}
    generator = torch.Generator().manual_seed(7)
    cu = torch.tensor([0, *cuts, T]) if cuts else None
    shape = tuple({"K": K, "V": V}[str(d)] for d in op.spec.states[0].dims)
    count = len(cuts) + 1 if cuts else B
    starts = [torch.randn(count, H, *shape, generator=generator).to(dtype) for _ in op.spec.states]

    def run(kind: torch.dtype, exact: bool) -> dict[str, Tensor]:
        given_ = {n: x.to(kind).clone().requires_grad_() for n, x in tensors.items()}
        first = [x.to(kind).clone().requires_grad_() for x in starts]
        call = op.reference if exact else op
        o, states = call(**given_, initial_state=first, output_final_state=True, cu_seqlens=cu)
        weights = torch.Generator().manual_seed(9)
        found = {"o": o, **dict(zip(states._fields, states, strict=True))}
        terms = {
            n: (x.double() * torch.randn(x.shape, generator=weights, dtype=torch.float64)).sum()
            for n, x in found.items()
        }
        wanted = [t for n, t in terms.items() if loss == "both" or (n == "o") == (loss == "output")]
        leaves = {**given_, **{f"first {i}": x for i, x in enumerate(first)}}
        grads = torch.autograd.grad(sum(wanted[1:], wanted[0]), list(leaves.values()), allow_unused=True)
        slopes = {
            f"d {n}": torch.zeros_like(x) if g is None else g
            for (n, x), g in zip(leaves.items(), grads, strict=True)
        }
        return {n: x.detach() for n, x in (found | slopes).items()}

    got, want = run(dtype, False), run(torch.float64, True)
    largest = max(float(x.norm()) for n, x in want.items() if n.startswith("d "))
    return {n: relative(got[n], x, 1e-6 * largest) for n, x in want.items()}


def bad(found: dict[str, float], limit: float) -> dict[str, float]:
    return {n: e for n, e in found.items() if not e < limit}


@pytest.mark.parametrize("T", [1, C - 1, C, C + 1, 37])
def test_kernels_at_lengths_around_a_chunk(T: int) -> None:
    assert not bad(errors(compiled("momentum", "triton"), T), 5e-5)


@pytest.mark.parametrize("name", ["three", "value_side", "value_first", "common_channel"])
def test_kernels_of_other_couplings(name: str) -> None:
    assert not bad(errors(compiled(name, "triton"), 2 * C + 3), 5e-5)


@pytest.mark.parametrize("loss", ["output", "states"])
def test_kernels_with_a_loss_of_the_output_or_of_the_final_states_alone(loss: Loss) -> None:
    assert not bad(errors(compiled("momentum", "triton"), C + 5, loss=loss), 5e-5)


def test_kernels_on_a_packed_batch_with_grouped_heads() -> None:
    op = compiled("momentum", "triton")
    assert not bad(errors(op, 41, cuts=(3, 3, 24), shared=True), 5e-5)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_stacks())
def test_kernels_of_random_couplings(spec: RecurrenceSpec) -> None:
    op = ld.compile(spec, backend="triton", chunk_size=C)
    assert not bad(errors(op, C + 4), 5e-5), str(spec)


@pytest.mark.parametrize("name", BY_HAND)
def test_torch_modules_in_float64(name: str) -> None:
    assert not bad(errors(compiled(name, "torch"), 2 * C + 3), 1e-10)


@pytest.mark.parametrize("loss", ["output", "states"])
def test_torch_modules_packed_with_grouped_heads_and_either_loss(loss: Loss) -> None:
    op = compiled("momentum", "torch")
    assert not bad(errors(op, 41, cuts=(3, 3, 24), shared=True, loss=loss), 1e-10)


def test_states_come_back_as_a_named_tuple_and_go_in_by_name() -> None:
    op = compiled("momentum", "torch")
    x = draw(op.spec, 1, 20, 2, 5, 3, dtype=torch.float64)
    o, state = op(**x, output_final_state=True)
    assert state._fields == ("M", "S")
    head = {n: t[:, :8] for n, t in x.items()}
    tail = {n: t[:, 8:] for n, t in x.items()}
    _, middle = op(**head, output_final_state=True)
    rest, last = op(**tail, initial_state={"S": middle.S, "M": middle.M}, output_final_state=True)
    torch.testing.assert_close(rest, o[:, 8:])
    torch.testing.assert_close(last.M, state.M)
    only = op(**tail, initial_state={"S": middle.S})
    zero = op(**tail, initial_state=(torch.zeros_like(middle.M), middle.S))
    torch.testing.assert_close(only, zero)


def test_momentum_without_memory_is_the_delta_rule_that_erases_the_undecayed_state() -> None:
    """mu = 0, by a gate of minus infinity: S = exp(g) S - beta M, M = -eta k (v - Sᵀ p)ᵀ."""
    op = ld.compile(BY_HAND["momentum"], backend="torch")
    x = draw(op.spec, 2, 33, 2, 5, 3, dtype=torch.float64)
    x["h"] = torch.full_like(x["h"], -torch.inf)
    plain = ld.compile(
        "recurrence plain\ninput q : [K]\ninput k, p : [K] unit\ninput v : [V]\ninput g : log gate\n"
        "input b, c : scalar in (0, 1)\n"
        "S_t = exp(g_t) S_{t-1} + b_t c_t k_t (v_t - S_{t-1}ᵀ p_t)ᵀ\no_t = S_tᵀ q_t\n",
        backend="torch",
    )
    torch.testing.assert_close(op(**x), plain(**{n: t for n, t in x.items() if n != "h"}))


def test_a_walk_that_carries_some_of_the_states_is_no_kernel() -> None:
    from dataclasses import replace

    from linalg_dsl.codegen.emit.triton_module import kernel_plan
    from linalg_dsl.codegen.schedule.verify import verify
    from linalg_dsl.planner.adjoint import backward
    from linalg_dsl.planner.canonical import canonicalise
    from linalg_dsl.planner.chunkwise import derive

    forward = derive(canonicalise(BY_HAND["momentum"]))
    plan = kernel_plan(forward, backward(forward))
    walk = next(k for k in plan.forward if k.family == "walk")
    fewer = replace(walk, carries=walk.carries[:1])
    kernels = tuple(fewer if k is walk else k for k in plan.forward)
    with pytest.raises(InternalError, match="is no forward carry of the plan"):
        verify(replace(plan, forward=kernels))
