"""``KernelPlan``: which ops run in which kernel, and what goes through memory between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.plan import ChunkPlan, Node

Direction = Literal["forward", "reverse"]
Axis = Literal["K", "V"]
AXES: tuple[Axis, Axis] = ("K", "V")
Element = Literal["compute", "float32"]
SEGMENT = 8
"""A carried boundary term is exact at every 8th chunk boundary."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value that one kernel writes and another reads.

    ``element``: ``compute`` (the dtype of the products' operands) or ``float32``. ``saved`` buffers
    are written by the forward and read by the backward; ``only_saved`` ones only if there is one.
    ``shares``: one sum per block of the walk that writes it, added up by those who read it.
    """

    node: int
    name: str
    axes: Axes
    element: Element
    saved: bool = False
    only_saved: bool = False
    shares: bool = False


@dataclass(frozen=True, slots=True)
class Boundary:
    """How a gate gradient's boundary term is formed: Lambda_{C<-0} o S_0 o dS_C, summed over the axis other
    than ``axis``; Lambda is the product of ``total`` (along ``axis``, or one number) and ``others``.

    Two walks that split ``axis`` meet in it, one of each direction; ``keeper`` is the direction of the
    earlier. Exactly: the earlier keeps its state before every chunk, the later multiplies; ``exact`` says
    that nothing less will do. Or carried: the earlier records, per chunk, the sum over tokens of x o dx of
    the pairs (x, dx) that its own step adds (``starts`` of a forward walk, ``ends`` of a reverse one) and the
    norms of its state, and the state itself at every 8th boundary; the later forms h = sum S o dS there,
    b = clamp(h - sum x o dx) over its own pairs, and hands h = b + what was recorded on. Kernels have both
    ways; the launcher chooses.

    ``cotangent``: dS_C as the chunk's step takes it, with the signs of a signed gate.
    """

    node: int
    axis: Axis
    keeper: Direction
    exact: bool
    starts: tuple[tuple[int, int], ...]
    ends: tuple[tuple[int, int], ...]
    cotangent: int
    total: int
    others: tuple[int, ...] = ()

    @property
    def pair_values(self) -> tuple[int, ...]:
        return tuple(n for pair in (*self.starts, *self.ends) for n in pair)

    def pairs(self, direction: Direction) -> tuple[tuple[int, int], ...]:
        """What the step of a walk adds to the sum of S o dS."""
        return self.starts if direction == "forward" else self.ends

    @property
    def nodes(self) -> tuple[int, ...]:
        return (self.node,)

    def needs(self, direction: Direction) -> tuple[int, ...]:
        """The values that the walk of a direction has to have."""
        whole = () if direction == self.keeper else (self.total, *self.others)
        signed = (self.cotangent,) if direction == "reverse" else ()
        return (*(n for pair in self.pairs(direction) for n in pair), *whole, *signed)


@dataclass(frozen=True, slots=True)
class BoundaryProducts:
    """The boundary terms of coupled states: every product <S_j, dS_i> of a state before a chunk and a
    cotangent after it that a gate's gradient needs, summed over the axis other than ``axis``.

    There are more of them than balances over the chunks, so none can be carried: the earlier of the two walks
    that split ``axis``, ``keeper``, keeps its states at every chunk, the later multiplies. ``terms``: (node,
    value of the forward walk, value of the reverse walk), states all.
    """

    axis: Axis
    keeper: Direction
    terms: tuple[tuple[int, int, int], ...]
    exact: bool = True

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(node for node, _, _ in self.terms)

    @property
    def pair_values(self) -> tuple[int, ...]:
        return (*self.needs("forward"), *self.needs("reverse"))

    @property
    def kept(self) -> tuple[int, ...]:
        """What the keeper keeps."""
        return self.needs(self.keeper)

    def needs(self, direction: Direction) -> tuple[int, ...]:
        """The values that the walk of a direction has to have."""
        place = 1 if direction == "forward" else 2
        return tuple(dict.fromkeys(term[place] for term in self.terms))


BoundaryTerm = Boundary | BoundaryProducts


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: what it reads, computes (in this order) and writes.

    A ``walk`` owns one sequence, head and block of ``split``, keeps the state on chip and goes over
    the chunks in ``direction``; a ``prep`` program owns one chunk and head.
    """

    name: str
    family: Literal["prep", "walk"]
    loads: tuple[int, ...]
    body: tuple[int, ...]
    stores: tuple[int, ...]
    direction: Direction | None = None
    split: Axis | None = None
    carries: tuple[tuple[int, int], ...] = ()
    """Leaf and next value of every state that a walk hands on."""
    boundary: BoundaryTerm | None = None

    def __str__(self) -> str:
        what = self.family if self.family == "prep" else f"{self.direction} walk, {self.split} split"
        return (
            f"{self.name}: {what}; {len(self.body)} ops, reads {len(self.loads)}, writes {len(self.stores)}"
        )


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """All kernels of one op. ``plan`` is the lowered plan whose nodes everything here numbers.

    ``results``: (name, node) of the outputs and gradients; they are written by a kernel each, as are
    ``buffers``.
    """

    plan: ChunkPlan
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    results: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        lines = [f"kernel plan {self.plan.name}"]
        for phase, kernels in (("forward", self.forward), ("backward", self.backward)):
            lines += [f"  {phase} {kernel}" for kernel in kernels]
        for b in self.buffers:
            note = "saved if a gradient is wanted" if b.only_saved else "saved" if b.saved else "temporary"
            lines.append(f"  buffer {b.name} [{', '.join(b.axes)}] {b.element}, {note}")
        return "\n".join(lines)


def leaves_last_states(plan: KernelPlan, kernel: Kernel) -> bool:
    """Whether a walk writes the states that a call gives back: the last ones of the forward, the gradients of
    the first ones of the backward."""
    if kernel.family == "prep":
        return False
    if kernel in plan.forward:
        return kernel is [k for k in plan.forward if k.family == "walk"][-1]
    walks = [k for k in plan.backward if k.direction == "reverse"]
    return kernel in walks and (kernel.split == "V" or all(k.split != "V" for k in walks))


def tile_kinds(nodes: Sequence[Node], kernel: Kernel) -> tuple[str, ...]:
    """The axes of every tile that a kernel loads in its loop, "o" for the axis a walk owns, "b" for its
    block; in capitals those of states that it keeps for another. Of walks also "t", one number per token.
    """
    least = 1 if kernel.family == "walk" else 2
    timed = (nodes[n].axes for n in kernel.loads if "t" in nodes[n].axes and len(nodes[n].axes) >= least)
    kinds = ["".join(a if a in "ts" else "b" if a == kernel.split else "o" for a in axes) for axes in timed]
    if kernel.boundary:
        keeps = kernel.direction == kernel.boundary.keeper
        kinds += ["OB" if keeps else "ob"] * kept_states(kernel.boundary)
    return tuple(sorted(kinds))


def kept_states(boundary: BoundaryTerm) -> int:
    """How many states one walk of a boundary term keeps for the other."""
    return len(boundary.kept) if isinstance(boundary, BoundaryProducts) else 1


def is_transform(nodes: Sequence[Node], n: int) -> bool:
    """Whether a value is T of the solve, or one of its r x r parts."""
    return nodes[n].op == "pick" and nodes[nodes[n].args[0]].op == "ut_transform"


def shares(nodes: Sequence[Node], kernel: Kernel) -> frozenset[int]:
    """The sums over its split axis that a walk stores: of each block its share."""
    return frozenset(
        n for n in kernel.stores if nodes[n].op == "sum" and kernel.split in (nodes[n].attr("axis"),)
    )
