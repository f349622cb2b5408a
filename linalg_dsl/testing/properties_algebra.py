"""What follows from the form of the spec: linearity, scaling, transposition, reductions to others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import inf

import torch
from torch import Tensor

from linalg_dsl.driver import assemble
from linalg_dsl.errors import DslError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.reference import reference
from linalg_dsl.testing.cases import Case, run
from linalg_dsl.testing.compare import Excess, allowance, demand_close, fail, least, ratios
from linalg_dsl.testing.degrees import Scaling, linear_in, scalings
from linalg_dsl.testing.draws import cases, clock, one_case
from linalg_dsl.testing.effort import is_interpreted
from linalg_dsl.testing.failures import NotApplicable
from linalg_dsl.testing.few_kernels import sizes_of, type_of_ways
from linalg_dsl.testing.oracle import exact
from linalg_dsl.testing.reductions import SMALL, Reduction, reductions_of
from linalg_dsl.testing.subject import Subject
from linalg_dsl.testing.transpose import renamed, transposed
from linalg_dsl.testing.watch import CALLS, looked_at, spent

LAWS = 2
"""Of a case in Triton's interpreter, where each is a call more."""
FACTOR = Fraction(1, 4)
"""Scalings are by a power of two, which rounds nothing."""


def linearity(subject: Subject, *, seed: int = 0, examples: int = 6, budget_s: float = inf) -> None:
    """Jointly linear in what is written and the initial state, where the spec has it so.

    Which inputs these are is decided by degrees of the equations (``degrees.linear_in``). A sum of two
    draws of them gives the sum of the outputs.
    """
    found = linear_in(subject.spec)
    if found is None:
        raise NotApplicable(f"the output of {subject.spec.name} is linear in no input")
    inputs, states = found
    for case in cases(subject, seed=seed + 37, examples=examples, budget_s=budget_s):
        other = one_case(subject, case.seed + 9001, dtype=case.dtype, shape=case.shape)
        carried = _labels(case, {*inputs, *states})
        varied = {n for n in case.tensors if n in inputs}
        if any(other.tensors[n].shape != case.tensors[n].shape for n in varied):
            other = replace(case, tensors={n: x.flip(-1) for n, x in case.tensors.items()})
        second = replace(
            case,
            tensors={n: other.tensors[n] if n in varied else x for n, x in case.tensors.items()},
            states={n: x.flip(0, 1) if n in carried else x for n, x in case.states.items()},
        )
        # powers of two round nothing, and half a sum rounds no more than the arithmetic does
        both = replace(
            case,
            tensors={
                n: (0.5 * x.double() - 0.5 * second.tensors[n].double()).to(x) if n in varied else x
                for n, x in case.tensors.items()
            },
            states={
                n: (0.5 * x.double() - 0.5 * second.states[n].double()).to(x) if n in carried else x
                for n, x in case.states.items()
            },
        )
        first_o, second_o, both_o = (
            run(subject, c, gradients=False)["o"].double() for c in (case, second, both)
        )
        want = 0.5 * first_o - 0.5 * second_o
        oracles = [exact(c, gradients=False) for c in (case, second, both)]
        # the combined inputs were rounded to their type
        rounded = _rounded(case, varied) * (first_o.abs() + second_o.abs())
        allowed = rounded + torch.stack([least(o.case, o, "o") for o in oracles]).sum(0)
        ratio = ratios(both_o, want, allowed, case.dtype)
        if ratio.numel() and float(ratio.max()) > 1:
            allowed = rounded + torch.stack([allowance(subject, o.case, o, "o") for o in oracles]).sum(0)
            ratio = ratios(both_o, want, allowed, case.dtype)
        if ratio.numel() and float(ratio.max()) > 1:
            at = tuple(int(i) for i in torch.unravel_index(ratio.reshape(-1).argmax(), ratio.shape))
            excess = Excess("o", at, float(both_o[at]), float(want[at]), float(allowed[at]), float(ratio[at]))
            names = ", ".join([*sorted(varied), *sorted(carried)])
            raise fail(subject, "linearity", case, excess, f"the output is not linear in ({names})")


