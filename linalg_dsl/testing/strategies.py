"""Hypothesis strategies: random recurrences of every class, shapes for them, and inputs at their nasty ends.

Everything shrinks towards the smallest: the line ``S_t = S_{t-1} + k_t v_tᵀ`` read with ``S_tᵀ q_t``, one
token, one head, K = V = 1, ordinary numbers.
"""

from __future__ import annotations

import re

import torch
from hypothesis import assume
from hypothesis import strategies as st

from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.testing.cases import COTANGENTS, Case, Shape, make_case
from linalg_dsl.testing.draws import PACKINGS
from linalg_dsl.testing.extremes import Extremes, applicable
from linalg_dsl.testing.strategies_grammar import HEADER, OUTPUTS, UPDATES
from linalg_dsl.testing.strategies_lines import (
    ACROSS,
    DECLARATIONS,
    MORE_DECLARATIONS,
    READS,
    several_states,
    updates,
    wider_updates,
)
from linalg_dsl.testing.subject import Subject

CLASSES = ("chunk", "either side", "several states", "grammar")


@st.composite
def specs(choose: st.DrawFn, classes: tuple[str, ...] = CLASSES) -> RecurrenceSpec:
    """A well-formed recurrence with the declarations that it uses.

    ``chunk``: gates on keys, erases, any order, inclusive and exclusive reads, bonus, skip. ``either side``:
    gates and erases of either sign on either axis, no decay, low rank alone, reads along both. ``several
    states``: normalisers, momentum, slots, shifts, substeps, vector and scalar states, full gates,
    transitions on both sides. ``grammar``: terms of a small grammar put together at random, of which those
    that the language refuses are left out; the planner may still refuse some.
    """
    # what is drawn with the fewest choices is the smallest
    kind = choose(st.sampled_from(("smallest", *classes) if "chunk" in classes else classes))
    match kind:
        case "smallest":
            header, lines = DECLARATIONS, ["S_t = S_{t-1} + k_t v_tᵀ", "o_t = S_tᵀ q_t"]
        case "chunk":
            header, lines = DECLARATIONS, [f"S_t = {choose(updates())}", f"o_t = {choose(READS)}"]
        case "either side":
            header, lines = DECLARATIONS, [f"S_t = {choose(wider_updates())}", f"o_t = {choose(ACROSS)}"]
        case "several states":
            header, lines = DECLARATIONS + MORE_DECLARATIONS, choose(several_states()).splitlines()
        case _:
            header = HEADER.partition("\n")[2]
            lines = [choose(UPDATES), f"o_t = {choose(OUTPUTS)}"]
    text = "\n".join(["recurrence drawn", *used(header, lines), *lines, ""])
    try:
        return parse(text)
    except DslError:
        assume(False)
        raise


def used(header: str, lines: list[str]) -> list[str]:
    """The declarations whose names stand in some line or in such a declaration, several of one split up."""
    body = "\n".join(lines).replace("ᵀ", " ")
    words = set(re.findall(r"[A-Za-z]\w*", re.sub(r"_t(?![A-Za-z0-9_])|_[{<]t", " ", body)))
    found: list[str] = []
    for line in reversed(header.split("\n")):
        if not line:
            continue
        kind, rest = line.split(maxsplit=1)
        mark = "=" if kind == "const" else ":"
        names, _, what = rest.partition(mark)
        own = [n.strip() for n in names.split(",")]
        if kept := [n for n in own if n in words]:
            found.insert(0, f"{kind} {', '.join(kept)} {mark}{what}")
            words |= set(re.findall(r"[A-Za-z]\w*", what))
    return found


@st.composite
def shapes(choose: st.DrawFn, longest: int = 40, packed: bool = True) -> Shape:
    """B, T, H, K, V and, unless ``packed`` is False, sometimes packed sequences, empty ones too."""
    K, V = choose(st.integers(1, 9)), choose(st.integers(1, 9))
    H = choose(st.integers(1, 3))
    B, T = choose(st.integers(1, 2)), choose(st.integers(1, longest))
    if packed and choose(st.integers(0, 3)) == 3:
        lengths = choose(st.sampled_from(PACKINGS))
        return Shape(1, sum(lengths), H, K, V, lengths)
    return Shape(B, T, H, K, V)


@st.composite
def inputs(
    choose: st.DrawFn,
    spec: RecurrenceSpec,
    dtypes: tuple[torch.dtype, ...] = (torch.float64,),
    longest: int = 40,
) -> Case:
    """A case for a spec: tensors, states and cotangents that keep its promises, ordinary or at an end.

    Ends: gates 0, -1e-7, slow, a mixture up to -60, -60 and -1e4 throughout, resets (-inf) at some, all or
    every other token, growth where it is declared; keys alike, nearly alike, orthogonal, 0, a thousand times
    longer, denormal; scalars at the ends of their range and at 1; values large, denormal, of mixed sizes;
    with and without an initial state; shared heads; losses on everything, the output, the final state or the
    last token only.
    """
    subject = Subject(
        spec.name, spec, _nothing, initial_state=True, final_state=True, packed=True, dtypes=dtypes
    )
    shape = choose(shapes(longest=longest))
    ends = Extremes(**{kind: choose(st.sampled_from(x)) for kind, x in applicable(spec).items()})
    few = {}
    if shape.H > 1 and len(spec.inputs) > 1 and choose(st.integers(0, 3)) == 3:
        few = {choose(st.sampled_from([d.name for d in spec.inputs[1:]])): 1}
    return make_case(
        subject,
        shape,
        seed=choose(st.integers(0, 2**20)),
        dtype=choose(st.sampled_from(dtypes)),
        extremes=ends,
        cotangents=choose(st.sampled_from(COTANGENTS)),
        heads=few,
        with_state=choose(st.booleans()),
    )


def _nothing(**_: object) -> None:
    """A case needs no callable."""
