"""Takes a recurrence of several states apart into stages (``planner/stages.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from linalg_dsl.algebra.expr import Expr, Iterate, Symbol, mul, transpose
from linalg_dsl.algebra.rules import BIG_DIMS, is_matrix
from linalg_dsl.algebra.traverse import scalars_first, symbols, transform, walk
from linalg_dsl.algebra.unroll import unroll
from linalg_dsl.errors import DslError
from linalg_dsl.language.graph import components
from linalg_dsl.language.names import LONGEST, RESERVED, ascii_name
from linalg_dsl.language.spec import Equation, RecurrenceSpec
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.constants import find_constants
from linalg_dsl.planner.joined_runs import join_runs
from linalg_dsl.planner.micro_tokens import choose_substeps
from linalg_dsl.planner.shared_params import meeting_at_tokens
from linalg_dsl.planner.stage_spec import StageMaker
from linalg_dsl.planner.stages import Shift, Stages, Step, single, verify
from linalg_dsl.planner.state_reads import ReadFinder, WholeRead, is_linear

Component = frozenset[str]


def split(spec: RecurrenceSpec) -> Stages:
    """The stages of a spec; one that is a single component and has no shifts is its own only stage.

    Unless its state has another axis than K and V, for which one of these can stand in a stage, or its output
    does more than read the state: what is read then has a chunk form, if the update has, and the rest is a
    step on tokens. Raises ``DslError`` where a stage cannot be made.
    """
    groups = _grouped(spec)
    if len(groups) == 1 and not spec.shifted:
        usual = all(d in BIG_DIMS for s in spec.states for d in s.dims)
        if usual and not _does_more_than_read(spec, groups[0]):
            return single(spec)
        try:
            stages = _staged(spec, groups)
        except DslError:
            return single(spec)
        return stages if not usual or _in_chunks(stages) else single(spec)
    return _staged(spec, groups)


def _does_more_than_read(spec: RecurrenceSpec, group: Component) -> bool:
    """Whether the output is a function of what is read from a matrix state, or a number."""
    value = spec.outputs[0].value
    matrix = any(is_matrix(s.shape) for s in spec.states)
    return matrix and (value.is_scalar or not is_linear(value, group))


def _in_chunks(stages: Stages) -> bool:
    """Whether every stage has a chunk form, its substeps written out or laid out as tokens."""
    try:
        for stage in stages.stages:
            canonicalise(choose_substeps(stage).spec)
    except DslError:
        return False
    return True


def _staged(spec: RecurrenceSpec, groups: list[Component]) -> Stages:
    flat, fixed = _without_loops_that_read(spec, groups)
    stages = _joined(_Splitter(flat, groups))
    runs = [s.states for s in stages.stages]
    if len(set(runs)) < len(runs):  # what the output adds to a read may be what keeps two runs apart
        try:
            apart = _joined(_Splitter(flat, groups, reads_only=True))
        except (DslError, WholeRead):
            apart = stages
        stages = min(stages, apart, key=lambda s: len(s.stages))
    stages = meeting_at_tokens(replace(stages, spec=spec, fixed=fixed))
    verify(stages)
    return stages


def _joined(splitter: _Splitter) -> Stages:
    stages = splitter.run()
    return replace(stages, steps=join_runs(splitter.spec, stages.steps))


def _without_loops_that_read(
    spec: RecurrenceSpec, groups: list[Component]
) -> tuple[RecurrenceSpec, tuple[tuple[str, float], ...]]:
    """Substeps written out where one of them reads another component; the consts that say how many."""
    values = find_constants(spec, {}).values
    updates: list[Equation] = []
    fixed: dict[str, float] = {}
    for equation in spec.updates:
        own = next(g for g in groups if equation.target in g)
        loops = [n for n in walk(equation.value) if isinstance(n, Iterate)]
        read = {s.name for loop in loops for s in symbols(loop.body)}
        if read & ({s.name for s in spec.states} - own):
            counts = {s.name for loop in loops for s in symbols(loop.count)}
            fixed |= {n: float(values[n]) for n in counts if n in values}
            equation = replace(equation, value=unroll(equation.value, values))
        updates.append(equation)
    return replace(spec, updates=tuple(updates)), tuple(sorted(fixed.items()))


def _grouped(spec: RecurrenceSpec) -> list[Component]:
    """The components in feeding order: states that need each other, or one of which reads all of a matrix."""
    updates = {e.target: e.value for e in spec.updates}
    graph = {name: {s.name for s in symbols(e)} & set(updates) for name, e in updates.items()}
    while True:
        number = components(graph)
        groups = [frozenset(n for n in updates if number[n] == i) for i in sorted(set(number.values()))]
        whole = _whole_read(spec, groups)
        if whole is None:
            return _in_feeding_order(groups, graph)
        reader, state = whole
        graph[state] = graph[state] | {reader}
        graph[reader] = graph[reader] | {state}


def _in_feeding_order(groups: list[Component], graph: Mapping[str, set[str]]) -> list[Component]:
    done: list[Component] = []
    todo = list(groups)
    while todo:
        ready = next(g for g in todo if not any(graph[n] & h for n in g for h in todo if h != g))
        done.append(ready)
        todo.remove(ready)
    return done


def _whole_read(spec: RecurrenceSpec, groups: list[Component]) -> tuple[str, str] | None:
    """A state whose update needs all of another component's matrix state, and that state."""
    for group in groups:
        for equation in spec.updates:
            if equation.target in group:
                try:
                    _collect(spec, groups, equation.value, group)
                except WholeRead as err:
                    return equation.target, err.state
    return None


