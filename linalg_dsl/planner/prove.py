"""Proof for small sizes that the chunk form equals the recurrence, and its backward the gradient.

The recurrence is stepped as the spec has it, the plans are evaluated entry by entry, both over indeterminates
(``algebra.exact``). Every entry of every output and of the state after the chunk must agree identically;
every entry of the backward plan must be the derivative of sum do o o + sum dS_C o S_C, taken of the stepped
recurrence. Nothing of the planner is used on the side of the recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as cartesian

from linalg_dsl.algebra.exact import Value
from linalg_dsl.errors import InternalError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.adjoint import gradient_name
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.exact_plan import PlanEntries
from linalg_dsl.planner.exact_step import Leaves, Matrix, step_through
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan


@dataclass(frozen=True)
class Proof:
    """What was compared, and which entries differ: none, or it is no proof."""

    name: str
    tokens: int
    K: int
    V: int
    entries: int
    gradients: int
    differing: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.differing

    def __str__(self) -> str:
        size = f"chunk of {self.tokens}, K = {self.K}, V = {self.V}"
        of = f"{self.entries} entries" + (f" and {self.gradients} gradients" if self.gradients else "")
        if self.holds:
            what = "chunk form = recurrence" + (", backward plan = its gradient" if self.gradients else "")
            return f"{what}, identically in all inputs and the state at the start ({size}; {of})"
        shown = ", ".join(self.differing[:4]) + (", …" if len(self.differing) > 4 else "")
        return f"not proved ({size}): {len(self.differing)} of {of} differ: {shown}"


def prove(
    recurrence: RecurrenceSpec | CanonicalRecurrence,
    chunk: int = 3,
    K: int = 2,
    V: int = 1,
    forward: ChunkPlan | None = None,
    backward: ChunkPlan | None = None,
) -> Proof:
    """Compares a forward plan, by default the one derived here, with the recurrence over one chunk.

    With ``backward`` its gradients are compared too. Sizes are meant to be small: the work grows like
    (chunk K)^chunk.
    """
    canonical = canonicalise(recurrence) if isinstance(recurrence, RecurrenceSpec) else recurrence
    if not canonical.spec.updates:
        raise InternalError(f"{canonical.spec.name} has no equations to prove anything about")
    plan = derive(canonical) if forward is None else forward
    leaves = Leaves(canonical, {"K": K, "V": V})
    sizes = {"K": K, "V": V, "t": chunk, "s": chunk}
    stepped = step_through(canonical.spec, leaves, chunk)
    (rec,) = canonical.recurrences
    for name, output in zip(rec.outputs, canonical.spec.outputs, strict=True):
        stepped[name] = stepped.pop(output.target)
    made = PlanEntries(plan, leaves, sizes)
    differing: list[str] = []
    entries = 0
    results = [(name, i) for name, i in plan.outputs]
    results += [(f"{name}_C", after) for name, _, _, after in plan.carries]
    dims = {f"{s.name}_C": tuple(map(str, s.dims)) for s in canonical.spec.states}
    for name, node in results:
        for at in _places(stepped[name]):
            entries += 1
            index = dict(zip(dims.get(name, plan.nodes[node].axes), at, strict=True))
            if not (made.at(node, index) - stepped[name][at[0]][at[1]]).is_zero():
                differing.append(f"{name}{[i + 1 for i in at]}")
    gradients = 0
    if backward is not None:
        gradients, wrong = _gradients(backward, plan, leaves, sizes, _loss(stepped))
        differing += wrong
    return Proof(canonical.spec.name, chunk, K, V, entries, gradients, tuple(differing))


def _loss(stepped: dict[str, Matrix]) -> Value:
    """The sum of every result times its cotangent."""
    loss = Value.number(0)
    for name, rows in stepped.items():
        for i, j in _places(rows):
            loss = loss + rows[i][j] * Value.free(Leaves.place(f"d_{name}", i, j))
    return loss


def _gradients(
    plan: ChunkPlan, forward: ChunkPlan, leaves: Leaves, sizes: dict[str, int], loss: Value
) -> tuple[int, list[str]]:
    """How many entries were compared, and those that are no derivative of the loss."""
    made = PlanEntries(plan, leaves, sizes)
    compared, differing = 0, []
    # an input that is only added to the output is no node of the backward plan
    nodes_of_inputs = (n for n in (*forward.nodes, *plan.nodes) if n.op in ("input", "param"))
    inputs = {gradient_name(n): n for n in nodes_of_inputs}
    leaf_of = dict(inputs)
    nodes: dict[str, int | None] = dict.fromkeys(inputs)  # without a gradient here: it is zero
    nodes |= dict(plan.outputs)
    for state, direction, leaf, after in plan.carries:
        if direction == "reverse":
            nodes[f"d_{state}_0"] = after
        else:
            leaf_of[f"d_{state}_0"] = plan.nodes[leaf]
    for name, node in nodes.items():
        leaf_node = leaf_of[name]
        for at in cartesian(*(range(sizes[a]) for a in leaf_node.axes)):
            index = dict(zip(leaf_node.axes, at, strict=True))
            compared += 1
            found = Value.number(0) if node is None else made.at(node, index)
            if not (found - loss.derivative(made.leaf_name(leaf_node, index))).is_zero():
                differing.append(f"{name}{[i + 1 for i in at]}")
    return compared, differing


def _places(rows: Matrix) -> list[tuple[int, int]]:
    return list(cartesian(range(len(rows)), range(len(rows[0]))))
