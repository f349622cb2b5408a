"""The step loop: evaluates a spec's equations token by token, exactly as written.

This is the oracle of the whole project. It knows expressions and specs and nothing of plans or
kernels, so that an error cannot be made twice; it favours the literal reading over speed. It covers
more than the compiler: states of any declared shape, several states, gates on any axis, shifts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linalg_dsl.algebra.expr import (
    L2NORM_EPS,
    RESET,
    Call,
    Diag,
    Dim,
    Expr,
    Hadamard,
    Identity,
    Iterate,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Symbol,
    Transpose,
)
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.spec import Equation, Input, RecurrenceSpec
from linalg_dsl.ops.states import States, pack_states, unpack_states


def reference(
    spec: RecurrenceSpec,
    tensors: Mapping[str, Tensor],
    *,
    initial_state: States | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    consts: Mapping[str, float] | None = None,
    dtype: torch.dtype | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Runs ``spec`` one token after the other, with ``reverse`` from the last of each sequence to its first.

    ``tensors`` holds every declared input, [B, T, H, *dims], and param, [H, *dims]; head counts are
    equal or divide the largest, H. ``initial_state`` is [N, H, *dims] per carried tensor (a tensor for
    one, a sequence or mapping for several, in the order of ``spec.carried``: the states, then what
    shifted inputs were at the token before; None or nothing is the declared start), where N is B, or the
    number of sequences when ``cu_seqlens`` (N + 1 offsets, batch 1) packs several into one row.
    Everything is computed in ``dtype``, by default the promoted type of the tensors and at least float32.
    With ``reverse`` "before" and "after" are in the order of the run: an initial state comes before a
    sequence's last token.

    Returns the output [B, T, H, *dims] (a tuple of several) and, if asked for, what is carried after
    the last token [N, H, *dims] (else None; a named tuple for several), both of type ``dtype``. Built from
    ordinary differentiable operations: autograd goes through it any number of times.
    """
    problem = _Problem.bind(spec, tensors, consts or {}, initial_state, dtype)
    states = problem.start(initial_state, cu_seqlens)
    if cu_seqlens is None:
        outputs, last = problem.run(range(problem.length), states, reverse)
    else:
        bounds = _offsets(cu_seqlens, problem)
        pieces = [
            problem.run(range(begin, end), [s[n : n + 1] for s in states], reverse)
            for n, (begin, end) in enumerate(pairwise(bounds))
        ]
        outputs = [torch.cat(parts, dim=1) for parts in zip(*(p[0] for p in pieces), strict=True)]
        last = [torch.cat(s) for s in zip(*(p[1] for p in pieces), strict=True)]
    o = outputs[0] if len(outputs) == 1 else tuple(outputs)
    if not output_final_state:
        return o, None
    return o, pack_states(spec, last)


def dimension_sizes(
    spec: RecurrenceSpec, tensors: Mapping[str, Tensor], consts: Mapping[str, float] | None = None
) -> dict[str, int]:
    """The sizes of K, V and other named dimensions, read off the tensors' trailing axes."""
    sizes: dict[str, int] = {}
    for decl in spec.inputs:
        if decl.name not in tensors:
            raise ArgumentError(f"{spec.name}: missing argument {decl.name!r}")
        tensor, lead = tensors[decl.name], 3 if decl.timed else 1
        if tensor.dim() != lead + len(decl.dims):
            raise ArgumentError(f"{spec.name}: {decl.name} has {tensor.dim()} axes, expected {_layout(decl)}")
        for dim, size in zip(decl.dims, tensor.shape[lead:], strict=True):
            _bind_size(sizes, dim, size, f"{spec.name}: {decl.name}")
    values = const_values(spec, sizes, consts or {})
    for dim in list(sizes):
        if dim in values and values[dim] != sizes[dim]:
            raise ArgumentError(f"{spec.name}: axis {dim} has size {sizes[dim]}, expected {values[dim]:g}")
    return sizes


def const_values(
    spec: RecurrenceSpec,
    sizes: Mapping[str, int],
    given: Mapping[str, float],
) -> dict[str, float]:
    """The value of every const, given ones in place of declared ones."""
    unknown = set(given) - {c.name for c in spec.consts}
    if unknown:
        raise ArgumentError(f"{spec.name} has no const {sorted(unknown)[0]!r}")
    values: dict[str, float] = {}
    for const in spec.consts:
        if const.name in given:
            values[const.name] = float(given[const.name])
        else:
            scalars = {**{k: float(v) for k, v in sizes.items()}, **values}
            env = {name: torch.tensor(v, dtype=torch.float64) for name, v in scalars.items()}
            values[const.name] = float(_Step(env, {}, sizes).evaluate(const.value).reshape(()))
    return values


