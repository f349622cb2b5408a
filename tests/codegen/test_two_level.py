"""Two levels: kernels that summarise super-chunks, in the interpreter, against the float64 step loop."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import SIDES, TEXTS, assert_close, carried, errors
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl import driver
from linalg_dsl.codegen.cache import load_module
from linalg_dsl.codegen.schedule.evaluate import run_kernels
from linalg_dsl.codegen.schedule.evaluate_levels import run_two_level
from linalg_dsl.codegen.schedule.kernel_plan import KernelPlan
from linalg_dsl.codegen.schedule.two_level import first_walk, two_level
from linalg_dsl.errors import ArgumentError, DslError
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.evaluate import run_backward, run_plan
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.testing.strategies_grammar import HEADER, OUTPUTS, UPDATES

ALL = {**TEXTS, **SIDES}
CARD = (132, 232448, False)
"""An H200's multiprocessors and shared memory."""


def case(
    name: str, B: int, T: int, H: int, K: int, V: int, gates: GateKind = "mild", super_chunk: int = 1
) -> tuple[CompiledOp, dict[str, Tensor], Tensor]:
    op = ld.compile(ALL[name], backend="triton", chunk_size=16, schedule="two_level", super_chunk=super_chunk)
    tensors = draw(op.spec, B, T, H, K, V, dtype=torch.float32, gates=gates, seed=5)
    (state,) = draw_state(op.spec, B, H, K, V, dtype=torch.float32)
    return op, tensors, state


@pytest.mark.parametrize(
    "name",
    [
        "linear_attention", "simple_gla", "gla", "gated_delta_rule", "kda", "dplr", "gated_oja",
        "value_gate", "separable_gate", "separable_delta", "low_rank_alone", "signed_gates",
    ],
)  # fmt: skip
def test_every_class_equals_the_step_loop(name: str) -> None:
    """Three super-chunks, the last ragged, of one chunk each; resets among the gates."""
    op, tensors, state = case(name, 1, 39, 1, 7, 5, "resets")
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize(("name", "T"), [("gla", 1), ("delta_rule", 15), ("delta_rule", 16), ("gla", 17)])
def test_lengths_around_the_chunk(name: str, T: int) -> None:
    op, tensors, state = case(name, 2, T, 1, 5, 6)
    assert_close(errors(op, tensors, state))


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule"])
def test_super_chunks_of_packed_sequences_end_with_them(name: str) -> None:
    """Empty sequences at the beginning, inside and at the end, one of a single token, shared heads."""
    op, _, _ = case(name, 1, 1, 2, 5, 9, super_chunk=2)
    cu = torch.tensor([0, 0, 5, 5, 50, 51, 51])
    few = {i.name: 1 for i in op.spec.inputs if "K" in i.dims and i.kind == "plain"}
    tensors = draw(op.spec, 1, 51, 2, 5, 9, dtype=torch.float32, seed=6, heads=few)
    (state,) = draw_state(op.spec, 6, 2, 5, 9, dtype=torch.float32)
    assert_close(errors(op, tensors, state, cu))


@pytest.mark.parametrize("name", ["kda", "gla"])
def test_gradients_of_the_final_state_alone(name: str) -> None:
    op, tensors, state = case(name, 1, 33, 1, 3, 7)
    assert_close(errors(op, tensors, state, loss="state"))
    assert_close(errors(op, tensors, None, loss="output"))


def test_a_matrix_that_fills_shared_memory_is_taken_by_rows() -> None:
    op, tensors, state = case("delta_rule", 1, 33, 1, 200, 3)
    assert_close(errors(op, tensors, state))


def test_the_boundary_term_is_carried_inside_super_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "emit", lambda *a, emit=driver.emit: carried(emit(*a)))
    op, tensors, state = case("gated_delta_rule", 1, 150, 1, 5, 6, super_chunk=9)
    assert_close(errors(op, tensors, state))


def test_no_tokens_hand_the_state_on() -> None:
    op, tensors, state = case("gated_delta_rule", 2, 0, 1, 4, 4)
    assert torch.equal(op(**tensors, initial_state=state, output_final_state=True)[1], state)
    cu = torch.tensor([0, 0, 0])
    packed = {n: x[:1] for n, x in tensors.items()}
    assert torch.equal(op(**packed, initial_state=state, output_final_state=True, cu_seqlens=cu)[1], state)


def test_a_sequence_has_the_same_bits_alone_and_packed() -> None:
    op, tensors, state = case("gated_delta_rule", 1, 90, 1, 5, 6)
    alone = op(**{n: x[:, 20:80] for n, x in tensors.items()}, initial_state=state, output_final_state=True)
    states = torch.cat([state, state, state])
    cu = torch.tensor([0, 20, 80, 90])
    o, final = op(**tensors, initial_state=states, output_final_state=True, cu_seqlens=cu)
    assert torch.equal(o[:, 20:80], alone[0])
    assert torch.equal(final[1:2], alone[1])


