"""Nodes of a one-token plan as PyTorch statements: a value with axes (a, b) is a tensor [B, H, a, b]."""

from __future__ import annotations

from collections.abc import Mapping

from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.torch_printer import ChunkPrinter
from linalg_dsl.codegen.emit.torch_text import ATOM, Text, call, matmul, method, mul, transposed
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import Axes, ordered
from linalg_dsl.planner.plan import ChunkPlan, Node
from linalg_dsl.planner.step_values import dimension


class TokenPrinter(ChunkPrinter):
    """Prints a one-token plan; ``rows`` has the sizes of the small axes, by dimension."""

    def __init__(
        self,
        plan: ChunkPlan,
        leaves: Mapping[tuple[str, str], str],
        names: Names,
        like: str,
        rows: Mapping[str, int],
    ) -> None:
        super().__init__(plan, leaves, names, like)
        self.rows = rows

    def _chunk_op(self, node: Node, args: list[Text], attrs: Mapping[str, object]) -> Text:
        match node.op:
            case "contract":
                return _contract(args[0], args[1], str(attrs["axis"]), node.axes)
            case "swap":
                return _swapped(args[0], str(attrs["axis"]), str(attrs["other"]), node.axes)
            case "eye":
                like = f"dtype={self.like}.dtype, device={self.like}.device"
                return call("torch.eye", self._size(node.axes[0]), like, axes=node.axes)
            case _:
                raise InternalError(f"no PyTorch statement for op {node.op} of a step")

    def _size(self, axis: str) -> str:
        name = dimension(axis)
        if name in ("K", "V"):
            self.sizes.add(name)
            return name
        return str(self.rows[name])


def _contract(a: Text, b: Text, axis: str, axes: Axes) -> Text:
    """One matrix product where both are matrices, else a sum of products."""
    whole = ordered((*a.axes, *b.axes))
    if len(a.axes) == 2 and len(b.axes) == 2 and len(axes) == 2:
        left, right = (a, b) if axes[0] in a.axes else (b, a)
        left = left if left.axes == (axes[0], axis) else transposed(left)
        right = right if right.axes == (axis, axes[1]) else transposed(right)
        return matmul(left, right, axes)
    return method(mul(a, b), "sum", str(whole.index(axis) - len(whole)), axes=axes)


def _swapped(x: Text, axis: str, other: str, axes: Axes) -> Text:
    """A new name costs nothing; where the axes change places the value is transposed."""
    names = {axis: other, other: axis}
    renamed = tuple(names.get(a, a) for a in x.axes)
    if renamed == axes:
        return Text(x.code, x.level, axes, x.number, x.scalar)
    if (*renamed[:-2], renamed[-1], renamed[-2]) == axes:
        return Text(f"{x.at(ATOM)}.mT", ATOM, axes)
    raise InternalError(f"axes {x.axes} do not become {axes} by exchanging two")
