"""The canonical recurrence, form (1) of the derivation, as data.

    S_t = D_t o S_{t-1} + sum_j L_j (W_j + sum_i sigma_ji U_i)^T        U_i = S_{t-1}^T B_i
    o_t = sum_l gate_l o (read_l of S at query_l) + sum of per-token terms

All expressions use only declared inputs, params, consts and numbers (bindings are substituted);
vectors are columns. Invariants, checked by ``verify``:

1. ``left`` has m >= 1 columns [K], ``written`` m columns [V] (or ``ZERO``), ``erase`` r columns [K],
   ``sigma`` m x r scalars; r <= m <= 8, r <= 4, r = 0 where nothing is erased;
2. the decay is ``none``, ``scalar`` (log: a scalar) or ``channel`` (log: a column [K]), and ``log`` is
   the *log* decay per token, natural log;
3. with ``erase_read == "decayed"`` U_i reads D_t o S_{t-1}, else ("exclusive") S_{t-1};
4. nothing here mentions a state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from linalg_dsl.algebra.expr import ZERO, Expr
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.source import Span

ReadKind = Literal["inclusive", "exclusive", "decayed"]
DecayKind = Literal["none", "scalar", "channel"]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One named step of the normalisation: what stood there, what stands there now, and why."""

    rule: str
    before: str
    after: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decay:
    kind: DecayKind = "none"
    log: Expr = ZERO


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the state: ``gate o scale * (S^T query)``.

    inclusive reads S_t, exclusive S_{t-1}, decayed D_t o S_{t-1}. ``scale`` is made of consts, the
    sizes K and V, and numbers (a run-time float of the kernels); ``gate`` is a column [V] or None.
    """

    kind: ReadKind
    query: Expr
    scale: Expr
    gate: Expr | None = None


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One matrix state in form (1)."""

    state: str
    decay: Decay
    left: tuple[Expr, ...]
    written: tuple[Expr, ...]
    erase: tuple[Expr, ...]
    erase_read: Literal["exclusive", "decayed"]
    sigma: tuple[tuple[Expr, ...], ...]
    reads: tuple[Read, ...]
    token_terms: tuple[Expr, ...] = ()
    """Columns [V] added to the output that read no state: bonus, skip."""
    output: str = "o"
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def m(self) -> int:
        return len(self.left)

    @property
    def r(self) -> int:
        return len(self.erase)

    def __str__(self) -> str:
        past = f"{self.state}_{{t-1}}"
        erased = f"D_t ∘ {past}" if self.erase_read == "decayed" else past
        line = f"{self.state}_t = D_t ∘ {past} + L_t "
        lines = [line + (f"(W_t + Σ_t U_t),  U_t = B_tᵀ ({erased})" if self.erase else "W_t")]
        if self.decay.kind != "none":
            lines.append(f"  log D ({self.decay.kind}) = {show_expr(self.decay.log)}")
        for name, columns in (("L", self.left), ("W", self.written), ("B", self.erase)):
            lines += [f"  {name}_{i} = {show_expr(x)}" for i, x in enumerate(columns, 1)]
        for j, row in enumerate(self.sigma, 1):
            lines += [f"  Σ_{j}{i} = {show_expr(x)}" for i, x in enumerate(row, 1)]
        for read in self.reads:
            gate = "" if read.gate is None else f", gate {show_expr(read.gate)}"
            query, scale = show_expr(read.query), show_expr(read.scale)
            lines.append(f"  {self.output} reads ({read.kind}) {query}, scaled by {scale}{gate}")
        lines += [f"  {self.output} adds {show_expr(x)}" for x in self.token_terms]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class CanonicalRecurrence:
    """Recurrences in feeding order (one entry until several states are supported)."""

    spec: RecurrenceSpec
    recurrences: tuple[Recurrence, ...]
    rewrites: tuple[Rewrite, ...] = field(default=(), compare=False)
    consts: tuple[tuple[str, float], ...] = ()
    """Values given for consts that were substituted as numbers (sorted by name)."""

    def __str__(self) -> str:
        consts = [f"const {name} = {value:g}" for name, value in self.consts]
        return "\n".join([self.spec.name, *consts, *(str(rec) for rec in self.recurrences)])
