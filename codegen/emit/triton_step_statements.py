"""Nodes of a one-token plan as Triton statements: a value is a tile over its axes, the split axis last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from linalg_dsl.codegen.emit.signature import tuple_text
from linalg_dsl.codegen.emit.triton_statements import NAN, SINGULAR, ZERO_AT_ZERO, Statements
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import KEYS, VALUES, Axes
from linalg_dsl.planner.plan import ChunkPlan, Node

LOG2_E = 1.4426950408889634


def tile_axes(axes: Axes, split: str | None) -> Axes:
    """The axes of a tile: threads lie along its last, which is the split one if it has it."""
    return tuple(sorted(axes, key=lambda a: a == split))


def axis_name(axis: str) -> str:
    """k of K, l of L, n of a small axis n, n_2 of n'."""
    extra = axis.count("'")
    base = axis.rstrip("'").lower()
    base = base if base.isidentifier() and base.isascii() else f"d{base}" if base.isascii() else "d"
    return base + (f"_{extra + 1}" if extra else "")


def index(axes: Axes, axis: str) -> str:
    """How a vector along ``axis`` is indexed to stand in a tile."""
    if len(axes) == 1:
        return ""
    return f"[{', '.join(':' if a == axis else 'None' for a in axes)}]"


def zero_axes(nodes: Sequence[Node], plan: ChunkPlan) -> list[frozenset[str]]:
    """Along which axes every value is zero on padding, if all is finite there.

    What is loaded is zero there, and so are the states before the first token; whether they stay so is found
    by assuming it and taking back what does not hold.
    """
    assumed = {leaf: frozenset(nodes[leaf].axes) for _, _, leaf, _ in plan.carries}
    while True:
        found: list[frozenset[str]] = []
        for i, node in enumerate(nodes):
            found.append(assumed[i] if i in assumed else _zero_axes(node, found, nodes))
        after = {leaf: assumed[leaf] & found[n] for _, _, leaf, n in plan.carries}
        if after == assumed:
            return found
        assumed = after


def _zero_axes(node: Node, found: Sequence[frozenset[str]], nodes: Sequence[Node]) -> frozenset[str]:
    args = node.args
    match node.op:
        case "number":
            return frozenset(KEYS + VALUES) if node.attr("value") == 0 else frozenset()
        case "mul" | "contract":
            return (found[args[0]] | found[args[1]]) & frozenset(node.axes)
        case "add" | "maximum" | "minimum":
            return found[args[0]] & found[args[1]]
        case "unary":
            fn = node.attr("fn")
            return (
                frozenset(node.axes)
                if fn in SINGULAR
                else found[args[0]]
                if fn in ZERO_AT_ZERO
                else frozenset()
            )
        case "sum" | "expand" | "first":
            return found[args[0]] & frozenset(nodes[args[0]].axes) & frozenset(node.axes)
        case "swap":
            names = {str(node.attr("axis")): str(node.attr("other"))}
            names |= {other: axis for axis, other in names.items()}
            return frozenset(names.get(a, a) for a in found[args[0]])
        case "amax" | "compare":
            return frozenset()
        case _:
            return frozenset(node.axes)


