"""The arguments of a call: by order or by name, checked without touching their data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.algebra.expr import Call, Expr, Number, Power, Product, Quotient, Sum, Symbol
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.ops.carried import FLOATING, carried_dims, check_states, given_states
from linalg_dsl.ops.layout import turn_all

WIDEST = 512
PROGRAMS = 2**31 - 1
LEAST = 16  # of chunks and of blocks of an axis
RESERVED = frozenset(
    {
        "initial_state", "output_final_state", "cu_seqlens", "cu_seqlens_cpu", "max_seqlen", "slots",
        "state_positions",
    }
)  # fmt: skip
"""Keyword arguments of every call, so no input, param or const may have such a name."""


@dataclass(frozen=True)
class BoundCall:
    """One call, checked.

    The tensors in declaration order, the consts given, sorted by name, what is handed in of everything
    that is carried, and the sizes B, T, H, N and of every axis.
    """

    tensors: tuple[Tensor, ...]
    consts: tuple[tuple[str, float], ...]
    initials: tuple[Tensor | None, ...]
    sizes: Mapping[str, int]


def bind(
    spec: RecurrenceSpec,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    initial_state: Any,
    cu_seqlens: Tensor | None,
    layout: str | None = None,
) -> BoundCall:
    """Matches arguments to declarations and checks shapes, head counts, types and devices.

    ``layout``: how the axes of states lie in ``initial_state``; in the result they are as declared.

    Raises ``ArgumentError`` naming the argument, what was expected and what came.
    """
    tensors, consts = _match(spec, args, kwargs)
    timed = next((i for i, d in enumerate(spec.inputs) if d.timed), None)
    if timed is None:
        raise ArgumentError(f"{spec.name} has no input with a time axis")
    first = tensors[timed]
    _check_tensor(spec, spec.inputs[timed], first, first)
    sizes: dict[str, int] = {}
    heads = 1
    for decl, x in zip(spec.inputs, tensors, strict=True):
        _check_tensor(spec, decl, x, first)
        axis = 2 if decl.timed else 0
        heads = max(heads, x.shape[axis])
        for dim, size in zip(decl.dims, x.shape[axis + 1 :], strict=True):
            _check_size(spec, decl, x, sizes, dim, size)
    for decl, x in zip(spec.inputs, tensors, strict=True):
        have = x.shape[2 if decl.timed else 0]
        if have == 0 or heads % have:
            raise ArgumentError(
                f"{spec.name}: {decl.name} has {have} heads; a head count divides the largest, {heads}"
            )
    sizes |= {"B": first.shape[0], "T": first.shape[1], "H": heads, "N": first.shape[0]}
    if cu_seqlens is not None:
        sizes["N"] = _check_offsets(spec, cu_seqlens, first)
    sizes |= _state_sizes(spec, sizes, dict(consts))
    initials = given_states(spec, initial_state)
    check_states(spec, initials, sizes, first, layout=layout)
    return BoundCall(tensors, consts, turn_all(initials, carried_dims(spec), layout), sizes)


def call_sizes(
    spec: RecurrenceSpec, tensors: Sequence[Tensor], cu_seqlens: Tensor | None, consts: Mapping[str, float]
) -> dict[str, int]:
    """B, T, H, N and the size of every axis, of tensors that fit."""
    first = next(x for x, d in zip(tensors, spec.inputs, strict=True) if d.timed)
    heads = max(x.shape[2 if d.timed else 0] for x, d in zip(tensors, spec.inputs, strict=True))
    count = first.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = axis_sizes(spec, tensors) | {"B": first.shape[0], "T": first.shape[1], "H": heads, "N": count}
    return sizes | _state_sizes(spec, sizes, consts)


def check_const_axes(spec: RecurrenceSpec, sizes: Mapping[str, int], given: Mapping[str, float]) -> None:
    """Raises ``ArgumentError`` where an axis that is a const has another size."""
    for name, value in _plain_consts(spec, given).items():
        if name in sizes and sizes[name] != value:
            raise ArgumentError(f"{spec.name}: axis {name} is {sizes[name]}, expected {value:g}")


def _plain_consts(spec: RecurrenceSpec, given: Mapping[str, float]) -> dict[str, float]:
    """The consts that are given, or declared as numbers."""
    plain = {c.name: c.number for c in spec.consts if c.number is not None}
    return plain | dict(given)


def _state_sizes(
    spec: RecurrenceSpec, sizes: Mapping[str, int], given: Mapping[str, float]
) -> dict[str, int]:
    """The sizes of states' axes that no tensor has: consts that are plain numbers."""
    numbers = _plain_consts(spec, given)
    return {
        d: int(numbers[d])
        for dims in carried_dims(spec)
        for d in dims
        if isinstance(d, str) and d not in sizes and d in numbers
    }


