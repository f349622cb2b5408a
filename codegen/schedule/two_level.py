"""The schedule ``two_level``: sequences cut into super-chunks, each summarised by its affine map.

A super-chunk is some whole chunks of one sequence, and to a walk a sequence of its own: tables give it its
tokens, its chunks and the state that it starts from. So the walks are those of one level. Before them run

1. the walk's step alone, from zeros: H of every super-chunk, and in the backward H' by the reversed step;
2. its linear part (``planner.affine``), from the identity or from ones: F and the decays D or R;
3. a scan over the super-chunks of each sequence, which gives the state before each: S <- F S diag(R) + H,
   backwards dS <- F^T dS diag(R) + H'.

The forward keeps the states before super-chunks and the maps for the backward: a wave of programs has few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from linalg_dsl.codegen.schedule.kernel_plan import Axis, Direction, Kernel, KernelPlan
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.planner.affine import affine_map
from linalg_dsl.planner.plan import ChunkPlan, Node

Start = Literal["zeros", "identity", "ones"]


@dataclass(frozen=True, slots=True)
class Summary:
    """A walk over the chunks of a super-chunk that only hands on its state.

    ``start``: what that state is before the first chunk. ``rows`` and ``columns``: the sizes that stand for K
    and V, an axis or 1.
    """

    kernel: Kernel
    start: Start
    rows: Axis | Literal[1] = "K"
    columns: Axis | Literal[1] = "V"

    @property
    def purpose(self) -> str:
        """What its last state is, in words."""
        if self.start == "identity":
            return f"F of every super-chunk, [{self.rows}, {self.rows}]: the linear part, from the identity"
        if self.start == "ones":
            return "the decays of every super-chunk, multiplied up from ones"
        what = "H" if self.kernel.direction == "forward" else "H of the reversed step"
        return f"{what} of every super-chunk: the step alone, from a state of zeros"


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """What two levels need beside the kernels of ``plan``, which has the nodes of the one level and more.

    ``forward``, ``reverse``: H and H' (None without a backward); ``matrix``: F, where the recurrence erases
    along ``erased``; ``factors``: decays that the scan multiplies in, beside F those of the other axis.
    ``made_of``: of a value that is not in the one level's plan, the value there whose linear part it is.
    """

    plan: KernelPlan
    forward: Summary
    reverse: Summary | None
    erased: Axis | None
    matrix: Summary | None
    factors: Summary | None
    made_of: tuple[tuple[int, int], ...] = ()

    @property
    def summaries(self) -> tuple[Summary, ...]:
        found = (self.forward, self.matrix, self.factors, self.reverse)
        return tuple(s for s in found if s is not None)

    @property
    def update(self) -> str:
        """What the scan does at a super-chunk, in ASCII."""
        linear = "F S" if self.matrix else "D S" if self.factors else "S"
        return f"S <- {linear}{' R' if self.matrix and self.factors else ''} + H"

    @property
    def reversed_update(self) -> str:
        """What it does in the backward, where it goes from the last super-chunk to the first."""
        return self.update.replace("F", "F^T").replace("S", "dS").replace("H", "H'")

    def before(self, phase: str) -> tuple[Summary, ...]:
        """What runs before the first walk of the forward, or before the first reverse one of the backward."""
        return tuple(s for s in self.summaries if (s is self.reverse) == (phase == "backward"))


def kernel_names(plan: KernelPlan, two: TwoLevel | None) -> tuple[tuple[str, str], ...]:
    """(name, family) of everything that a call can launch."""
    kernels = [*plan.forward, *plan.backward, *(s.kernel for s in (two.summaries if two else ()))]
    scan = (("super_scan", "scan"),) if two is not None else ()
    return (*((k.name, k.family) for k in kernels), *scan)


def why_one_level(plan: ChunkPlan) -> str:
    """Why a plan has no second level, in words; empty if it has."""
    states = [c for c in plan.carries if c[1] == "forward"]
    if len(states) != 1:
        return f"it carries {len(states)} states that need each other; their joint map is not built"
    return ""


def check_two_level(plan: ChunkPlan) -> None:
    """Raises ``ArgumentError`` where a plan has no second level."""
    if reason := why_one_level(plan):
        raise ArgumentError(f"schedule two_level is not available for {plan.name}: {reason}")


def two_level(plan: KernelPlan) -> TwoLevel:
    """The kernels that summarise super-chunks. Raises ``ArgumentError`` where there is no such schedule."""
    check_two_level(plan.plan)
    walk = first_walk(plan.forward, "forward")
    found = affine_map(plan.plan)
    whole = replace(plan, plan=replace(plan.plan, nodes=found.nodes))
    matrix = factors = None
    erased: Axis | None = None
    if found.matrix is not None:
        erased = "K" if found.erased == "K" else "V"
        size: Axis = erased
        kernel = _linear(whole, walk, found.leaf, found.matrix, "fwd_super_matrix")
        matrix = Summary(replace(kernel, split="V" if erased == "K" else "K"), "identity", size, size)
    if found.factors is not None:
        kernel = _linear(whole, walk, found.leaf, found.factors, "fwd_super_decay")
        rows: Axis | Literal[1] = "K" if "K" in found.along else 1
        columns: Axis | Literal[1] = "V" if "V" in found.along else 1
        factors = Summary(kernel, "ones", rows, columns)
    reverse = None
    if plan.backward:
        reverse = Summary(_step(plan, first_walk(plan.backward, "reverse"), "bwd_super_states"), "zeros")
    for summary in (matrix, factors):
        if summary is not None:
            _check_sizes(whole, summary)
    return TwoLevel(
        whole, Summary(_step(plan, walk, "fwd_super_states"), "zeros"), reverse, erased, matrix, factors,
        tuple((new, old) for new, old in found.made_of if new >= len(plan.plan.nodes)),
    )  # fmt: skip


def first_walk(kernels: Iterable[Kernel], direction: Direction) -> Kernel:
    """The first walk in a direction: it reads nothing that another walk of that direction makes."""
    for kernel in kernels:
        if kernel.family == "walk" and kernel.direction == direction:
            return kernel
    raise InternalError(f"no walk goes {direction}")


def _check_sizes(plan: KernelPlan, summary: Summary) -> None:
    """A walk whose state has other columns or rows than S may load nothing along the axis that it lacks."""
    for axis, size in (("K", summary.rows), ("V", summary.columns)):
        if axis != size and any(axis in plan.plan.nodes[n].axes for n in summary.kernel.loads):
            raise InternalError(f"{summary.kernel.name} has no axis {axis} and loads a value along it")


def _step(plan: KernelPlan, walk: Kernel, name: str) -> Kernel:
    """A walk that does its step and nothing else."""
    (carry,) = walk.carries
    return _pruned(plan, walk, carry, walk.body, name)


def _linear(plan: KernelPlan, walk: Kernel, leaf: int, after: int, name: str) -> Kernel:
    """A walk whose step is a value that was made of that of ``walk``."""
    nodes = plan.plan.nodes
    body: list[int] = []
    seen = set(walk.loads)

    def visit(n: int) -> None:
        if n in seen or nodes[n].op in ("carry", "number"):
            return
        seen.add(n)
        if nodes[n].op in ("input", "param", "const"):
            raise InternalError(f"{name} reads %{n}, which {walk.name} does not")
        for a in nodes[n].args:
            visit(a)
        body.append(n)

    visit(after)
    return _pruned(plan, walk, (leaf, after), tuple(body), name)


def _pruned(
    plan: KernelPlan, walk: Kernel, carry: tuple[int, int], body: tuple[int, ...], name: str
) -> Kernel:
    nodes = plan.plan.nodes
    wanted: set[int] = set()
    todo = [carry[1]]
    while todo:
        n = todo.pop()
        if n in wanted:
            continue
        wanted.add(n)
        if n not in walk.loads:
            todo.extend(nodes[n].args)
    return Kernel(
        name,
        "walk",
        tuple(n for n in walk.loads if n in wanted),
        tuple(n for n in body if n in wanted),
        (),
        walk.direction,
        walk.split,
        (carry,),
    )


def products(nodes: Sequence[Node], kernel: Kernel) -> tuple[int, int, int]:
    """How many products of sizes [C, own, block], [C, C, block] and [C, C, own] a walk has in a chunk."""
    state = inner = scores = 0
    for n in kernel.body:
        node = nodes[n]
        if node.op in ("read", "write"):
            state += 1
        elif node.op in ("apply", "apply_t"):
            inner += kernel.split in node.axes
            scores += kernel.split not in node.axes
        elif node.op == "score":
            scores += kernel.split not in nodes[node.args[0]].axes
            inner += kernel.split in nodes[node.args[0]].axes
    return state, inner, scores
