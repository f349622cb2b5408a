"""Derivatives and maps of torch that compiled kernels do not take: refused, never lost in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch: Any = getattr(torch._C, "_functorch", None)


def refuse_transforms(name: str, tensors: Iterable[Tensor | None]) -> None:
    """Raises ``RuntimeError`` for tangents of forward-mode derivatives and inside of torch.func transforms.

    ``op.reference(...)`` takes all of them.
    """
    if forward_ad._current_level >= 0:
        unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
        if any(x is not None and unpack(x).tangent is not None for x in tensors):
            raise RuntimeError(f"{name}: forward-mode derivatives are not supported; use op.reference(...)")
    level = None if _functorch is None else _functorch.peek_interpreter_stack()
    if level is None:
        return
    match level.key():
        case _functorch.TransformType.Vmap:
            raise RuntimeError(
                f"{name}: torch.vmap over a compiled recurrence is not supported; put the mapped axis into "
                "the batch or the heads, or use op.reference(...)"
            )
        case _functorch.TransformType.Grad:
            raise RuntimeError(
                f"{name}: torch.func.grad, vjp and jacrev are not supported over a compiled recurrence; use "
                "torch.autograd.grad, or op.reference(...)"
            )
        case _functorch.TransformType.Jvp:
            raise RuntimeError(f"{name}: forward-mode derivatives are not supported; use op.reference(...)")
