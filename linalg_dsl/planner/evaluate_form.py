"""Form (1) run token by token in PyTorch: the evaluator of the canonical level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from linalg_dsl.algebra.expr import ONE, RESET, ZERO, Expr, Symbol
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.form import CanonicalRecurrence, Decay, Read, Recurrence
from linalg_dsl.planner.outputs import one_or_all

if TYPE_CHECKING:
    from torch import Tensor


def run_form(
    canonical: CanonicalRecurrence,
    tensors: Mapping[str, Tensor],
    initial_state: Tensor | None = None,
    consts: Mapping[str, float] | None = None,
    operand: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, Tensor]:
    """``run_states`` of a recurrence of one state: (outputs, last state)."""
    o, (last,) = run_states(canonical, tensors, (initial_state,), consts, operand)
    return o, last


def run_states(
    canonical: CanonicalRecurrence,
    tensors: Mapping[str, Tensor],
    initial_states: Sequence[Tensor | None] = (),
    consts: Mapping[str, float] | None = None,
    operand: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Steps form (1) through time: outputs [B, T, H, V] or [.., K], and the last states [B, H, *dims].

    ``tensors`` holds every input [B, T, H, *dims] and param [H, *dims], all with the same heads and
    dtype; ``initial_states`` have the states' axes as declared and come in that order, None or missing ones
    have the declared start. ``consts`` are
    the run-time values of consts that were not made numbers; others are computed from their declaration.
    ``operand`` is applied to both factors of every product with or into a state: with a rounding it
    shows what short operands cost the recurrence itself, in whatever form it is run.
    """
    import torch

    (rec,) = canonical.recurrences
    spec = canonical.spec
    finite = {
        i.name: tensors[i.name].clamp_min(RESET) if i.kind == "log_gate" else tensors[i.name]
        for i in spec.inputs
    }
    timed = {i.name: finite[i.name] for i in spec.inputs if i.timed}
    params = {i.name: finite[i.name] for i in spec.inputs if not i.timed}
    first = next(iter(timed.values()))
    batch, length, heads = first.shape[:3]
    given = [*initial_states, *([None] * (len(spec.states) - len(initial_states)))]
    sizes = _sizes(canonical, tensors, next((x for x in given if x is not None), None))
    numbers = {n: first.new_tensor(x) for n, x in _run_time_numbers(canonical, sizes, consts or {}).items()}
    shape = (batch, heads, *(sizes[str(d)] for d in spec.states[0].dims))
    by_name = {
        s.name: torch.full(shape, float(s.start)).to(first) if x is None else x
        for s, x in zip(spec.states, given, strict=True)
    }
    turned = spec.states[0].dims[0] != rec.axis
    states = [by_name[name].mT if turned else by_name[name] for name in rec.states]
    outputs: list[list[Tensor]] = [[] for _ in rec.outputs]
    for t in range(length):
        now = {**numbers, **params, **{n: x[:, t] for n, x in timed.items()}}
        states, made = _step(rec, states, now, operand)
        for tokens, output in zip(outputs, made, strict=True):
            tokens.append(output.expand(batch, heads, sizes[rec.output_axis]))
    by_name = {n: x.mT if turned else x for n, x in zip(rec.states, states, strict=True)}
    last = tuple(by_name[s.name] for s in spec.states)
    empty = first.new_zeros(batch, 0, heads, sizes[rec.output_axis])
    return one_or_all([torch.stack(tokens, dim=1) if tokens else empty for tokens in outputs]), last


