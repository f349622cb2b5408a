"""The output line: reads of the state, and terms of the token alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from linalg_dsl.algebra.expr import ZERO, Expr, Number, Symbol, mul, show_shape, transpose
from linalg_dsl.algebra.factors import Factors, total
from linalg_dsl.algebra.normalise import Normaliser
from linalg_dsl.algebra.rules import Word, distribute
from linalg_dsl.algebra.traverse import commutative_key, walk
from linalg_dsl.errors import DslError, for_each
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import Equation, State
from linalg_dsl.planner.form import Read, ReadKind
from linalg_dsl.planner.linear_map import SymbolTest, split_at, state_of, state_position
from linalg_dsl.planner.low_rank import without
from linalg_dsl.planner.ops import OTHER
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
    state: int
    span: Span | None


def read_output(
    output: Equation,
    states: Sequence[State],
    decay: Mapping[str, Factors],
    normaliser: Normaliser,
    is_fixed: IsFixed,
) -> Output:
    """Splits an output line into reads and token terms; raises DslError on other uses of the states.

    ``decay``: what a query along K, and one along V, must hold, and the gate of the other axis, for a read
    of the decayed state (scalars count with the query); empty where nothing decays.
    """
    value = output.value
    if not value.is_scalar and value.shape[0] == 1:
        value = transpose(value)
    if value.shape not in (("V", 1), ("K", 1)):
        raise DslError.single(
            "E957",
            f"{output.target} is {show_shape(value.shape)}; a chunk form gives outputs [V] or [K]",
            value.span or output.span,
            f"read the state with a query, as in {states[0].name}_tᵀ q_t",
        )
    test = SymbolTest(tuple(s.name for s in states))
    place = value.span or output.span
    words = [
        p for w in distribute(value, test.within) for p in normaliser.unroll(replace(w, span=w.span or place))
    ]

    def part_of(word: Word) -> _OneRead | tuple[tuple[Expr, ...], Expr] | None:
        at = state_position(word, test)
        if at is not None:
            return _one_read(word, at, test.names, decay, normaliser, is_fixed)
        return _token_term(word, normaliser, is_fixed)

    parts = for_each(words, part_of)
    found = [p for p in parts if isinstance(p, _OneRead)]
    token_terms = [p for p in parts if isinstance(p, tuple)]
    reads = _merge(found)
    if not reads:
        raise DslError.single(
            "E957", f"{output.target} does not read {_named(states)}", value.span or output.span
        )
    inner = [e for r in reads for e in (r.query, *((r.gate,) if r.gate is not None else ()))]
    inner += [t for _, t in token_terms]
    terms = tuple(mul((*f, t)) for f, t in token_terms)
    return Output(tuple(reads), terms, tuple(inner), len(words))


def _token_term(
    word: Word, normaliser: Normaliser, is_fixed: IsFixed
) -> tuple[tuple[Expr, ...], Expr] | None:
    """A term that reads no state, its run-time numbers apart; None if it is zero."""
    piece = normaliser.collapse(word)
    if piece.is_zero:
        return None
    if not piece.column or piece.row:
        raise DslError.single(
            "E953", f"the term {show_expr(word.expr())} of the output has no chunk form", word.span
        )
    fixed, rest = _split_fixed(piece.scale, is_fixed)
    return fixed, Factors(rest.coefficient, rest.scalars, piece.column).expr


def _named(states: Sequence[State]) -> str:
    *most, last = (s.name for s in states)
    return f"the states {', '.join(most)} or {last}" if most else f"the state {last}"


def _one_read(
    word: Word,
    at: int,
    states: Sequence[str],
    decay: Mapping[str, Factors],
    normaliser: Normaliser,
    is_fixed: IsFixed,
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
            f"{show_expr(word.expr())} is no read: in a chunk form the output reads the state with a query "
            "and scales what was read by a vector",
            word.span,
            "give S_tᵀ q_t as the output and do the rest outside",
        )
    factors = left.scale * right.scale * Factors(vectors=right.column)
    gates = Factors(vectors=left.diagonal)
    kind: ReadKind = "inclusive"
    symbol = state_of(word.chain[at])
    if symbol.time == -1:
        kind = "exclusive"
        axis = str(word.chain[at].shape[1])
        if decay:
            decayed = without(factors, decay[axis])
            ungated = without(gates, Factors(vectors=decay[OTHER[axis]].vectors))
            if decayed is not None and decayed.vectors and ungated is not None:
                kind, factors, gates = "decayed", decayed, ungated
    fixed, rest = _split_fixed(factors, is_fixed)
    gate = gates.vector if gates.vectors else None
    query = Factors(scalars=rest.scalars, vectors=rest.vectors)
    of = states.index(symbol.name)
    return _OneRead(kind, fixed, gate, rest.coefficient, query, of, word.span)


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
        groups.setdefault((one.state, one.kind, scale_key, gate_key), []).append(one)
    reads = []
    for group in groups.values():
        first = group[0]
        if len(group) == 1:
            scale = mul((Number(first.coefficient), *first.fixed))
            reads.append(Read(first.kind, first.query.expr, scale, first.gate, first.state))
            continue
        query = total(mul((Number(o.coefficient), o.query.expr)) for o in group)
        if query != ZERO:
            reads.append(Read(first.kind, query, mul(first.fixed), first.gate, first.state))
    return reads
