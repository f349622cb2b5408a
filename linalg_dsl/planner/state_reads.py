"""Where one state's equation reads another: the sub-expressions that the other's stage must compute.

A matrix state is read where it is contracted with a vector, ``S_tᵀ q_t``: that vector is the read, not the
state. A vector or scalar state is read as it stands, or through an inner product, ``n_tᵀ q_t``. Around a
read stands elementwise work that belongs to the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from linalg_dsl.algebra.expr import (
    Call,
    Diag,
    Expr,
    Hadamard,
    Product,
    Quotient,
    Sum,
    Symbol,
    Transpose,
    add,
    mul,
    transpose,
)
from linalg_dsl.algebra.rules import is_matrix
from linalg_dsl.algebra.traverse import mentions, rebuild, walk

Take = Callable[[Expr, str], Expr | None]
"""Gets a read (a column or a scalar) and the state that is read; gives what stands for it in the reader.

No other state stands in a read: what its query reads has been taken before. None, for the inner product of
a vector state, asks for the state as it stands to be taken instead.
"""


class WholeRead(Exception):
    """A matrix state is read as a whole: its reader and it must be one stage."""

    def __init__(self, state: str) -> None:
        super().__init__(state)
        self.state = state


class ReadFinder:
    """Replaces the reads of ``foreign`` states; those of ``own``, the reader's, stay as they are."""

    def __init__(self, foreign: Iterable[str], own: Iterable[str], take: Take) -> None:
        self.foreign = frozenset(foreign)
        self.own = frozenset(own)
        self.take = take

    def replace(self, expr: Expr) -> Expr:
        """The expression without foreign states. Raises WholeRead where a matrix is not contracted."""
        if not self._foreign_in(expr):
            return expr
        match expr:
            case Symbol(name=name):
                if is_matrix(expr.shape):
                    raise WholeRead(name)
                return self._bare(expr)
            case Call("dot", (x, y)):
                return self.replace(mul((transpose(x), y)))
            case Product(factors):
                return self._product(factors)
            case _:
                return rebuild(expr, [self.replace(c) for c in expr.children])

    # -- products -----------------------------------------------------------------------------------
    def _product(self, factors: tuple[Expr, ...]) -> Expr:
        for i, factor in enumerate(factors):
            if isinstance(factor, Sum) and self._matrix_in(factor):
                spread = (mul((*factors[:i], t, *factors[i + 1 :])) for t in factor.terms)
                return self.replace(add(spread))
        matrices = [i for i, factor in enumerate(factors) if self._matrix_in(factor)]
        if matrices:
            # Sᵀ (Pᵀ q): what stands between no other state and its vector comes first
            spans = {i: (_to_column(factors, i), _to_row(factors, i)) for i in matrices}
            ready = (i for i in matrices if any(s and self._is_free(factors, s, i) for s in spans[i]))
            return self.replace(self._contracted(factors, next(ready, matrices[0])))
        for i, factor in enumerate(factors):
            if _is_vector(factor) and self._foreign_in(factor):
                made = self._inner(factors, i)
                if made is not None:
                    return self.replace(made)
        return mul(self.replace(f) for f in factors)

    def _contracted(self, factors: tuple[Expr, ...], at: int) -> Expr:
        """The product with the vector that a matrix state makes with its neighbours taken as a read."""
        spans = (_to_column(factors, at), _to_row(factors, at))
        state = min(self._names(factors[at]))
        chosen = [s for s in spans if s is not None and self._is_free(factors, s, at)]
        if not chosen:
            raise WholeRead(state)
        # of a two-sided product the side along the state's first axis: Sᵀ q before S p
        straight = any(isinstance(x, Symbol) and x.name == state for x in _upright(factors[at]))
        span = chosen[-1] if straight else chosen[0]
        first, last = span
        scalars = [f for f in factors[first : last + 1] if f.is_scalar]
        chain = self._chain(factors, span, at)
        turned = chain.shape[0] == 1
        read = self.take(transpose(chain) if turned else chain, state)
        if read is None:
            raise WholeRead(state)
        return mul((*factors[:first], *scalars, transpose(read) if turned else read, *factors[last + 1 :]))

    def _is_free(self, factors: tuple[Expr, ...], span: tuple[int, int], at: int) -> bool:
        """Whether a read of factor ``at`` over the span needs no state of the reader and no other matrix."""
        between = [i for i in range(span[0], span[1] + 1) if i != at and self._matrix_in(factors[i])]
        return not between and not self._owns(factors, span)

    def _inner(self, factors: tuple[Expr, ...], at: int) -> Expr | None:
        """The product with the inner product of a vector state taken as a read, None to take it bare."""
        span = _to_column(factors, at) if factors[at].shape[0] == 1 else _to_row(factors, at)
        if span is None or self._owns(factors, span):
            return None
        first, last = span
        scalars = [f for f in factors[first : last + 1] if f.is_scalar]
        read = self.take(self._chain(factors, span, at), min(self._names(factors[at])))
        return None if read is None else mul((*factors[:first], *scalars, read, *factors[last + 1 :]))

    # -----------------------------------------------------------------------------------------------
    def _bare(self, symbol: Symbol) -> Expr:
        read = self.take(symbol, symbol.name)
        if read is None:
            raise WholeRead(symbol.name)
        return read

    def _chain(self, factors: tuple[Expr, ...], span: tuple[int, int], at: int) -> Expr:
        """The read of the state in factor ``at``; what else is read in its query is replaced."""
        part = [(i, factors[i]) for i in range(span[0], span[1] + 1) if not factors[i].is_scalar]
        return mul(f if i == at else self.replace(f) for i, f in part)

    def _names(self, expr: Expr) -> frozenset[str]:
        return frozenset(x.name for x in walk(expr) if isinstance(x, Symbol) and x.name in self.foreign)

    def _matrix_in(self, expr: Expr) -> bool:
        """Whether a foreign matrix state makes the matrix what it is, not only a vector inside of it."""
        if not is_matrix(expr.shape) or isinstance(expr, Diag):
            return False
        if isinstance(expr, Symbol):
            return expr.name in self.foreign
        return any(self._matrix_in(c) for c in expr.children)

    def _foreign_in(self, expr: Expr) -> bool:
        return mentions(expr, lambda s: s.name in self.foreign)

    def _owns(self, factors: tuple[Expr, ...], span: tuple[int, int]) -> bool:
        part = factors[span[0] : span[1] + 1]
        return any(mentions(f, lambda s: s.name in self.own) for f in part)


