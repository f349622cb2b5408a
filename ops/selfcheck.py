"""A tiny known-answer run of a Triton module at its first use on a device.

Triton has miscompiled kernels of this kind on some devices: then an error says so, where numbers would
silently be wrong. What is run are the kernels of the call that asks: of its types, sizes and head counts,
with the block sizes that its number of sequences and heads leads to. What passed is noted in the cache
directory, so that other processes need not do it again.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.cache import private_copy, record, recorded, toolchain
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import axis_sizes, const_numbers
from linalg_dsl.ops.carried import state_labels
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.planner.outputs import each, one_or_all

ENVIRONMENT_VARIABLE = "LINALG_DSL_SELFCHECK"
"""``0``: no check; ``always``: whatever other processes noted, once in this one; else once per device."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 4e-2, torch.bfloat16: 4e-2}
"""Relative L2 errors that no rounding explains lie far above these."""
_LENGTH = 131  # two chunks of 64, and a ragged one
_ANY = 1 << 20  # the number of sequences and heads that an invariant module asks its table with
_ORDINARY = 1e8
_WAYS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    torch.abs,
    lambda x: 0.05 * x,
    lambda x: 0.05 * x.abs(),
)
_LOCK = threading.Lock()
_LEFT_OUT: list[bool] = []


@contextmanager
def known_answers_left_out() -> Iterator[None]:
    """What is called inside is checked otherwise: the known answers wait for a first use after it."""
    _LEFT_OUT.append(True)
    try:
        yield
    finally:
        _LEFT_OUT.pop()


def left_out() -> bool:
    return bool(_LEFT_OUT)


@dataclass(frozen=True)
class Launch:
    """What of a call decides which kernels run: ``ratios``, how many heads share one of each tensor;

    ``lanes``, sequences (or their super-chunks) times heads, of which blocks sizes depend; ``every_state``,
    whether the backward keeps the state before every chunk; ``two_level``, whether walks go over
    super-chunks.
    """

    ratios: tuple[int, ...]
    lanes: int
    every_state: bool = True
    two_level: bool = False

    @property
    def heads(self) -> int:
        """A small number of heads that each tensor's divides so."""
        return max(2, math.lcm(*self.ratios))


class Passed:
    """Known-answer runs that passed: here, or in another process, which left a note in the cache folder."""

    def __init__(self) -> None:
        self.keys: set[tuple[object, ...]] = set()

    def need(self, module: ModuleType, key: tuple[object, ...], run: Callable[[], None]) -> None:
        """Calls ``run``, which raises if it fails, unless it has passed for this key."""
        if key in self.keys:
            return
        with _LOCK:
            if key in self.keys:
                return
            if not self._is_noted(module, key):
                run()
                name = pass_name(module, key)
                if name is not None:
                    record(name, pass_note(key))
            self.keys.add(key)

    def knows(self, module: ModuleType, key: tuple[object, ...]) -> bool:
        """Whether it has passed for this key, here or elsewhere."""
        return key in self.keys or self._is_noted(module, key)

    def _is_noted(self, module: ModuleType, key: tuple[object, ...]) -> bool:
        name = pass_name(module, key)
        if os.environ.get(ENVIRONMENT_VARIABLE) == "always" or name is None:
            return False
        return recorded(name)


