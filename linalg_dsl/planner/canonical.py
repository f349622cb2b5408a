"""From a spec to form (1): the rules of normalisation in their order, and the verifier.

1. consts become numbers, but for those that only multiply the read;
2. *distribute*: the update is spread over the state into diagonal terms, erases and writes; [n, D]
   inputs are taken apart into rows;
3. *take the decay*: the product (or sum) of all diagonal terms, in log space;
4. *read the decayed state*: erases that all carry the decay read D_t ∘ S_{t-1} instead;
5. *merge columns*: terms with one left vector, or one erase vector, share a column; several coupled states
   are *stacked* under one triangular gate of blocks (planner.stacking);
6. *split the output*: reads by kind, the rest as terms of the token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from linalg_dsl.algebra.expr import (
    SCALAR,
    ZERO,
    Call,
    Expr,
    Hadamard,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Symbol,
)
from linalg_dsl.algebra.factors import Factors
from linalg_dsl.algebra.normalise import Normaliser
from linalg_dsl.algebra.traverse import symbols, walk
from linalg_dsl.errors import DslError, InternalError, Mistake, for_each, placed
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import Equation, RecurrenceSpec, State
from linalg_dsl.planner.constants import Constants, find_constants
from linalg_dsl.planner.decay import FoundDecay, common_decay, take_decay
from linalg_dsl.planner.form import Axis, CanonicalRecurrence, Recurrence, Rewrite, Stack
from linalg_dsl.planner.linear_map import RankOne, linear_maps
from linalg_dsl.planner.low_rank import LowRank, after_value_decay, merge_columns, read_decayed
from linalg_dsl.planner.ops import OTHER
from linalg_dsl.planner.reads import Output, read_output
from linalg_dsl.planner.record import Record
from linalg_dsl.planner.stacking import MOST_STATES, block_gate, stack_of

MOST_ERASES = 4
MOST_WRITES = 8


def canonicalise(spec: RecurrenceSpec, consts: Mapping[str, float] | None = None) -> CanonicalRecurrence:
    """Form (1) of a spec; ``consts`` are values that replace the declared ones.

    Raises DslError on what has no such form, with every obstacle that was found, ArgumentError on unknown
    consts.
    """
    _check_states(spec)
    constants = find_constants(spec, consts or {})
    reader = _OutputReader(spec, constants)
    try:
        found = _read_updates(spec, constants)
    except DslError as err:
        raise DslError([*err.mistakes, *reader.mistakes()]) from None
    outputs, kept = reader.read(found.by_axis)
    _check_outputs(spec, outputs)
    for equation, output in zip(spec.outputs, outputs, strict=True):
        found.record.reads(equation, output)
    used = _used_consts(spec, constants) - kept
    places = {name: i for i, name in enumerate(found.states)}
    made = Recurrence(
        state=found.states[0],
        decay=found.decay.decay,
        left=found.columns.left,
        written=found.columns.written,
        erase=found.columns.erase,
        erase_read="decayed" if found.erases_decayed else "exclusive",
        axis=found.axis,
        value_decay=found.decay.value_decay,
        sigma=found.columns.sigma,
        reads=tuple(
            replace(r, state=places[spec.states[r.state].name], to=i)
            for i, output in enumerate(outputs)
            for r in output.reads
        ),
        token_terms=tuple(x for output in outputs for x in output.token_terms),
        outputs=tuple(_plan_name(e.target) for e in spec.outputs),
        stack=found.stack,
        span=spec.updates[0].span,
    )
    known = [Rewrite("const", name, _show_number(constants, name), "fixed at compile time") for name in used]
    canonical = CanonicalRecurrence(
        spec,
        (made,),
        (*sorted(known, key=lambda r: r.before), *found.record.rewrites),
        tuple(sorted((name, float(constants.values[name])) for name in used)),
    )
    verify_canonical(canonical)
    return canonical


@dataclass(frozen=True, slots=True)
class _Updates:
    """The updates of all states in form (1)."""

    axis: Axis
    decay: FoundDecay
    columns: LowRank
    erases_decayed: bool
    record: Record
    states: tuple[str, ...]
    stack: Stack | None

    @property
    def by_axis(self) -> dict[str, Factors]:
        """What a query along K, and one along V, must hold for a read of the decayed state."""
        if not _decays(self.decay) and not self.decay.other:
            return {}
        factors = self.decay.factors
        scalars = Factors(factors.coefficient, factors.scalars)
        return {self.axis: factors, OTHER[self.axis]: scalars * Factors(vectors=self.decay.other)}


def _read_updates(spec: RecurrenceSpec, constants: Constants) -> _Updates:
    """Rules 2 to 5."""
    states, normaliser = spec.states, Normaliser(constants.sizes)
    with placed(spec.updates[0].value.span or spec.updates[0].span):
        values = for_each(spec.updates, lambda e: constants.substitute(e.value))
        maps = linear_maps(values, states, normaliser)
        record = Record(states, maps[0].axis)
        for update, value, found in zip(spec.updates, values, maps, strict=True):
            record.distribution(update, value, found)
        gate = block_gate(maps, spec, normaliser) if len(states) > 1 else None
        if gate is None:
            decay = take_decay(maps[0].diagonals, spec, normaliser)
            record.decay(decay)
        else:
            decay = common_decay(gate.own, gate.other, spec)
        written = [e for found in maps for e in found.erases]
        erases: Sequence[RankOne] = after_value_decay(written, decay.other)
    decayed = read_decayed(erases, decay.factors) if erases and _decays(decay) else None
    if decayed is not None:
        record.decayed_erase(erases, decayed)
        erases = decayed
    writes = [w for found in maps for w in found.writes]
    columns = merge_columns(erases, writes)
    record.merge(erases, writes, columns)
    names = tuple(s.name for s in states)
    stack = None
    if gate is not None:
        columns, stack = stack_of(gate, columns, names)
        record.stacked(stack, decay)
    _check_size(columns, spec.updates[0], states)
    order = names if stack is None else stack.states
    return _Updates(maps[0].axis, decay, columns, decayed is not None, record, order, stack)


def _plan_name(output: str) -> str:
    """The output's name in plans, where d_x is the gradient of x."""
    return f"out_{output}" if output.startswith("d_") else output


