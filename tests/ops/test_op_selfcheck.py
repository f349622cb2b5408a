"""The known-answer run passes right modules, stops wrong ones, and runs where it should."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from op_cases import TEXTS, compiled, leaves
from torch import Tensor

import linalg_dsl
from linalg_dsl import driver
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.ops import selfcheck
from linalg_dsl.ops.artefacts import Passes
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.selfcheck import ENVIRONMENT_VARIABLE, SelfCheck, enabled, known_answer


def _module(op: CompiledOp, wrong: tuple[str, str] | None = None) -> ModuleType:
    text = op.module_text("torch")
    if wrong is not None:
        assert wrong[0] in text
        text = text.replace(*wrong)
    module = ModuleType("sample")
    exec(compile(text, "sample", "exec"), module.__dict__)
    return module


def _like(op: CompiledOp, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(leaves(op, 1, 3, 2, 5, 3, dtype=dtype)[0])


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_modules_pass(name: str, dtype: torch.dtype) -> None:
    op = compiled(name)
    known_answer(op.spec, _module(op), _module(op), _like(op, dtype), {})


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_gradient_is_an_error_that_names_it(name: str, dtype: torch.dtype) -> None:
    op = compiled("gated_delta")
    wrong = (
        "return d_s, (d_q, d_k, d_v, d_g, d_beta)",
        f"d_{name} = 1.2 * d_{name}\n    return d_s, (d_q, d_k, d_v, d_g, d_beta)",
    )
    with pytest.raises(
        RuntimeError,
        match=rf"gated_delta: the known-answer test failed on cpu .*torch.*: d {name} is off by (2|1.9)",
    ):
        known_answer(op.spec, _module(op, wrong), _module(op), _like(op, dtype), {})


def test_nan_is_an_error() -> None:
    op = compiled("gated_delta")
    with pytest.raises(RuntimeError, match="o is off by nan"):
        known_answer(
            op.spec,
            _module(op, ("return o, s_next", "return o * float('nan'), s_next")),
            _module(op),
            _like(op, torch.float32),
            {},
        )


LOG_OF_A_STAGE = """
recurrence log_of_a_stage
input q, k, A : [K]
input v : [V]
S_t = S_{t-1} + (k_t ⊙ log(A_t)) v_tᵀ
o_t = S_tᵀ q_t
"""


def test_what_a_stage_is_handed_is_drawn_where_it_has_an_answer() -> None:
    """The logarithm of a normal number is none; of what another stage makes it may be."""
    op = linalg_dsl.compile(LOG_OF_A_STAGE, backend="torch")
    like = tuple(leaves(op, 1, 3, 2, 5, 3, dtype=torch.float32)[0])
    known_answer(op.spec, _module(op), _module(op), like, {}, ("A",))
    with pytest.raises(RuntimeError, match="is off by nan"):
        known_answer(op.spec, _module(op), _module(op), like, {})
    wrong = _module(op, ("return o, s_next", "return 1.2 * o, s_next"))
    with pytest.raises(RuntimeError, match=r"o is off by (2|1.9)"):
        known_answer(op.spec, wrong, _module(op), like, {}, ("A",))


def test_it_runs_once_per_device_type_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    op = compiled("gated_delta")
    runs: list[int] = []
    monkeypatch.setattr(selfcheck, "enabled", lambda device: True)
    monkeypatch.setattr(selfcheck, "known_answer", lambda *args: runs.append(1))
    check = SelfCheck(op.spec, (), lambda: _module(op))
    module = _module(op)
    for dtype in (torch.float32, torch.float32, torch.float16):
        check(module, _like(op, dtype))
    assert len(runs) == 2
    check(module, tuple(leaves(op, 2, 9, 4, 5, 3, dtype=torch.float32)[0]))  # other B, T, H: the same kernels
    assert len(runs) == 2
    check(module, tuple(leaves(op, 1, 3, 2, 6, 3, dtype=torch.float32)[0]))
    assert len(runs) == 3


def test_a_failure_is_not_remembered_as_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    op = compiled("gated_delta")
    monkeypatch.setattr(selfcheck, "enabled", lambda device: True)
    check = SelfCheck(op.spec, (), lambda: _module(op))
    wrong = _module(op, ("return o, s_next", "return 2 * o, s_next"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="o is off by 1"):
            check(wrong, _like(op, torch.float32))
    check(_module(op), _like(op, torch.float32))


def test_an_op_runs_it_before_its_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from a call: the Triton module is stood in for by a wrong one."""
    good = compiled("gated_delta")
    text = good.module_text("torch")
    wrong = text.replace("return o, s_next", "return 1.5 * o, s_next").replace(
        'BACKEND = "torch"', 'BACKEND = "triton"'
    )
    stages = Passes(
        lambda spec, options, consts: good.artefacts(),
        lambda made, kind, options: wrong if kind == "triton" else text,
        driver.decode,
    )
    op = CompiledOp(good.spec, CompileOptions(backend="triton"), stages)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tensors, _ = leaves(good, 1, 9, 2, 5, 3, dtype=torch.float32)
    op(*tensors)  # the interpreter is not checked
    monkeypatch.setattr(selfcheck, "enabled", lambda device: True)
    with pytest.raises(RuntimeError, match="known-answer test failed"), torch.inference_mode():
        op(*tensors)


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not enabled(torch.device("cpu"))
    assert enabled(torch.device("cuda"))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "0")
    assert not enabled(torch.device("cuda"))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not enabled(torch.device("cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not enabled(torch.device("cuda"))
