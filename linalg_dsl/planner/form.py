"""The canonical recurrence, form (1) of the derivation, as data.

    S_t = D_t o S_{t-1} + sum_j L_j (W_j + sum_i sigma_ji U_i)^T        U_i = S_{t-1}^T B_i
    o_t = sum_l gate_l o (read_l of S at query_l) + sum of per-token terms

S stands here with the axis that is erased and written along first: ``axis``, K, or V for a transition on the
value side, whatever the order in which the state is declared. Its other axis is the one of the rows that are
written. All expressions use only declared inputs, params, consts and numbers (bindings are substituted);
vectors are columns. Invariants, checked by ``verify``:

1. ``left`` has m >= 1 columns [axis], ``written`` m columns of the other axis (or ``ZERO``), ``erase`` r
   columns [axis], ``sigma`` m x r scalars; r <= m <= 8, r <= 4, r = 0 where nothing is erased;
2. D is the decay times ``value_decay``. The decay is ``none``, ``scalar`` (log: a scalar) or ``channel``
   (log: a column [axis]); ``value_decay`` is ``none`` or ``channel`` (log: a column of the other axis);
   ``log`` is the *log* of the size of the decay per token, natural log, and ``signed`` holds what its sign is
   the product of;
3. with ``erase_read == "decayed"`` U_i reads the state after the decay of the axis, else ("exclusive")
   S_{t-1}; after ``value_decay`` it reads it in any case;
4. all queries have one axis, and so have all outputs; of several outputs each is reads alone;
5. nothing here mentions a state.

Several coupled states are one recurrence: what they share is above, how they differ is its ``Stack``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from linalg_dsl.algebra.expr import ONE, RESET, ZERO, Expr, Number
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.source import Span

ReadKind = Literal["inclusive", "exclusive", "decayed"]
DecayKind = Literal["none", "scalar", "channel"]
Axis = Literal["K", "V"]


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
    signed: tuple[Expr, ...] = ()
    """Factors that may be negative; what is 0 counts as positive, its size is in ``log``."""

    @property
    def is_zero(self) -> bool:
        return isinstance(self.log, Number) and float(self.log.value) <= RESET

    def show_log(self) -> str:
        return "-inf" if self.is_zero else show_expr(self.log)


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the state: ``gate o scale * (S^T query)``, or S query for a query [V].

    inclusive reads S_t, exclusive S_{t-1}, decayed D_t o S_{t-1}. ``scale`` is made of consts, the
    sizes K and V, and numbers (a run-time float of the kernels); ``gate`` is a column of the axis that the
    query does not have, or None. ``state`` says which of several states is read, ``to`` which output
    it is a term of.
    """

    kind: ReadKind
    query: Expr
    scale: Expr
    gate: Expr | None = None
    state: int = 0
    to: int = 0

    @property
    def axis(self) -> Axis:
        """The axis that the read sums over."""
        return "V" if self.query.shape[0] == "V" else "K"


