"""Calls of compiled recurrences: values and gradients against the step loop, and how calls are made."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import TEXTS, compiled, expected, gradients, leaves, worst_error
from torch import Tensor

import linalg_dsl
from linalg_dsl.errors import ArgumentError, DslError
from linalg_dsl.ops.op import CompiledOp

BOTH = (1.0, 1.0)
CHUNK = 16


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("tokens", [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 65])
def test_float64_agrees_with_the_step_loop(name: str, tokens: int) -> None:
    op = compiled(name, chunk_size=CHUNK)
    tensors, state = leaves(op, 2, tokens, 2, 5, 3, gates="strong")
    assert worst_error(gradients(op, tensors, state, BOTH), expected(op, tensors, state, BOTH)) < 1e-10


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("gates", ["mild", "slow", "strong", "resets", "zero"])
def test_float32_agrees_with_the_step_loop(name: str, gates: str) -> None:
    op = compiled(name)
    tensors, state = leaves(op, 1, 300, 2, 8, 12, gates=gates, dtype=torch.float32)
    assert worst_error(gradients(op, tensors, state, BOTH), expected(op, tensors, state, BOTH)) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_types_keep_their_types(dtype: torch.dtype) -> None:
    op = compiled("gated_delta")
    tensors, state = leaves(op, 2, 70, 2, 8, 12, dtype=dtype)
    found = gradients(op, tensors, state, BOTH)
    assert [x.dtype for x in found] == [dtype, torch.float32, *[dtype] * 5, torch.float32]
    assert worst_error(found, expected(op, tensors, state, BOTH)) < 1e-2


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 65, 3, 3, 7), (3, 10, 1, 1, 20), (1, 4, 2, 40, 1)])
def test_odd_shapes(shape: tuple[int, int, int, int, int]) -> None:
    for name in TEXTS:
        op = compiled(name)
        tensors, state = leaves(op, *shape)
        assert worst_error(gradients(op, tensors, state, BOTH), expected(op, tensors, state, BOTH)) < 1e-10


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 0.0)])
def test_gradients_from_one_result_only(name: str, weights: tuple[float, float]) -> None:
    op = compiled(name, chunk_size=CHUNK)
    tensors, state = leaves(op, 2, 37, 2, 5, 3)
    assert worst_error(gradients(op, tensors, state, weights), expected(op, tensors, state, weights)) < 1e-10


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_packed_sequences_with_empty_ones(name: str, kind: torch.dtype) -> None:
    op = compiled(name, chunk_size=CHUNK)
    offsets = torch.tensor([0, 0, 5, 5, 38, 39, 39], dtype=kind)
    tensors, state = leaves(op, 1, 39, 2, 5, 3, N=6)
    found = gradients(op, tensors, state, BOTH, cu_seqlens=offsets)
    assert worst_error(found, expected(op, tensors, state, BOTH, cu_seqlens=offsets)) < 1e-10


def test_packed_sequences_do_not_see_each_other() -> None:
    op = compiled("gated_delta", chunk_size=CHUNK)
    tensors, state = leaves(op, 1, 39, 2, 5, 3, N=2)
    packed = op(*tensors, initial_state=state, cu_seqlens=torch.tensor([0, 17, 39]))
    alone = op(*(x[:, 17:] for x in tensors), initial_state=state[1:])
    torch.testing.assert_close(packed[:, 17:], alone)


@pytest.mark.parametrize("heads", [{"q": 1}, {"q": 2, "k": 2}, {"v": 2, "g": 1, "beta": 4}])
def test_groups_of_heads(heads: dict[str, int]) -> None:
    op = compiled("gated_delta", chunk_size=CHUNK)
    tensors, state = leaves(op, 2, 20, 4, 5, 3, heads=heads)
    assert worst_error(gradients(op, tensors, state, BOTH), expected(op, tensors, state, BOTH)) < 1e-10


def test_a_sequence_in_pieces_is_the_sequence() -> None:
    op = compiled("gated_delta")
    tensors, state = leaves(op, 1, 150, 2, 5, 3)
    whole, end = op(*tensors, initial_state=state, output_final_state=True)
    for cut in (1, 63, 64, 65, 149):
        first, between = op(*(x[:, :cut] for x in tensors), initial_state=state, output_final_state=True)
        second, last = op(*(x[:, cut:] for x in tensors), initial_state=between, output_final_state=True)
        torch.testing.assert_close(torch.cat([first, second], 1), whole)
        torch.testing.assert_close(last, end)


def test_output_does_not_depend_on_later_tokens() -> None:
    op = compiled("bonus")
    tensors, _ = leaves(op, 1, 40, 2, 5, 3)
    before = op(*tensors)
    later = [x.detach().clone() for x in tensors]
    for x in later[:4]:
        x[:, 30:] = -7.0
    assert torch.equal(op(*later)[:, :30], before[:, :30])


def test_arguments_by_order_and_by_name_are_the_same() -> None:
    op = compiled("gated_delta")
    (q, k, v, g, beta), _ = leaves(op, 1, 9, 2, 5, 3)
    by_order = op(q, k, v, g, beta)
    assert torch.equal(op(beta=beta, q=q, g=g, v=v, k=k), by_order)
    assert torch.equal(op(q, k, v, beta=beta, g=g), by_order)


def test_without_final_state_only_the_output_comes_back() -> None:
    op = compiled("gated_delta")
    tensors, state = leaves(op, 1, 9, 2, 5, 3)
    assert isinstance(op(*tensors, initial_state=state), Tensor)


def test_without_initial_state_the_start_is_zero() -> None:
    op = compiled("gated_delta")
    tensors, state = leaves(op, 2, 9, 2, 5, 3)
    for pair in zip(
        op(*tensors, output_final_state=True),
        op(*tensors, initial_state=torch.zeros_like(state), output_final_state=True),
        strict=True,
    ):
        assert torch.equal(*pair)


def test_inputs_need_not_be_contiguous() -> None:
    op = compiled("gated_delta")
    tensors, state = leaves(op, 2, 20, 2, 5, 3)
    want = gradients(op, tensors, state, BOTH)
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    strange = state.detach().mT.contiguous().mT.requires_grad_()
    assert not turned[0].is_contiguous()
    for got, expect in zip(gradients(op, turned, strange, BOTH), want, strict=True):
        assert torch.equal(got, expect)


def test_gradients_only_where_they_are_asked_for() -> None:
    op = compiled("gated_delta")
    tensors, _ = leaves(op, 1, 9, 2, 5, 3)
    q, k, v, g, beta = (x.detach() for x in tensors)
    k.requires_grad_()
    op(q, k, v, g, beta).sum().backward()
    assert k.grad is not None
    assert q.grad is None
    with torch.no_grad():
        assert not op(q, k, v, g, beta).requires_grad


def test_inputs_of_different_types() -> None:
    op = compiled("gated_delta")
    tensors, state = leaves(op, 1, 40, 2, 5, 3, dtype=torch.float32)
    mixed = [
        x.detach().to(t).requires_grad_()
        for x, t in zip(tensors, [torch.bfloat16] * 3 + [torch.float32] * 2, strict=True)
    ]
    found = gradients(op, mixed, state, BOTH)
    assert [x.dtype for x in found[2:]] == [x.dtype for x in (*mixed, state)]
    assert worst_error(found, expected(op, mixed, state, BOTH)) < 1e-2


# -- consts -------------------------------------------------------------------------------------
def test_a_const_of_the_read_is_a_number_of_each_call() -> None:
    op = compiled("gated_delta")
    tensors, _ = leaves(op, 1, 9, 2, 4, 3)
    assert op.operator("torch").consts == ("scale",)
    torch.testing.assert_close(op(*tensors, scale=2.0), 4 * op(*tensors))  # 1 / sqrt(4) by default
    assert op.artefacts() is op.artefacts(())


def test_any_other_const_makes_a_specialisation() -> None:
    op = compiled("sigmoid_gate")
    tensors, state = leaves(op, 1, 30, 2, 4, 3)
    for tau in (16.0, 1.0, 2.5):
        found = gradients(op, tensors, state, BOTH, tau=tau)
        assert worst_error(found, expected(op, tensors, state, BOTH, consts={"tau": tau})) < 1e-10
    assert op.module_text("torch", (("tau", 1.0),)) != op.module_text("torch")


def test_a_const_that_is_a_size_must_fit_the_tensors() -> None:
    op = compiled("pairs")
    tensors, _ = leaves(op, 1, 9, 2, 4, 3)
    wrong = [
        tensors[0],
        torch.cat([tensors[1]] * 2, 3),
        torch.cat([tensors[2]] * 2, 3),
        torch.cat([tensors[3]] * 2, 3),
    ]
    with pytest.raises(ArgumentError, match="axis n is 4, expected 2"):
        op(*wrong)


# -- wrong calls --------------------------------------------------------------------------------
def _wrong(message: str, *args: object, **kwargs: object) -> None:
    with pytest.raises(ArgumentError, match=message):
        compiled("gated_delta")(*args, **kwargs)


def test_wrong_arguments_are_named() -> None:
    (q, k, v, g, beta), state = leaves(compiled("gated_delta"), 2, 9, 4, 5, 3)
    ok = (q, k, v, g, beta)
    _wrong("missing g, beta", q, k, v)
    _wrong("takes 5 tensors .* got 6", *ok, q)
    _wrong("k is given twice", *ok, k=k)
    _wrong("no argument 'gate'", *ok, gate=g)
    _wrong("const scale must be a number, got Tensor", *ok, scale=g)
    _wrong("const scale must be finite, got nan", *ok, scale=float("nan"))
    _wrong(r"v must be a tensor \[B, T, H, V\], got float", q, k, 1.0, g, beta)
    _wrong(r"g must be \[B, T, H\], got shape \(2, 9, 4, 5\)", q, k, v, q, beta)
    _wrong(r"k \[B, T, H, K\] has shape \(2, 9, 4, 3\): axis K is 3, expected 5", q, v, v, g, beta)
    _wrong(r"k has B, T = \(2, 8\), expected \(2, 9\)", q, k[:, :8], v, g, beta)
    _wrong("k has 3 heads; a head count divides the largest, 4", q, k[:, :, :3], v, g, beta)
    _wrong("q must be float16, .* got torch.int64", q.long(), k, v, g, beta)
    _wrong("beta is on meta, expected cpu", q, k, v, g, beta.to("meta"))
    _wrong(
        r"initial_state must be \[N, H, K, V\] = \(2, 4, 5, 3\), got shape \(2, 4, 3, 5\)",
        *ok,
        initial_state=state.mT,
    )
    _wrong("initial_state must be a floating-point tensor, got torch.int64", *ok, initial_state=state.long())
    _wrong("the batch must be 1, got 2", *ok, cu_seqlens=torch.tensor([0, 9]))
    one = tuple(x[:1] for x in ok)
    _wrong("must be an int32 or int64 tensor, got torch.float32", *one, cu_seqlens=torch.tensor([0.0, 9.0]))
    _wrong("must be an int32 or int64 tensor, got list", *one, cu_seqlens=[0, 9])
    _wrong(r"cu_seqlens must be \[N \+ 1\], got shape \(1, 2\)", *one, cu_seqlens=torch.tensor([[0, 9]]))
    _wrong("cu_seqlens_cpu needs cu_seqlens", *one, cu_seqlens_cpu=torch.tensor([0, 9]))
    _wrong("max_seqlen must be an int, got float", *one, max_seqlen=9.0)
    for offsets in ([1, 9], [0, 8], [0, 5, 4, 9], [0, 10]):
        _wrong("cu_seqlens must rise from 0 to T = 9", *one, cu_seqlens=torch.tensor(offsets))


def test_a_name_that_every_call_uses_is_refused() -> None:
    with pytest.raises(ArgumentError, match="initial_state is a keyword of every call"):
        linalg_dsl.compile(
            TEXTS["sigmoid_gate"].replace("input a", "input initial_state").replace("a_t", "initial_state_t")
        )


# -- backends and options -----------------------------------------------------------------------
def test_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    op = compiled("gated_delta", backend="triton")
    tensors, _ = leaves(op, 1, 9, 2, 5, 3, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="needs tensors on a GPU, got cpu"):
        op(*tensors)
    wide, _ = leaves(op, 1, 9, 2, 5, 3)
    with pytest.raises(ArgumentError, match="got float64"):
        op(*wide)


def test_kernels_have_a_widest_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    op = compiled("gated_delta", backend="triton")
    for axis, sizes in (("K", (513, 3)), ("V", (3, 513))):
        tensors, _ = leaves(op, 1, 2, 1, *sizes, dtype=torch.float32)
        with pytest.raises(ArgumentError, match=f"{axis} is 513; Triton kernels take 1 to 512"):
            op(*tensors)
        assert compiled("gated_delta", backend="torch")(*tensors).shape[-1] == sizes[1]


def test_auto_chooses_by_device_and_type() -> None:
    op = compiled("gated_delta")
    assert op.backend_for("cpu", False) == "torch"
    assert op.backend_for("cuda", False) == "triton"
    with pytest.warns(UserWarning, match="float64 has no Triton kernels"):
        assert op.backend_for("cuda", True) == "torch"
    with pytest.raises(ArgumentError, match="strict=True forbids"):
        compiled("gated_delta", strict=True).backend_for("cuda", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op.backend_for("cpu", True) == "torch"


def test_the_reference_backend_runs_the_step_loop() -> None:
    tensors, state = leaves(compiled("gated_delta"), 2, 20, 2, 5, 3, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True}
    o, last = compiled("gated_delta", backend="reference")(*tensors, **options)
    want_o, want_last = compiled("gated_delta")(*tensors, **options)
    assert (o.dtype, last.dtype) == (want_o.dtype, want_last.dtype)
    torch.testing.assert_close(o, want_o)
    torch.testing.assert_close(last, want_last)


def test_reference_differentiates_twice() -> None:
    op = compiled("gated_delta")
    tensors, _ = leaves(op, 1, 4, 1, 2, 2)
    assert torch.autograd.gradgradcheck(lambda *x: op.reference(*x), tensors)


def test_a_second_derivative_of_the_kernels_points_to_the_reference() -> None:
    op = compiled("gated_delta")
    tensors, _ = leaves(op, 1, 4, 1, 2, 2)
    (first,) = torch.autograd.grad(op(*tensors).sum(), tensors[1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"op\.reference"):
        torch.autograd.backward(first.sum())


def test_forward_mode_derivatives_are_refused_not_lost() -> None:
    op = compiled("gated_delta")
    tensors = [x.detach() for x in leaves(op, 1, 4, 1, 2, 2)[0]]
    make: Callable[[Tensor, Tensor], Tensor] = torch.autograd.forward_ad.make_dual
    unpack: Callable[[Tensor], Any] = torch.autograd.forward_ad.unpack_dual
    with torch.autograd.forward_ad.dual_level():
        dual = [make(x, torch.ones_like(x)) for x in tensors]
        with pytest.raises(RuntimeError, match=r"op\.reference"):
            op(*dual)
        op(*tensors)
        assert unpack(op.reference(*dual)).tangent is not None


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "cuda"},
        {"chunk_size": 0},
        {"chunk_size": 2.5},
        {"schedule": "three_level"},
        {"schedule": "materialised"},
        {"state_layout": "kvk"},
        {"tune": True, "backend": "torch"},
        {"tune": True, "invariant": True},
    ],
)
def test_unknown_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        linalg_dsl.compile(TEXTS["gated_delta"], **options)  # type: ignore[arg-type]


def test_compile_takes_text_paths_specs_and_functions(tmp_path: Path) -> None:
    path = tmp_path / "mine.rec"
    path.write_text(TEXTS["gated_delta"], encoding="utf-8")
    spec = linalg_dsl.parse(TEXTS["gated_delta"])

    class WithSpec:
        pass

    function = WithSpec()
    function.spec = spec  # type: ignore[attr-defined]
    for given in (TEXTS["gated_delta"], path, spec, function):
        assert linalg_dsl.compile(given).spec == spec  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="got int"):
        linalg_dsl.compile(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="pass Path"):
        linalg_dsl.compile("mine.rec")


def test_mistakes_are_reported_at_compilation() -> None:
    with pytest.raises(DslError):
        linalg_dsl.compile(TEXTS["gated_delta"].replace("beta_t", "gamma_t"))


def test_debug_checks_promises() -> None:
    op = linalg_dsl.compile(TEXTS["gated_delta"], debug=True)
    (q, k, v, g, beta), _ = leaves(op, 1, 9, 2, 5, 3)
    op(q, k, v, g, beta)
    cases = [
        ((q, 2 * k, v, g, beta), "k promises unit vectors .* got norm"),
        ((q, k, v, -g, beta), r"g promises values in \(-inf, 0\], got .* at \(0, "),
        ((q, k, v, g, beta + 3), r"beta promises values in \(0, 2\), got"),
        ((q, k, v, g, beta * 0), r"beta promises values in \(0, 2\), got 0 at \(0, 0, 0\)"),
        ((q, k, v / 0, g, beta), None),
        ((q * float("nan"), k, v, g, beta), "q has NaN"),
    ]
    for tensors, message in cases:
        if message is None:
            op(*tensors)
            continue
        with pytest.raises(ArgumentError, match=message):
            op(*tensors)
        compiled("gated_delta")(*tensors)


# -- the object -----------------------------------------------------------------------------------
def test_ops_pickle_and_copy() -> None:
    op = compiled("sigmoid_gate", chunk_size=CHUNK)
    again = pickle.loads(pickle.dumps(op))
    tensors, _ = leaves(op, 1, 9, 2, 5, 3)
    assert isinstance(again, CompiledOp)
    assert (again.spec, again.options) == (op.spec, op.options)
    assert torch.equal(again(*tensors), op(*tensors))
    assert copy.deepcopy(op) is op


def test_source_shows_one_direction_or_all() -> None:
    op = compiled("gated_delta")
    forward, backward = op.source("forward", "torch"), op.source("backward", "torch")
    assert "def forward_chunk" in forward
    assert "def backward_chunk" not in forward
    assert "def backward_chunk" in backward
    assert "def forward(" not in backward
    assert op.source(backend="torch") == op.module_text("torch")
    for text in (forward, backward):
        exec(compile(text, "part", "exec"), {})
    with pytest.raises(ArgumentError, match="sideways"):
        op.source("sideways")
    with pytest.raises(ArgumentError, match="reference"):
        op.source("forward", "reference")


def test_errors_in_generated_code_show_its_lines() -> None:
    op = compiled("gated_delta")
    module = op.operator("torch").module
    assert module.__file__ is not None
    assert Path(module.__file__).read_text(encoding="utf-8") == op.module_text("torch")


def test_the_plan_explains_itself() -> None:
    text = str(compiled("gated_delta").plan.explain(B=2, T=100, H=4, K=8, V=8))
    for part in (
        "scalar gate + rank 1",
        "S_t = exp(g_t)",
        "Z = −beta ∘ U",
        "fwd_walk: forward walk, V split",
        "FLOP",
    ):
        assert part in text
    assert "align" in compiled("gated_delta").plan.to_latex()
    assert "output o" in str(compiled("gated_delta").plan)
