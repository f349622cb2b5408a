"""Which elements of a result are wrong: the error allowed per element, by type, and what a pattern tells.

An element may be off by

    t u condition + INPUTS u_p of_inputs + OWN u size + u_o |expected| + FLUSH

where ``condition`` and ``of_inputs`` are those of ``oracle`` (root mean squares under roundings of size 1),
u is the unit roundoff of the arithmetic (float32 for shorter types, whose products accumulate in it), u_p
that of operands of products, u_o that of the result's type, and FLUSH its smallest normal number.

t follows from how the condition is found. A result's error is a sum over many roundings, so it is normal,
and its size is estimated from COPIES replicas of n like elements: error over estimate has Student's
distribution with n COPIES degrees of freedom. t is its quantile at ALARMS, a chance so small that the
elements of ten thousand draws give no alarm, times PASSES, since a kernel rounds an operation of the plan in
several steps where the replica rounds once (``deviations``, ``rounding.passes``).

``size`` is the largest expected value at the same token and head (of a state: in its row or its column,
whichever is smaller): sums are formed of terms of that size even where they cancel, which replicas, that
round results and not terms, do not show. OWN, OF_DECAYS and INPUTS are chosen; docs/testing.md has what right
kernels take of them over draws of the catalogue (``testing.alarms``).

Conditions are taken as root mean squares over the same elements, so that a lucky zero among the replicas
allows too little of nothing. For what feeds a decay both are taken over the whole sequence: its gradient at
one token is a difference of sums over others, in any chunk form (derivation of the one-sided sums), where
the step loop forms it at that token alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import expm1, sqrt
from statistics import NormalDist

import torch
from torch import Tensor

from linalg_dsl.algebra.expr import Call, Diag, Expr, Product, Quotient, Sum, Symbol
from linalg_dsl.algebra.traverse import symbols, walk
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.testing.cases import Case, sequences
from linalg_dsl.testing.failures import Failure, PropertyError
from linalg_dsl.testing.oracle import COPIES, Oracle, rms
from linalg_dsl.testing.rounding import UNIT, passes, working
from linalg_dsl.testing.subject import Subject
from linalg_dsl.testing.watch import rehearsing

ALARMS = 1e-10
"""The chance, for an element, that a right kernel exceeds what roundings admit."""
PASSES = passes()
INPUTS = 8.0
OWN = 16.0
OF_DECAYS = 64.0
"""In place of OWN, for the gradient of what feeds a decay: sums over a sequence, not a token."""


@dataclass(frozen=True)
class Excess:
    """The element furthest beyond what is allowed: ``ratio`` is error over allowance, NaN counts as inf.

    ``passes``: what PASSES would have had to be for the element of all results that needs most; 0 where
    ``least`` is enough for all.
    """

    tensor: str
    index: tuple[int, ...]
    got: float
    expected: float
    allowed: float
    ratio: float
    passes: float = 0.0


def allowance(subject: Subject, case: Case, oracle: Oracle, name: str) -> Tensor:
    """The error that each element of a result may have, in float64."""
    found = least(case, oracle, name) + PASSES * of_roundings(case, oracle, name)
    return (found + of_operands(subject, case, oracle, name)).nan_to_num(torch.inf)


def of_roundings(case: Case, oracle: Oracle, name: str) -> Tensor:
    """What one rounding of each operation may make of each element."""
    condition = oracle.condition[name]
    like = alike(case, name, condition)
    of_row = deviations(like * COPIES) * spread(case, name, condition)
    alone = deviations(COPIES) * condition.abs()
    return UNIT[working(case.dtype)] * torch.maximum(of_row, alone)


def of_operands(subject: Subject, case: Case, oracle: Oracle, name: str) -> Tensor | float:
    """What operands of products in a shorter type may make of each element."""
    operand = UNIT[subject.precision or case.dtype]
    if operand <= UNIT[working(case.dtype)]:
        return 0.0
    return INPUTS * operand * spread(case, name, oracle.of_inputs[name])


def passes_needed(subject: Subject, case: Case, oracle: Oracle, name: str, got: Tensor) -> float:
    """What PASSES would have to be for a result whose elements are not all within ``least``."""
    want = oracle.want[name]
    beyond = (got - want).abs() - least(case, oracle, name) - of_operands(subject, case, oracle, name)
    part = torch.where(beyond > 0, beyond / of_roundings(case, oracle, name), 0.0)
    return float(torch.where(want.isfinite() & part.isfinite(), part, 0.0).max())


@lru_cache(maxsize=256)
def deviations(freedom: int) -> float:
    """How many estimated standard deviations a normal number exceeds with the chance ALARMS, where the
    deviation is a root mean square of ``freedom`` such numbers: Student's quantile by Wallace's formula
    (Ann. Math. Statist. 30, 1959), which errs by less than one per cent here."""
    z = NormalDist().inv_cdf(1 - ALARMS / 2)
    corrected = z * (8 * freedom + 3) / (8 * freedom + 1)
    return sqrt(freedom * expm1(corrected**2 / freedom))


def alike(case: Case, name: str, x: Tensor) -> int:
    """Of how many elements ``spread`` takes the root mean square, at least."""
    sizes = [x.shape[a] for a in _row_axes(case, name, x)]
    return min(sizes, default=1)


def least(case: Case, oracle: Oracle, name: str) -> Tensor:
    """What is allowed in any case, whatever the conditions are: they need not be found within this."""
    want = oracle.want[name]
    u = UNIT[working(case.dtype)]
    decay = name.startswith("d ") and name.removeprefix("d ") in decays(case.spec)
    found = (OF_DECAYS if decay else OWN) * u * spread(case, name, want, largest=True)
    kind = _result_type(case, name)
    if UNIT[kind] > u:
        found = found + UNIT[kind] * want.abs()
    return found.nan_to_num(torch.inf) + torch.finfo(kind).smallest_normal


def _result_type(case: Case, name: str) -> torch.dtype:
    if name == "o" or name.removeprefix("d ") in case.tensors:
        return case.dtype
    return case.state_dtype


def spread(case: Case, name: str, x: Tensor, largest: bool = False) -> Tensor:
    """Each element's size among its like: root mean square, or the largest, over its row.

    The row is one token and head; of matrices the smaller of row and column counts, and no less than the
    element itself. What feeds a decay is taken over its whole sequence.
    """
    size = x.abs()
    bare = name.removeprefix("d ")
    axes = _row_axes(case, name, x)
    lead = _lead(case, name)
    if size.numel() == 0:
        return size
    if len(axes) == 2:
        found = torch.minimum(_over(size, [axes[0]], largest), _over(size, [axes[1]], largest))
    else:
        found = _over(size, axes, largest)
    if name.startswith("d ") and bare in decays(case.spec):
        if lead == 3:
            found = _along_time(case, found)
        elif lead == 1:
            found = _over(size, axes, True)
    return torch.maximum(found, size)


def _lead(case: Case, name: str) -> int:
    """How many axes stand before those of a row: batch, token and head; batch and head; head."""
    if name == "o":
        return 3
    bare = name.removeprefix("d ")
    timed = [d.timed for d in case.spec.inputs if name.startswith("d ") and d.name == bare]
    return 2 if not timed else 3 if timed[0] else 1


def _row_axes(case: Case, name: str, x: Tensor) -> list[int]:
    return list(range(_lead(case, name), x.dim()))


def _over(x: Tensor, axes: list[int], largest: bool) -> Tensor:
    if not axes:
        return x
    value = x.abs().amax(axes, keepdim=True) if largest else rms(x, axes)
    return value.expand_as(x)


def _along_time(case: Case, x: Tensor) -> Tensor:
    found = x.clone()
    for row, begin, end in sequences(case):
        if end > begin:
            found[row, begin:end] = x[row, begin:end].amax(0, keepdim=True)
    return found


@lru_cache(maxsize=256)
def decays(spec: RecurrenceSpec) -> frozenset[str]:
    """The inputs that some decay is made of: gates, and what stands in a factor of a past state by itself."""
    names = {d.name for d in spec.inputs}
    found = {d.name for d in spec.inputs if d.kind != "plain"}
    states = {s.name for s in spec.states}
    for equation in (*spec.updates, *spec.outputs):
        for node in walk(equation.value):
            if isinstance(node, Product) and any(_holds(f, states) for f in node.factors):
                for factor in node.factors:
                    if not _holds(factor, states):
                        found |= _of_factor(factor) & names
            if isinstance(node, Call) and node.function in ("exp", "sigmoid", "softplus", "logsigmoid"):
                found |= {s.name for s in symbols(node)} & names
    return frozenset(found)


def _of_factor(factor: Expr) -> set[str]:
    match factor:
        case Diag():
            return {s.name for s in symbols(factor)}
        case Sum(terms):
            return set().union(*(_of_factor(t) for t in terms))
        case Product(factors) if any(isinstance(f, Diag) for f in factors):
            return {s.name for s in symbols(factor)}
        case Quotient(numerator, _):
            return _of_factor(numerator) | ({s.name for s in symbols(factor)} if factor.is_scalar else set())
        case _ if factor.is_scalar:
            return {s.name for s in symbols(factor)}
        case _:
            return set()


def _holds(expr: Expr, states: set[str]) -> bool:
    return any(isinstance(n, Symbol) and n.name in states for n in walk(expr))


def worst(
    subject: Subject,
    case: Case,
    oracle: Oracle,
    results: Mapping[str, Tensor],
    names: list[str] | None = None,
) -> Excess | None:
    """The element furthest beyond its allowance, or nearest to it; None where there are no elements."""
    found: Excess | None = None
    needed = 0.0
    for name in names or list(results):
        want, got = oracle.want[name], results[name].double()
        if want.shape != got.shape:
            raise PropertyError(
                Failure(
                    subject.name, "shapes", case.seed, str(case), name, tuple(got.shape), 0.0, 0.0, 0.0,
                    f"the result has shape {tuple(got.shape)}, expected {tuple(want.shape)}",
                )
            )  # fmt: skip
        kind = results[name].dtype
        if subject.op is not None and kind != _result_type(case, name):
            raise PropertyError(
                Failure(
                    subject.name, "types", case.seed, str(case), name, (), 0.0, 0.0, 0.0,
                    f"the result is {kind}, expected {_result_type(case, name)}",
                )
            )  # fmt: skip
        if want.numel() == 0:
            continue
        allowed = least(case, oracle, name)
        ratio = ratios(got, want, allowed, _result_type(case, name))
        if float(ratio.max()) > 1:
            allowed = allowance(subject, case, oracle, name)
            ratio = ratios(got, want, allowed, _result_type(case, name))
            needed = max(needed, passes_needed(subject, case, oracle, name, got))
        at = int(ratio.argmax())
        if found is None or float(ratio.reshape(-1)[at]) > found.ratio:
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), ratio.shape))
            found = Excess(
                name, index, float(got[index]), float(want[index]), float(allowed[index]), float(ratio[index])
            )
    return None if found is None else replace(found, passes=needed)


def ratios(got: Tensor, want: Tensor, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Error over allowance. Where the exact result is no number of the type, nothing is asked."""
    if rehearsing():
        return torch.zeros_like(want)
    limit = torch.finfo(dtype).max * (1 - UNIT[dtype])
    error = (got - want).abs()
    ratio = (error / allowed).nan_to_num(torch.inf, torch.inf)
    ratio = torch.where(allowed > limit, 0.0, ratio)
    ratio = torch.where(got == want, 0.0, ratio)
    return torch.where(want.isfinite() & (want.abs() <= limit), ratio, torch.zeros_like(ratio))