def _rounded(case: Case, varied: set[str]) -> float:
    return 0.0 if not varied else 8 * torch.finfo(case.dtype).eps * max(case.shape.T, 1)


def _labels(case: Case, names: set[str]) -> set[str]:
    """The labels of the initial states that belong to these states or (shifted) inputs."""
    pairs = zip(case.states, case.spec.carried, strict=False)
    return {label for label, carried in pairs if carried in names or carried.removesuffix("_prev") in names}


def scaling_laws(subject: Subject, *, seed: int = 0, examples: int = 6, budget_s: float = inf) -> None:
    """A fourth of an input scales output, states and gradients as the degrees of the equations say."""
    laws = scalings(subject.spec)
    if not laws:
        raise NotApplicable(f"{subject.spec.name} is homogeneous in no input")
    for case in cases(subject, seed=seed + 41, examples=examples, budget_s=budget_s):
        oracle = exact(case, gradients=True)
        base = run(subject, case)
        turn = LAWS * (case.seed - seed - 41)
        some = laws if not is_interpreted(subject) else [laws[(turn + i) % len(laws)] for i in range(LAWS)]
        for law in dict.fromkeys(some):
            factors = _factors(case, law)
            scaled = replace(
                case,
                tensors={n: x * factors.get(n, 1.0) for n, x in case.tensors.items()},
                states={n: x * factors.get(n, 1.0) for n, x in case.states.items()},
            )
            if any(
                bool((scaled.tensors[n] / factors.get(n, 1.0) != x).any()) for n, x in case.tensors.items()
            ):
                continue  # denormal numbers lose digits
            # cotangents the other way, so that the loss stays and gradients scale against their leaves
            scaled.weights.update({n: w / factors[n] for n, w in case.weights.items()})
            got = run(subject, scaled)
            undone = {
                n: x.double() * factors[n.removeprefix("d ")]
                if n.startswith("d ")
                else x.double() / factors[n]
                for n, x in got.items()
            }
            undone = {n: x.to(base[n].dtype) for n, x in undone.items()}
            demand_close(subject, "scaling_laws", case, oracle, undone, base, f"it does not hold that {law}")


def _factors(case: Case, law: Scaling) -> dict[str, float]:
    """What each input, initial state and result is multiplied by."""
    powers = dict(law.inputs) | dict(law.states)
    found = {n: float(FACTOR ** int(powers.get(n, 0))) for n in case.tensors}
    for i, carried in enumerate(case.spec.carried):
        own = powers.get(carried, powers.get(carried.removesuffix("_prev"), Fraction(0)))
        value = float(FACTOR ** int(own))
        found[case.labels[1 + i]] = value
        if case.states:
            found[list(case.states)[i]] = value
    found["o"] = float(FACTOR) ** float(law.output)
    return found


def transposition_symmetry(
    subject: Subject, *, seed: int = 0, examples: int = 4, budget_s: float = inf
) -> None:
    """The recurrence with K and V exchanged, and that of the transposed state, compiled by the same passes,
    give the same results."""
    if subject.op is None:
        raise NotApplicable("foreign code cannot be compiled again for the transposed recurrence")
    others = turned_ops(subject.op)
    if not others:
        raise NotApplicable(f"{subject.spec.name} has states that no transposition is defined for")
    if subject.few_kernels:
        others = dict(list(others.items())[-1:])  # the state transposed is of exchanged names too
    kind = type_of_ways(subject)
    for case in cases(subject, seed=seed + 43, examples=examples, budget_s=budget_s, dtype=kind):
        oracle = exact(case, gradients=True)
        base = run(subject, case)
        for name, op in others.items():
            got = run(replace(subject, call=op, spec=op.spec), turned_case(case, name, op))
            back = {n: x.mT if name == TURNED and "state" in n else x for n, x in got.items()}
            cause = f"the {name} recurrence gives other numbers: one of the two orientations is wrong"
            demand_close(subject, "transposition_symmetry", case, oracle, back, base, cause)


