"""Coupled states as one recurrence: their gate of blocks, its triangular order, and who gets what is written.

The updates are S_t = A S_{t-1} + P S_t + own terms for the column of all states, P strictly triangular since
no two states need each other's present. So S_t = (I - P)^-1 (A S_{t-1} + own terms): what a state writes
goes, by a column of (I - P)^-1, to every state that takes up its present. Nothing is diagonalised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from linalg_dsl.algebra.expr import ONE, ZERO, Expr, mul
from linalg_dsl.algebra.factors import Factors, common_factors, divided, split_factors, total
from linalg_dsl.algebra.normalise import Normaliser
from linalg_dsl.algebra.traverse import commutative_key
from linalg_dsl.errors import DslError
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.decay import gather, log_decay
from linalg_dsl.planner.form import Decay, Stack
from linalg_dsl.planner.linear_map import DiagonalTerm, LinearMap
from linalg_dsl.planner.low_rank import LowRank
from linalg_dsl.source import Span

MOST_STATES = 4
Matrix = list[list[Expr]]
Vectors = tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class BlockGate:
    """The gates of coupled states in triangular order, ``order`` by their declared numbers.

    ``shares[i][o]``: how much of what the state o writes goes to the state i, declared numbers both;
    ``own`` and ``other``: the gates per channel that all of them have, of the axis that is erased and of the
    other. Where those of the erased axis differ, ``channels`` has them in triangular order: states of
    different ones take up nothing of each other, what couples them are erases.
    """

    order: tuple[int, ...]
    gates: tuple[Decay, ...]
    coupling: tuple[tuple[Expr, ...], ...]
    shares: tuple[tuple[Expr, ...], ...]
    own: Vectors
    other: Vectors
    channels: tuple[Decay, ...] = ()


def block_gate(maps: Sequence[LinearMap], spec: RecurrenceSpec, normaliser: Normaliser) -> BlockGate:
    """The gate of coupled states; raises DslError where it is not triangular in any order of them, or where
    gates per channel differ."""
    past, found = _past(maps, spec, normaliser)
    whole, shares = _without_presents(past, maps, normaliser)
    order = _triangular_order(whole, spec)
    own, channels = _own_gates(found, whole, spec)
    other = next((g.other for g in found.values()), ())
    return BlockGate(
        order,
        tuple(log_decay(normaliser.factors(whole[i][i]), spec) for i in order),
        tuple(tuple(whole[i][j] if i != j else ZERO for j in order) for i in order),
        tuple(map(tuple, shares)),
        own,
        other,
        tuple(channels[i] for i in order) if channels else (),
    )


def stack_of(gate: BlockGate, columns: LowRank, names: Sequence[str]) -> tuple[LowRank, Stack]:
    """The columns in which erases of one vector are one, and the stack over them."""
    columns, sources = _join_sources(columns, gate.order)
    spread = tuple(tuple(gate.shares[i][o] for i in gate.order) for o in columns.into)
    names = [names[i] for i in gate.order]
    return columns, Stack(tuple(names), gate.gates, gate.coupling, spread, sources, gate.channels)


@dataclass(frozen=True, slots=True)
class _Channels:
    """The gates per channel, of either axis, on what the state numbered ``into`` keeps."""

    own: Vectors
    other: Vectors
    into: int
    span: Span | None


def _past(
    maps: Sequence[LinearMap], spec: RecurrenceSpec, normaliser: Normaliser
) -> tuple[Matrix, dict[tuple[int, int], _Channels]]:
    """A as written, of scalars, and the gates per channel of its entries that are not 0.

    Raises DslError where those of the axis that is not erased are not the same in all.
    """
    n = len(maps)
    past: Matrix = [[ZERO for _ in range(n)] for _ in range(n)]
    found: dict[tuple[int, int], _Channels] = {}
    for i, j in product(range(n), range(n)):
        terms = [d for d in maps[i].diagonals if d.of == j]
        if not terms:
            continue
        factors, other, span = gather(terms, normaliser)
        if factors.coefficient == 0:
            continue
        past[i][j] = normaliser.normal(factors.scalar)
        found[i, j] = _Channels(factors.vectors, other, i, span)
        first = next(iter(found.values()))
        if _keys(other) != _keys(first.other):
            raise _different_gates(first, found[i, j], spec)
    return past, found


def _own_gates(
    found: dict[tuple[int, int], _Channels], whole: Matrix, spec: RecurrenceSpec
) -> tuple[Vectors, dict[int, Decay]]:
    """The gates per channel of the erased axis that all states have, or else those of every state.

    Raises DslError where states of different gates take up each other, or one of them may be negative.
    """
    gates = list(found.values())
    if all(_keys(g.own) == _keys(gates[0].own) for g in gates):
        return (gates[0].own if gates else ()), {}
    n = range(len(whole))
    none = _Channels((), gates[0].other, 0, gates[0].span)
    of = {i: found.get((i, i), replace(none, into=i)) for i in n}
    for (i, _), gate in found.items():
        if _keys(gate.own) != _keys(of[i].own):
            raise _different_gates(of[i], gate, spec)
    for i, j in product(n, n):
        if whole[i][j] != ZERO and _keys(of[i].own) != _keys(of[j].own):
            raise _different_gates(of[i], of[j], spec)
    channels = {i: log_decay(Factors(vectors=gate.own), spec) for i, gate in of.items()}
    for i, decay in channels.items():
        if decay.signed:
            signed = next(g for g in of.values() if g.into != i and _keys(g.own) != _keys(of[i].own))
            raise _different_gates(of[i], signed, spec)
    return (), channels


def _different_gates(a: _Channels, b: _Channels, spec: RecurrenceSpec) -> DslError:
    def shown(gate: _Channels) -> str:
        return " and ".join(show_expr(v) for v in (*gate.own, *gate.other)) or "a scalar"

    one, two = (f"{shown(g)} on {spec.states[g.into].name}" for g in (a, b))
    return DslError.single(
        "E951",
        f"the gates of the coupled states differ channel by channel ({one}, {two}): every channel would have "
        "a gate of blocks of its own, which has no chunk form",
        b.span or a.span,
        "states that take up each other have gates that differ by scalars only; those that meet in an erase "
        "alone may have positive gates of their own along the erased axis",
    )


def _without_presents(
    past: Matrix, maps: Sequence[LinearMap], normaliser: Normaliser
) -> tuple[Matrix, Matrix]:
    """(I - P)^-1 A and (I - P)^-1, row by row as the presents become known."""
    n = range(len(maps))
    present = [[_sum_of((d for d in m.presents if d.of == j), normaliser) for j in n] for m in maps]
    whole: dict[int, list[Expr]] = {}
    shares: dict[int, list[Expr]] = {}

    def row(i: int, own: Sequence[Expr], known: dict[int, list[Expr]]) -> list[Expr]:
        taken = [(p, known[j]) for j, p in enumerate(present[i]) if p != ZERO]
        products = [[mul((p, theirs[k])) for p, theirs in taken if theirs[k] != ZERO] for k in n]
        return [normaliser.normal(total([x, *more])) for x, more in zip(own, products, strict=True)]

    while len(whole) < len(maps):
        left = (i for i in n if i not in whole)
        i = next(i for i in left if all(p == ZERO or j in whole for j, p in enumerate(present[i])))
        whole[i] = row(i, past[i], whole)
        shares[i] = row(i, [ONE if k == i else ZERO for k in n], shares)
    return [whole[i] for i in n], [shares[i] for i in n]


def _sum_of(terms: Iterable[DiagonalTerm], normaliser: Normaliser) -> Expr:
    return normaliser.normal(total(t.factors.scalar for t in terms))


def _triangular_order(gate: Matrix, spec: RecurrenceSpec) -> tuple[int, ...]:
    """The states in an order in which each takes up pasts of later ones only."""
    todo, order = list(range(len(gate))), []
    while todo:
        ready = [i for i in todo if all(gate[j][i] == ZERO for j in todo if j != i)]
        if not ready:
            raise _circle(gate, todo, spec)
        order.append(ready[0])
        todo.remove(ready[0])
    return tuple(order)


def _circle(gate: Matrix, among: Sequence[int], spec: RecurrenceSpec) -> DslError:
    path = [among[0]]
    while path.count(path[-1]) == 1:
        path.append(next(j for j in among if j != path[-1] and gate[j][path[-1]] != ZERO))
    circle = path[path.index(path[-1]) :][::-1]
    terms = " and ".join(
        f"{spec.states[i].name}_t takes {_scaled(gate[i][j])}{spec.states[j].name}_{{t-1}}"
        for i, j in pairwise(circle)
    )
    return DslError.single(
        "E954",
        f"the states gate each other in a circle: {terms}; in no order of them is the coupling triangular, "
        "and a chunk form of other couplings is not supported",
        spec.updates[circle[0]].span,
    )


def _scaled(coefficient: Expr) -> str:
    return "" if coefficient == ONE else f"{show_expr(coefficient)} "


def _join_sources(columns: LowRank, order: Sequence[int]) -> tuple[LowRank, tuple[tuple[Expr, ...], ...]]:
    """Erases along one vector of several states as one of a sum of states, where Σ lets them."""
    kept: list[int] = []
    weights: dict[int, dict[int, Expr]] = {}
    sigma = [list(row) for row in columns.sigma]
    for i, (vector, of) in enumerate(zip(columns.erase, columns.of, strict=True)):
        for k in kept:
            same = commutative_key(columns.erase[k]) == commutative_key(vector)
            joined = _in_proportion([row[k] for row in sigma], [row[i] for row in sigma]) if same else None
            if joined is not None and of not in weights[k]:
                rest, (first, second) = joined
                weights[k] = {j: _product(first, w) for j, w in weights[k].items()} | {of: second}
                for row, x in zip(sigma, rest, strict=True):
                    row[k] = x
                break
        else:
            kept.append(i)
            weights[i] = {of: ONE}
    found = replace(
        columns,
        erase=tuple(columns.erase[i] for i in kept),
        of=tuple(columns.of[i] for i in kept),
        sigma=tuple(tuple(row[i] for i in kept) for row in sigma),
    )
    return found, tuple(tuple(weights[i].get(j, ZERO) for j in order) for i in kept)


def _in_proportion(xs: Sequence[Expr], ys: Sequence[Expr]) -> tuple[list[Expr], tuple[Expr, Expr]] | None:
    """(s, (a, b)) with x = s a and y = s b row by row; None where there is no such pair (a, b)."""
    rest: list[Expr] = []
    pair: tuple[Expr, Expr] | None = None
    for x, y in zip(xs, ys, strict=True):
        if x == ZERO and y == ZERO:
            rest.append(ZERO)
            continue
        if x == ZERO or y == ZERO:
            return None
        parts = [split_factors(x), split_factors(y)]
        common = common_factors(parts)
        first, second = (divided(p, common).expr for p in parts)
        if pair is None:
            pair = (first, second)
        elif [commutative_key(e) for e in pair] != [commutative_key(first), commutative_key(second)]:
            return None
        rest.append(common.expr)
    return None if pair is None else (rest, pair)


def _product(x: Expr, y: Expr) -> Expr:
    return (split_factors(x) * split_factors(y)).expr


def _keys(vectors: Iterable[Expr]) -> tuple[str, ...]:
    return tuple(sorted(commutative_key(v) for v in vectors))
