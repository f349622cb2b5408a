"""Kernel plans run in float64 give what the chunk plans give, and every rule of the level can be broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import TEXTS
from recurrences import ALL, WIDER
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.codegen.schedule.evaluate import run_kernels
from linalg_dsl.codegen.schedule.kernel_plan import Boundary, Buffer, Kernel, KernelPlan
from linalg_dsl.codegen.schedule.verify import verify
from linalg_dsl.errors import DslError, InternalError
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.evaluate import run_backward, run_plan
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.testing.strategies_grammar import HEADER, OUTPUTS, UPDATES

CONSTS = {"scale": 0.7, "tau": 4.0}


def compiled(name: str) -> tuple[CompiledOp, KernelPlan]:
    op = ld.compile(TEXTS[name] if name in TEXTS else ALL[name].text(name))
    return op, op.plan.kernels


def worst(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-12))


def compare(name: str, T: int, chunk: int, gates: GateKind, *, exact: bool, segment: int = 2) -> None:
    op, kernels = compiled(name)
    tensors = draw(op.spec, 2, T, 2, 5, 3, gates=gates, seed=1)
    state = torch.randn(2, 2, 5, 3, dtype=torch.float64)  # plans know no order of axes but K, V
    width = 5 if op.plan.forward.nodes[op.plan.forward.outputs[0][1]].axes[-1] == "K" else 3
    d_o, d_state = torch.randn(2, T, 2, width, dtype=torch.float64), torch.randn_like(state)
    names = {str(n.attr("name")) for n in kernels.plan.nodes if n.op == "const"}
    consts = {n: CONSTS[n] for n in names}
    o, final = run_plan(op.plan.forward, {**tensors, **consts}, state, chunk)
    wanted = run_backward(
        op.plan.backward, op.plan.forward, {**tensors, **consts}, state, chunk, d_o, d_state
    )
    got = run_kernels(kernels, tensors, state, chunk, d_o, d_state, consts, exact=exact, segment=segment)
    errors = {"o": worst(got.output, o), "state": worst(got.final_state, final)}
    assert got.gradients.keys() == wanted.keys()
    errors |= {n: worst(got.gradients[n], w) for n, w in wanted.items()}
    assert all(e < 1e-10 for e in errors.values()), errors


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_kernels_equal_the_chunk_plans(name: str) -> None:
    compare(name, 13, 4, "resets", exact=True)


@pytest.mark.parametrize("gates", ["mild", "strong"])
@pytest.mark.parametrize("name", ["simple_gla", "kda", "gated_delta_rule", "gated_rank_two", "two_writes"])
def test_the_carried_boundary_term_equals_the_exact_one(name: str, gates: GateKind) -> None:
    for segment in (1, 2, 8):
        compare(name, 22, 2, gates, exact=False, segment=segment)


@pytest.mark.parametrize("T", [1, 4, 5])
def test_lengths_around_the_chunk(T: int) -> None:
    compare("gated_delta_rule", T, 4, "mild", exact=True)
    compare("gated_delta_rule", T, 4, "mild", exact=False)


def test_no_tokens_hand_the_states_on() -> None:
    op, kernels = compiled("kda")
    tensors = draw(op.spec, 2, 0, 2, 5, 3)
    (state,) = draw_state(op.spec, 2, 2, 5, 3)
    got = run_kernels(kernels, tensors, state, d_state=2 * state, consts=CONSTS)
    assert torch.equal(got.final_state, state)
    assert torch.equal(got.gradients["initial_state"], 2 * state)
    assert got.output.shape == (2, 0, 2, 3)


@pytest.mark.parametrize("name", ["gla", "delta_rule"])
def test_into_how_many_blocks_a_walk_is_cut_changes_nothing(name: str) -> None:
    op, kernels = compiled(name)
    tensors = draw(op.spec, 1, 9, 2, 5, 3)
    d_o = torch.randn(1, 9, 2, 3, dtype=torch.float64)
    runs = [
        run_kernels(kernels, tensors, None, 4, d_o, consts=CONSTS, blocks=blocks, exact=exact)
        for blocks in (1, 2, 5)
        for exact in (True, False)
    ]
    for run in runs[1:]:
        assert worst(run.output, runs[0].output) < 1e-12
        assert all(worst(run.gradients[n], g) < 1e-10 for n, g in runs[0].gradients.items())


@pytest.mark.parametrize("name", sorted(ALL.keys() - TEXTS.keys() - WIDER.keys()))
def test_recurrences_as_users_write_them(name: str) -> None:
    compare(name, 9, 4, "mild", exact=True)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", sorted(WIDER))
def test_every_side_of_the_state(name: str, exact: bool) -> None:
    compare(name, 22, 4, "mild", exact=exact)
    compare(name, 9, 2, "resets", exact=exact)


@pytest.mark.filterwarnings("ignore:.*token after token")
@settings(max_examples=40)
@given(UPDATES, OUTPUTS)
def test_random_recurrences(update: str, output: str) -> None:
    """The cut of whatever has a chunk form is verified, and a kernel plan gives the chunk plan's numbers."""
    text = f"{HEADER}{update}\no_t = {output}\n"
    try:
        op = ld.compile(text)
    except DslError:
        return
    if isinstance(op.artefacts().form, StepForm):
        return
    if not any(n.op == "input" and "V" in n.axes for n in op.plan.forward.nodes):
        return
    tensors = draw(op.spec, 1, 5, 1, 3, 2, seed=1)
    state = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    consts = {str(n.attr("name")): 0.5 for n in op.plan.forward.nodes if n.op == "const"}
    o, _ = run_plan(op.plan.forward, {**tensors, **consts}, state, 2)
    wanted = run_backward(op.plan.backward, op.plan.forward, {**tensors, **consts}, state, 2, o)
    got = run_kernels(op.plan.kernels, tensors, state, 2, o, consts=consts)
    largest = max(float(w.abs().max()) for w in wanted.values())
    if not largest < 1e9:
        return
    assert worst(got.output, o) < 1e-7
    for n, w in wanted.items():  # a gradient may be the rounding of zero
        assert float((got.gradients[n] - w).abs().max()) < 1e-7 * float(w.abs().max()) + 1e-12 * largest


