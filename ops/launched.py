"""What a call of a generated Triton module launches, found out without running anything.

The module's own functions are run on tensors without data, in a copy of the module whose launcher notes down
what it is given. So block sizes, grids and constants are those of the call, whatever chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.cache import private_copy
from linalg_dsl.ops.described import is_descriptor


@dataclass(frozen=True, slots=True)
class Use:
    """What of a call decides which variants of its kernels run, beside its tensors."""

    initial: bool = False
    final: bool = False
    save: bool = True
    """Whether a backward will follow."""

    def __or__(self, other: Use) -> Use:
        return Use(self.initial or other.initial, self.final or other.final, self.save or other.save)


@dataclass(frozen=True)
class Launched:
    """One launch; ``tensors`` among the ``arguments`` have no data."""

    kernel: str
    programs: int
    arguments: tuple[Any, ...] = field(compare=False)
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    types: tuple[Any, ...] = ()

    @property
    def block(self) -> int:
        """Of the split axis of a walk, of K in a prep; 0 where there is neither."""
        given = dict(self.constants)
        return int(given.get("BLOCK", max(given.get("KB", 0), given.get("VB", 0))))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.block, self.warps, self.stages

    @property
    def has_shares(self) -> bool:
        """Whether it writes or reads a sum per block of a walk, of which there is memory for so many."""
        return any(name.startswith("P_") for name, _ in self.constants)


class Module:
    """A generated module as it would be on ``device``, whose launches are noted and not carried out."""

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self.origin = module
        self.copy: Any = private_copy(module)
        for name in ("device_limits", "device_bandwidth", "architecture"):
            function = getattr(module, name, None)
            if function is not None:
                setattr(self.copy, name, _constant(function(device)))
        for name in ("SIZES", "REPLACED"):  # one table, whichever of them is asked
            setattr(self.copy, name, getattr(module, name, {}))

    def launches(self, tensors: Sequence[Tensor], offsets: Tensor | None, use: Use) -> list[Launched]:
        """Those of a forward, and of a backward where one will follow."""
        copy, found = self.copy, list[Launched]()

        def note(
            kernel: Any, programs: int, arguments: Any, constants: Any, warps: int, stages: int
        ) -> None:  # fmt: skip
            types = tuple(_type(x) for x in arguments)
            name = kernel.fn.__name__
            found.append(
                Launched(name, programs, tuple(arguments), tuple(constants.items()), warps, stages, types)
            )

        make = copy.Call.__init__
        copy.Call.__init__ = lambda call, given, initial, cut, launch=None: make(
            call, given, initial, cut, note
        )
        try:
            given = tuple(torch.empty_like(x, device="meta") for x in tensors)
            cut = None if offsets is None else torch.empty_like(offsets, device="meta")
            numbers = (1.0,) * len(copy.CONSTS)
            none = (None,) * len(copy.STATES)
            # a final state has the layout of an initial one
            _, finals, _ = copy.forward(given, none, numbers, cut, True, False, True)
            states = finals if use.initial else none
            o, _, residuals = copy.forward(given, states, numbers, cut, use.final, use.save)
            if use.save:
                ends = finals if use.final else None
                d_o = tuple(map(torch.empty_like, o)) if isinstance(o, tuple) else torch.empty_like(o)
                copy.backward(given, states, numbers, cut, residuals, d_o, ends)
        finally:
            copy.Call.__init__ = make
        return found


def _type(x: Any) -> Any:
    """What of an argument decides how its kernel is compiled."""
    if isinstance(x, Tensor):
        return x.dtype
    if is_descriptor(x):
        return ("tile", x.base.dtype, tuple(x.block_shape))
    return type(x)


def _constant(value: Any) -> Callable[[torch.device], Any]:
    return lambda device: value
