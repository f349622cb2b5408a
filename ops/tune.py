"""Tuning: a bounded search around the tables' choice, on the device at hand.

For each variant of the plan (``tune_space.variants``) the sizes of every kernel are searched by themselves:
those of one do not change another's time. Neighbours are compiled side by side, then timed in
rounds, each of which runs the whole call with another choice for every kernel. What does not compile, spills,
fails or is wrong is left out and noted; the winner of a variant is compared with the step loop before it may
win. Everything is noted as it comes, so that a search that was stopped goes on where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from linalg_dsl.codegen.launch_sizes import joined, read_launches
from linalg_dsl.ops.first_use import MOST_SPILLS
from linalg_dsl.ops.launched import Launched, Module, Use
from linalg_dsl.ops.replay import paused
from linalg_dsl.ops.tune_record import Record
from linalg_dsl.ops.tune_space import Assignment, Sizes, Variant, as_option, batches, neighbours, rounds

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp

MARGIN = 0.98
"""A candidate replaces what there is if it takes at most this part of its time: less is noise."""
STARTED = "was running when the search ended"
Say = Callable[[str], None]


class Hands(Protocol):
    """What a search does to the device: the seam at which it is tested without one."""

    def compile(self, module: ModuleType, launches: Sequence[Launched]) -> list[int | str]:
        """Of each launch the registers that it spills, or why it does not compile."""
        ...

    def kernel_times(self, modules: Sequence[ModuleType], run: Callable[[], object]) -> dict[str, float]:
        """Milliseconds of every kernel in one run, by its name in its module."""
        ...

    def whole_time(self, op: CompiledOp, run: Callable[[], object]) -> float:
        """Milliseconds of a run of this op."""
        ...

    def fault(self, op: CompiledOp, run: Callable[[], object]) -> str:
        """Why the numbers of this op are wrong, empty if they are right; ``run`` calls it as it is timed."""
        ...


@dataclass
class Search:
    """One tuning. ``call(op)`` gives the function that is timed; ``budget`` in seconds."""

    op: CompiledOp
    call: Callable[[CompiledOp], Callable[[], object]]
    use: Use
    hands: Hands
    record: Record
    budget: float
    say: Say = print
    start: float = field(init=False, default=0.0)

    def run(self, tried: Sequence[Variant]) -> Record:
        """Searches these variants, the first of which is the op as it is, and notes the best."""
        record = self.record
        self.start = time.monotonic()
        for name, before in list(record.tried.items()):
            if before == STARTED:
                self._note(name, "failed: the process ended while it ran")
        default = self._whole("default", self.op)
        if default is None:
            raise RuntimeError(
                f"{self.op.spec.name}: the default choice does not run: {record.tried['default']}"
            )
        record.default_ms = default
        if record.best is None:  # the default stands until something is faster
            record.best, record.best_ms = {}, default
        best = record.best_ms or default
        for variant in tried:
            if self.is_over:
                self.say("the budget is spent; the same command goes on from here")
                return self._save(record)
            try:
                found = self._variant(variant)
            except Exception as error:  # whatever a candidate does, the others are still of interest
                self._note(f"{variant}", f"failed: {_short(error)}")
                continue
            if found is None:
                continue
            ms, options = found
            if ms < MARGIN * best:
                best, record.best, record.best_ms = ms, options, ms
        record.finished = not self.is_over
        return self._save(record)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.start > self.budget

    # -- one variant ------------------------------------------------------------------------------
    def _variant(self, variant: Variant) -> tuple[float, dict[str, Any]] | None:
        """(milliseconds, options) of its best sizes; None if it is wrong."""
        op = self._with(variant.changes)
        run = self.call(op)
        with watched(modules_of(op)) as seen:
            run()
        asked = {name for m in modules_of(op) for name in m.SIZES}  # the user's: they stay
        free = {n: x for n, x in seen.launches.items() if n not in asked}
        choices = {n: [s for s in neighbours(x) if self._is_open(variant, n, s)] for n, x in free.items()}
        default = {n: x.sizes for n, x in free.items()}
        for part in batches(choices, 2 * (os.cpu_count() or 1)):
            if self.is_over:
                break
            left = self._compiled(variant, op, seen, default, part)
            self._time_rounds(variant, op, run, default, left)
        best = self._fastest(variant, default)
        changed = {n: s for n, s in best.items() if s != default[n]}
        owners = owners_of(op)
        options: dict[str, Any] = dict(variant.changes)
        if changed:
            changed = self._right(variant, default, changed, owners)
            whole = {**default, **changed}
            options["launch"] = as_option(whole, owners) | variant.launch
        if not options:
            return self.record.default_ms or 0.0, options
        winner = self._with(options)
        label = f"{variant} | {_listed(changed)}"
        ms = self._whole(label, winner)
        time = "does not run" if ms is None else f"{ms:.4f} ms"
        self.say(f"{variant}: {time}; {_listed(changed) or 'no other sizes'}")
        if ms is None or (not changed and self._fault(label, winner)):
            return None
        return ms, options

    def _with(self, options: Mapping[str, Any]) -> CompiledOp:
        given = dict(options)
        if "launch" in given:
            given["launch"] = joined(read_launches(given["launch"]), self.op.options.launch)
        return self.op.with_options(**given)

    def _is_open(self, variant: Variant, name: str, sizes: Sizes) -> bool:
        return _label(variant, name, sizes) not in self.record.tried

    def _compiled(
        self, variant: Variant, op: CompiledOp, seen: Seen, default: Assignment,
        choices: Mapping[str, Sequence[Sizes]],
    ) -> dict[str, list[Sizes]]:  # fmt: skip
        """What of the choices compiles without spills."""
        left: dict[str, list[Sizes]] = {n: [] for n in choices}
        wanted: dict[str, dict[Launched, Sizes]] = {}
        for assignment in rounds(choices):
            with sizes_set(modules_of(op), {**default, **assignment}):
                for module in seen.tensors:
                    tensors, offsets = seen.tensors[module]
                    for launch in Module(module, tensors[0].device).launches(tensors, offsets, self.use):
                        if assignment.get(launch.kernel) == launch.sizes:
                            wanted.setdefault(module.__name__, {})[launch] = launch.sizes
        for module in seen.tensors:
            launches = list(wanted.get(module.__name__, {}))
            for launch, found in zip(launches, self.hands.compile(module, launches), strict=True):
                label = _label(variant, launch.kernel, launch.sizes)
                if isinstance(found, str):
                    self._note(label, f"failed: {found}")
                elif found > MOST_SPILLS and launch.sizes != default[launch.kernel]:
                    self._note(label, f"spills {found} registers")
                elif launch.sizes not in left[launch.kernel]:
                    left[launch.kernel].append(launch.sizes)
        self._save(self.record)
        return left

    def _time_rounds(
        self, variant: Variant, op: CompiledOp, run: Callable[[], object], default: Assignment,
        choices: Mapping[str, Sequence[Sizes]],
    ) -> None:  # fmt: skip
        for assignment in rounds(choices):
            fresh = {n: s for n, s in assignment.items() if self._is_open(variant, n, s)}
            if not fresh:
                continue
            if self.is_over:
                return
            for name, sizes in fresh.items():
                self.record.tried[_label(variant, name, sizes)] = STARTED
            self._save(self.record)
            try:
                with sizes_set(modules_of(op), {**default, **assignment}):
                    times = self.hands.kernel_times(modules_of(op), run)
            except Exception as error:
                for name, sizes in fresh.items():
                    self._note(_label(variant, name, sizes), f"failed: {_short(error)}")
                continue
            for name, sizes in fresh.items():
                ms = times.get(name)
                self._note(_label(variant, name, sizes), "did not run" if ms is None else ms)
            self._save(self.record)

    def _fastest(self, variant: Variant, default: Assignment) -> Assignment:
        """The fastest sizes of each kernel that were timed."""
        out = dict(default)
        for name, sizes in default.items():
            times = {s: t for s, t in self._times(variant, name) if isinstance(t, float)}
            if not times:
                continue
            best = min(times, key=lambda s: times[s])
            if times[best] < MARGIN * times.get(sizes, float("inf")):
                out[name] = best
        return out

    def _times(self, variant: Variant, name: str) -> Iterator[tuple[Sizes, float | str]]:
        head = f"{variant} | {name} "
        for label, found in self.record.tried.items():
            if label.startswith(head):
                block, warps, stages = map(int, label.removeprefix(head).split(", "))
                yield (block, warps, stages), found

    def _right(
        self, variant: Variant, default: Assignment, changed: Assignment,
        owners: Mapping[str, tuple[str, str]],
    ) -> Assignment:  # fmt: skip
        """What of the changed sizes gives right numbers, all together."""

        def fault(part: Assignment) -> bool:
            launch = as_option({**default, **part}, owners) | variant.launch
            options = {**variant.changes, "launch": launch}
            return self._fault(f"{variant} | check {_listed(part)}", self._with(options))

        if not fault(changed):
            return changed
        kept = {n: s for n, s in changed.items() if not fault({n: s})}
        return kept if kept and not fault(kept) else {}

    # -- measurements -----------------------------------------------------------------------------
    def _whole(self, label: str, op: CompiledOp) -> float | None:
        try:
            ms = self.hands.whole_time(op, self.call(op))
        except Exception as error:
            self._note(label, f"failed: {_short(error)}")
            return None
        self._note(label, ms)
        return ms

    def _fault(self, label: str, op: CompiledOp) -> bool:
        try:
            found = self.hands.fault(op, self.call(op))
        except Exception as error:
            found = _short(error)
        if found:
            self._note(label, f"failed: {found}")
            self.say(f"{label}: {found}")
        return bool(found)

    def _note(self, label: str, found: float | str) -> None:
        self.record.tried[label] = found

    def _save(self, record: Record) -> Record:
        record.save()
        return record


@dataclass
class Seen:
    """Of one run: every kernel's first launch, and the tensors of every module."""

    launches: dict[str, Launched] = field(default_factory=dict)
    tensors: dict[ModuleType, tuple[tuple[Tensor, ...], Tensor | None]] = field(default_factory=dict)


