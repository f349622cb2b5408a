"""The gate of the states inside a chunk: products of a triangular gate of blocks, entry by entry.

    Pi_ij[t, s] = entry ij of A_t A_{t-1} ... A_{s+1}        Pi_ii = the decay of a_ii
    Pi_ij = Pi_ii Y_ij,   Y_ij = sum_{i<l<=j} diag(a_il) Pi_lj[t-1, .]

On boundaries of tokens no product needs a shift: Y has the exclusive form of a smaller difference j - i, and
the rows Pi_ij[t, s], Pi_ij[t-1, s], the column from the chunk's start, the row to its end and the whole chunk
are each one product of Y with the same form of Pi_ii. Of one state this is its scalar decay. (Derivation,
section 5; nothing is diagonalised.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

from linalg_dsl.planner.plan import PlanBuilder

Weights = Sequence[int] | None
"""One scalar of the token per state, [t] or of no axes; None of one state alone, where it is 1."""


class StateGate:
    """``logs``: the log decay [t] of every state, None for a gate of 1 (of one state only); ``coupling``:
    a_ij, [t] or of no axes, the number 0 where nothing is coupled. ``axis``: see the op ``weigh``;
    ``names``: what values are labelled by."""

    def __init__(
        self,
        b: PlanBuilder,
        logs: Sequence[int | None],
        coupling: Sequence[Sequence[int]],
        axis: str,
        names: Sequence[str],
    ) -> None:
        self.b = b
        self.names = names
        self.logs = logs
        self.coupling = coupling
        self.axis = axis
        self.zero = b.number(0) if len(logs) > 1 else -1
        self._steps: dict[tuple[int, int], int] = {}

    def pairs(self, e: Weights, c: Weights, read: str, label: str) -> int | None:
        """sum_ij e_i[t] Pi_ij c_j[s] over the pairs of a read; None where that is 1 for all of them."""
        b = self.b
        if len(self.logs) == 1:
            return None if self.logs[0] is None else b.pairs_decay(self.logs[0], read)
        columns = [b.swap(x, "t", "s") if "t" in b.axes(x) else x for x in c or ()]
        whole = self._sum(
            b.mul(e_i, b.mul(self._pairs(i, j, read), columns[j]))
            for i, e_i in self._weights(e)
            for j, _ in self._weights(c)
            if j >= i
        )
        return self._named(whole, label)

    def from_start(self, e: Weights, exclusive: bool, label: str) -> list[int | None]:
        """For every state j sum_i e_i Pi_ij from the chunk's start to t, or t - 1; None for 1."""
        b = self.b
        if len(self.logs) == 1:
            return [None if self.logs[0] is None else b.from_start(self.logs[0], exclusive)]
        parts = [
            self._sum(b.mul(e_i, self._from_start(i, j, exclusive)) for i, e_i in self._weights(e) if i <= j)
            for j in self._states()
        ]
        return [self._named(x, f"{label}_from_{self.names[j]}") for j, x in enumerate(parts)]

    def to_end(self, c: Weights, label: str) -> list[int | None]:
        """For every state i sum_j Pi_ij c_j from t to the chunk's end; None for 1."""
        b = self.b
        if len(self.logs) == 1:
            return [None if self.logs[0] is None else b.to_end(self.logs[0])]
        parts = [
            self._sum(b.mul(self._to_end(i, j), c_j) for j, c_j in self._weights(c) if j >= i)
            for i in self._states()
        ]
        return [self._named(x, f"{label}_to_{self.names[i]}") for i, x in enumerate(parts)]

    def decayed(self, states: Sequence[int]) -> list[int]:
        """The states after the chunk as far as they come of those before it."""
        b = self.b
        if self.logs[0] is None:
            return list(states)
        out = []
        for i, log in enumerate(self.logs):
            assert log is not None
            own = b.scale_state(states[i], log)
            others = (b.weigh(states[j], self._total(i, j), self.axis) for j in self._states() if j > i)
            out.append(reduce(b.add, others, own))
        return out

    # -- entries of Pi ----------------------------------------------------------------------------
    def _weights(self, weights: Weights) -> list[tuple[int, int]]:
        """Those that are not 0, with their states."""
        return [(i, x) for i, x in enumerate(weights or ()) if self.b.value_of(x) != 0]

    def _states(self) -> range:
        return range(len(self.logs))

    def _log(self, i: int) -> int:
        log = self.logs[i]
        assert log is not None
        return log

    def _step(self, i: int, j: int) -> int:
        """Y_ij."""
        if (i, j) not in self._steps:
            b = self.b
            self._steps[i, j] = self._sum(
                b.mul(self.coupling[i][k], self._pairs(k, j, "exclusive"))
                for k in self._states()
                if i < k <= j and b.value_of(self.coupling[i][k]) != 0
            )
        return self._steps[i, j]

    def _pairs(self, i: int, j: int, read: str) -> int:
        own = self.b.pairs_decay(self._log(i), read)
        return own if i == j else self.b.compose(own, self._step(i, j))

    def _step_from_start(self, i: int, j: int) -> int:
        """Y_ij from the chunk's start."""
        b = self.b
        return self._sum(
            b.mul(self.coupling[i][k], self._from_start(k, j, True))
            for k in self._states()
            if i < k <= j and b.value_of(self.coupling[i][k]) != 0
        )

    def _from_start(self, i: int, j: int, exclusive: bool) -> int:
        b = self.b
        if i == j:
            return b.from_start(self._log(i), exclusive)
        own = b.pairs_decay(self._log(i), "exclusive" if exclusive else "inclusive")
        return b.apply(own, self._step_from_start(i, j))

    def _to_end(self, i: int, j: int) -> int:
        own = self.b.to_end(self._log(i))
        return own if i == j else self.b.apply(self._step(i, j), own, transposed=True)

    def _total(self, i: int, j: int) -> int:
        b = self.b
        products = b.mul(b.to_end(self._log(i)), self._step_from_start(i, j))
        if b.value_of(products) == 0:
            return products
        return b.label(b.sum(products, "t"), f"{self.names[j]}_to_{self.names[i]}")

    def _named(self, x: int, label: str) -> int:
        """Labels what is no plain decay."""
        return self.b.label(x, label) if self.b.nodes[x].op in ("add", "mul", "apply", "apply_t") else x

    def _sum(self, terms: Iterable[int]) -> int:
        return reduce(self.b.add, terms, self.zero)
