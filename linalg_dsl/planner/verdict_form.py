"""Form (1) slot by slot, and why a recurrence is in no faster class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from linalg_dsl.algebra.expr import ZERO, Expr
from linalg_dsl.algebra.traverse import walk
from linalg_dsl.language.printer import show_expr
from linalg_dsl.planner.equations import Equation
from linalg_dsl.planner.form import CanonicalRecurrence, Decay, Recurrence, Stack
from linalg_dsl.planner.ops import FLOOR, OTHER
from linalg_dsl.planner.record import CHANNEL, show_read

_AXIS = {"K": "key", "V": "value"}


def is_turned(canonical: CanonicalRecurrence) -> bool:
    """Whether form (1) is that of the transposed state."""
    return canonical.spec.states[0].dims[0] != canonical.recurrences[0].axis


def form_line(canonical: CanonicalRecurrence) -> tuple[str, str]:
    """The update in form (1), and what U_t is; X is the transposed state."""
    rec = canonical.recurrences[0]
    if rec.stack is not None:
        return _stack_line(canonical, rec, rec.stack)
    x = "X" if is_turned(canonical) else "S"
    erased = f"(D_t ∘ {x}_{{t-1}})" if rec.erase and rec.erase_read == "decayed" else f"{x}_{{t-1}}"
    if rec.erase and rec.value_decay.kind != "none" and rec.erase_read != "decayed":
        erased = f"({x}_{{t-1}} diag(ρ_t))"
    line = f"{x}_t = D_t ∘ {x}_{{t-1}} + L_t (W_t + Σ_t U_t)"
    return line, f"U_t = B_tᵀ {erased}"


def _stack_line(canonical: CanonicalRecurrence, rec: Recurrence, stack: Stack) -> tuple[str, str]:
    turn = "ᵀ" if is_turned(canonical) else ""
    states = [f"{name}{turn}" for name in stack.states]
    common = "" if rec.decay.kind == rec.value_decay.kind == "none" else "D_t ∘ "
    line = f"X_t = a_t {common}X_{{t-1}} + c_t L_t (W_t + Σ_t U_t)"
    of = f"U_t = B_tᵀ {'' if common and rec.erase_read != 'decayed' else common}(e_t X_{{t-1}})"
    return line, f"{of},  X = [{'; '.join(states)}]"


def form_equations(canonical: CanonicalRecurrence) -> tuple[Equation, ...]:
    """Every slot of form (1)."""
    rec, state = canonical.recurrences[0], canonical.spec.states[0]
    states = {s.name: s for s in canonical.spec.states}
    made = list(_decays(rec))
    made[0] = Equation(made[0].left, made[0].right, f"{made[0].note}; m = {rec.m}, r = {rec.r}")
    if rec.stack is not None:
        made += _stack_equations(rec.stack)
    elif is_turned(canonical):
        made.insert(0, Equation("X", f"{state.name}ᵀ", f"erased along the {_AXIS[rec.axis]} axis"))
    made += [*_each("L", rec.left), *_each("W", rec.written)]
    if rec.r:
        made += _each("B", rec.erase)
        for j, row in enumerate(rec.sigma, 1):
            for i, x in enumerate(row, 1):
                if x != ZERO:
                    index = f"{_subscript(j)}{_subscript(i)}" if rec.m * rec.r > 1 else ""
                    made.append(Equation(f"Σ{index}", show_expr(x)))
    for read in rec.reads:
        across = ", along the axis that is not erased" if read.axis != rec.axis else ""
        made.append(
            Equation("read", show_read(read, states[rec.states[read.state]]), f"{read.kind} read{across}")
        )
    made += [Equation("token", show_expr(x), "reads no state") for x in rec.token_terms]
    return tuple(made)


def missed(canonical: CanonicalRecurrence) -> tuple[str, ...]:
    """Why a faster class is missed: one line for each step of cost, with the term that takes it."""
    rec = canonical.recurrences[0]
    states = {s.name: s for s in canonical.spec.states}
    lines = []
    if rec.stack is not None:
        lines.append(
            f"no single state: {_listed(rec.states)} are coupled, so that scores are weighed by products of "
            "their gates"
        )
    if rec.r:
        erased = _listed(show_expr(x) for x in rec.erase)
        lines.append(
            f"no plain sum of writes: what is written depends on what is read along {erased}, so that a "
            "chunk is a triangular system"
        )
    if rec.m > max(rec.r, 1):
        vectors = _listed(show_expr(x) for x in rec.left)
        lines.append(
            f"{rec.m} left vectors, {vectors}: terms share one where their vectors agree up to a scalar per "
            "token"
        )
    for gate in () if rec.stack is None else rec.stack.gates:
        if gate.signed:
            lines.append(f"no positive gate: {_listed(map(show_expr, gate.signed))} may be negative")
    own = [(c, rec.axis) for c in (() if rec.stack is None else rec.stack.channels)]
    for decay, axis in ((rec.decay, rec.axis), *own, (rec.value_decay, OTHER[rec.axis])):
        if decay.kind == "channel":
            where = "in the scores" if axis == rec.axis else "in what the scores are applied to"
            lines.append(
                f"no scalar gate: {decay.show_log()} is one number per {CHANNEL[axis]}, so that decays stand "
                f"{where}, channel by channel"
            )
        if decay.signed:
            lines.append(f"no positive gate: {_listed(map(show_expr, decay.signed))} may be negative")
    across = [r for r in rec.reads if r.axis != rec.axis]
    if across and (rec.r or rec.decay.kind == "channel"):
        texts = (show_read(r, states[rec.states[r.state]]) for r in across)
        lines.append(
            f"{_listed(texts)} sums over the axis that is not erased: its scores wait for what is written"
        )
    if rec.stack is None and any(takes_size(d) for d in (rec.decay, rec.value_decay)):
        lines.append(
            "no log gate: the gradient of a gate in linear space is divided by the gate, so that its "
            "boundary term is formed at every chunk"
        )
    return tuple(lines)


def _stack_equations(stack: Stack) -> Iterable[Equation]:
    """The block gate, who gets what is written, and what is erased, entry by entry in triangular order."""
    n = range(len(stack.states))
    for i in n:
        signs = "".join(f", sign {show_expr(x)}" for x in stack.gates[i].signed)
        index = f"{_subscript(i + 1)}{_subscript(i + 1)}"
        yield Equation(f"log a{index}", stack.gates[i].show_log() + signs, f"the gate of {stack.states[i]}")
        if stack.channels and stack.channels[i].kind != "none":
            note = f"the gate per channel of {stack.states[i]}"
            yield Equation(f"log λ{_subscript(i + 1)}", stack.channels[i].show_log(), note)
        for j in n:
            if stack.coupling[i][j] != ZERO:
                note = f"what {stack.states[i]} takes up of {stack.states[j]}"
                yield Equation(
                    f"a{_subscript(i + 1)}{_subscript(j + 1)}", show_expr(stack.coupling[i][j]), note
                )
    for name, rows in (("c", stack.spread), ("e", stack.sources)):
        for k, row in enumerate(rows, 1):
            index = _subscript(k) if len(rows) > 1 else ""
            yield Equation(f"{name}{index}", f"[{', '.join(map(show_expr, row))}]")


def takes_size(decay: Decay) -> bool:
    """Whether a factor of the decay may be 0 or negative, so that its size is floored."""
    return any(getattr(e, "function", None) == "log_size" for e in walk(decay.log))


def size_line(decays: Iterable[Decay]) -> str:
    names = _listed(d.show_log() for d in decays if takes_size(d))
    return (
        f"{names}: sizes below {FLOOR:g} count as {FLOOR:g}, so that an exact 0 lets {FLOOR:g} of the past "
        "through and has the right gradient; signs are products of ±1, which are exact"
    )


def _decays(rec: Recurrence) -> Iterable[Equation]:
    if rec.decay.kind == "none" and not rec.decay.signed:
        what = "no decay" if rec.stack is None else "no gate per channel"
        if rec.stack is not None and rec.stack.channels:
            what = "no gate per channel that all states have"
        yield Equation("D" if rec.value_decay.kind == "none" else "λ", "1", what)
    both = rec.value_decay.kind != "none"
    for decay, axis, name in (
        (rec.decay, rec.axis, "λ" if both else "D"),
        (rec.value_decay, OTHER[rec.axis], "ρ"),
    ):
        what = (
            "one number per token and head" if decay.kind == "scalar" else f"one number per {CHANNEL[axis]}"
        )
        if decay.kind != "none":
            size = f"|{name}|" if decay.signed else name
            yield Equation(f"log {size}", decay.show_log(), what)
        if decay.signed:
            yield Equation(f"sign {name}", " ".join(f"sign({show_expr(x)})" for x in decay.signed), what)
    if both:
        yield Equation("D", "λ ρᵀ")


def _each(name: str, values: Sequence[Expr]) -> list[Equation]:
    many = len(values) > 1
    return [
        Equation(f"{name}{_subscript(i)}" if many else name, show_expr(x)) for i, x in enumerate(values, 1)
    ]


def _listed(texts: Iterable[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def _subscript(i: int) -> str:
    return str(i).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
