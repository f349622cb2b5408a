"""Form (1) to the chunk equations (derivation, sections 2 to 4).

    G_B = score(B, L)   strict            R = (Lambda o B) S_0
    G_Q = score(Q, L)                     Z = W + Sigma U,  U = R + G_B Z
    O   = G_Q Z + (Lambda o Q) S_0        S_C = Lambda_{C<-0} o S_0 + (Lambda_{C<-s} o L)^T Z

for S with the axis of L, B and the decay first, K or V. A read along the other axis pairs Q with Z instead,
O = (Lambda o G) L with G = score(Q, Z). Every axis has a decay of its own: one of the axis that a product
sums over stands in its score, one of the axis that is left is applied to the result.

Where W = Sigma Y the solve is for U + Y (planner.residual), with R + Y in place of R and W = 0.

Of several coupled states the decays per token are products of a gate of blocks (planner.stacked_plan): one
number for every pair of tokens, weighed by what an erase or query takes of every state and what goes to every
state of a write. What each was before the chunk is read, and each is written to.

Every value is one [C, .] block per column of L, W, B (m and r of them), so a zero column of W or a
constant in Sigma costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from linalg_dsl.algebra.expr import ONE, ZERO, Expr
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.elementwise import TokenExpressions
from linalg_dsl.planner.form import CanonicalRecurrence, Decay, Read, Recurrence, Stack
from linalg_dsl.planner.ops import OTHER
from linalg_dsl.planner.plan import ChunkPlan, PlanBuilder
from linalg_dsl.planner.residual import as_residuals
from linalg_dsl.planner.stacked_plan import StateGate, Weights


def derive(canonical: CanonicalRecurrence) -> ChunkPlan:
    """The forward plan of one chunk; its states have the axes ("K", "V") however they are declared."""
    if len(canonical.recurrences) != 1:
        raise InternalError("a plan is of one recurrence; states that are coupled are one")
    return _Derivation(canonical, canonical.recurrences[0]).run()


class _Derivation:
    """``gate``: the decays per token, those of several coupled states; ``wide``: those per channel, by axis,
    the same for all states; ``signs``: of one state, by axis (None: per token), of all along an axis."""

    def __init__(self, canonical: CanonicalRecurrence, rec: Recurrence) -> None:
        self.b = PlanBuilder()
        self.name = canonical.spec.name
        self.rec = rec
        self.token = TokenExpressions(self.b, canonical.spec)
        self.scalar: int | None = None
        self.wide: dict[str, int] = {}
        self.signs: dict[str | None, int] = {}
        spec = canonical.spec
        self.declared = {i.name for i in spec.inputs} | {c.name for c in spec.consts}
        self.carried = tuple(s.name for s in spec.states)
        self._take_decay(rec.decay, rec.axis, "w" if "w" not in self.declared else "log_decay")
        rho = "rho" if "rho" not in self.declared else "log_rho"
        self._take_decay(rec.value_decay, OTHER[rec.axis], rho)
        self.spread: list[Weights] = [None] * rec.m
        self.sources: list[Weights] = [None] * rec.r
        self.of_states: list[int | None] = []
        self.channels: list[int | None] = []
        """Of coupled states, each with its own gate per channel along the erased axis: their logarithms."""
        if rec.stack is None:
            self.gate = StateGate(self.b, [self.scalar], ((),), rec.axis, ("s",))
        else:
            self.gate = self._stacked(rec.stack)

    def run(self) -> ChunkPlan:
        b, rec = self.b, self.rec
        own, other = rec.axis, OTHER[rec.axis]
        labels = ["s"] if rec.stack is None else [f"s_{name.lower()}" for name in rec.states]
        states = [
            b.add_node("carry", (), ("K", "V"), label, name=name, direction="forward")
            for name, label in zip(rec.states, labels, strict=True)
        ]
        left = [self._signed(self._rows(x, f"l_{j}"), own) for j, x in enumerate(rec.left, 1)]
        written = self._written(left, states)
        outputs = self._read_out(left, written, states)
        ends = [
            ([self._weighed(self._state_to_end(x, i), w)
              for x in (self._to_end(x, own),) for i, w in enumerate(self.gate.to_end(c, f"l_{j}"))],
             self._to_end(z, other))
            for j, (x, z, c) in enumerate(zip(left, written, self.spread, strict=True), 1)
        ]  # fmt: skip
        writes = [
            [b.write(xs[i], z) if own == "K" else b.write(z, xs[i]) for xs, z in ends]
            for i, _ in enumerate(states)
        ]
        after: dict[str, tuple[int, int]] = {}
        for i, decayed in enumerate(self.gate.decayed(states)):
            for axis in (own, other):
                if axis in self.wide:
                    decayed = b.scale_state(decayed, self.wide[axis])
            gate = self._channel(i)
            decayed = decayed if gate is None else b.scale_state(decayed, gate)
            result = reduce(b.add, writes[i], decayed)
            for sign in (*self.signs.values(), *self.of_states[i : i + 1]):
                result = result if sign is None else b.mul(b.sign_total(sign), result)
            after[rec.states[i]] = states[i], b.label(result, f"{labels[i]}_next")
        carries = [(name, "forward", *after[name]) for name in self.carried if name in after]
        return b.finish(self.name, carries, list(zip(rec.outputs, outputs, strict=True)))

    def _stacked(self, stack: Stack) -> StateGate:
        """The gate of coupled states; what any of them is weighed by has the signs of the gates in it."""
        b = self.b
        logs: list[int | None] = []
        for i, gate in enumerate(stack.gates, 1):
            logs.append(b.label(b.tokens(self.token(gate.log)), self._free(f"log_a{i}")))
            signs = [b.unary("side", self.token(x)) for x in gate.signed]
            self.of_states.append(b.tokens(reduce(b.mul, signs)) if signs else None)
        coupling = [
            [self._weight(x, i, j) for j, x in enumerate(row)] for i, row in enumerate(stack.coupling)
        ]
        self.spread = [[self._weight(x, after=i) for i, x in enumerate(row)] for row in stack.spread]
        self.sources = [[self._weight(x, before=j) for j, x in enumerate(row)] for row in stack.sources]
        for name, gate in zip(stack.states, stack.channels, strict=False):
            log = None if gate.kind == "none" else b.tokens(self.token(gate.log))
            self.channels.append(log if log is None else b.label(log, self._free(f"log_d_{name.lower()}")))
        # then the same walks form all boundary terms
        axis = self.rec.axis if stack.channels else min(self.wide, default="K")
        return StateGate(b, logs, coupling, axis, [name.lower() for name in stack.states])

    def _weight(self, x: Expr, after: int | None = None, before: int | None = None) -> int:
        """A scalar of the token that meets the state ``after`` the token, or the one ``before`` it."""
        b = self.b
        weight = self.token(x)
        for state, exclusive in ((after, False), (before, True)):
            sign = None if state is None else self.of_states[state]
            if sign is not None:
                weight = b.mul(b.signs(sign, exclusive), weight)
        return weight

    def _free(self, name: str) -> str:
        return name if name not in self.declared else f"{name}_"

    def _take_decay(self, decay: Decay, axis: str, label: str) -> None:
        b = self.b
        if decay.kind != "none":
            w = b.tokens(self.token(decay.log))
            if (decay.kind == "channel") != (axis in b.axes(w)):
                raise InternalError(f"a {decay.kind} decay along {axis} with axes {b.axes(w)}")
            b.label(w, label)
            if decay.kind == "channel":
                self.wide[axis] = w
            else:
                self.scalar = w
        if decay.signed:
            parts = [self.token(x) for x in decay.signed]
            if len(parts) > 1:
                parts = [reduce(b.mul, (b.unary("side", x) for x in parts))]
            sign = b.tokens(parts[0])
            self.signs[axis if axis in b.axes(sign) else None] = sign

    def _rows(self, expr: Expr, label: str) -> int:
        """A column of every token: [t, D], also where only params and numbers are in it."""
        b = self.b
        return b.label(b.tokens(self.token(expr)), label)

    def _column(self, expr: Expr, label: str = "") -> int:
        """[t, D] along the axis of the written rows, or the number 0."""
        b = self.b
        node = self.token(expr)
        if b.value_of(node) == 0:
            return node
        return self._signed(b.label(b.tokens(node), label), OTHER[self.rec.axis], scalar=False)

    def _written(self, left: Sequence[int], states: Sequence[int]) -> list[int]:
        """Z_1..Z_m."""
        b, rec = self.b, self.rec
        own, other = rec.axis, OTHER[rec.axis]
        given: tuple[Expr, ...] = (ZERO,) * rec.r
        written = rec.written
        if rec.erase:
            given, written = as_residuals(rec.written, rec.sigma)
        fixed = [self._column(x, f"w_{j}") for j, x in enumerate(written, 1)]
        if not rec.erase:
            return fixed
        sigma = [[self.token(x) for x in row] for row in rec.sigma]
        exclusive = rec.erase_read == "exclusive"
        scores = []
        right = []
        for i, expr in enumerate(rec.erase, 1):
            erase = self._signed(self._rows(expr, f"b_{i}"), own, exclusive)
            e = self.sources[i - 1]
            columns = enumerate(zip(left, self.spread, strict=True), 1)
            scores.append(
                [self._score(erase, x, rec.erase_read, f"g_b{i}{j}", e, c) for j, (x, c) in columns]
            )
            past = self._past(erase, own, rec.erase_read, states, e, f"b_{i}")
            past = self._from_start(past, other, False)
            right.append(b.add(past, self._column(given[i - 1])))
        z, _ = b.solve(scores, sigma, fixed, right, self.wide.get(other))
        return [b.label(x, f"z_{j}") for j, x in enumerate(z, 1)]

    def _read_out(self, left: Sequence[int], written: Sequence[int], states: Sequence[int]) -> list[int]:
        """The outputs: what is read for each, and what the token adds to the only one."""
        b, rec = self.b, self.rec
        terms: list[list[int]] = [[] for _ in rec.outputs]
        for i, read in enumerate(rec.reads, 1):
            terms[read.to].append(self._read(read, i, left, written, states))
        terms[0] += [b.tokens(self.token(x)) for x in rec.token_terms]
        return [b.label(reduce(b.add, t), name) for t, name in zip(terms, rec.outputs, strict=True)]

    def _read(
        self, read: Read, i: int, left: Sequence[int], written: Sequence[int], states: Sequence[int]
    ) -> int:
        b = self.b
        con = read.axis
        exclusive = read.kind == "exclusive"
        query = self._signed(self._rows(read.query, f"q_{i}"), con, exclusive)
        e: Weights = None
        if self.rec.stack is not None:
            one = [ONE if j == read.state else ZERO for j, _ in enumerate(states)]
            where = "before" if read.kind != "inclusive" else "after"
            e = [self._weight(x, **{where: j}) for j, x in enumerate(one)]
        out = self._past(query, con, read.kind, states, e, f"q_{i}")
        out = self._from_start(out, OTHER[con], exclusive)
        # a read along the other axis: what it reads of is under one gate of the erased axis
        gate = self._channel(read.state) if con != self.rec.axis else None
        out = out if gate is None else b.mul(out, b.from_start(gate, exclusive))
        pairs = zip(left, written, strict=True) if con == self.rec.axis else zip(written, left, strict=True)
        for j, (x, y) in enumerate(pairs, 1):
            score = self._score(query, x, read.kind, f"g_q{i}{j}", e, self.spread[j - 1])
            out = b.add(out, self._apply(score, y, read.kind, gate))
        out = self._signed(out, OTHER[con], exclusive, scalar=False)
        out = b.mul(self.token(read.scale), out)
        return out if read.gate is None else b.mul(self.token(read.gate), out)

    # -- the uses of the decay ------------------------------------------------------------------
    def _channel(self, i: int) -> int | None:
        """The log gate per channel that the state i has and others have not."""
        return self.channels[i] if self.channels else None

    def _state_to_end(self, x: int, i: int) -> int:
        gate = self._channel(i)
        return x if gate is None else self.b.mul(x, self.b.to_end(gate))

    def _scores_by_channel(self, x: int, y: int, read: str, label: str, e: Weights, c: Weights) -> int:
        """The sum over gates per channel of scores in them, weighed by the states that have them."""
        b = self.b
        parts = []
        for gate in dict.fromkeys(self.channels):
            of = [w if g == gate else b.number(0) for w, g in zip(e or (), self.channels, strict=True)]
            to = [w if g == gate else b.number(0) for w, g in zip(c or (), self.channels, strict=True)]
            weights = self.gate.pairs(of, to, read, label.replace("g_", "decay_"))
            if weights is not None and b.value_of(weights) != 0:
                score = b.score(x, y) if gate is None else b.decayed_score(x, y, gate, read)
                parts.append(b.mul(score, weights))
        return b.label(reduce(b.add, parts, b.number(0)), label)

    def _score(self, x: int, y: int, read: str, label: str, e: Weights, c: Weights) -> int:
        b = self.b
        if self.channels and b.axes(x)[-1] == self.rec.axis:
            return self._scores_by_channel(x, y, read, label, e, c)
        w = self.wide.get(b.axes(x)[-1])
        out = b.score(x, y) if w is None else b.decayed_score(x, y, w, read)
        weights = self.gate.pairs(e, c, self._of_gate(read), label.replace("g_", "decay_"))
        if weights is not None:
            out = b.mul(out, weights)
        elif w is None:
            out = b.mask(out, "inclusive" if read == "inclusive" else "exclusive")
        return b.label(out, label)

    def _past(self, x: int, con: str, read: str, states: Sequence[int], e: Weights, label: str) -> int:
        """What x reads of the states before the chunk."""
        b = self.b
        x = self._from_start(x, con, read == "exclusive")
        weights = self.gate.from_start(e, self._of_gate(read) == "exclusive", label)
        weighed = [
            (self._weighed(self._state_from_start(x, i, con, read == "exclusive"), w), state)
            for i, (w, state) in enumerate(zip(weights, states, strict=True))
        ]
        return reduce(b.add, (b.read(y, state, con=con) for y, state in weighed if b.value_of(y) != 0))

    def _state_from_start(self, x: int, i: int, con: str, exclusive: bool) -> int:
        gate = self._channel(i) if con == self.rec.axis else None
        return x if gate is None else self.b.mul(x, self.b.from_start(gate, exclusive))

    def _weighed(self, x: int, weight: int | None) -> int:
        return x if weight is None else self.b.mul(x, weight)

    def _of_gate(self, read: str) -> str:
        """The decayed state is that after the decay which coupled states have in common."""
        return "exclusive" if read == "decayed" and self.rec.stack is not None else read

    def _apply(self, scores: int, rows: int, read: str, gate: int | None) -> int:
        b = self.b
        w = self.wide.get(b.axes(rows)[-1]) if gate is None and b.axes(rows) else gate
        return b.apply(scores, rows) if w is None else b.decay_apply(scores, rows, w, read, transposed=False)

    def _from_start(self, x: int, axis: str, exclusive: bool) -> int:
        return self.b.mul(x, self.b.from_start(self.wide[axis], exclusive)) if axis in self.wide else x

    def _to_end(self, x: int, axis: str) -> int:
        return self.b.mul(x, self.b.to_end(self.wide[axis])) if axis in self.wide else x

    def _signed(self, x: int, axis: str, exclusive: bool = False, scalar: bool = True) -> int:
        """Times the signs of the gates since the chunk began: what is left of them is positive."""
        b = self.b
        for key, sign in self.signs.items():
            if key == axis or (key is None and scalar):
                x = b.mul(b.signs(sign, exclusive), x)
        return x
