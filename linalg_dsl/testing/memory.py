"""Memory that tells: NaN in what is freshly allocated, and around every tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MARGIN = 1 << 16
"""Elements of NaN on either side of a tensor: more than a tile of the kernels here reaches beyond."""
_MAKERS: tuple[tuple[Any, str, float], ...] = (
    (torch, "empty", torch.nan),
    (torch, "zeros", 0.0),
    (torch, "empty_like", torch.nan),
    (torch, "zeros_like", 0.0),
    (Tensor, "new_empty", torch.nan),
    (Tensor, "new_zeros", 0.0),
)
"""The functions whose results are guarded, and what their memory holds."""


class fresh_memory_is_nan:
    """A context in which ``torch.empty`` gives NaN (and integers their largest value)."""

    def __enter__(self) -> None:
        self.fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        self.was = torch.are_deterministic_algorithms_enabled()
        self.warn = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = self.fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(self.was, warn_only=self.warn)


class guarded_memory:
    """A context in which tensors that Python code allocates lie in the middle of larger ones full of NaN.

    What a kernel reads beside a tensor is then NaN, and ``written`` gives a tensor beside which something
    was written. Seen are the functions of ``_MAKERS``; a foreign callable that allocates otherwise is
    watched at its inputs only.
    """

    def __enter__(self) -> guarded_memory:
        self.wholes: list[tuple[Tensor, Tensor]] = []
        self.was = [(owner, name, vars(owner).get(name)) for owner, name, _ in _MAKERS]
        for owner, name, fill in _MAKERS:
            setattr(owner, name, self._maker(getattr(owner, name), fill))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, function in self.was:
            if function is None:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, function)

    def _maker(self, function: Callable[..., Any], fill: float) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            plain = type(made) is Tensor and made.is_floating_point() and made.is_contiguous()
            if not plain or made.requires_grad or made.device.type == "meta" or not made.numel():
                return made
            return self._inside(made).fill_(fill)

        return make

    def _inside(self, x: Tensor) -> Tensor:
        whole = torch.full((x.numel() + 2 * MARGIN,), torch.nan, dtype=x.dtype, device=x.device)
        self.wholes.append((whole, x))
        return whole[MARGIN : MARGIN + x.numel()].view(x.shape)

    def place(self, x: Tensor) -> Tensor:
        """The same numbers from the middle of a larger tensor; gradients flow back."""
        return self._inside(x.detach()).copy_(x)

    def written(self) -> Tensor | None:
        """A tensor beside which something else than NaN stands, if there is one."""
        for whole, x in self.wholes:
            beside = torch.cat([whole[:MARGIN], whole[MARGIN + x.numel() :]])
            if not bool(beside.isnan().all()):
                return x
        return None


def every_other(x: Tensor) -> Tensor:
    """The same numbers in every other place of a tensor twice as wide, NaN between them."""
    if not x.dim():
        return x
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
    return wide[..., ::2].copy_(x)
