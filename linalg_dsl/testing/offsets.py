"""Whether offsets into tensors can wrap: the text of a Triton module, checked without running it.

A tensor of more than 2^31 elements is too large for a test. So the integers of every kernel are followed
through its statements with their width and the largest size that they can have (``BOUNDS``, and the
type's where nothing is known); what is computed in 32 bits and can be larger than 2^31 - 1 wraps, and so
does all that is made of it. Reported is every such number that is added to a pointer, and every one of
which nothing can be said.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import TypeGuard

LARGEST = 2.0**31 - 1
BOUNDS: tuple[tuple[str, float], ...] = (
    (r"K|V|KP|VP|KB|VB|ROWS|BLOCK", 512.0),
    (r"C", 256.0),
    (r"U|W", 16.0),
    (r"BLOCKS|K_BLOCKS|V_BLOCKS|PARTS|P_\w+", 64.0),
    (r"H|R_\w+", 2048.0),
    (r"LEVELS", 8.0),
    (r"length", 16.0),
    (r"\w+_stride_\w+", 2.0**21),
    (r"\w+_(head|row)", LARGEST),
)
"""The largest value of parameters by name: sizes and blocks of an axis, tokens of a chunk and of a group,
blocks and shares, heads, tokens of a step, strides of a state's axes (of heads and rows of a pool anything).
Other constants are sizes of an axis, other parameters can be anything."""
TOKENS = 2.0**31 - 2**10
"""No batch has more tokens than that."""
COUNTS = {"BLOCKS": "BLOCK", "K_BLOCKS": "KB", "V_BLOCKS": "VB"}
"""Numbers of blocks by the size of one: together they are an axis."""
TABLES: tuple[tuple[str, int], ...] = (
    (r"seq_start|chunk_start|piece_start|piece_first|cu_seqlens", 64),
    (r"chunk_seq|piece_seq|seq_order|slots|accepted", 32),
)
"""Tables of sequences and chunks, and the width of their entries."""


@dataclass(frozen=True)
class OffsetFault:
    """An offset that may wrap: the kernel, the line of the module, the expression, and why."""

    kernel: str
    line: int
    offset: str
    why: str

    def __str__(self) -> str:
        return f"{self.kernel}, line {self.line}: {self.offset} ({self.why})"


@dataclass(frozen=True)
class _Int:
    """An integer: ``width`` 0 of a compile-time constant, else 32 or 64; why it wraps, if it does. Of a
    quotient, ``by`` is what it was divided by, ``of`` the most that it is when multiplied by that."""

    width: int
    bound: float
    wraps: str = ""
    by: str = ""
    of: float = inf


@dataclass(frozen=True)
class _Pointer:
    entries: int = 0
    """The width of what is loaded there, 0 for numbers of no whole kind."""


@dataclass(frozen=True)
class _Tuple:
    items: tuple[_Value, ...]


class _Unknown:
    """Floats, masks, descriptors."""


_Value = _Int | _Pointer | _Tuple | _Unknown
_UNKNOWN = _Unknown()


def wrapping_offsets(text: str) -> list[OffsetFault]:
    """The offsets of all kernels in the text of a module that may wrap in 32 bits."""
    found: list[OffsetFault] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(d) for d in node.decorator_list
        ):
            found += _Kernel(node).faults
    return list(dict.fromkeys(found))


def _bound(name: str, other: float = LARGEST) -> float:
    return next((x for pattern, x in BOUNDS if re.fullmatch(pattern, name)), other)


class _Kernel:
    def __init__(self, function: ast.FunctionDef) -> None:
        self.name = function.name
        self.faults: list[OffsetFault] = []
        self.names: dict[str, _Value] = {}
        # strides stand in products, pointers never do
        self.factors = {
            side.id
            for node in ast.walk(function)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
            for side in (node.left, node.right)
            if isinstance(side, ast.Name)
        }
        self.pointers = {_base(n.args[0]) for n in ast.walk(function) if _moves(n)}
        for argument in function.args.args:
            self.names[argument.arg] = self._parameter(argument)
        self._run(function.body)

    def _parameter(self, argument: ast.arg) -> _Value:
        name = argument.arg
        if argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation):
            return _Int(0, _bound(name, 512.0), by=COUNTS.get(name, ""), of=512.0)
        table = next((w for pattern, w in TABLES if re.fullmatch(pattern, name)), None)
        if table is not None:
            return _Pointer(table)
        if name in self.pointers or (name.startswith("p_") and name not in self.factors):
            return _Pointer()
        # a whole number that is given has as many bits as it needs; a float is never part of an offset
        return _Int(32, _bound(name), by=COUNTS.get(name, ""), of=512.0)

    # -- statements ---------------------------------------------------------------------------
    def _run(self, body: Iterable[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, self._of(value))
                case ast.AugAssign(target=target, op=op, value=value):
                    now = self._binary(op, self._of(target), self._of(value), node)
                    self._assign(target, now)
                case ast.Expr(value=value):
                    self._of(value)
                case ast.For(target=target, iter=rounds, body=inner):
                    self._assign(target, self._counter(rounds))
                    for _ in range(3):  # what a round leaves enters the next
                        self._run(inner)
                case ast.If(test=test, body=inner, orelse=other):
                    self._of(test)
                    before = dict(self.names)
                    self._run(inner)
                    after, self.names = self.names, before
                    self._run(other)
                    for name, left in after.items():
                        self.names[name] = _joined(self.names.get(name, left), left)
                case ast.While(test=test, body=inner):
                    self._of(test)
                    for _ in range(3):
                        self._run(inner)
                case _:
                    pass

    def _assign(self, target: ast.expr, value: _Value) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Tuple(elts=parts):
                items = value.items if isinstance(value, _Tuple) else ()
                for i, part in enumerate(parts):
                    self._assign(part, items[i] if i < len(items) else _UNKNOWN)
            case _:
                pass

    def _counter(self, rounds: ast.expr) -> _Value:
        """What a loop over ``range`` or ``tl.range`` counts."""
        if not isinstance(rounds, ast.Call):
            return _UNKNOWN
        ends = [self._of(x) for x in rounds.args]
        whole = [x for x in ends if isinstance(x, _Int)]
        if not whole:
            return _UNKNOWN
        last = whole[-1] if len(whole) < 3 else whole[1]
        return replace(last, width=max(32, *(x.width for x in whole)), wraps=_why(*whole))

    # -- expressions --------------------------------------------------------------------------
    def _of(self, node: ast.expr) -> _Value:
        match node:
            case ast.Constant(value=bool() | None | str() | float()):
                return _UNKNOWN
            case ast.Constant(value=int() as number):
                return _Int(0, abs(number))
            case ast.Name(id=name):
                return self.names.get(name, _UNKNOWN)
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, self._of(left), self._of(right), node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._of(operand)
            case ast.Subscript(value=value, slice=index):
                held = self._of(value)
                if (
                    isinstance(held, _Tuple)
                    and isinstance(index, ast.Constant)
                    and isinstance(index.value, int)
                ):
                    return held.items[index.value]
                return held
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._of(test)
                return _joined(self._of(body), self._of(orelse))
            case ast.Tuple(elts=parts):
                return _Tuple(tuple(self._of(x) for x in parts))
            case ast.Call():
                return self._call(node)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._of(child)
                return _UNKNOWN

    def _binary(self, op: ast.operator, left: _Value, right: _Value, node: ast.AST) -> _Value:
        for pointer, offset in ((left, right), (right, left)):
            if isinstance(pointer, _Pointer):
                self._added(offset, node)
                return pointer
        if not (isinstance(left, _Int) and isinstance(right, _Int)):
            return _UNKNOWN
        a, b = left.bound, right.bound
        by, of = "", inf
        match op:
            case ast.Add():
                bound = a + b
            case ast.Sub():  # no index is negative
                bound, by, of = a, left.by, left.of
            case ast.Mult():
                bound = a * b
                if isinstance(node, ast.BinOp):
                    for x, other in ((left, node.right), (right, node.left)):
                        if x.by and x.by == ast.unparse(other):
                            bound = min(bound, x.of)
            case ast.FloorDiv():
                bound, of = a, a
                by = ast.unparse(node.right) if isinstance(node, ast.BinOp) else ""
            case ast.Mod():
                bound, by, of = min(a, b - 1), right.by, right.of
            case ast.LShift():
                bound = inf
            case ast.RShift():
                bound = a
            case ast.BitAnd() | ast.BitOr() | ast.BitXor():
                bound = max(a, b)
            case _:
                return _UNKNOWN
        width = max(left.width, right.width)
        why = _why(left, right)
        if not why and width == 32 and bound > LARGEST:
            why = f"{ast.unparse(node)} can be {bound:.1e}, in 32 bits"
        return _Int(width, bound, why, by, of)

    def _call(self, node: ast.Call) -> _Value:
        given = [self._of(x) for x in node.args]
        for word in node.keywords:
            self._of(word.value)
        match node.func:
            case ast.Attribute(value=ast.Name(id="tl"), attr=name):
                return self._library(name, given, node)
            case ast.Attribute(value=of, attr="to"):
                return _cast(self._of(of), ast.unparse(node.args[0]), node)
            case ast.Attribute(value=of):
                self._of(of)
        return _UNKNOWN

    def _library(self, name: str, given: list[_Value], node: ast.Call) -> _Value:
        whole = [x for x in given if isinstance(x, _Int)]
        match name:
            case "program_id":
                return _Int(32, LARGEST)
            case "num_programs":  # asked for where a few programs go over much
                return _Int(32, 2.0**16)
            case "zeros_like" if whole:
                return _Int(whole[0].width, 0.0)
            case "arange":
                return _Int(32, max((x.bound for x in whole), default=LARGEST) - 1)
            case "load" if given and isinstance(given[0], _Pointer) and given[0].entries:
                return _Int(given[0].entries, TOKENS)
            case (
                "multiple_of"
                | "max_contiguous"
                | "broadcast_to"
                | "reshape"
                | "expand_dims"
                | "max_constancy"
            ):
                return given[0]
            case "cast":
                return _cast(given[0], ast.unparse(node.args[1]), node)
            case "minimum" | "maximum" | "where" if len(whole) >= 2:
                least = min if name == "minimum" else max
                width = max(x.width for x in whole)
                return _Int(width, least(x.bound for x in whole), _why(*whole))
            case "full" | "zeros" if "int" in ast.unparse(node):
                return _Int(
                    64 if "int64" in ast.unparse(node) else 32, max((x.bound for x in whole), default=0.0)
                )
            case "cdiv" if len(whole) == 2:
                return whole[0]
            case "sum" | "max" if given and isinstance(given[0], _Int):
                return replace(given[0], bound=inf if name == "sum" else given[0].bound)
        return _UNKNOWN

    def _added(self, offset: _Value, node: ast.AST) -> None:
        """Something is added to a pointer."""
        if isinstance(offset, _Int) and not offset.wraps:
            return
        why = offset.wraps if isinstance(offset, _Int) else "nothing is known of it"
        text = ast.unparse(node)
        self.faults.append(OffsetFault(self.name, getattr(node, "lineno", 0), text, why))


def _moves(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether this is a load or a store."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store")


def _base(node: ast.expr) -> str:
    """The name that an address begins with."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return node.id if isinstance(node, ast.Name) else ""


def _why(*values: _Int) -> str:
    return next((x.wraps for x in values if x.wraps), "")


def _joined(left: _Value, right: _Value) -> _Value:
    """One or the other."""
    if left == right:
        return left
    if isinstance(left, _Int) and isinstance(right, _Int):
        # the narrower one is widened at once, after it may have wrapped
        return _Int(max(left.width, right.width), max(left.bound, right.bound), _why(left, right))
    return left if type(left) is type(right) else _UNKNOWN


def _cast(value: _Value, kind: str, node: ast.AST) -> _Value:
    if not isinstance(value, _Int) or "int" not in kind:
        return value if isinstance(value, _Pointer) else _UNKNOWN
    width = 64 if "64" in kind else 32
    why = value.wraps
    if not why and width == 32 and value.bound > LARGEST:
        why = f"{ast.unparse(node)} can be {value.bound:.1e}, in 32 bits"
    return replace(value, width=width, wraps=why)
