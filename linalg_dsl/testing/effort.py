"""How long a draw may be where kernels run in Triton's interpreter, which takes a fraction of a millisecond
for every operation of every program: what a call costs there follows from its plans and its sizes."""

from __future__ import annotations

from functools import lru_cache

from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.testing.subject import Subject

CHUNK = 32
"""Tokens of a chunk of float32 kernels (``codegen.schedule.table``), where precision asks for no fewer."""
TOKEN = 0.25
"""What an op costs in a kernel that goes token after token, as a part of one in a chunk's: it has one row."""
EFFORT = 800.0
"""Ops of plans, forward and backward, times chunks, that a call may have: half a second."""


def is_interpreted(subject: Subject) -> bool:
    """Whether the kernels of an op run in Triton's interpreter."""
    return subject.op is not None and subject.bitwise and subject.device == "cpu"


def tokens_of_a_chunk(subject: Subject, K: int, V: int) -> int:
    """The fewest tokens that a chunk of some stage has at these sizes."""
    assert subject.op is not None
    return min([CHUNK, *(_shortened(most, K if axis == "K" else V) for _, axis, most in _stages(subject.op))])


def _shortened(most: tuple[int, ...], channels: int) -> int:
    return most[channels - 1] if most and 0 < channels <= len(most) else CHUNK


def effort(subject: Subject, lanes: int, length: int, K: int, V: int) -> float:
    """What a call and its gradients cost, in ops times chunks; ``lanes`` are sequences times heads."""
    assert subject.op is not None
    total = 0.0
    for ops, axis, most in _stages(subject.op):
        chunk = _shortened(most, K if axis == "K" else V)
        total += ops * (TOKEN * length if axis == "" else -(-length // chunk))
    return lanes * total


def affordable(
    subject: Subject, lanes: int, length: int, K: int, V: int, *, part: float = 1.0, least: int = 1
) -> int:
    """At most so many tokens, and no more than a call may take by ``part`` of ``EFFORT``, but one token of a
    further chunk after ``least`` whole ones in any case: a boundary is there to be seen. The length itself
    where no interpreter is at work."""
    if not is_interpreted(subject):
        return length
    shortest = min(length, least * tokens_of_a_chunk(subject, K, V) + 1)
    while length > shortest and effort(subject, lanes, length, K, V) > part * EFFORT:
        length -= 1
    return length


@lru_cache(maxsize=64)
def _stages(op: CompiledOp) -> tuple[tuple[int, str, tuple[int, ...]], ...]:
    """Of every stage: how many ops its plans have; the axis that is erased along, "" of token after token;
    ``planner.precision``'s limits to the length of chunks."""
    found: list[tuple[int, str, tuple[int, ...]]] = []
    for stage in op.stage_ops:
        made = stage.artefacts()
        ops = len(made.forward.nodes) + len(made.backward.nodes)
        if isinstance(made.form, StepForm):
            found.append((ops, "", ()))
        else:
            found.append((ops, str(made.precision.axis), made.precision.shortest))
    return tuple(found)
