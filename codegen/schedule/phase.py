"""The forward or the backward of a plan: finds its walks, then what each kernel reads, makes and writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from linalg_dsl.codegen.schedule.facts import CARRIES, FORWARD, REVERSE, PlanFacts
from linalg_dsl.codegen.schedule.kernel_plan import Axis, Boundary, Direction, Kernel
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import OPS

_WALKS: tuple[tuple[Direction, Axis], ...] = (
    ("forward", "V"),
    ("forward", "K"),
    ("reverse", "V"),
    ("reverse", "K"),
)
_RECOMPUTE_IF_WITHIN = 1.25
"""Form a value again unless its operands cost this much more to read than the value itself."""


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


class Phase:
    """The forward or the backward: finds its walks, then what each kernel reads, makes and writes."""

    def __init__(
        self,
        facts: PlanFacts,
        prefix: str,
        targets: list[int],
        direction: Direction,
        memory: set[int],
        *,
        eager: bool,
        savable: frozenset[int] = frozenset(),
    ) -> None:
        self.facts = facts
        self.savable = savable
        self.nodes = facts.nodes
        self.prefix = prefix
        self.final: Direction = direction
        self.targets = list(dict.fromkeys(n for n in targets if not facts.is_leaf(n)))
        self.memory = memory
        self.eager = eager
        self.forced: set[int] = set()
        self.walks = self._find_walks()
        self.maker = {n: w for w in reversed(self.walks) for n in w.made}

    # -- which walks ------------------------------------------------------------------------------
    def _find_walks(self) -> list[_Walk]:
        facts = self.facts
        after = facts.carry[self.final][1]
        self.needed = self._needed([*self.targets, after])
        remaining = {n for n in self.needed if facts.depends[n] & CARRIES and self.nodes[n].op != "carry"}
        remaining -= {n for n in remaining if self.nodes[n].op == "boundary_gate"}
        available = set(self.memory)
        walks: list[_Walk] = []
        while any(self._heavy(n) for n in remaining) or not walks:
            walk = self._next_walk(remaining, available, walks)
            walks.append(walk)
            available |= {n for n in walk.made if facts.token_value(n)}
            remaining -= walk.made
        return walks

    def _next_walk(self, remaining: set[int], available: set[int], walks: list[_Walk]) -> _Walk:
        best: tuple[bool, int, _Walk] | None = None
        taken = {(w.direction, w.split) for w in walks}
        for direction, split in _WALKS:
            if direction not in self.facts.carry or (direction, split) in taken:
                continue
            if (
                self.facts.boundary
                and (direction, split) == ("reverse", "K")
                and ("forward", "K") not in taken
            ):
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
        leaf, after = self.facts.carry[direction]
        known = {leaf: True}
        if not self._can_make(after, split, available, known, eager=True):
            return set()
        self.forced |= self._forced(after, split, available)
        return {
            n
            for n in wanted
            if n not in available and self._can_make(n, split, available, known, eager=self.eager)
        }

    def _could_make(self, direction: str, split: str, remaining: set[int]) -> set[int]:
        """The state reads that this walk could make if every token value were given."""
        bit = FORWARD if direction == "forward" else REVERSE
        return {
            n
            for n in remaining
            if self._heavy(n)
            and split not in self.facts.contracts(n)
            and all(self.facts.depends[a] & CARRIES == bit for a in self.nodes[n].args if self.facts.state(a))
        }

    def _can_make(
        self, n: int, split: str, available: set[int], known: dict[int, bool], *, eager: bool
    ) -> bool:
        if n in known:
            return known[n]
        facts, node = self.facts, self.nodes[n]
        local = not facts.depends[n] & CARRIES
        if facts.is_leaf(n) or n in available or n in self.forced:
            answer = True
        elif node.op in ("carry", "boundary_gate"):
            answer = False
        else:
            answer = (
                split not in facts.contracts(n)
                and (node.op in facts.walk_ops or node.op == "read")
                and all(self._can_make(a, split, available, known, eager=eager) for a in node.args)
            )
            if not answer and local and eager:
                answer = True  # a prep makes it
        known[n] = answer
        return answer

    def _forced(self, after: int, split: str, available: set[int]) -> set[int]:
        """Local values that the carry's own update needs from a prep."""
        facts = self.facts
        out: set[int] = set()
        todo, seen = [after], set()
        while todo:
            n = todo.pop()
            if n in seen or facts.is_leaf(n) or n in available:
                continue
            seen.add(n)
            if not facts.depends[n] & CARRIES and (
                self.nodes[n].op not in facts.walk_ops or split in facts.contracts(n)
            ):
                out.add(n)
                continue
            todo.extend(self.nodes[n].args)
        return out

    def _heavy(self, n: int) -> bool:
        """A token value read from the state: what makes a walk necessary."""
        return not self.facts.state(n) and any(self.facts.state(a) for a in self.nodes[n].args)

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
        boundary = self.facts.boundary if self.final == "reverse" else None
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
        return _Draft([*outputs, self.facts.carry[walk.direction][1]], walk)

    def _finish(self, final: list[int], boundary: Boundary | None) -> list[Kernel]:
        """Second pass, in order, knowing what is in memory; stores that nobody reads are dropped."""
        plans: list[tuple[_Walk | None, list[int], set[int]]] = []  # stores, and what is in memory before
        memory = set(self.memory)
        for walk in self.walks:
            prep = sorted(walk.prep - memory)
            if prep:
                plans.append((None, prep, set(memory)))
                memory |= set(prep)
            plans.append((walk, sorted(walk.outputs), set(memory)))
            memory |= walk.outputs
            if boundary and (walk.direction, walk.split) == ("reverse", "K"):
                memory.add(boundary.node)
        if final:
            plans.append((None, final, memory))
        kept: list[Kernel] = []
        read: set[int] = set()
        results = set(self.targets)
        for made_by, wanted, before in reversed(plans):
            stores = [n for n in wanted if n in read or n in results]
            if made_by is None and not stores:
                continue
            draft = _Draft(stores, None)
            if made_by:
                dropped = made_by.outputs - set(stores)
                draft = self._walk_draft(made_by, boundary)
                draft.outputs = [n for n in draft.outputs if n not in dropped or self._boundary_value(n)]
            self._collect(draft, before)
            read |= set(draft.loads)
            kept.append(self._kernel(draft, stores, boundary))
        return self._named(kept[::-1])

    def _boundary_value(self, n: int) -> bool:
        b = self.facts.boundary
        return b is not None and n in {x for pair in (*b.starts, *b.ends) for x in pair} | {b.total}

    def _kernel(self, draft: _Draft, stores: list[int], boundary: Boundary | None) -> Kernel:
        walk = draft.walk
        if walk is None:
            return Kernel("", "prep", tuple(draft.loads), tuple(draft.body), tuple(stores))
        carried = boundary if boundary and walk.split == "K" else None
        return Kernel(
            "", "walk", tuple(draft.loads), tuple(draft.body), tuple(stores),
            walk.direction, walk.split, self.facts.carry[walk.direction], carried,
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
            out.append(replace(k, name=name))
        return out

    def with_stores(self, kernel: Kernel, extra: list[int]) -> Kernel:
        """A kernel of the forward, also writing what the backward wants of it."""
        made = set(kernel.body)
        return replace(kernel, stores=(*kernel.stores, *(n for n in extra if n in made)))

    # -- operands: load or form again -----------------------------------------------------------------
    def _collect(self, draft: _Draft, memory: set[int] | None = None) -> None:
        known = self.memory if memory is None else memory
        for n in draft.outputs:
            # what the boundary term multiplies may be local: then it is an operand like any other
            self._visit(n, draft, known, output=draft.walk is None or bool(self.facts.depends[n] & CARRIES))

    def _visit(self, n: int, draft: _Draft, memory: set[int], *, output: bool = False) -> None:
        facts, node = self.facts, self.nodes[n]
        if n in draft.body or n in draft.loads or node.op in ("carry", "number"):
            return
        if not output and self._loads(n, draft, memory):
            draft.loads.append(n)
            if not facts.is_leaf(n) and n not in memory and node.op != "boundary_gate":
                self._demand(n, draft)
            return
        if facts.is_leaf(n):
            draft.loads.append(n)
            return
        for a in node.args:
            self._visit(a, draft, memory)
        draft.body.append(n)

    def _loads(self, n: int, draft: _Draft, memory: set[int]) -> bool:
        facts, node, walk = self.facts, self.nodes[n], draft.walk
        if facts.is_leaf(n) or node.op == "boundary_gate":
            return True
        if self.facts.state(n):
            return False  # a state never goes through memory
        carried = bool(facts.depends[n] & CARRIES)
        if walk and n in walk.made:
            return False
        elementwise = self.facts.elementwise(n)
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
        here = node.op in facts.walk_ops and walk.split not in facts.contracts(n)
        return not (here and (node.op in ("score", "mask", "write") or self._cheaper_again(n, memory, draft)))

    def _shares_operands(self, n: int) -> bool:
        """Whether a walk's elementwise value is better formed again outside.

        It is where what it is made of has to leave the walk for another value as well.
        """
        made = self.maker[n].made if n in self.maker else frozenset[int]()
        return any(self._leaving(root, made, n) for root in self._elementwise_roots(n))

    def _elementwise_roots(self, n: int) -> set[int]:
        """The carried values that are not elementwise behind an elementwise one."""
        if not self.facts.elementwise(n):
            return {n}
        carried = [a for a in self.nodes[n].args if self.facts.depends[a] & CARRIES]
        return {root for a in carried for root in self._elementwise_roots(a)}

    def _leaving(self, n: int, made: frozenset[int], without: int) -> bool:
        """Whether n, or an elementwise value made of it in its walk other than through one, leaves it."""
        users = self._wanted_users(n)
        if n == without:
            return False
        return (
            n in self.targets
            or any(u not in made for u in users)
            or any(self._leaving(u, made, without) for u in users if self.facts.elementwise(u))
        )

    def _wanted_users(self, n: int) -> list[int]:
        return [u for u in self.facts.users[n] if u in self.needed]

    def _cheaper_again(self, n: int, memory: set[int], draft: _Draft) -> bool:
        again = sum(self._cost(a, memory, draft) for a in set(self.nodes[n].args))
        stored = self.facts.size(n) * (1 if n in memory else 2)
        return again <= _RECOMPUTE_IF_WITHIN * stored

    def _cost(self, n: int, memory: set[int], draft: _Draft) -> float:
        """Bytes (in elements) to have n in this kernel."""
        facts, node, walk = self.facts, self.nodes[n], draft.walk
        if node.op == "carry" or n in draft.body or n in draft.loads or (walk and n in walk.made):
            return 0.0
        if facts.is_leaf(n):
            return facts.size(n)
        stored = facts.size(n) * (1 if n in memory else 2)
        can_form = node.op in facts.walk_ops and (
            walk is None or (walk.split not in facts.contracts(n) and not facts.depends[n] & CARRIES)
        )
        if can_form and node.op in ("score", "mask", "write"):
            return 0.0
        if not can_form or (facts.depends[n] & CARRIES and OPS[node.op].kind not in ("elementwise", "shape")):
            return stored
        return min(stored, sum(self._cost(a, memory, draft) for a in set(node.args)))

    def _demand(self, n: int, draft: _Draft) -> None:
        """Somebody earlier must write n."""
        if n in self.maker and self.maker[n] is not draft.walk:
            self.maker[n].outputs.add(n)
        elif draft.walk is not None and not self.facts.depends[n] & CARRIES:
            draft.walk.prep.add(n)
        elif n not in self.savable:
            raise InternalError(f"nothing writes %{n} ({self.nodes[n].op}) for a later kernel")
