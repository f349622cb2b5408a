"""A tiny known-answer run of a kernel that decodes, at its first use on a device."""

from __future__ import annotations

import threading
from types import ModuleType

import torch
from torch import Tensor

from linalg_dsl.codegen.cache import toolchain
from linalg_dsl.ops.args import axis_sizes, const_numbers
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.selfcheck import ENVIRONMENT_VARIABLE, TOLERANCE, device_name, enabled
from linalg_dsl.planner.decode_form import DecodeForm

_LENGTH, _ROWS = 5, 4
_SLOTS = (2, -1, 0)
_ACCEPTED = (5, 5, 3)


class DecodeCheck:
    """Called before a module decodes; checks each (device, dtypes, K, V) once.

    ``exact`` is the torch module of the same recurrence, which is run in float64 on the CPU.
    """

    def __init__(self, form: DecodeForm, module: ModuleType, exact: ModuleType) -> None:
        self.form = form
        self.module = module
        self.exact = exact
        self._passed: set[tuple[object, ...]] = set()
        self._lock = threading.Lock()

    def __call__(self, tensors: tuple[Tensor, ...]) -> None:
        device = tensors[0].device
        sizes = axis_sizes(self.form.spec, tensors)
        key = (device, tuple(x.dtype for x in tensors), *sizes.items())
        if key in self._passed or not enabled(device):
            return
        with self._lock:
            if key not in self._passed:
                self.known_answer(tensors)
                self._passed.add(key)

    def known_answer(self, like: tuple[Tensor, ...]) -> None:
        """Steps on small inputs of these types and sizes of K and V, with padding and rejected tokens.

        Raises ``RuntimeError`` naming the recurrence, what is worst, device and versions if an error against
        the exact module is beyond what rounding explains.
        """
        spec, form = self.form.spec, self.form.form
        sizes, device = axis_sizes(spec, like), like[0].device
        consts = dict(form.consts)
        key, value = sizes.get("K", 1), sizes.get("V", 1)
        drawn = draw(spec, len(_SLOTS), _LENGTH, 2, key, value, seed=11, consts=_declared(self.form, consts))
        operands = tuple(x.to(y.dtype) for x, y in zip(drawn.values(), like, strict=True))
        numbers = const_numbers(spec, sizes, _declared(self.form, consts))
        known: dict[str, float] = {**{a: float(n) for a, n in sizes.items()}, **numbers}
        generator = torch.Generator().manual_seed(11)
        states = []
        for state in form.spec.states:
            shape = (_ROWS, 2, *(d if isinstance(d, int) else int(known[d]) for d in state.dims))
            # positive, as a normaliser would be
            states.append(torch.rand(shape, generator=generator, dtype=torch.float32) + 0.1)
        want = self._run(self.exact, tuple(x.double() for x in operands), [x.double() for x in states], known)
        got = self._run(
            self.module, tuple(x.to(device) for x in operands), [x.to(device) for x in states], known
        )
        limit = max(TOLERANCE.get(x.dtype, 1e-3) for x in like)
        for name, x, y in zip(("o", *self.exact.STATES), got, want, strict=True):
            error = float((x - y).norm() / y.norm().clamp_min(1e-30))
            if not error <= limit and bool(y.isfinite().all()):
                raise RuntimeError(
                    f"{spec.name}: the known-answer test of step failed on {device_name(device)} ({device}, "
                    f"{toolchain()}, K {key}, V {value}, {like[0].dtype}): {name} is off by {error:.2e} "
                    f"(relative), allowed {limit:.0e}. The kernel gives wrong numbers here; use "
                    f"backend='torch', or {ENVIRONMENT_VARIABLE}=0 to go on regardless"
                )

    def _run(
        self, module: ModuleType, tensors: tuple[Tensor, ...], states: list[Tensor], known: dict[str, float]
    ) -> list[Tensor]:
        """The output and the states, in float64 on the CPU."""
        device = tensors[0].device
        slots, accepted = (torch.tensor(x, device=device) for x in (_SLOTS, _ACCEPTED))
        with torch.no_grad():
            o = module.step(tensors, states, tuple(known[c] for c in module.CONSTS), slots, accepted, _LENGTH)
        return [x.detach().cpu().double() for x in (o, *states)]


def _declared(form: DecodeForm, consts: dict[str, float]) -> dict[str, float]:
    return {c.name: consts[c.name] for c in form.spec.consts if c.name in consts}
