"""The decay of an update: its diagonal part, brought to log space, one factor per axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from linalg_dsl.algebra.expr import RESET, ZERO, Call, Expr, Number
from linalg_dsl.algebra.factors import UNIT, Factors, total
from linalg_dsl.algebra.normalise import Normaliser
from linalg_dsl.algebra.to_sympy import log_form
from linalg_dsl.algebra.traverse import commutative_key
from linalg_dsl.errors import DslError
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.form import Decay, DecayKind
from linalg_dsl.planner.linear_map import DiagonalTerm
from linalg_dsl.planner.stability import bounds, is_positive
from linalg_dsl.source import Span


@dataclass(frozen=True, slots=True)
class FoundDecay:
    """The log decays, and the linear-space factors that an erase of the decayed state carries.

    ``factors`` are those of the axis that is erased, with all scalars, ``other`` those of the other axis.
    Both of nothing where nothing of the past is kept.
    """

    decay: Decay
    value_decay: Decay
    factors: Factors
    other: tuple[Expr, ...]
    span: Span | None = None

    @property
    def keeps_nothing(self) -> bool:
        return self.factors.coefficient == 0


def take_decay(terms: Sequence[DiagonalTerm], spec: RecurrenceSpec, normaliser: Normaliser) -> FoundDecay:
    """The product of all gates on S_{t-1}; raises DslError if it is no product of one factor per axis."""
    factors, other, span = gather(terms, normaliser)
    if factors.coefficient == 0:
        return FoundDecay(log_decay(factors, spec), Decay(), Factors(Fraction(0)), (), span)
    decay, value_decay = log_decay(factors, spec), log_decay(Factors(vectors=other), spec)
    return FoundDecay(decay, value_decay, factors, other, span)


def common_decay(own: tuple[Expr, ...], other: tuple[Expr, ...], spec: RecurrenceSpec) -> FoundDecay:
    """The gates per channel that coupled states have in common, of the axis that is erased and the other."""
    factors = Factors(vectors=own)
    return FoundDecay(log_decay(factors, spec), log_decay(Factors(vectors=other), spec), factors, other)


def gather(
    terms: Sequence[DiagonalTerm], normaliser: Normaliser
) -> tuple[Factors, tuple[Expr, ...], Span | None]:
    """The sum of diagonal terms as one gate per axis; raises DslError if it is none."""
    span = next((t.span for t in terms if t.span), None)
    if not terms:
        return Factors(Fraction(0)), (), span
    if len(terms) == 1:
        return terms[0].factors, terms[0].other, span
    if len({_keys(t.other) for t in terms}) == 1:
        return normaliser.factors(total(t.factors.expr for t in terms)), terms[0].other, span
    if len({_keys(t.factors.vectors) for t in terms}) == 1:
        along = [Factors(t.factors.coefficient, t.factors.scalars, t.other).expr for t in terms]
        found = normaliser.factors(total(along))
        own = Factors(found.coefficient, found.scalars, terms[0].factors.vectors)
        return own, found.vectors, span
    shown = " + ".join(_shown(t) for t in terms)
    raise DslError.single(
        "E951",
        f"the gate {shown} is no product of one gate per axis: every element has a gate of its own, which "
        "has no chunk form",
        span,
    )


def _shown(term: DiagonalTerm) -> str:
    parts = [show_expr(term.factors.expr)] if term.factors != UNIT or not term.other else []
    if term.other:
        parts.append(show_expr(Factors(vectors=term.other).vector))
    return " ⊗ ".join(parts)


def _keys(vectors: Iterable[Expr]) -> tuple[str, ...]:
    return tuple(sorted(commutative_key(v) for v in vectors))


def log_decay(factors: Factors, spec: RecurrenceSpec) -> Decay:
    """The logarithm of the size of a product, and the factors that may be negative; that of 0 is a reset."""
    if factors.coefficient == 0:
        return Decay("scalar", Number(Fraction(str(RESET))))
    parts: list[Expr] = [*factors.scalars, *factors.vectors]
    if factors.coefficient != 1:
        parts.insert(0, Number(factors.coefficient))
    if not all(is_positive(p, spec) for p in parts) and is_positive(factors.expr, spec):
        parts = [factors.expr]
    log = total(_log_size(p, spec) for p in parts)
    signed = tuple(p for p in parts if _may_be_negative(p, spec))
    kind: DecayKind = "channel" if not log.is_scalar else "none" if log == ZERO else "scalar"
    return Decay(kind, log, signed)


def _log_size(part: Expr, spec: RecurrenceSpec) -> Expr:
    if isinstance(part, Number):
        return log_form(Number(abs(part.value)))
    if is_positive(part, spec):
        return log_form(part, lambda e: is_positive(e, spec))
    return Call("log_size", (part,))


def _may_be_negative(part: Expr, spec: RecurrenceSpec) -> bool:
    low = bounds(part, spec).low
    return low is None or low < 0
