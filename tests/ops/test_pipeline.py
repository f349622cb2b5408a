"""Recurrences of several stages are ordinary ops: right in every gradient, compiled, exported, explained."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_runner import shifted
from state_recurrences import text
from torch import Tensor
from torch.library import opcheck

import linalg_dsl
from linalg_dsl.codegen.emit.pipeline import emit_pipeline
from linalg_dsl.codegen.emit.render import template_text
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.split import split
from linalg_dsl.planner.stages import Shift

OTHER = {
    "trapezoid": """
recurrence trapezoid
input q, k : [K]
input v : [V]
input g : log gate
input lam : scalar in (0, 1)
khat_t = l2norm(k_t)
S_t = exp(g_t) S_{t-1} + lam_t khat_t v_tᵀ + (1 - lam_t) exp(g_t) khat_{t-1} v_{t-1}ᵀ
o_t = S_tᵀ q_t
""",
    "both_read": """
recurrence both_read
const scale = 1 / sqrt(K)
input q, k, p : [K]
input v : [V]
input g : log gate
A_t = exp(g_t) A_{t-1} + k_t v_tᵀ
B_t = B_{t-1} + p_t (A_{t-1}ᵀ p_t)ᵀ
o_t = tanh(scale A_tᵀ q_t + max(B_{t-1}ᵀ k_t, -1)) ⊙ v_t
""",
    "other_axes": """
