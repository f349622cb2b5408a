"""Form (1) to the chunk equations (derivation, sections 2 to 4).

    G_B = score(B, L)   strict            R = (Lambda o B) S_0
    G_Q = score(Q, L)                     Z = W + Sigma U,  U = R + G_B Z
    O   = G_Q Z + (Lambda o Q) S_0        S_C = Lambda_{C<-0} o S_0 + (Lambda_{C<-s} o L)^T Z

for S with the axis of L, B and the decay first, K or V. A read along the other axis pairs Q with Z instead,
O = (Lambda o G) L with G = score(Q, Z). Every axis has a decay of its own: one of the axis that a product
sums over stands in its score, one of the axis that is left is applied to the result.

Where W = Sigma Y the solve is for U + Y (planner.residual), with R + Y in place of R and W = 0.

Every value is one [C, .] block per column of L, W, B (m and r of them), so a zero column of W or a
constant in Sigma costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from linalg_dsl.algebra.expr import ZERO, Expr
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.elementwise import TokenExpressions
from linalg_dsl.planner.form import CanonicalRecurrence, Decay, Read, Recurrence
from linalg_dsl.planner.ops import OTHER
from linalg_dsl.planner.plan import ChunkPlan, PlanBuilder
from linalg_dsl.planner.residual import as_residuals


def derive(canonical: CanonicalRecurrence) -> ChunkPlan:
    """The forward plan of one chunk; its states have the axes ("K", "V") however they are declared."""
    if len(canonical.recurrences) != 1:
        raise InternalError("one recurrence per plan until several states are supported")
    return _Derivation(canonical, canonical.recurrences[0]).run()


class _Derivation:
    """``scalar``: the log decay per token; ``wide``: those per channel, by axis; ``signs`` alike, by axis
    (None: per token)."""

    def __init__(self, canonical: CanonicalRecurrence, rec: Recurrence) -> None:
        self.b = PlanBuilder()
        self.name = canonical.spec.name
        self.rec = rec
        self.token = TokenExpressions(self.b, canonical.spec)
        self.scalar: int | None = None
        self.wide: dict[str, int] = {}
        self.signs: dict[str | None, int] = {}
        spec = canonical.spec
        declared = {i.name for i in spec.inputs} | {c.name for c in spec.consts}
        self._take_decay(rec.decay, rec.axis, "w" if "w" not in declared else "log_decay")
        self._take_decay(rec.value_decay, OTHER[rec.axis], "rho" if "rho" not in declared else "log_rho")

    def run(self) -> ChunkPlan:
        b, rec = self.b, self.rec
        own, other = rec.axis, OTHER[rec.axis]
        state = b.add_node("carry", (), ("K", "V"), "s", name=rec.state, direction="forward")
        left = [self._signed(self._rows(x, f"l_{j}"), own) for j, x in enumerate(rec.left, 1)]
        written = self._written(left, state)
        output = self._read_out(left, written, state)
        ends = [(self._to_end(x, own), self._to_end(z, other)) for x, z in zip(left, written, strict=True)]
        writes = [b.write(x, z) if own == "K" else b.write(z, x) for x, z in ends]
        decayed = state if self.scalar is None else b.scale_state(state, self.scalar)
        for axis in (own, other):
            if axis in self.wide:
                decayed = b.scale_state(decayed, self.wide[axis])
        after = reduce(b.add, writes, decayed)
        for sign in self.signs.values():
            after = b.mul(b.sign_total(sign), after)
        after = b.label(after, "s_next")
        return b.finish(self.name, [(rec.state, "forward", state, after)], [(rec.output, output)])

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

    def _written(self, left: Sequence[int], state: int) -> list[int]:
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
            columns = enumerate(left, 1)
            scores.append([self._score(erase, x, rec.erase_read, f"g_b{i}{j}") for j, x in columns])
            past = b.read(self._from_start(erase, own, exclusive), state, con=own)
            past = self._from_start(past, other, False, scalar=False)
            right.append(b.add(past, self._column(given[i - 1])))
        z, _ = b.solve(scores, sigma, fixed, right, self.wide.get(other))
        return [b.label(x, f"z_{j}") for j, x in enumerate(z, 1)]

    def _read_out(self, left: Sequence[int], written: Sequence[int], state: int) -> int:
        b = self.b
        terms = [self._read(read, i, left, written, state) for i, read in enumerate(self.rec.reads, 1)]
        terms += [b.tokens(self.token(x)) for x in self.rec.token_terms]
        return b.label(reduce(b.add, terms), self.rec.output)

    def _read(self, read: Read, i: int, left: Sequence[int], written: Sequence[int], state: int) -> int:
        b = self.b
        con = read.axis
        exclusive = read.kind == "exclusive"
        query = self._signed(self._rows(read.query, f"q_{i}"), con, exclusive)
        out = b.read(self._from_start(query, con, exclusive), state, con=con)
        out = self._from_start(out, OTHER[con], exclusive, scalar=False)
        pairs = zip(left, written, strict=True) if con == self.rec.axis else zip(written, left, strict=True)
        for j, (x, y) in enumerate(pairs, 1):
            score = self._score(query, x, read.kind, f"g_q{i}{j}")
            out = b.add(out, self._apply(score, y, read.kind))
        out = self._signed(out, OTHER[con], exclusive, scalar=False)
        out = b.mul(self.token(read.scale), out)
        return out if read.gate is None else b.mul(self.token(read.gate), out)

    # -- the uses of the decay ------------------------------------------------------------------
    def _score(self, x: int, y: int, read: str, label: str) -> int:
        b = self.b
        w = self.wide.get(b.axes(x)[-1])
        out = b.score(x, y) if w is None else b.decayed_score(x, y, w, read)
        if self.scalar is not None:
            out = b.mul(out, b.pairs_decay(self.scalar, read))
        elif w is None:
            out = b.mask(out, "inclusive" if read == "inclusive" else "exclusive")
        return b.label(out, label)

    def _apply(self, scores: int, rows: int, read: str) -> int:
        b = self.b
        w = self.wide.get(b.axes(rows)[-1]) if b.axes(rows) else None
        return b.apply(scores, rows) if w is None else b.decay_apply(scores, rows, w, read, transposed=False)

    def _from_start(self, x: int, axis: str, exclusive: bool, scalar: bool = True) -> int:
        b = self.b
        if axis in self.wide:
            x = b.mul(x, b.from_start(self.wide[axis], exclusive))
        if scalar and self.scalar is not None:
            x = b.mul(x, b.from_start(self.scalar, exclusive))
        return x

    def _to_end(self, x: int, axis: str) -> int:
        b = self.b
        if axis in self.wide:
            x = b.mul(x, b.to_end(self.wide[axis]))
        if axis == self.rec.axis and self.scalar is not None:
            x = b.mul(x, b.to_end(self.scalar))
        return x

    def _signed(self, x: int, axis: str, exclusive: bool = False, scalar: bool = True) -> int:
        """Times the signs of the gates since the chunk began: what is left of them is positive."""
        b = self.b
        for key, sign in self.signs.items():
            if key == axis or (key is None and scalar):
                x = b.mul(b.signs(sign, exclusive), x)
        return x
