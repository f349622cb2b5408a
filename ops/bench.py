"""Times and memory of compiled ops, beside the time that their FLOPs and bytes alone would take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.draw import GateKind, draw
from linalg_dsl.ops.peers import attention_call, peer_call
from linalg_dsl.ops.replay import paused
from linalg_dsl.planner.work import Work, attention_work, total

if TYPE_CHECKING:
    from linalg_dsl.codegen.targets import Target
    from linalg_dsl.ops.bench_check import Verdict
    from linalg_dsl.ops.op import CompiledOp

PASSES = ("forward", "training", "decode")
"""A forward without gradients; a forward and the gradients of all inputs, from a gradient of the output; one
token of every sequence by ``op.step`` (whatever T is)."""
USUAL = ("forward", "training")
DRAWN = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a dense call."""

    B: int
    T: int
    H: int
    K: int
    V: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does: FLOPs of a large matrix product and bytes of a large copy, per second."""

    flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of a call: the median, and the values that a fifth of the calls are below and above."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. ``peak`` bytes of memory beyond the inputs (None on the CPU, where it is not counted).

    ``ms``, ``low``, ``high``: of a call; ``graph``: of its replay as a CUDA graph, which is the time of the
    device alone (None where there is none); ``predicted``: what the model says to that. ``flops`` and
    ``moved``: FLOPs and bytes of the plan, whatever the schedule; ``flop_share`` and ``byte_share``: the part
    of the device's time (else of a call's) that each alone would take at its rates. ``verdict``: of a check
    in the same run, where one was asked for.
    """

    operator: str
    passes: str
    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: str
    device: str
    backend: str
    ms: float
    low: float
    high: float
    peak: int | None
    launches: int | None
    flops: float
    moved: float
    flop_share: float
    byte_share: float
    graph: float | None = None
    predicted: float | None = None
    verdict: str | None = None
    right: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inputs_of(
    spec: RecurrenceSpec, shape: Shape, dtype: torch.dtype, device: torch.device, gates: GateKind = "mild"
) -> dict[str, Tensor]:
    """Random inputs: gates and scalars in float32, what has an axis K or V in ``dtype``.

    The first ``DRAWN`` tokens are drawn, and repeated where there are more, or more sequences.
    """
    few = min(shape.T, DRAWN)
    given = {**asdict(shape), "B": min(shape.B, 1), "T": few}
    drawn = draw(spec, **given, dtype=torch.float64, gates=gates)
    times = (shape.B, -(-shape.T // few) if few else 1)
    timed = {d.name: d.timed for d in spec.inputs}
    kinds = {
        d.name: torch.float32 if d.kind != "plain" or not {"K", "V"} & set(d.dims) else dtype
        for d in spec.inputs
    }
    least = torch.float64 if dtype == torch.float64 else None
    out = {}
    for n, x in drawn.items():
        x = x.to(device, least or kinds[n])
        # a call of millions of tokens would take longer to draw than to measure
        out[n] = x.repeat(*times, *(1 for _ in x.shape[2:]))[:, : shape.T].contiguous() if timed[n] else x
    return out


def time_call(run: Callable[[], object], device: torch.device, budget: float = 0.2) -> Times:
    """Times of a call, measured for about ``budget`` seconds after it has warmed up."""
    run()
    if device.type == "cuda":
        from triton.testing import do_bench

        low, median, high = do_bench(run, rep=round(1000 * budget), quantiles=[0.2, 0.5, 0.8])
        return Times(median, low, high)
    from torch.utils.benchmark import Timer

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    found = sorted(1000 * t for t in timer.blocked_autorange(min_run_time=budget).times)
    at = [found[round(q * (len(found) - 1))] for q in (0.5, 0.2, 0.8)]
    return Times(*at)


RATES_SIZES = {"cuda": (8192, 1 << 30), "cpu": (768, 1 << 26)}
"""What rates are measured by: rows of the square matrices, bytes of the copy."""


def device_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measured now, by a product of square matrices and a copy."""
    size, count = RATES_SIZES["cuda" if device.type == "cuda" else "cpu"]
    a = torch.randn(size, size, device=device).to(dtype)
    x = torch.empty(count, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    product = time_call(lambda: a @ a, device).median
    copy = time_call(lambda: y.copy_(x), device).median
    return Rates(2 * size**3 / product * 1000, 2 * count / copy * 1000)


def work_of_op(op: CompiledOp, shape: Shape, dtype: torch.dtype) -> Work:
    """Per token and head, the stages of a recurrence together."""
    size = dtype.itemsize
    return total(plan.work(key, value, size) for plan, key, value in op.plan.sized_stages(shape.K, shape.V))


def measure_op(
    op: CompiledOp,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    passes: Sequence[str],
    rates: Rates,
    budget: float = 0.2,
    target: Target | None = None,
    check: bool = False,
) -> Iterator[Row]:
    """A row for every pass; with ``target`` what the model says, with ``check`` a verdict on the numbers."""
    tensors = inputs_of(op.spec, shape, dtype, device)
    backend = op.backend_for(device.type, dtype == torch.float64)
    name = op.spec.name if op.options.schedule == "walk" else f"{op.spec.name} ({op.options.schedule})"
    place = _Place(name, shape, dtype, device, backend, rates, budget)
    launches = op.plan.launches() if backend == "triton" else None
    if target is not None and backend == "triton":
        place = replace(place, predicted=predicted_times(op, shape, dtype, target))
    if check:
        from linalg_dsl.ops.bench_check import verdict

        place = replace(place, verdict=verdict(op, tuple(tensors.values()), dtype))

    def call(*given: Tensor) -> Tensor:
        out: Tensor = op(*given)
        return out

    if "decode" in _known(passes):
        yield place.row(
            "decode", _decode(op, tensors, shape, device), *_decode_floors(op, shape, dtype), None
        )
    yield from _rows(call, tuple(tensors.values()), place, passes, work_of_op(op, shape, dtype), launches)


def measure_peers(
    specs: Mapping[str, RecurrenceSpec],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    passes: Sequence[str],
    rates: Rates,
    budget: float = 0.2,
) -> Iterator[Row]:
    """Rows for causal softmax attention, and on a GPU for fla-core's operators where it is installed."""
    q, k = (torch.randn(shape.B, shape.T, shape.H, shape.K, device=device).to(dtype) for _ in range(2))
    v = torch.randn(shape.B, shape.T, shape.H, shape.V, device=device).to(dtype)
    work = attention_work(shape.T, shape.K, shape.V, dtype.itemsize)
    place = _Place("attention (SDPA)", shape, dtype, device, "torch", rates, budget)
    yield from _rows(attention_call, (q, k, v), place, passes, work, None)
    for name, spec in specs.items() if device.type == "cuda" else ():
        tensors = inputs_of(spec, shape, dtype, device)
        run = peer_call(name)
        if run is not None:
            place = _Place(f"{name} (fla)", shape, dtype, device, "fla", rates, budget)
            yield from _rows(run, tuple(tensors.values()), place, passes, Work(), None)


@dataclass(frozen=True, slots=True)
class _Place:
    """What the rows of one operator have in common."""

    operator: str
    shape: Shape
    dtype: torch.dtype
    device: torch.device
    backend: str
    rates: Rates
    budget: float
    predicted: tuple[float, float] | None = None
    """Milliseconds of a forward and of a backward."""
    verdict: Verdict | None = None

    def row(
        self, passes: str, run: Callable[[], object], flops: float, moved: float, launches: int | None
    ) -> Row:
        times = time_call(run, self.device, self.budget)
        replay = graph_of(run, self.device)
        graph = None if replay is None else time_call(replay, self.device, self.budget).median
        seconds = (graph or times.median) / 1000
        predicted = None
        if self.predicted is not None and passes != "decode":
            predicted = self.predicted[0] if passes == "forward" else sum(self.predicted)
        del replay
        return Row(
            operator=self.operator,
            passes=passes,
            **asdict(self.shape),
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            backend=self.backend,
            ms=times.median,
            low=times.low,
            high=times.high,
            peak=_peak(run, self.device),
            launches=launches,
            flops=flops,
            moved=moved,
            flop_share=flops / self.rates.flops / seconds,
            byte_share=moved / self.rates.bandwidth / seconds,
            graph=graph,
            predicted=predicted,
            verdict=None if self.verdict is None else str(self.verdict),
            right=None if self.verdict is None else self.verdict.ok,
        )


def predicted_times(
    op: CompiledOp, shape: Shape, dtype: torch.dtype, target: Target
) -> tuple[float, float] | None:
    """Milliseconds of a forward and of a backward by the model; None where it knows nothing of some stage."""
    times = {"forward": 0.0, "backward": 0.0}
    kind = str(dtype).removeprefix("torch.")
    for plan, key, value in op.plan.sized_stages(shape.K, shape.V):
        found = plan.predictions(shape.B, shape.T, shape.H, key, value, kind, target)
        if not found:
            return None
        for phase, _, prediction in found:
            times[phase] += prediction.microseconds / 1000
    return times["forward"], times["backward"]


def _known(passes: Sequence[str]) -> Sequence[str]:
    if unknown := [p for p in passes if p not in PASSES]:
        raise ArgumentError(f"a pass is one of {', '.join(PASSES)}, got {unknown[0]!r}")
    return passes


def _rows(
    call: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    place: _Place,
    passes: Sequence[str],
    work: Work,
    launches: tuple[int, int] | None,
) -> Iterator[Row]:
    lanes = place.shape.B * place.shape.T * place.shape.H
    ahead, behind = launches or (0, 0)
    for one in _known(passes):
        if one == "forward":
            flops, moved = lanes * work.forward_flops, lanes * work.forward_bytes
            yield place.row(one, forward_call(call, tensors), flops, moved, ahead or None)
        elif one == "training":
            flops = lanes * work.training_flops
            moved = lanes * (work.forward_bytes + work.backward_bytes)
            yield place.row(one, training_call(call, tensors), flops, moved, ahead + behind or None)


def _decode(
    op: CompiledOp, tensors: Mapping[str, Tensor], shape: Shape, device: torch.device
) -> Callable[[], object]:
    """One token of every sequence, the states in place."""
    one = {d.name: tensors[d.name][:, :1] if d.timed else tensors[d.name] for d in op.spec.inputs}
    state = op.new_state(shape.B, shape.H, shape.K, shape.V, device=device)

    def run() -> object:
        return op.step(**one, state=state)

    return run


def _decode_floors(op: CompiledOp, shape: Shape, dtype: torch.dtype) -> tuple[float, float]:
    """FLOPs and bytes of one token of every sequence: chunks of one, and the states read and written."""
    size = dtype.itemsize
    work = total(plan.work(k, v, size, chunk=1) for plan, k, v in op.plan.sized_stages(shape.K, shape.V))
    lanes = shape.B * shape.H
    return lanes * work.forward_flops, lanes * (work.forward_bytes + 2 * work.state)


def forward_call(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Callable[[], object]:
    """A forward without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            return call(*tensors)

    return run


def training_call(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Callable[[], object]:
    """A forward, and the gradients of all tensors from one of the output."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in tensors)
    weights = torch.randn_like(call(*leaves))

    def run() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(call(*leaves), leaves, weights, allow_unused=True)

    return run


def _peak(run: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measured_kernels(
    op: CompiledOp, shape: Shape, dtype: torch.dtype, device: torch.device, target: Target
) -> Iterator[dict[str, Any]]:
    """Every launch of a training step of a chunk form: phase, kernel, microseconds alone, predicted ones.

    ``features``: what the model of preps multiplies its constants by, where it is one.
    """
    tensors = tuple(inputs_of(op.spec, shape, dtype, device).values())
    run = training_call(lambda *given: op(*given), tensors)
    kind = str(dtype).removeprefix("torch.")
    modules = [stage.operator("triton").module for stage in op.stage_ops]
    times: dict[str, list[float]] = {}
    for name, ms in launch_times(modules, run, device, 0.05):
        times.setdefault(name, []).append(ms)
    for plan, key, value in op.plan.sized_stages(shape.K, shape.V):
        found = plan.predictions(shape.B, shape.T, shape.H, key, value, kind, target)
        for phase, kernel, prediction in found:
            own = next((n for n in times if n.endswith(f"_{kernel}") and times[n]), None)
            if own is not None:
                us = 1000 * times[own].pop(0)
                yield {
                    "phase": phase, "kernel": own, "us": us, "predicted": prediction.microseconds,
                    "bound": prediction.bound, "flops": prediction.flops, "moved": prediction.moved,
                    "features": prediction.features,
                }  # fmt: skip


def kernel_times(module: Any, run: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    """Median milliseconds of every launch of one run of a generated Triton module, each repeated alone."""
    return launch_times([module], run, device)


def launch_times(
    modules: Sequence[Any], run: Callable[[], object], device: torch.device, budget: float = 0.2
) -> list[tuple[str, float]]:
    """Median milliseconds of every launch of these modules in one run, each repeated alone."""
    originals = [(module, module.Call.launch) for module in modules]
    found: list[tuple[str, Callable[[], object]]] = []

    def recorder(original: Callable[..., None]) -> Callable[..., None]:
        def record(call: Any, kernel: Any, *rest: Any) -> None:
            original(call, kernel, *rest)
            found.append((kernel.fn.__name__, lambda: original(call, kernel, *rest)))

        return record

    try:
        for module, original in originals:
            module.Call.launch = recorder(original)
        with paused():
            run()
    finally:
        for module, original in originals:
            module.Call.launch = original
    return [(name, time_call(again, device, budget).median) for name, again in found]


def graph_of(run: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """A replay of ``run`` as a CUDA graph; None where there is no GPU, or it cannot be captured."""
    if device.type != "cuda":
        return None
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()
    except RuntimeError:  # something in it waits for the device
        torch.cuda.synchronize(device)
        return None

    def replay() -> object:
        graph.replay()
        return kept

    return replay