def axis_sizes(spec: RecurrenceSpec, tensors: Sequence[Tensor]) -> dict[str, int]:
    """The sizes of K, V and other named axes."""
    sizes: dict[str, int] = {}
    for decl, x in zip(spec.inputs, tensors, strict=True):
        for dim, size in zip(decl.dims, x.shape[3 if decl.timed else 1 :], strict=True):
            if isinstance(dim, str):
                sizes[dim] = size
    return sizes


def check_programs(spec: RecurrenceSpec, tensors: Sequence[Tensor], cu_seqlens: Tensor | None) -> None:
    """A launch has at most 2^31 - 1 programs: one per chunk and head, or per sequence, head and block."""
    sizes = call_sizes(spec, tensors, cu_seqlens, {})
    blocks = -(-max(sizes.get("K", 1), sizes.get("V", 1)) // LEAST)
    chunks = sizes["B"] * -(-sizes["T"] // LEAST) if cu_seqlens is None else sizes["T"] // LEAST + sizes["N"]
    most = sizes["H"] * max(sizes["N"] * blocks, chunks)
    if most > PROGRAMS:
        raise ArgumentError(
            f"{spec.name}: {sizes['N']} sequences of {sizes['H']} heads and {sizes['T']} tokens may take "
            f"{most} programs, a launch has at most {PROGRAMS}; split the batch"
        )


def check_widths(spec: RecurrenceSpec, tensors: Sequence[Tensor]) -> None:
    """Kernels keep rows of the state on chip: K and V have a limit there."""
    for axis, size in axis_sizes(spec, tensors).items():
        if axis in ("K", "V") and size > WIDEST:
            raise ArgumentError(
                f"{spec.name}: {axis} is {size}; Triton kernels take 1 to {WIDEST}, backend='torch' any"
            )


def const_numbers(
    spec: RecurrenceSpec, sizes: Mapping[str, int], given: Mapping[str, float]
) -> dict[str, float]:
    """The value of every const in plain floats: as given, else as declared."""
    values: dict[str, float] = {}
    for const in spec.consts:
        if const.name in given:
            values[const.name] = float(given[const.name])
        else:
            scope = {**{k: float(v) for k, v in sizes.items()}, **values}
            values[const.name] = _number(const.value, scope)
    return values


def check_offsets_data(spec_name: str, cu_seqlens: Tensor, length: int) -> None:
    """Looks at the offsets themselves (CPU tensors only: elsewhere it would wait for the device)."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != length or any(b < a for a, b in pairwise(offsets)):
        raise ArgumentError(
            f"{spec_name}: cu_seqlens must rise from 0 to T = {length}, got {offsets[:8]}"
            f"{' ...' if len(offsets) > 8 else ''} ending in {offsets[-1]}"
        )


def layout(decl: Input) -> str:
    """``[B, T, H, K]`` or, of a param, ``[H, K]``."""
    return f"[{', '.join([*(('B', 'T', 'H') if decl.timed else ('H',)), *map(str, decl.dims)])}]"


def _match(
    spec: RecurrenceSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Tensor, ...], tuple[tuple[str, float], ...]]:
    names = [d.name for d in spec.inputs]
    if len(args) > len(names):
        raise ArgumentError(f"{spec.name} takes {len(names)} tensors ({', '.join(names)}), got {len(args)}")
    given = dict(zip(names, args, strict=False))
    consts: list[tuple[str, float]] = []
    const_names = [c.name for c in spec.consts]
    for name, value in kwargs.items():
        if name in given:
            raise ArgumentError(f"{spec.name}: {name} is given twice, by position and by name")
        if name in const_names:
            if not isinstance(value, (int, float)):
                raise ArgumentError(f"{spec.name}: const {name} must be a number, got {type(value).__name__}")
            if not math.isfinite(value):
                raise ArgumentError(f"{spec.name}: const {name} must be finite, got {value}")
            consts.append((name, float(value)))
        elif name in names:
            given[name] = value
        else:
            raise ArgumentError(
                f"{spec.name} has no argument {name!r}; it takes {', '.join([*names, *const_names])}"
            )
    missing = [n for n in names if n not in given]
    if missing:
        raise ArgumentError(f"{spec.name}: missing {', '.join(missing)}; it takes {', '.join(names)}")
    return tuple(given[n] for n in names), tuple(sorted(consts))


def _check_tensor(spec: RecurrenceSpec, decl: Input, x: Any, first: Tensor) -> None:
    where = f"{spec.name}: {decl.name}"
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{where} must be a tensor {layout(decl)}, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise ArgumentError(f"{where} must be a dense tensor {layout(decl)}, got layout {x.layout}")
    lead = 3 if decl.timed else 1
    if x.dim() != lead + len(decl.dims):
        raise ArgumentError(f"{where} must be {layout(decl)}, got shape {tuple(x.shape)}")
    if x.dtype not in FLOATING:
        raise ArgumentError(f"{where} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.device != first.device:
        raise ArgumentError(f"{where} is on {x.device}, expected {first.device} like the others")
    if decl.timed and (x.shape[0] != first.shape[0] or x.shape[1] != first.shape[1]):
        raise ArgumentError(
            f"{where} has B, T = {tuple(x.shape[:2])}, expected {tuple(first.shape[:2])} like the others"
        )


def _check_size(
    spec: RecurrenceSpec, decl: Input, x: Tensor, sizes: dict[str, int], dim: str | int, size: int
) -> None:
    expected = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
    if size != expected:
        raise ArgumentError(
            f"{spec.name}: {decl.name} {layout(decl)} has shape {tuple(x.shape)}: axis {dim} is {size}, "
            f"expected {expected}"
        )
    if size == 0:
        raise ArgumentError(f"{spec.name}: axis {dim} of {decl.name} is empty")


def _check_offsets(spec: RecurrenceSpec, cu_seqlens: Any, first: Tensor) -> int:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ArgumentError(f"{spec.name}: cu_seqlens must be an int32 or int64 tensor, got {kind}")
    if cu_seqlens.layout != torch.strided:
        raise ArgumentError(f"{spec.name}: cu_seqlens must be a dense tensor, got layout {cu_seqlens.layout}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ArgumentError(f"{spec.name}: cu_seqlens must be [N + 1], got shape {tuple(cu_seqlens.shape)}")
    if first.shape[0] != 1:
        raise ArgumentError(f"{spec.name}: with cu_seqlens the batch must be 1, got {first.shape[0]}")
    if cu_seqlens.device != first.device:
        raise ArgumentError(f"{spec.name}: cu_seqlens is on {cu_seqlens.device}, expected {first.device}")
    return cu_seqlens.shape[0] - 1


def _number(expr: Expr, scope: Mapping[str, float]) -> float:
    match expr:
        case Number(value):
            return float(value)
        case Symbol(name=name):
            if name not in scope:
                raise ArgumentError(f"a const depends on {name}, whose value is not known")
            return scope[name]
        case Sum(terms):
            return math.fsum(_number(t, scope) for t in terms)
        case Product(factors):
            return math.prod(_number(f, scope) for f in factors)
        case Quotient(numerator, denominator):
            return _number(numerator, scope) / _number(denominator, scope)
        case Power(base, exponent):
            return float(_number(base, scope) ** _number(exponent, scope))
        case Call(function, args):
            return _function(function, [_number(a, scope) for a in args])
        case _:
            raise InternalError(f"{type(expr).__name__} in the value of a const")


def _function(name: str, args: Sequence[float]) -> float:
    """A function of numbers, through torch so that there is one meaning of each."""
    x = torch.tensor(args[0], dtype=torch.float64)
    match name:
        case "exp" | "log" | "sigmoid" | "tanh" | "relu" | "sqrt" | "rsqrt" | "abs" | "sign":
            return float(getattr(torch, name)(x))
        case "logsigmoid" | "softplus" | "silu" | "elu":
            return float(getattr(torch.nn.functional, name)(x))
        case "min":
            return min(args)
        case "max":
            return max(args)
        case "clamp":
            return min(max(args[0], args[1]), args[2])
        case _:
            raise ArgumentError(f"the value of a const cannot use {name}")
