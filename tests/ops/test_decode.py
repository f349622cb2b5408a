"""``op.step``: decoding is the recurrence, whatever the class; pools, padding, drafts, types, layouts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from catalogue_cases import Call, as_list, by_reference, make_call, spec_of
from op_cases import TEXTS
from torch import Tensor

import linalg_dsl
from linalg_dsl import driver
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.catalogue import catalogue_names
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.op import CompiledOp

ROWS = """
recurrence rows_before
input q : [K]
input k : [2, K]
input v : [2, V]
S_t = S_{t-1} + k_{t-1}ᵀ v_t + k_{t-1,2} v_{t-1,1}ᵀ
o_t = S_tᵀ q_t
"""
# one of each class: chunk, value side with a partial output, substeps, a shift, a normaliser and a scalar
# state, several stages, stacked, scan, sequential with and without a split
CLASSES = ("gla", "gated_oja", "delta_product", "mamba3", "mlstm", "abc", "titans_linear", "longhorn", "ccq",
           "gru")  # fmt: skip


def lazy(spec: Any, **options: Any) -> CompiledOp:
    """The op without the plans of its chunk form, which a step needs none of."""
    return driver.assemble(driver.read_spec(spec), CompileOptions(**options))


def part(call: Call, begin: int, end: int) -> dict[str, Tensor]:
    return {n: (x[:, begin:end] if call.spec.input(n).timed else x).detach() for n, x in call.tensors.items()}


def state_of(op: CompiledOp, states: list[Tensor]) -> Any:
    return states[0] if len(states) == 1 else op.state_type(*states)


def by_steps(op: CompiledOp, call: Call, cuts: list[int]) -> list[Tensor]:
    """o and the states of a call, from cut to cut."""
    state = state_of(op, [x.detach().clone() for x in call.states.values()])
    outputs = []
    for begin, end in pairwise(cuts):
        o, after = op.step(**part(call, begin, end), **dict[str, Any](call.consts), state=state)
        assert after is state
        outputs.append(o)
    return [torch.cat(outputs, 1), *as_list(state)]


def assert_near(found: list[Tensor], wanted: list[Tensor], bound: float) -> None:
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert x.shape == y.shape
        assert (x - y).abs().max() <= bound * (1 + y.abs().max()), i


@pytest.mark.parametrize("name", catalogue_names())
def test_every_entry_decodes_what_its_recurrence_says(name: str) -> None:
    call = make_call(name, 2, 5, 2, 3, 4)
    op = lazy(spec_of(name), backend="torch")
    assert_near(by_steps(op, call, [0, 1, 2, 5]), by_reference(call), 1e-9)
    short = call.to(torch.float32)
    assert_near(by_steps(op, short, [0, 1, 5]), by_reference(short), 2e-4)


@pytest.mark.parametrize("name", CLASSES)
def test_one_kernel_does_the_same(name: str) -> None:
    call = make_call(name, 2, 6, 2, 3, 4).to(torch.float32)
    op = lazy(spec_of(name), backend="triton")
    assert_near(by_steps(op, call, [0, 1, 6]), by_reference(call), 2e-4)
    assert op.source("step", "triton").count("@triton.jit(do_not_specialize") == 1


@pytest.mark.parametrize("name", ["gla", "gated_oja", "mlstm", "kalman"])
def test_blocks_write_their_own_part_and_the_last_what_all_have(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(name, 2, 4, 2, 3, 5).to(torch.float32)
    op = lazy(spec_of(name), backend="triton")
    module = op.decoder.operator("triton").module
    monkeypatch.setattr(module, "choose_decode", lambda *sizes: (2, 1, 1))
    assert_near(by_steps(op, call, [0, 1, 4]), by_reference(call), 2e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_the_token_before_are_carried(backend: str) -> None:
    op = lazy(ROWS, backend=backend)
    tensors = draw(op.spec, 2, 4, 2, 3, 5, dtype=torch.float32)
    wanted, last = op.reference(**tensors, output_final_state=True)
    o, state = op.step(**{n: x[:, :1] for n, x in tensors.items()})
    rest, state = op.step(**{n: x[:, 1:] for n, x in tensors.items()}, state=state)
    assert state.k_prev.shape == (2, 2, 2, 3)
    assert_near([torch.cat([o, rest], 1), *state], [wanted, *last], 1e-5)


def pool_case(name: str, backend: str, **options: Any) -> tuple[CompiledOp, dict[str, Tensor], list[Tensor]]:
    op = lazy(spec_of(name), backend=backend, **options)
    tensors = draw(op.spec, 3, 4, 2, 3, 5, dtype=torch.float32)
    states = draw_state(op.spec, 6, 2, 3, 5, dtype=torch.float32)
    return op, tensors, list(states)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_slots_are_rows_of_a_pool_and_padding_is_ignored(backend: str, kind: torch.dtype) -> None:
    op, tensors, (pool,) = pool_case("gated_delta_rule", backend)
    tensors["v"][1] = float("nan")  # of a padding sequence nothing is taken
    before, slots = pool.clone(), torch.tensor([4, -1, 1], dtype=kind)
    o, after = op.step(**tensors, state=pool, slots=slots)
    assert after is pool
    wanted, last = op.reference(
        **tensors, initial_state=before[slots.clamp(min=0).long()], output_final_state=True
    )
    assert_near([o[0], o[2], pool[4], pool[1]], [wanted[0], wanted[2], last[0], last[2]], 1e-5)
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    others = [0, 2, 3, 5]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("name", ["kda", "mlstm"])
def test_rejected_tokens_leave_no_trace(backend: str, name: str) -> None:
    op, tensors, states = pool_case(name, backend)
    slots, counts = torch.tensor([5, 0, 2]), torch.tensor([0, 4, 2])
    pool = state_of(op, [x.clone() for x in states])
    o, _ = op.step(**tensors, state=pool, slots=slots, accepted=counts)
    ahead = state_of(op, [x.clone() for x in states])
    seen, _ = op.step(**tensors, state=ahead, slots=slots, accepted=0)
    assert torch.equal(o, seen)
    assert all(torch.equal(x, y) for x, y in zip(as_list(ahead), states, strict=True))
    for b, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
        given = {n: x[b : b + 1] if op.spec.input(n).timed else x for n, x in tensors.items()}
        some = {n: x[:, :count] if op.spec.input(n).timed else x for n, x in given.items()}
        start = state_of(op, [x[slot : slot + 1] for x in states])
        assert_near([o[b : b + 1]], [op.reference(**given, initial_state=start)], 1e-5)
        wanted = [x[slot] for x in states]
        if count:
            last = op.reference(**some, initial_state=start, output_final_state=True)[1]
            wanted = [x[0] for x in as_list(last)]
        assert_near([x[slot] for x in as_list(pool)], wanted, 1e-5)


def test_a_state_named_like_a_mask_may_lie_anywhere() -> None:
    """Masks of axes are called m_v and so on: a stride of a state m has another name."""
    text = (
        "recurrence maxima\ninput x : [V]\nstate m : [V]\nstate o : [V]\nm_t = max(m_{t-1}, x_t)\n"
        "o_t = 0.5 o_{t-1} + m_t\noutput y\ny_t = o_t\n"
    )
    op = lazy(parse(text), backend="triton")
    x = torch.randn(2, 1, 3, 5)
    wide = torch.randn(2, 2, 3, 10)
    states = tuple(wide[i, :, :, ::2] for i in range(2))
    o, last = op.step(x, state=states)
    wanted = torch.maximum(wide[0, :, :, ::2], x[:, 0])
    assert o.shape == (2, 1, 3, 5)
    assert torch.equal(last[0], wanted)
    assert torch.equal(last[1], o[:, 0])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_states_lie_as_asked_for_and_views_are_stepped_in_place(backend: str, layout: str) -> None:
    op, tensors, (plain,) = pool_case("gated_oja", backend, state_layout=layout)
    wanted, last = lazy(op.spec, backend="reference").step(**tensors, state=plain.clone()[:3])
    stored = plain.mT if layout == "vk" else plain
    page = torch.full((6, 2, 2 * stored[0, 0].numel()), 7.0)  # other things lie between the states
    view = page[:, :, : stored[0, 0].numel()].view(stored.shape)
    view.copy_(stored)
    o, after = op.step(**tensors, state=view, slots=torch.tensor([0, 1, 2]))
    assert after.shape == stored.shape
    assert_near([o, view[:3].mT if layout == "vk" else view[:3]], [wanted, last], 1e-5)
    assert torch.equal(page[:, :, stored[0, 0].numel() :], torch.full((6, 2, 15), 7.0))
    assert torch.equal(view[3:], stored[3:])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_state_kept_in_bfloat16_is_rounded_once_a_call(backend: str) -> None:
    op, tensors, (exact,) = pool_case("gla", backend)
    pool = exact.bfloat16() if backend == "torch" else exact.half()  # the interpreter has no bfloat16
    wide = pool[:3].float()
    o, _ = op.step(**tensors, state=pool, slots=torch.tensor([0, 1, 2]))
    wanted, _ = op.step(**tensors, state=wide)
    assert_near([o], [wanted], 1e-6)
    assert (pool[:3].float() - wide.to(pool.dtype).float()).abs().max() < 1e-2
    assert pool.dtype in (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("heads", [{"q": 1, "k": 2}, {"v": 2, "beta": 1}, {"q": 1, "k": 2, "v": 4, "g": 1}])
def test_heads_are_shared_in_any_mix_that_divides(backend: str, heads: dict[str, int]) -> None:
    op = lazy(spec_of("gated_delta_rule"), backend=backend)
    tensors = draw(op.spec, 2, 2, 4, 3, 5, dtype=torch.float32, heads=heads)
    whole = {n: x.repeat_interleave(4 // x.shape[2], 2) for n, x in tensors.items()}
    found, wanted = op.step(**tensors), op.step(**whole)
    assert found[1].shape == (2, 4, 3, 5)
    assert_near([*found], [*wanted], 1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_views_of_one_projection_are_read_where_they_are(backend: str) -> None:
    op = lazy(spec_of("delta_rule"), backend=backend)
    both = torch.randn(1, 3, 2, 11).transpose(0, 1)  # [B, n, H, K + K + V], time first in memory
    q, k, v = both[..., :3], both[..., 3:6] / 2, both[..., 6:]
    beta = torch.rand(3, 1, 1).expand(3, 1, 2)
    found = op.step(q, k, v, beta)
    wanted = op.step(*(x.contiguous() for x in (q, k, v, beta)))
    assert_near([*found], [*wanted], 1e-6)


def test_without_a_state_it_starts_as_declared() -> None:
    op = lazy(spec_of("mlstm"), backend="torch")
    tensors = draw(op.spec, 1, 2, 2, 3, 5)
    found, state = op.step(**tensors)
    wanted, last = op.reference(**tensors, output_final_state=True)
    assert type(state).__name__ == "MlstmState"
    assert_near([found, *state], [wanted, *last], 1e-9)
    again, filled = op.step(**tensors, state={"C": torch.zeros(1, 2, 3, 5, dtype=torch.float64)})
    assert_near([again, *filled], [wanted, *last], 1e-9)


@pytest.mark.parametrize("name", ["delta_product", "gru"])
def test_consts_may_be_given_in_a_call(name: str) -> None:
    op = lazy(spec_of(name), backend="torch")
    consts: dict[str, Any] = {"n": 3.0} if name == "delta_product" else {}
    tensors = draw(op.spec, 2, 2, 2, 3, 5, consts=consts)
    assert_near([op.step(**tensors, **consts)[0]], [op.reference(**tensors, **consts)], 1e-9)


# -- mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": torch.zeros(2, 2, 3, 4)}, r"state must be \[N, H, K, V\] = \(3, 2, 3, 5\)"),
        ({"state": torch.zeros(6, 2, 5, 3), "slots": torch.tensor([0, 1, 2])}, r"state must be"),
        ({"state": torch.zeros(1, 2, 3, 5).expand(3, 2, 3, 5)}, "expanded view"),
        ({"state": torch.zeros(3, 2, 3, 5, dtype=torch.int64)}, "floating-point"),
        ({"slots": torch.tensor([0, 1, 2])}, "slots are rows of a pool, so state must hold S"),
        ({"state": torch.zeros(6, 2, 3, 5), "slots": torch.tensor([0, 1])}, r"slots must be \[B\] = \(3,\)"),
        ({"state": torch.zeros(6, 2, 3, 5), "slots": torch.tensor([0.0, 1, 2])}, "int32 or int64"),
        ({"state": torch.zeros(6, 2, 3, 5), "slots": [0, 1, 2]}, "got list"),
        ({"state": torch.zeros(6, 2, 3, 5), "slots": torch.tensor([0, 1, 6])}, "slots go up to 6, the pool"),
        ({"accepted": 5}, "accepted is from 0 to n = 4, got 5"),
        ({"accepted": True}, "accepted must be"),
        ({"accepted": torch.tensor([1, 2])}, r"accepted must be \[B\]"),
        ({"beta": None}, "beta must be a tensor"),
    ],
)
def test_mistakes_name_the_argument(changes: dict[str, Any], message: str) -> None:
    op, tensors, _ = pool_case("delta_rule", "torch")
    with pytest.raises(ArgumentError, match=message):
        op.step(**{**tensors, **changes})


def test_gradients_and_reverse_are_refused() -> None:
    op, tensors, _ = pool_case("delta_rule", "torch")
    tensors["v"].requires_grad_()
    with pytest.raises(ArgumentError, match="step computes no gradients"):
        op.step(**tensors)
    with torch.no_grad():
        op.step(**tensors)
    with pytest.raises(ArgumentError, match="reverse=True"):
        lazy(op.spec, reverse=True).step(**tensors)


# -- torch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gla", "mamba3"])
def test_the_registered_operator_passes_opcheck(name: str) -> None:
    op, tensors, states = pool_case(name, "torch")
    operator = op.decoder.operator("torch")
    numbers = [float("nan") for _ in op.spec.consts]
    registered = getattr(torch.ops.linalg_dsl, operator.name)
    torch.library.opcheck(
        registered.default,
        (*tensors.values(), *states, numbers, torch.tensor([3, -1, 0]), None, 4),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_torch_compile_steps_in_place() -> None:
    op, tensors, (pool,) = pool_case("gla", "torch")
    slots = torch.tensor([3, -1, 0])

    def run(pool: Tensor, *given: Tensor) -> Tensor:
        o: Tensor = op.step(*given, state=pool, slots=slots)[0]
        return o * 2

    one, other = pool.clone(), pool.clone()
    wanted = run(one, *tensors.values())
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(other, *tensors.values())
    assert_near([found, other], [wanted, one], 1e-6)


# -- whole calls from and into a pool -----------------------------------------------------------------


@pytest.mark.parametrize("slots", [[4, -1, 1], [-1, -1, -1], [-1, 0, 3]])
@pytest.mark.parametrize("name", ["gated_delta_rule", "mlstm"])
def test_a_call_reads_and_writes_rows_of_a_pool(name: str, slots: list[int]) -> None:
    op, tensors, states = pool_case(name, "torch")
    rows = torch.tensor(slots)
    pool = state_of(op, [x.bfloat16() for x in states])
    before = [x.clone() for x in as_list(pool)]
    o, after = op(**tensors, initial_state=pool, slots=rows, output_final_state=True)
    assert after is pool
    for n, row in enumerate(slots):
        given = {k: x[n : n + 1] if op.spec.input(k).timed else x for k, x in tensors.items()}
        start = None if row < 0 else state_of(op, [x[row : row + 1].float() for x in before])
        wanted, last = op.reference(**given, initial_state=start, output_final_state=True)
        assert_near([o[n : n + 1]], [wanted], 1e-4)
        if row >= 0:
            found = [x[row : row + 1].float() for x in as_list(pool)]
            assert_near(found, as_list(last), 1e-2)
    others = [p for p in range(6) if p not in slots]
    assert all(torch.equal(x[others], y[others]) for x, y in zip(as_list(pool), before, strict=True))
    seen = op(**tensors, initial_state=pool, slots=rows)
    assert isinstance(seen, Tensor)


def test_a_pool_has_no_gradient() -> None:
    op, tensors, (pool,) = pool_case("gla", "torch")
    tensors["v"].requires_grad_()
    with pytest.raises(ArgumentError, match="a pool is written in place, which has no gradient"):
        op(**tensors, initial_state=pool, slots=torch.tensor([0, 1, 2]), output_final_state=True)
    op(**tensors, initial_state=pool, slots=torch.tensor([0, 1, 2])).sum().backward()
    with pytest.raises(ArgumentError, match="initial_state must hold all states"):
        op(**tensors, slots=torch.tensor([0, 1, 2]))


# -- states after given tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gated_delta_rule", "mlstm", "mamba3"])
def test_states_after_given_tokens_are_those_of_shorter_calls(name: str) -> None:
    op = lazy(spec_of(name), backend="torch")
    tensors = draw(op.spec, 2, 9, 2, 3, 5)
    wanted, last = op.reference(**tensors, output_final_state=True)
    o, end, at = op(**tensors, output_final_state=True, state_positions=[3, 0, 9, 3])
    assert_near([o, *as_list(end)], [wanted, *as_list(last)], 1e-9)
    for i, p in enumerate((3, 0, 9, 3)):
        given = {n: x[:, :p] if op.spec.input(n).timed else x for n, x in tensors.items()}
        state = as_list(op(**given, output_final_state=True)[1])
        assert_near([x[i] for x in as_list(at)], state, 1e-9)
    alone = op(**tensors, state_positions=[4])
    assert len(alone) == 2


@pytest.mark.parametrize("name", ["gla", "mamba3"])
def test_states_after_given_tokens_of_packed_sequences(name: str) -> None:
    op = lazy(spec_of(name), backend="torch")
    tensors = draw(op.spec, 1, 11, 2, 3, 5)
    offsets = [0, 0, 7, 8, 11]
    cu = torch.tensor(offsets)
    places = [[0], [2, 7, 5], [], [1]]
    wanted, last = op.reference(**tensors, cu_seqlens=cu, output_final_state=True)
    o, end, at = op(
        **tensors, cu_seqlens=cu, cu_seqlens_cpu=cu, output_final_state=True, state_positions=places
    )
    assert_near([o, *as_list(end)], [wanted, *as_list(last)], 1e-9)
    pairs = [(n, p) for n, own in enumerate(places) for p in own]
    for i, (n, p) in enumerate(pairs):
        begin = offsets[n]
        given = {m: x[:, begin : begin + p] if op.spec.input(m).timed else x for m, x in tensors.items()}
        state = as_list(op(**given, output_final_state=True)[1])
        assert_near([x[i] for x in as_list(at)], [x[0] for x in state], 1e-9)


def test_positions_are_checked_and_differentiable() -> None:
    op = lazy(spec_of("gla"), backend="torch")
    tensors = {n: x.requires_grad_() for n, x in draw(op.spec, 1, 6, 2, 3, 5).items()}
    for places, message in (([7], "has 7 in a sequence of 6"), ([1.5], "whole numbers known on the host")):
        with pytest.raises(ArgumentError, match=message):
            op(**tensors, state_positions=places)
    _, at = op(**tensors, state_positions=[4])
    found = torch.autograd.grad(at.square().sum(), list(tensors.values()), allow_unused=True)
    short = {n: x[:, :4] for n, x in tensors.items()}
    last = op.reference(**short, output_final_state=True)[1]
    wanted = torch.autograd.grad(last.square().sum(), list(tensors.values()), allow_unused=True)
    for x, y in zip(found, wanted, strict=True):
        if y is not None:
            assert x is not None
            assert_near([x], [y], 1e-9)


# -- splits -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*has no chunk form")
@pytest.mark.parametrize("layout", [None, "vk"])
@pytest.mark.parametrize("name", ["gated_delta_rule", "mlstm", "mamba3", "titans_linear"])
def test_split_anywhere_and_continue_equals_the_whole(name: str, layout: str | None) -> None:
    """Outputs, and gradients through the handed state."""
    op = linalg_dsl.compile(spec_of(name), backend="torch", chunk_size=4, state_layout=layout)
    tensors = {n: x.requires_grad_() for n, x in draw(op.spec, 1, 9, 2, 3, 5).items()}

    def cut(a: int, b: int) -> dict[str, Tensor]:
        return {n: x[:, a:b] if op.spec.input(n).timed else x for n, x in tensors.items()}

    def gradients(o: Tensor, last: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        results = [o, *as_list(last)]
        weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in results]
        found = torch.autograd.grad(results, list(tensors.values()), weights)
        return [o, *as_list(last), *found]

    whole = gradients(*op(**tensors, output_final_state=True))
    for at in (1, 4, 8):
        one, state = op(**cut(0, at), output_final_state=True)
        two, last = op(**cut(at, 9), initial_state=state, output_final_state=True)
        assert_near(gradients(torch.cat([one, two], 1), last), whole, 1e-9)


def test_the_text_of_a_step_has_no_other_launch() -> None:
    text = linalg_dsl.compile(TEXTS["gated_delta"], backend="triton").source("step", "triton")
    assert text.count("[(programs,)]") == 1
    with pytest.raises(ArgumentError, match="forward, backward, step or module"):
        linalg_dsl.compile(TEXTS["gated_delta"]).source("steps")


# -- the known-answer test ----------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, torch.tensor([0, 3])])
def test_the_first_step_on_a_device_is_checked(monkeypatch: pytest.MonkeyPatch, slots: Any) -> None:
    from linalg_dsl.ops import decode_check, selfcheck

    op = lazy(TEXTS["gated_delta"], backend="triton")
    check = op.decoder.operator("triton").check
    assert check is not None
    monkeypatch.setattr(decode_check, "enabled", lambda device: True)
    monkeypatch.setattr(selfcheck, "recorded", lambda name: False)
    tensors = draw(op.spec, 2, 1, 2, 3, 5, dtype=torch.float32)
    state = torch.zeros(2 if slots is None else 4, 2, 3, 5)
    op.step(**tensors, state=state, slots=slots)
    assert len(check._passed.keys) == 1
    check._passed.keys.clear()
    right = check.exact.step
    monkeypatch.setattr(check.exact, "step", lambda *args: 1.5 * right(*args))
    with pytest.raises(RuntimeError, match=r"known-answer test of step failed on cpu .* o is off by"):
        op.step(**tensors, state=state, slots=slots)


def test_a_new_state_is_what_a_first_step_makes() -> None:
    for name, consts in (("mlstm", {}), ("abc", {"m": 3.0}), ("mamba3", {})):
        op = lazy(spec_of(name), backend="torch", state_layout="vk")
        tensors = draw(op.spec, 2, 1, 2, 3, 5, dtype=torch.float32, consts=consts)
        given: dict[str, Any] = dict(consts)
        found = op.new_state(2, 2, K=3, V=5, **given)
        o, _ = op.step(**tensors, **given, state=found)
        wanted, made = op.step(**tensors, **given)
        assert [x.shape for x in as_list(found)] == [x.shape for x in as_list(made)]
        assert torch.equal(o, wanted)
    assert op.new_state(4, 2, K=3, V=5, dtype=torch.bfloat16).S.dtype == torch.bfloat16
    with pytest.raises(ArgumentError, match="needs the size of V"):
        op.new_state(1, 1, K=3)


def test_functions_of_the_catalogue_step() -> None:
    op = lazy(spec_of("gla"))
    tensors = draw(op.spec, 2, 1, 2, 3, 5, dtype=torch.float32)
    o, state = linalg_dsl.ops.gla.step(*tensors.values())
    assert torch.equal(o, op.step(**tensors)[0])
    assert state.shape == (2, 2, 3, 5)


@pytest.mark.parametrize("name", ["gated_oja", "s4d"])
def test_of_many_sequences_one_program_adds_up_what_its_blocks_have_of_the_output(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum by a kernel of its own takes as long as a tenth of the step; several tokens still have it."""
    op, tensors, states = pool_case(name, "triton")
    module: Any = op.decoder.operator("triton").module
    timed = {d.name for d in op.spec.inputs if d.timed}
    call = {n: x[:, :1] if n in timed else x for n, x in tensors.items()}
    slots = torch.tensor([4, -1, 2])
    plain, many = ([x.clone() for x in states] for _ in range(2))
    monkeypatch.setattr(module, "device_limits", lambda device: (1 << 20, 1 << 18, False))
    wanted, _ = op.step(**call, state=state_of(op, plain), slots=slots)
    monkeypatch.setattr(module, "device_limits", lambda device: (1, 1 << 18, False))
    monkeypatch.setattr(module, "choose_decode", lambda *sizes: (2, 1, 1))
    found, _ = op.step(**call, state=state_of(op, many), slots=slots)
    assert_near([found, *many], [wanted, *plain], 1e-5)
