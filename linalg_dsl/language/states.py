"""Which names are states, and the shapes of those that declare none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Shape
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.declarations import Entry, Names
from linalg_dsl.language.graph import components
from linalg_dsl.language.inference import infer
from linalg_dsl.language.mistakes import Mistakes
from linalg_dsl.language.names import DIMENSIONS, RESERVED
from linalg_dsl.language.spec import State
from linalg_dsl.language.terms import DEEPEST

MOST_STATES = 16
DEFAULT: Shape = ("K", "V")
"""The shape of a state about which nothing is known."""
Step = syn.Assign | syn.Loop


def find_states(steps: Sequence[Step], names: Names, states: dict[str, State], mistakes: Mistakes) -> bool:
    """Enters the states that are not declared into both tables; False if there are too many.

    A state is what some equation reads at t - 1 and what depends on that value itself, straight or
    through other names.
    """
    reads: dict[str, set[tuple[str, int]]] = {}
    for name, found in _reads(steps):
        reads.setdefault(name, set()).update(found)
    together = components({name: {n for n, _ in found} for name, found in reads.items()})
    carried = {
        other
        for name, found in reads.items()
        for other, time in found
        if time < 0 and together.get(other) == together[name]
    }
    if not carried and not states:  # S_t = S_t + ... is a slip, and S a state all the same
        carried = {name for name, found in reads.items() if (name, 0) in found}
    for assign in assigns_of(steps):
        name = assign.name
        if name not in carried or name in names.entries or name in RESERVED:
            continue
        if names.declare(name, Entry("state", None, assign.span)):
            states[name] = State(name, (), span=assign.span)
    if len(states) > MOST_STATES:
        place = list(states.values())[MOST_STATES].span
        mistakes.add("E107", f"more than {MOST_STATES} states", place, "one text holds one recurrence")
        return False
    return True


def _reads(steps: Sequence[Step]) -> Iterator[tuple[str, set[tuple[str, int]]]]:
    """What every equation reads, with its time; what a substep reads of the one before is past."""
    for step in steps:
        body = (step,) if isinstance(step, syn.Assign) else step.body
        later = {a.name for a in body} if isinstance(step, syn.Loop) else set()
        for assign in body:
            times = {(r.name, r.index.time or 0) for r in syn.refs(assign.value) if r.index}
            yield assign.name, {(n, -1 if n in later and time == 0 else time) for n, time in times}
            later.discard(assign.name)


def assigns_of(steps: Sequence[Step]) -> list[syn.Assign]:
    """All equations, those in loops included."""
    return [a for s in steps for a in ((s,) if isinstance(s, syn.Assign) else s.body)]


def infer_shapes(steps: Sequence[Step], names: Names, states: dict[str, State], use_default: bool) -> bool:
    """Gives every state a shape that has none yet: what its update shows, or the default.

    Returns whether the only state shows another shape than the default.
    """
    equations = [(a.name, a.value) for a in assigns_of(steps) if a.value.depth <= DEEPEST]

    def declared_shape(ref: syn.Ref) -> Shape | None:
        entry = names.entries.get(ref.name)
        if ref.name in DIMENSIONS:
            return ex.SCALAR
        if entry is None or entry.role == "state":
            return None
        if ref.index and ref.index.row is not None:
            return (entry.dims[1], 1) if len(entry.dims) == 2 else ex.SCALAR
        return entry.shape

    found = infer(equations, declared_shape, {name: names.entries[name].shape for name in states})
    for name, inferred in found.items():
        shape = DEFAULT if use_default else inferred
        dims = tuple(d for d in shape if d != 1) if 1 in shape else shape
        states[name] = replace(states[name], dims=dims)
        names.entries[name] = replace(names.entries[name], shape=shape, dims=dims)
    return len(states) == 1 and any(shape != DEFAULT for shape in found.values())
