"""Edits of a spec: ``"gate: scalar, [K], exp(-softplus(a_t))"`` is three specs out of one.

    vary        = name ":" alternative ("," alternative)*       commas inside brackets do not count
    alternative = number | number ".." number | declaration | expression

What a name stands for, and what its alternatives do:

- an input or param: a declaration (``scalar in (0, 1)``, ``[K] unit``, ``log gate [K]``) takes the place of
  its own, an expression becomes a binding of that name;
- a const: its value;
- a state or the output: the right side of its equation;
- ``gate`` (where nothing has that name): the factor exp(g_t) of a declared gate, or, where there is none, a
  new factor of S_{t-1}. ``none``, ``scalar``, ``[K]``, ``[V]`` and declarations of gates give one of that
  kind, next to S_{t-1}; an expression is the factor itself, a scalar, or after ``[K]`` or ``[V]`` a diagonal;
- ``rank`` (likewise): the number of erases and writes per token, by the const that counts them, or else by
  running the update so often on rows of the inputs that only it reads; each run has that root of the gate.

Names that an expression uses and nothing declares become inputs: scalars, vectors after ``[K]``. Several
edits are combined, each alternative of one with each of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from linalg_dsl.algebra.expr import (
    Call,
    Diag,
    Dim,
    Expr,
    Iterate,
    Product,
    ShapeError,
    Symbol,
    Transpose,
    diag,
    divide,
    iterate,
    mul,
    number,
    power,
)
from linalg_dsl.algebra.traverse import mentions, rebuild, symbols, transform, walk
from linalg_dsl.errors import ArgumentError, DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.printer import show_spec
from linalg_dsl.language.spec import Input, RecurrenceSpec

MOST_VARIANTS = 500
MOST_ALTERNATIVES = 64
_DECLARATION = re.compile(r"(?:scalar\b|log gate\b|gate\b|\[[^\]]*\]\s*(?:unit\b|in\b|[<>]|$))")
_NAME = re.compile(r"[^\W\d]\w*?(?=_t\b)")


@dataclass(frozen=True, slots=True)
class Vary:
    """One ``--vary``: the name and its alternatives."""

    name: str
    alternatives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A spec, and the choices that made it: (name, alternative) pairs, none for the base."""

    spec: RecurrenceSpec
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return "; ".join(f"{n}: {a}" for n, a in self.choices) or self.spec.name


