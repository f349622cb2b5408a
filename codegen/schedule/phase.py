"""The forward or the backward of a plan: finds its walks, then what each kernel reads, makes and writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from linalg_dsl.codegen.schedule.alone import split_prep
from linalg_dsl.codegen.schedule.facts import BOUNDARY, CARRIES, FORWARD, REVERSE, PlanFacts
from linalg_dsl.codegen.schedule.kernel_plan import Axis, Direction, Kernel
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import OPS

_Place = Literal["walk", "before", ""]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "reverse")
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
    given: frozenset[int] = frozenset()
    """What it takes from memory even where it could be formed again."""


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
        self.bits = facts.dependencies(memory)
        self.boundaries = facts.boundaries if direction == "reverse" else {}
        self.forced: set[int] = set()
        self.walks = self._find_walks()
        self.maker = {n: w for w in reversed(self.walks) for n in w.made}

    # -- which walks ------------------------------------------------------------------------------
    def _find_walks(self) -> list[_Walk]:
        facts = self.facts
        after = [after for _, after in facts.carry[self.final]]
        pairs = [x for b in self.boundaries.values() for x in b.pair_values]
        self.needed = self._needed([*self.targets, *after, *pairs])
        remaining = {n for n in self.needed if facts.depends[n] & CARRIES and self.nodes[n].op != "carry"}
        remaining -= {n for n in remaining if self.nodes[n].op in BOUNDARY}
        available = set(self.memory)
        walks: list[_Walk] = []
        missing: set[tuple[Direction, Axis]] = {(d, axis) for axis in self.boundaries for d in DIRECTIONS}
        while any(self._heavy(n) for n in remaining) or missing or not walks:
            walk = self._next_walk(remaining, available, walks, missing)
            walks.append(walk)
            missing.discard((walk.direction, walk.split))
            available |= {n for n in walk.made if facts.token_value(n)}
            remaining -= walk.made
        return walks

    def _next_walk(
        self,
        remaining: set[int],
        available: set[int],
        walks: list[_Walk],
        missing: set[tuple[Direction, Axis]],
    ) -> _Walk:
        """The walk that makes most of what it ever could; then one that only a boundary term needs."""
        best: tuple[bool, int, _Walk] | None = None
        taken = {(w.direction, w.split) for w in walks}
        for direction, split in _WALKS:
            if direction not in self.facts.carry or (direction, split) in taken:
                continue
            boundary = self.boundaries.get(split)
            if boundary and direction != boundary.keeper and (boundary.keeper, split) not in taken:
                continue  # the later walk takes what the earlier one has kept
            made = self._makeable(direction, split, available, remaining)
            if made is None:
                continue
            heavy = {n for n in made if self._heavy(n)}
            if heavy or (direction, split) in missing:
                complete = heavy >= self._could_make(direction, split, remaining)
                option = (complete, len(heavy), _Walk(direction, split, frozenset(made)))
                if best is None or option[:2] > best[:2]:
                    best = option
        if best is None:
            raise InternalError("no walk can make what is left: the recurrence contracts both axes at once")
        return best[2]

    def _makeable(
        self, direction: Direction, split: str, available: set[int], wanted: set[int]
    ) -> set[int] | None:
        """The wanted values that a walk can make (greatest fixed point over its carries); None: not those."""
        carries = self.facts.carry[direction]
        known: dict[int, _Place] = {leaf: "walk" for leaf, _ in carries}
        if not all(self._place(after, split, available, known, eager=True) for _, after in carries):
            return None
        for _, after in carries:
            self.forced |= self._forced(after, split, available)
        own: dict[int, bool] = {leaf: True for leaf, _ in carries}
        return {
            n
            for n in wanted
            if n not in available
            and self._of_carry(n, available, own)
            and (
                self._place(n, split, available, known, eager=self.eager) == "walk"
                or self._is_share(n, split, available, known)
            )
        }

    def _of_carry(self, n: int, available: set[int], own: dict[int, bool]) -> bool:
        """Whether a walk's own state is in a value; one that has nothing of it is formed where it is used."""
        if n not in own:
            own[n] = n not in available and any(self._of_carry(a, available, own) for a in self.nodes[n].args)
        return own[n]

    def _is_share(self, n: int, split: str, available: set[int], known: dict[int, _Place]) -> bool:
        """Whether a walk makes a sum over the axis that it splits: every block writes its share."""
        node = self.nodes[n]
        summed = node.op == "sum" and node.attr("axis") == split and node.axes == ("t",)
        return (
            summed
            and n not in self.targets
            and self._place(node.args[0], split, available, known, eager=self.eager) == "walk"
        )

    def _could_make(self, direction: str, split: str, remaining: set[int]) -> set[int]:
        """The state reads that this walk could make if every token value were given."""
        bit = FORWARD if direction == "forward" else REVERSE
        return {
            n
            for n in remaining
            if self._heavy(n)
            and split not in self.facts.contracts(n)
            and all(self.bits[a] & CARRIES == bit for a in self.nodes[n].args if self.facts.state(a))
        }

    def _place(
        self, n: int, split: str, available: set[int], known: dict[int, _Place], *, eager: bool
    ) -> _Place:
        """Where a value that a walk uses is made: by the walk, before it, or (empty) not in time."""
        if n in known:
            return known[n]
        facts, node = self.facts, self.nodes[n]
        place: _Place = ""
        if facts.is_leaf(n) or n in available or n in self.forced:
            place = "before"
        elif node.op not in ("carry", *BOUNDARY):
            if (
                split not in facts.contracts(n)
                and (node.op in facts.walk_ops or node.op == "read")
                and all(self._place(a, split, available, known, eager=eager) for a in node.args)
            ):
                place = "walk"
            elif (eager or node.axes == ("t", "s")) and self._ready(n, available):
                place = "before"  # a score is small beside the rows that it saves
        known[n] = place
        return place

    def _ready(self, n: int, available: set[int]) -> bool:
        """Whether a prep can make a value from what is available."""
        if not self.bits[n] & CARRIES or n in available:
            return True
        node = self.nodes[n]
        return node.op not in ("carry", *BOUNDARY) and all(self._ready(a, available) for a in node.args)

    def _forced(self, after: int, split: str, available: set[int]) -> set[int]:
        """Values that the carry's own update needs from a prep."""
        facts = self.facts
        out: set[int] = set()
        todo, seen = [after], set()
        while todo:
            n = todo.pop()
            if n in seen or facts.is_leaf(n) or n in available:
                continue
            seen.add(n)
            unfit = self.nodes[n].op not in facts.walk_ops or split in facts.contracts(n)
            if unfit and self._ready(n, available):
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
        final = [n for n in self.targets if n not in in_walk]
        self._collect(_Draft(final, None))
        for walk in reversed(self.walks):
            self._collect(self._walk_draft(walk))
            self._collect(_Draft(sorted(walk.prep), None))
        self._join_preps()
        return self._finish(final)

    def _join_preps(self) -> None:
        """What a later prep makes goes into an earlier one that is there anyway, if it can be made there."""
        available = set(self.memory)
        for i, walk in enumerate(self.walks):
            for later in self.walks[i + 1 :] if walk.prep else ():
                early = {n for n in later.prep if self._ready(n, available)}
                later.prep -= early
                walk.prep |= early
            self._sum_at_once(walk, available)
            available |= walk.prep | {n for n in walk.made if self.facts.token_value(n)}

    def _sum_at_once(self, walk: _Walk, available: set[int]) -> None:
        """Sums over the [C, C] values that a prep makes are made there, not from memory in the last one."""
        tiles = {n for n in walk.prep if self.nodes[n].axes == ("t", "s")}
        for n in self.needed if tiles else ():
            if self.nodes[n].op == "span_sum" and self._ready(n, available) and tiles & self._terms(n):
                walk.prep.add(n)

    def _terms(self, n: int) -> set[int]:
        """The values of which a sum is made by elementwise ops alone."""
        found: set[int] = set()
        todo = list(self.nodes[n].args)
        while todo:
            a = todo.pop()
            found.add(a)
            if self.facts.elementwise(a):
                todo.extend(self.nodes[a].args)
        return found

    def _walk_draft(self, walk: _Walk) -> _Draft:
        after = (after for _, after in self.facts.carry[walk.direction])
        return _Draft([*sorted(walk.outputs), *self._for_boundary(walk), *after], walk)

    def _for_boundary(self, walk: _Walk) -> tuple[int, ...]:
        boundary = self.boundaries.get(walk.split)
        return boundary.needs(walk.direction) if boundary else ()

    def _finish(self, final: list[int]) -> list[Kernel]:
        """Second pass, in order, knowing what is in memory; stores that nobody reads are dropped."""
        plans: list[tuple[_Walk | None, list[int], set[int], frozenset[int]]] = []
        """Its stores, what is in memory before, and what it takes from there in any case."""
        memory = set(self.memory)
        for walk in self.walks:
            prep = sorted(walk.prep - memory)
            for part, given in split_prep(self.facts, prep, memory) if prep else ():
                plans.append((None, part, set(memory), given))
                memory |= set(part)
            plans.append((walk, sorted(walk.outputs), set(memory), frozenset()))
            memory |= walk.outputs
            boundary = self.boundaries.get(walk.split)
            if boundary and walk.direction != boundary.keeper:
                memory.update(boundary.nodes)
        if final:
            plans.append((None, final, memory, frozenset()))
        kept: list[Kernel] = []
        read: set[int] = set()
        results = set(self.targets)
        for made_by, wanted, before, given in reversed(plans):
            stores = [n for n in wanted if n in read or n in results]
            if made_by is None and not stores:
                continue
            draft = _Draft(stores, None, given=given)
            if made_by:
                dropped = made_by.outputs - set(stores) - set(self._for_boundary(made_by))
                draft = self._walk_draft(made_by)
                draft.outputs = [n for n in draft.outputs if n not in dropped]
            self._collect(draft, before)
            read |= set(draft.loads)
            kept.append(self._kernel(draft, stores))
        return self._named(kept[::-1])

    def _kernel(self, draft: _Draft, stores: list[int]) -> Kernel:
        walk = draft.walk
        if walk is None:
            return Kernel("", "prep", tuple(draft.loads), tuple(draft.body), tuple(stores))
        return Kernel(
            "", "walk", tuple(draft.loads), tuple(draft.body), tuple(stores), walk.direction, walk.split,
            self.facts.carry[walk.direction], self.boundaries.get(walk.split),
        )  # fmt: skip

    def _named(self, kernels: list[Kernel]) -> list[Kernel]:
        out: list[Kernel] = []
        last = len(kernels) - 1
        several = sum(k.family == "walk" for k in kernels) > 1
        for i, k in enumerate(kernels):
            if k.family == "walk" and self.prefix == "fwd":
                suffix = f"walk_{k.split}".lower() if several else "walk"
            elif k.family == "walk":
                suffix = f"{k.direction}_{k.split}".lower()
            else:
                suffix = "prep" if i < last or self.prefix == "fwd" else "gradients"
            name = f"{self.prefix}_{suffix}"
            if any(name == o.name for o in out):
                name = f"{name}_{i}"
            out.append(replace(k, name=name))
        return out

    # -- operands: load or form again -----------------------------------------------------------------
    def _collect(self, draft: _Draft, memory: set[int] | None = None) -> None:
        known = self.memory if memory is None else memory
        for n in draft.outputs:
            # what the boundary term multiplies may be made elsewhere: then it is an operand like any other
            made_here = bool(self.bits[n] & CARRIES) and self.maker.get(n, draft.walk) is draft.walk
            self._visit(n, draft, known, output=draft.walk is None or made_here)

    def _visit(self, n: int, draft: _Draft, memory: set[int], *, output: bool = False) -> None:
        facts, node = self.facts, self.nodes[n]
        if n in draft.body or n in draft.loads or node.op in ("carry", "number"):
            return
        if not output and self._loads(n, draft, memory):
            draft.loads.append(n)
            if not facts.is_leaf(n) and n not in memory and node.op not in BOUNDARY:
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
        if facts.is_leaf(n) or node.op in BOUNDARY or n in draft.given:
            return True
        if self.facts.state(n):
            return False  # a state never goes through memory
        carried = self._carried(n)
        if walk and n in walk.made:
            return False
        elementwise = self.facts.elementwise(n) and self._elementwise_roots(n) != {n}
        small = node.axes == ("t", "s")  # one load instead of several
        if walk is None:
            if not carried:
                return n in memory and (small or not elementwise)
            if n not in self.maker and n not in memory:
                return False
            return small or not (elementwise and self._shares_operands(n))
        if n in memory and (small or not elementwise):
            return True
        here = node.op in facts.walk_ops and walk.split not in facts.contracts(n)
        if n in self.maker:
            return not (elementwise and self._shares_operands(n))
        if carried:
            return small or not here
        return not (here and (node.op in ("score", "mask", "write") or self._cheaper_again(n, memory, draft)))

    def _carried(self, n: int) -> bool:
        """Whether a value is made of a state, or was and now lies in memory."""
        bits = self.facts.depends if n in self.memory else self.bits
        return bool(bits[n] & CARRIES)

    def _shares_operands(self, n: int) -> bool:
        """Whether a walk's elementwise value is better formed again outside.

        It is where what it is made of has to leave the walk for another value as well.
        """
        roots = self._elementwise_roots(n)
        if (
            n in self.savable
            and len(roots) == 1
            and all(a in roots or len(self.nodes[a].axes) < 2 for a in self.nodes[n].args)
        ):
            return True  # a saved value times a number: one of both is enough
        made = self.maker[n].made if n in self.maker else frozenset[int]()
        return any(self._leaving(root, made, n) for root in roots)

    def _elementwise_roots(self, n: int) -> set[int]:
        """The carried values behind an elementwise one that are not elementwise, or are as good."""
        if not self.facts.elementwise(n):
            return {n}
        carried = [a for a in self.nodes[n].args if self._carried(a)]
        found = {root for a in carried for root in self._elementwise_roots(a)}
        # a sum of several saved values is less to keep than they are
        return {n} if n in self.savable and self.nodes[n].op == "add" and len(found) > 1 else found

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
            walk is None or (walk.split not in facts.contracts(n) and not self._carried(n))
        )
        if can_form and node.op in ("score", "mask", "write"):
            return 0.0
        if not can_form or (self._carried(n) and OPS[node.op].kind not in ("elementwise", "shape")):
            return stored
        return min(stored, sum(self._cost(a, memory, draft) for a in set(node.args)))

    def _demand(self, n: int, draft: _Draft) -> None:
        """Somebody earlier must write n."""
        if n in self.maker and self.maker[n] is not draft.walk:
            self.maker[n].outputs.add(n)
        elif draft.walk is not None and n not in self.memory:
            draft.walk.prep.add(n)
        elif n not in self.savable:
            raise InternalError(f"nothing writes %{n} ({self.nodes[n].op}) for a later kernel")
