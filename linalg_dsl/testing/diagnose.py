"""What a pattern of wrong numbers usually comes from: typical faults, tried on the same inputs.

First the numbers are compared with those of recurrences that differ from the declared one by a typical
fault (read before the update, initial state ignored, gates of the next token ...): where one of them gives
what the subject gave, that is the cause. Else the places of the wrong elements tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from linalg_dsl.algebra.expr import Expr, Symbol
from linalg_dsl.algebra.traverse import transform
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.testing.cases import Case, sequences
from linalg_dsl.testing.oracle import Oracle, exact, head_axis
from linalg_dsl.testing.subject import Subject

ALIKE = 0.02
"""Part of the deviation that may remain where a fault explains it."""


def likely_cause(subject: Subject, case: Case, oracle: Oracle, results: Mapping[str, Tensor]) -> str:
    """One sentence."""
    wrong = {n: _relative(results[n], oracle.want[n]) for n in results}
    name = max(wrong, key=lambda n: wrong[n])
    if wrong[name] == 0:
        return "numbers far below the others are wrong"
    if not results[name].any():
        return f"{name} is 0 throughout: its path is missing"
    try:
        for cause, other in _faults(case):
            changed = exact(other, gradients=oracle.gradients).want
            if _explains(results, oracle.want, changed, name):
                return cause
    except (ArithmeticError, RuntimeError):
        pass  # a fault that this recurrence cannot have
    return _places(case, name, results[name].double(), oracle.want[name])


def _faults(case: Case) -> Iterator[tuple[str, Case]]:
    spec = case.spec
    if case.states:
        yield "the initial state is ignored", replace(case, states={})
    swapped = _other_read(spec)
    if swapped is not None:
        yield (
            "the state is read before its update where the line reads it after, or the reverse",
            replace(case, spec=swapped),
        )
    for zeroed, what in ((case.labels[1:], "the final state"), (("o",), "the output")):
        other = replace(case)
        other.weights.update({n: w * 0 if n in zeroed else w for n, w in case.weights.items()})
        yield f"the gradient that comes from {what} is dropped", other
    gates = [d.name for d in spec.inputs if d.kind != "plain" and d.timed]
    for step, what in ((1, "previous"), (-1, "next")):
        if gates and case.shape.T > 1:
            moved = {n: _shifted(case, case.tensors[n], step) for n in gates}
            yield f"gates are those of the {what} token", case.with_tensors(**moved)
    if case.shape.H > 1 and not case.heads:
        yield (
            "all heads use the tensors of the first",
            case.with_tensors(**{n: _first_head(case, n, x) for n, x in case.tensors.items()}),
        )
    if case.shape.lengths is not None:
        yield (
            "packed sequences are run as one",
            replace(case, shape=replace(case.shape, lengths=(case.shape.T,)), states={}),
        )


def _explains(
    results: Mapping[str, Tensor], want: Mapping[str, Tensor], changed: Mapping[str, Tensor], name: str
) -> bool:
    """Whether every result is nearer to the changed recurrence than the wrong one is to the declared."""
    error = _relative(results[name], want[name])
    return all(n not in changed or _relative(x, changed[n]) < ALIKE * error for n, x in results.items())


def _relative(got: Tensor, want: Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    error = (got.double() - want).norm() / want.norm().clamp_min(1e-300)
    return float(error.nan_to_num(torch.inf))


def _other_read(spec: RecurrenceSpec) -> RecurrenceSpec | None:
    states = {s.name for s in spec.states}

    def change(node: Expr) -> Expr:
        if isinstance(node, Symbol) and node.name in states:
            return replace(node, time=-1 if node.time == 0 else 0)
        return node

    outputs = tuple(replace(e, value=transform(e.value, change)) for e in spec.outputs)
    return None if outputs == spec.outputs else replace(spec, outputs=outputs, written=())


def _shifted(case: Case, x: Tensor, step: int) -> Tensor:
    found = torch.zeros_like(x)
    for row, begin, end in sequences(case):
        if step > 0:
            found[row, begin + step : end] = x[row, begin : end - step]
        else:
            found[row, begin : end + step] = x[row, begin - step : end]
    return found


def _first_head(case: Case, name: str, x: Tensor) -> Tensor:
    axis = head_axis(case, f"d {name}")
    return x.narrow(axis, 0, 1).expand_as(x).clone()


def _places(case: Case, name: str, got: Tensor, want: Tensor) -> str:
    """What the places and sizes of wrong elements say."""
    if bool(got.isnan().any()):
        return (
            "NaN: an exponential of a positive number that was masked afterwards, 0 times inf at a reset, "
            "or memory that nobody wrote"
        )
    scale = want.abs().amax().clamp_min(1e-300)
    error = (got - want).abs()
    relative = float(error.max() / scale)
    bad = error > 0.1 * error.max()
    size = (got * want).sum() / want.square().sum().clamp_min(1e-300)
    if relative > 1e-4 and float((got - size * want).abs().max()) < 1e-3 * float(error.max()):
        return f"{name} is {float(size):.4g} times what it should be: a factor is missing or twice there"
    axis = head_axis(case, name)
    others = [i for i in range(bad.dim()) if i != axis]
    heads = bad.sum(others) if others else bad
    if case.shape.H > 1 and not bool(heads[0]) and bool(heads[1:].any()):
        return "only heads after the first are wrong: a stride or a map of heads"
    if bad.dim() >= 3 and bad.shape[1] == case.shape.T and name.removeprefix("d ") not in case.states:
        tokens = bad.any(0).flatten(1).any(1).nonzero().flatten()
        told = _of_tokens(case, tokens)
        if told:
            return told
    if relative < 2.0**-6:
        bits = "a state or an operand is kept in a shorter type than declared, or digits cancel"
        return f"an error of {relative:.1e} of the largest: {bits}"
    return "no typical fault fits: see which terms of the equations reach this tensor"


def _of_tokens(case: Case, tokens: Tensor) -> str | None:
    T = case.shape.T
    first, last = int(tokens[0]), int(tokens[-1])
    rules: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: case.shape.lengths is None and first == last == T - 1 and T > 1,
         "only the last token is wrong: a mask or a boundary at the end of the sequence"),
        (lambda: case.shape.lengths is None and first == last == 0 and T > 1,
         "only the first token is wrong: the initial state or a boundary at the start"),
        (lambda: any(c < T and first >= T - T % c > 0 and T % c != 0 for c in (64, 32, 16)),
         "only the last, ragged chunk is wrong: a boundary mask is missing"),
        (lambda: any(first == c and c < T for c in (16, 32, 64, 128)),
         f"wrong from token {first} on: what is handed from chunk to chunk"),
    )  # fmt: skip
    return next((text for holds, text in rules if holds()), None)
