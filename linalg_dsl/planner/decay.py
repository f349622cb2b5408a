"""The decay of an update: its diagonal part, brought to log space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from linalg_dsl.algebra.expr import ZERO, Expr, Number
from linalg_dsl.algebra.factors import Factors, total
from linalg_dsl.algebra.normalise import Normaliser
from linalg_dsl.algebra.to_sympy import log_form
from linalg_dsl.errors import DslError
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.form import Decay, DecayKind
from linalg_dsl.planner.linear_map import DiagonalTerm
from linalg_dsl.planner.stability import bounds, is_positive
from linalg_dsl.source import Span


@dataclass(frozen=True, slots=True)
class FoundDecay:
    """The log decay, and the linear-space factors that an erase of the decayed state carries."""

    decay: Decay
    factors: Factors
    span: Span | None = None


def take_decay(terms: Sequence[DiagonalTerm], spec: RecurrenceSpec, normaliser: Normaliser) -> FoundDecay:
    """The product of all gates on S_{t-1}; raises DslError if it is zero or may not be positive."""
    factors, span = _gather(terms, spec, normaliser)
    log = total(log_form(f, lambda e: is_positive(e, spec)) for f in _parts(factors, spec, span))
    kind: DecayKind = "channel" if not log.is_scalar else "none" if log == ZERO else "scalar"
    return FoundDecay(Decay(kind, log), factors, span)


def _gather(
    terms: Sequence[DiagonalTerm], spec: RecurrenceSpec, normaliser: Normaliser
) -> tuple[Factors, Span | None]:
    span = next((t.span for t in terms if t.span), None)
    if len(terms) == 1:
        factors = terms[0].factors
    else:
        factors = normaliser.factors(total(t.factors.expr for t in terms))
    if factors.coefficient == 0 or not terms:
        raise DslError.single(
            "E954",
            f"{spec.states[0].name} keeps nothing of its past but a low-rank part; that is not supported yet",
            span or spec.updates[0].value.span or spec.updates[0].span,
            f"add what is kept, as in `exp(g_t) {spec.states[0].name}_{{t-1}}`",
        )
    return factors, span


def _parts(factors: Factors, spec: RecurrenceSpec, span: Span | None) -> list[Expr]:
    """Positive factors whose product is the gate."""
    parts = [*factors.scalars, *factors.vectors]
    if factors.coefficient != 1:
        parts.insert(0, Number(factors.coefficient))
    if all(is_positive(p, spec) for p in parts):
        return parts
    if is_positive(factors.expr, spec):
        return [factors.expr]
    worst = next(p for p in parts if not is_positive(p, spec))
    found = bounds(worst, spec)
    where = _show_interval(found.low, found.high, found.low_open, found.high_open)
    factor = "it" if worst == factors.expr else f"its factor {show_expr(worst)}"
    raise DslError.single(
        "E956",
        f"the gate {show_expr(factors.expr)} cannot be proved positive: {factor} lies in {where}; signed "
        "gates are not supported yet",
        worst.span or span,
        "declare the range of what it is made of, as in `in (0, 1)`, or write it as exp of a log gate",
    )


def _show_interval(low: float | None, high: float | None, low_open: bool, high_open: bool) -> str:
    left = f"{'(' if low_open else '['}{'-inf' if low is None else f'{low:g}'}"
    right = f"{'inf' if high is None else f'{high:g}'}{')' if high_open else ']'}"
    return f"{left}, {right}"
