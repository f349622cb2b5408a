"""Ops that are tuned where they are called, and what ``linalg-dsl tune`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linalg_dsl.codegen.launch_sizes import joined, read_launches
from linalg_dsl.ops.bench import Shape, forward_call, inputs_of, training_call
from linalg_dsl.ops.first_use import compiles
from linalg_dsl.ops.launched import Use
from linalg_dsl.ops.selfcheck import device_name, lanes_class
from linalg_dsl.ops.tune import Hands, Say, Search, is_few, modules_of
from linalg_dsl.ops.tune_record import Record, ShapeClass, dtype_names, length_class, load_record
from linalg_dsl.ops.tune_space import Variant, variants
from linalg_dsl.planner.step_form import StepForm

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp
    from linalg_dsl.ops.plan_view import StagePlan

BUDGET = 120.0
"""Seconds of a search that nobody gave a budget."""


def shape_class(
    op: CompiledOp,
    tensors: Sequence[Tensor],
    sizes: Mapping[str, int],
    packed: bool,
    passes: str,
    device: torch.device,
) -> ShapeClass:
    """That of a call with these tensors; ``sizes``: B, T, H, K, V."""
    counts = [x.shape[2 if d.timed else 0] for x, d in zip(tensors, op.spec.inputs, strict=True)]
    heads = max(counts)
    units = int(modules_of(op)[0].device_limits(device)[0])
    lanes = lanes_class(sizes["B"] * heads, units)
    ratios = tuple(heads // n for n in counts)
    length = length_class(sizes["T"])
    return ShapeClass(lanes, length, sizes["K"], sizes["V"], dtype_names(tensors), ratios, packed, passes)


def record_of(op: CompiledOp, shape: ShapeClass, device: torch.device) -> Record:
    """What is known of this op (without its own wish to be tuned) for a shape class on a device."""
    texts = "\0".join(stage.module_text("triton") for stage in op.stage_ops)
    return load_record(texts, shape, device_name(device))


def tune_op(
    op: CompiledOp,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    passes: str = "training",
    budget: float = BUDGET,
    hands: Hands | None = None,
    say: Say = print,
    tensors: Sequence[Tensor] | None = None,
) -> Record:
    """Searches for one shape, or goes on with a search; the record says what won (``Search``).

    ``tensors``: of the call, by default random ones. Raises ``RuntimeError`` where even the default fails.
    """
    plain = op.with_options(tune=False)
    if tensors is None:
        tensors = tuple(inputs_of(op.spec, shape, dtype, device).values())
    record = record_of(plain, shape_class(plain, tensors, asdict(shape), False, passes, device), device)
    if record.finished:
        say("known from an earlier search")
        return record
    if hands is None:
        from linalg_dsl.ops.tune_hands import GpuHands

        hands = GpuHands(check_sizes(shape), dtype, device)
    make = training_call if passes == "training" else forward_call

    def call(candidate: CompiledOp) -> Callable[[], object]:
        def run(*given: Tensor) -> Tensor:
            out: Tensor = candidate(*given)
            return out

        return make(run, tuple(tensors))

    search = Search(plain, call, Use(save=passes == "training"), hands, record, budget, say)
    return search.run(variants_of(plain, shape, device))


def check_sizes(shape: Shape) -> dict[str, int]:
    """A short case with this K and V: three chunks of 128 and a ragged one for the step loop."""
    return {"B": 1, "T": 401, "H": 2, "K": shape.K, "V": shape.V}


def variants_of(op: CompiledOp, shape: Shape, device: torch.device) -> tuple[Variant, ...]:
    """The plans that are tried for a shape."""
    from linalg_dsl.codegen.schedule.describe import chosen_chunk
    from linalg_dsl.codegen.schedule.two_level import why_one_level

    stages = list(op.plan.sized_stages(shape.K, shape.V))
    if any(isinstance(plan.artefacts.form, StepForm) for plan, _, _ in stages):
        return (Variant(),)  # there are no chunks, or not in every stage
    plan, key, value = stages[0]
    chunk = chosen_chunk(plan.kernels, K=key, V=value, dtype="bfloat16")
    two = not any(why_one_level(plan.kernels.plan) for plan, _, _ in stages)
    asked = op.options.chunk_size is not None
    few = is_few(asdict(shape), device)
    return variants(chunk, asked, op.options.schedule, few, two, *loads_of_walks(op, stages, device))


def loads_of_walks(
    op: CompiledOp, stages: Sequence[tuple[StagePlan, int, int]], device: torch.device
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The walks tried by descriptors where the device has such copies, and those tried by pointers.

    Where descriptors are the default for walks that they may pay for, these by pointers and all by
    descriptors; elsewhere these by descriptors, then all.
    """
    from linalg_dsl.codegen.schedule.descriptors import CAPABLE, DEFAULT, pays

    asked = any(sizes.tma is not None for _, sizes in op.options.launch)
    major = modules_of(op)[0].architecture(device)
    if asked or major not in CAPABLE:
        return (), ()
    kernels = [p.kernels for p, _, _ in stages]
    walks = [(p, k) for p in kernels for k in (*p.forward, *p.backward) if k.family == "walk"]
    some = tuple(dict.fromkeys(k.name for p, k in walks if pays(p, k)))
    return (("walk",), some) if major in DEFAULT else ((*some, "walk"), ())


class Tuner:
    """Of one op with ``tune=True``: gives for every call the op that is fastest for its shape class."""

    def __init__(self, op: CompiledOp) -> None:
        self.plain = op.with_options(tune=False)
        self._found: dict[tuple[object, ...], CompiledOp] = {}

    def op_for(
        self, tensors: Sequence[Tensor], sizes: Mapping[str, int], offsets: Tensor | None
    ) -> CompiledOp:
        """The op for such a call; the first of a class on a GPU waits for the search.

        Packed sequences take what is found for one sequence of as many tokens.
        """
        device = tensors[0].device
        if torch.compiler.is_compiling() or not compiles(device):
            return self.plain
        passes = "training" if torch.is_grad_enabled() else "forward"
        key = (device, passes, *((x.shape, x.dtype) for x in tensors))
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = applied(self.plain, self._search(tensors, sizes, passes))
        return found

    def _search(self, tensors: Sequence[Tensor], sizes: Mapping[str, int], passes: str) -> Record:
        from linalg_dsl.ops.tune_worker import Job, known, tune_apart

        shape = Shape(sizes["B"], sizes["T"], sizes["H"], sizes.get("K", 1), sizes.get("V", 1))
        heads = tuple(
            x.shape[2 if d.timed else 0] for x, d in zip(tensors, self.plain.spec.inputs, strict=True)
        )
        kinds = tuple(x.dtype for x in tensors)
        job = Job(self.plain, shape, heads, kinds, str(tensors[0].device), passes, BUDGET)
        record = known(job, self.plain)
        if record.best is not None:  # found, or as far as a search came
            return record
        return tune_apart(job, say=lambda text: None)


def applied(op: CompiledOp, record: Record) -> CompiledOp:
    """The op with what a search has found."""
    best = dict(record.best or {})
    if not best:
        return op
    if "launch" in best:
        best["launch"] = joined(read_launches(best["launch"]), op.options.launch)
    return op.with_options(**best)