def parse_vary(text: str) -> Vary:
    """Reads one edit. Raises ``ArgumentError`` that says what is wrong with it."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon or not name.isidentifier():
        raise ArgumentError(f"vary: expected 'NAME: alternative, alternative', got {text!r}")
    alternatives = []
    for part in _split(rest):
        span = re.fullmatch(r"(-?\d+)\s*\.\.\s*(-?\d+)", part)
        if not part:
            raise ArgumentError(f"vary {name}: an alternative is empty in {text!r}")
        if span is None:
            alternatives.append(part)
            continue
        low, high = int(span[1]), int(span[2])
        if not low <= high < low + MOST_ALTERNATIVES:
            raise ArgumentError(f"vary {name}: {part} is no range of 1 to {MOST_ALTERNATIVES} numbers")
        alternatives += [str(n) for n in range(low, high + 1)]
    return Vary(name, tuple(alternatives))


def variants(
    base: RecurrenceSpec, edits: Iterable[Vary], failed: Callable[[Variant, Exception], None] | None = None
) -> list[Variant]:
    """The base under every combination of alternatives, in order; the base alone without edits.

    A combination that gives no valid spec raises its ``DslError`` or ``ArgumentError``, or is handed to
    ``failed`` and left out.
    """
    listed = list(edits)
    if len({e.name for e in listed}) < len(listed):
        raise ArgumentError("vary: every name once, with all its alternatives")
    axes = [[(e.name, a) for a in e.alternatives] for e in listed]
    combinations = list(product(*axes))
    if len(combinations) > MOST_VARIANTS:
        raise ArgumentError(f"vary: {len(combinations)} combinations; at most {MOST_VARIANTS}")
    found = []
    for choices in combinations:
        spec = base
        try:
            for name, alternative in choices:
                spec = edit(spec, name, alternative)
        except (ArgumentError, DslError) as error:
            if failed is None:
                raise
            failed(Variant(base, choices), error)
        else:
            found.append(Variant(spec, choices))
    return found


def edit(spec: RecurrenceSpec, name: str, alternative: str) -> RecurrenceSpec:
    """The spec with one name changed, see the head of this module; checked as any text is.

    Raises ``ArgumentError`` for a name that stands for nothing, ``DslError`` where the result is no spec.
    """
    inputs = [i.name for i in spec.inputs]
    targets = [*(e.target for e in spec.updates), *(e.target for e in spec.outputs)]
    try:
        if name in inputs:
            return _edit_input(spec, spec.input(name), alternative)
        if name in [c.name for c in spec.consts]:
            return _edit_const(spec, name, alternative)
        if name in targets:
            return _edit_equation(spec, name, alternative)
        if name == "gate":
            return _edit_gate(spec, alternative)
        if name == "rank":
            return _edit_rank(spec, alternative)
    except ShapeError as error:
        raise ArgumentError(f"vary {name}: {alternative!r} does not fit: {error}") from None
    known = ", ".join([*inputs, *(c.name for c in spec.consts), *targets, "gate", "rank"])
    raise ArgumentError(f"vary: {spec.name} has no {name!r}; it has {known}")


# -- one name -------------------------------------------------------------------------------------
def _edit_input(spec: RecurrenceSpec, decl: Input, alternative: str) -> RecurrenceSpec:
    keyword = "input" if decl.timed else "param"
    if _DECLARATION.match(alternative):
        return _parsed(spec, declarations=[f"{keyword} {decl.name} : {alternative}"], without=[decl.name])
    renamed, inner = decl.name, alternative
    if decl.name in _NAME.findall(alternative):
        renamed = _fresh(spec, f"{decl.name}_raw")
        inner = re.sub(rf"\b{re.escape(decl.name)}_t\b", f"{renamed}_t", alternative)
    shape = "scalar" if not decl.dims else f"[{', '.join(map(str, decl.dims))}]"
    new = [n for n in _new_names(spec, inner) if n != decl.name]

    def bound(node: Expr) -> Expr:
        here = isinstance(node, Symbol) and node.name == decl.name and node.time is None
        return replace(node, time=0) if here else node  # type: ignore[call-arg]

    return _parsed(
        _changed(spec, lambda e: transform(e, bound)),
        declarations=[f"input {n} : {shape}" for n in new],
        bindings=[f"{decl.name}_t = {inner}"],
        without=[decl.name],
    )


def _edit_const(spec: RecurrenceSpec, name: str, alternative: str) -> RecurrenceSpec:
    return _parsed(spec, declarations=[f"const {name} = {alternative}"], without=[name])


def _edit_equation(spec: RecurrenceSpec, name: str, alternative: str) -> RecurrenceSpec:
    head, body = _texts(spec)
    lines = body.split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"{name}_t = "))
    lines[begin] = f"{name}_t = {alternative}"
    new = [f"input {n} : scalar" for n in _new_names(spec, alternative)]
    return parse("\n".join([head, *new, "", *lines]), origin=f"<{spec.name}, {name}: {alternative}>")


# -- the gate -------------------------------------------------------------------------------------
def _edit_gate(spec: RecurrenceSpec, alternative: str) -> RecurrenceSpec:
    old = [i.name for i in spec.inputs if i.kind != "plain"]
    states = {s.name: s.dims for s in spec.states if len(s.dims) == 2}
    if not states:
        raise ArgumentError(f"vary gate: {spec.name} has no matrix state")
    name, factor = _fresh(spec, "gate"), _fresh(spec, old[0] if old else "g", old)
    declarations, bindings, axis = _gate_lines(spec, alternative, name, factor, old)

    def put(state: str, value: Expr) -> Expr:
        here = _gate_at(axis, name, states[state])
        held = {s.name for s in symbols(value)}
        gated = [n for n in old if n in held]
        if not gated and alternative == "none":
            return value
        return _replace_gate(value, gated, here, state) if gated else _gate_past(value, here, state)

    updates = tuple(
        replace(e, value=put(e.target, e.value)) if e.target in states else e for e in spec.updates
    )
    changed = replace(spec, updates=updates, written=())
    used = {
        s.name for e in (*changed.updates, *changed.outputs) for s in walk(e.value) if isinstance(s, Symbol)
    }
    unused = [n for n in old if n not in used]
    return _parsed(changed, declarations, bindings, without=unused)


def _gate_lines(
    spec: RecurrenceSpec, alternative: str, name: str, factor: str, old: Sequence[str]
) -> tuple[list[str], list[str], str]:
    """Declarations, the binding of the factor, and its axis: "", "K", "V", or "none"."""
    if alternative == "none":
        return [], [], "none"
    if alternative in ("scalar", "[K]", "[V]"):
        kind = "log gate" if alternative == "scalar" else f"log gate {alternative}"
        axis = "" if alternative == "scalar" else alternative[1]
        return [f"input {factor} : {kind}"], [f"{name}_t = exp({factor}_t)"], axis
    if re.match(r"(log )?gate\b", alternative):
        value = f"exp({factor}_t)" if alternative.startswith("log") else f"{factor}_t"
        axis = next((a for a in ("K", "V") if f"[{a}]" in alternative), "")
        return [f"input {factor} : {alternative}"], [f"{name}_t = {value}"], axis
    axis, text = "", alternative
    if prefix := re.match(r"\[([KV])\]\s*", alternative):
        axis, text = prefix[1], alternative[prefix.end() :]
    shape = f"[{axis}]" if axis else "scalar"
    new = [n for n in _new_names(spec, text) if n not in old]
    return [f"input {n} : {shape}" for n in new], [f"{name}_t = {text}"], axis


def _gate_at(axis: str, name: str, dims: tuple[Dim, ...]) -> tuple[Expr | None, bool]:
    """The factor, and whether it stands on the right of the state."""
    if axis == "none":
        return None, False
    if not axis:
        return Symbol(name, (1, 1), 0), False
    if axis not in dims:
        raise ArgumentError(f"vary gate: the state has the axes {dims}, not {axis}")
    return diag(Symbol(name, (axis, 1), 0)), axis == dims[1]


def _is_gate(node: Expr, gated: Sequence[str]) -> bool:
    """exp(g), a gate itself, or a diagonal of these."""
    match node:
        case Diag(arg):
            return _is_gate(arg, gated)
        case Call("exp", (arg,)):
            return mentions(arg, lambda s: s.name in gated)
        case Symbol(name=name):
            return name in gated
        case _:
            return False


def _replace_gate(expr: Expr, gated: Sequence[str], here: tuple[Expr | None, bool], state: str) -> Expr:
    """The gate's factor taken out of every product, and the new one put beside the state there."""
    factor, right = here

    def change(node: Expr) -> Expr:
        if isinstance(node, Product) and any(_is_gate(f, gated) for f in node.factors):
            at = next(i for i, f in enumerate(node.factors) if _is_gate(f, gated))
            rest = [change(f) for i, f in enumerate(node.factors) if not _is_gate(f, gated)]
            beside = next((i for i, f in enumerate(rest) if _past(f, state)), None)
            if factor is None:
                return mul(rest)
            if beside is not None:
                after = right != isinstance(rest[beside], Transpose)
                return mul([*rest[: beside + after], factor, *rest[beside + after :]])
            return mul([*rest, factor] if right else [*rest[:at], factor, *rest[at:]])
        if _is_gate(node, gated):
            if factor is None:
                return number(1)
            return factor.arg if isinstance(factor, Diag) and not isinstance(node, Diag) else factor
        children = tuple(change(c) for c in node.children)
        return rebuild(node, children) if children != node.children else node

    return change(expr)


