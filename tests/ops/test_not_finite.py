"""NaN and infinity never come out at earlier tokens, in other heads or in other sequences.

Compared with the step loop, which multiplies by diag(a) as a matrix and so spoils more of a row than it must.
"""

from __future__ import annotations

import math

import pytest
import torch
from runtime_cases import CLASSES, KERNELS, call, inputs_of, op_of, random_like, with_gradients, worst
from torch import Tensor

import linalg_dsl
from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.op import CompiledOp

BOUNDS = [0, 4, 21, 40]
AT = 13


def assert_no_more_spoiled(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Whole where the step loop is, to rounding, and not whole in every result where it is not."""
    for got, want in zip(found, wanted, strict=True):
        finite = want.isfinite()
        assert worst([got[finite]], [want[finite]]) < 1e-9
        assert got.isfinite().all() == finite.all()


def spoiled(tensors: list[Tensor], i: int, value: float) -> list[Tensor]:
    """One number of input i, of token 13 and the second of three heads."""
    x = tensors[i].clone()
    x[0, AT, 1].view(-1)[-1] = value
    return [*tensors[:i], x, *tensors[i + 1 :]]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_torch_module_spoils_what_the_step_loop_spoils(name: str, value: float) -> None:
    op = op_of(name, backend="torch", chunk_size=16)
    tensors, states = inputs_of(op, 1, 40, 3, 4, 3, N=3, dtype=torch.float64)
    offsets = torch.tensor(BOUNDS)
    clean, d_clean = with_gradients(op, tensors, states, cu_seqlens=offsets)
    weights = random_like(clean)
    weights[0][:, AT:21] = 0  # the loss is of tokens before
    for w in weights[1:]:
        w[1] = 0
    for i, decl in enumerate(op.spec.inputs):
        if not decl.timed:
            continue
        given = spoiled(tensors, i, value)
        results, grads = with_gradients(op, given, states, weights, cu_seqlens=offsets)
        wanted = call(op.reference, given, states, cu_seqlens=offsets)
        if name != "value_erase":  # there a value's other channels are in the same product
            assert_no_more_spoiled(results, wanted)
        spoilt = [not x.isfinite().all() for x in results]
        assert spoilt == [not x.isfinite().all() for x in wanted]
        o = results[0]
        assert o[:, :AT].isfinite().all()
        assert o[:, 21:].isfinite().all()
        assert o[:, :, ::2].isfinite().all()
        _, d_wanted = with_gradients(op, tensors, states, weights, cu_seqlens=offsets)
        outside = torch.ones(40, dtype=torch.bool)
        outside[4:21] = False
        for d, want, x in zip(grads, d_wanted, op.spec.inputs, strict=False):
            if x.timed:
                assert worst([d[:, outside], d[:, :, ::2]], [want[:, outside], want[:, :, ::2]]) < 1e-9
    assert all(x.isfinite().all() for x in d_clean)


@pytest.mark.parametrize("name", CLASSES)
def test_a_state_spoils_its_own_sequence_and_head(name: str) -> None:
    op = op_of(name, backend="torch", chunk_size=16)
    tensors, states = inputs_of(op, 1, 40, 3, 4, 3, N=3, dtype=torch.float64)
    offsets = torch.tensor(BOUNDS)
    states[0] = states[0].clone()
    states[0][1, 1].view(-1)[0] = math.nan
    results = call(op, tensors, states, cu_seqlens=offsets)
    assert_no_more_spoiled(results, call(op.reference, tensors, states, cu_seqlens=offsets))
    assert results[0][:, :4].isfinite().all()
    assert results[0][:, 21:].isfinite().all()
    assert results[0][:, :, ::2].isfinite().all()


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_spoil_what_the_step_loop_spoils(name: str) -> None:
    """To the last bit the same numbers at all tokens before: 0 * NaN inside a chunk leaves no trace."""
    op = op_of(name, backend="triton", chunk_size=16)
    tensors, states = inputs_of(op, 1, 20, 2, 4, 3)
    clean = call(op, tensors, states)
    for i, decl in enumerate(op.spec.inputs):
        if not decl.timed:
            continue
        x = tensors[i].clone()
        x[0, 9, 1].view(-1)[-1] = math.inf if decl.name == "v" else math.nan
        given = [*tensors[:i], x, *tensors[i + 1 :]]
        found, wanted = call(op, given, states), call(op.reference, given, states)
        assert torch.equal(found[0][:, :9], clean[0][:, :9])
        assert torch.equal(found[0][:, :, 0], clean[0][:, :, 0])
        assert all(torch.equal(a[:, 0], b[:, 0]) for a, b in zip(found[1:], clean[1:], strict=True))
        for got, want in zip(found, wanted, strict=True):
            assert not (want.isfinite() & ~got.isfinite()).any()
            assert got.isfinite().all() == want.isfinite().all()
        assert torch.equal(found[0].isfinite(), wanted[0].isfinite())


def spoilt_tokens(x: Tensor) -> Tensor:
    """[T]: whether the second head has something that is not finite there."""
    return (~x[0, :, 1].isfinite()).reshape(x.shape[1], -1).any(1)


def assert_gradients_keep_to_the_loop(
    op: CompiledOp, T: int, at: int, *, gates_keep: bool, only: str | None = None
) -> None:
    """One number of token ``at`` is NaN, of every input (of those named in ``only``) and of the output's
    cotangent: gradients may be so where those of the step loop are, and at that token and beside it; those of
    gates in its chunk, unless ``gates_keep``.
    """
    kind = torch.float64 if op.options.backend == "torch" else torch.float32
    tensors, states = inputs_of(op, 1, T, 2, 4, 3, dtype=kind)
    results, clean = with_gradients(op, tensors, states)
    weights = random_like(results)
    chosen = [d.timed and (only is None or d.name in only) for d in op.spec.inputs]
    cases = [(i, tensors[:i], tensors[i], tensors[i + 1 :]) for i, yes in enumerate(chosen) if yes]
    for i, before, x, after in [*cases, (-1, [], weights[0], weights[1:])]:
        bad = x.clone()
        bad[0, at, 1].view(-1)[-1] = math.nan
        given, cotangents = (tensors, [bad, *after]) if i < 0 else ([*before, bad, *after], weights)
        _, found = with_gradients(op, given, states, cotangents)
        _, wanted = with_gradients(op.reference, given, states, cotangents)
        for decl, got, want, old in zip(op.spec.inputs, found, wanted, clean, strict=False):
            if not decl.timed:
                continue
            allowed = spoilt_tokens(want)
            allowed[at - 1 : at + 2] = True
            if decl.kind == "log_gate" and not gates_keep:
                allowed[at // 16 * 16 : (at // 16 + 1) * 16] = True
            assert not (spoilt_tokens(got) & ~allowed).any(), (i, decl.name)
            assert spoilt_tokens(got)[spoilt_tokens(want)].all()
            assert worst([got[:, :, 0]], [old[:, :, 0]]) < 1e-12
            if i < 0:  # later tokens do not see this cotangent, kernels in no bit of theirs
                mine, its = (x[:, at + 1 :][:, ~allowed[at + 1 :]] for x in (got, old))
                bits = kind == torch.float32 and decl.kind != "log_gate"
                assert torch.equal(mine, its) if bits else torch.allclose(mine, its)


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_of_the_torch_module_spoil_what_the_step_loop_spoils(name: str) -> None:
    op = op_of(name, backend="torch", chunk_size=16)
    assert_gradients_keep_to_the_loop(op, 36, 21, gates_keep=True)


@pytest.mark.parametrize(("name", "only"), [("simple_gla", "qkvg"), ("gla", "k"), ("value_erase", "w")])
def test_gradients_of_kernels_spoil_what_the_step_loop_spoils(name: str, only: str) -> None:
    op = op_of(name, backend="triton", chunk_size=16, nan_exact="gradients")
    assert_gradients_keep_to_the_loop(op, 12, 6, gates_keep=False, only=only)


def test_what_looks_for_nan_is_what_was_asked_for() -> None:
    counts = [
        linalg_dsl.compile(catalogue_text("gla"), nan_exact=exact).source(backend="triton").count("LOOK):")
        for exact in (False, True, "gradients")
    ]
    assert 0 == counts[0] < counts[1] < counts[2]
    with pytest.raises(ArgumentError, match="nan_exact is one of True, False, 'gradients', got 'all'"):
        linalg_dsl.compile(catalogue_text("gla"), nan_exact="all")  # type: ignore[arg-type]


def test_the_look_at_products_can_be_left_out() -> None:
    """What it costs then: an earlier token of the chunk, none of the chunk before."""
    given: list[list[Tensor]] = []
    for exact in (True, False):
        op = op_of("simple_gla", backend="triton", chunk_size=16, nan_exact=exact)
        tensors, states = inputs_of(op, 1, 36, 1, 4, 3)
        tensors[2][0, 25, 0, 1] = math.nan
        given.append(call(op, tensors, states))
        assert ("one_sided_product" in op.source()) == exact
    assert torch.equal(given[0][0][:, :16], given[1][0][:, :16])
    assert given[0][0][:, :25].isfinite().all()
    assert given[1][0][0, 16:25, 0, 1].isnan().all()


def test_kernels_keep_to_the_sequence_and_the_head() -> None:
    op = op_of("gated_delta_rule", backend="triton", chunk_size=16)
    tensors, states = inputs_of(op, 1, 40, 3, 4, 3, N=3)
    offsets = torch.tensor([0, 4, 38, 40])
    clean, d_clean = with_gradients(op, tensors, states, cu_seqlens=offsets)
    tensors[2] = tensors[2].clone()
    tensors[2][0, 25, 1] = math.nan  # the sixth token of the second chunk of the second sequence
    found, grads = with_gradients(op, tensors, states, cu_seqlens=offsets)
    reached = torch.zeros(found[0].shape, dtype=torch.bool)
    reached[0, 25:38, 1] = True
    assert torch.equal(found[0][~reached], clean[0][~reached])
    assert found[0][reached].isnan().all()
    rest = torch.ones((3, 3), dtype=torch.bool)
    rest[1, 1] = False
    assert torch.equal(found[1][rest], clean[1][rest])
    others = torch.ones((1, 40, 3), dtype=torch.bool)
    others[:, 4:38, 1] = False
    for got, want, decl in zip(grads, d_clean, op.spec.inputs, strict=False):
        if decl.timed:
            assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("name", ["gla", "value_erase"])
def test_a_gate_that_is_nan_or_inf_is_no_reset(name: str) -> None:
    """Sums of gates per channel are products with 0 and 1, for which -inf is replaced by a large number."""
    op = op_of(name, backend="triton", chunk_size=16)
    tensors, states = inputs_of(op, 1, 20, 1, 4, 3)
    i = next(i for i, d in enumerate(op.spec.inputs) if d.kind == "log_gate")
    for values in ((math.nan, 0.0), (math.inf, 0.0), (math.inf, -math.inf), (-math.inf, 0.0)):
        gates = tensors[i].clone()
        gates[0, 9, 0, 1], gates[0, 11, 0, 1] = values
        given = [*tensors[:i], gates, *tensors[i + 1 :]]
        found, wanted = call(op, given, states), call(op.reference, given, states)
        assert torch.equal(found[0].isfinite(), wanted[0].isfinite())
