"""An update as a linear map: diagonal terms, erases (rank one) and writes.

S_t = Σ scale diag(d) S_{t-1} diag(e)  +  Σ scale column rowᵀ S_{t-1} diag(e)  +  Σ scale column rowᵀ

The state stands here with the axis first along which it is erased: transitions S_{t-1} M_t are those of the
transposed state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from linalg_dsl.algebra.expr import Expr, Symbol
from linalg_dsl.algebra.factors import Factors
from linalg_dsl.algebra.normalise import Normaliser, Piece
from linalg_dsl.algebra.rules import Word, distribute
from linalg_dsl.algebra.traverse import mentions
from linalg_dsl.errors import DslError
from linalg_dsl.language.spec import State
from linalg_dsl.planner.form import Axis
from linalg_dsl.source import Span


@dataclass(frozen=True, slots=True)
class DiagonalTerm:
    """``factors`` (scalars and columns) times S_{t-1} row by row, ``other`` column by column."""

    factors: Factors
    other: tuple[Expr, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RankOne:
    """``scale * column rowᵀ``: an erase, which acts on S_{t-1} diag(``other``), or a write."""

    scale: Factors
    column: Factors
    row: Factors
    other: tuple[Expr, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class LinearMap:
    """``axis``: the axis of diagonals and erases, K or V."""

    axis: Axis
    diagonals: tuple[DiagonalTerm, ...]
    erases: tuple[RankOne, ...]
    writes: tuple[RankOne, ...]


@dataclass(frozen=True, slots=True)
class SymbolTest:
    """Finds a state: as a test of symbols, and of expressions that mention it."""

    name: str
    time: int | None = None

    def __call__(self, symbol: Symbol) -> bool:
        return symbol.name == self.name and (self.time is None or symbol.time == self.time)

    def within(self, expr: Expr) -> bool:
        return mentions(expr, self)


@dataclass(frozen=True, slots=True)
class _Term:
    """``left S_{t-1} right``."""

    left: Piece
    right: Piece
    span: Span | None


def linear_map(update: Expr, state: State, normaliser: Normaliser) -> LinearMap:
    """Spreads an update over S_{t-1}, a state [K, V] or [V, K]. Raises DslError on what has no form (1)."""
    test = SymbolTest(state.name)
    terms: list[_Term] = []
    writes: list[tuple[Piece, Word]] = []
    for word in distribute(update, test.within):
        for part in normaliser.unroll(replace(word, span=word.span or update.span)):
            at = state_position(part, test)
            if at is None:
                piece = normaliser.collapse(part)
                if not piece.is_zero:
                    writes.append((piece, part))
                continue
            before, after = split_at(part, at)
            term = _Term(normaliser.collapse(before), normaliser.collapse(after), part.span)
            if not term.left.is_zero and not term.right.is_zero:
                terms.append(term)
    turned = _is_turned(terms, state)
    if turned:
        terms = [_Term(t.right, t.left, t.span) for t in terms]
    axis: Axis = "V" if state.dims[1 if turned else 0] == "V" else "K"
    return LinearMap(
        axis,
        tuple(
            DiagonalTerm(
                t.left.scale * t.right.scale * Factors(vectors=t.left.diagonal), t.right.diagonal, t.span
            )
            for t in terms
            if not t.left.column
        ),
        tuple(_erase(t, turned) for t in terms if t.left.column),
        tuple(_write(piece, word, turned) for piece, word in writes),
    )


def _is_turned(terms: Sequence[_Term], state: State) -> bool:
    """Whether the state is erased, or else gated, along its second axis only."""
    left = [t for t in terms if t.left.column or t.left.row]
    right = [t for t in terms if t.right.column or t.right.row]
    for term in terms:
        for side in (term.left, term.right):
            if bool(side.column) != bool(side.row):  # rowᵀ S column is a scalar
                raise _two_sided(term.span)
    if left and right:
        both = next((t for t in left if t in right), right[0])
        raise _two_sided(both.span)
    if left or right:
        return bool(right)
    gates = [any(t.left.diagonal for t in terms), any(t.right.diagonal for t in terms)]
    if gates[0] == gates[1]:
        return state.dims[0] == "V"
    return gates[1]


def _erase(term: _Term, turned: bool) -> RankOne:
    column, row = term.left.column, term.left.row
    if turned:  # S (a bᵀ) is b (aᵀ Sᵀ) for the transposed state
        column, row = row, column
    scale = term.left.scale * term.right.scale
    return RankOne(scale, Factors(vectors=column), Factors(vectors=row), term.right.diagonal, term.span)


def state_position(word: Word, test: SymbolTest) -> int | None:
    """Where the state stands in a chain (as itself or transposed)."""
    places = [i for i, x in enumerate(word.chain) if test.within(x)]
    if len(places) > 1:
        raise DslError.single("E957", f"{test.name} is multiplied by itself", word.span)
    return places[0] if places else None


def split_at(word: Word, i: int) -> tuple[Word, Word]:
    """What stands left (with the scalars) and right of the state."""
    return (
        Word(word.coefficient, word.scalars, word.chain[:i], word.span),
        Word(chain=word.chain[i + 1 :], span=word.span),
    )


def _write(piece: Piece, word: Word, turned: bool) -> RankOne:
    if not (piece.column and piece.row):
        raise DslError.single("E953", "a write that is no outer product is not supported yet", word.span)
    column, row = (piece.row, piece.column) if turned else (piece.column, piece.row)
    return RankOne(piece.scale, Factors(vectors=column), Factors(vectors=row), span=word.span)


def _two_sided(span: Span | None) -> DslError:
    return DslError.single(
        "E952",
        "the state is erased along both axes, or a scalar read from it scales a write: a map that is low "
        "rank on both sides has no chunk form and is not supported yet",
        span,
    )