@contextmanager
def watched(modules: Sequence[Any]) -> Iterator[Seen]:
    """Notes what these modules launch."""
    seen = Seen()
    originals = [(m, m.Call.launch) for m in modules]

    def watch(module: Any, original: Callable[..., None]) -> Callable[..., None]:
        def launch(
            call: Any, kernel: Any, programs: int, tensors: Any, tables: Any, scalars: Any, ratios: Any,
            more: Any, warps: int, stages: int,
        ) -> None:  # fmt: skip
            original(call, kernel, programs, tensors, tables, scalars, ratios, more, warps, stages)
            constants = tuple(call.constants(kernel, ratios, more).items())
            name = kernel.fn.__name__
            seen.launches.setdefault(name, Launched(name, programs, (), constants, warps, stages))
            seen.tensors.setdefault(module, (tuple(call.tensors), call.cu_seqlens))

        return launch

    try:
        for module, original in originals:
            module.Call.launch = watch(module, original)
        with paused():
            yield seen
    finally:
        for module, original in originals:
            module.Call.launch = original


@contextmanager
def sizes_set(modules: Sequence[Any], assignment: Mapping[str, Sizes]) -> Iterator[None]:
    """Modules with these sizes of their kernels."""
    before = [dict(m.SIZES) for m in modules]
    try:
        for module in modules:
            # a block of 0: the kernel has none, and what the tables say of it is of no account
            own = {n: (s[0] or None, *s[1:]) for n, s in assignment.items() if hasattr(module, n)}
            module.SIZES.update(own)
        with paused():  # what is replayed has the sizes of before
            yield
    finally:
        for module, sizes in zip(modules, before, strict=True):
            module.SIZES.clear()
            module.SIZES.update(sizes)