def _collect(
    spec: RecurrenceSpec, groups: list[Component], expr: Expr, own: Component
) -> list[tuple[Component, Expr]]:
    """The reads of other components in an expression, those in the queries of reads included."""
    found: list[tuple[Component, Expr]] = []
    states = {s.name for s in spec.states}

    def take(read: Expr, state: str) -> Expr:
        owner = next(g for g in groups if state in g)
        beside = {s.name for s in symbols(read)} & states - owner
        if beside:  # tanh(A + B)ᵀ q
            raise WholeRead(min(beside))
        found.append((owner, read))
        return Symbol(f"the value of {scalars_first(read)!r}", read.shape)

    ReadFinder(states - own, own, take).replace(expr)
    return found


@dataclass
class _Splitter:
    """Makes the stages on demand, from the output backwards; ``steps`` comes out in feeding order.

    ``reads_only``: the output is a step on tokens, of what stages read.
    """

    spec: RecurrenceSpec
    groups: list[Component]
    reads_only: bool = False
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.updates = {e.target: e for e in self.spec.updates}
        self.states = {s.name: s for s in self.spec.states}
        self.names = _Names(self.spec)
        self.maker = StageMaker(self.spec, self.names.unique, self.steps.append)
        self.made: dict[tuple[Component, Expr], Symbol] = {}
        self.shifts: dict[str, str] = {}
        self.kept: set[Component] = set()
        self.last = frozenset() if self.reads_only else self._last()
        self.bare = self._read_bare()

    def run(self) -> Stages:
        output = self.spec.outputs[0]
        if self.last:
            result = self._stage(self.last, output.value, output.target, output)
        else:
            value = self._lowered(output.value, frozenset())
            name = self.names.unique(output.target)
            self.steps.append(self.maker.token_step(name, value))
            result = Symbol(name, value.shape)
        for group in self.groups:
            if group not in self.kept:
                self._stage(group, self._any_read(group), "")
        return Stages(self.spec, tuple(self.steps), result.name)

    # -- what is decided first ----------------------------------------------------------------------
    def _last(self) -> Component:
        """The component whose stage gives the output; none where that is a step on tokens alone."""
        value = self.spec.outputs[0].value
        read = {s.name for s in symbols(value)}
        fed = {g for e in self.spec.updates for g, _ in self._reads(e.value, self._group(e.target))}
        # a matrix before a vector: the vector is then read by products, not by what is done with these
        last_first = self.groups[::-1]
        for group in sorted(last_first, key=lambda g: not self._has_matrix(g)):
            matrix = self._has_matrix(group)
            linear = is_linear(value, group) and not value.is_scalar
            if group & read and (linear if matrix else group not in fed):
                try:
                    _collect(self.spec, self.groups, value, group)
                except WholeRead:
                    continue
                return group
        return frozenset()

    def _has_matrix(self, group: Component) -> bool:
        return any(is_matrix(self.states[n].shape) for n in group)

    def _read_bare(self) -> set[Component]:
        """The components of vectors and scalars that are handed over as they stand."""
        found: dict[Component, set[Expr]] = {}
        equations = [(e.value, self._group(e.target)) for e in self.spec.updates]
        for value, own in [*equations, (self.spec.outputs[0].value, self.last)]:
            for group, read in self._reads(value, own):
                found.setdefault(group, set()).add(scalars_first(read))
        return {
            g
            for g, reads in found.items()
            if len(reads) > 1 and not any(is_matrix(self.states[n].shape) for n in g)
        }

    def _reads(self, value: Expr, own: Component) -> list[tuple[Component, Expr]]:
        try:
            return _collect(self.spec, self.groups, value, own)
        except WholeRead as err:
            state = self.states[err.state]
            raise DslError.single(
                "E970",
                f"the output uses the matrix state {state.name} as a whole; only vectors read from it can be "
                "handed on",
                value.span,
                f"read it with a query, as in {state.name}_tᵀ q_t",
            ) from None

    # -- stages -------------------------------------------------------------------------------------
    def _stage(self, group: Component, read: Expr, name: str, output: Equation | None = None) -> Symbol:
        """The value of a read of a component, whose stage is made if there is none yet."""
        key = (group, scalars_first(read))
        if key in self.made:
            return self.made[key]
        names = [s.name for s in self.spec.states if s.name in group]
        updates = [
            Equation(n, self._lowered(self.updates[n].value, group), self.updates[n].span) for n in names
        ]
        value = self._lowered(read, group)
        result = self.names.unique(name or self._name(read))
        target = output.target if output is not None else result if result not in names else f"{result}_out"
        span = output.span if output is not None else read.span
        stage = self.maker.stage(
            [self.states[n] for n in names],
            updates,
            Equation(target, value, span),
            result,
            keeps=group not in self.kept,
        )
        self.kept.add(group)
        self.steps.append(stage)
        self.made[key] = Symbol(result, value.shape)
        return self.made[key]

    def _lowered(self, value: Expr, own: Component) -> Expr:
        """An expression of a stage's own states and of values."""
        foreign = set(self.states) - own
        finder = ReadFinder(foreign, own, self._taken)
        return transform(finder.replace(value), self._unshifted)

    def _taken(self, read: Expr, state: str) -> Expr | None:
        group = self._group(state)
        if group not in self.bare:
            return self._stage(group, read, "")
        if not isinstance(read, Symbol):
            return None
        now = self._stage(group, Symbol(state, read.shape, 0, span=read.span), "")
        if read.time == 0:
            return now
        return Symbol(self._shift(now.name, state, self.states[state].start), read.shape)

    def _unshifted(self, node: Expr) -> Expr:
        """An input at the token before becomes a value of its own."""
        if not isinstance(node, Symbol) or node.time != -1 or node.name in self.states:
            return node
        name = self._shift(node.name, f"{node.name}_prev", 0.0, carries=True)
        return Symbol(name, node.dims, 0, node.row, span=node.span)

    def _shift(self, of: str, first: str, start: float, carries: bool = False) -> str:
        if of not in self.shifts:
            name = self.names.unique(f"{of}_prev")
            self.shifts[of] = name
            self.steps.append(Shift(name, of, first, start, carries))
            self.maker.shifted(name, of)
        return self.shifts[of]

    # -----------------------------------------------------------------------------------------------
    def _group(self, state: str) -> Component:
        return next(g for g in self.groups if state in g)

    def _name(self, read: Expr) -> str:
        """The user's own name of a read, else one made from its state's."""
        key = scalars_first(read)
        for name, value in _bindings(self.spec):
            if key in (scalars_first(value), scalars_first(transpose(value))):
                return name
        state = next(s.name for s in symbols(read) if s.name in self.states)
        return state if isinstance(read, Symbol) and read.time == 0 else f"{state}_read"

    def _any_read(self, group: Component) -> Expr:
        """Something to give as the output of states that nothing reads."""
        state = next((self.states[n] for n in sorted(group) if not is_matrix(self.states[n].shape)), None)
        if state is not None:
            return Symbol(state.name, state.shape)
        state = self.states[min(group)]
        query = next((i for i in self.spec.inputs if i.timed and i.dims == state.dims[:1]), None)
        if query is None:
            raise DslError.single("E970", f"nothing reads the state {state.name}", state.span)
        return mul((transpose(Symbol(state.name, state.shape)), Symbol(query.name, query.shape)))