def _gate_past(expr: Expr, here: tuple[Expr | None, bool], state: str) -> Expr:
    """The factor beside every S_{t-1}."""
    factor, right = here
    assert factor is not None

    def change(node: Expr) -> Expr:
        if isinstance(node, Symbol) and _past(node, state):
            return mul([node, factor] if right else [factor, node])
        return node

    return transform(expr, change)


def _past(node: Expr, state: str) -> bool:
    inner = node.arg if isinstance(node, Transpose) else node
    return isinstance(inner, Symbol) and (inner.name, inner.time) == (state, -1)


# -- the rank -------------------------------------------------------------------------------------
def _edit_rank(spec: RecurrenceSpec, alternative: str) -> RecurrenceSpec:
    if not alternative.isdecimal() or not 1 <= int(alternative) <= 16:
        raise ArgumentError(f"vary rank: a number from 1 to 16, got {alternative!r}")
    rank = int(alternative)
    counts = {d for i in spec.inputs for d in i.dims if isinstance(d, str)} & {c.name for c in spec.consts}
    loops = [n for e in spec.updates for n in walk(e.value) if isinstance(n, Iterate)]
    if loops:
        named = [n.count.name for n in loops if isinstance(n.count, Symbol)]
        if len(set(named)) != 1 or named[0] not in counts:
            raise ArgumentError(f"vary rank: the substeps of {spec.name} are not counted by one const")
        return _edit_const(spec, named[0], alternative)
    if len(spec.states) != 1 or len(spec.states[0].dims) != 2:
        raise ArgumentError(f"vary rank: {spec.name} has not one matrix state")
    if rank == 1:
        return spec
    (update,), state = spec.updates, spec.states[0]
    read = {s.name for e in spec.outputs for s in walk(e.value) if isinstance(s, Symbol)}
    fed = {n.name for n in walk(update.value) if isinstance(n, Symbol)}
    rows = []
    for decl in spec.inputs:
        if decl.name not in fed or not decl.timed or decl.kind != "plain":
            continue
        if decl.name in read or len(decl.dims) > 1:
            raise ArgumentError(f"vary rank: {decl.name} is read outside the update or has rows already")
        rows.append(decl.name)

    def change(node: Expr) -> Expr:
        if not isinstance(node, Symbol):
            return node
        if node.name in rows:
            return replace(node, row="j")
        if _past(node, state.name):
            return replace(node, time=0)
        kind = next((i.kind for i in spec.inputs if i.name == node.name), "plain")
        if kind == "log_gate":
            return divide(node, number(rank))
        return power(node, divide(number(1), number(rank))) if kind == "gate" else node

    start = Symbol(state.name, state.shape, -1)
    looped = iterate(state.name, "j", number(rank), start, transform(update.value, change))
    inputs = tuple(replace(i, dims=(rank, *i.dims)) if i.name in rows else i for i in spec.inputs)
    return _parsed(replace(spec, inputs=inputs, updates=(replace(update, value=looped),), written=()))


