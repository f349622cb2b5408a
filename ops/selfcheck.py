"""A tiny known-answer run of a Triton module at its first use on a device.

Triton has miscompiled kernels of this kind on some devices: then an error says so, where numbers would
silently be wrong.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from linalg_dsl.codegen.cache import toolchain
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import axis_sizes, const_numbers
from linalg_dsl.ops.carried import state_labels
from linalg_dsl.ops.draw import draw, draw_state

ENVIRONMENT_VARIABLE = "LINALG_DSL_SELFCHECK"
TOLERANCE = {torch.float32: 1e-3, torch.float16: 4e-2, torch.bfloat16: 4e-2}
"""Relative L2 errors that no rounding explains lie far above these."""
_LENGTH = 131  # two chunks of 64, and a ragged one
_ORDINARY = 1e8
_WAYS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    torch.abs,
    lambda x: 0.05 * x,
    lambda x: 0.05 * x.abs(),
)
_LOCK = threading.Lock()


class SelfCheck:
    """Called before a module runs on data; checks each (device, dtypes, K, V) once.

    ``exact`` gives the torch module of the same recurrence, which is run in float64 on the CPU. (It has
    been tested against the step loop, which would take a minute at K = V = 512.) ``handed`` names inputs
    that other stages give, of whose values nothing is promised.
    """

    def __init__(
        self,
        spec: RecurrenceSpec,
        consts: tuple[tuple[str, float], ...],
        exact: Callable[[], ModuleType],
        handed: tuple[str, ...] = (),
    ) -> None:
        self.spec = spec
        self.consts = dict(consts)
        self.exact = exact
        self.handed = handed
        self._passed: set[tuple[object, ...]] = set()

    def __call__(self, module: ModuleType, tensors: tuple[Tensor, ...]) -> None:
        device = tensors[0].device
        sizes = axis_sizes(self.spec, tensors)
        key = (module.__name__, device, tuple(x.dtype for x in tensors), *sizes.items())
        if key in self._passed or not enabled(device):
            return
        with _LOCK:
            if key not in self._passed:
                known_answer(self.spec, module, self.exact(), tensors, self.consts, self.handed)
                self._passed.add(key)


def enabled(device: torch.device) -> bool:
    """On GPUs, unless switched off, interpreted, or inside the capture of a CUDA graph."""
    if device.type != "cuda" or os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return False
    return os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_current_stream_capturing()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def known_answer(
    spec: RecurrenceSpec,
    module: ModuleType,
    exact: ModuleType,
    like: tuple[Tensor, ...],
    consts: dict[str, float],
    handed: tuple[str, ...] = (),
) -> None:
    """Runs forward and backward of ``module`` on small inputs of these types and sizes of K and V.

    Values of ``handed`` inputs are drawn again, positive or small, until the exact results are numbers of
    an ordinary size: one stage may rely on what another makes. Raises ``RuntimeError`` naming the
    recurrence, the worst tensor, device and versions if an error against ``exact`` in float64 is beyond
    what rounding explains.
    """
    sizes = axis_sizes(spec, like)
    device = like[0].device
    key, value = sizes.get("K", 1), sizes.get("V", 1)  # a stage may lack an axis
    drawn = draw(spec, 1, _LENGTH, 2, key, value, seed=11, consts=consts)
    states = draw_state(spec, 1, 2, key, value, dtype=torch.float32, seed=11)
    values = const_numbers(spec, sizes, consts)
    with torch.no_grad():
        wide = torch.float64
        for way in _WAYS if handed else _WAYS[:1]:
            chosen = [way(x) if n in handed else x for n, x in drawn.items()]
            operands = tuple(x.to(y.dtype) for x, y in zip(chosen, like, strict=True))
            want = _results(spec, exact, values, _cast(operands, wide), _cast(states, wide), like)
            if all(bool((x.abs() < _ORDINARY).all()) for x in want.values()):
                break
        else:
            if handed:
                return  # no answer is known
        got = _results(spec, module, values, _cast(operands, device), _cast(states, device), like)
    scale = max(float(x.norm()) for n, x in want.items() if n.startswith("d "))
    errors = {n: _error(got[n], want[n], scale if n.startswith("d ") else 0.0) for n in want}
    worst = max(errors, key=lambda n: math.inf if math.isnan(errors[n]) else errors[n])
    error = errors[worst]
    limit = max(TOLERANCE.get(x.dtype, 1e-3) for x in like)
    if not error <= limit:
        raise RuntimeError(
            f"{spec.name}: the known-answer test failed on {device_name(device)} "
            f"({device}, {toolchain()}, K {key}, V {value}, {like[0].dtype}): {worst} is off by "
            f"{error:.2e} (relative), allowed {limit:.0e}. The kernels give wrong numbers here; use "
            f"backend='torch', or {ENVIRONMENT_VARIABLE}=0 to go on regardless"
        )


def _results(
    spec: RecurrenceSpec,
    module: ModuleType,
    values: dict[str, float],
    operands: tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    like: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    """o, the final states and every gradient, in float64 on the CPU; cotangents as an op would get them."""
    numbers = tuple(values[c] for c in module.CONSTS)
    o, finals, residuals = module.forward(operands, states, numbers, None, True, True)
    generator = torch.Generator().manual_seed(11)
    short = min((x.dtype for x in like), key=lambda t: t.itemsize)
    d_o = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(short).to(o)
    d_finals = tuple(
        torch.randn(x.shape, generator=generator, dtype=torch.float64).float().to(x) for x in finals
    )
    grads, d_initials = module.backward(operands, states, numbers, None, residuals, d_o, d_finals)
    named = {"o": o, **dict(zip(state_labels(spec, "final state"), finals, strict=True))}
    named |= {f"d {d.name}": g for d, g in zip(spec.inputs, grads, strict=True)}
    named |= dict(zip(state_labels(spec, "d initial_state"), d_initials, strict=True))
    return {n: x.detach().cpu().double() for n, x in named.items() if x is not None}


def _cast(tensors: tuple[Tensor, ...], to: torch.dtype | torch.device) -> tuple[Tensor, ...]:
    return tuple(x.to(to) for x in tensors)


def _error(got: Tensor, want: Tensor, scale: float) -> float:
    """Relative L2; a small gradient counts against the largest, ``scale``: wrong code errs by far more."""
    size = max(float(want.norm()), 1e-2 * scale, 1e-30)
    return float((got - want).norm()) / size
