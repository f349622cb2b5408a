"""The stand-in for a GPU: tests of one are walked on it, and it sees launches that are wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in import device

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(device.compiler() is None, reason="needs a C++ compiler")
WALKED = (
    "test_gpu_decode.py::test_replayed_calls_give_the_bits_of_the_first[gated_oja]",
    "test_gpu_decode.py::test_a_graph_replays_steps_with_other_slots",
    "test_gpu_decode.py::test_launches_of_ours_are_those_of_triton",
    "test_gpu_first_use.py::test_a_prepared_call_is_right[gla-True]",
    "test_gpu_runtime.py::test_a_captured_graph_of_both_directions_follows_its_inputs[own_scan]",
    "test_gpu_runtime.py::test_a_call_never_waits_for_the_device[mdn-False]",
)
"""Of each class one: gates of two axes, low rank, a diagonal gate, a scan, states that need each other."""
FAULTS = """
import torch
from stand_in.driver import BadLaunch
import linalg_dsl as ld
from linalg_dsl.ops import replay
from linalg_dsl.ops.draw import draw

x = draw(ld.ops.gla.spec, 1, 70, 2, 32, 32, dtype=torch.bfloat16, device="cuda")
op = ld.ops.gla.op()
def run(*more):
    with torch.no_grad():
        for _ in range(3):
            op(**x)
run()
(known,) = op._quick._known.values()
launch = known.replay.launches[0]

def refused(label, change):
    kept = launch.arguments.copy(), launch.fill, launch.programs
    change(launch)
    try:
        run()
    except BadLaunch as error:
        print(label, "refused:", error)
    else:
        print(label, "NOT SEEN")
    launch.arguments, launch.fill, launch.programs = kept
    run()

def shifted(launch):
    (place, which, beyond), *rest = launch.fill
    launch.fill = ((place, which, beyond + 2), *rest)

def other(launch):
    whole = [i for i, v in enumerate(launch.arguments) if type(v) is int and v > 16]
    launch.arguments[whole[0]] = "T"

refused("one argument less", lambda launch: launch.arguments.pop())
refused("two bytes further", shifted)
refused("another grid", lambda launch: setattr(launch, "programs", launch.programs + 1))
refused("a word for a number", other)
torch.cuda.set_sync_debug_mode("error")
try:
    x["q"].sum().item()
except RuntimeError as error:
    print("waiting refused:", error)
"""
KIT = """
import torch
import linalg_dsl as ld
from linalg_dsl.testing import Subject, run_properties
from linalg_dsl.ops.compile_ahead import Ahead

op = ld.compile(ld.ops.simple_gla.spec, backend="triton")
subject = Subject.of_op(op, device="cuda")
assert subject.dtypes == (torch.float32, torch.bfloat16)
over = run_properties(subject, budget_s=0.0)
print("over", over.ok, len(over.not_examined), sum(o.cases for o in over.outcomes))
given = []
def wait(self, count, seconds):
    given.append((self, count))
    return asked(self, count, seconds)
asked, Ahead.wait = Ahead.wait, wait
report = run_properties(subject, budget_s=1e6)
(ahead, first), (_, second) = given
print("prepared", first, second, ahead.done == set(range(second)))
print("later", sum(int(o.kernels) for o in report.outcomes), report.failed, report.not_examined)
print("cases", sum(o.cases for o in report.outcomes))
"""
"""With all the time that there is, so that what the clock says decides nothing."""


def stand_in_environment() -> dict[str, str]:
    """Of a process on the stand-in; kernels of the cache directories are those of this process's tests."""
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET" and not n.startswith("PYTEST_")}
    path = [str(ROOT / "tests/stand_in/site"), str(ROOT / "tests"), env.get("PYTHONPATH", "")]
    return {**env, "LINALG_DSL_GPU_DRY": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}


def test_tests_of_a_gpu_are_walked() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    tests = [f"tests/gpu/{name}" for name in WALKED]
    found = subprocess.run(
        [*command, *tests], env=stand_in_environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert f"{len(WALKED)} passed" in found.stdout


def test_wrong_launches_are_refused() -> None:
    found = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=stand_in_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert "NOT SEEN" not in found.stdout
    assert found.stdout.count("refused:") == 5, found.stdout


def test_the_kit_compiles_few_kernels_on_a_gpu_and_most_of_them_in_advance(tmp_path: Path) -> None:
    env = {**stand_in_environment(), "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", KIT], env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    told = dict(line.split(" ", 1) for line in found.stdout.splitlines() if line[0] != " ")
    assert told["over"] == "True 21 0", found.stdout
    first, second, done = told["prepared"].split(" ")
    assert 30 <= int(first) <= int(second) <= 70, found.stdout
    assert done == "True", found.stdout
    later, rest = told["later"].split(" ", 1)
    assert int(later) <= 25, found.stdout
    assert rest == "() ()", found.stdout
    assert int(told["cases"]) > 150, found.stdout
