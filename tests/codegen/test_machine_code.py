"""What the assembler made of kernels stays inside their tensors, as it does on a GPU only by running them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
WALKED = """
import json, sys
from machine_code import walked
import linalg_dsl as ld
from linalg_dsl.ops.catalogue import catalogue_text
name, schedule, sizes, only, old, new = json.loads(sys.argv[1])
text = ld.compile(catalogue_text(name), backend="triton", schedule=schedule).source(backend="triton")
assert old in text
rows = [[n, out.seen, out.wrong] for n, out in walked(text.replace(old, new), "sm_90", *sizes, only=only)]
print(json.dumps(rows))
"""


def rows_of(
    name: str, schedule: str, sizes: tuple[int, ...], only: str = "", old: str = "", new: str = ""
) -> Any:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", WALKED, json.dumps([name, schedule, sizes, only, old, new])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("schedule", "sizes", "only"),
    [
        ("walk", (256, 64, 2, 100, 64), "bwd_reverse_v"),
        ("walk", (64, 256, 2, 100, 64), "bwd_forward_k"),
        ("two_level", (256, 64, 1, 3000, 2), "fwd_super_states"),
    ],
)
def test_no_address_is_beside_a_tensor(schedule: str, sizes: tuple[int, ...], only: str) -> None:
    """ptxas 12.8 and 13.0 took a factor of another address where steps were multiplied out row by row."""
    rows = rows_of("linear_attention", schedule, sizes, only)
    assert rows
    for name, seen, wrong in rows:
        assert seen > 100, name
        assert not wrong, (name, wrong)


def test_an_address_beside_a_tensor_is_seen() -> None:
    rows = rows_of(
        "linear_attention", "two_level", (128, 64, 1, 300, 2), "fwd_super_states",
        "[None, :] * step_v + ", "[None, :] * (8 * step_v) + ",
    )  # fmt: skip
    assert [wrong[0] for _, _, wrong in rows if wrong and "p_v" in wrong[0]]


def test_a_sum_of_three_has_two_carries() -> None:
    import numpy as np
    from machine_code import Machine
    from machine_rules import RULES

    for terms, low, high in (((0, -0x20, 64), 32, 0), ((2**32 - 1,) * 3, 2**32 - 3, 2), ((1, 2, 3), 6, 0)):
        machine = Machine([], 90, 1, [])
        machine.mask, machine.registers, machine.flags = np.array([True]), {"RZ": np.zeros(1, np.int64)}, {}
        for n, x in enumerate(terms):
            machine.registers[f"R{n}"] = np.array([x & 0xFFFFFFFF])
        RULES["IADD3"](machine, [], ["R8", "P0", "P1", "R0", "R1", "R2"])
        RULES["IADD3"](machine, ["X"], ["R9", "RZ", "-0x1" if terms[0] == 0 else "RZ", "RZ", "P0", "P1"])
        assert machine.registers["R8"] == low
        assert machine.registers["R9"] == high
