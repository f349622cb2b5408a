"""An update as a linear map: diagonal terms, erases (rank one) and writes.

S_t = Σ scale diag(d) S_{t-1}  +  Σ scale column rowᵀ S_{t-1}  +  Σ scale column rowᵀ
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from linalg_dsl.algebra.expr import Diag, Expr, Symbol
from linalg_dsl.algebra.factors import Factors
from linalg_dsl.algebra.normalise import Normaliser, Piece
from linalg_dsl.algebra.rules import Word, distribute
from linalg_dsl.algebra.traverse import mentions
from linalg_dsl.errors import DslError
from linalg_dsl.source import Span


@dataclass(frozen=True, slots=True)
class DiagonalTerm:
    """``factors`` (scalars and columns) times S_{t-1}, row by row."""

    factors: Factors
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RankOne:
    """``scale * column rowᵀ``: an erase (then it acts on S_{t-1}) or a write (row of length V)."""

    scale: Factors
    column: Factors
    row: Factors
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class LinearMap:
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


def linear_map(update: Expr, state: str, normaliser: Normaliser) -> LinearMap:
    """Spreads an update [K, V] over S_{t-1}. Raises DslError on what has no form (1)."""
    test = SymbolTest(state)
    diagonals: list[DiagonalTerm] = []
    erases: list[RankOne] = []
    writes: list[RankOne] = []
    for word in distribute(update, test.within):
        for part in normaliser.unroll(replace(word, span=word.span or update.span)):
            at = state_position(part, test)
            if at is None:
                piece = normaliser.collapse(part)
                if not piece.is_zero:
                    writes.append(_write(piece, part))
                continue
            before, after = split_at(part, at)
            left = normaliser.collapse(before)
            if bool(left.column) != bool(left.row):  # rowᵀ S column is a scalar
                raise _two_sided(part.span)
            right = normaliser.collapse(after)
            if right.diagonal or right.column or right.row:
                raise _two_sided(part.span) if left.column and right.column else _value_side(after, state)
            scale = left.scale * right.scale
            if scale.coefficient == 0:
                continue
            if left.column:
                erases.append(
                    RankOne(scale, Factors(vectors=left.column), Factors(vectors=left.row), part.span)
                )
            else:
                diagonals.append(DiagonalTerm(scale * Factors(vectors=left.diagonal), part.span))
    return LinearMap(tuple(diagonals), tuple(erases), tuple(writes))


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


def _write(piece: Piece, word: Word) -> RankOne:
    if not (piece.column and piece.row):
        raise DslError.single("E953", "a write that is no outer product is not supported yet", word.span)
    return RankOne(piece.scale, Factors(vectors=piece.column), Factors(vectors=piece.row), word.span)


def _value_side(after: Word, state: str) -> DslError:
    if all(isinstance(x, Diag) for x in after.chain):
        what = f"a gate on the value axis ({state} diag(…), or β ∘ (…) with β of length V)"
    else:
        what = f"a transition on the value side ({state} times a matrix)"
    return DslError.single(
        "E951",
        f"{what} is not supported yet",
        next((x.span for x in after.chain if x.span), after.span),
        f"transitions on the key side are: M_t {state}_{{t-1}} with M_t of shape [K, K]",
    )


def _two_sided(span: Span | None) -> DslError:
    return DslError.single(
        "E952",
        "a scalar read from the state scales a write: a map that is low rank on both sides has no "
        "chunk form and is not supported yet",
        span,
    )