TURNED = "transposed"


def turned_case(case: Case, name: str, op: CompiledOp) -> Case:
    """The case for one of ``turned_ops``."""
    flip = name == TURNED
    states = {n: x.mT.contiguous() if flip else x for n, x in case.states.items()}
    turned = replace(case, spec=op.spec, states=states)
    turned.weights.update({n: w.mT if flip and n != "o" else w for n, w in case.weights.items()})
    return turned


@lru_cache(maxsize=16)
def turned_ops(op: CompiledOp) -> Mapping[str, CompiledOp]:
    """The recurrence with K and V exchanged and, of one matrix, that of the transposed state."""
    specs: dict[str, RecurrenceSpec] = {}
    try:
        specs["renamed"] = renamed(op.spec)
        if [len(s.dims) for s in op.spec.states] == [2] and not op.spec.shifted:
            specs[TURNED] = transposed(specs["renamed"])
        return {n: assemble(s, op.options, op.passes) for n, s in specs.items()}
    except DslError:  # a spelling that no rule covers the other way round
        return {}


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 8e-2}
"""Of a reduction, relative to the largest of its output: two recurrences, of which one is only evaluated."""


WHOLE = (17, 4)
"""K and V in Triton's interpreter: kernels take whole chunks of so many channels (``effort``)."""


def reductions(subject: Subject, *, seed: int = 0, examples: int = 2, budget_s: float = inf) -> None:
    """At special inputs the recurrence is another published one (docs/catalogue.md): the subject gives
    there what the other's step loop gives."""
    # foreign code takes no consts
    known = [
        (r, i) for r, i in reductions_of(subject.spec) if subject.op is not None or not r.sides[i].consts
    ]
    if not known:
        raise NotApplicable(f"{subject.spec.name} is in no reduction of the catalogue")
    now = clock(subject)
    began = now()
    for at in range(seed, seed + examples):
        for dtype in subject.dtypes:
            for reduction, mine in known:
                if at > seed and now() - began > budget_s:
                    return
                _reduce(subject, reduction, mine, at, dtype)
                looked_at()


def _reduce(subject: Subject, reduction: Reduction, mine: int, seed: int, dtype: torch.dtype) -> None:
    if subject.sizes is not None and reduction.sizes not in subject.sizes:
        K, V = sizes_of(subject, 0, dtype)
    else:
        K, V = reduction.sizes
        if is_interpreted(subject) and reduction.sizes == SMALL:
            K, V = WHOLE
    values = reduction.inputs(seed, K, V)
    own, other = reduction.sides[mine], reduction.sides[1 - mine]
    tensors = {n: x.to(dtype) for n, x in own.tensors(values).items()}
    given = {n: x.to(subject.device) for n, x in tensors.items()}
    extra = {"output_final_state": True} if own.state else {}
    with torch.no_grad():
        with spent(CALLS):
            found = subject.call(**given, **extra, **{**subject.consts, **own.consts})
        got: Tensor = own.pick(found[1] if own.state else found[0] if isinstance(found, tuple) else found)
        o, last = reference(
            other.spec,
            other.tensors(values),
            output_final_state=True,
            consts=other.consts,
            dtype=torch.float64,
        )
        want: Tensor = other.pick(last if other.state else o)
    got = got.double().cpu()
    allowed = TOLERANCE[dtype] * want.abs().max().clamp_min(1e-3) * torch.ones_like(want)
    ratio = ratios(got, want, allowed, dtype)
    if float(ratio.max()) > 1:
        at = tuple(int(i) for i in torch.unravel_index(ratio.reshape(-1).argmax(), ratio.shape))
        case = one_case(subject, seed)
        excess = Excess(
            "final state" if own.state else "o", at, float(got[at]), float(want[at]), float(allowed[at]),
            float(ratio[at]),
        )  # fmt: skip
        raise fail(subject, "reductions", case, excess, f"it does not hold that {reduction.title}")
