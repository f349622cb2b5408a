"""Before a module's first use: what it will launch is known, compiled together, and does not spill."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from step_cases import SLOTS

import linalg_dsl as ld
from linalg_dsl.codegen.cache import private_copy
from linalg_dsl.ops import first_use
from linalg_dsl.ops.bench import Shape, inputs_of
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.first_use import FAULTY, MOST_SPILLS, alternatives, say_once, settle
from linalg_dsl.ops.launched import Launched, Module, Use

CPU = torch.device("cpu")
BLOCK = 32
"""Of walks in the interpreter, whose operands are float32."""


def module_and_inputs(name: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    op = ld.compile(getattr(ld.ops, name).spec, backend="triton")
    stage = op.stage_ops[-1]
    tensors = inputs_of(stage.spec, Shape(2, 200, 2, 64, 64), torch.bfloat16, CPU)
    # a copy: what is replaced in it stays here
    return private_copy(stage.operator("triton").module), tuple(tensors.values())


@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "mdn", "mamba1"])
def test_launches_are_those_of_a_call_and_its_backward(name: str) -> None:
    module, tensors = module_and_inputs(name)
    ahead, behind = ld.compile(getattr(ld.ops, name).spec, backend="triton").plan.launches()
    place = Module(module, CPU)
    assert len(place.launches(tensors, None, Use(save=False))) == ahead
    found = place.launches(tensors, None, Use(save=True))
    assert len(found) == ahead + behind
    assert all(hasattr(module, launch.kernel) for launch in found)
    with_states = place.launches(tensors, None, Use(initial=True, final=True))
    assert {x.kernel for x in with_states} == {x.kernel for x in found}
    assert with_states != found  # kernels that take and give states are others


def test_launches_of_a_stage_with_several_outputs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is computed step by step
        op = ld.compile(SLOTS, backend="triton")
    stage = next(s for s in op.stage_ops if len(s.spec.outputs) > 1)
    tensors = inputs_of(stage.spec, Shape(2, 100, 2, 16, 16), torch.bfloat16, CPU)
    place = Module(stage.operator("triton").module, CPU)
    ahead, both = (place.launches(tuple(tensors.values()), None, Use(save=s)) for s in (False, True))
    assert 0 < len(ahead) < len(both)


def test_launches_of_packed_sequences() -> None:
    op = ld.compile(ld.ops.gla.spec, backend="triton")
    tensors = inputs_of(op.spec, Shape(1, 200, 2, 64, 64), torch.bfloat16, CPU)
    offsets = torch.tensor([0, 50, 50, 200])
    found = Module(op.operator("triton").module, CPU).launches(tuple(tensors.values()), offsets, Use())
    walk = next(x for x in found if x.kernel.endswith("fwd_walk"))
    assert walk.programs == 3 * 2 * (64 // walk.block)


class Compiler:
    """Says that launches spill as ``rule`` has it."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.asked: list[Launched] = []

    def __call__(self, module: ModuleType, launches: Sequence[Launched]) -> list[int]:
        self.asked += launches
        return [self.rule(x) for x in launches]


def test_nothing_is_replaced_where_nothing_spills() -> None:
    module, tensors = module_and_inputs("gla")
    compiler = Compiler(lambda launch: MOST_SPILLS)
    assert settle(module, tensors, None, [Use(), Use(final=True)], compiler) == ()
    assert module.REPLACED == {}
    assert len(set(compiler.asked)) == len(compiler.asked)  # nothing is compiled twice


def test_sizes_that_spill_give_way_to_the_next_best() -> None:
    module, tensors = module_and_inputs("gla")
    compiler = Compiler(lambda x: 300 if x.kernel == "gla_fwd_walk" and x.warps == 4 else 0)
    assert settle(module, tensors, None, [Use()], compiler) == ()
    launches = {x.kernel: x.sizes for x in Module(module, CPU).launches(tensors, None, Use())}
    assert launches["gla_fwd_walk"] == (BLOCK, 8, 3)
    assert launches["gla_bwd_reverse_v"][1] == 4


def test_a_kernel_without_blocks_is_replaced_by_its_warps() -> None:
    module, tensors = module_and_inputs("normalised_linear_attention")
    name = "normalised_linear_attention_S_bwd_gradients"
    compiler = Compiler(lambda x: 300 if x.kernel == name and x.warps < 8 else 0)
    assert settle(module, tensors, None, [Use()], compiler) == ()
    launches = {x.kernel: x.sizes for x in Module(module, CPU).launches(tensors, None, Use())}
    assert launches[name] == (0, 8, 1)


