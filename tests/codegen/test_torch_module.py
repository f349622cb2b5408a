"""The emitted PyTorch module: right in every shape, plain ASCII text, the same from run to run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from recurrences import WIDER
from torch import Tensor

import linalg_dsl
from linalg_dsl.codegen.emit.torch_module import emit_torch
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.reference import reference

GATED_DELTA = """
recurrence gated_delta
input q, k : [K] unit
input v : [V]
input α : log gate
input beta : scalar in (0, 2)
const scale = 1 / sqrt(K)
S_t = exp(α_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ
o_t = scale S_tᵀ q_t
"""
CHANNEL = """
recurrence channel
input q, k : [K]
input v : [V]
input g : log gate [K]
param u : [K]
S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ
o_t = (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ q_t
"""
TWO_WRITES = """
recurrence two_writes
input q : [K]
input k : [2, K] unit
input v : [2, V]
input beta : [2] in (0, 1)
input g : log gate [K]
M_t = (I - beta_{t,2} k_{t,2} k_{t,2}ᵀ) (I - beta_{t,1} k_{t,1} k_{t,1}ᵀ)
S_t = M_t diag(exp(g_t)) S_{t-1} + beta_{t,2} k_{t,2} v_{t,2}ᵀ
o_t = S_tᵀ q_t
"""
PER_HEAD_GATE = """
recurrence per_head
input q, k : [K]
input v : [V]
param gamma : log gate
S_t = exp(gamma) S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
"""
TEXTS = {"gated_delta": GATED_DELTA, "channel": CHANNEL, "two_writes": TWO_WRITES, "per_head": PER_HEAD_GATE}
LONG = ("separable_erase_of_two", "four_erases")
UNIT = re.compile(r"^(input [^:]*: ?\[[KV]\])$", re.MULTILINE)
TEXTS |= {name: UNIT.sub(r"\1 unit", case.text(name)) for name, case in WIDER.items()}
"""With short vectors, so that no state grows until its digits are lost."""


def _module(name: str, chunk: int | None = None) -> tuple[RecurrenceSpec, str, dict[str, Any]]:
    op = linalg_dsl.compile(TEXTS[name], chunk_size=chunk)
    made = op.artefacts()
    text = emit_torch(made.canonical, made.forward, made.backward, chunk_size=chunk)
    scope: dict[str, Any] = {}
    exec(compile(text, name, "exec"), scope)
    return op.spec, text, scope


def _run(
    spec: RecurrenceSpec,
    scope: dict[str, Any],
    tensors: dict[str, Tensor],
    state: Tensor,
    offsets: Tensor | None,
) -> list[Tensor]:
    """o, final state and every gradient, from the module."""
    key = state.shape[2 + spec.states[0].dims.index("K")]
    numbers = tuple(key**-0.5 for _ in scope["CONSTS"])
    given = tuple(tensors.values())
    o, (last,), residuals = scope["forward"](given, (state,), numbers, offsets, True, True)
    grads, (d_state,) = scope["backward"](
        given, (state,), numbers, offsets, residuals, torch.cos(o), (torch.sin(last),)
    )
    return [o, last, *grads, d_state]


def _expected(
    spec: RecurrenceSpec, tensors: dict[str, Tensor], state: Tensor, offsets: Tensor | None
) -> list[Tensor]:
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    start = state.clone().requires_grad_()
    o, last = reference(spec, leaves, initial_state=start, output_final_state=True, cu_seqlens=offsets)
    assert isinstance(last, Tensor)
    wanted = [*leaves.values(), start]
    loss = torch.sin(o).sum() - torch.cos(last).sum()  # derivatives cos(o) and sin(last)
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [o, last, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True))]


def _close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        size = float(want.detach().abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-10 * max(size, 1.0))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 9, 30])
def test_module_agrees_with_the_step_loop_at_ragged_lengths(name: str, tokens: int) -> None:
    spec, _, scope = _module(name, 8)
    tensors = draw(spec, 2, tokens, 2, 5, 3, gates="strong")
    (state,) = draw_state(spec, 2, 2, 5, 3)
    _close(_run(spec, scope, tensors, state, None), _expected(spec, tensors, state, None))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("chunk", [1, 3, 40, None])
def test_chunk_size_does_not_matter(name: str, chunk: int | None) -> None:
    spec, _, scope = _module(name, chunk)
    tensors = draw(spec, 1, 33, 2, 4, 6, gates="resets")
    (state,) = draw_state(spec, 1, 2, 4, 6)
    _close(_run(spec, scope, tensors, state, None), _expected(spec, tensors, state, None))


@pytest.mark.parametrize("name", TEXTS)
def test_packed_sequences_with_empty_ones(name: str) -> None:
    spec, _, scope = _module(name, 8)
    offsets = torch.tensor([0, 0, 3, 3, 19, 20, 20])
    tensors = draw(spec, 1, 20, 2, 5, 3)
    (state,) = draw_state(spec, 6, 2, 5, 3)
    found = _run(spec, scope, tensors, state, offsets)
    _close(found, _expected(spec, tensors, state, offsets))
    assert torch.equal(found[1][0], state[0])


@pytest.mark.parametrize("name", ["gated_delta", "channel"])
def test_groups_of_heads_share_a_tensor(name: str) -> None:
    spec, _, scope = _module(name, 8)
    fewer = {"k": 2, "q": 1} | ({"u": 2} if name == "channel" else {"beta": 2})
    tensors = draw(spec, 2, 20, 4, 5, 3, heads=fewer)
    (state,) = draw_state(spec, 2, 4, 5, 3)
    _close(_run(spec, scope, tensors, state, None), _expected(spec, tensors, state, None))


def test_batch_of_none() -> None:
    spec, _, scope = _module("gated_delta", 8)
    tensors = draw(spec, 0, 9, 2, 5, 3)
    (state,) = draw_state(spec, 0, 2, 5, 3)
    shapes = [x.shape for x in _run(spec, scope, tensors, state, None)]
    assert shapes == [(0, 9, 2, 3), (0, 2, 5, 3), *(x.shape for x in tensors.values()), (0, 2, 5, 3)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    spec, _, scope = _module("gated_delta", 8)
    tensors = draw(spec, 2, 20, 2, 5, 3, dtype=dtype)
    (state,) = draw_state(spec, 2, 2, 5, 3, dtype=torch.float32)
    found = _run(spec, scope, tensors, state, None)
    assert [x.dtype for x in found] == [dtype, torch.float32, *[dtype] * 5, torch.float32]
    wide = _run(spec, scope, {n: x.float() for n, x in tensors.items()}, state, None)
    torch.testing.assert_close(found[0], wide[0].to(dtype), rtol=0, atol=0)


def test_dry_runs_give_the_same_shapes_and_types_without_data() -> None:
    spec, _, scope = _module("two_writes", 8)
    for offsets in (None, torch.tensor([0, 3, 20])):
        batch = 2 if offsets is None else 1
        tensors = tuple(draw(spec, batch, 20, 2, 5, 3, dtype=torch.float32).values())
        (state,) = draw_state(spec, 2, 2, 5, 3, dtype=torch.float32)
        o, (last,), kept = scope["forward"](tensors, (state,), (), offsets, True, True)
        grads, (d_state,) = scope["backward"](tensors, (state,), (), offsets, kept, o, (last,))

        def empty(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to("meta")

        nowhere = tuple(x.to("meta") for x in tensors)
        dry_o, (dry_last,), dry_kept = scope["forward"](
            nowhere, (empty(state),), (), empty(offsets), True, True, True
        )
        dry_grads, (dry_d,) = scope["backward"](
            nowhere, (empty(state),), (), empty(offsets), dry_kept, dry_o, (dry_last,), True
        )
        real, dry = [o, last, *kept, *grads, d_state], [dry_o, dry_last, *dry_kept, *dry_grads, dry_d]
        assert [(x.shape, x.dtype, x.stride()) for x in real] == [(x.shape, x.dtype, x.stride()) for x in dry]


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_ascii_and_uses_every_function_it_holds(name: str) -> None:
    _, text, _ = _module(name)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 110
    tree = ast.parse(text)
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    called = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert defined - {"forward", "backward"} <= called


@pytest.mark.parametrize("name", TEXTS)
def test_chunk_functions_are_as_long_as_one_reads(name: str) -> None:
    _, text, _ = _module(name)
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    lines = [f.end_lineno - f.lineno + 1 for f in functions if "chunk" in f.name and f.end_lineno]
    assert len(lines) in (2, 3)
    assert sum(lines) < (120 if name not in LONG else 260)


def test_assigned_names_are_used() -> None:
    """No statement of a chunk function is dead."""
    for name in TEXTS:
        _, text, _ = _module(name)
        for function in ast.parse(text).body:
            if isinstance(function, ast.FunctionDef) and "chunk" in function.name:
                stored = [
                    n.id
                    for n in ast.walk(function)
                    if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                ]
                loaded = {
                    n.id
                    for n in ast.walk(function)
                    if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
                }
                assert set(stored) - loaded <= {"K", "V", "_"}, (name, function.name)
                assert len(stored) == len(set(stored))


def test_text_does_not_depend_on_the_process() -> None:
    code = (
        "import linalg_dsl, hashlib, sys; text = sys.stdin.read();"
        "print(hashlib.sha256(linalg_dsl.compile(text).module_text('torch').encode()).hexdigest())"
    )
    found = set()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            input=CHANNEL,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
        )
        assert run.returncode == 0, run.stderr
        found.add(run.stdout)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("python_keyword", "input lambda : [V]"),
        ("module_name", "input torch : [V]"),
        ("size_name", "input C : [V]"),
        ("helper_name", "input before : [V]"),
    ],
)
def test_names_of_the_language_do_not_clash_with_the_code(what: str, line: str) -> None:
    name = line.split()[1]
    text = f"""
recurrence {what}
input q, k : [K]
{line}
input g : log gate
S_t = exp(g_t) S_{{t-1}} + k_t {name}_tᵀ
o_t = S_tᵀ q_t
"""
    op = linalg_dsl.compile(text, backend="torch")
    tensors = draw(op.spec, 1, 5, 1, 3, 2)
    want, _ = reference(op.spec, tensors)
    torch.testing.assert_close(op(*tensors.values()), want)


def test_a_loop_written_by_hand_agrees() -> None:
    """Independent of the reference: the line of the gated delta rule, typed out."""
    spec, _, scope = _module("gated_delta", 8)
    tensors = draw(spec, 1, 19, 1, 4, 3)
    q, k, v, g, beta = (x[0, :, 0] for x in tensors.values())
    state = torch.zeros(4, 3, dtype=torch.float64)
    rows = []
    for t in range(19):
        kept = torch.eye(4, dtype=torch.float64) - beta[t] * torch.outer(k[t], k[t])
        state = g[t].exp() * kept @ state + beta[t] * torch.outer(k[t], v[t])
        rows.append(0.5 * state.T @ q[t])
    o, (last,), _ = scope["forward"](tuple(tensors.values()), (None,), (0.5,), None, True, False)
    torch.testing.assert_close(o[0, :, 0], torch.stack(rows))
    torch.testing.assert_close(last[0, 0], state)


def test_what_forward_and_backward_share_is_written_once() -> None:
    """In a long module; a short one has all of each function in view."""
    _, text, _ = _module("four_erases")
    assert text.count(" = by_token(substitute, ") == 1
    assert text.count(" = interleave(") == 1
    assert text.count(" = chunk_values(") == 2
    _, short, _ = _module("gated_delta")
    assert "chunk_values" not in short
    assert short.count("substitute(") == 2
