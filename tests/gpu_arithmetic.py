"""Triton's interpreter made to do what a GPU does with NaN and with bfloat16 operands.

The interpreter's max and min hand NaN on where those of a GPU drop it, and its calls of bfloat16 form
products of float32 operands, as numpy has no bfloat16. So what a GPU does with NaN in a call of bfloat16 goes
unseen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton._C.libtriton.ir import INPUT_PRECISION
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

from linalg_dsl import driver


def drop_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """tl.maximum and tl.minimum give the other number where one is NaN, unless asked to hand it on."""
    for name, function in (("maxnumf", np.fmax), ("minnumf", np.fmin)):
        monkeypatch.setattr(
            InterpreterBuilder, f"create_{name}", lambda self, a, b, f=function: self.binary_op(a, b, f)
        )


def take_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of bfloat16 take the operands, and the ways, that they take on a GPU of sm_90."""
    product = InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle(
            _convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
        )

    def dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return product(self, wide(a), wide(b), *more)

    def number(self: Any, value: float) -> Any:
        bits = np.array([value], dtype=np.float32).view(np.uint32) >> 16
        return TensorHandle(bits.astype(np.uint16), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(InterpreterBuilder, "get_bf16", number, raising=False)
    monkeypatch.setattr(driver, "emit", lambda *given, emit=driver.emit: as_on_a_gpu(emit(*given)))


def cut_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 operands in tf32 take ten bits behind the point, the others cut off, as the tensor
    cores of sm_90 do that read them from shared memory; three for one keep twice as many."""
    product = InterpreterBuilder.create_dot

    def cut(x: Any) -> Any:
        return TensorHandle((x.data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32), x.dtype)

    def rest(x: Any) -> Any:
        return TensorHandle(x.data - cut(x).data, x.dtype)

    def dot(self: Any, a: Any, b: Any, added: Any, precision: Any, *more: Any) -> Any:
        if a.dtype.scalar != tl.float32 or precision == INPUT_PRECISION.IEEE:
            return product(self, a, b, added, precision, *more)
        pairs = [(cut(a), cut(b))]
        if precision == INPUT_PRECISION.TF32x3:
            pairs += [(cut(rest(a)), cut(b)), (cut(a), cut(rest(b)))]
        for x, y in pairs:
            added = product(self, x, y, added, precision, *more)
        return added

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def as_on_a_gpu(text: str) -> str:
    """A module of kernels that does not ask whether it is interpreted; bf16x3 is not among what is."""
    text = text.replace("interpreted = triton.knobs.runtime.interpret", "interpreted = False")
    return text.replace('"bf16x3"', '"ieee"')


needs_the_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own arithmetic")
