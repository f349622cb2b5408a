"""Cuts a lowered plan into kernels, from one fact per op: the big axes that it contracts.

An op that sums over axis a must stand in a walk that owns all of a; a walk that splits a reads,
instead, the token value behind it. What needs no carry is ``prep``; a walk forms small elementwise
values again when that moves fewer bytes than a round trip through memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from linalg_dsl.codegen.schedule.boundary import with_boundary
from linalg_dsl.codegen.schedule.kernel_plan import (
    Axis,
    Boundary,
    Buffer,
    Direction,
    Element,
    Kernel,
    KernelPlan,
)
from linalg_dsl.codegen.schedule.verify import verify
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import OPS, contracted_axes
from linalg_dsl.planner.plan import ChunkPlan

_LEAVES = ("input", "param", "const", "number", "cotangent")
_SIZES = {"t": 1.0, "s": 32.0, "K": 128.0, "V": 128.0}
"""Nominal extents per token, to compare bytes; only their order matters."""
_PER_CHUNK = 1 / 32
_WALKS: tuple[tuple[Direction, Axis], ...] = (
    ("forward", "V"),
    ("forward", "K"),
    ("reverse", "V"),
    ("reverse", "K"),
)
_RECOMPUTE_IF_WITHIN = 1.25
"""Form a value again unless its operands cost this much more to read than the value itself."""


def cut(plan: ChunkPlan) -> KernelPlan:
    """The kernels of a lowered plan (forward, and backward if the plan has gradients), verified."""
    plan, boundary = with_boundary(plan)
    kernels = _Cut(plan, boundary).run()
    verify(kernels)
    return kernels


@dataclass
class _Walk:
    direction: Direction
    split: Axis
    made: frozenset[int]
    outputs: set[int] = field(default_factory=set)
    prep: set[int] = field(default_factory=set)
    """Local values it reads that an earlier prep must make."""


@dataclass
class _Draft:
    """One kernel while loads and body are collected."""

    outputs: list[int]
    walk: _Walk | None
    loads: list[int] = field(default_factory=list)
    body: list[int] = field(default_factory=list)


class _Cut:
    def __init__(self, plan: ChunkPlan, boundary: Boundary | None) -> None:
        self.plan = plan
        self.boundary = boundary
        self.nodes = plan.nodes
        self.carry: dict[Direction, tuple[int, int]] = {
            "forward" if direction == "forward" else "reverse": (leaf, after)
            for _, direction, leaf, after in plan.carries
        }
        self.depends = self._dependencies()
        self.users = self._users()
        self.results = plan.outputs
        self.walk_ops = self._walk_ops()
        self.savable: set[int] = set()

    # -- the whole --------------------------------------------------------------------------------
    def run(self) -> KernelPlan:
        outputs = [n for name, n in self.results if not name.startswith("d_")]
        gradients = [n for name, n in self.results if name.startswith("d_")]
        forward = _Phase(self, "fwd", outputs, "forward", set(), eager=True)
        kernels_f = forward.kernels()
        kernels_b: list[Kernel] = []
        if "reverse" in self.carry:
            self.savable = {
                n
                for k in kernels_f
                if k.family == "walk"
                for n in k.body
                if self._token_value(n) and self.depends[n] & _FORWARD
            }
            stored = {n for k in kernels_f for n in k.stores}
            backward = _Phase(self, "bwd", gradients, "reverse", stored | self.savable, eager=False)
            kernels_b = backward.kernels()
            read = {n for k in kernels_b for n in k.loads}
            extra = sorted((read & self.savable) - stored)
            kernels_f = [forward.with_stores(k, extra) for k in kernels_f]
            return KernelPlan(
                self.plan,
                tuple(kernels_f),
                tuple(kernels_b),
                self._buffers(kernels_f, kernels_b, extra),
                self.results,
            )
        return KernelPlan(self.plan, tuple(kernels_f), (), self._buffers(kernels_f, [], []), self.results)

    def _buffers(self, forward: list[Kernel], backward: list[Kernel], extra: list[int]) -> tuple[Buffer, ...]:
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
                    name = _unique(node.label or f"{node.op}_{n}", taken)
                    saved = phase is forward and n in read_back
                    out.append(Buffer(n, name, node.axes, self._element(n), saved, n in extra))
        if self.boundary:
            out.append(Buffer(self.boundary.node, _unique("boundary", taken), ("K",), "float32"))
        return tuple(out)

    def _element(self, n: int) -> Element:
        """Operands of products go in the compute dtype; gates, factors and partial sums in float32."""
        node = self.nodes[n]
        if node.axes == ("t", "s"):
            return "compute"
        partial = "K" in node.axes and self.depends[n] & (_REVERSE | _COTANGENT)
        if len(node.axes) == 2 and not partial and not self._feeds_decay(n):
            return "compute"
        return "float32"

    def _feeds_decay(self, n: int) -> bool:
        return any(
            self.nodes[u].op in ("from_start", "to_end", "total", "decayed_scores", "decay_adjoints")
            and self.nodes[u].args[-1] == n
            for u in self.users[n]
        )

    # -- facts about nodes --------------------------------------------------------------------------
    def _dependencies(self) -> list[int]:
        out: list[int] = []
        for node in self.nodes:
            bits = 0
            if node.op == "carry":
                bits = _FORWARD if node.attr("direction") == "forward" else _REVERSE
            elif node.op == "cotangent":
                bits = _COTANGENT
            for a in node.args:
                bits |= out[a]
            out.append(bits)
        return out

    def _users(self) -> list[list[int]]:
        users: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for a in node.args:
                users[a].append(i)
        return users

    def _walk_ops(self) -> frozenset[str]:
        """What a walk may form again. Without decay and erase a score costs less than its bytes."""
        ops = {n for n, info in OPS.items() if info.kind in ("elementwise", "shape")}
        ops |= {"apply", "apply_t", "write"}
        used = {n.op for n in self.nodes}
        if not used & {"from_start", "ut_transform"}:
            ops |= {"score", "mask"}
        return frozenset(ops)

    def _token_value(self, n: int) -> bool:
        return "t" in self.nodes[n].axes

    def is_leaf(self, n: int) -> bool:
        return self.nodes[n].op in _LEAVES

    def contracts(self, n: int) -> frozenset[str]:
        node = self.nodes[n]
        return contracted_axes(node.op, tuple(self.nodes[a].axes for a in node.args), dict(node.attrs))

    def size(self, n: int) -> float:
        axes = self.nodes[n].axes
        total = 1.0 if "t" in axes else _PER_CHUNK
        for axis in axes:
            total *= _SIZES[axis]
        return total if self.nodes[n].op != "number" else 0.0


_FORWARD, _REVERSE, _COTANGENT = 1, 2, 4
_CARRIES = _FORWARD | _REVERSE


class _Phase:
    """The forward or the backward: finds its walks, then what each kernel reads, makes and writes."""

    def __init__(
        self,
        cut: _Cut,
        prefix: str,
        targets: list[int],
        direction: Direction,
        memory: set[int],
        *,
        eager: bool,
    ) -> None:
        self.cut = cut
        self.nodes = cut.nodes
        self.prefix = prefix
        self.final: Direction = direction
        self.targets = list(dict.fromkeys(n for n in targets if not cut.is_leaf(n)))
        self.memory = memory
        self.eager = eager
        self.forced: set[int] = set()
        self.walks = self._find_walks()
        self.maker = {n: w for w in reversed(self.walks) for n in w.made}

    # -- which walks ------------------------------------------------------------------------------
    def _find_walks(self) -> list[_Walk]:
        cut = self.cut
        after = cut.carry[self.final][1]
        self.needed = self._needed([*self.targets, after])
        remaining = {n for n in self.needed if cut.depends[n] & _CARRIES and self.nodes[n].op != "carry"}
        remaining -= {n for n in remaining if self.nodes[n].op == "boundary_gate"}
        available = set(self.memory)
        walks: list[_Walk] = []
        while any(self._heavy(n) for n in remaining) or not walks:
            walk = self._next_walk(remaining, available, walks)
            walks.append(walk)
            available |= {n for n in walk.made if cut._token_value(n)}
            remaining -= walk.made
        return walks

    def _next_walk(self, remaining: set[int], available: set[int], walks: list[_Walk]) -> _Walk:
        best: tuple[bool, int, _Walk] | None = None
        taken = {(w.direction, w.split) for w in walks}
        for direction, split in _WALKS:
            if direction not in self.cut.carry or (direction, split) in taken:
                continue
            if self.cut.boundary and (direction, split) == ("reverse", "K") and ("forward", "K") not in taken:
                continue  # the boundary term is carried backwards over what the forward one records
            made = self._makeable(direction, split, available, remaining)
            heavy = {n for n in made if self._heavy(n)}
            if heavy:
                complete = heavy >= self._could_make(direction, split, remaining)
                option = (complete, len(heavy), _Walk(direction, split, frozenset(made)))
                if best is None or option[:2] > best[:2]:
                    best = option
        if best is None:
            raise InternalError("no walk can make what is left: the recurrence contracts both axes at once")
        return best[2]

    def _makeable(self, direction: Direction, split: str, available: set[int], wanted: set[int]) -> set[int]:
        """The wanted values that a walk can make (greatest fixed point over its carry)."""
        leaf, after = self.cut.carry[direction]
        for keep_state in (True, False):
            known: dict[int, bool] = {leaf: keep_state}
            if not keep_state:
                return set()
            if self._can_make(after, split, available, known, eager=True):
                break
        self.forced |= self._forced(after, split, available)
        return {
            n
            for n in wanted
            if n not in available and self._can_make(n, split, available, known, eager=self.eager)
        }

    def _could_make(self, direction: str, split: str, remaining: set[int]) -> set[int]:
        """The state reads that this walk could make if every token value were given."""
        bit = _FORWARD if direction == "forward" else _REVERSE
        return {
            n
            for n in remaining
            if self._heavy(n)
            and split not in self.cut.contracts(n)
            and all(self.cut.depends[a] & _CARRIES == bit for a in self.nodes[n].args if self._state(a))
        }

    def _can_make(
        self, n: int, split: str, available: set[int], known: dict[int, bool], *, eager: bool
    ) -> bool:
        if n in known:
            return known[n]
        cut, node = self.cut, self.nodes[n]
        local = not cut.depends[n] & _CARRIES
        if cut.is_leaf(n) or n in available or n in self.forced:
            answer = True
        elif node.op in ("carry", "boundary_gate"):
            answer = False
        else:
            answer = (
                split not in cut.contracts(n)
                and (node.op in cut.walk_ops or node.op == "read")
                and all(self._can_make(a, split, available, known, eager=eager) for a in node.args)
            )
            if not answer and local and eager:
                answer = True  # a prep makes it
        known[n] = answer
        return answer

    def _forced(self, after: int, split: str, available: set[int]) -> set[int]:
        """Local values that the carry's own update needs from a prep."""
        cut = self.cut
        out: set[int] = set()
        todo, seen = [after], set()
        while todo:
            n = todo.pop()
            if n in seen or cut.is_leaf(n) or n in available:
                continue
            seen.add(n)
            if not cut.depends[n] & _CARRIES and (
                self.nodes[n].op not in cut.walk_ops or split in cut.contracts(n)
            ):
                out.add(n)
                continue
            todo.extend(self.nodes[n].args)
        return out

    def _heavy(self, n: int) -> bool:
        """A token value read from the state: what makes a walk necessary."""
        return not self._state(n) and any(self._state(a) for a in self.nodes[n].args)

    def _state(self, n: int) -> bool:
        return self.nodes[n].axes == ("K", "V")

    def _needed(self, roots: Iterable[int]) -> set[int]:
        seen: set[int] = set()
        todo = list(roots)
        while todo:
            n = todo.pop()
            if n in seen or n in self.memory:
                continue
            seen.add(n)
            todo.extend(self.nodes[n].args)
        return seen

    # -- what each kernel does ----------------------------------------------------------------------
    def kernels(self) -> list[Kernel]:
        in_walk = {n: self.maker[n] for n in self.targets if n in self.maker}
        for n, walk in in_walk.items():
            walk.outputs.add(n)
        boundary = self.cut.boundary if self.final == "reverse" else None
        final = [n for n in self.targets if n not in in_walk]
        self._collect(_Draft(final, None))
        for walk in reversed(self.walks):
            self._collect(self._walk_draft(walk, boundary))
            self._collect(_Draft(sorted(walk.prep), None))
        return self._finish(final, boundary)

    def _walk_draft(self, walk: _Walk, boundary: Boundary | None) -> _Draft:
        outputs = sorted(walk.outputs)
        if boundary and walk.split == "K":
            pairs = boundary.starts if walk.direction == "forward" else boundary.ends
            outputs += [n for pair in pairs for n in pair]
            if walk.direction == "reverse":
                outputs.append(boundary.total)
        return _Draft([*outputs, self.cut.carry[walk.direction][1]], walk)

    def _finish(self, final: list[int], boundary: Boundary | None) -> list[Kernel]:
        """Second pass, in order, knowing what is in memory; stores that nobody reads are dropped."""
        plans: list[tuple[_Draft, list[int]]] = []
        memory = set(self.memory)
        for walk in self.walks:
            prep = sorted(walk.prep - memory)
            if prep:
                plans.append((_Draft(prep, None), prep))
                memory |= set(prep)
            plans.append((self._walk_draft(walk, boundary), sorted(walk.outputs)))
            memory |= walk.outputs
            if boundary and (walk.direction, walk.split) == ("reverse", "K"):
                memory.add(boundary.node)
        if final:
            plans.append((_Draft(final, None), final))
        kept: list[Kernel] = []
        read: set[int] = set()
        results = set(self.targets)
        for draft, stores in reversed(plans):
            stores = [n for n in stores if n in read or n in results]
            if draft.walk is None and not stores:
                continue
            again = self._walk_draft(draft.walk, boundary) if draft.walk else _Draft(stores, None)
            if draft.walk:
                dropped = draft.walk.outputs - set(stores)
                again.outputs = [n for n in again.outputs if n not in dropped or self._boundary_value(n)]
            before = self._memory_before(plans, draft)
            self._collect(again, before)
            read |= set(again.loads)
            kept.append(self._kernel(again, stores, boundary))
        return self._named(kept[::-1])

    def _boundary_value(self, n: int) -> bool:
        b = self.cut.boundary
        return b is not None and n in {x for pair in (*b.starts, *b.ends) for x in pair} | {b.total}

    def _memory_before(self, plans: list[tuple[_Draft, list[int]]], draft: _Draft) -> set[int]:
        memory = set(self.memory)
        for other, stores in plans:
            if other is draft:
                break
            memory |= set(stores)
            if (
                self.cut.boundary
                and other.walk
                and (other.walk.direction, other.walk.split) == ("reverse", "K")
            ):
                memory.add(self.cut.boundary.node)
        return memory

    def _kernel(self, draft: _Draft, stores: list[int], boundary: Boundary | None) -> Kernel:
        walk = draft.walk
        if walk is None:
            return Kernel("", "prep", tuple(draft.loads), tuple(draft.body), tuple(stores))
        carried = boundary if boundary and walk.split == "K" else None
        return Kernel(
            "", "walk", tuple(draft.loads), tuple(draft.body), tuple(stores),
            walk.direction, walk.split, self.cut.carry[walk.direction], carried,
        )  # fmt: skip

    def _named(self, kernels: list[Kernel]) -> list[Kernel]:
        out: list[Kernel] = []
        last = len(kernels) - 1
        for i, k in enumerate(kernels):
            if k.family == "walk":
                suffix = "walk" if self.prefix == "fwd" else f"{k.direction}_{k.split}".lower()
            else:
                suffix = "prep" if i < last or self.prefix == "fwd" else "gradients"
            name = f"{self.prefix}_{suffix}"
            if any(name == o.name for o in out):
                name = f"{name}_{i}"
            out.append(Kernel(name, *(getattr(k, f) for f in list(Kernel.__dataclass_fields__)[1:])))
        return out

    def with_stores(self, kernel: Kernel, extra: list[int]) -> Kernel:
        """The forward walk, also writing what the backward wants of it."""
        if kernel.family != "walk" or not extra:
            return kernel
        return Kernel(
            kernel.name, kernel.family, kernel.loads, kernel.body, (*kernel.stores, *extra),
            kernel.direction, kernel.split, kernel.carry, kernel.boundary,
        )  # fmt: skip

    # -- operands: load or form again -----------------------------------------------------------------
    def _collect(self, draft: _Draft, memory: set[int] | None = None) -> None:
        known = self.memory if memory is None else memory
        for n in draft.outputs:
            # what the boundary term multiplies may be local: then it is an operand like any other
            self._visit(n, draft, known, output=draft.walk is None or bool(self.cut.depends[n] & _CARRIES))

    def _visit(self, n: int, draft: _Draft, memory: set[int], *, output: bool = False) -> None:
        cut, node = self.cut, self.nodes[n]
        if n in draft.body or n in draft.loads or node.op in ("carry", "number"):
            return
        if not output and self._loads(n, draft, memory):
            draft.loads.append(n)
            if not cut.is_leaf(n) and n not in memory and node.op != "boundary_gate":
                self._demand(n, draft)
            return
        if cut.is_leaf(n):
            draft.loads.append(n)
            return
        for a in node.args:
            self._visit(a, draft, memory)
        draft.body.append(n)

    def _loads(self, n: int, draft: _Draft, memory: set[int]) -> bool:
        cut, node, walk = self.cut, self.nodes[n], draft.walk
        if cut.is_leaf(n) or node.op == "boundary_gate":
            return True
        if self._state(n):
            return False  # a state never goes through memory
        carried = bool(cut.depends[n] & _CARRIES)
        if walk and n in walk.made:
            return n in memory and n not in walk.made
        elementwise = self._elementwise(n)
        if walk is None:
            if not carried:
                return n in memory and not elementwise
            if n not in self.maker and n not in memory:
                return False
            return not (elementwise and self._shares_operands(n))
        if n in memory and not elementwise:
            return True
        if carried:
            return not (elementwise and self._shares_operands(n))
        here = node.op in cut.walk_ops and walk.split not in cut.contracts(n)
        return not (here and (node.op in ("score", "mask", "write") or self._cheaper_again(n, memory, draft)))

    def _shares_operands(self, n: int) -> bool:
        """Whether a walk's elementwise value is better formed again outside.

        It is where what it is made of has to leave the walk for another value as well.
        """
        made = self.maker[n].made if n in self.maker else frozenset[int]()
        return any(self._leaving(root, made, n) for root in self._elementwise_roots(n))

    def _elementwise_roots(self, n: int) -> set[int]:
        """The carried values that are not elementwise behind an elementwise one."""
        if not self._elementwise(n):
            return {n}
        carried = [a for a in self.nodes[n].args if self.cut.depends[a] & _CARRIES]
        return {root for a in carried for root in self._elementwise_roots(a)}

    def _leaving(self, n: int, made: frozenset[int], without: int) -> bool:
        """Whether n, or an elementwise value made of it in its walk other than through one, leaves it."""
        users = self._wanted_users(n)
        if n == without:
            return False
        return (
            n in self.targets
            or any(u not in made for u in users)
            or any(self._leaving(u, made, without) for u in users if self._elementwise(u))
        )

    def _elementwise(self, n: int) -> bool:
        return OPS[self.nodes[n].op].kind in ("elementwise", "shape")

    def _wanted_users(self, n: int) -> list[int]:
        return [u for u in self.cut.users[n] if u in self.needed]

    def _cheaper_again(self, n: int, memory: set[int], draft: _Draft) -> bool:
        again = sum(self._cost(a, memory, draft) for a in set(self.nodes[n].args))
        stored = self.cut.size(n) * (1 if n in memory else 2)
        return again <= _RECOMPUTE_IF_WITHIN * stored

    def _cost(self, n: int, memory: set[int], draft: _Draft) -> float:
        """Bytes (in elements) to have n in this kernel."""
        cut, node, walk = self.cut, self.nodes[n], draft.walk
        if node.op == "carry" or n in draft.body or n in draft.loads or (walk and n in walk.made):
            return 0.0
        if cut.is_leaf(n):
            return cut.size(n)
        stored = cut.size(n) * (1 if n in memory else 2)
        can_form = node.op in cut.walk_ops and (
            walk is None or (walk.split not in cut.contracts(n) and not cut.depends[n] & _CARRIES)
        )
        if can_form and node.op in ("score", "mask", "write"):
            return 0.0
        if not can_form or (cut.depends[n] & _CARRIES and OPS[node.op].kind not in ("elementwise", "shape")):
            return stored
        return min(stored, sum(self._cost(a, memory, draft) for a in set(node.args)))

    def _demand(self, n: int, draft: _Draft) -> None:
        """Somebody earlier must write n."""
        if n in self.maker and self.maker[n] is not draft.walk:
            self.maker[n].outputs.add(n)
        elif draft.walk is not None and not self.cut.depends[n] & _CARRIES:
            draft.walk.prep.add(n)
        elif n not in self.cut.savable:
            raise InternalError(f"nothing writes %{n} ({self.nodes[n].op}) for a later kernel")


def _unique(name: str, taken: set[str]) -> str:
    out, i = name, 2
    while out in taken:
        out, i = f"{name}_{i}", i + 1
    taken.add(out)
    return out
