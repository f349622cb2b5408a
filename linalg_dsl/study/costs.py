"""What a compiled recurrence costs per token and head, added up over its stages."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from linalg_dsl.algebra.expr import Dim, Number
from linalg_dsl.codegen.schedule.describe import chosen_chunk
from linalg_dsl.planner.cost import flops, state_bytes, traffic
from linalg_dsl.planner.step_cost import step_cost
from linalg_dsl.planner.step_form import StepForm

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp
    from linalg_dsl.ops.plan_view import StagePlan


@dataclass(frozen=True)
class Costs:
    """Per token and head; bytes with operands in two bytes, gates and states in four; ``state`` in bytes."""

    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    state: int

    def __add__(self, other: Costs) -> Costs:
        return Costs(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def costs(op: CompiledOp, K: int, V: int, dtype: str = "bfloat16", target: str = "sm_90") -> Costs:
    """The counts that ``explain`` prints, at the chunk size that the launcher takes on ``target``."""
    known: dict[Dim, int] = {"K": K, "V": V}
    known |= {c.name: int(c.value.value) for c in op.spec.consts if isinstance(c.value, Number)}
    found = []
    for plan, stage in zip(op.plan.stages, op.stages.stages, strict=True):
        axes = {"K": "K", "V": "V", **dict(stage.axes)}
        key, value = (known.get(axes[a], 1) if isinstance(axes[a], str) else int(axes[a]) for a in ("K", "V"))
        found.append(_stage(plan, key, value, dtype, target))
    return sum(found[1:], start=found[0])


def _stage(plan: StagePlan, key: int, value: int, dtype: str, target: str) -> Costs:
    form = plan.artefacts.form
    if isinstance(form, StepForm):
        found = step_cost(form, plan.forward, plan.backward, key, value)
        return Costs(
            found.forward_flops, found.backward_flops, found.forward_bytes, found.backward_bytes, found.state
        )
    chunk = plan.chunk_size or chosen_chunk(plan.kernels, K=key, V=value, dtype=dtype, target=target)
    gates = frozenset(i.name for i in form.spec.inputs if i.kind != "plain")
    return Costs(
        flops(plan.forward, chunk, key, value).total,
        flops(plan.backward, chunk, key, value, at_hand=plan.forward).total,
        traffic(plan.forward, chunk, key, value, gates=gates).total,
        traffic(plan.backward, chunk, key, value, gates=gates, saves_states=True).total,
        state_bytes(plan.forward, key, value),
    )
