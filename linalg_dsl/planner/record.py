"""The record of a normalisation: each rule that changed something, with what stood before and after.

Terms are shown as the user wrote the state: [V, K], or multiplied from the right, where that is so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from linalg_dsl.algebra.expr import (
    ONE,
    ZERO,
    Expr,
    Hadamard,
    Sum,
    Symbol,
    add,
    diag,
    hadamard,
    mul,
    transpose,
)
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import Equation, State
from linalg_dsl.planner.decay import FoundDecay
from linalg_dsl.planner.form import Axis, Decay, Read, Rewrite, Stack
from linalg_dsl.planner.linear_map import LinearMap, RankOne
from linalg_dsl.planner.low_rank import LowRank
from linalg_dsl.planner.reads import Output

CHANNEL = {"K": "token and key channel", "V": "token and value channel"}


class Record:
    """The rewrites of one recurrence, in order."""

    def __init__(self, states: Sequence[State], axis: Axis) -> None:
        self.states = states
        self.axis = axis
        self.turned = axis != states[0].dims[0]
        self.rewrites: list[Rewrite] = []

    def distribution(self, update: Equation, value: Expr, found: LinearMap) -> None:
        past = self._past()
        terms = [
            self._on_state((d.factors.scalar, *_gate(d.factors.vectors)), d.other, d.of, time)
            for diagonals, time in ((found.diagonals, -1), (found.presents, 0))
            for d in diagonals
        ]
        terms += [self._on_state((e.scale.scalar, *self._outer(e)), e.other, e.of) for e in found.erases]
        terms += [self._write(w) for w in found.writes]
        after = add(terms)
        if after != value:
            reason = (
                "products are spread over the sums that hold the state, products over rows are written out"
            )
            self._add("distribute", show_expr(value), show_expr(after), reason)
        if self.turned and found.erases:
            self._add(
                "turn to the value side",
                show_expr(past),
                f"{show_expr(transpose(past))}, every factor transposed",
                "what multiplies the state from the right erases along the value axis",
            )

    def decay(self, decay: FoundDecay) -> None:
        if decay.keeps_nothing:
            self._add(
                "take the decay", "0", "log λ_t = -inf", "nothing of the past is kept but what is erased"
            )
            return
        logs, reasons = [], []
        for found, axis in ((decay.decay, self.axis), (decay.value_decay, _other(self.axis))):
            if found.kind == "none" and not found.signed:
                continue
            name = "λ_t" if found is decay.decay else "ρ_t"
            size = f"log |{name}|" if found.signed else f"log {name}"
            logs.append(f"{size} = {show_expr(found.log)}")
            if found.signed:
                logs.append(f"sign {name} = " + " ".join(f"sign({show_expr(x)})" for x in found.signed))
            reasons.append(f"one number per {CHANNEL[axis] if found.kind == 'channel' else 'token'}")
            if found.signed:
                reasons.append("signs go into L, B and the queries as running products")
        if logs:
            factors = decay.factors
            before = self._on_state((factors.scalar, *_gate(factors.vectors)), decay.other)
            self._add("take the decay", show_expr(before), ", ".join(logs), "; ".join(reasons))

    def decayed_erase(self, before: Sequence[RankOne], after: Sequence[RankOne]) -> None:
        was = _sum(show_expr(self._on_state((e.scale.scalar, *self._outer(e)), of=e.of)) for e in before)
        pasts = [f"(D_t ∘ {s.name}_{{t-1}})" for s in self.states]
        if self.turned:
            now = _sum(
                _scaled(e.scale.scalar, f"{pasts[e.of]} {show_expr(mul(self._outer(e)))}") for e in after
            )
        else:
            now = _sum(f"{show_expr(mul((e.scale.scalar, *self._outer(e))))} {pasts[e.of]}" for e in after)
        self._add(
            "read the decayed state", was, now, "every erase carries the decay, B = λ ∘ b: no shift is needed"
        )

    def merge(self, erases: Sequence[RankOne], writes: Sequence[RankOne], columns: LowRank) -> None:
        if len(erases) + len(writes) > len(columns.left):
            before = ", ".join(show_expr(t.column.vector) for t in (*writes, *erases))
            after = ", ".join(show_expr(x) for x in columns.left)
            reason = "terms along one vector, up to a scalar per token, are one write"
            self._add("merge left vectors", before, after, reason)
        if columns.combined > 0:
            before = ", ".join(show_expr(e.row.vector) for e in erases)
            after = ", ".join(show_expr(x) for x in columns.erase)
            self._add("combine erase vectors", before, after, "they share their left vector")

    def stacked(self, stack: Stack, decay: FoundDecay) -> None:
        """The states as one, in triangular order."""
        before = ", ".join(f"{s.name}_{{t-1}}" for s in self.states)
        common = " D_t ∘" if decay.decay.kind != "none" or decay.value_decay.kind != "none" else ""
        rows = []
        for i, name in enumerate(stack.states):
            past = f"{name}_{{t-1}}"
            if stack.channels and stack.channels[i].kind != "none":
                past = f"exp({show_expr(stack.channels[i].log)}) ∘ {past}"
            own = [show_gate(stack.gates[i], past)]
            own += [
                _scaled(x, f"{other}_{{t-1}}")
                for other, x in zip(stack.states, stack.coupling[i], strict=True)
                if x != ZERO
            ]
            rows.append(f"{name}_t ←{common} {_sum(own)}")
        self._add(
            "stack the states",
            before,
            "; ".join(rows),
            "each takes up what stands below it only: the gate of blocks is triangular, and what is written "
            "goes to every state by a scalar of the token",
        )

    def reads(self, equation: Equation, output: Output) -> None:
        before = show_expr(equation.value)
        after = [show_read(r, self.states[r.state]) for r in output.reads]
        after += [show_expr(t) for t in output.token_terms]
        if _sum(after) != before and (output.split > 1 or any(r.kind == "decayed" for r in output.reads)):
            reason = "reads of the state, and what the token adds by itself"
            self._add("split the output", before, _sum(after), reason)

    def _add(self, rule: str, before: str, after: str, reason: str) -> None:
        self.rewrites.append(Rewrite(rule, before, after, reason))

    # -- terms as the user has the state --------------------------------------------------------
    def _past(self, of: int = 0, time: int = -1) -> Expr:
        state = self.states[of]
        return Symbol(state.name, (state.dims[0], state.dims[1]), time)

    def _on_state(
        self, own: Iterable[Expr], other: tuple[Expr, ...] = (), of: int = 0, time: int = -1
    ) -> Expr:
        """``own`` on the axis of the recurrence, gates ``other`` on the other."""
        scalars = [x for x in own if x.is_scalar]
        chain = [x for x in own if not x.is_scalar]
        left, right = (_gate(other), chain) if self.turned else (chain, _gate(other))
        return mul((*scalars, *left, self._past(of, time), *right))

    def _outer(self, term: RankOne) -> tuple[Expr, Expr]:
        column, row = term.column.vector, term.row.vector
        return (row, transpose(column)) if self.turned else (column, transpose(row))

    def _write(self, term: RankOne) -> Expr:
        return mul((term.scale.scalar, *self._outer(term)))


def show_gate(gate: Decay, past: str) -> str:
    """A gate of the stack times a past: as its logarithm says."""
    if gate.is_zero:
        return "0"
    size = "" if gate.kind == "none" else f"exp({show_expr(gate.log)}) "
    signs = "".join(f"sign({show_expr(x)}) " for x in gate.signed)
    return f"{signs}{size}{past}"


def show_read(read: Read, state: State) -> str:
    """A read of the state as it is declared."""
    name, turn = state.name, "ᵀ" if state.dims[0] == read.axis else ""
    source = {
        "inclusive": f"{name}_t{turn}",
        "exclusive": f"{name}_{{t-1}}{turn}",
        "decayed": f"(D_t ∘ {name}_{{t-1}}){turn}",
    }[read.kind]
    query = show_expr(read.query)
    query = f"({query})" if isinstance(read.query, (Sum, Hadamard)) else query
    scale = "" if read.scale == ONE else f"{show_expr(read.scale)} "
    gate = "" if read.gate is None else f"{_bracket(show_expr(read.gate))} ∘ "
    return f"{gate}{scale}{source} {query}"


def _bracket(text: str) -> str:
    return f"({text})" if " " in text else text


def _gate(column: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return () if not column else (diag(hadamard(column) if len(column) > 1 else column[0]),)


def _other(axis: Axis) -> Axis:
    return "V" if axis == "K" else "K"


def _scaled(scalar: Expr, text: str) -> str:
    return text if scalar == ONE else f"{show_expr(scalar)} {text}"


def _sum(terms: Iterable[str]) -> str:
    return " + ".join(terms).replace("+ -", "- ")