recurrence other_axes
const n = 3
const scale = 1 / sqrt(K)
input q, k : [K]
input v : [V]
input g : log gate [n]
param w : [K]
state A : [K, n]
state B : [n, V]
A_t = A_{t-1} diag(exp(g_t)) + k_t (1 - exp(g_t))ᵀ
B_t = diag(exp(g_t)) B_{t-1} + (q_tᵀ (w ⊙ k_t)) (1 - exp(g_t)) v_tᵀ
o_t = scale (wᵀ w) B_tᵀ softmax(A_tᵀ q_t)
""",
}
CHUNKED = ["gsa", "two_layers", *OTHER]
STEPPED = ["normalised_linear_attention", "mlstm", "lightnet", "rwkv4", "abc", "pgdn", "counts_tokens"]


def _text(name: str) -> str:
    return OTHER.get(name) or text(name)


def _op(name: str, **options: Any) -> CompiledOp:
    return linalg_dsl.compile(_text(name), **options)


def _leaves(op: CompiledOp, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    shape = {"B": 2, "T": 21, "H": 2, "K": 5, "V": 3} | {k: v for k, v in options.items() if k in "BTHKV"}
    rest = {k: v for k, v in options.items() if k not in shape and k != "N"}
    dtype = rest.setdefault("dtype", torch.float64)
    tensors = [x.requires_grad_() for x in draw(op.spec, **shape, **rest).values()]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    count: int = options.get("N") or shape["B"]
    states = draw_state(op.spec, count, shape["H"], shape["K"], shape["V"], dtype=wide)
    return tensors, [x.requires_grad_() for x in states]


@pytest.mark.parametrize("name", CHUNKED + STEPPED)
@pytest.mark.parametrize("packed", [None, [0, 0, 7, 8, 70, 70]])
def test_results_and_gradients_are_those_of_the_step_loop(name: str, packed: list[int] | None) -> None:
    op = _op(name, backend="torch")
    fewer = {op.spec.inputs[0].name: 1}
    report = op.check(T=70, K=5, V=3, heads=fewer, dtype=torch.float64, device="cpu", cu_seqlens=packed)
    assert report.ok, str(report)
    assert {r.name for r in report.rows} >= {f"final state {s}" for s in op.spec.carried}


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_short_types_keep_their_bounds(name: str, dtype: torch.dtype) -> None:
    """What one stage hands to the next is not rounded: the whole keeps the bounds of one stage."""
    report = _op(name, backend="torch").check(T=70, K=5, V=3, dtype=dtype, device="cpu")
    assert report.ok, str(report)


def test_values_between_stages_are_in_full_precision_and_the_output_is_not() -> None:
    op = _op("gsa", backend="torch")
    tensors, _ = _leaves(op, dtype=torch.bfloat16)
    seen: list[Tensor] = []
    last = op.stage_ops[-1]
    original = last.run

    def watched(*args: Any) -> Any:
        seen.extend(args[2])
        return original(*args)

    last.run = watched  # type: ignore[method-assign, assignment]
    o, state = op(*tensors, output_final_state=True)
    assert [x.dtype for x in seen] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert o.dtype == torch.bfloat16
    assert {x.dtype for x in state} == {torch.float32}


@pytest.mark.parametrize("name", ["gsa", "both_read", "other_axes"])
@pytest.mark.parametrize("packed", [False, True])
def test_torch_compile_of_the_whole_and_opcheck_of_each_stage(name: str, packed: bool) -> None:
    op = linalg_dsl.compile(_text(name), backend="torch", chunk_size=8)
    tensors, states = _leaves(op, B=1 if packed else 2, N=3 if packed else 2)
    offsets = torch.tensor([0, 0, 7, 21]) if packed else None
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def model(*args: Tensor) -> Any:
        count = len(tensors)
        return op(
            *args[:count], initial_state=args[count:], cu_seqlens=offsets, output_final_state=True, scale=0.3
        ) if name != "gsa" else op(
            *args[:count], initial_state=args[count:], cu_seqlens=offsets, output_final_state=True
        )  # fmt: skip

    fast = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    (o, last), (want_o, want) = fast(*tensors, *states), model(*tensors, *states)
    assert type(last) is type(want)
    for got, expected in zip((o, *last), (want_o, *want), strict=True):
        assert torch.equal(got, expected)
    grads = [
        torch.autograd.grad(sum((x.sin().sum() for x in (a, *b)), torch.zeros(())), [*tensors, *states])
        for a, b in (fast(*tensors, *states), model(*tensors, *states))
    ]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)
    assert not torch._dynamo.utils.counters["graph_break"]

    ran: list[tuple[Any, ...]] = []
    for stage in op.stage_ops:
        original = stage.run
        stage.run = lambda *args, f=original, s=stage: (ran.append((s, args)), f(*args))[1]  # type: ignore
    op(*tensors, initial_state=states, cu_seqlens=offsets)
    assert len(ran) == len(op.stage_ops)
    for stage, (_, _, given, first, cu, want_states) in ran:
        handle = getattr(torch.ops.linalg_dsl, stage.operator("torch").name).default
        leaves = [x.detach().requires_grad_() for x in (*given, *first)]
        nan = [float("nan")] * len(stage.spec.consts)
        assert set(opcheck(handle, (*leaves, nan, cu, want_states, True)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", [*CHUNKED, "lightnet"])
def test_a_sequence_cut_in_two_hands_its_states_on(name: str) -> None:
    op = _op(name, backend="torch")
    tensors, _ = _leaves(op)
    o, last = op(*tensors, output_final_state=True)
    timed = [d.timed for d in op.spec.inputs]
    head = [x[:, :9] if t else x for x, t in zip(tensors, timed, strict=True)]
    tail = [x[:, 9:] if t else x for x, t in zip(tensors, timed, strict=True)]
    first, between = op(*head, output_final_state=True)
    second, end = op(*tail, initial_state=between, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), o)
    for got, want in zip(end, last, strict=True):
        torch.testing.assert_close(got, want)
    assert type(end)._fields == op.spec.carried


def test_states_are_handed_in_by_order_or_by_name() -> None:
    op = _op("gsa", backend="torch")
    tensors, states = _leaves(op)
    want = op(*tensors, initial_state=tuple(states))
    _, last = op(*tensors, output_final_state=True)
    for given in (list(states), type(last)(*states), {"B": states[1], "A": states[0]}):
        assert torch.equal(op(*tensors, initial_state=given), want)
    none = [torch.zeros_like(x) for x in states]
    half = op(*tensors, initial_state={"B": states[1]})
    torch.testing.assert_close(half, op(*tensors, initial_state=(none[0], states[1])))
    torch.testing.assert_close(half, op.reference(*tensors, initial_state={"B": states[1]}))
    for wrong, message in (
        (states[0], "initial_state must hold one tensor each of A, B, got a Tensor"),
        (states[:1], "got 1"),
        (states[::-1], r"initial_state: A must be \[N, H, K, n\] = \(2, 2, 5, 8\), got shape \(2, 2, 8, 3\)"),
        ({"C": states[0]}, "has 'C', which is no state; they are A, B"),
    ):
        with pytest.raises(ArgumentError, match=message):
            op(*tensors, initial_state=wrong)


def test_consts_reach_the_stages_and_the_steps_between() -> None:
    op = _op("other_axes", backend="torch")
    tensors, _ = _leaves(op)
    plain, half = op(*tensors), op(*tensors, scale=0.5)
    torch.testing.assert_close(half, 0.5 * 5**0.5 * plain)
    both = _op("both_read", backend="torch")
    tensors, _ = _leaves(both)
    torch.testing.assert_close(both(*tensors, scale=0.2), both.reference(*tensors, scale=0.2))


def test_a_const_that_was_written_out_cannot_be_given_another_value() -> None:
    op = linalg_dsl.compile(
        """
