"""A state that is read in several ways is one walk with several outputs, in every class and on every path."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from replays import count_replays
from torch import Tensor

import linalg_dsl
from linalg_dsl.codegen.cache import load_module
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.check import CheckReport
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.split import split

HEAD = "recurrence reads\ninput q, p, k : [K]\ninput v : [V]\n"
SIDE = "N_t = 0.9 N_{t-1} + p_t (S_{t-1}ᵀ p_t)ᵀ\n"
TEXTS = {
    "hla": catalogue_text("hla"),
    "times": f"{HEAD}input w : log gate [K]\nS_t = diag(exp(w_t)) S_{{t-1}} + k_t v_tᵀ\n"
    "o_t = silu(S_tᵀ q_t) ⊙ (S_{t-1}ᵀ p_t)\n",
    "output_too": f"{HEAD}input b : scalar in (0, 1)\n"
    f"S_t = (I - 0.1 b_t k_t k_tᵀ) S_{{t-1}} + b_t k_t v_tᵀ\n{SIDE}o_t = S_tᵀ q_t + tanh(N_tᵀ q_t) + v_t\n",
    "scan": f"{HEAD}input a : log gate [K, V]\nS_t = exp(a_t) ⊙ S_{{t-1}} + k_t v_tᵀ\n{SIDE}"
    "o_t = N_tᵀ q_t + S_tᵀ q_t\n",
    "sequential": f"{HEAD}input M : [K, K]\nS_t = 0.1 M_t S_{{t-1}} + k_t v_tᵀ\n"
    f"{SIDE}o_t = N_tᵀ q_t + S_tᵀ q_t\n",
    "partial sums": f"{HEAD}input M : [V, V]\nS_t = 0.1 S_{{t-1}} M_t + k_t v_tᵀ\n"
    f"{SIDE}o_t = N_tᵀ q_t + S_tᵀ q_t\n",
    "substeps": "recurrence reads\ninput q, p : [K]\ninput k : [4, K] unit\ninput v : [4, V]\n"
    "input b : [4] in (0, 1)\ninput g : log gate\nS_t = exp(g_t) S_{t-1}\nfor j in 1..4:\n"
    "    S_t = S_t - b_{t,j} k_{t,j} (k_{t,j}ᵀ S_t - v_{t,j}ᵀ)\n"
    "N_t = 0.9 N_{t-1} + p_t (S_tᵀ p_t)ᵀ\no_t = N_tᵀ q_t + S_tᵀ q_t\n",
    "square": "recurrence reads\ninput q, p, k : [K]\ninput g : log gate\nS_t = exp(g_t) S_{t-1} + k_t k_tᵀ\n"
    "N_t = 0.9 N_{t-1} + p_t (S_tᵀ p_t)ᵀ\no_t = N_tᵀ q_t + S_tᵀ q_t\n",
    "three": "recurrence reads\ninput q, p, r, k : [K]\ninput v : [V]\ninput w : log gate [V]\n"
    "state S : [V, K]\nS_t = diag(exp(w_t)) S_{t-1} (I - 0.5 k_t k_tᵀ) + v_t k_tᵀ\n"
    "N_t = 0.9 N_{t-1} + p_t (S_{t-1} p_t)ᵀ + r_t (S_t r_t)ᵀ\no_t = N_tᵀ q_t + sigmoid(S_t q_t) ⊙ v_t\n",
}
MOST = {"three": 3}


@pytest.mark.parametrize("name", TEXTS)
def test_the_stage_of_a_state_is_there_once(name: str) -> None:
    stages = split(parse(TEXTS[name])).stages
    states = [state for stage in stages for state in stage.states]
    assert len(states) == len(set(states))
    assert max(len(stage.results) for stage in stages) == MOST.get(name, 2)


@pytest.mark.parametrize(
    ("update", "output"),
    [
        ("S_t = S_{t-1} + k_t v_tᵀ", "S_tᵀ S_t tanh(S_tᵀ q_t)"),  # each read waits for the one before
        ("S_t = S_{t-1} + k_t v_tᵀ", "S_tᵀ tanh(q_t ⊙ (S_t v_t))"),  # of another shape
    ],
)
def test_reads_that_wait_for_each_other_are_runs_of_their_own(update: str, output: str) -> None:
    stages = split(parse(f"{HEAD}{update}\no_t = {output}\n"))
    assert [len(s.results) for s in stages.stages] == [1] * len(stages.stages)
    assert len(stages.stages) > 1
    assert linalg_dsl.compile(stages.spec, backend="torch").check(B=1, T=21, H=2, K=4, V=3).ok


@pytest.mark.parametrize("packed", [None, [0, 0, 7, 8, 70]])
@pytest.mark.parametrize("name", TEXTS)
def test_results_and_gradients_are_those_of_the_step_loop(name: str, packed: list[int] | None) -> None:
    op = linalg_dsl.compile(TEXTS[name], backend="torch", chunk_size=16)
    _holds(op.check(T=70, K=5, V=4, heads={"q": 1}, dtype=torch.float64, device="cpu", cu_seqlens=packed))


@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"substeps", "three"}))
def test_kernels_agree_with_the_step_loop(name: str) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on the GPU: tests/gpu")
    op = linalg_dsl.compile(TEXTS[name], backend="triton")
    packed = [0, 0, 5, 19, 19] if name in ("hla", "partial sums") else None
    _holds(op.check(B=1, T=19, H=2, K=9, V=7, dtype=torch.float32, device="cpu", cu_seqlens=packed))


@pytest.mark.parametrize("name", ["hla", "sequential"])
def test_calls_without_gradients_are_replayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on the GPU: tests/gpu")
    calls = count_replays(monkeypatch)
    op = linalg_dsl.compile(TEXTS[name], backend="triton")
    for seed in range(3):
        tensors = draw(op.spec, 1, 5, 2, 3, 4, dtype=torch.float32, seed=seed)
        wanted, _ = op.reference(**tensors, dtype=torch.float64, output_final_state=True)
        found, _ = op(**tensors, output_final_state=True)
        assert torch.allclose(found.double(), wanted, atol=1e-4)
    assert len(calls) == len(op.plan.stages)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_exported_file_gives_the_same_bits(backend: str, tmp_path: Path) -> None:
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on the GPU: tests/gpu")
    op = linalg_dsl.compile(TEXTS["output_too"], backend=backend)
    code = op.export(tmp_path / "reads.py", backend=backend).read_text(encoding="utf-8")
    module = load_module(f"exported_several_reads_{backend}", code)
    tensors = list(draw(op.spec, 1, 20, 2, 6, 5, dtype=torch.float32).values())
    states = draw_state(op.spec, 1, 2, 6, 5, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (*tensors, *states)]
    results = [_everything(call, tensors, states, leaves) for call in (op, getattr(module, op.spec.name))]
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_torch_compile_sees_one_operator_for_both_reads() -> None:
    op = linalg_dsl.compile(TEXTS["hla"], backend="torch")
    tensors = [x.requires_grad_() for x in draw(op.spec, 1, 9, 2, 4, 3, dtype=torch.float32).values()]
    whole = torch.compile(op, fullgraph=True, backend="aot_eager")
    results = []
    for call in (op, whole):
        o = call(*tensors)
        results.append([o, *torch.autograd.grad(o.sin().sum(), tensors)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def _everything(
    call: Callable[..., Any], tensors: list[Tensor], states: Sequence[Tensor], leaves: list[Tensor]
) -> list[Tensor]:
    o, last = call(*tensors, initial_state=states, output_final_state=True)
    loss = sum((x.sin().sum() for x in (o, *last)), torch.zeros(()))
    return [o, *last, *torch.autograd.grad(loss, leaves)]


def _holds(report: CheckReport) -> None:
    assert report.ok, str(report)


def test_names_of_a_call_are_those_of_the_only_state() -> None:
    op: CompiledOp = linalg_dsl.compile(TEXTS["times"], backend="torch")
    _, state = op(**draw(op.spec, 1, 4, 1, 3, 2, dtype=torch.float32), output_final_state=True)
    assert isinstance(state, Tensor)
    assert state.shape == (1, 1, 3, 2)