# -- text -----------------------------------------------------------------------------------------
def _parsed(
    spec: RecurrenceSpec,
    declarations: Sequence[str] = (),
    bindings: Sequence[str] = (),
    without: Sequence[str] = (),
) -> RecurrenceSpec:
    """The spec as text, with lines added and declarations left out, parsed again; its equations written out.

    A declaration that takes the place of another stands where that stood: the order of a call stays.
    """
    head, body = _texts(spec)
    lines: list[str] = []
    fresh = list(declarations)
    for line in head.split("\n"):
        named = re.match(r"(?:input|param|const) (\S+)\s*[:=]", line)
        if named is None or named[1] not in without:
            lines.append(line)
            continue
        lines += fresh
        fresh = []
    return parse("\n".join([*lines, *fresh, "", *bindings, body]), origin=f"<{spec.name}, edited>")


def _texts(spec: RecurrenceSpec) -> tuple[str, str]:
    """Declarations, and equations with all bindings substituted."""
    text = show_spec(replace(spec, written=(), doc=""))
    head, _, body = text.rpartition("\n\n")
    return head, body.rstrip("\n")


def _changed(spec: RecurrenceSpec, change: Callable[[Expr], Expr]) -> RecurrenceSpec:
    updates = tuple(replace(e, value=change(e.value)) for e in spec.updates)
    outputs = tuple(replace(e, value=change(e.value)) for e in spec.outputs)
    return replace(spec, updates=updates, outputs=outputs, written=())


def _taken(spec: RecurrenceSpec) -> set[str]:
    names = {*(i.name for i in spec.inputs), *(c.name for c in spec.consts), *(s.name for s in spec.states)}
    return names | {e.target for e in (*spec.outputs, *spec.written)}


def _fresh(spec: RecurrenceSpec, wanted: str, free: Sequence[str] = ()) -> str:
    taken = _taken(spec) - set(free)
    numbered = (f"{wanted}{i}" for i in range(2, 1000))
    return next(n for n in (wanted, *numbered) if n not in taken)


def _new_names(spec: RecurrenceSpec, text: str) -> list[str]:
    """Names with a time index that nothing declares, in order."""
    return [n for n in dict.fromkeys(_NAME.findall(text)) if n not in _taken(spec)]


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]
