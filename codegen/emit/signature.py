"""What both emitted modules say of a recurrence: names, sizes, dtypes and consts of a call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.codegen.emit.names import ascii_text
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.printer import show_spec
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.planner.plan import ChunkPlan


def run_time_consts(spec: RecurrenceSpec, *plans: ChunkPlan) -> tuple[str, ...]:
    """The consts (then the sizes K, V) that a module takes as numbers at each call."""
    used = {str(n.attr("name")) for plan in plans for n in plan.nodes if n.op == "const"}
    declared = [*(c.name for c in spec.consts), "K", "V"]
    if unknown := used - set(declared):
        raise InternalError(f"a plan uses undeclared consts {sorted(unknown)}")
    return tuple(c for c in declared if c in used)


def output_like(spec: RecurrenceSpec, handed: Collection[str] = ()) -> int:
    """The position of the tensor whose dtype is that of the output and of the operands of products.

    That is the first with the output's last axis (V in most recurrences), else with any; inputs come
    before params, gates last, and what another stage ``handed`` over counts only where nothing else does.
    """
    axis = next(reversed(output_dims(spec)), None)

    def rank(i: int) -> tuple[bool, ...]:
        decl = spec.inputs[i]
        return (
            decl.name in handed, decl.kind != "plain", not decl.dims, not decl.timed, axis not in decl.dims,
        )  # fmt: skip

    return min(range(len(spec.inputs)), key=rank)


def output_dims(spec: RecurrenceSpec) -> tuple[Dim, ...]:
    """The axes of the output per token: ("V",), ("K",), () or two."""
    rows, cols = spec.outputs[0].value.shape
    return tuple(d for d in (rows, cols) if d != 1)


def given_outputs(names: Iterable[str]) -> str:
    """The text of what a function returns: its only output, or a tuple of several."""
    each = list(names)
    return each[0] if len(each) == 1 else tuple_text(each)


def output_shape(dims: Iterable[str | int], owner: str = "") -> str:
    """The text of the output's shape, from ``OUTPUT_DIMS``; ``owner`` ("call.") holds the sizes."""
    sizes = {"K": f"{owner}key", "V": f"{owner}value"}
    lead = [f"{owner}{name}" for name in ("batch", "length", "heads")]
    return tuple_text([*lead, *(sizes[d] if isinstance(d, str) else str(d) for d in dims)])


def sized(dims: Iterable[Dim], numbers: Mapping[str, float]) -> tuple[str | int, ...]:
    """Dims with every const name replaced by its number; K and V stay."""
    return tuple(d if d in ("K", "V") or isinstance(d, int) else int(numbers[d]) for d in dims)


def equations(spec: RecurrenceSpec) -> tuple[str, ...]:
    """The declaration as the user would write it, in ASCII, without the user's comments."""
    text = show_spec(replace(spec, doc=""))
    return tuple(ascii_text(line).rstrip() for line in text.splitlines() if line.strip())


def axis_source(spec: RecurrenceSpec, axis: str) -> tuple[int, int]:
    """Which tensor tells the size of K or V, and at which of its axes."""
    for i, decl in enumerate(spec.inputs):
        if axis in decl.dims:
            return i, decl.dims.index(axis) - len(decl.dims)
    raise ArgumentError(f"{spec.name}: no input has the axis {axis}, so nothing says how large it is")


def row_count(decl: Input, numbers: Mapping[str, float]) -> int:
    """n of an input [n, D] or [n], else 0."""
    match decl.dims:
        case (int(n), *_):
            return n
        case (str(n), *_) if n not in ("K", "V"):
            return int(numbers[n])
        case _:
            return 0


def tuple_text(items: Iterable[str]) -> str:
    """A tuple's text from its items'."""
    given = list(items)
    return f"({', '.join(given)}{',' if len(given) == 1 else ''})"


def literal(names: Iterable[str]) -> str:
    """A tuple of strings, in ASCII."""
    return tuple_text('"' + ascii(name)[1:-1] + '"' for name in names)


def head_counts(spec: RecurrenceSpec) -> str:
    """The text of every tensor's number of heads, after a 1: ``max`` does not take a single number."""
    own = (f"tensors[{i}].shape[{2 if decl.timed else 0}]" for i, decl in enumerate(spec.inputs))
    return ", ".join(["1", *own])
