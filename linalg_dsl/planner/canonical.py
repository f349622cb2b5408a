"""From a spec to form (1): the rules of normalisation in their order, and the verifier.

1. consts become numbers, but for those that only multiply the read;
2. *distribute*: the update is spread over the state into diagonal terms, erases and writes; [n, D]
   inputs are taken apart into rows;
3. *take the decay*: the product (or sum) of all diagonal terms, in log space;
4. *read the decayed state*: erases that all carry the decay read D_t ∘ S_{t-1} instead;
5. *merge columns*: terms with one left vector, or one erase vector, share a column;
6. *split the output*: reads by kind, the rest as terms of the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from linalg_dsl.algebra.expr import (
    ONE,
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
    add,
    diag,
    hadamard,
    mul,
    transpose,
)
from linalg_dsl.algebra.factors import Factors
from linalg_dsl.algebra.normalise import Normaliser
from linalg_dsl.algebra.traverse import symbols, walk
from linalg_dsl.errors import DslError, InternalError
from linalg_dsl.language.printer import show_expr
from linalg_dsl.language.spec import Equation, RecurrenceSpec, State
from linalg_dsl.planner.constants import Constants, find_constants
from linalg_dsl.planner.decay import FoundDecay, take_decay
from linalg_dsl.planner.form import CanonicalRecurrence, Read, Recurrence, Rewrite
from linalg_dsl.planner.linear_map import LinearMap, RankOne, linear_map
from linalg_dsl.planner.low_rank import LowRank, merge_columns, read_decayed
from linalg_dsl.planner.reads import Output, read_output

MOST_ERASES = 4
MOST_WRITES = 8


def canonicalise(spec: RecurrenceSpec, consts: Mapping[str, float] | None = None) -> CanonicalRecurrence:
    """Form (1) of a spec; ``consts`` are values that replace the declared ones.

    Raises DslError on what has no such form or is not supported yet, ArgumentError on unknown consts.
    """
    state = _one_state(spec)
    constants = find_constants(spec, consts or {})
    normaliser = Normaliser(constants.sizes)
    rewrites: list[Rewrite] = []
    update, outputs = spec.updates[0], spec.outputs
    value = constants.substitute(update.value)
    with _placed(update):
        found = linear_map(value, state.name, normaliser)
    _record_distribution(rewrites, update, value, found, state)
    decay = take_decay(found.diagonals, spec, normaliser)
    _record_decay(rewrites, decay, state)
    erases: Sequence[RankOne] = found.erases
    decayed = read_decayed(erases, decay.factors) if erases and _is_set(decay.factors) else None
    if decayed is not None:
        _record_decayed(rewrites, erases, decayed, decay, state)
        erases = decayed
    columns = merge_columns(erases, found.writes)
    _check_size(columns, update, state)
    _record_merge(rewrites, erases, found.writes, columns)
    with _placed(outputs[0]):
        output, kept = _read_with_runtime_consts(spec, outputs[0], decay, normaliser, constants)
    _record_reads(rewrites, outputs[0], output, state)
    used = _used_consts(spec, constants) - kept
    made = Recurrence(
        state=state.name,
        decay=decay.decay,
        left=columns.left,
        written=columns.written,
        erase=columns.erase,
        erase_read="decayed" if decayed is not None else "exclusive",
        sigma=columns.sigma,
        reads=output.reads,
        token_terms=output.token_terms,
        output=outputs[0].target,
        span=update.span,
    )
    known = [Rewrite("const", name, _show_number(constants, name), "fixed at compile time") for name in used]
    canonical = CanonicalRecurrence(
        spec,
        (made,),
        (*sorted(known, key=lambda r: r.before), *rewrites),
        tuple(sorted((name, float(constants.values[name])) for name in used)),
    )
    verify_canonical(canonical)
    return canonical


def classify(rec: Recurrence) -> str:
    """``linear``, ``scalar gate`` or ``diagonal gate``, and ``+ rank r`` where something is erased."""
    gate = {"none": "linear", "scalar": "scalar gate", "channel": "diagonal gate"}[rec.decay.kind]
    return f"{gate} + rank {rec.r}" if rec.r else gate


def verify_canonical(canonical: CanonicalRecurrence) -> None:
    """Checks the invariants of ``planner.form``; raises InternalError on a broken one."""
    for rec in canonical.recurrences:
        where = f"{canonical.spec.name}: {rec.state}: "
        if not 1 <= rec.m <= MOST_WRITES or not rec.r <= min(rec.m, MOST_ERASES):
            raise InternalError(f"{where}m = {rec.m} and r = {rec.r} are out of bounds")
        if len(rec.written) != rec.m or len(rec.sigma) != rec.m or any(len(s) != rec.r for s in rec.sigma):
            raise InternalError(f"{where}W and Σ do not fit m = {rec.m} and r = {rec.r}")
        _need(rec.decay.log, ("K", 1) if rec.decay.kind == "channel" else SCALAR, where + "log decay")
        if rec.decay.kind == "none" and rec.decay.log != ZERO:
            raise InternalError(f"{where}a log decay without a decay")
        for x in (*rec.left, *rec.erase, *(r.query for r in rec.reads)):
            _need(x, ("K", 1), where + "left, erase or query")
        for x in rec.written:
            if x != ZERO:
                _need(x, ("V", 1), where + "written")
        for x in (*(s for row in rec.sigma for s in row), *(r.scale for r in rec.reads)):
            _need(x, (1, 1), where + "Σ or scale")
        for x in (*rec.token_terms, *(r.gate for r in rec.reads if r.gate is not None)):
            _need(x, ("V", 1), where + "token term or gate")
        fixed = {c.name for c in canonical.spec.consts} | {"K", "V"}
        for read in rec.reads:
            if any(s.name not in fixed for s in symbols(read.scale)):
                raise InternalError(f"{where}the scale {show_expr(read.scale)} is no product of consts")
        states = {s.name for s in canonical.spec.states}
        for x in rec_expressions(rec):
            _check_normal(x, states, where)


def rec_expressions(rec: Recurrence) -> tuple[Expr, ...]:
    """Every expression of a recurrence."""
    return (
        rec.decay.log, *rec.left, *rec.written, *rec.erase, *(s for row in rec.sigma for s in row),
        *(x for r in rec.reads for x in (r.query, r.scale, *((r.gate,) if r.gate is not None else ()))),
        *rec.token_terms,
    )  # fmt: skip


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


def _one_state(spec: RecurrenceSpec) -> State:
    if len(spec.states) != 1:
        raise DslError.single(
            "E958", f"{spec.name} has {len(spec.states)} states; only one is supported yet",
            spec.states[1].span if len(spec.states) > 1 else None,
        )  # fmt: skip
    state = spec.states[0]
    if state.dims != ("K", "V"):
        raise DslError.single(
            "E958",
            f"the state {state.name} is [{', '.join(map(str, state.dims))}]; only [K, V] is supported yet",
            state.span or spec.updates[0].span,
            "write the recurrence for the transposed state" if state.dims == ("V", "K") else None,
        )
    if spec.shifted:
        shift = f"{spec.shifted[0].name}_{{t-1}}"
        raise DslError.single(
            "E902",
            f"the shift {shift} is not supported yet",
            spec.updates[0].span,
            f"pass the shifted tensor as an input of its own, such as `{spec.shifted[0].name}_before`",
        )
    if len(spec.outputs) != 1:
        raise DslError.single("E958", f"{spec.name} has several outputs; only one is supported yet")
    for axis in state.dims:
        if not any(axis in i.dims for i in spec.inputs):
            raise DslError.single(
                "E962",
                f"no input of {spec.name} has the axis {axis}, so no call could say how large it is",
                spec.updates[0].span,
                f"declare an input or param [{axis}]",
            )
    return state


@contextmanager
def _placed(equation: Equation) -> Iterator[None]:
    """Gives mistakes without a place that of their equation."""
    try:
        yield
    except DslError as err:
        place = equation.value.span or equation.span
        raise DslError(replace(m, span=m.span or place) for m in err.mistakes) from None


def _read_with_runtime_consts(
    spec: RecurrenceSpec,
    equation: Equation,
    decay: FoundDecay,
    normaliser: Normaliser,
    constants: Constants,
) -> tuple[Output, set[str]]:
    """The output, with those consts kept as run-time numbers that only multiply reads and terms."""
    in_update = {s.name for e in spec.updates for s in symbols(e.value)} | set(constants.sizes)
    keep = {name for name in constants.values if name not in in_update}
    names = {c.name for c in spec.consts} | {"K", "V"}

    def is_fixed(symbol: Symbol) -> bool:
        return symbol.time is None and symbol.name in names

    while True:
        value = constants.substitute(equation.value, keep)
        output = read_output(
            Equation(equation.target, value, equation.span),
            spec.states[0].name,
            decay.factors,
            normaliser,
            is_fixed,
        )
        inside = {s.name for e in output.inner for s in symbols(e)} & keep
        if not inside:
            return output, keep
        keep -= inside


def _used_consts(spec: RecurrenceSpec, constants: Constants) -> set[str]:
    used = {s.name for e in (*spec.updates, *spec.outputs) for s in symbols(e.value)}
    return (used | set(constants.sizes)) & set(constants.values)


def _check_size(columns: LowRank, update: Equation, state: State) -> None:
    if not columns.left:
        raise DslError.single("E955", f"nothing is ever written to {state.name}", update.span)
    if len(columns.erase) > MOST_ERASES:
        raise DslError.single(
            "E955",
            f"the update erases along {len(columns.erase)} vectors; only {MOST_ERASES} are supported yet",
            update.span,
        )
    if len(columns.left) > MOST_WRITES:
        raise DslError.single(
            "E955",
            f"the update writes along {len(columns.left)} vectors; only {MOST_WRITES} are supported yet",
            update.span,
        )


# -- the record of what was done --------------------------------------------------------------------
def _is_set(factors: Factors) -> bool:
    return factors.coefficient != 1 or bool(factors.scalars or factors.vectors)


def _past(state: State) -> Expr:
    return Symbol(state.name, ("K", "V"), -1)


def _rank_one(term: RankOne, *right: Expr) -> Expr:
    return mul((term.scale.scalar, term.column.vector, transpose(term.row.vector), *right))


def _diagonal(factors: Factors, state: State) -> Expr:
    column = factors.vectors
    gate = () if not column else (diag(hadamard(column) if len(column) > 1 else column[0]),)
    return mul((factors.scalar, *gate, _past(state)))


def _record_distribution(
    rewrites: list[Rewrite], update: Equation, value: Expr, found: LinearMap, state: State
) -> None:
    terms = [_diagonal(d.factors, state) for d in found.diagonals]
    terms += [_rank_one(e, _past(state)) for e in found.erases]
    terms += [_rank_one(w) for w in found.writes]
    after = add(terms)
    if after != value:
        reason = "products are spread over the sums that hold the state, products over rows are written out"
        rewrites.append(Rewrite("distribute", show_expr(value), show_expr(after), reason))


def _record_decay(rewrites: list[Rewrite], decay: FoundDecay, state: State) -> None:
    if decay.decay.kind == "none":
        return
    log = f"log λ_t = {show_expr(decay.decay.log)}"
    reason = (
        "one number per token" if decay.decay.kind == "scalar" else "one number per token and key channel"
    )
    rewrites.append(Rewrite("take the decay", show_expr(_diagonal(decay.factors, state)), log, reason))


def _record_decayed(
    rewrites: list[Rewrite],
    before: Sequence[RankOne],
    after: Sequence[RankOne],
    decay: FoundDecay,
    state: State,
) -> None:
    was = _sum(show_expr(_rank_one(e, _past(state))) for e in before)
    now = _sum(f"{show_expr(_rank_one(e))} (D_t ∘ {state.name}_{{t-1}})" for e in after)
    rewrites.append(
        Rewrite(
            "read the decayed state", was, now, "every erase carries the decay, B = λ ∘ b: no shift is needed"
        )
    )


def _record_merge(
    rewrites: list[Rewrite], erases: Sequence[RankOne], writes: Sequence[RankOne], columns: LowRank
) -> None:
    terms = len(erases) + len(writes)
    if terms > len(columns.left):
        before = ", ".join(show_expr(t.column.vector) for t in (*writes, *erases))
        after = ", ".join(show_expr(x) for x in columns.left)
        reason = "terms along one vector, up to a scalar per token, are one write"
        rewrites.append(Rewrite("merge left vectors", before, after, reason))
    if columns.combined > 0:
        before = ", ".join(show_expr(e.row.vector) for e in erases)
        after = ", ".join(show_expr(x) for x in columns.erase)
        rewrites.append(Rewrite("combine erase vectors", before, after, "they share their left vector"))


def _record_reads(rewrites: list[Rewrite], equation: Equation, output: Output, state: State) -> None:
    before = show_expr(equation.value)
    after = [_show_read(r, state) for r in output.reads] + [show_expr(t) for t in output.token_terms]
    if _sum(after) != before and (output.split > 1 or any(r.kind == "decayed" for r in output.reads)):
        reason = "reads of the state, and what the token adds by itself"
        rewrites.append(Rewrite("split the output", before, _sum(after), reason))


def _sum(terms: Iterable[str]) -> str:
    return " + ".join(terms).replace("+ -", "- ")


def _show_read(read: Read, state: State) -> str:
    source = {
        "inclusive": f"{state.name}_tᵀ",
        "exclusive": f"{state.name}_{{t-1}}ᵀ",
        "decayed": f"(D_t ∘ {state.name}_{{t-1}})ᵀ",
    }[read.kind]
    query = show_expr(read.query)
    query = f"({query})" if isinstance(read.query, (Sum, Hadamard)) else query
    scale = "" if read.scale == ONE else f"{show_expr(read.scale)} "
    gate = "" if read.gate is None else f"{show_expr(read.gate)} ∘ "
    return f"{gate}{scale}{source} {query}"


def _show_number(constants: Constants, name: str) -> str:
    return f"{float(constants.values[name]):.12g}"
