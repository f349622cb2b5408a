"""An update as a linear map: diagonal terms, erases (rank one) and writes.

S_t = Σ scale diag(d) S_{t-1} diag(e)  +  Σ scale column rowᵀ S_{t-1} diag(e)  +  Σ scale column rowᵀ

The state stands here with the axis first along which it is erased: transitions S_{t-1} M_t are those of the
transposed state. Of several coupled states any may be the S_{t-1} of a term, and a multiple of another's
present, a M_t, is a term of its own; wherever else a present stands, its update is put in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from linalg_dsl.algebra.expr import Dim, Expr, Sum, Symbol, Transpose, transpose, with_span
from linalg_dsl.algebra.factors import Factors
from linalg_dsl.algebra.normalise import Normaliser, Piece
from linalg_dsl.algebra.rules import Word, distribute
from linalg_dsl.algebra.traverse import mentions
from linalg_dsl.errors import DslError, InternalError, for_each, placed
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import State
from linalg_dsl.planner.form import Axis
from linalg_dsl.source import Span

AXES: dict[Dim, str] = {"K": "key", "V": "value"}


@dataclass(frozen=True, slots=True)
class DiagonalTerm:
    """``factors`` (scalars and columns) times S_{t-1} row by row, ``other`` column by column; of several
    states it is the one numbered ``of``."""

    factors: Factors
    other: tuple[Expr, ...] = ()
    of: int = 0
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RankOne:
    """``scale * column rowᵀ``: an erase, which acts on S_{t-1} diag(``other``), or a write.

    Of several states, ``of`` is the number of the one that is erased, ``into`` of the one written to.
    """

    scale: Factors
    column: Factors
    row: Factors
    other: tuple[Expr, ...] = ()
    of: int = 0
    into: int = 0
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class LinearMap:
    """``axis``: that of diagonals and erases, K or V; ``presents``: multiples of other states' presents."""

    axis: Axis
    diagonals: tuple[DiagonalTerm, ...]
    erases: tuple[RankOne, ...]
    writes: tuple[RankOne, ...]
    presents: tuple[DiagonalTerm, ...] = ()


@dataclass(frozen=True, slots=True)
class SymbolTest:
    """Finds states: as a test of symbols, and of expressions that mention one."""

    names: tuple[str, ...]

    def __call__(self, symbol: Symbol) -> bool:
        return symbol.name in self.names

    def within(self, expr: Expr) -> bool:
        return mentions(expr, self)


@dataclass(frozen=True, slots=True)
class _Term:
    """``left S right`` of the state numbered ``of``, its past or present, as in ``word``."""

    left: Piece
    right: Piece
    word: Word
    of: int = 0
    now: bool = False


@dataclass(frozen=True, slots=True)
class _Write:
    piece: Piece
    word: Word


def linear_map(update: Expr, state: State, normaliser: Normaliser) -> LinearMap:
    """Spreads an update over S_{t-1}, a state [K, V] or [V, K]. Raises DslError on what has no form (1)."""
    (found,) = linear_maps((update,), (state,), normaliser)
    return found


def linear_maps(
    updates: Sequence[Expr], states: Sequence[State], normaliser: Normaliser
) -> tuple[LinearMap, ...]:
    """Spreads the updates of coupled states, all [K, V] or all [V, K], over the pasts of all of them."""
    spread = _Spread(updates, tuple(s.name for s in states), normaliser)

    def parts(update: Expr) -> list[_Term | _Write]:
        with placed(update.span):
            return spread.parts(update)

    found = for_each(updates, parts)
    turned = _is_turned([p for parts in found for p in parts if isinstance(p, _Term)], states[0])
    return tuple(_linear_map(parts, i, turned, states[0]) for i, parts in enumerate(found))


def _linear_map(parts: Sequence[_Term | _Write], into: int, turned: bool, state: State) -> LinearMap:
    terms = [p for p in parts if isinstance(p, _Term)]
    if turned:
        terms = [replace(t, left=t.right, right=t.left) for t in terms]
    axis: Axis = "V" if state.dims[1 if turned else 0] == "V" else "K"
    diagonals = [(t, _diagonal(t)) for t in terms if not t.left.column]
    return LinearMap(
        axis,
        tuple(d for t, d in diagonals if not t.now),
        tuple(replace(_erase(t, turned), into=into) for t in terms if t.left.column),
        tuple(replace(_write(p, turned), into=into) for p in parts if isinstance(p, _Write)),
        tuple(d for t, d in diagonals if t.now),
    )


def _diagonal(term: _Term) -> DiagonalTerm:
    factors = term.left.scale * term.right.scale * Factors(vectors=term.left.diagonal)
    return DiagonalTerm(factors, term.right.diagonal, term.of, term.word.span)


class _Spread:
    """Takes updates apart into terms; a present that is not only scaled is replaced by its update."""

    def __init__(self, updates: Sequence[Expr], names: tuple[str, ...], normaliser: Normaliser) -> None:
        self.updates = updates
        self.names = names
        self.normaliser = normaliser
        self.test = SymbolTest(names)

    def parts(self, update: Expr) -> list[_Term | _Write]:
        spreads = isinstance(update, Sum) and not any(t.is_scalar for t in update.terms)
        sums = update.terms if isinstance(update, Sum) and spreads else (update,)
        words = for_each(sums, lambda x: for_each(self._words(x, update), self._part))
        return [p for of_sum in words for parts in of_sum for p in parts]

    def _words(self, part: Expr, update: Expr) -> list[Word]:
        spread = distribute(part, self.test.within)
        return [w for s in spread for w in self.normaliser.unroll(replace(s, span=s.span or update.span))]

    def _part(self, word: Word) -> list[_Term | _Write]:
        at = state_position(word, self.test)
        if at is None:
            piece = self.normaliser.collapse(word)
            return [] if piece.is_zero else [_outer_product(piece, word)]
        symbol = state_of(word.chain[at])
        before, after = split_at(word, at)
        of, now = self.names.index(symbol.name), symbol.time == 0
        term = _Term(self.normaliser.collapse(before), self.normaliser.collapse(after), word, of, now)
        if term.left.is_zero or term.right.is_zero:
            return []
        plain = not any((s.diagonal or s.column or s.row) for s in (term.left, term.right))
        if now and not (plain and word.chain[at] == symbol):
            value = self.updates[of]
            value = value if isinstance(word.chain[at], Symbol) else transpose(value)
            chain = (*word.chain[:at], value, *word.chain[at + 1 :])
            return self.parts(with_span(replace(word, chain=chain).expr(), word.span))
        return [_one_sided(term)]


def state_of(factor: Expr) -> Symbol:
    """The state that a factor of a chain is, transposed or not."""
    symbol = factor.arg if isinstance(factor, Transpose) else factor
    if not isinstance(symbol, Symbol):
        raise InternalError(f"{show_expr(factor)} is no state")
    return symbol


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
    return RankOne(
        scale,
        Factors(vectors=column),
        Factors(vectors=row),
        term.right.diagonal,
        term.of,
        span=term.word.span,
    )


def state_position(word: Word, test: SymbolTest) -> int | None:
    """Where the state stands in a chain (as itself or transposed)."""
    places = [i for i, x in enumerate(word.chain) if test.within(x)]
    if len(places) > 1:
        names = " and ".join(dict.fromkeys(state_of(word.chain[i]).name for i in places))
        message = f"{names} are multiplied" if " and " in names else f"{names} is multiplied by itself"
        raise DslError.single("E957", message, word.span)
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
