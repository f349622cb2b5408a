"""Which elements of a result are wrong: the error allowed per element, by type, and what a pattern tells.

An element may be off by

    ROUNDINGS u condition + INPUTS u_p of_inputs + OWN u size + u_o |expected| + FLUSH

where ``condition`` and ``of_inputs`` are those of ``oracle`` (root mean squares under roundings of size 1),
u is the unit roundoff of the arithmetic (float32 for shorter types, whose products accumulate in it), u_p
that of operands of products, u_o that of the result's type, and FLUSH its smallest normal number.
``size`` is the largest expected value at the same token and head (of a state: in its row or its column,
whichever is smaller): sums are formed of terms of that size even where they cancel. Conditions are taken
as root mean squares over the same elements, so that a lucky zero among the replicas allows too little of
nothing. For what feeds a decay both are taken over the whole sequence: its gradient at one token is a
difference of sums over others, in any chunk form (derivation of the one-sided sums), where the step loop
forms it at that token alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from linalg_dsl.algebra.expr import Call, Diag, Expr, Product, Quotient, Sum, Symbol
from linalg_dsl.algebra.traverse import symbols, walk
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.testing.cases import Case, sequences
from linalg_dsl.testing.failures import Failure, PropertyError
from linalg_dsl.testing.oracle import Oracle, rms
from linalg_dsl.testing.rounding import UNIT, working
from linalg_dsl.testing.subject import Subject

ROUNDINGS = 24.0
INPUTS = 8.0
OWN = 16.0
OF_DECAYS = 64.0
"""In place of OWN, for the gradient of what feeds a decay: sums over a sequence, not a token."""


@dataclass(frozen=True)
class Excess:
    """The element furthest beyond what is allowed: ``ratio`` is error over allowance, NaN counts as inf."""

    tensor: str
    index: tuple[int, ...]
    got: float
    expected: float
    allowed: float
    ratio: float


def allowance(subject: Subject, case: Case, oracle: Oracle, name: str) -> Tensor:
    """The error that each element of a result may have, in float64."""
    u = UNIT[working(case.dtype)]
    operand = subject.precision or case.dtype
    found = least(case, oracle, name) + ROUNDINGS * u * spread(case, name, oracle.condition[name])
    if UNIT[operand] > u:
        found = found + INPUTS * UNIT[operand] * spread(case, name, oracle.of_inputs[name])
    return found.nan_to_num(torch.inf)


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
    lead = 3 if name == "o" else 2
    for decl in case.spec.inputs:
        if name.startswith("d ") and decl.name == bare:
            lead = 3 if decl.timed else 1
    axes = list(range(lead, x.dim()))
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
    for name in names or list(results):
        want, got = oracle.want[name], results[name].double()
        if want.shape != got.shape:
            raise PropertyError(
                Failure(
                    subject.name, "shapes", case.seed, str(case), name, tuple(got.shape), 0.0, 0.0, 0.0,
                    f"the result has shape {tuple(got.shape)}, expected {tuple(want.shape)}",
                )
            )  # fmt: skip
        if want.numel() == 0:
            continue
        allowed = least(case, oracle, name)
        ratio = ratios(got, want, allowed, _result_type(case, name))
        if float(ratio.max()) > 1:
            allowed = allowance(subject, case, oracle, name)
            ratio = ratios(got, want, allowed, _result_type(case, name))
        at = int(ratio.argmax())
        if found is None or float(ratio.reshape(-1)[at]) > found.ratio:
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), ratio.shape))
            found = Excess(
                name, index, float(got[index]), float(want[index]), float(allowed[index]), float(ratio[index])
            )
    return found


def ratios(got: Tensor, want: Tensor, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Error over allowance. Where the exact result is no number of the type, nothing is asked."""
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