@dataclass(frozen=True)
class _Problem:
    """One call, with every tensor cast, spread over the heads, and viewed as matrices."""

    spec: RecurrenceSpec
    sizes: dict[str, int]
    constants: dict[str, Tensor]
    timed: dict[str, Tensor]
    batch: int
    length: int
    heads: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def bind(
        cls,
        spec: RecurrenceSpec,
        tensors: Mapping[str, Tensor],
        consts: Mapping[str, float],
        initial_state: States | None,
        dtype: torch.dtype | None,
    ) -> _Problem:
        unknown = set(tensors) - {i.name for i in spec.inputs}
        if unknown:
            raise ArgumentError(f"{spec.name} has no input {sorted(unknown)[0]!r}")
        sizes = dimension_sizes(spec, tensors, consts)
        if initial_state is not None:
            given = unpack_states(spec, initial_state)
            for (name, dims), tensor in zip(_carried_dims(spec), given, strict=True):
                for dim, size in zip(dims, () if tensor is None else tensor.shape[2:], strict=False):
                    _bind_size(sizes, dim, size, f"{spec.name}: initial state {name}")
        every = [tensors[i.name] for i in spec.inputs]
        work = dtype or torch.float32
        if dtype is None:
            for tensor in every:
                work = torch.promote_types(work, tensor.dtype)
        timed = [tensors[i.name] for i in spec.inputs if i.timed]
        if not timed:
            raise ArgumentError(f"{spec.name} has no input with a time axis")
        batch, length = timed[0].shape[:2]
        heads = max(t.shape[2] if i.timed else t.shape[0] for i, t in zip(spec.inputs, every, strict=True))
        spread: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
        for decl, tensor in zip(spec.inputs, every, strict=True):
            if decl.timed and tuple(tensor.shape[:2]) != (batch, length):
                raise ArgumentError(
                    f"{spec.name}: {decl.name} has batch and time {tuple(tensor.shape[:2])}, "
                    f"expected {(batch, length)}"
                )
            axis = 2 if decl.timed else 0
            have = tensor.shape[axis]
            if have == 0 or heads % have:
                raise ArgumentError(f"{spec.name}: {decl.name} has {have} heads, which do not divide {heads}")
            wide = _finite_gate(tensor.to(work).repeat_interleave(heads // have, dim=axis), decl)
            spread[decl.timed][decl.name] = _as_matrix(wide, len(decl.dims))
        scalars = {**sizes, **const_values(spec, sizes, consts)}
        device = every[0].device
        constants = {n: torch.tensor(float(v), dtype=work, device=device) for n, v in scalars.items()}
        return cls(
            spec, sizes, {**constants, **spread[False]}, spread[True], batch, length, heads, work, device
        )

    def start(self, initial_state: States | None, cu_seqlens: Tensor | None) -> list[Tensor]:
        """What is carried into the first token, [N, H, rows, columns] each; a shift brings zeros."""
        count = self.batch if cu_seqlens is None else cu_seqlens.numel() - 1
        names = self.spec.carried
        given = [None for _ in names] if initial_state is None else unpack_states(self.spec, initial_state)
        fill = [s.start for s in self.spec.states] + [0.0 for _ in self.spec.shifted]
        carried = []
        for (name, dims), start, tensor in zip(_carried_dims(self.spec), fill, given, strict=True):
            shape = (count, self.heads, *(self.size(d) for d in dims))
            if tensor is None:
                value = torch.full(shape, start, dtype=self.dtype, device=self.device)
            elif tuple(tensor.shape) != shape:
                raise ArgumentError(
                    f"{self.spec.name}: initial state {name} has shape {tuple(tensor.shape)}, "
                    f"expected {shape}"
                )
            else:
                value = tensor.to(self.dtype)
            carried.append(_as_matrix(value, len(dims)))
        for i, decl in enumerate(self.spec.shifted, len(self.spec.states)):
            carried[i] = _finite_gate(carried[i], decl)
        return carried

    def run(self, tokens: range, carried: list[Tensor], reverse: bool) -> tuple[list[Tensor], list[Tensor]]:
        """These tokens as one sequence: outputs, in their order, and what is carried after it."""
        names = [s.name for s in self.spec.states]
        shifted = [i.name for i in self.spec.shifted]
        past = dict(zip([*names, *shifted], carried, strict=True))
        updates = {e.target: e.value for e in self.spec.updates}
        outputs: list[list[Tensor]] = []
        for t in reversed(tokens) if reverse else tokens:
            now = {name: x[:, t] for name, x in self.timed.items()}
            step = _Step({**self.constants, **now}, past, self.sizes, updates)
            fresh = {name: self._full(step.state(name), past[name]) for name in names}
            outputs.append([step.evaluate(e.value) for e in self.spec.outputs])
            past = fresh | {name: now[name] for name in shifted}
        dims = [d for _, d in _carried_dims(self.spec)]
        after = [_drop_axes(x, 2 - len(d)) for x, d in zip(past.values(), dims, strict=True)]
        rows = outputs[::-1] if reverse else outputs
        return [self._stack([row[i] for row in rows], e) for i, e in enumerate(self.spec.outputs)], after

    def size(self, dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        if dim in self.sizes:
            return self.sizes[dim]
        if dim in self.constants:
            return int(self.constants[dim])
        raise ArgumentError(f"{self.spec.name}: nothing says how large {dim} is")

    def _full(self, value: Tensor, like: Tensor) -> Tensor:
        """A state that no input reaches (``S_t = I``) still has every batch element and head."""
        return value.expand_as(like)

    def _stack(self, outputs: list[Tensor], equation: Equation) -> Tensor:
        rows, cols = equation.value.shape
        shape = (self.batch, self.heads, self.size(rows), self.size(cols))
        if outputs:
            o = torch.stack([x.expand(shape) for x in outputs], dim=1)
        else:
            o = torch.zeros(self.batch, 0, *shape[1:], dtype=self.dtype, device=self.device)
        if rows == 1 and cols != 1:
            return o.squeeze(-2)
        return _drop_axes(o, (rows == 1) + (cols == 1))


class _Step:
    """The value of expressions at one token. Values are [..., rows, columns], scalars also 0-d."""

    def __init__(
        self,
        now: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
        sizes: Mapping[str, int],
        updates: Mapping[str, Expr] | None = None,
    ) -> None:
        self.now = dict(now)
        self.before = before
        self.sizes = sizes
        self.updates = updates or {}
        self.rows: dict[str, int] = {}
        """The substep of every loop that is running, from 0."""
        self._sample = next(iter(now.values()), torch.zeros((), dtype=torch.float64))

    def state(self, name: str) -> Tensor:
        """S_t, computed at its first use: an update may use other states of the same token."""
        if name not in self.now:
            self.now[name] = self.evaluate(self.updates[name])
        return self.now[name]

    def evaluate(self, expr: Expr) -> Tensor:
        match expr:
            case Number(value):
                return self._number(value)
            case Symbol():
                return self._symbol(expr)
            case Identity(dim):
                size = dim if isinstance(dim, int) else self.sizes[dim]
                return torch.eye(size, dtype=self._sample.dtype, device=self._sample.device)
            case Sum(terms):
                return _fold_sum([self.evaluate(t) for t in terms])
            case Product(factors):
                return self._product(factors)
            case Hadamard(factors):
                return _fold_product([self.evaluate(f) for f in factors])
            case Quotient(numerator, denominator):
                return self.evaluate(numerator) / self.evaluate(denominator)
            case Power(base, Number(exponent)):
                return self.evaluate(base) ** float(exponent)
            case Power(base, exponent):
                return torch.pow(self.evaluate(base), self.evaluate(exponent))
            case Transpose(arg):
                return self.evaluate(arg).mT
            case Diag(arg):
                return torch.diag_embed(self.evaluate(arg).squeeze(-1))
            case Call(function, args):
                return _call(function, [self.evaluate(a) for a in args])
            case Iterate():
                return self._iterate(expr)
            case _:
                raise InternalError(f"the reference cannot evaluate {type(expr).__name__}")

    def _number(self, value: Fraction) -> Tensor:
        return torch.tensor(float(value), dtype=self._sample.dtype, device=self._sample.device)

    def _iterate(self, loop: Iterate) -> Tensor:
        """The substeps one after the other; ``now`` holds the running state meanwhile."""
        count = float(self.evaluate(loop.count))
        if count != int(count) or count < 1:
            raise ArgumentError(f"{count:g} substeps of {loop.name}: expected a positive whole number")
        running = self.evaluate(loop.start)
        around = self.rows  # a substep may be the first to ask for a state that has substeps itself
        for step in range(int(count)):
            self.now[loop.name] = running
            self.rows = {**around, loop.index: step}
            running = self.evaluate(loop.body)
        self.rows = around
        del self.now[loop.name]
        return running

    def _symbol(self, symbol: Symbol) -> Tensor:
        if symbol.time == -1:
            value = self.before[symbol.name]
        elif symbol.name in self.updates:
            value = self.state(symbol.name)
        elif symbol.name in self.now:
            value = self.now[symbol.name]
        else:
            raise ArgumentError(f"nothing gives {symbol.name!r} a value")
        if symbol.row is None:
            return value
        # one row of [n, D] is a column D x 1, one entry of [n] a scalar
        row = self.rows[symbol.row] if isinstance(symbol.row, str) else symbol.row
        return value[..., row, :].unsqueeze(-1)

    def _product(self, factors: Sequence[Expr]) -> Tensor:
        """Left to right; a stretch that has become 1 x 1 scales what follows: (qᵀ k) v."""
        scale: Tensor | None = None
        chain: list[Expr] = []
        for factor in factors:
            if factor.is_scalar:
                scale = _scaled(self.evaluate(factor), scale)
                continue
            if chain and chain[0].shape[0] == 1 and chain[-1].shape[1] == 1:
                scale = _scaled(self._chain(chain), scale)
                chain = []
            chain.append(factor)
        if chain:
            scale = _scaled(self._chain(chain), scale)
        if scale is None:
            raise InternalError("an empty product")
        return scale

    def _chain(self, factors: Sequence[Expr]) -> Tensor:
        values = [self.evaluate(f) for f in factors]
        if factors[-1].shape[1] == 1:  # M N x as M (N x): the same product with fewer operations
            value = values[-1]
            for left in reversed(values[:-1]):
                value = left @ value
            return value
        value, inner = values[0], factors[0].shape[1]
        for factor, right in zip(factors[1:], values[1:], strict=True):
            # an outer product is elementwise: every entry is one product, no sum
            value = value * right if inner == 1 else value @ right
            inner = factor.shape[1]
        return value


def _call(function: str, args: Sequence[Tensor]) -> Tensor:
    x = args[0]
    match function:
        case "exp":
            return torch.exp(x)
        case "log":
            return torch.log(x)
        case "sigmoid":
            return torch.sigmoid(x)
        case "logsigmoid":
            return F.logsigmoid(x)
        case "softplus":
            return -F.logsigmoid(-x)  # torch's own softplus is linear from 20 on, 2e-9 off
        case "tanh":
            return torch.tanh(x)
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "elu":
            return F.elu(x)
        case "sqrt":
            return torch.sqrt(x)
        case "rsqrt":
            return torch.rsqrt(x)
        case "abs":
            return torch.abs(x)
        case "sign":
            return torch.sign(x)
        case "min":
            return torch.minimum(x, args[1])
        case "max":
            return torch.maximum(x, args[1])
        case "clamp":
            return torch.minimum(torch.maximum(x, args[1]), args[2])
        case "sum":
            return x.sum(dim=-2, keepdim=True)
        case "dot":
            return (x * args[1]).sum(dim=-2, keepdim=True)
        case "l2norm":
            return x * torch.rsqrt((x * x).sum(dim=-2, keepdim=True) + L2NORM_EPS)
        case "softmax":
            return torch.softmax(x, dim=-2)
        case _:
            raise InternalError(f"the reference has no function {function!r}")


def _scaled(value: Tensor, scale: Tensor | None) -> Tensor:
    return value if scale is None else scale * value


def _fold_sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _fold_product(values: Sequence[Tensor]) -> Tensor:
    result = values[0]
    for value in values[1:]:
        result = result * value
    return result


def _carried_dims(spec: RecurrenceSpec) -> list[tuple[str, tuple[Dim, ...]]]:
    """Name and axes of every carried tensor."""
    dims = [s.dims for s in spec.states] + [i.dims for i in spec.shifted]
    return list(zip(spec.carried, dims, strict=True))


def _finite_gate(value: Tensor, decl: Input) -> Tensor:
    """A log gate of -inf as a number that exp takes to 0."""
    if decl.kind != "log_gate":
        return value
    return value.clamp_min(max(RESET, torch.finfo(value.dtype).min))


def _as_matrix(value: Tensor, axes: int) -> Tensor:
    """[..., rows, columns]: a vector is a column, a scalar 1 x 1."""
    for _ in range(2 - axes):
        value = value.unsqueeze(-1)
    return value


def _offsets(cu_seqlens: Tensor, problem: _Problem) -> list[int]:
    bounds = [int(x) for x in cu_seqlens.tolist()]
    name = problem.spec.name
    if problem.batch != 1:
        raise ArgumentError(f"{name}: cu_seqlens needs batch 1, got {problem.batch}")
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != problem.length or bounds != sorted(bounds):
        raise ArgumentError(f"{name}: cu_seqlens must rise from 0 to {problem.length}, got {bounds}")
    return bounds


def _bind_size(sizes: dict[str, int], dim: Dim, size: int, where: str) -> None:
    expected = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
    if expected != size:
        raise ArgumentError(f"{where}: axis {dim} has size {size}, expected {expected}")


def _drop_axes(value: Tensor, count: int) -> Tensor:
    for _ in range(count):
        value = value.squeeze(-1)
    return value


def _layout(decl: Input) -> str:
    lead = ("B", "T", "H") if decl.timed else ("H",)
    return f"[{', '.join((*lead, *map(str, decl.dims)))}]"
