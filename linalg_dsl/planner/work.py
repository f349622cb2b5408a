"""Work and traffic of a recurrence per token and head, beside those of causal softmax attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from linalg_dsl.planner.cost import flops, state_bytes, traffic
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.step_cost import step_cost
from linalg_dsl.planner.step_form import StepForm

_SHORT = 2
"""Bytes of an element of q, k, v and o, in bfloat16 or float16."""


@dataclass(frozen=True, slots=True)
class Work:
    """Per token and head: FLOPs and bytes of a forward, of a backward that computes again what it needs, and
    the bytes of the states in float32."""

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    state: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def training_flops(self) -> float:
        return self.forward_flops + self.backward_flops


def work_of(
    form: CanonicalRecurrence | StepForm,
    forward: ChunkPlan,
    backward: ChunkPlan,
    chunk: int,
    key: int,
    value: int,
    element_bytes: int = _SHORT,
) -> Work:
    """The work of a plan in chunks of ``chunk`` tokens; a step form has none, and takes no notice of it.

    ``element_bytes``: of an element of what has an axis K or V and is no gate.
    """
    if isinstance(form, StepForm):
        found = step_cost(form, forward, backward, key, value, element_bytes)
        return Work(
            found.forward_flops, found.backward_flops, found.forward_bytes, found.backward_bytes, found.state
        )
    gates = frozenset(i.name for i in form.spec.inputs if i.kind != "plain")
    return Work(
        flops(forward, chunk, key, value).total,
        flops(backward, chunk, key, value).total,
        traffic(forward, chunk, key, value, element_bytes=element_bytes, gates=gates).total,
        traffic(
            backward, chunk, key, value, element_bytes=element_bytes, gates=gates, saves_states=True
        ).total,
        state_bytes(forward, key, value),
    )


def total(parts: Iterable[Work]) -> Work:
    return sum(parts, Work())


def attention_work(length: int, key: int, value: int, element_bytes: int = _SHORT) -> Work:
    """Causal softmax attention over ``length`` tokens, scores never in memory (arXiv 2205.14135).

    Two products of the half of all pairs that is causal, five in the backward; what the softmax itself costs
    is left out. ``state``: the cache of keys and values for decoding.
    """
    pairs = (length + 1) / 2
    moved = element_bytes * 2 * (key + value)
    return Work(
        2 * (key + value) * pairs,
        2 * (3 * key + 2 * value) * pairs,
        moved,
        2 * moved,
        element_bytes * length * (key + value),
    )


def crossover(work: Work, key: int, value: int) -> tuple[float, float]:
    """The lengths from which on softmax attention takes more FLOPs: in a forward, and in training."""
    one = attention_work(1, key, value)
    return (
        2 * work.forward_flops / one.forward_flops - 1,
        2 * work.training_flops / one.training_flops - 1,
    )