def is_linear(expr: Expr, states: frozenset[str]) -> bool:
    """Whether no term multiplies two reads of the states, divides by one or puts one into a function."""

    def holds(e: Expr) -> bool:
        return mentions(e, lambda s: s.name in states)

    if not holds(expr):
        return True
    match expr:
        case Symbol():
            return True
        case Sum(terms):
            return all(is_linear(t, states) for t in terms)
        case Product(parts) | Hadamard(parts) | Call("dot", parts):
            held = [p for p in parts if holds(p)]
            return len(held) == 1 and is_linear(held[0], states)
        case Quotient(top, bottom):
            return is_linear(top, states) and not holds(bottom)
        case Transpose(arg) | Call("sum", (arg,)):
            return is_linear(arg, states)
        case _:
            return False


def _is_vector(expr: Expr) -> bool:
    inner = expr.arg if isinstance(expr, Transpose) else expr
    return isinstance(inner, Symbol) and 1 in expr.shape and not expr.is_scalar


def _upright(factor: Expr) -> list[Expr]:
    """The nodes of a factor that stand in it as they are, not turned."""
    return [] if isinstance(factor, Transpose) else [n for n in walk(factor) if not isinstance(n, Transpose)]


def _to_column(factors: tuple[Expr, ...], at: int) -> tuple[int, int] | None:
    """The span from ``at`` to the column that ends its chain."""
    width = factors[at].shape[1]
    for i in range(at + 1, len(factors)):
        factor = factors[i]
        if factor.is_scalar:
            continue
        if factor.shape[0] != width:
            return None
        width = factor.shape[1]
        if width == 1:
            return at, i
    return None


def _to_row(factors: tuple[Expr, ...], at: int) -> tuple[int, int] | None:
    """The span from the row that begins the chain of ``at``."""
    height = factors[at].shape[0]
    for i in range(at - 1, -1, -1):
        factor = factors[i]
        if factor.is_scalar:
            continue
        if factor.shape[1] != height:
            return None
        height = factor.shape[0]
        if height == 1:
            return i, at
    return None