@dataclass
class StepStatements(Statements):
    """Statements over tiles of one token; every op of a step has one.

    ``padding`` says along which axes each value is zero on padding.
    """

    padding: Sequence[frozenset[str]] = ()
    fixed: frozenset[int] = frozenset()
    """What is the same at all tokens."""
    ahead: Callable[[int, float], str | None] = field(default=lambda n, number: None)
    """The name of a value of all tokens times a number, formed before the loop."""

    def scaled(self, n: int, number: float, axes: Axes | None = None) -> str | None:
        name, own = self.ahead(n, number), self.nodes[n].axes
        if name is None or axes is None or own == axes or not own:
            return name
        return f"{name}[{', '.join(':' if a in own else 'None' for a in axes)}]"

    def mask(self, axes: Axes) -> str:
        return " & ".join(f"{self.blocks[a].mask}{index(axes, a)}" for a in axes)

    def compute(self, n: int) -> None:
        """Appends the statement of one node; what is not finite everywhere is zero on padding at once."""
        node = self.nodes[n]
        expression, _ = self._expression(node)
        if node.op == "unary" and node.attr("fn") in SINGULAR and node.axes:
            expression = f"tl.where({self.mask(node.axes)}, {expression}, 0.0)"
        name = self.names.unique(f"b_{self._label(n)}")
        self.lines.append(f"{name} = {expression}")
        self.text[n] = name

    def _expression(self, node: Node) -> tuple[str, bool]:
        match node.op:
            case "contract":
                return self._contract(node), False
            case "swap":
                return self._swap(node), False
            case "eye":
                x, y = (f"o_{axis_name(a)}{index(node.axes, a)}" for a in node.axes)
                return f"tl.where(({x} == {y}) & {self.mask(node.axes)}, 1.0, 0.0)", False
            case "first":
                return f"tl.where(i_block == 0, {self.value(node.args[0])}, 0.0)", False
            case "sum":
                (arg,) = node.args
                return self._sum(
                    self.value(arg), self.nodes[arg].axes, str(node.attr("axis")), self.padding[arg]
                ), False
            case "maximum" | "minimum" if not node.axes:
                return f"tl.{node.op}({', '.join(self._scalar(a) for a in node.args)}, {NAN})", False
            case _:
                return super()._expression(node)

    def _scalar(self, n: int) -> str:
        """A number as a value that functions take."""
        node = self.nodes[n]
        return f"tl.full((), {node.attr('value')!r}, tl.float32)" if node.op == "number" else self.value(n)

    def _unary(self, node: Node) -> str:
        (arg,) = node.args
        if node.attr("fn") == "exp" and node.axes:  # to base 2: no digits of results below 1e-38, and faster
            return f"tl.exp2({self._by_number(arg, LOG2_E)})"
        if self.nodes[arg].op == "number" and arg not in self.text:
            name = self.names.unique(f"b_{self._label(arg)}")
            self.lines.append(f"{name} = {self._scalar(arg)}")
            self.text[arg] = name
        return super()._unary(node)

    def _by_number(self, n: int, number: float) -> str:
        """A value times a number, which goes to the factor where it costs least.

        That is another number, then what is the same at all tokens, then what has fewer axes.
        """
        node = self.nodes[n]
        if (scaled := self.scaled(n, number)) is not None:
            return scaled
        if node.op == "mul":
            pairs = (node.args, node.args[::-1])
            for a, other in pairs:
                if self.nodes[a].op == "number":
                    return self._by_number(other, number * float(str(self.nodes[a].attr("value"))))
            for a, other in pairs:
                if (scaled := self.scaled(a, number, node.axes)) is not None:
                    return f"{self.value(other, node.axes)} * {scaled}"
        return f"{self.value(n)} * {number!r}"

    def value(self, n: int, axes: Axes | None = None) -> str:
        node = self.nodes[n]
        if node.op == "number" and n in self.text:
            return self.text[n]
        return super().value(n, axes)

    def _sum(self, value: str, axes: Axes, axis: str, zero: frozenset[str]) -> str:
        if axis not in zero:
            value = f"tl.where({self.blocks[axis].mask}{index(axes, axis)}, {value}, 0.0)"
        return f"tl.sum({value}, {axes.index(axis)})"

    def _contract(self, node: Node) -> str:
        """A sum of products, or a product of matrices where three axes meet."""
        axis = str(node.attr("axis"))
        a, b = node.args
        have = [self.nodes[x].axes for x in (a, b)]
        zero = self.padding[a] | self.padding[b]
        if len(node.axes) == 2 and len(have[0]) == 2 and len(have[1]) == 2:
            rows = node.axes[0]
            left, right = (a, b) if rows in have[0] else (b, a)
            x, y = self.value(left), self.value(right)
            if axis not in zero:
                y = f"tl.where({self.mask(self.nodes[right].axes)}, {y}, 0.0)"
            x = x if self.nodes[left].axes == (rows, axis) else f"tl.trans({x})"
            y = y if self.nodes[right].axes == (axis, node.axes[1]) else f"tl.trans({y})"
            return f"tl.dot({x}, {y}, input_precision=PRECISION)"
        whole = next((h for h in have if len(h) == len({*have[0], *have[1]})), (axis, *node.axes))
        return self._sum(f"{self.value(a, whole)} * {self.value(b, whole)}", whole, axis, zero)

    def _swap(self, node: Node) -> str:
        (arg,) = node.args
        one, other = str(node.attr("axis")), str(node.attr("other"))
        names = {one: other, other: one}
        renamed = tuple(names.get(a, a) for a in self.nodes[arg].axes)
        value = self.value(arg)
        if renamed == node.axes:
            return value
        if renamed[::-1] == node.axes:
            return f"tl.trans({value})"
        raise InternalError(f"axes {self.nodes[arg].axes} do not become {node.axes} by exchanging two")

    def full(self, n: int, axes: Axes) -> str:
        """The value as a whole tile, also where it is a number."""
        if self.nodes[n].op != "number":
            return self.value(n)
        shape = tuple_text(self.blocks[a].length for a in axes)
        return f"tl.full({shape}, {self.nodes[n].attr('value')!r}, tl.float32)"
