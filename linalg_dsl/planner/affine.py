"""A chunk as an affine map of its state: S_C = F S_0 + H, and how such maps compose.

The step of a plan is affine in its carry. H is what the step gives from a state of zeros, so the plan itself
makes it; this module makes the step's linear part, as another value of the same plan:

    low rank      S -> F S diag(R)     F = diag(Lambda_{C<-0}) + L^ P,  R the decay along the axis not erased
    no erase      S -> D o S           D along either axis or both, or one number

    (F_2, R_2, H_2) o (F_1, R_1, H_1) = (F_2 F_1, R_2 o R_1, F_2 H_1 diag(R_2) + H_2)

Started from the identity on the erased axis (without R), the linear part hands on F; started from ones, the
elementwise one hands on D or R. Both are walks like any other, over as many chunks as one likes. The map of
the backward is the adjoint: dS_0 = F^T dS_C diag(R) + H', H' what the reversed step gives from zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import OTHER
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder

_Visit = Callable[[int], int | None]
_DECAYS = ("from_start", "to_end", "total", "signs", "sign_total")


@dataclass(frozen=True, slots=True)
class AffineMap:
    """The linear part of a step as values of a plan, which has the nodes of the one it was made of and more.

    ``leaf``: the carry. ``matrix``: its next value under F, None without erases; ``erased``: the axis on
    which F acts. ``factors``: its next value under the elementwise part (with ``matrix`` R alone), None where
    that is 1; ``along``: the axes of these factors, () for one number. ``made_of``: of each value the one
    whose linear part it is.
    """

    nodes: tuple[Node, ...]
    leaf: int
    erased: str | None
    matrix: int | None
    factors: int | None
    along: tuple[str, ...]
    made_of: tuple[tuple[int, int], ...]


def affine_map(plan: ChunkPlan, direction: str = "forward") -> AffineMap:
    """The linear part of the step of a plan, lowered or not, in one direction.

    Raises ``InternalError`` for several carries, or a step that is not affine or erases along both axes.
    """
    carries = [c for c in plan.carries if c[1] == direction]
    if len(carries) != 1:
        raise InternalError(f"plan {plan.name} has {len(carries)} carries {direction}, not one")
    _, _, leaf, after = carries[0]
    builder = PlanBuilder(plan.nodes)
    parts = _Linear(builder, leaf)
    erased = parts.erased(after)
    if erased is None:
        factors = parts.part(after, elementwise=True)
        if factors is None:
            raise InternalError(f"the step of plan {plan.name} keeps nothing of its state")
        along = parts.axes_of_factors(factors)
        kept = None if factors == leaf else factors
        return AffineMap(tuple(builder.nodes), leaf, None, None, kept, along, tuple(parts.made_of.items()))
    other = OTHER[erased]
    matrix = parts.part(after, without=other)
    rest = parts.part(after, elementwise=True, without=erased)
    along = () if rest is None else parts.axes_of_factors(rest)
    if other not in along:
        rest, along = None, ()  # a number for all channels is in F
    made_of = tuple(parts.made_of.items())
    return AffineMap(tuple(builder.nodes), leaf, erased, matrix, rest, along, made_of)


class _Linear:
    """What is linear in one carry; None stands for zero."""

    def __init__(self, builder: PlanBuilder, leaf: int) -> None:
        self.b = builder
        self.leaf = leaf
        self.known: dict[int, bool] = {}
        self.made_of: dict[int, int] = {}

    def carried(self, n: int) -> bool:
        """Whether a value is made of the carry."""
        if n not in self.known:
            self.known[n] = n == self.leaf or any(self.carried(a) for a in self.b.nodes[n].args)
        return self.known[n]

    def erased(self, after: int) -> str | None:
        """The axis along which the step reads its state; None if it does not."""
        found: set[str] = set()
        todo, seen = [after], set[int]()
        while todo:
            n = todo.pop()
            if n in seen or not self.carried(n):
                continue
            seen.add(n)
            node = self.b.nodes[n]
            if node.op == "read":
                found.add(str(node.attr("con")))
            todo.extend(node.args)
        if len(found) > 1:
            raise InternalError("a step that erases along both axes is no affine map of the chunk form")
        return next(iter(found), None)

    def axes_of_factors(self, n: int) -> tuple[str, ...]:
        """The axes of what the carry is multiplied by, element by element."""
        found: set[str] = set()
        todo = [n]
        while todo:
            node = self.b.nodes[todo.pop()]
            for a in node.args:
                if self.carried(a):
                    todo.append(a)
                elif node.op in ("mul", "scale_state"):
                    found |= set(self.b.axes(a))
        return tuple(axis for axis in ("K", "V") if axis in found)

    # -- the linear part --------------------------------------------------------------------------
    def part(self, n: int, *, elementwise: bool = False, without: str = "") -> int | None:
        """The linear part of a value; ``elementwise``: of it, what maps every entry of the state to itself.

        ``without``: decays along this axis count as 1, and with ``elementwise`` so do single numbers: they
        belong to the other part.
        """
        made: dict[int, int | None] = {}

        def visit(n: int) -> int | None:
            if n not in made:
                made[n] = found = self._node(n, visit, elementwise, without)
                if found is not None:
                    self.made_of.setdefault(found, n)
            return made[n]

        return visit(n)

    def _node(self, n: int, visit: _Visit, elementwise: bool, without: str) -> int | None:
        b, node = self.b, self.b.nodes[n]
        if n == self.leaf:
            return n
        if not self.carried(n):
            return None
        args = node.args
        match node.op:
            case "add":
                terms = [x for a in args if (x := visit(a)) is not None]
                return None if not terms else terms[0] if len(terms) == 1 else b.add(*terms)
            case "mul":
                factor, value = (args[0], args[1]) if self.carried(args[1]) else (args[1], args[0])
                if self.carried(factor):
                    raise InternalError(f"%{n} is quadratic in the state")
                inner = visit(value)
                if inner is None:
                    return None
                kept = self._only(factor, without) if elementwise and without else self._drop(factor, without)
                return b.mul(kept, inner) if args[0] == factor else b.mul(inner, kept)
            case "scale_state":
                inner = visit(args[0])
                if inner is None or without in b.axes(args[1]):
                    return inner
                if elementwise and without and len(b.axes(args[1])) == 1:
                    return inner
                return b.scale_state(inner, args[1])
            case "read" | "write" | "apply" | "apply_t" | "decay_apply" | "solve" | "pick":
                return None if elementwise else self._product(n, node, visit, without)
            case _:
                raise InternalError(f"%{n} ({node.op}) is not linear in the state as it stands")

    def _product(self, n: int, node: Node, visit: _Visit, without: str) -> int | None:
        b, args = self.b, node.args
        if node.op == "solve":
            return self._solve(node, visit, without)
        if node.op == "pick":
            whole = visit(args[0])
            return None if whole is None else b.add_node("pick", (whole,), node.axes, **dict(node.attrs))
        if self.carried(args[0]) and self.carried(args[1]):
            raise InternalError(f"%{n} ({node.op}) is quadratic in the state")
        new = [visit(a) if self.carried(a) else self._drop(a, without) for a in args[:2]]
        if None in new:
            return None
        first, second = (x for x in new if x is not None)
        if node.op == "decay_apply":
            read, transposed = str(node.attr("read")), bool(node.attr("transposed"))
            if without in b.axes(args[2]):
                masked = b.mask(first, "inclusive" if read == "inclusive" else "exclusive")
                return b.apply(masked, second, transposed)
            return b.decay_apply(first, second, args[2], read, transposed)
        axes = b.axes(second) if node.op in ("apply", "apply_t") else node.axes
        return b.add_node(node.op, (first, second), axes, **dict(node.attrs))

    def _solve(self, node: Node, visit: _Visit, without: str) -> int:
        m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
        fixed, values = node.args[: 2 * m * r], node.args[2 * m * r : 2 * m * r + m + r]
        attrs = dict(node.attrs)
        w = list(node.args[2 * m * r + m + r :])
        if w and without in self.b.axes(w[0]):
            w = []
            attrs.pop("decayed")
        zero = self.b.number(0)
        new = [zero if (x := visit(a)) is None else x for a in values]
        return self.b.add_node("solve", (*fixed, *new, *w), node.axes, **attrs)

    # -- factors ----------------------------------------------------------------------------------
    def _drop(self, n: int, axis: str) -> int:
        """A local factor with its decays along an axis as 1."""
        b, node = self.b, self.b.nodes[n]
        if not axis or axis not in node.axes:
            return n
        if node.op in _DECAYS:
            return b.number(1)
        if node.op == "mul":
            return b.mul(*(self._drop(a, axis) for a in node.args))
        raise InternalError(f"%{n} ({node.op}) has the axis {axis}, which the step does not erase")

    def _only(self, n: int, axis: str) -> int:
        """What a factor has along the other axis than this one; 1 if nothing."""
        b, node = self.b, self.b.nodes[n]
        if OTHER[axis] not in node.axes:
            return b.number(1)
        if axis in node.axes and node.op == "mul":
            return b.mul(*(self._only(a, axis) for a in node.args))
        return n
