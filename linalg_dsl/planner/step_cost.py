"""FLOPs and bytes of one token of a step class, per head, counted on its plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from linalg_dsl.planner.ops import OPS, Axes, ordered
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.planner.step_values import dimension

INTERVAL = 32
"""Tokens between two saved states, to count what they cost."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Per token and head. ``state``: bytes of all states in float32."""

    key: int
    value: int
    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    state: int

    def lines(self, B: int | None = None, T: int | None = None, H: int | None = None) -> tuple[str, ...]:
        found = [
            f"per token and head, K = {self.key}, V = {self.value}; operands bf16, gates and states fp32",
            f"forward: {self.forward_flops:,.0f} FLOP, {self.forward_bytes:,.0f} bytes",
            f"backward: {self.backward_flops:,.0f} FLOP with the states replayed, {self.backward_bytes:,.0f} "
            f"bytes, of which {self.state / INTERVAL:,.0f} of the states saved every {INTERVAL} tokens",
            f"decode, one token: {2 * self.state:,} bytes of state read and written",
            f"on chip: states {self.state / 1024:,.1f} KiB per head in fp32",
        ]
        if B is not None and T is not None and H is not None:
            tokens = B * T * H
            found.append(
                f"for B = {B}, T = {T}, H = {H}: {T} steps one after the other in {B * H} sequences of one "
                f"head; forward {self.forward_flops * tokens / 1e9:,.3g} GFLOP and "
                f"{self.forward_bytes * tokens / 1e6:,.3g} MB, backward "
                f"{self.backward_flops * tokens / 1e9:,.3g} GFLOP and "
                f"{self.backward_bytes * tokens / 1e6:,.3g} MB"
            )
        return tuple(found)


def step_cost(
    form: StepForm, forward: ChunkPlan, backward: ChunkPlan, key: int, value: int, element_bytes: int = 2
) -> StepCost:
    """Products and elementwise work count alike: both run on the same units here."""
    spec = form.spec
    numbers = dict(form.consts)
    sizes = {"K": key, "V": value}
    for decl in spec.inputs:
        sizes |= {str(d): int(numbers.get(str(d), 0) or d) for d in decl.dims if d not in ("K", "V")}
    gates = {i.name for i in spec.inputs if i.kind != "plain"}
    moved = {
        i.name: _size(tuple(map(str, i.dims)), sizes) * (4 if i.name in gates else element_bytes)
        for i in spec.inputs
    }
    given = sum(moved[i.name] for i in spec.inputs if i.timed)
    out = sum(_size(forward.nodes[n].axes, sizes) * element_bytes for _, n in forward.outputs)
    state = int(sum(4 * _size(forward.nodes[leaf].axes, sizes) for _, _, leaf, _ in forward.carries))
    states = [after for _, _, _, after in forward.carries]
    return StepCost(
        key,
        value,
        _flops(forward, sizes, forward.roots),
        _flops(backward, sizes, backward.roots) + _flops(forward, sizes, states),
        given + out,
        3 * given + out + state / INTERVAL,
        state,
    )


def _size(axes: Axes, sizes: Mapping[str, int]) -> float:
    return float(prod(sizes.get(dimension(a), 1) for a in axes))


def _flops(plan: ChunkPlan, sizes: Mapping[str, int], roots: object) -> float:
    total = 0.0
    for i in plan.live(roots):  # type: ignore[arg-type]
        node = plan.nodes[i]
        operands = ordered(a for x in node.args for a in plan.nodes[x].axes)
        if OPS[node.op].kind == "leaf" or node.op in ("expand", "swap", "first"):
            continue
        if node.op == "contract":
            total += 2 * _size(operands, sizes)
        elif node.op in ("sum", "amax"):
            total += _size(operands, sizes)
        else:
            total += _size(node.axes, sizes)
    return total
