"""Form (1) to the chunk equations (derivation, sections 2 and 3).

    G_B = score(B, L)   strict            R = (Lambda o B) S_0
    G_Q = score(Q, L)                     Z = W + Sigma U,  U = R + G_B Z
    O   = G_Q Z + (Lambda o Q) S_0        S_C = Lambda_{C<-0} o S_0 + (Lambda_{C<-s} o L)^T Z

Where W = Sigma Y the solve is for U + Y (planner.residual), with R + Y in place of R and W = 0.

Every value is one [C, .] block per column of L, W, B (m and r of them), so a zero column of W or a
constant in Sigma costs nothing.
"""

from __future__ import annotations

from functools import reduce

from linalg_dsl.algebra.expr import ZERO, Expr
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.elementwise import TokenExpressions
from linalg_dsl.planner.form import CanonicalRecurrence, Read, Recurrence
from linalg_dsl.planner.plan import ChunkPlan, PlanBuilder
from linalg_dsl.planner.residual import as_residuals


def derive(canonical: CanonicalRecurrence) -> ChunkPlan:
    """The forward plan of one chunk."""
    if len(canonical.recurrences) != 1:
        raise InternalError("one recurrence per plan until several states are supported")
    return _Derivation(canonical, canonical.recurrences[0]).run()


class _Derivation:
    def __init__(self, canonical: CanonicalRecurrence, rec: Recurrence) -> None:
        self.b = PlanBuilder()
        self.name = canonical.spec.name
        self.rec = rec
        self.token = TokenExpressions(self.b, canonical.spec)
        self.w = self._log_decay()

    def run(self) -> ChunkPlan:
        b, rec = self.b, self.rec
        state = b.add_node("carry", (), ("K", "V"), "s", name=rec.state, direction="forward")
        left = [self._rows(x, f"l_{j}") for j, x in enumerate(rec.left, 1)]
        written = self._written(left, state)
        output = self._read_out(left, written, state)
        writes = [b.write(self._scaled(x, to_end=True), z) for x, z in zip(left, written, strict=True)]
        decayed = state if self.w is None else b.scale_state(state, self.w)
        after = b.label(reduce(b.add, writes, decayed), "s_next")
        return b.finish(self.name, [(rec.state, "forward", state, after)], [(rec.output, output)])

    def _log_decay(self) -> int | None:
        b, decay = self.b, self.rec.decay
        match decay.kind:
            case "none":
                return None
            case "scalar" | "channel":
                w = b.tokens(self.token(decay.log))
                if decay.kind == "channel" and "K" not in b.axes(w):
                    raise InternalError("a channel decay must be a column [K]")
                return b.label(w, "w")
        raise InternalError(f"unknown decay {decay.kind}")

    def _rows(self, expr: object, label: str) -> int:
        """A column of every token: [t, D], also where only params and numbers are in it."""
        b = self.b
        node = b.tokens(self.token(expr))  # type: ignore[arg-type]
        return b.label(node, label)

    def _column(self, expr: Expr, label: str = "") -> int:
        """[t, V], or the number 0."""
        b = self.b
        node = self.token(expr)
        return node if b.value_of(node) == 0 else b.label(b.tokens(node), label)

    def _written(self, left: list[int], state: int) -> list[int]:
        """Z_1..Z_m."""
        b, rec = self.b, self.rec
        given: tuple[Expr, ...] = (ZERO,) * rec.r
        written = rec.written
        if rec.erase:
            given, written = as_residuals(rec.written, rec.sigma)
        fixed = [self._column(x, f"w_{j}") for j, x in enumerate(written, 1)]
        if not rec.erase:
            return fixed
        sigma = [[self.token(x) for x in row] for row in rec.sigma]
        scores = []
        right = []
        for i, expr in enumerate(rec.erase, 1):
            erase = self._rows(expr, f"b_{i}")
            columns = enumerate(left, 1)
            scores.append([self._score(erase, x, rec.erase_read, f"g_b{i}{j}") for j, x in columns])
            past = b.read(self._scaled(erase, exclusive=rec.erase_read == "exclusive"), state)
            right.append(b.add(past, self._column(given[i - 1])))
        z, _ = b.solve(scores, sigma, fixed, right)
        return [b.label(x, f"z_{j}") for j, x in enumerate(z, 1)]

    def _read_out(self, left: list[int], written: list[int], state: int) -> int:
        b = self.b
        terms = [self._read(read, i, left, written, state) for i, read in enumerate(self.rec.reads, 1)]
        terms += [b.tokens(self.token(x)) for x in self.rec.token_terms]
        return b.label(reduce(b.add, terms), self.rec.output)

    def _read(self, read: Read, i: int, left: list[int], written: list[int], state: int) -> int:
        b = self.b
        query = self._rows(read.query, f"q_{i}")
        out = b.read(self._scaled(query, exclusive=read.kind == "exclusive"), state)
        for j, (x, z) in enumerate(zip(left, written, strict=True), 1):
            out = b.add(out, b.apply(self._score(query, x, read.kind, f"g_q{i}{j}"), z))
        out = b.mul(self.token(read.scale), out)
        return out if read.gate is None else b.mul(self.token(read.gate), out)

    # -- the two uses of the decay --------------------------------------------------------------
    def _score(self, x: int, y: int, read: str, label: str) -> int:
        b = self.b
        if self.w is None:
            out = b.mask(b.score(x, y), "inclusive" if read == "inclusive" else "exclusive")
        elif "K" in b.axes(self.w):
            out = b.decayed_score(x, y, self.w, read)
        else:
            out = b.mul(b.score(x, y), b.pairs_decay(self.w, read))
        return b.label(out, label)

    def _scaled(self, x: int, *, exclusive: bool = False, to_end: bool = False) -> int:
        b = self.b
        if self.w is None:
            return x
        return b.mul(x, b.to_end(self.w) if to_end else b.from_start(self.w, exclusive))
