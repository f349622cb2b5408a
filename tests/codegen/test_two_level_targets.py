"""The kernels of two levels compile without a GPU, and fit its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from linalg_dsl.codegen.targets import TARGETS

pytest.importorskip("triton")
COMPILED = """
import json
from kernel_cases import SIDES
import linalg_dsl as ld
from linalg_dsl.codegen.targets import TARGETS, _compile, launches
text = ld.compile(SIDES["separable_delta"], schedule="two_level").source(backend="triton")
rows = []
for place in TARGETS.values():
    found = launches(text, place, key=128, value=128, dtype="bfloat16", batch=1, length=32768, heads=16)
    by_name = {x.kernel.__name__.removeprefix("separable_delta_"): x for x in reversed(found)}
    made = [_compile(by_name[n], place) for n in ("fwd_super_matrix", "super_scan")]
    rows += [[r.target, r.kernel, r.shared, r.limit, r.spilled] for r in made]
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_the_matrix_and_the_scan_fit_every_target() -> None:
    """Of decays along both axes and an erase, which have most in the scan; the rest are walks cut short."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row[0] for row in rows} == set(TARGETS)
    assert len(rows) == 2 * len(TARGETS)
    for target, kernel, shared, limit, spilled in rows:
        assert shared <= limit, (target, kernel)
        assert not spilled, (target, kernel)
