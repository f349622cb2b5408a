"""Kernels touch nothing behind a tensor: memory ends there, and the process would with it (989, 807, 1135).

NaN around tensors shows what is used (``linalg_dsl.testing``, property ``poisoned_memory``); a load whose
numbers nobody uses faults on a GPU all the same. Here every tensor handed in ends where a page ends that is
followed by one which may not be touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runtime_cases import call, inputs_of, op_of, random_like
from torch import Tensor

HERE = Path(__file__).parent
CASES = {
    "simple_gla": ((16, 16, 16), (19, 12, 5)),
    "gla": ((16, 16, 16),),
    "value_erase": ((16, 16, 16),),
    "own_scan": ((16, 16, 16), (19, 1, 5)),
}
"""(T, K, V): blocks that tensors fill to the last element, and ragged ones."""
_ROOMS: list[mmap.mmap] = []


def at_the_end(x: Tensor) -> Tensor:
    """The same numbers, behind which memory ends."""
    size = x.numel() * x.element_size()
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, whole + mmap.PAGESIZE)
    _ROOMS.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(start + whole, mmap.PAGESIZE, 0) == 0, os.strerror(ctypes.get_errno())
    y = torch.frombuffer(room, dtype=x.dtype, count=x.numel(), offset=whole - size).view(x.shape)
    return y.copy_(x)


def main(what: str) -> None:
    for name in CASES:
        print(name, flush=True)
        run(name)
    if what == "beyond":  # what a load of the element behind the last does
        x = at_the_end(torch.zeros(5))
        print(ctypes.c_float.from_address(x.data_ptr() + 20).value, flush=True)


def run(name: str) -> None:
    op = op_of(name, backend="triton", chunk_size=16)
    for T, K, V in CASES[name]:
        tensors, states = inputs_of(op, 1, T, 1, K, V)
        leaves = [at_the_end(x).requires_grad_() for x in (*tensors, *states)]
        results = call(op, leaves[: len(tensors)], leaves[len(tensors) :])
        weights = [at_the_end(w) for w in random_like(results)]
        grads = torch.autograd.grad(results, leaves, weights, allow_unused=True)
        assert all(x is None or x.isfinite().all() for x in (*results, *grads))
        token = [at_the_end(x[:, :1]) if d.timed else at_the_end(x)
                 for x, d in zip(tensors, op.spec.inputs, strict=True)]  # fmt: skip
        kept = [at_the_end(s) for s in states]
        o, _ = op.step(*token, state=kept[0] if len(kept) == 1 else kept)
        assert o.isfinite().all()


def ran(what: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__)), what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect as Linux has it")
def test_nothing_behind_a_tensor_is_touched() -> None:
    """And a load of the element behind the last, once they have all run, ends the process."""
    done = ran("beyond")
    assert done.stdout.split() == list(CASES), done.stderr[-3000:]
    assert done.returncode == -signal.SIGSEGV


if __name__ == "__main__":
    main(sys.argv[1])
