"""Two processes: tensors sharded over batch and heads, DDP and FSDP2 give what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes_are_one(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LINALG_DSL_CACHE": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), environment.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "distributed_work.py", str(rank), tmp_path / "meeting"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [p.communicate(timeout=300)[1] for p in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(said)[-5000:]