def fail(
    subject: Subject,
    prop: str,
    case: Case,
    excess: Excess,
    cause: str,
    results: Mapping[str, Tensor] | None = None,
) -> PropertyError:
    """The error that reports one wrong element."""
    return PropertyError(
        Failure(
            subject.name, prop, case.seed, str(case), excess.tensor, excess.index, excess.got,
            excess.expected, excess.allowed, cause, {"case": case, "results": dict(results or {})},
        )
    )  # fmt: skip


def demand_close(
    subject: Subject,
    prop: str,
    case: Case,
    oracle: Oracle,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    cause: str,
) -> None:
    """Two ways to compute the same: each may be off by what the error model allows."""
    for name, want in expected.items():
        if want.numel() == 0:
            continue
        allowed = 2 * least(case, oracle, name)
        ratio = ratios(got[name].double(), want.double(), allowed, got[name].dtype)
        if float(ratio.max()) > 1:
            allowed = 2 * allowance(subject, case, oracle, name)
            ratio = ratios(got[name].double(), want.double(), allowed, got[name].dtype)
        ratio = torch.where(oracle.want[name].isfinite(), ratio, 0.0)
        if float(ratio.max()) > 1:
            raise fail(subject, prop, case, _at(name, got[name], want, allowed, ratio), cause, got)


def demand_bits(
    subject: Subject,
    prop: str,
    case: Case,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    cause: str,
) -> None:
    """The same numbers to the last bit; NaN equals NaN, 0 equals -0."""
    if rehearsing():
        return
    for name, want in expected.items():
        same = (got[name] == want) | (got[name].isnan() & want.isnan())
        if not bool(same.all()):
            error = (got[name].double() - want.double()).abs().nan_to_num(torch.inf)
            raise fail(
                subject, prop, case, _at(name, got[name], want, torch.zeros_like(error), error), cause, got
            )


def _at(name: str, got: Tensor, want: Tensor, allowed: Tensor, ratio: Tensor) -> Excess:
    at = torch.unravel_index(ratio.reshape(-1).argmax(), ratio.shape)
    index = tuple(int(i) for i in at)
    return Excess(
        name, index, float(got[index]), float(want[index]), float(allowed[index]), float(ratio[index])
    )