class SelfCheck:
    """Called before a module runs on data; checks each (device, dtypes, K, V, launch) once.

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
        self._passed = Passed()
        self._seen: set[tuple[object, ...]] = set()

    def __call__(
        self, module: ModuleType, tensors: tuple[Tensor, ...], offsets: Tensor | None = None
    ) -> None:
        device = tensors[0].device
        if not enabled(device):
            return
        count = None if offsets is None else offsets.shape[0]
        call = (module.__name__, device, count, *((x.dtype, x.shape) for x in tensors))
        if call in self._seen:  # nothing below need be worked out again
            return
        self._check(module, tensors, offsets)
        if len(self._seen) >= 1024:
            self._seen.clear()
        self._seen.add(call)

    def _check(self, module: ModuleType, tensors: tuple[Tensor, ...], offsets: Tensor | None) -> None:
        launch = self.launch_of(module, tensors, offsets)
        self._passed.need(
            module,
            self._key(module, tensors, launch),
            lambda: known_answer(self.spec, module, self.exact(), tensors, self.consts, self.handed, launch),
        )

    def is_due(self, module: ModuleType, tensors: tuple[Tensor, ...], offsets: Tensor | None) -> bool:
        """Whether a call on these would run the check."""
        if not enabled(tensors[0].device):
            return False
        launch = self.launch_of(module, tensors, offsets)
        return not self._passed.knows(module, self._key(module, tensors, launch))

    def _key(self, module: ModuleType, tensors: tuple[Tensor, ...], launch: Launch) -> tuple[object, ...]:
        kinds = tuple(x.dtype for x in tensors)
        return module.__name__, tensors[0].device, kinds, *axis_sizes(self.spec, tensors).items(), launch

    def launch_of(self, module: ModuleType, tensors: tuple[Tensor, ...], offsets: Tensor | None) -> Launch:
        counts = [x.shape[2 if d.timed else 0] for x, d in zip(tensors, self.spec.inputs, strict=True)]
        heads = max(counts)
        timed = next(x for x, d in zip(tensors, self.spec.inputs, strict=True) if d.timed)
        sequences = timed.shape[0] if offsets is None else offsets.shape[0] - 1
        every, two = True, False
        if hasattr(module, "keep_every_state"):
            sizes = axis_sizes(self.spec, tensors)
            call = module.Call(tensors, (), offsets)
            sequences, two = call.pieces, getattr(call, "super_chunk", 0) > 0
            every = module.keep_every_state(call.chunks, heads, sizes.get("K", 1), sizes.get("V", 1))
        return Launch(
            tuple(heads // n for n in counts),
            lanes_class(sequences * heads, units_of(module, tensors)),
            every,
            two,
        )


def lanes_class(lanes: int, units: int) -> int:
    """The smallest number of lanes for which the tables of blocks decide as for ``lanes``.

    They compare lanes times a power of two with ``units`` multiprocessors, three quarters or four times of
    them. No units: there are no tables.
    """
    if units == 0:
        return 1
    steps = range(10)
    bounds = {math.ceil(part * units / 2**j) for part in (0.75, 1, 4) for j in steps}
    bounds |= {units // 2**j + 1 for j in steps}
    return max((b for b in bounds if 0 < b <= lanes), default=1)


def enabled(device: torch.device) -> bool:
    """On GPUs, unless switched off, left out, interpreted, or inside the capture of a CUDA graph."""
    if _LEFT_OUT or device.type != "cuda" or os.environ.get(ENVIRONMENT_VARIABLE) == "0":
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
    launch: Launch | None = None,
) -> None:
    """Runs forward and backward of ``module`` on small inputs of these types and sizes of K and V.

    Values of ``handed`` inputs are drawn again, positive or small, until the exact results are numbers of
    an ordinary size: one stage may rely on what another makes. Raises ``RuntimeError`` naming the
    recurrence, the worst tensor, device and versions if an error against ``exact`` in float64 is beyond
    what rounding explains.
    """
    launch = launch or Launch((1,) * len(like), 2)
    sizes = axis_sizes(spec, like)
    device = like[0].device
    key, value = sizes.get("K", 1), sizes.get("V", 1)  # a stage may lack an axis
    module = pinned(module, launch)
    # where states are kept at every 8th boundary only, there have to be that many chunks
    length = _LENGTH if launch.every_state else max(_LENGTH, 9 * module.Call(like, (), None).chunk + 3)
    few = {d.name: launch.heads // n for d, n in zip(spec.inputs, launch.ratios, strict=True)}
    drawn = draw(spec, 1, length, launch.heads, key, value, seed=11, consts=consts, heads=few)
    states = draw_state(spec, 1, launch.heads, key, value, dtype=torch.float32, seed=11)
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
    errors = {n: relative_error(got[n], want[n], scale if n.startswith("d ") else 0.0) for n in want}
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


def pinned(module: ModuleType, launch: Launch) -> ModuleType:
    """A copy of a Triton module whose tables choose as they do for a call with this launch."""
    if not hasattr(module, "device_limits"):
        return module
    copy = private_copy(module)
    copy.REPLACED = getattr(module, "REPLACED", {})  # type: ignore[attr-defined]
    for name in ("choose_walk", "choose_step", "choose_decode"):
        table: Callable[..., Any] | None = getattr(copy, name, None)
        if table is not None:
            setattr(copy, name, _for_lanes(table, launch.lanes))
    if hasattr(copy, "keep_every_state"):
        copy.keep_every_state = lambda *sizes: launch.every_state  # type: ignore[attr-defined]
    if hasattr(getattr(copy, "Call", None), "choose_super_chunk"):
        length = 1 if launch.two_level else 0
        copy.Call.choose_super_chunk = lambda call: length
    return copy


def _for_lanes(table: Callable[..., Any], lanes: int) -> Callable[..., Any]:
    """The table for these lanes; one that is asked for any number of them is left as it is."""
    place = list(inspect.signature(table).parameters).index("lanes")

    def choose(*args: Any) -> Any:
        own = args[place] if args[place] == _ANY else lanes
        return table(*args[:place], own, *args[place + 1 :])

    return choose


def units_of(module: ModuleType, tensors: tuple[Tensor, ...]) -> int:
    limits = getattr(module, "device_limits", None)
    return 0 if limits is None else int(limits(tensors[0].device)[0])


def pass_name(module: ModuleType, key: tuple[object, ...]) -> str | None:
    """What a pass is noted under; None of a module that has no file, which names text and versions."""
    path = getattr(module, "__file__", None)
    if path is None:
        return None
    digest = hashlib.sha256("\0".join([Path(path).stem, pass_note(key)]).encode()).hexdigest()[:16]
    return f"{Path(path).stem}_{digest}"


def pass_note(key: tuple[object, ...]) -> str:
    _, device, dtypes, *rest = key
    assert isinstance(device, torch.device)
    runtime = torch.version.cuda or torch.version.hip or "none"
    assembler = os.environ.get("TRITON_PTXAS_PATH", "Triton's")
    return (
        f"passed on {device_name(device)}, runtime {runtime}, assembler {assembler}\n{toolchain()}\n"
        f"{dtypes}\n{rest}\n"
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
    d_o = one_or_all(
        [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(short).to(x) for x in each(o)]
    )
    d_finals = tuple(
        torch.randn(x.shape, generator=generator, dtype=torch.float64).float().to(x) for x in finals
    )
    grads, d_initials = module.backward(operands, states, numbers, None, residuals, d_o, d_finals)
    outputs = ["o"] if len(spec.outputs) == 1 else [e.target for e in spec.outputs]
    named = dict(zip(outputs, each(o), strict=True))
    named |= dict(zip(state_labels(spec, "final state"), finals, strict=True))
    named |= {f"d {d.name}": g for d, g in zip(spec.inputs, grads, strict=True)}
    named |= dict(zip(state_labels(spec, "d initial_state"), d_initials, strict=True))
    return {n: x.detach().cpu().double() for n, x in named.items() if x is not None}


def _cast(tensors: tuple[Tensor, ...], to: torch.dtype | torch.device) -> tuple[Tensor, ...]:
    return tuple(x.to(to) for x in tensors)


def relative_error(got: Tensor, want: Tensor, scale: float = 0.0) -> float:
    """Relative L2; a small gradient counts against the largest, ``scale``: wrong code errs by far more."""
    size = max(float(want.norm()), 1e-2 * scale, 1e-30)
    return float((got - want).norm()) / size
