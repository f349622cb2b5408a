"""The known-answer run passes right modules, stops wrong ones, and runs where it should."""

from __future__ import annotations

import time
from pathlib import Path
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
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.selfcheck import (
    ENVIRONMENT_VARIABLE,
    Launch,
    SelfCheck,
    enabled,
    known_answer,
    lanes_class,
    pinned,
)


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
        "return (d_s,), (d_q, d_k, d_v, d_g, d_beta)",
        f"d_{name} = 1.2 * d_{name}\n    return (d_s,), (d_q, d_k, d_v, d_g, d_beta)",
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
            _module(op, ("return o, (s_next,)", "return o * float('nan'), (s_next,)")),
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
    wrong = _module(op, ("return o, (s_next,)", "return 1.2 * o, (s_next,)"))
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
    wrong = _module(op, ("return o, (s_next,)", "return 2 * o, (s_next,)"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="o is off by 1"):
            check(wrong, _like(op, torch.float32))
    check(_module(op), _like(op, torch.float32))


def test_an_op_runs_it_before_its_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from a call: the Triton module is stood in for by a wrong one."""
    good = compiled("gated_delta")
    text = good.module_text("torch")
    wrong = text.replace("return o, (s_next,)", "return 1.5 * o, (s_next,)").replace(
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


def test_it_runs_what_the_call_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block sizes follow the number of sequences and heads, what is kept the length: both as in the call."""
    op = linalg_dsl.compile(catalogue_text("gla"), backend="triton")
    module = op.operator("triton").module
    asked: list[Launch] = []
    monkeypatch.setattr(selfcheck, "enabled", lambda device: True)
    monkeypatch.setattr(selfcheck, "known_answer", lambda *args: asked.append(args[-1]))
    monkeypatch.setattr(selfcheck, "recorded", lambda name: False)
    monkeypatch.setattr(selfcheck, "record", lambda name, text: None)
    monkeypatch.setattr(module, "device_limits", lambda device: (132, 232448, False))
    check = SelfCheck(op.spec, (), lambda: module)
    shapes = [(1, 20, 1), (1, 33, 1), (200, 20, 1), (100, 70, 4), (1, 100_000, 16)]
    for B, T, H in shapes:
        like = tuple(
            torch.zeros(1).expand(B, T, 1 if i == 0 else H, *(128 for _ in d.dims))
            for i, d in enumerate(op.spec.inputs)
        )
        check(module, like)
        check(module, like)
    assert len(asked) == 4  # the second is as the first
    assert [x.ratios[0] for x in asked] == [1, 1, 4, 16]
    assert [x.every_state for x in asked] == [True, True, True, False]
    for launch, (B, _, H) in zip(asked, [shapes[0], *shapes[2:]], strict=True):
        copy = pinned(module, launch)
        assert copy is not module
        assert copy.keep_every_state(1, 1, 1, 1) == launch.every_state
        for loads in (("to", "tb"), ("tb", "ts")):
            for states in (1, 2):
                small = copy.choose_walk(loads, 128, 128, 32, 2, 232448, 2, 132, states)
                assert small == module.choose_walk(loads, 128, 128, 32, 2, 232448, B * H, 132, states)


@pytest.mark.parametrize("units", [1, 7, 108, 132])
def test_lanes_of_one_class_have_the_same_blocks(units: int) -> None:
    from linalg_dsl.codegen.schedule.step_table import choose_decode, choose_step
    from linalg_dsl.codegen.schedule.table import choose_walk

    for lanes in range(1, 5 * units + 9, 1 if units < 50 else 3):
        stand_in = lanes_class(lanes, units)
        assert stand_in <= lanes
        for own in (16, 128, 512):
            walk = [choose_walk(("to", "ts"), own, own, 32, 2, 232448, n, units) for n in (lanes, stand_in)]
            step = [choose_step(own, own, 0, True, n, units) for n in (lanes, stand_in)]
            few = [choose_decode(own, own, own, 0, False, n, units) for n in (lanes, stand_in)]
            coupled = [
                choose_walk(("to", "ts"), own, own, 32, 4, 101376, n, units, 2) for n in (lanes, stand_in)
            ]
            assert few[0] == few[1]
            assert coupled[0] == coupled[1]
            assert walk[0] == walk[1]
            assert step[0] == step[1]


def test_kernels_as_the_call_would_run_them_pass() -> None:
    """Interpreted: heads that share, and states kept at some boundaries only."""
    op = linalg_dsl.compile(catalogue_text("gla"), backend="triton", chunk_size=16, schedule="auto")
    like = tuple(leaves(op, 1, 3, 2, 5, 3, dtype=torch.float32)[0])
    modules = op.operator("triton").module, op.operator("torch").module
    for launch in (Launch((2, 1, 1, 1), 100, False), Launch((2, 1, 1, 1), 100, two_level=True)):
        known_answer(op.spec, *modules, like, {}, (), launch)
        assert getattr(pinned(modules[0], launch).Call(like, (), None), "super_chunk", 0) == launch.two_level


def test_a_pass_is_noted_for_other_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    op = compiled("gated_delta")
    module = op.operator("torch").module
    monkeypatch.setenv("LINALG_DSL_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    runs: list[int] = []
    monkeypatch.setattr(selfcheck, "enabled", lambda device: True)
    monkeypatch.setattr(selfcheck, "known_answer", lambda *args: runs.append(1))

    def new_process() -> None:
        SelfCheck(op.spec, (), lambda: module)(module, _like(op, torch.float32))

    new_process()
    new_process()
    assert len(runs) == 1
    (note,) = tmp_path.glob("*.checked")
    assert "passed on cpu" in note.read_text()
    assert note.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "always")
    new_process()
    assert len(runs) == 2
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1")
    for other in ("device_name", "toolchain"):
        with monkeypatch.context() as changed:
            changed.setattr(selfcheck, other, lambda *args: "another")
            new_process()
    assert len(runs) == 4
    note.chmod(0o666)
    new_process()
    assert len(runs) == 5


def test_it_takes_less_than_a_second() -> None:
    """What it does besides running the kernels; they are stood in for by the torch module."""
    op = linalg_dsl.compile(catalogue_text("gated_delta_rule"), backend="torch")
    module = op.operator("torch").module
    like = tuple(x.detach() for x in leaves(op, 1, 3, 2, 128, 128, dtype=torch.bfloat16)[0])
    known_answer(op.spec, module, module, like, {})
    begin = time.process_time()  # of the processor: other work on the machine does not count
    known_answer(op.spec, module, module, like, {})
    assert time.process_time() - begin < 1


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
