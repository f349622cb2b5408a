"""A tiny known-answer run of a Triton module at its first use on a device.

Triton has miscompiled kernels of this kind on some devices: then an error says so, where numbers would
silently be wrong.
"""

from __future__ import annotations

import math
import os
import threading
from types import ModuleType

import torch
from torch import Tensor

from linalg_dsl.codegen.cache import toolchain
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import axis_sizes, const_numbers
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.reference import reference

ENVIRONMENT_VARIABLE = "LINALG_DSL_SELFCHECK"
TOLERANCE = {torch.float32: 1e-3, torch.float16: 4e-2, torch.bfloat16: 4e-2}
"""Relative L2 errors that no rounding explains lie far above these."""
_LENGTH = 131  # two chunks of 64, and a ragged one
_LOCK = threading.Lock()


class SelfCheck:
    """Called before a module runs on data; checks each (device, dtypes, K, V) once."""

    def __init__(self, spec: RecurrenceSpec, consts: tuple[tuple[str, float], ...]) -> None:
        self.spec = spec
        self.consts = dict(consts)
        self._passed: set[tuple[object, ...]] = set()

    def __call__(self, module: ModuleType, tensors: tuple[Tensor, ...]) -> None:
        device = tensors[0].device
        key = (
            module.__name__,
            device,
            tuple(x.dtype for x in tensors),
            *axis_sizes(self.spec, tensors).items(),
        )
        if key in self._passed or not enabled(device):
            return
        with _LOCK:
            if key not in self._passed:
                self._run(module, tensors)
                self._passed.add(key)

    def _run(self, module: ModuleType, tensors: tuple[Tensor, ...]) -> None:
        """In a thread of its own: inside an operator this one has autograd switched off."""
        failure: list[BaseException] = []

        def work() -> None:
            try:
                with torch.cuda.device(tensors[0].device):
                    known_answer(self.spec, module, tensors, self.consts)
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=work, name="linalg_dsl self-check")
        thread.start()
        thread.join()
        if failure:
            raise failure[0]


def enabled(device: torch.device) -> bool:
    """On GPUs, unless switched off, interpreted, or inside the capture of a CUDA graph."""
    if device.type != "cuda" or os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return False
    return os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_current_stream_capturing()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def known_answer(
    spec: RecurrenceSpec, module: ModuleType, like: tuple[Tensor, ...], consts: dict[str, float]
) -> None:
    """Runs forward and backward of ``module`` on small inputs of these types and sizes of K and V.

    Raises ``RuntimeError`` naming the recurrence, the worst tensor, device and versions if an error
    against the float64 step loop is beyond what rounding explains.
    """
    sizes = axis_sizes(spec, like)
    device = like[0].device
    drawn = draw(spec, 1, _LENGTH, 2, sizes["K"], sizes["V"], seed=11, consts=consts)
    named = {n: x.to(y.dtype) for (n, x), y in zip(drawn.items(), like, strict=True)}
    (state,) = draw_state(spec, 1, 2, sizes["K"], sizes["V"], dtype=torch.float32, seed=11)
    exact = {n: x.double().requires_grad_() for n, x in {**named, "initial_state": state}.items()}
    inputs = {n: x for n, x in exact.items() if n != "initial_state"}
    o, last = reference(
        spec, inputs, initial_state=exact["initial_state"], output_final_state=True, consts=consts
    )
    assert isinstance(last, Tensor)
    generator = torch.Generator().manual_seed(11)
    d_o = torch.randn(o.shape, generator=generator, dtype=torch.float64)
    d_last = torch.randn(last.shape, generator=generator, dtype=torch.float64)
    values = const_numbers(spec, sizes, consts)
    numbers = tuple(values[c] for c in module.CONSTS)
    operands = tuple(x.to(device) for x in named.values())
    with torch.no_grad():
        start = state.to(device)
        got_o, got_last, residuals = module.forward(operands, start, numbers, None, True, True)
        weights = (d_o.to(got_o.dtype), d_last.to(got_last.dtype))
        found, found_start = module.backward(
            operands, start, numbers, None, residuals, weights[0].to(device), weights[1].to(device)
        )
    wanted = torch.autograd.grad(
        (o, last), list(exact.values()), [w.double() for w in weights], allow_unused=True
    )
    results = [("o", got_o, o), ("final state", got_last, last)]
    results += [
        (f"d {n}", g, w)
        for n, g, w in zip(exact, (*found, found_start), wanted, strict=True)
        if w is not None
    ]
    scale = max(w.detach().norm().item() for n, _, w in results if n.startswith("d "))
    errors = {name: _error(got, want, scale if name.startswith("d ") else 0.0) for name, got, want in results}
    worst = max(errors, key=lambda n: math.inf if math.isnan(errors[n]) else errors[n])
    error = errors[worst]
    limit = max(TOLERANCE.get(x.dtype, 1e-3) for x in like)
    if not error <= limit:
        raise RuntimeError(
            f"{spec.name}: the known-answer test failed on {device_name(device)} "
            f"({device}, {toolchain()}, K {sizes['K']}, V {sizes['V']}, {like[0].dtype}): {worst} is off by "
            f"{error:.2e} (relative), allowed {limit:.0e}. The kernels give wrong numbers here; use "
            f"backend='torch', or {ENVIRONMENT_VARIABLE}=0 to go on regardless"
        )


def _error(got: Tensor | None, want: Tensor, scale: float) -> float:
    """Relative L2; a tiny gradient counts against the largest, ``scale``."""
    if got is None:
        return math.inf
    size = max(float(want.detach().norm()), 1e-6 * scale, 1e-30)
    return float((got.detach().double().cpu() - want.detach()).norm()) / size