def test_narrower_blocks_come_after_more_warps() -> None:
    assert list(alternatives(64, 4, 3)) == [(64, 8, 3), (32, 4, 3), (32, 8, 3)]
    assert list(alternatives(16, 8, 3)) == []
    module, tensors = module_and_inputs("gla")
    compiler = Compiler(lambda x: 300 if x.kernel == "gla_fwd_walk" and x.block == BLOCK else 0)
    assert settle(module, tensors, None, [Use()], compiler) == ()
    walk = next(x for x in Module(module, CPU).launches(tensors, None, Use()) if x.kernel == "gla_fwd_walk")
    assert walk.sizes == (BLOCK // 2, 4, 3)
    assert walk.programs == 2 * 2 * 64 // (BLOCK // 2)


def test_where_everything_spills_the_least_is_taken_and_said_once() -> None:
    module, tensors = module_and_inputs("gla")
    counts = {(BLOCK, 4): 300, (BLOCK, 8): 90, (BLOCK // 2, 4): 200, (BLOCK // 2, 8): 95}
    compiler = Compiler(lambda x: counts[x.block, x.warps] if x.kernel == "gla_fwd_walk" else 0)
    found = settle(module, tensors, None, [Use()], compiler)
    assert found == ("gla_fwd_walk with block 32, 8 warps and 3 stages spills 90 registers",)
    launches = {x.kernel: x.sizes for x in Module(module, CPU).launches(tensors, None, Use())}
    assert launches["gla_fwd_walk"] == (BLOCK, 8, 3)
    with pytest.warns(UserWarning, match="spills 90 registers; nothing near it spills less"):
        say_once(found)
    say_once(found)  # a warning is an error in these tests


def test_code_that_is_wrong_gives_way_or_nothing_is_launched() -> None:
    module, tensors = module_and_inputs("gla")
    compiler = Compiler(lambda x: FAULTY if x.kernel == "gla_fwd_walk" and x.block == BLOCK else 300)
    settle(module, tensors, None, [Use()], compiler)
    walk = next(x for x in Module(module, CPU).launches(tensors, None, Use()) if x.kernel == "gla_fwd_walk")
    assert walk.block == BLOCK // 2  # though it spills
    module, tensors = module_and_inputs("delta_rule")
    compiler = Compiler(lambda x: FAULTY if x.kernel == "delta_rule_fwd_walk" else 0)
    with pytest.raises(RuntimeError, match="delta_rule_fwd_walk: this assembler makes wrong code"):
        settle(module, tensors, None, [Use()], compiler)


COMPILE = """
import torch, triton
from dataclasses import replace
from triton.backends.compiler import GPUTarget

class Driver:  # as Triton sees an H200, of which there need be none
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_active_torch_device(self): return torch.device("cpu")

triton.runtime.driver.set_active(Driver())
import linalg_dsl as ld
from linalg_dsl.ops.bench import Shape, inputs_of
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.first_use import compiled_side_by_side
from linalg_dsl.ops.launched import Module, Use

op = ld.compile(ld.ops.linear_attention.spec, backend="triton")
tensors = inputs_of(op.spec, Shape(1, 64, 1, 16, 16), torch.bfloat16, torch.device("cpu"))
module = op.operator("triton").module
(walk,) = Module(module, torch.device("cpu")).launches(tuple(tensors.values()), None, Use(save=False))
broken = replace(walk, constants=tuple((n, 7 if n == "BLOCK" else x) for n, x in walk.constants))
good, bad = compiled_side_by_side(module, [walk, broken])
print(good.metadata.num_warps == walk.warps, "cubin" in good.asm, type(bad).__name__)
(cache, *_), = getattr(module, walk.kernel).device_caches.values()
print(len([k for k in cache.values() if k is good]))
"""


def test_kernels_are_compiled_side_by_side_and_each_failure_is_its_own(tmp_path: Path) -> None:
    places = {"TRITON_CACHE_DIR": str(tmp_path / "t"), "LINALG_DSL_CACHE": str(tmp_path / "l")}
    environment = {**os.environ, **places, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # the second line: the launch to come finds the kernel without compiling it
    assert done.stdout.splitlines() == ["True True CompilationError", "1"]


def test_a_call_is_settled_and_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, tensors = module_and_inputs("gla")
    done: list[str] = []

    class Check:
        spec = ld.ops.gla.spec

        def __call__(self, *given: object) -> None:
            done.append("checked")

        def launch_of(self, *given: object) -> int:
            return 1

        def is_due(self, *given: object) -> bool:
            return False

    def settled(module: object, tensors: object, offsets: object, uses: list[Use], how: object) -> list[str]:
        done.append(f"settled {uses[0].save}")
        return []

    monkeypatch.setenv(first_use.ENVIRONMENT_VARIABLE, "1")
    monkeypatch.setattr(first_use, "compiles", lambda device: True)
    monkeypatch.setattr(first_use, "settle", settled)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    use = first_use.FirstUse(Check())  # type: ignore[arg-type]
    for save in (True, True, False, True):
        use(module, tensors, None, Use(save=save))
    assert done == ["settled True", "checked", "settled False", "checked"]
    monkeypatch.setattr(first_use, "compiles", lambda device: False)
    other = first_use.FirstUse(Check())  # type: ignore[arg-type]
    for _ in range(2):
        other(module, tensors, None, Use())
    assert done[4:] == ["checked", "checked"]  # where nothing can be compiled nothing is taken for settled


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "mdn", "mamba1"])
def test_calls_pass_through_it(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def compiled(module: ModuleType, launches: Sequence[Launched]) -> list[int]:
        found.extend(x.kernel for x in launches)
        return [0] * len(launches)

    monkeypatch.setenv(first_use.ENVIRONMENT_VARIABLE, "1")
    monkeypatch.setattr(first_use, "compiles", lambda device: True)
    monkeypatch.setattr(first_use, "compile_side_by_side", compiled)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    op = ld.compile(f"{catalogue_text(name)}\n# packed: {packed}\n", backend="triton")  # a module of its own
    tensors = inputs_of(op.spec, Shape(1, 20, 1, 8, 8), torch.float32, CPU)
    for x in tensors.values():
        x.requires_grad_()
    offsets = torch.tensor([0, 7, 20]) if packed else None
    o, _ = op(**tensors, cu_seqlens=offsets, output_final_state=True)
    o.sum().backward()
    ahead, behind = op.plan.launches()
    assert len({x for x in found if x.startswith(name)}) == ahead + behind  # besides those that make tables
