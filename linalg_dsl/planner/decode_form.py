"""``DecodeForm``: a whole recurrence token after token, for decoding, whatever its class.

Every legal recurrence can be taken one token at a time; at one or a few tokens that is also the cheapest
way, as all work is reading and writing the states. States of all stages stand in one plan, substeps are
written out, and the token before of a shifted input is a state like others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from linalg_dsl.algebra.expr import Symbol
from linalg_dsl.language.names import free_name
from linalg_dsl.language.spec import Equation, Input, RecurrenceSpec, State, shape_of
from linalg_dsl.planner.constants import find_constants
from linalg_dsl.planner.step_form import StepForm, step_form


@dataclass(frozen=True, slots=True)
class DecodeForm:
    """``form``: the step form, with a state for every carried tensor, or one for every row of it.

    ``parts``: for every name of ``spec.carried`` the row of it that each of its states is, (None,) where
    there is one state, the whole tensor. The states of ``form.spec`` are those of all names in order.
    """

    spec: RecurrenceSpec
    form: StepForm
    parts: tuple[tuple[int | None, ...], ...]


def decode_form(spec: RecurrenceSpec, consts: Mapping[str, float] | None = None) -> DecodeForm:
    """The form of a legal spec with which it decodes; ``consts`` replace declared values.

    Raises ``ArgumentError`` on unknown consts, ``DslError`` where no input says how large an axis is.
    """
    sizes = find_constants(spec, consts or {}).sizes
    taken = {*(i.name for i in spec.inputs), *(s.name for s in spec.states), *(c.name for c in spec.consts)}
    parts: list[tuple[int | None, ...]] = [(None,)] * len(spec.states)
    states, updates = list(spec.states), list(spec.updates)
    before: dict[tuple[str, int | str | None], str] = {}
    for decl in spec.shifted:
        rows = _rows(decl, sizes)
        parts.append(rows)
        for row in rows:
            name = free_name(f"{decl.name}_prev" if row is None else f"{decl.name}_prev_{row}", taken)
            before[decl.name, row] = name
            dims = decl.dims if row is None else decl.dims[1:]
            states.append(State(name, dims))
            updates.append(Equation(name, Symbol(decl.name, shape_of(dims), 0, row)))
    whole = replace(spec, states=tuple(states), updates=tuple(updates))
    return DecodeForm(spec, step_form(whole, consts, before=before), tuple(parts))


def _rows(decl: Input, sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """The rows of an input [n, D] or [n]; (None,) of any other."""
    match decl.dims:
        case (int(n), *_):
            return tuple(range(n))
        case (str(n), *_) if n not in ("K", "V"):
            return tuple(range(sizes[n]))
        case _:
            return (None,)