@dataclass(frozen=True, slots=True)
class Stack:
    """n coupled states under one triangular gate of blocks, 2 <= n <= 4.

        S_i,t = sum_j a_ij D_t o S_j,t-1 + sum_l c_li L_l Z_l^T        U_k = (sum_j e_kj S_j,t-1)^T B_k

    All of a, c and e are scalars of the token. The states stand in an order in which a is upper triangular:
    ``gates`` has the logarithms of its diagonal, ``coupling`` (n x n) what is above it, ``ZERO`` elsewhere.
    ``spread`` (m x n) is c: how much of every written column goes to every state; ``sources`` (r x n) is e:
    how much of every state an erase reads. ``channels``: where gates per channel of the erased axis differ,
    that of each state; then D is 1, and a_ij is 0 between states of different ones.
    """

    states: tuple[str, ...]
    gates: tuple[Decay, ...]
    coupling: tuple[tuple[Expr, ...], ...]
    spread: tuple[tuple[Expr, ...], ...]
    sources: tuple[tuple[Expr, ...], ...]
    channels: tuple[Decay, ...] = ()


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One matrix state in form (1), or several that are coupled by a ``stack``: then ``state`` is its first,
    and ``decay`` and ``value_decay`` are what all their gates have in common, per channel or none.
    """

    state: str
    decay: Decay
    left: tuple[Expr, ...]
    written: tuple[Expr, ...]
    erase: tuple[Expr, ...]
    erase_read: Literal["exclusive", "decayed"]
    sigma: tuple[tuple[Expr, ...], ...]
    reads: tuple[Read, ...]
    token_terms: tuple[Expr, ...] = ()
    """Columns added to the only output that read no state: bonus, skip."""
    outputs: tuple[str, ...] = ("o",)
    axis: Axis = "K"
    value_decay: Decay = Decay()
    stack: Stack | None = None
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def states(self) -> tuple[str, ...]:
        return (self.state,) if self.stack is None else self.stack.states

    @property
    def decays(self) -> tuple[Decay, ...]:
        """Every factor of the gates that has a logarithm."""
        gates = () if self.stack is None else (*self.stack.gates, *self.stack.channels)
        return (self.decay, self.value_decay, *gates)

    @property
    def keeps_nothing(self) -> bool:
        """Whether the decay is 0: a transition of low rank alone."""
        return self.decay.is_zero

    @property
    def output_axis(self) -> Axis:
        return "K" if self.reads[0].axis == "V" else "V"

    @property
    def m(self) -> int:
        return len(self.left)

    @property
    def r(self) -> int:
        return len(self.erase)

    def __str__(self) -> str:
        if self.stack is not None:
            return "\n".join([*self._stack_lines(self.stack), *self._slot_lines()])
        past = f"{self.state}_{{t-1}}" + ("ᵀ" if self.axis == "V" else "")
        after = f"{self.state}_t" + ("ᵀ" if self.axis == "V" else "")
        erased = f"D_t ∘ {past}" if self.erase_read == "decayed" else past
        line = f"{after} = D_t ∘ {past} + L_t "
        first = line + (f"(W_t + Σ_t U_t),  U_t = B_tᵀ ({erased})" if self.erase else "W_t")
        return "\n".join([first, *self._slot_lines()])

    def _stack_lines(self, stack: Stack) -> list[str]:
        turn = "ᵀ" if self.axis == "V" else ""
        decays = "" if self.decay.kind == self.value_decay.kind == "none" else "D_t ∘ "
        past = [f"{decays}{name}_{{t-1}}{turn}" for name in stack.states]
        lines = []
        for i, (name, row) in enumerate(zip(stack.states, stack.coupling, strict=True)):
            terms = [] if stack.gates[i].is_zero else [f"a_{i + 1}{i + 1} {past[i]}"]
            terms += _weighed(row, past)
            terms += _weighed([c[i] for c in stack.spread], [f"L_{j + 1} Z_{j + 1}" for j in range(self.m)])
            lines.append(f"{name}_t{turn} = " + (" + ".join(terms) or "0"))
        erased = past if self.erase_read == "decayed" else [f"{name}_{{t-1}}{turn}" for name in stack.states]
        for k, row in enumerate(stack.sources, 1):
            lines.append(f"  U_{k} = B_{k}ᵀ ({' + '.join(_weighed(row, erased))}),  Z = W_t + Σ_t U_t")
        for i, gate in enumerate(stack.gates, 1):
            signs = "".join(f", sign of {show_expr(x)}" for x in gate.signed)
            lines.append(f"  log a_{i}{i} = {gate.show_log()}{signs}")
        for name, gate in zip(stack.states, stack.channels, strict=False):
            lines.append(f"  log D of {name} = {gate.show_log()}")
        return lines

    def _slot_lines(self) -> list[str]:
        lines = []
        for decay, name in ((self.decay, "D"), (self.value_decay, "D'")):
            if decay.kind != "none":
                lines.append(f"  log {name} ({decay.kind}) = {decay.show_log()}")
            if decay.signed:
                signs = ", ".join(show_expr(x) for x in decay.signed)
                lines.append(f"  {name} has the signs of {signs}")
        for name, columns in (("L", self.left), ("W", self.written), ("B", self.erase)):
            lines += [f"  {name}_{i} = {show_expr(x)}" for i, x in enumerate(columns, 1)]
        for j, row in enumerate(self.sigma, 1):
            lines += [f"  Σ_{j}{i} = {show_expr(x)}" for i, x in enumerate(row, 1)]
        for read in self.reads:
            gate = "" if read.gate is None else f", gate {show_expr(read.gate)}"
            query, scale = show_expr(read.query), show_expr(read.scale)
            of = "" if self.stack is None else f" of {self.states[read.state]}"
            name = self.outputs[read.to]
            lines.append(f"  {name} reads ({read.kind}{of}) {query}, scaled by {scale}{gate}")
        lines += [f"  {self.outputs[0]} adds {show_expr(x)}" for x in self.token_terms]
        return lines


def _weighed(weights: Sequence[Expr], texts: Sequence[str]) -> list[str]:
    """The texts with their weights, those of weight 0 left out."""
    pairs = [(w, text) for w, text in zip(weights, texts, strict=True) if w != ZERO]
    return [text if w == ONE else f"({show_expr(w)}) {text}" for w, text in pairs]


@dataclass(frozen=True, slots=True)
class CanonicalRecurrence:
    """Recurrences in feeding order: one entry, since coupled states are one, and others are stages apart."""

    spec: RecurrenceSpec
    recurrences: tuple[Recurrence, ...]
    rewrites: tuple[Rewrite, ...] = field(default=(), compare=False)
    consts: tuple[tuple[str, float], ...] = ()
    """Values given for consts that were substituted as numbers (sorted by name)."""

    def __str__(self) -> str:
        consts = [f"const {name} = {value:g}" for name, value in self.consts]
        return "\n".join([self.spec.name, *consts, *(str(rec) for rec in self.recurrences)])
