"""Substeps laid out as tokens: n micro-tokens for each token, of which only the last is read.

``S_t = start; n times S_t = body`` is the recurrence ``S_τ = body(start(S_{τ-1}))`` over n T tokens if what
``start`` does is left out at all but the first of n: its gates are then 1, what it writes or erases is 0.
The other way is to write the substeps out as one update of n times the rank (``algebra/unroll.py``). Which
is less work is a matter of cost: scores of writes with erases grow with the square of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from linalg_dsl.algebra.expr import ZERO, Expr, Iterate, Number, Symbol, mul, power
from linalg_dsl.algebra.traverse import mentions, symbols, transform, walk
from linalg_dsl.errors import ArgumentError, DslError, InternalError
from linalg_dsl.language.names import free_name
from linalg_dsl.language.spec import Equation, Input, Interval, RecurrenceSpec
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.classes import find_form
from linalg_dsl.planner.constants import find_constants
from linalg_dsl.planner.cost import flops, traffic
from linalg_dsl.planner.exact_step import Leaves, evaluate
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.stages import Layout, Stage

SIZE, CHUNK = 128, 64
"""K, V and the tokens of a chunk at which the two ways are compared."""
RATE, UNITS, BANDWIDTH = 3.3e6, 132, 4.26e6
"""Of the device that schedules are fitted to: FLOPs of products in bfloat16 per microsecond and
multiprocessor, multiprocessors, bytes per microsecond; the same as in ``codegen.schedule.levels`` and
``codegen.targets``."""
BYTE = RATE * UNITS / BANDWIDTH
"""FLOPs in whose time a byte is moved: 102."""


def choose_substeps(stage: Stage, wanted: str | None = None) -> Stage:
    """The stage with its substeps as micro-tokens where that is less work, or ``wanted`` ("micro").

    Raises ``ArgumentError`` where micro-tokens are asked for and do not exist.
    """
    if not any(isinstance(e.value, Iterate) for e in stage.spec.updates) or wanted == "expand":
        return stage
    micro = micro_tokens(stage)
    if wanted == "micro":
        if micro is None:
            raise ArgumentError(f"{stage.spec.name}: its substeps cannot be laid out as micro-tokens")
        return micro
    if micro is None:
        return stage
    many, each = _count(stage.spec), _cost(micro.spec)
    expanded = _cost(stage.spec)
    if each is None or (expanded is not None and expanded <= many * each):
        return stage
    against = "no chunk form" if expanded is None else f"{expanded / 1000:,.0f}k"
    note = f"{many} micro-tokens at a cost of {many * each / 1000:,.0f}k, written out: {against}"
    return replace(micro, note=note)


def micro_tokens(stage: Stage) -> Stage | None:
    """The stage over micro-tokens; None where there is no such form."""
    spec = stage.spec
    if len(spec.states) != 1 or not isinstance(spec.updates[0].value, Iterate):
        return None
    loop, reads = spec.updates[0].value, [e.value for e in spec.outputs]
    state = spec.states[0].name
    if loop.name != state or any(mentions(e, _past(state)) for e in (loop.body, *reads)):
        return None
    rowed = {s.name for s in symbols(loop.body) if s.row == loop.index}
    everywhere = [s for e in (loop.start, loop.body, *reads) for s in symbols(e)]
    if any(s.name in rowed and s.row != loop.index for s in everywhere) or not rowed:
        return None
    if any(i.name in rowed and not i.timed for i in spec.inputs):
        return None  # the rows of a param are no tokens
    fills = _fills(spec, loop)
    if fills is None:
        return None
    return _Rewrite(stage, loop, rowed, fills).run()


@dataclass
class _Rewrite:
    stage: Stage
    loop: Iterate
    rowed: set[str]
    fills: Mapping[str, float]

    def run(self) -> Stage:
        spec, loop = self.stage.spec, self.loop
        elsewhere = {s.name for e in (loop.body, *(o.value for o in spec.outputs)) for s in symbols(e)}
        taken = {i.name for i in spec.inputs} | {c.name for c in spec.consts} | {s.name for s in spec.states}
        inputs: list[Input] = []
        arguments: list[str] = []
        layouts: list[Layout] = []
        firsts: dict[str, str] = {}
        for decl, argument in zip(spec.inputs, self.stage.arguments, strict=True):
            fill = self.fills.get(decl.name)
            if decl.name in self.rowed:
                inputs.append(replace(decl, dims=decl.dims[1:]))
                layouts.append("rows")
            elif fill is None or decl.name in elsewhere:
                inputs.append(decl)
                layouts.append("repeat" if decl.timed else "param")
            else:
                inputs.append(_filled(decl, decl.name, fill))
                layouts.append(fill)
            arguments.append(argument)
            if fill is not None and decl.name in elsewhere:
                name = firsts[decl.name] = free_name(f"{decl.name}_first", taken)
                inputs.append(_filled(decl, name, fill))
                layouts.append(fill)
                arguments.append(argument)
        timed = {i.name for i in inputs if i.timed}

        def in_start(node: Expr) -> Expr:
            if isinstance(node, Symbol) and node.name in self.fills:
                return replace(node, name=firsts.get(node.name, node.name), time=0)
            return node

        start = transform(loop.start, in_start)

        def in_body(node: Expr) -> Expr:
            if not isinstance(node, Symbol):
                return node
            if (node.name, node.time) == (loop.name, 0):
                return start
            return replace(node, row=None) if node.row == loop.index else node

        update = Equation(loop.name, transform(loop.body, in_body), spec.updates[0].span)
        used = {s.name for e in (update, *spec.outputs) for s in symbols(e.value)}
        used |= {d for i in inputs for d in i.dims if isinstance(d, str)}
        used |= {s.name for c in spec.consts if c.name in used for s in symbols(c.value)}
        if not timed:
            raise InternalError(f"{spec.name} has no input with a time axis")
        made = replace(
            spec,
            inputs=tuple(inputs),
            consts=tuple(c for c in spec.consts if c.name in used),
            updates=(update,),
            written=(),
        )
        return replace(
            self.stage,
            spec=made,
            arguments=tuple(arguments),
            layouts=tuple(layouts),
            note="micro-tokens, as asked for",
        )


def _fills(spec: RecurrenceSpec, loop: Iterate) -> dict[str, float] | None:
    """Inputs of ``start`` with the numbers that make it leave the state as it is, if there are such."""
    if loop.start == Symbol(loop.name, loop.start.shape, -1):
        return {}
    names = dict.fromkeys(s.name for s in symbols(loop.start))
    inputs = [i for i in spec.inputs if i.name in names]
    gates = {i.name: 0.0 if i.kind == "log_gate" else 1.0 for i in inputs if i.kind != "plain"}
    scalars = {i.name: 0.0 for i in inputs if i.kind == "plain" and not i.dims}
    plain = {i.name: 0.0 for i in inputs if i.kind == "plain"}
    for chosen in (gates, {**gates, **scalars}, {**gates, **plain}):
        if _is_identity(spec, loop, chosen):
            return chosen
    return None


def _is_identity(spec: RecurrenceSpec, loop: Iterate, fills: Mapping[str, float]) -> bool:
    """Whether ``start`` with these numbers is the state, in exact arithmetic."""

    def change(node: Expr) -> Expr:
        if isinstance(node, Symbol) and node.name in fills:
            return mul((ZERO, node)) if fills[node.name] == 0 else power(node, ZERO)
        return node

    if any(isinstance(n, Iterate) for n in walk(loop.start)):
        return False
    constants = find_constants(spec, {})
    start = constants.substitute(transform(loop.start, change))
    known = tuple((n, float(v)) for n, v in constants.values.items())
    leaves = Leaves(CanonicalRecurrence(spec, (), (), known), {"K": 2, "V": 2, **constants.sizes})
    try:
        return evaluate(spec, leaves, start) == evaluate(spec, leaves, Symbol(loop.name, start.shape, -1))
    except (InternalError, DslError):
        return False


def _cost(spec: RecurrenceSpec) -> float | None:
    """Of one token, forward and backward, in FLOPs; None where there is no chunk form."""
    try:
        form = find_form(spec, {})
    except DslError:
        return None
    if not isinstance(form, CanonicalRecurrence):
        return None
    ahead = derive(form)
    back = backward(ahead)
    work = flops(ahead, CHUNK, SIZE, SIZE).total + flops(back, CHUNK, SIZE, SIZE, at_hand=ahead).total
    moved = traffic(ahead, CHUNK, SIZE, SIZE).total + traffic(back, CHUNK, SIZE, SIZE).total
    return work + BYTE * moved


def _count(spec: RecurrenceSpec) -> int:
    loop = spec.updates[0].value
    if not isinstance(loop, Iterate):
        raise InternalError(f"{spec.name} has no substeps")
    value = find_constants(spec, {}).substitute(loop.count)
    if not isinstance(value, Number):
        raise InternalError(f"the substeps of {spec.name} have no number")
    return int(value.value)


def _past(state: str) -> Callable[[Symbol], bool]:
    return lambda s: s.name == state and s.time == -1


def _filled(decl: Input, name: str, fill: float) -> Input:
    """An input that may also be ``fill``; of a param, one per token."""
    return replace(decl, name=name, timed=True, range=_with(decl.range, fill), unit=decl.unit)


def _with(interval: Interval, value: float) -> Interval:
    low, high = interval.low, interval.high
    if low is not None and (value < low or (value == low and interval.low_open)):
        interval = replace(interval, low=value, low_open=False)
    if high is not None and (value > high or (value == high and interval.high_open)):
        interval = replace(interval, high=value, high_open=False)
    return interval
