"""The output line: reads of the state, and terms of the token alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

from linalg_dsl.algebra.expr import ZERO, Expr, Number, Symbol, mul, show_shape, transpose
from linalg_dsl.algebra.factors import Factors, total
from linalg_dsl.algebra.normalise import Normaliser
from linalg_dsl.algebra.rules import Word, distribute
from linalg_dsl.algebra.traverse import commutative_key, walk
from linalg_dsl.errors import DslError
from linalg_dsl.language.spec import Equation
from linalg_dsl.planner.form import Read, ReadKind
from linalg_dsl.planner.linear_map import SymbolTest, split_at, state_position
from linalg_dsl.planner.low_rank import without
from linalg_dsl.source import Span

IsFixed = Callable[[Symbol], bool]
"""Whether a symbol is a const or a dimension: a run-time number, the same for all tokens and heads."""


@dataclass(frozen=True, slots=True)
class Output:
    reads: tuple[Read, ...]
    token_terms: tuple[Expr, ...]
    inner: tuple[Expr, ...] = field(default=(), compare=False)
    """Everything but the scales: where a const must be a number, not a run-time one."""
    split: int = 0
    """How many words the output line had."""


@dataclass(frozen=True, slots=True)
class _OneRead:
    kind: ReadKind
    fixed: tuple[Expr, ...]
    gate: Expr | None
    coefficient: Fraction
    query: Factors
    span: Span | None


def read_output(
    output: Equation, state: str, decay: Factors, normaliser: Normaliser, is_fixed: IsFixed
) -> Output:
    """Splits an output line into reads and token terms; raises DslError on other uses of the state."""
    value = output.value
    if not value.is_scalar and value.shape[0] == 1:
        value = transpose(value)
    if value.shape != ("V", 1):
        raise DslError.single(
            "E957",
            f"{output.target} is {show_shape(value.shape)}; only outputs [V] are supported yet",
            value.span or output.span,
            f"read the state with a query, as in {state}_tᵀ q_t",
        )
    test = SymbolTest(state)
    found: list[_OneRead] = []
    token_terms: list[tuple[tuple[Expr, ...], Expr]] = []
    place = value.span or output.span
    words = [
        p for w in distribute(value, test.within) for p in normaliser.unroll(replace(w, span=w.span or place))
    ]
    for word in words:
        at = state_position(word, test)
        if at is not None:
            one = _one_read(word, at, decay, normaliser, is_fixed)
            if one is not None:
                found.append(one)
            continue
        piece = normaliser.collapse(word)
        if piece.is_zero:
            continue
        if not piece.column or piece.row:
            raise DslError.single("E953", "this term of the output is not supported yet", word.span)
        fixed, rest = _split_fixed(piece.scale, is_fixed)
        term = Factors(rest.coefficient, rest.scalars, piece.column)
        token_terms.append((fixed, term.expr))
    reads = _merge(found)
    if not reads:
        raise DslError.single(
            "E957", f"{output.target} does not read the state {state}", value.span or output.span
        )
    inner = [e for r in reads for e in (r.query, *((r.gate,) if r.gate is not None else ()))]
    inner += [t for _, t in token_terms]
    terms = tuple(mul((*f, t)) for f, t in token_terms)
    return Output(tuple(reads), terms, tuple(inner), len(words))


def _one_read(
    word: Word, at: int, decay: Factors, normaliser: Normaliser, is_fixed: IsFixed
) -> _OneRead | None:
    """The read that a word is; None if it is zero."""
    before, after = split_at(word, at)
    left = normaliser.collapse(before)
    plain = not left.column and not left.row  # else what follows the state need not be one chain
    right = normaliser.collapse(after) if plain else left
    if left.is_zero or right.is_zero:
        return None
    if not plain or not right.column or right.row:
        raise DslError.single(
            "E957",
            "the output may read the state with a query and scale what was read by a vector; other uses "
            "of the state in the output are not supported yet",
            word.span,
            "give S_tᵀ q_t as the output and do the rest outside",
        )
    factors = left.scale * right.scale * Factors(vectors=right.column)
    kind: ReadKind = "inclusive"
    symbol = next(x for x in walk(word.chain[at]) if isinstance(x, Symbol))
    if symbol.time == -1:
        kind = "exclusive"
        rest = without(factors, decay)
        has_decay = bool(decay.scalars or decay.vectors or decay.coefficient != 1)
        if has_decay and rest is not None and rest.vectors:
            kind, factors = "decayed", rest
    fixed, rest = _split_fixed(factors, is_fixed)
    gate = Factors(vectors=left.diagonal).vector if left.diagonal else None
    query = Factors(scalars=rest.scalars, vectors=rest.vectors)
    return _OneRead(kind, fixed, gate, rest.coefficient, query, word.span)


def _split_fixed(factors: Factors, is_fixed: IsFixed) -> tuple[tuple[Expr, ...], Factors]:
    """Scalar factors made of consts and dimensions only, and the rest."""

    def fixed(e: Expr) -> bool:
        return all(is_fixed(x) for x in walk(e) if isinstance(x, Symbol))

    return (
        tuple(s for s in factors.scalars if fixed(s)),
        Factors(factors.coefficient, tuple(s for s in factors.scalars if not fixed(s)), factors.vectors),
    )


def _merge(found: list[_OneRead]) -> list[Read]:
    """One read for all that differ only in the query: Sᵀq - d Sᵀk reads with q - d k."""
    groups: dict[object, list[_OneRead]] = {}
    for one in found:
        gate_key = None if one.gate is None else commutative_key(one.gate)
        scale_key = tuple(sorted(repr(f) for f in one.fixed))
        groups.setdefault((one.kind, scale_key, gate_key), []).append(one)
    reads = []
    for group in groups.values():
        first = group[0]
        if len(group) == 1:
            scale = mul((Number(first.coefficient), *first.fixed))
            reads.append(Read(first.kind, first.query.expr, scale, first.gate))
            continue
        query = total(mul((Number(o.coefficient), o.query.expr)) for o in group)
        if query != ZERO:
            reads.append(Read(first.kind, query, mul(first.fixed), first.gate))
    return reads