recurrence read_in_a_loop
const n = 2
input q : [K]
input k : [n, K]
input v : [V]
A_t = A_{t-1} + k_{t,1} v_tᵀ
S_t = S_{t-1}
for j in 1..n:
    S_t = S_t + k_{t,j} (v_t - A_tᵀ k_{t,j})ᵀ
o_t = S_tᵀ q_t
""",
        backend="torch",
    )
    assert op.stages.fixed == (("n", 2.0),)
    tensors, _ = _leaves(op)
    assert torch.equal(op(*tensors, n=2), op(*tensors))
    more = list(draw(parse(str(op.spec).replace("n = 2", "n = 3")), 2, 21, 2, 5, 3).values())
    with pytest.raises(ArgumentError, match="const n is fixed at 2, as substeps read another state"):
        op(*more, n=3)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (2, 1)])
def test_nothing_and_one_token(batch: int, length: int) -> None:
    for name in ("gsa", "both_read", "lightnet"):
        op = _op(name, backend="torch")
        tensors, states = _leaves(op, B=batch, T=length)
        o, last = op(*tensors, initial_state=states, output_final_state=True)
        want_o, want = op.reference(*tensors, initial_state=states, output_final_state=True)
        for got, expected in zip((o, *last), (want_o, *want), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_shift_takes_the_token_before_and_hands_the_last_on(packed: bool, given: bool) -> None:
    scope: dict[str, Any] = {}
    exec(template_text("pipeline_library.py"), scope)
    offsets = torch.tensor([0, 0, 1, 4, 4, 6, 6], dtype=torch.int32) if packed else None
    torch.manual_seed(0)
    x = torch.randn((1 if packed else 3, 6, 2, 5), dtype=torch.float64, requires_grad=True)
    first = (
        torch.randn((6 if packed else 3, 4, 5), dtype=torch.float64, requires_grad=True) if given else None
    )
    step = Shift("y", "x", "x_prev", 0.0)
    want = shifted(x, first, step, offsets, 4)
    before = scope["shift"](x, first, 0.0, 4, offsets)
    last = scope["last_token"](x, first, 4, offsets)
    wide = before if before.shape[2] == 4 else before.repeat_interleave(2, dim=2)
    leaves = [x] if first is None else [x, first]
    torch.testing.assert_close((wide, last), want)
    for got, expected in zip(
        torch.autograd.grad(wide.sin().sum() + last.cos().sum(), leaves),
        torch.autograd.grad(want[0].sin().sum() + want[1].cos().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)
    for length in (0, 1):
        short = x.detach()[:, :length]
        bounds = torch.tensor([0, length, length]) if packed else None
        begin = None if first is None else first.detach()[:2] if packed else first.detach()
        torch.testing.assert_close(
            scope["last_token"](short, begin, 4, bounds), shifted(short, begin, step, bounds, 4)[1]
        )
        assert scope["shift"](short, begin, 0.0, 4, bounds).shape[1] == length


def test_an_exported_file_gives_the_same_bits(tmp_path: Path) -> None:
    for name in CHUNKED:
        op = linalg_dsl.compile(_text(name), backend="torch")
        scope: dict[str, Any] = {"__name__": "exported"}
        code = op.export(tmp_path / f"{name}.py", backend="torch").read_text(encoding="utf-8")
        exec(compile(code, name, "exec"), scope)
        assert code.isascii()
        assert {line.split()[1] for line in code.splitlines() if line.startswith("import ")} <= {
            "torch", "math", "collections", "functools",
        }  # fmt: skip
        tensors, states = _leaves(op, T=70)
        for initial in (None, states):
            results = []
            for call in (op, scope[name]):
                o, last = call(*tensors, initial_state=initial, output_final_state=True)
                leaves = [*tensors, *(initial or [])]
                loss = sum((x.sin().sum() for x in (o, *last)), torch.zeros(()))
                results.append([o, *last, *torch.autograd.grad(loss, leaves)])
            for got, want in zip(*results, strict=True):
                assert torch.equal(got, want)


def test_source_shows_every_stage_and_the_steps_between() -> None:
    op = linalg_dsl.compile(text("gsa"), backend="torch")
    whole, forward, backward = (op.source(w, backend="torch") for w in ("module", "forward", "backward"))
    for code in (whole, forward, backward):
        assert "# -- stage 1 of 2: gsa_A --" in code
        assert "# -- stage 2 of 2: gsa_B --" in code
    assert "def run(stages, tensors, initials, numbers, cu_seqlens, want):" in whole
    assert whole.count("def forward_chunk(") == 2
    assert "def backward_chunk(" not in forward
    assert "def run(" not in backward
    for ask in (
        op.artefacts,
        lambda: op.module_text("torch"),
        lambda: op.operator("torch"),
        lambda: op.plan.forward,
    ):
        with pytest.raises(ArgumentError, match="stages"):
            ask()


def test_explanations_go_stage_after_stage() -> None:
    plan = linalg_dsl.compile(text("gsa")).plan
    found = plan.explain(B=1, T=100, H=2, K=32, V=64)
    assert found.verdict.startswith("gsa: 2 stages: gsa_A: ")
    told = str(found)
    for part in (
        "A_read_t = gsa_A(q, k, g), V is n:", "stage 1 of 2: gsa_A (V is n of gsa)", "K = 32, V = 8",
        "stage 2 of 2: gsa_B (K is n of gsa)", "K = 8, V = 64",
    ):  # fmt: skip
        assert part in told
    assert plan.to_latex().count(r"\subsection*") == 2
    assert "stages of gsa" in str(plan)


def test_pickles_and_copies_are_the_same_op() -> None:
    op = linalg_dsl.compile(text("gsa"), backend="torch")
    again = pickle.loads(pickle.dumps(op))
    tensors, _ = _leaves(op)
    assert torch.equal(again(*tensors), op(*tensors))


@pytest.mark.parametrize("name", ["mlstm", "both_read", "other_axes", "rwkv4"])
def test_the_text_of_the_steps_is_the_same_every_time_and_short_of_the_margin(name: str) -> None:
    stages = split(parse(_text(name)))
    code = emit_pipeline(stages)
    assert code == emit_pipeline(split(parse(_text(name))))
    assert code.isascii()
    comments = [line for line in code.splitlines() if not line.startswith("#")]
    assert max(map(len, comments)) <= 110