def classify(rec: Recurrence) -> str:
    """``linear``, ``scalar gate``, ``diagonal gate`` or ``separable gate``, ``signed`` where it may be
    negative, ``+ rank r`` where something is erased, ``on the value side`` where that is along V.

    Where nothing of the past is kept but what is erased, ``pure rank r``; n coupled states are
    ``stacked n x n``.
    """
    side = " on the value side" if rec.axis == "V" else ""
    if rec.stack is not None:
        n = len(rec.states)
        common = {"none": "", "channel": ", diagonal gate"}[rec.decay.kind]
        common = common if rec.value_decay.kind == "none" else ", separable gate"
        common = ", diagonal gates" if rec.stack.channels else common
        signed = "signed " if any(d.signed for d in rec.decays) else ""
        return f"{signed}stacked {n} x {n}{common}" + (f" + rank {rec.r}" if rec.r else "") + side
    if rec.keeps_nothing:
        return f"pure rank {rec.r}{side}" if rec.r else "no memory"
    kind = rec.decay.kind if rec.value_decay.kind == "none" else "separable"
    signed = "signed " if rec.decay.signed or rec.value_decay.signed else ""
    gate = signed + {"none": "linear", "scalar": "scalar gate", "channel": "diagonal gate"}.get(
        kind, f"{kind} gate"
    )
    return (f"{gate} + rank {rec.r}" if rec.r else gate) + side


def verify_canonical(canonical: CanonicalRecurrence) -> None:
    """Checks the invariants of ``planner.form``; raises InternalError on a broken one."""
    for rec in canonical.recurrences:
        where = f"{canonical.spec.name}: {rec.state}: "
        most = MOST_ERASES if rec.stack is not None else min(rec.m, MOST_ERASES)
        if not 1 <= rec.m <= MOST_WRITES or not rec.r <= most:
            raise InternalError(f"{where}m = {rec.m} and r = {rec.r} are out of bounds")
        if len(rec.written) != rec.m or len(rec.sigma) != rec.m or any(len(s) != rec.r for s in rec.sigma):
            raise InternalError(f"{where}W and Σ do not fit m = {rec.m} and r = {rec.r}")
        own, other = (rec.axis, 1), (OTHER[rec.axis], 1)
        for decay, shape in ((rec.decay, own), (rec.value_decay, other)):
            _need(decay.log, shape if decay.kind == "channel" else SCALAR, where + "log decay")
            if decay.kind == "none" and decay.log != ZERO:
                raise InternalError(f"{where}a log decay without a decay")
            for x in decay.signed:
                if not x.is_scalar:
                    _need(x, shape, where + "signed gate")
        for x in (*rec.left, *rec.erase):
            _need(x, own, where + "left or erase")
        for read in rec.reads:
            _need(read.query, (OTHER[rec.output_axis], 1), where + "query")
        if {r.to for r in rec.reads} != set(range(len(rec.outputs))) or (rec.outputs[1:] and rec.token_terms):
            raise InternalError(f"{where}every output is read, and each of several is reads alone")
        for x in rec.written:
            if x != ZERO:
                _need(x, other, where + "written")
        for x in (*(s for row in rec.sigma for s in row), *(r.scale for r in rec.reads)):
            _need(x, (1, 1), where + "Σ or scale")
        for x in (*rec.token_terms, *(r.gate for r in rec.reads if r.gate is not None)):
            _need(x, (rec.output_axis, 1), where + "token term or gate")
        if rec.stack is not None:
            _verify_stack(rec, rec.stack, where)
        fixed = {c.name for c in canonical.spec.consts} | {"K", "V"}
        for read in rec.reads:
            if any(s.name not in fixed for s in symbols(read.scale)):
                raise InternalError(f"{where}the scale {show_expr(read.scale)} is no product of consts")
        states = {s.name for s in canonical.spec.states}
        for x in rec_expressions(rec):
            _check_normal(x, states, where)