def test_later_tokens_change_no_bit_of_earlier_outputs() -> None:
    op, tensors, _ = case("kda", 1, 70, 1, 5, 6)
    changed = {n: x.clone() for n, x in tensors.items()}
    for x in changed.values():
        x[:, 40:] = x[:, :30]
    assert torch.equal(op(**tensors)[:, :40], op(**changed)[:, :40])


# -- plans ------------------------------------------------------------------------------------------------
def kernels(name: str) -> KernelPlan:
    return ld.compile(ALL[name]).plan.kernels


@pytest.mark.parametrize("name", sorted(ALL))
def test_summaries_are_steps_of_walks_with_nothing_else(name: str) -> None:
    plan = kernels(name)
    found = two_level(plan)
    for summary in found.summaries:
        kernel = summary.kernel
        walk = first_walk((*plan.forward, *plan.backward), kernel.direction or "forward")
        if kernel.direction == "reverse":
            walk = first_walk(plan.backward, "reverse")
        assert kernel.stores == ()
        assert kernel.boundary is None
        assert set(kernel.loads) <= set(walk.loads)
    reads = [n for n in found.forward.kernel.body if found.plan.plan.nodes[n].op == "read"]
    assert bool(reads) == (found.matrix is not None)


def test_the_matrix_takes_no_written_rows() -> None:
    """F does not depend on what is written, so its kernel reads no values."""
    found = two_level(kernels("kda"))
    assert found.matrix is not None
    labels = {found.plan.plan.nodes[n].label for n in found.matrix.kernel.loads}
    assert "v" not in labels
    assert "k_until_end" in labels


# -- the choice -------------------------------------------------------------------------------------------
def module_of(name: str, **options: Any) -> ModuleType:
    op = ld.compile(ALL[name], backend="triton", **options)
    module = load_module(name, op.source(backend="triton"))
    module.device_limits = lambda device: CARD  # type: ignore[attr-defined]
    return module


def call(module: ModuleType, name: str, B: int, T: int, H: int, cu: Tensor | None = None) -> Any:
    """A call on tensors without data, bfloat16, K = V = 128."""
    spec = ld.compile(ALL[name]).spec
    sizes = {"K": 128, "V": 128}
    shapes = [(B, T, H, *(sizes[str(d)] for d in decl.dims)) for decl in spec.inputs]
    kinds = [torch.bfloat16 if decl.dims else torch.float32 for decl in spec.inputs]
    tensors = [torch.empty(s, dtype=k, device="meta") for s, k in zip(shapes, kinds, strict=True)]
    return module.Call(tensors, (), cu)


def test_super_chunks_fill_one_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("linear_attention", schedule="two_level")
    monkeypatch.setattr(module, "device_limits", lambda device: CARD)
    for B, T, H in ((1, 32768, 16), (1, 131072, 4), (2, 8192, 16), (3, 5000, 4)):
        found = call(module, "linear_attention", B, T, H)
        programs = found.pieces * H * 4  # of 32 columns of float32 operands, as the interpreter takes them
        assert 132 - B * H * 4 < programs <= 132, (B, T, H, found.super_chunk)


def test_by_the_model_two_levels_are_for_few_heads_and_long_sequences() -> None:
    module = module_of("linear_attention", schedule="auto")
    assert call(module, "linear_attention", 1, 131072, 4).super_chunk > 1
    assert call(module, "linear_attention", 8, 2048, 16).super_chunk == 0
    assert call(module, "linear_attention", 1, 512, 4).super_chunk == 0


def test_the_invariant_plan_looks_at_no_sizes_but_k_and_v() -> None:
    module = module_of("linear_attention", schedule="two_level", invariant=True)
    lengths = {call(module, "linear_attention", *s).super_chunk for s in ((1, 100, 1), (8, 9000, 16))}
    assert len(lengths) == 1
    text = ld.compile(ALL["linear_attention"], schedule="auto", invariant=True).source(backend="triton")
    assert "super_chunk" not in text


def test_walks_have_nothing_of_two_levels_and_are_the_default() -> None:
    text = ld.compile(ALL["kda"], schedule="walk").source(backend="triton")
    assert "super" not in text
    assert ld.compile(ALL["kda"]).source(backend="triton") == text