def _step(
    rec: Recurrence, states: Sequence[Tensor], now: Mapping[str, Tensor], operand: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The next states and the outputs, of states with the axis of the recurrence first."""
    from linalg_dsl.planner.evaluate_ops import side
    from linalg_dsl.planner.evaluate_tokens import evaluate

    def value(expr: Expr) -> Tensor:
        return evaluate(expr, _symbols(now)).to(states[0].device)  # a number alone has no device of its own

    def column(expr: Expr) -> Tensor:
        return value(expr).unsqueeze(-1)

    def gate(decay: Decay) -> Tensor:
        """[..., D, 1] or [..., 1, 1]."""
        found = value(decay.log).exp()
        found = found if decay.kind == "channel" else found.unsqueeze(-1)
        for x in decay.signed:
            sign = side(value(x))
            found = found * (sign.unsqueeze(-1) if x.is_scalar else sign)
        return found.unsqueeze(-1)

    def weighed(weights: Sequence[Expr], of: Sequence[Tensor]) -> Tensor:
        """The sum of the states so weighed."""
        pairs = zip(weights, of, strict=True)
        parts = [x if w == ONE else column(w).unsqueeze(-1) * x for w, x in pairs if w != ZERO]
        return sum(parts[1:], parts[0])

    stack = rec.stack
    others = [gate(rec.value_decay).mT * s for s in states]
    decayed = [gate(rec.decay) * s for s in others]
    if stack is not None and stack.channels:
        decayed = [gate(own) * s for own, s in zip(stack.channels, others, strict=True)]
    erased = decayed if rec.erase_read == "decayed" else others
    sources = ((ONE,),) * rec.r if stack is None else stack.sources
    past = [
        (operand(weighed(e, erased)) * operand(column(b))).sum(-2)
        for b, e in zip(rec.erase, sources, strict=True)
    ]
    after = list(decayed)
    if stack is not None:
        for i, (own, row) in enumerate(zip(stack.gates, stack.coupling, strict=True)):
            after[i] = gate(own) * decayed[i]
            if any(x != ZERO for x in row):
                after[i] = after[i] + weighed(row, decayed)
    spread = ((ONE,),) * rec.m if stack is None else stack.spread
    for left, written, row, into in zip(rec.left, rec.written, rec.sigma, spread, strict=True):
        z = [] if written == ZERO else [value(written)]
        z += [value(s)[..., None] * u for s, u in zip(row, past, strict=True) if s != ZERO]
        for part in z:
            product = operand(column(left)) * operand(part.unsqueeze(-2))
            for i, c in enumerate(into):
                if c != ZERO:
                    after[i] = after[i] + weighed((c,), (product,))
    read = {"inclusive": after, "exclusive": states, "decayed": decayed}
    terms: list[list[Tensor]] = [[] for _ in rec.outputs]
    for r in rec.reads:
        terms[r.to].append(_read(r, read[r.kind][r.state], r.axis == rec.axis, value, operand))
    terms[0] += [value(x) for x in rec.token_terms]
    return after, [sum(t[1:], t[0]) for t in terms]


def _read(
    read: Read,
    source: Tensor,
    along: bool,
    value: Callable[[Expr], Tensor],
    operand: Callable[[Tensor], Tensor],
) -> Tensor:
    """``along``: the query has the state's first axis."""
    query = operand(value(read.query).unsqueeze(-1 if along else -2))
    out = value(read.scale) * (operand(source) * query).sum(-2 if along else -1)
    return out if read.gate is None else value(read.gate) * out


def _symbols(now: Mapping[str, Tensor]) -> Callable[[Symbol], Tensor]:
    def look_up(symbol: Symbol) -> Tensor:
        tensor = now[symbol.name]
        if symbol.row is None:
            return tensor
        if isinstance(symbol.row, str):
            raise InternalError(f"{symbol.name} stands in a loop that is not written out")
        return tensor[..., symbol.row] if symbol.is_scalar else tensor[..., symbol.row, :]

    return look_up


def _sizes(
    canonical: CanonicalRecurrence, tensors: Mapping[str, Tensor], initial_state: Tensor | None
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for declared in canonical.spec.inputs:
        shape = tensors[declared.name].shape
        for dim, size in zip(reversed(declared.dims), reversed(shape), strict=False):
            sizes.setdefault(str(dim), size)
    if initial_state is not None:
        for dim, size in zip(canonical.spec.states[0].dims, initial_state.shape[-2:], strict=True):
            sizes[str(dim)] = size
    return sizes


def _run_time_numbers(
    canonical: CanonicalRecurrence, sizes: Mapping[str, int], given: Mapping[str, float]
) -> dict[str, float]:
    import torch

    from linalg_dsl.planner.evaluate_tokens import evaluate

    numbers = {name: float(size) for name, size in sizes.items()}
    for const in canonical.spec.consts:
        if const.name in given:
            numbers[const.name] = float(given[const.name])
        else:
            tensors = {n: torch.tensor(x, dtype=torch.float64) for n, x in numbers.items()}
            numbers[const.name] = float(evaluate(const.value, _symbols(tensors)))
    numbers.update(canonical.consts)
    return numbers
