"""An exported file needs torch only and gives the same bits as the op."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from module_files import module_of_file
from runtime_cases import OWN
from torch import Tensor

import linalg_dsl
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.op import CompiledOp

DELTA = """
recurrence delta
input q, k : [K] unit
input v : [V]
input beta : scalar in (0, 2)
const double = 2
const scale = double / sqrt(K)
S_t = (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ
o_t = scale S_tᵀ q_t
"""
CLASHES = """
recurrence forward
input math, tensors, lambda : [K]
input v : [V]
param state : [K]
S_t = S_{t-1} + math_t v_tᵀ
o_t = S_tᵀ (tensors_t ⊙ state + lambda_t)
"""


def _exported(op: CompiledOp, path: Path) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "exported"}
    text = op.export(path, backend="torch").read_text(encoding="utf-8")
    exec(compile(text, str(path), "exec"), scope)
    return scope


def _tensors(op: CompiledOp, tokens: int = 70) -> tuple[list[Tensor], Tensor]:
    tensors = [x.requires_grad_() for x in draw(op.spec, 2, tokens, 2, 4, 3, dtype=torch.float32).values()]
    (state,) = draw_state(op.spec, 2, 2, 4, 3, dtype=torch.float32)
    return tensors, state.requires_grad_()


def _results(call: Any, tensors: list[Tensor], state: Tensor, **options: Any) -> list[Tensor]:
    o, last = call(*tensors, initial_state=state, output_final_state=True, **options)
    return [o, last, *torch.autograd.grad(o.sin().sum() + last.sum(), [*tensors, state])]


@pytest.mark.parametrize(("text", "function"), [(DELTA, "delta"), (CLASHES, "forward_2")])
def test_the_same_bits(text: str, function: str, tmp_path: Path) -> None:
    op = linalg_dsl.compile(text)
    call = _exported(op, tmp_path / "mine.py")[function]
    tensors, state = _tensors(op)
    for got, want in zip(_results(call, tensors, state), _results(op, tensors, state), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(call(*tensors), op(*tensors))


def test_run_time_consts_are_keywords(tmp_path: Path) -> None:
    op = linalg_dsl.compile(DELTA)
    call = _exported(op, tmp_path / "mine.py")["delta"]
    tensors, state = _tensors(op)
    for got, want in zip(
        _results(call, tensors, state, scale=0.3), _results(op, tensors, state, scale=0.3), strict=True
    ):
        assert torch.equal(got, want)


def test_packed_sequences(tmp_path: Path) -> None:
    op = linalg_dsl.compile(DELTA)
    call = _exported(op, tmp_path / "mine.py")["delta"]
    tensors, _ = _tensors(op)
    one, offsets = [x[:1] for x in tensors], torch.tensor([0, 0, 30, 70])
    assert torch.equal(call(*one, cu_seqlens=offsets), op(*one, cu_seqlens=offsets))


def test_gradient_of_the_final_state_only(tmp_path: Path) -> None:
    op = linalg_dsl.compile(DELTA)
    call = _exported(op, tmp_path / "mine.py")["delta"]
    tensors, state = _tensors(op)
    for f in (call, op):
        _, last = f(*tensors, initial_state=state, output_final_state=True)
        (grad,) = torch.autograd.grad(last.sum(), state)
        assert grad.abs().sum() > 0


def test_the_file_imports_torch_and_the_standard_library_only(tmp_path: Path) -> None:
    path = linalg_dsl.compile(DELTA).export(tmp_path / "mine.py", backend="torch")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported == {"torch", "math"}
    code = (
        "import sys; sys.modules['linalg_dsl'] = None; import mine, torch;"
        "print(mine.delta(*[torch.ones(1, 5, 1, 4)] * 3, torch.ones(1, 5, 1)).shape)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.strip() == "torch.Size([1, 5, 1, 4])", run.stderr


@pytest.mark.parametrize("name", ["delta", "looking_back", "mlstm", "lstm", "delta_product"])
def test_steps_give_the_same_bits(name: str, tmp_path: Path) -> None:
    op = linalg_dsl.compile({"delta": DELTA, **OWN}.get(name) or catalogue_text(name))
    path = op.export(tmp_path / "mine.py", backend="torch", step=True)
    scope: dict[str, Any] = {"__name__": "exported"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), scope)
    step = scope[f"{op.spec.name}_step"]
    tensors = list(draw(op.spec, 3, 2, 2, 4, 3, dtype=torch.float32).values())
    (found, first), (wanted, second) = step(*tensors), op.step(*tensors)
    pools = [
        [x.repeat(3, *[1] * (x.dim() - 1)) for x in ([s] if isinstance(s, Tensor) else s)]
        for s in (first, second)
    ]
    states: Any = [p[0] if len(p) == 1 else op.state_type(*p) for p in pools]
    options = {"slots": torch.tensor([7, -1, 2]), "accepted": torch.tensor([1, 2, 2])}
    both = [f(*tensors, state=s, **options) for f, s in zip((step, op.step), states, strict=True)]
    ahead = [f(*tensors, state=s, accepted=0) for f, s in zip((step, op.step), (first, second), strict=True)]
    assert torch.equal(found, wanted)
    assert torch.equal(both[0][0], both[1][0])
    assert torch.equal(ahead[0][0], ahead[1][0])
    for x, y in zip(*pools, strict=True):
        assert torch.equal(x, y)
    o = scope[op.spec.name](*tensors)
    assert torch.equal(o, op(*tensors))


def test_a_step_of_kernels(tmp_path: Path) -> None:
    op = linalg_dsl.compile(DELTA, backend="triton")
    path = op.export(tmp_path / "mine.py", step=True)
    module = module_of_file(path, "exported_kernels")
    tensors = list(draw(op.spec, 2, 1, 2, 4, 3, dtype=torch.float32).values())
    (found, first), (wanted, second) = module.delta_step(*tensors), op.step(*tensors)
    assert torch.equal(found, wanted)
    assert torch.equal(first, second)


def test_there_is_no_step_of_a_reversed_op(tmp_path: Path) -> None:
    op = linalg_dsl.compile(DELTA, reverse=True)
    with pytest.raises(linalg_dsl.ArgumentError, match="step runs from earlier to later tokens"):
        op.export(tmp_path / "mine.py", backend="torch", step=True)
