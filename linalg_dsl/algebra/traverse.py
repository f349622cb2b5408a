"""Walking and rebuilding expressions: written once, so that passes list only the nodes they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from math import prod

from linalg_dsl.algebra.expr import (
    Call,
    Diag,
    Expr,
    Hadamard,
    Identity,
    Iterate,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Symbol,
    Transpose,
    add,
    call,
    diag,
    divide,
    hadamard,
    iterate,
    mul,
    power,
    transpose,
    with_span,
)
from linalg_dsl.errors import InternalError


def rebuild(expr: Expr, children: Sequence[Expr]) -> Expr:
    """The same node over other children, through the constructors, keeping its span."""
    match expr:
        case Number() | Symbol() | Identity():
            return expr
        case Sum():
            made = add(children)
        case Product():
            made = mul(children)
        case Hadamard():
            made = hadamard(children)
        case Quotient():
            made = divide(*children)
        case Power():
            made = power(*children)
        case Transpose():
            made = transpose(children[0])
        case Diag():
            made = diag(children[0])
        case Call(function, _):
            made = call(function, children)
        case Iterate(name, index):
            made = iterate(name, index, *children)
        case _:
            raise InternalError(f"unknown expression {type(expr).__name__}")
    return made if made.span is not None else with_span(made, expr.span)


def transform(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Applies ``change`` to every node from the leaves up; untouched subtrees are kept as they are."""
    children = expr.children
    changed = tuple(transform(c, change) for c in children)
    if any(new is not old for new, old in zip(changed, children, strict=True)):
        expr = rebuild(expr, changed)
    return change(expr)


def walk(expr: Expr) -> Iterator[Expr]:
    """Every node, parents first."""
    yield expr
    for child in expr.children:
        yield from walk(child)


@lru_cache(maxsize=4096)
def commutative_key(expr: Expr) -> str:
    """Equal for expressions that differ only in the order of commuting operands.

    Sums, elementwise products, products with at most one non-scalar, dot, min and max commute.
    """
    match expr:
        case Sum() | Hadamard() | Call("dot" | "min" | "max", _):
            parts = sorted(commutative_key(c) for c in expr.children)
        case Product(factors) if sum(not f.is_scalar for f in factors) <= 1:
            parts = sorted(commutative_key(c) for c in factors)
        case Number() | Symbol() | Identity():
            return repr(expr)
        case _:
            parts = [commutative_key(c) for c in expr.children]
    name = expr.function if isinstance(expr, Call) else type(expr).__name__
    if isinstance(expr, Iterate):
        name += f" {expr.name} {expr.index}"
    return f"{name}({', '.join(parts)})"


@lru_cache(maxsize=4096)
def scalars_first(expr: Expr) -> Expr:
    """A form for comparing: in every product what is a number per token stands in front, sorted.

    Scalars commute with everything, so ``k_tᵀ (g_t S)`` and ``g_t k_tᵀ S`` are one expression; so are an
    inner product and its transpose, and ``k_tᵀ (-a - b)`` and ``-k_tᵀ (a + b)``. Nothing is multiplied out.
    """
    children = tuple(scalars_first(c) for c in expr.children)
    match expr:
        case Product():
            sign, factors = _signs(
                f for c in children for f in (c.factors if isinstance(c, Product) else (c,))
            )
            return _with_sign(sign, _sorted_product(factors))
        case Hadamard() | Quotient():
            sign, factors = _signs(children)
            made = Hadamard(factors) if isinstance(expr, Hadamard) else Quotient(*factors)
            return _with_sign(sign, made)
        case _:
            return rebuild(expr, children)


def _sorted_product(children: Sequence[Expr]) -> Expr:
    number = prod(c.value for c in children if isinstance(c, Number))
    scalars = [c for c in children if c.is_scalar and not isinstance(c, Number)]
    rest: list[Expr] = []
    for stretch in _stretches(c for c in children if not c.is_scalar):
        if stretch[0].shape[0] == 1 and stretch[-1].shape[1] == 1:
            turned = Product(tuple(scalars_first(transpose(f)) for f in reversed(stretch)))
            scalars.append(min(Product(stretch), turned, key=repr))
        else:
            rest += stretch
    factors = (*sorted(scalars, key=repr), *rest)
    if number != 1 or not factors:
        factors = (Number(Fraction(number)), *factors)
    return factors[0] if len(factors) == 1 else Product(factors)


def _signs(factors: Iterable[Expr]) -> tuple[int, tuple[Expr, ...]]:
    """The factors without their signs (that of a sum is its first term's), and the product of these."""
    sign, bare = 1, []
    for factor in factors:
        first = factor.terms[0] if isinstance(factor, Sum) else factor
        match first:
            case Number(value) | Product((Number(value), *_)) if value < 0:
                sign = -sign
                terms = factor.terms if isinstance(factor, Sum) else (factor,)
                turned = tuple(_with_sign(-1, t) for t in terms)
                bare.append(Sum(turned) if isinstance(factor, Sum) else turned[0])
            case _:
                bare.append(factor)
    return sign, tuple(bare)


def _with_sign(sign: int, expr: Expr) -> Expr:
    if sign == 1:
        return expr
    match expr:
        case Number(value):
            return Number(-value)
        case Product((Number(value), *rest)) if value == -1:
            return rest[0] if len(rest) == 1 else Product(tuple(rest))
        case Product((Number(value), *rest)):
            return Product((Number(-value), *rest))
        case Product(factors):
            return Product((Number(Fraction(-1)), *factors))
        case _:
            return Product((Number(Fraction(-1)), expr))


def _stretches(factors: Iterable[Expr]) -> Iterator[tuple[Expr, ...]]:
    """A chain of matrices cut after every column: what follows one is a row."""
    stretch: list[Expr] = []
    for factor in factors:
        stretch.append(factor)
        if factor.shape[1] == 1:
            yield tuple(stretch)
            stretch = []
    if stretch:
        yield tuple(stretch)


def symbols(expr: Expr) -> list[Symbol]:
    """The symbols in order of appearance, each once."""
    return list(dict.fromkeys(node for node in walk(expr) if isinstance(node, Symbol)))


def mentions(expr: Expr, wanted: Callable[[Symbol], bool]) -> bool:
    """Whether some symbol of the expression is wanted."""
    return any(isinstance(node, Symbol) and wanted(node) for node in walk(expr))
