"""An update as a linear map: diagonal terms, erases (rank one) and writes.

S_t = Σ scale diag(d) S_{t-1} diag(e)  +  Σ scale column rowᵀ S_{t-1} diag(e)  +  Σ scale column rowᵀ

The state stands here with the axis first along which it is erased: transitions S_{t-1} M_t are those of the
transposed state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from linalg_dsl.algebra.expr import Dim, Expr, Sum, Symbol
from linalg_dsl.algebra.factors import Factors
from linalg_dsl.algebra.normalise import Normaliser, Piece
from linalg_dsl.algebra.rules import Word, distribute
from linalg_dsl.algebra.traverse import mentions
from linalg_dsl.errors import DslError, for_each
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import State
from linalg_dsl.planner.form import Axis
from linalg_dsl.source import Span

AXES: dict[Dim, str] = {"K": "key", "V": "value"}


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
    """``left S_{t-1} right``, as in ``word``."""

    left: Piece
    right: Piece
    word: Word


@dataclass(frozen=True, slots=True)
class _Write:
    piece: Piece
    word: Word


def linear_map(update: Expr, state: State, normaliser: Normaliser) -> LinearMap:
    """Spreads an update over S_{t-1}, a state [K, V] or [V, K]. Raises DslError on what has no form (1)."""
    test = SymbolTest(state.name)

    def words_of(part: Expr) -> list[Word]:
        spread = distribute(part, test.within)
        return [w for s in spread for w in normaliser.unroll(replace(s, span=s.span or update.span))]

    def part_of(word: Word) -> _Term | _Write | None:
        at = state_position(word, test)
        if at is None:
            piece = normaliser.collapse(word)
            return None if piece.is_zero else _outer_product(piece, word)
        before, after = split_at(word, at)
        term = _Term(normaliser.collapse(before), normaliser.collapse(after), word)
        if term.left.is_zero or term.right.is_zero:
            return None
        return _one_sided(term)

    spreads = isinstance(update, Sum) and not any(t.is_scalar for t in update.terms)
    sums = update.terms if isinstance(update, Sum) and spreads else (update,)
    parts = [p for found in for_each(sums, lambda x: for_each(words_of(x), part_of)) for p in found]
    terms = [p for p in parts if isinstance(p, _Term)]
    writes = [p for p in parts if isinstance(p, _Write)]
    turned = _is_turned(terms, state)
    if turned:
        terms = [_Term(t.right, t.left, t.word) for t in terms]
    axis: Axis = "V" if state.dims[1 if turned else 0] == "V" else "K"
    return LinearMap(
        axis,
        tuple(
            DiagonalTerm(
                t.left.scale * t.right.scale * Factors(vectors=t.left.diagonal), t.right.diagonal, t.word.span
            )
            for t in terms
            if not t.left.column
        ),
        tuple(_erase(t, turned) for t in terms if t.left.column),
        tuple(_write(w, turned) for w in writes),
    )


def _is_turned(terms: Sequence[_Term], state: State) -> bool:
    """Whether the state is erased, or else gated, along its second axis only."""
    left = [t for t in terms if t.left.column]
    right = [t for t in terms if t.right.column]
    if left and right:
        raise DslError.single(
            "E952",
            f"{show_expr(left[0].word.expr())} erases along the {AXES[state.dims[0]]} axis and "
            f"{show_expr(right[0].word.expr())} along the other: a map that is low rank on both sides has no "
            "chunk form",
            right[0].word.span,
        )
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
    return RankOne(scale, Factors(vectors=column), Factors(vectors=row), term.right.diagonal, term.word.span)


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


def _outer_product(piece: Piece, word: Word) -> _Write:
    if piece.column and piece.row:
        return _Write(piece, word)
    raise DslError.single(
        "E953", f"the write {show_expr(word.expr())} is no outer product, so it has no chunk form", word.span
    )


def _write(write: _Write, turned: bool) -> RankOne:
    piece = write.piece
    column, row = (piece.row, piece.column) if turned else (piece.column, piece.row)
    return RankOne(piece.scale, Factors(vectors=column), Factors(vectors=row), span=write.word.span)


def _one_sided(term: _Term) -> _Term:
    """Raises DslError on a term that is low rank on both sides."""
    sides = (term.left, term.right)
    read = any(bool(s.column) != bool(s.row) for s in sides)  # rowᵀ S column is a scalar
    if not read and not all(s.column for s in sides):
        return term
    what = (
        "a scalar that is read from the state scales a write"
        if read
        else "the state is erased along both axes"
    )
    raise DslError.single(
        "E952",
        f"in {show_expr(term.word.expr())} {what}: a map that is low rank on both sides has no chunk form",
        term.word.span,
    )