def _verify_stack(rec: Recurrence, stack: Stack, where: str) -> None:
    n = len(stack.states)
    if not 2 <= n <= MOST_STATES or stack.states[0] != rec.state or rec.decay.kind == "scalar":
        raise InternalError(f"{where}a stack of {', '.join(stack.states)}, with a {rec.decay.kind} decay")
    for matrix, count, what in (
        (stack.coupling, n, "coupling"),
        (stack.spread, rec.m, "spread"),
        (stack.sources, rec.r, "sources"),
    ):
        if len(matrix) != count or any(len(row) != n for row in matrix):
            raise InternalError(f"{where}{what} is not {count} x {n}")
        for x in (x for row in matrix for x in row):
            _need(x, SCALAR, where + what)
    if len(stack.gates) != n or any(g.kind == "channel" for g in stack.gates):
        raise InternalError(f"{where}the gates of a stack are one scalar per state")
    if stack.channels and (len(stack.channels) != n or rec.decay.kind != "none"):
        raise InternalError(f"{where}{len(stack.channels)} gates per channel of {n} states")
    for gate in stack.channels:
        _need(gate.log, (rec.axis, 1) if gate.kind == "channel" else SCALAR, where + "log gate of a state")
    if any(x != ZERO for i, row in enumerate(stack.coupling) for x in row[: i + 1]):
        raise InternalError(f"{where}the coupling is not triangular")
    if any(not 0 <= r.state < n for r in rec.reads):
        raise InternalError(f"{where}a read of no state")


def rec_expressions(rec: Recurrence) -> tuple[Expr, ...]:
    """Every expression of a recurrence."""
    decays = tuple(x for d in rec.decays for x in (d.log, *d.signed))
    reads = (x for r in rec.reads for x in (r.query, r.scale, *((r.gate,) if r.gate is not None else ())))
    sigma = (x for row in rec.sigma for x in row)
    if rec.stack is not None:
        matrices = (rec.stack.coupling, rec.stack.spread, rec.stack.sources)
        decays = (*decays, *(x for rows in matrices for row in rows for x in row))
    return (*decays, *rec.left, *rec.written, *rec.erase, *sigma, *reads, *rec.token_terms)


def _need(expr: Expr, shape: tuple[str | int, str | int], what: str) -> None:
    if expr.shape != shape:
        raise InternalError(f"{what} has shape {expr.shape}, expected {shape}: {show_expr(expr)}")


def _check_normal(expr: Expr, states: set[str], where: str) -> None:
    for node in walk(expr):
        if not isinstance(node, (Number, Symbol, Sum, Product, Hadamard, Quotient, Power, Call)):
            raise InternalError(f"{where}{type(node).__name__} in {show_expr(expr)}, not in normal form")
        if node.shape[1] != 1:
            raise InternalError(f"{where}a row or a matrix in {show_expr(expr)}")
        if isinstance(node, Symbol) and node.name in states:
            raise InternalError(f"{where}the state stands in {show_expr(expr)}")