def change(plan: KernelPlan, name: str, /, **fields: Any) -> KernelPlan:
    """The plan with some fields of one kernel replaced."""

    def changed(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        return tuple(replace(k, **fields) if k.name == name else k for k in kernels)

    return replace(plan, forward=changed(plan.forward), backward=changed(plan.backward))


def kernel(plan: KernelPlan, name: str) -> Kernel:
    return next(k for k in (*plan.forward, *plan.backward) if k.name == name)


def node(plan: KernelPlan, label: str) -> int:
    return next(i for i, n in enumerate(plan.plan.nodes) if n.label == label)


def without(items: tuple[int, ...], n: int) -> tuple[int, ...]:
    assert n in items
    return tuple(x for x in items if x != n)


def buffers(plan: KernelPlan, name: str, /, **fields: Any) -> KernelPlan:
    assert any(b.name == name for b in plan.buffers)
    return replace(plan, buffers=tuple(replace(b, **fields) if b.name == name else b for b in plan.buffers))


Mutation = Callable[[KernelPlan], KernelPlan]


def edit(name: str, field: str, how: Callable[[KernelPlan, tuple[int, ...]], tuple[int, ...]]) -> Mutation:
    return lambda p: change(p, name, **{field: how(p, getattr(kernel(p, name), field))})


def boundary(plan: KernelPlan, name: str, extra: str) -> KernelPlan:
    """The walk takes one more pair into its boundary term."""
    term = kernel(plan, name).boundary
    assert isinstance(term, Boundary)
    pair = (node(plan, extra), node(plan, extra))
    return change(plan, name, boundary=replace(term, ends=(*term.ends, pair)))


BROKEN: dict[str, tuple[Mutation, str]] = {
    "1 names": (lambda p: change(p, "fwd_walk", name="fwd_prep"), "not distinct"),
    "1 no name": (lambda p: change(p, "fwd_walk", name=""), "not distinct"),
    "1 prep with a split": (lambda p: change(p, "fwd_prep", split="K"), "a prep with"),
    "1 walk without split": (lambda p: change(p, "fwd_walk", split=None), "a walk without"),
    "1 split of tokens": (lambda p: change(p, "fwd_walk", split="t"), "splits t"),
    "1 other direction": (lambda p: change(p, "fwd_walk", direction="reverse"), "no reverse carry"),
    "2 loaded twice": (edit("fwd_walk", "loads", lambda p, x: (*x, x[-1])), "twice"),
    "2 not stored yet": (
        lambda p: replace(p, forward=p.forward[::-1]),
        "which no earlier kernel stores",
    ),
    "2 forward reads a gradient": (
        edit("fwd_walk", "loads", lambda p, x: (*x, node(p, "d_o"))),
        "the gradient of an output",
    ),
    "2 boundary before its walk": (
        lambda p: replace(p, backward=(p.backward[-1], *p.backward[:-1])),
        "which no earlier kernel stores",
    ),
    "3 operand missing": (edit("fwd_walk", "loads", lambda p, x: without(x, node(p, "q"))), "not at hand"),
    "3 order": (edit("fwd_walk", "body", lambda p, x: x[::-1]), "not at hand"),
    "3 loaded and computed": (edit("fwd_walk", "body", lambda p, x: (node(p, "ut_11"), *x)), "has already"),
    "3 computed twice": (edit("fwd_walk", "body", lambda p, x: (*x, x[-1])), "has already"),
    "3 leaf computed": (edit("fwd_prep", "body", lambda p, x: (node(p, "v"), *x)), "no kernel computes"),
    "3 the other carry": (
        lambda p: change(
            p, "bwd_forward_k", direction="reverse", carries=kernel(p, "bwd_reverse_k").carries
        ),
        "not at hand",
    ),
    "4 contracted": (lambda p: change(p, "fwd_walk", split="K"), "has a block"),
    "5 state in a prep": (
        edit("bwd_gradients", "body", lambda p, x: (*x, node(p, "s_next"))),
        "not at hand|computes the state",
    ),
    "5 state stored": (edit("fwd_walk", "stores", lambda p, x: (*x, node(p, "s_next"))), "stores the state"),
    "6 stored, not computed": (edit("fwd_walk", "stores", lambda p, x: (*x, node(p, "q"))), "not compute"),
    "6 stored twice": (edit("fwd_walk", "stores", lambda p, x: (*x, x[0])), "twice"),
    "6 by two kernels": (
        lambda p: replace(
            p, forward=(*p.forward, replace(kernel(p, "fwd_walk"), name="again"))
        ),
        "an earlier kernel stores",
    ),
    "7 load for nothing": (edit("fwd_prep", "loads", lambda p, x: (*x, node(p, "v"))), "nothing needs"),
    "7 value for nothing": (
        edit("fwd_walk", "stores", lambda p, x: without(x, node(p, "o"))),
        "nothing needs",
    ),
    "7 carry": (edit("fwd_walk", "body", lambda p, x: without(x, node(p, "s_next"))), "next value"),
    "8 other results": (lambda p: replace(p, results=p.results[1:]), "the plan o ="),
    "8 no backward": (lambda p: replace(p, backward=()), "has no backward"),
    "8 result not stored": (
        edit("bwd_gradients", "stores", lambda p, x: without(x, node(p, "d_beta"))),
        "nothing needs|no backward kernel stores",
    ),
    "9 no buffer": (lambda p: replace(p, buffers=p.buffers[1:]), "has no buffer"),
    "9 buffer for nothing": (
        lambda p: replace(p, buffers=(*p.buffers, Buffer(0, "x", ("t",), "float32"))),
        "nobody stores",
    ),
    "9 two buffers": (lambda p: replace(p, buffers=(*p.buffers, p.buffers[0])), "two buffers"),
    "9 axes": (lambda p: buffers(p, "u_1", axes=("t",)), "its value"),
    "9 name": (lambda p: buffers(p, "u_1", name="o"), "named o"),
    "10 saved": (lambda p: buffers(p, "ut_11", saved=False), "its flag says otherwise"),
    "10 not saved": (lambda p: buffers(p, "d_u_1", saved=True), "its flag says otherwise"),
    "10 only saved": (lambda p: buffers(p, "u_1", only_saved=False), "only_saved"),
    "11 order": (
        lambda p: replace(p, backward=(*p.backward[:2], *p.backward[3:1:-1], *p.backward[4:])),
        "a forward and then a reverse walk, K-split|no earlier kernel stores",
    ),
    "11 not at hand": (
        lambda p: boundary(boundary(p, "bwd_forward_k", "g"), "bwd_reverse_k", "g"),
        "bwd_reverse_k does not have %0",
    ),
    "11 two different ones": (lambda p: boundary(p, "bwd_reverse_k", "q"), "different ones"),
}  # fmt: skip


def test_a_whole_plan_has_every_kernel_that_is_broken_below() -> None:
    verify(compiled("gated_delta_rule")[1])


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule: str) -> None:
    plan = compiled("gated_delta_rule")[1]
    mutate, message = BROKEN[rule]
    changed = mutate(plan)
    assert changed != plan
    with pytest.raises(InternalError, match=message):
        verify(changed)


def test_the_evaluator_sees_a_contracted_split_axis() -> None:
    """It runs a walk block by block: a walk that sums over its split axis gives other numbers."""
    op, plan = compiled("linear_attention")
    tensors = draw(op.spec, 1, 5, 1, 4, 2)
    wrong = change(plan, "fwd_walk", split="K")
    right = run_kernels(plan, tensors, None, 2, consts=CONSTS).output
    assert worst(run_kernels(wrong, tensors, None, 2, consts=CONSTS).output, right) > 1e-3