def test_walks_by_the_model_give_what_walks_give() -> None:
    """In the interpreter, a card of one multiprocessor, no second level pays."""
    _, tensors, state = case("gated_delta_rule", 1, 40, 1, 5, 6)
    results = [
        ld.compile(ALL["gated_delta_rule"], backend="triton", chunk_size=16, schedule=schedule)(
            **tensors, initial_state=state, output_final_state=True
        )
        for schedule in ("auto", "walk")
    ]
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["linear_attention", "gla", "kda"])
def test_explain_says_what_the_launcher_chooses(name: str) -> None:
    """Of float32 calls, which the interpreter sizes as an H200 would."""
    for schedule in ("auto", "two_level", "walk"):
        module = module_of(name, schedule=schedule)
        op = ld.compile(ALL[name], schedule=schedule)
        for B, T, H in ((1, 131072, 4), (1, 32768, 16), (8, 2048, 16), (1, 40, 2)):
            length = getattr(call(module, name, B, T, H), "super_chunk", 0)
            lines = op.plan.explain(B=B, T=T, H=H, K=128, V=128, dtype="float32").schedule
            said = f"two levels, super-chunks of {length} chunks" if length else "one level"
            assert any(line.startswith(said) for line in lines), (B, T, H, schedule)
            assert any(line.startswith("super_scan") for line in lines) == (length > 0)


def test_explain_has_work_and_time_of_every_kernel() -> None:
    lines = ld.compile(ALL["kda"], schedule="auto").plan.explain(B=1, T=131072, H=4, K=128, V=128).schedule
    kernels = [line for line in lines if line.startswith(("fwd_", "bwd_"))]
    assert sum("GFLOP" in line and (" by the model" in line or "at least" in line) for line in lines) == len(
        kernels
    )
    assert any("F of every super-chunk, [K, K]" in line for line in lines)
    assert any(line.startswith("kept of super-chunks: 8.39 MB") for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "three_level"}, "schedule is one of walk, two_level, auto, got 'three_level'"),
        ({"super_chunk": 4}, "super_chunk=4 needs schedule='two_level', got 'walk'"),
        (
            {"schedule": "two_level", "backend": "torch"},
            "is for the triton backend; backend='torch' goes over",
        ),
        ({"schedule": "two_level", "super_chunk": 0}, "super_chunk is a whole number from 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ld.compile(ALL["gla"], **options)


# -- the evaluator ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "exact"), [*((n, False) for n in sorted(ALL)), ("kda", True), ("gated_oja", True)]
)
def test_kernels_on_two_levels_equal_the_chunk_plans(name: str, exact: bool) -> None:
    """In float64: super-chunks of two chunks of four tokens, the last ragged."""
    op = ld.compile(ALL[name])
    found = two_level(op.plan.kernels)
    T, chunk = 29, 4
    tensors = draw(op.spec, 2, T, 1, 5, 3, gates="strong", seed=1)
    state = torch.randn(2, 1, 5, 3, dtype=torch.float64)
    width = 5 if op.plan.forward.nodes[op.plan.forward.outputs[0][1]].axes[-1] == "K" else 3
    d_o, d_state = torch.randn(2, T, 1, width, dtype=torch.float64), torch.randn_like(state)
    names = {str(n.attr("name")) for n in found.plan.plan.nodes if n.op == "const"}
    consts = {n: {"scale": 0.7, "tau": 4.0}[n] for n in names}
    given: dict[str, Tensor | float] = {**tensors, **consts}
    o, final = run_plan(op.plan.forward, given, state, chunk)
    wanted = run_backward(op.plan.backward, op.plan.forward, given, state, chunk, d_o, d_state)
    got = run_two_level(found, tensors, state, chunk, 2, d_o, d_state, consts, exact=exact, segment=2)
    pairs = {"o": (got.output, o), "state": (got.final_state, final)}
    pairs |= {n: (got.gradients[n], w) for n, w in wanted.items()}
    for label, (x, y) in pairs.items():
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        assert float((x - y).abs().max()) <= 1e-10 * float(y.abs().max()), label


@pytest.mark.filterwarnings("ignore:.*token after token")
@settings(max_examples=25)
@given(UPDATES, OUTPUTS)
def test_random_recurrences_are_the_same_on_two_levels(update: str, output: str) -> None:
    try:
        op = ld.compile(f"{HEADER}{update}\no_t = {output}\n")
    except DslError:
        return
    if not op.stages.is_whole or isinstance(op.artefacts().form, StepForm):
        return
    plan = op.plan.kernels
    found = two_level(plan)
    if not any(n.op == "input" and "V" in n.axes for n in op.plan.forward.nodes):
        return
    tensors = draw(op.spec, 1, 7, 1, 3, 2, seed=1)
    state = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    consts = {str(n.attr("name")): 0.5 for n in op.plan.forward.nodes if n.op == "const"}
    d_o = torch.randn_like(run_kernels(plan, tensors, state, 2, consts=consts).output)
    want = run_kernels(plan, tensors, state, 2, d_o, state, consts)
    got = run_two_level(found, tensors, state, 2, 2, d_o, state, consts)
    largest = max(float(x.abs().max()) for x in (want.output, *want.gradients.values()))
    if not largest < 1e6:
        return
    pairs = [(got.output, want.output), (got.final_state, want.final_state)]
    pairs += [(got.gradients[n], x) for n, x in want.gradients.items()]
    for x, y in pairs:
        assert float((x - y).abs().max()) <= 1e-8 * max(1.0, largest)