def modules_of(op: CompiledOp) -> list[Any]:
    """The Triton modules of an op, stage by stage."""
    return [stage.operator("triton").module for stage in op.stage_ops]


def owners_of(op: CompiledOp) -> dict[str, tuple[str, str]]:
    """(stage, kernel) of every kernel by its name in its module."""
    out = {}
    for stage, kernel, _ in op.plan.launch_names():
        for module, own in zip(modules_of(op), op.stage_ops, strict=True):
            if own.spec.name == stage:
                found = [
                    n for n in vars(module) if n.endswith(f"_{kernel}") and hasattr(vars(module)[n], "fn")
                ]
                out.update({n: (stage, kernel) for n in found if n not in out})
    return out


def is_few(shape: Mapping[str, int], device: torch.device) -> bool:
    """Whether one level leaves some of the device's multiprocessors without a program."""
    if device.type != "cuda":
        return shape["B"] * shape["H"] < 64
    units = torch.cuda.get_device_properties(device).multi_processor_count
    return 2 * shape["B"] * shape["H"] < units


def _label(variant: Variant, name: str, sizes: Sizes) -> str:
    return f"{variant} | {name} {', '.join(map(str, sizes))}"


def _listed(assignment: Mapping[str, Sizes]) -> str:
    return "; ".join(f"{n} {'/'.join(map(str, s))}" for n, s in assignment.items())


def _short(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 300 else f"{text[:300]} ..."
