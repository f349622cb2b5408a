"""A tiny known-answer run of a kernel that decodes, at its first use on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from linalg_dsl.codegen.cache import toolchain
from linalg_dsl.ops.args import axis_sizes, const_numbers
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.selfcheck import (
    ENVIRONMENT_VARIABLE,
    TOLERANCE,
    Launch,
    Passed,
    device_name,
    enabled,
    lanes_class,
    pinned,
    relative_error,
    units_of,
)
from linalg_dsl.planner.decode_form import DecodeForm

_ROWS, _LENGTH = 4, 5
_SLOTS = (2, -1, 0)


@dataclass(frozen=True)
class Steps:
    """What of a call decides which kernel runs: ``lanes``, a number of sequences times heads alike.

    ``ratios``: how many heads share one of each tensor; ``length``: tokens, as many as are checked.
    """

    ratios: tuple[int, ...]
    lanes: int
    length: int
    has_slots: bool
    has_counts: bool
    states: tuple[torch.dtype, ...]


class DecodeCheck:
    """Called before a module decodes; checks each (device, dtypes, K, V, kernel) once.

    ``exact`` is the torch module of the same recurrence, which is run in float64 on the CPU.
    """

    def __init__(self, form: DecodeForm, module: ModuleType, exact: ModuleType) -> None:
        self.form = form
        self.module = module
        self.exact = exact
        self._passed = Passed()

    def __call__(
        self, tensors: Sequence[Tensor], states: Sequence[Tensor], slots: Tensor | None, counts: Tensor | None
    ) -> None:
        """``states``: as the module takes them."""
        device = tensors[0].device
        if not enabled(device):
            return
        steps = self._steps(tensors, states, slots, counts)
        sizes = axis_sizes(self.form.spec, tensors)
        key = (self.module.__name__, device, tuple(x.dtype for x in tensors), *sizes.items(), steps)
        self._passed.need(self.module, key, lambda: self.known_answer(tensors, steps))

    def _steps(
        self, tensors: Sequence[Tensor], states: Sequence[Tensor], slots: Tensor | None, counts: Tensor | None
    ) -> Steps:
        spec = self.form.spec
        heads = [x.shape[2 if d.timed else 0] for x, d in zip(tensors, spec.inputs, strict=True)]
        batch, length = next(x for x, d in zip(tensors, spec.inputs, strict=True) if d.timed).shape[:2]
        return Steps(
            tuple(max(heads) // n for n in heads),
            lanes_class(batch * max(heads), units_of(self.module, tuple(tensors))),
            1 if length == 1 else _LENGTH,
            slots is not None,
            counts is not None,
            tuple(x.dtype for x in states),
        )

    def known_answer(self, like: Sequence[Tensor], steps: Steps) -> None:
        """Steps on small inputs of these types and sizes of K and V, with padding and rejected tokens.

        Raises ``RuntimeError`` naming the recurrence, what is worst, device and versions if an error against
        the exact module is beyond what rounding explains.
        """
        spec, form = self.form.spec, self.form.form
        sizes, device = axis_sizes(spec, like), like[0].device
        fixed = {c.name: value for c in spec.consts for n, value in form.consts if n == c.name}
        key, value = sizes.get("K", 1), sizes.get("V", 1)
        heads = max(2, math.lcm(*steps.ratios))
        few = {d.name: heads // n for d, n in zip(spec.inputs, steps.ratios, strict=True)}
        drawn = draw(
            spec, len(_SLOTS), steps.length, heads, key, value, seed=11, consts=fixed, heads=few
        )  # fmt: skip
        operands = [x.to(y.dtype) for x, y in zip(drawn.values(), like, strict=True)]
        known = {**{a: float(n) for a, n in sizes.items()}, **const_numbers(spec, sizes, fixed)}
        generator = torch.Generator().manual_seed(11)
        states = []
        for state, kind in zip(form.spec.states, steps.states, strict=True):
            shape = (_ROWS, heads, *(d if isinstance(d, int) else int(known[d]) for d in state.dims))
            # positive, as a normaliser would be
            states.append((torch.rand(shape, generator=generator) + 0.1).to(kind))
        wide = torch.float64
        want = self._run(
            self.exact, [x.to(wide) for x in operands], [x.to(wide) for x in states], known, steps
        )
        module = pinned(self.module, Launch(steps.ratios, steps.lanes))
        got = self._run(
            module, [x.to(device) for x in operands], [x.to(device) for x in states], known, steps
        )
        limit = max(TOLERANCE.get(x, 1e-3) for x in (*(y.dtype for y in like), *steps.states))
        for name, x, y in zip(("o", *self.exact.STATES), got, want, strict=True):
            if not bool(y.isfinite().all()):
                continue  # no answer is known
            error = relative_error(x, y)
            if not error <= limit:
                raise RuntimeError(
                    f"{spec.name}: the known-answer test of step failed on {device_name(device)} ({device}, "
                    f"{toolchain()}, K {key}, V {value}, {like[0].dtype}): {name} is off by {error:.2e} "
                    f"(relative), allowed {limit:.0e}. The kernel gives wrong numbers here; use "
                    f"backend='torch', or {ENVIRONMENT_VARIABLE}=0 to go on regardless"
                )

    def _run(
        self,
        module: ModuleType,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor],
        known: Mapping[str, float],
        steps: Steps,
    ) -> list[Tensor]:
        """The output and the states, in float64 on the CPU."""
        device, count = tensors[0].device, len(_SLOTS)
        slots = torch.tensor(_SLOTS, device=device) if steps.has_slots else None
        counts = (
            torch.tensor([steps.length, 0, steps.length - 1], device=device) if steps.has_counts else None
        )
        given = list(states) if steps.has_slots else [x[:count].clone() for x in states]
        numbers = tuple(known[c] for c in module.CONSTS)
        with torch.no_grad():
            o = module.step(tuple(tensors), given, numbers, slots, counts, steps.length)
        return [x.detach().cpu().double() for x in (o, *given)]
