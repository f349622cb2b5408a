"""Cuts a lowered plan into kernels, from one fact per op: the big axes that it contracts.

An op that sums over axis a must stand in a walk that owns all of a; a walk that splits a reads,
instead, the token value behind it. What needs no carry is ``prep``; a walk forms small elementwise
values again when that moves fewer bytes than a round trip through memory.
"""

from __future__ import annotations

from dataclasses import replace

from linalg_dsl.codegen.schedule.alone import stands_alone
from linalg_dsl.codegen.schedule.boundary import with_boundaries
from linalg_dsl.codegen.schedule.facts import COTANGENT, FORWARD, REVERSE, PlanFacts
from linalg_dsl.codegen.schedule.kernel_plan import (
    BoundaryTerm,
    Buffer,
    Element,
    Kernel,
    KernelPlan,
    is_transform,
    shares,
)
from linalg_dsl.codegen.schedule.naming import with_names
from linalg_dsl.codegen.schedule.phase import Phase
from linalg_dsl.codegen.schedule.verify import verify
from linalg_dsl.language.names import free_name
from linalg_dsl.planner.ops import OPS
from linalg_dsl.planner.plan import ChunkPlan


def cut(plan: ChunkPlan, *, wide_solve: bool = False) -> KernelPlan:
    """The kernels of a lowered plan (forward, and backward if the plan has gradients), verified.

    ``wide_solve``: T of the solve stays float32 between kernels (``planner.precision``).
    """
    plan, boundaries = with_boundaries(plan)
    kernels = _Cut(with_names(plan), boundaries, wide_solve).run()
    verify(kernels)
    return kernels


class _Cut:
    def __init__(self, plan: ChunkPlan, boundaries: tuple[BoundaryTerm, ...], wide_solve: bool) -> None:
        self.plan = plan
        self.wide_solve = wide_solve
        self.boundaries = boundaries
        self.facts = PlanFacts(plan, boundaries)
        self.nodes = plan.nodes
        self.decays_along = {axes[0] for n in plan.nodes if n.op == "total" and (axes := n.axes)}
        self.results = plan.outputs
        self.of_products: dict[int, bool] = {}

    # -- the whole --------------------------------------------------------------------------------
    def run(self) -> KernelPlan:
        outputs = [n for name, n in self.results if not name.startswith("d_")]
        gradients = [n for name, n in self.results if name.startswith("d_")]
        forward = Phase(self.facts, "fwd", outputs, "forward", set(), eager=True)
        kernels_f = forward.kernels()
        kernels_b: list[Kernel] = []
        if "reverse" in self.facts.carry:
            savable = self._savable(kernels_f) | self._dear_scores(kernels_f)
            stored = {n for k in kernels_f for n in k.stores}
            backward = Phase(
                self.facts, "bwd", gradients, "reverse", stored | savable, eager=False, savable=savable
            )
            kernels_b = backward.kernels()
            read = {n for k in kernels_b for n in k.loads}
            extra = (read & savable) - stored
            kernels_f = _with_stores(kernels_f, extra)
            return KernelPlan(
                self.plan,
                tuple(kernels_f),
                tuple(kernels_b),
                self._buffers(kernels_f, kernels_b, extra),
                self.results,
            )
        return KernelPlan(self.plan, tuple(kernels_f), (), self._buffers(kernels_f, [], set()), self.results)

    def _savable(self, kernels: list[Kernel]) -> frozenset[int]:
        """What the backward may ask the forward's walks to save.

        Not a read of the state, or an elementwise value of one, where a boundary term makes the backward
        replay that walk anyway.
        """
        out: set[int] = set()
        for kernel in kernels:
            again: set[int] = set()
            for n in kernel.body if kernel.family == "walk" else ():
                node = self.nodes[n]
                read = node.op == "read" or (self.facts.elementwise(n) and again & set(node.args))
                if read and kernel.split in self.facts.boundaries:
                    again.add(n)
                elif self.facts.token_value(n) and self.facts.depends[n] & FORWARD:
                    out.add(n)
        return frozenset(out)

    def _dear_scores(self, kernels: list[Kernel]) -> frozenset[int]:
        """Scores of the forward's preps: they cost far more than the [C, C] numbers that they are.

        Decays alone are formed again, of coupled states also what scores are weighed by.
        """
        made = {n for k in kernels if k.family == "prep" for n in k.body if self.nodes[n].axes == ("t", "s")}
        scores = {n for n in made if self._of_products(n)}
        if len(self.facts.carry["forward"]) == 1:
            return frozenset(scores)
        weights = {a for n in scores for a in self.nodes[n].args}
        return frozenset(scores | made & weights)

    def _of_products(self, n: int) -> bool:
        """Whether a value has a sum over K or V in it."""
        if n not in self.of_products:
            sums = bool(self.facts.contracts(n))
            self.of_products[n] = sums or any(self._of_products(a) for a in self.nodes[n].args)
        return self.of_products[n]

    def _buffers(self, forward: list[Kernel], backward: list[Kernel], extra: set[int]) -> tuple[Buffer, ...]:
        results = {n for _, n in self.results}
        read_back = {n for k in backward for n in k.loads}
        taken: set[str] = {name for name, _ in self.results}
        out: list[Buffer] = []
        for phase in (forward, backward):
            for kernel in phase:
                for n in kernel.stores:
                    if n in results:
                        continue
                    node = self.nodes[n]
                    name = free_name(node.label or f"{node.op}_{n}", taken)
                    saved = phase is forward and n in read_back
                    of_blocks = n in shares(self.nodes, kernel)
                    out.append(Buffer(n, name, node.axes, self._element(n), saved, n in extra, of_blocks))
        for boundary in self.boundaries:
            for n in boundary.nodes:
                out.append(Buffer(n, free_name("boundary", taken), (boundary.axis,), "float32"))
        return tuple(out)

    def _element(self, n: int) -> Element:
        """Operands of products go in the compute dtype; gates, factors and partial sums in float32.

        Partial sums are gradients along an axis that has decays, which take their gradient from them.
        """
        node = self.nodes[n]
        if any(stands_alone(self.nodes[u]) for u in self.facts.users[n]):
            return "float32"
        if self.wide_solve and is_transform(self.nodes, n):
            return "float32"
        if node.axes == ("t", "s"):
            return "compute"
        summed = bool(self.decays_along & set(node.axes))
        partial = summed and self.facts.depends[n] & (REVERSE | COTANGENT) and not self._operand(n)
        if len(node.axes) == 2 and not partial and not self._feeds_decay(n):
            return "compute"
        return "float32"

    def _operand(self, n: int) -> bool:
        """Whether a product takes a value, so that it is rounded anyway."""
        return any(OPS[self.nodes[u].op].kind == "matmul" for u in self.facts.users[n])

    def _feeds_decay(self, n: int) -> bool:
        return any(
            self.nodes[u].op in ("from_start", "to_end", "total", "decayed_scores", "decay_adjoints")
            and self.nodes[u].args[-1] == n
            for u in self.facts.users[n]
        )


def _with_stores(kernels: list[Kernel], extra: set[int]) -> list[Kernel]:
    """The kernels of the forward, also writing what the backward wants of them."""
    out = []
    for kernel in kernels:
        more = sorted(extra & set(kernel.body))
        extra = extra - set(more)
        out.append(replace(kernel, stores=(*kernel.stores, *more)) if more else kernel)
    return out
