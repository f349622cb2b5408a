"""The same recurrence the other way round: K for V, and the transposed state.

For S' = S^T every factor is transposed and stands on the other side: key-side transitions become
value-side ones, erases become left vectors, reads S^T q become S' q. The numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from linalg_dsl.algebra.expr import Dim, Expr, Identity, Symbol, transpose
from linalg_dsl.algebra.traverse import transform
from linalg_dsl.language.spec import Equation, RecurrenceSpec


def renamed(spec: RecurrenceSpec) -> RecurrenceSpec:
    """K for V and V for K in every declaration: the tensors are the same."""

    def change(node: Expr) -> Expr:
        match node:
            case Symbol("K" | "V" as name, _, None):
                return replace(node, name=str(_swapped(name)))
            case Symbol():
                return replace(node, dims=(_swapped(node.dims[0]), _swapped(node.dims[1])))
            case Identity(dim):
                return Identity(_swapped(dim))
            case _:
                return node

    states = tuple(replace(s, dims=tuple(map(_swapped, s.dims))) for s in spec.states)
    inputs = tuple(replace(i, dims=tuple(map(_swapped, i.dims))) for i in spec.inputs)
    return replace(_mapped(spec, change), states=states, inputs=inputs)


def transposed(spec: RecurrenceSpec) -> RecurrenceSpec:
    """The recurrence of the transposed state, of a spec with one matrix state."""
    (state,) = spec.states

    def change(node: Expr) -> Expr:
        if isinstance(node, Symbol) and node.name == state.name:
            return transpose(replace(node, dims=(node.dims[1], node.dims[0])))
        return node

    found = _mapped(spec, change)
    update = replace(found.updates[0], value=transpose(found.updates[0].value))
    return replace(found, states=(replace(state, dims=state.dims[::-1]),), updates=(update,))


def _swapped(dim: Dim) -> Dim:
    return {"K": "V", "V": "K"}.get(dim, dim) if isinstance(dim, str) else dim


def _mapped(spec: RecurrenceSpec, change: Callable[[Expr], Expr]) -> RecurrenceSpec:
    """The spec with every leaf of its equations changed."""

    def of(equations: tuple[Equation, ...]) -> tuple[Equation, ...]:
        return tuple(replace(e, value=transform(e.value, change)) for e in equations)

    consts = tuple(replace(c, value=transform(c.value, change)) for c in spec.consts)
    return replace(spec, updates=of(spec.updates), outputs=of(spec.outputs), consts=consts, written=())