def _check_states(spec: RecurrenceSpec) -> None:
    """Raises DslError on a spec that is no recurrence of matrix states of one shape."""
    state = next((s for s in spec.states if s.dims not in (("K", "V"), ("V", "K"))), None)
    if state is not None:
        raise DslError.single(
            "E958",
            f"the state {state.name} is [{', '.join(map(str, state.dims))}]; a chunk form is one of matrix "
            "states, [K, V] or [V, K]",
            state.span or spec.updates[0].span,
        )
    state = next((s for s in spec.states if s.dims != spec.states[0].dims), None)
    if state is not None:
        shapes = (f"{s.name} [{', '.join(map(str, s.dims))}]" for s in (spec.states[0], state))
        raise DslError.single(
            "E958",
            f"the coupled states {' and '.join(shapes)} have different shapes; a chunk form has one for all",
            state.span or spec.updates[0].span,
        )
    if len(spec.states) > MOST_STATES:
        raise DslError.single(
            "E958",
            f"{spec.name} has {len(spec.states)} coupled states; a chunk form has at most {MOST_STATES}",
            spec.states[MOST_STATES].span or spec.updates[0].span,
        )
    state = spec.states[0]
    if spec.shifted:
        shift = f"{spec.shifted[0].name}_{{t-1}}"
        raise DslError.single(
            "E902",
            f"the shift {shift} has no place in a chunk form",
            spec.updates[0].span,
            f"pass the shifted tensor as an input of its own, such as `{spec.shifted[0].name}_before`",
        )
    for axis in state.dims:
        if not any(axis in i.dims for i in spec.inputs):
            raise DslError.single(
                "E962",
                f"no input of {spec.name} has the axis {axis}, so no call could say how large it is",
                spec.updates[0].span,
                f"declare an input or param [{axis}]",
            )


class _OutputReader:
    """Rule 6, with those consts kept as run-time numbers that only multiply reads and terms."""

    def __init__(self, spec: RecurrenceSpec, constants: Constants) -> None:
        self.spec = spec
        self.constants = constants
        self.normaliser = Normaliser(constants.sizes)
        self.fixed = {c.name for c in spec.consts} | {"K", "V"}

    def read(self, decay: Mapping[str, Factors]) -> tuple[tuple[Output, ...], set[str]]:
        """The outputs, and which consts were kept; ``decay`` as ``read_output`` takes it."""
        in_update = {s.name for e in self.spec.updates for s in symbols(e.value)} | set(self.constants.sizes)
        keep = {name for name in self.constants.values if name not in in_update}
        while True:
            outputs = tuple(self._output(e, keep, decay) for e in self.spec.outputs)
            inside = {s.name for o in outputs for e in o.inner for s in symbols(e)} & keep
            if not inside:
                return outputs, keep
            keep -= inside

    def _output(self, equation: Equation, keep: set[str], decay: Mapping[str, Factors]) -> Output:
        with placed(equation.value.span or equation.span):
            value = self.constants.substitute(equation.value, keep)
            return read_output(
                Equation(equation.target, value, equation.span),
                self.spec.states,
                decay,
                self.normaliser,
                self._is_fixed,
            )

    def mistakes(self) -> tuple[Mistake, ...]:
        """What is wrong with the output, whatever the update is."""
        try:
            self.read({})
        except DslError as err:
            return err.mistakes
        return ()

    def _is_fixed(self, symbol: Symbol) -> bool:
        return symbol.time is None and symbol.name in self.fixed


def _check_outputs(spec: RecurrenceSpec, outputs: Sequence[Output]) -> None:
    """Several outputs of one walk have one axis, and none has what is not read."""
    if len(outputs) == 1:
        return
    names = ", ".join(e.target for e in spec.outputs)
    if len({r.axis for o in outputs for r in o.reads}) > 1 or any(o.token_terms for o in outputs):
        raise DslError.single(
            "E957",
            f"the outputs {names} of {spec.name} are not all reads along one axis",
            spec.outputs[0].span,
        )


def _used_consts(spec: RecurrenceSpec, constants: Constants) -> set[str]:
    used = {s.name for e in (*spec.updates, *spec.outputs) for s in symbols(e.value)}
    return (used | set(constants.sizes)) & set(constants.values)


def _check_size(columns: LowRank, update: Equation, states: Sequence[State]) -> None:
    if not columns.left:
        names = " or ".join(s.name for s in states)
        raise DslError.single("E955", f"nothing is ever written to {names}", update.span)
    if len(columns.erase) > MOST_ERASES:
        raise DslError.single(
            "E955",
            f"the update erases along {len(columns.erase)} vectors; a chunk form has at most {MOST_ERASES}",
            update.span,
        )
    if len(columns.left) > MOST_WRITES:
        raise DslError.single(
            "E955",
            f"the update writes along {len(columns.left)} vectors; a chunk form has at most {MOST_WRITES}",
            update.span,
        )


def _decays(decay: FoundDecay) -> bool:
    """Whether there is a decay of the axis that is erased, and not of everything."""
    factors = decay.factors
    is_set = factors.coefficient != 1 or bool(factors.scalars or factors.vectors)
    return is_set and not decay.keeps_nothing


def _show_number(constants: Constants, name: str) -> str:
    return f"{float(constants.values[name]):.12g}"
