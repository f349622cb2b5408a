"""Which uses of states are allowed: a matrix state is updated linearly, jointly with all it feeds on.

States that feed each other, straight or through others, form a group. In a group without a matrix any
function will do. In one with a matrix every update is a sum of terms that hold one state of the group
once; states from outside the group (which it reads, but which do not read it) may stand in any function.
"""

from __future__ import annotations

from collections.abc import Mapping

from linalg_dsl.algebra.expr import Shape
from linalg_dsl.language.graph import components
from linalg_dsl.language.mistakes import Mistakes
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.values import Joined, Value
from linalg_dsl.source import Span

_LONGEST_TERM = 80


def groups(reads: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """For every state those that it feeds on and that feed on it, itself included."""
    number = components(reads)
    return {name: frozenset(n for n in reads if number[n] == number[name]) for name in reads}


def check_linear(
    updates: Mapping[str, tuple[Value, Span | None]], shapes: Mapping[str, Shape], mistakes: Mistakes
) -> None:
    """Reports every update that is not linear where it has to be."""
    together = groups({name: value.states for name, (value, _) in updates.items()})
    for name, (value, place) in updates.items():
        group = together[name]
        matrices = [s for s in shapes if s in group and 1 not in shapes[s]]
        found = next((j for pair, j in value.joined.items() if group.issuperset(pair)), None)
        if found is None or not matrices:
            continue
        _report(name, group, matrices, found, place, mistakes)


def _report(
    name: str,
    group: frozenset[str],
    matrices: list[str],
    found: Joined,
    place: Span | None,
    mistakes: Mistakes,
) -> None:
    term = _crop(show_expr(found.term))
    matrix = name if name in matrices else matrices[0]
    hint = f"a chunk form exists only where every term holds {matrix}_{{t-1}} once, outside functions"
    message = f"the update of `{name}` is not linear in it: `{term}`"
    if len(group) > 1:
        among = ", ".join(f"`{s}`" for s in sorted(group))
        message = f"the update of `{name}` is not linear in {among}, which feed each other: `{term}`"
        hint = f"`{matrix}` is a matrix: every term may hold one of them once, outside functions"
    mistakes.add("E405", message, found.span or place, f"{hint}; {_relative(found, matrix, len(group) > 1)}")


def _relative(found: Joined, matrix: str, several: bool) -> str:
    """The nearest linear recurrence, in words."""
    match found.how:
        case "" if several:
            return "the nearest linear relative takes one of the two factors from inputs"
        case "":
            return (
                "the nearest linear relative is a delta rule, (I - beta_t k_t k_tᵀ) with vectors of the input"
            )
        case "/":
            return f"the nearest linear relative keeps the sum, and divides what is read from {matrix}_t"
        case "^":
            return "the nearest linear relative is without the power"
        case "l2norm" | "softmax":
            return f"the nearest linear relative has `{found.how}` around the key, or around what is read"
        case how:
            network = f"with `{how}` around the state this is a recurrent network of the kind of M2RNN"
            return f"{network}; the nearest linear relative is without it, or has it around what is read"


def _crop(term: str) -> str:
    return term if len(term) <= _LONGEST_TERM else term[: _LONGEST_TERM - 3] + "..."
