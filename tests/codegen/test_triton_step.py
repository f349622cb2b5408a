"""Step kernels in Triton's interpreter against the float64 step loop, and compiled for the targets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import step_cases
import torch
from step_cases import TEXTS, StepCase

from linalg_dsl.language.parser import parse
from linalg_dsl.planner.step_form import step_form
from linalg_dsl.testing.memory import guarded_memory

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off: tests/gpu has these kernels"
)
LIMIT = 3e-5


def worst(errors: dict[str, float]) -> dict[str, float]:
    return {n: e for n, e in errors.items() if not e < LIMIT}


@pytest.mark.parametrize("name", TEXTS)
def test_every_result_agrees_with_the_step_loop(name: str) -> None:
    found = step_cases.case(name)
    module = found.module("triton", 4)
    assert not worst(step_cases.errors(found, module, 1, 6, 2, 3, 5, dtype=torch.float32))


@pytest.mark.parametrize("name", TEXTS)
def test_packed_sequences_with_empty_ones_and_shared_heads(name: str) -> None:
    found = step_cases.case(name)
    shared = {d.name: 1 for d in found.spec.inputs[1::2]}
    packed = [0, 0, 1, 1, 6]
    errors = step_cases.errors(
        found, found.module("triton"), 1, 6, 2, 3, 4, dtype=torch.float32, offsets=packed, heads=shared
    )
    assert not worst(errors)


@pytest.mark.parametrize("name", ["two_sided", "mamba1", "mlstm", "rows", "oja_with_skip", "dense"])
def test_several_blocks_of_the_split_axis(name: str) -> None:
    found = step_cases.case(name)
    errors = step_cases.errors(found, found.module("triton", 2), 1, 3, 1, 37, 41, dtype=torch.float32)
    assert not worst(errors)


@pytest.mark.parametrize("name", ["two_sided", "mamba1", "mlstm", "slots"])
@pytest.mark.parametrize("T", [0, 1])
def test_no_token_and_one_token_without_an_initial_state(name: str, T: int) -> None:
    found = step_cases.case(name)
    errors = step_cases.errors(
        found, found.module("triton"), 2, T, 2, 3, 4, dtype=torch.float32, initial=False
    )
    assert not worst(errors)


ONE_NUMBER_A_TOKEN = """
recurrence one_number
input q : [K]
input v : [V]
input x : scalar
input f : gate [n] in [0, 1]
const n = 2
state S : [K, n]
S_t = f_{t,1} S_{t-1}
o_t = x_t + sum(v_t)
"""


def test_nothing_is_stored_for_tokens_beyond_the_end() -> None:
    """Of a number that every block has, the first one stores what is live and no more."""
    found = StepCase(step_form(parse(ONE_NUMBER_A_TOKEN)))
    with guarded_memory() as guard:
        errors = step_cases.errors(found, found.module("triton", 2), 1, 3, 2, 3, 4, dtype=torch.float32)
        written = guard.written()
    assert not worst(errors)
    assert written is None, f"beside a tensor of shape {list(written.shape)}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["undecayed_erase", "longhorn", "rg_lru"])
def test_short_types_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    found = step_cases.case(name)
    errors = step_cases.errors(found, found.module("triton"), 1, 7, 2, 4, 8, dtype=dtype)
    assert max(errors.values()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["undecayed_erase", "rows", "mdn"])
def test_resets(name: str) -> None:
    found = step_cases.case(name)
    errors = step_cases.errors(
        found, found.module("triton"), 1, 9, 1, 3, 4, dtype=torch.float32, gates="resets"
    )
    assert not worst(errors)


def test_chunks_of_any_size_give_the_same_bits() -> None:
    """What is saved and replayed is the state itself."""
    found = step_cases.case("undecayed_erase")
    from linalg_dsl.ops.draw import draw

    tensors = tuple(draw(found.spec, 1, 7, 1, 3, 4, dtype=torch.float32).values())
    d_o = torch.randn(1, 7, 1, 4)
    given = (tensors, (None,), (), None)
    results = []
    for chunk in (1, 4, 8):
        module = found.module("triton", chunk)
        _, _, marks = module.forward(*given, False, True)
        results.append(module.backward(*given, marks, d_o, None)[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


COMPILE = """
import sys
sys.path[:0] = [{tests!r}]
import step_cases
from linalg_dsl.codegen.emit.triton_step import emit_triton_step
from linalg_dsl.codegen.targets import report
from linalg_dsl.planner.step_plan import step_backward
for name, target, size in {wanted!r}:
    form = step_cases.case(name).form
    text = emit_triton_step(form, form.plan, step_backward(form.plan))
    for r in report(text, target, key=size, value=size):
        assert r.fits and r.registers > 16, r
        print(r.kernel, r.target)
"""


def test_kernels_compile_for_every_target() -> None:
    """A vector state everywhere, a matrix state and products of matrices on two cards."""
    every = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
    wanted = [("hgrn", t, 128) for t in every] + [("mamba1", "sm_90", 64), ("dense", "gfx942", 64)]
    script = COMPILE.format(tests=str(Path(step_cases.__file__).parent), wanted=wanted)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 2 * len(wanted)