class _Names:
    """Names of values: none that the spec has, also not by another spelling."""

    def __init__(self, spec: RecurrenceSpec) -> None:
        self.states = {s.name for s in spec.states}
        declared = {i.name for i in spec.inputs} | {c.name for c in spec.consts} | self.states
        self.taken = {ascii_name(n) for n in declared} | set(RESERVED)
        self.used: set[str] = set()

    def unique(self, wanted: str) -> str:
        """The name, or the name with a number; a state's own name serves once, for its value."""
        base = wanted[: LONGEST - 4]
        name, number = base, 1
        while name in self.used or (ascii_name(name) in self.taken and name not in self.states):
            number += 1
            name = f"{base}_{number}"
        self.used.add(name)
        self.taken.add(ascii_name(name))
        return name


def _bindings(spec: RecurrenceSpec) -> Iterable[tuple[str, Expr]]:
    """The user's bindings with their values in terms of inputs and states."""
    states = {s.name for s in spec.states}
    targets = states | {o.target for o in spec.outputs}
    known: dict[str, Expr] = {}
    for equation in spec.written:

        def change(node: Expr) -> Expr:
            if isinstance(node, Symbol) and node.time == 0 and node.row is None:
                return known.get(node.name, node)
            return node

        if equation.target not in targets:
            known[equation.target] = transform(equation.value, change)
    return known.items()
