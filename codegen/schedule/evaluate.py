"""Runs a kernel plan in PyTorch: kernel after kernel, chunk after chunk, block after block.

Kernels meet in memory only, as on a GPU: a kernel sees what it loads, its own carry and what it computes.
A walk is run once for every block of its split axis, so a plan that contracts that axis gives wrong numbers
here as well. The last chunk may be shorter than the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.schedule.evaluate_ops import apply_lowered
from linalg_dsl.codegen.schedule.kernel_plan import Boundary, BoundaryProducts, Kernel, KernelPlan, shares
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.adjoint import gradient_name
from linalg_dsl.planner.evaluate_ops import align, expand
from linalg_dsl.planner.outputs import each, one_or_all
from linalg_dsl.planner.plan import Node

_STATE_DIM = {"K": -2, "V": -1}
Values = dict[int, Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class KernelResults:
    """What one call gives: o [B, T, H, V] (of several outputs a tuple), the states, and gradients by name.

    ``gradients`` holds the initial state's as ``"initial_state"``, of several ``"initial_state S"``, and is
    empty where the plan has no backward; a tensor that nothing depends on is absent.
    """

    output: Any
    final_states: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    @property
    def final_state(self) -> Tensor:
        """The only state."""
        (state,) = self.final_states.values()
        return state


def run_kernels(
    plan: KernelPlan,
    tensors: Mapping[str, Tensor],
    initial_state: Tensor | Mapping[str, Tensor] | None = None,
    chunk_size: int = 64,
    d_o: Any = None,
    d_state: Tensor | Mapping[str, Tensor] | None = None,
    consts: Mapping[str, float] | None = None,
    *,
    exact: bool = True,
    segment: int = 8,
    blocks: int = 2,
) -> KernelResults:
    """The forward and, if the plan has one, the backward, in the tensors' dtype (float64 to compare).

    tensors: inputs [B, T, H, ...] and params [H, ...] by name; initial_state [B, H, K, V], of several states
    by name; ``d_o`` and ``d_state`` None are zero. ``exact``: how the boundary term of a gate gradient is
    formed (``Boundary``); carried, it is exact at every ``segment``-th chunk boundary. ``blocks``: into
    how many a walk cuts its split axis, at most.
    """
    call = Call(plan, tensors, dict(consts or {}), chunk_size)
    names = [name for name, direction, _, _ in plan.plan.carries if direction == "forward"]
    states = call.by_name(names, initial_state)
    run = Run(call, exact or must_be_exact(plan), segment, blocks)
    final = states
    for kernel in plan.forward:
        final = run.kernel(kernel, states) or final
    o = call.outputs()
    if not plan.backward:
        return KernelResults(o, dict(zip(names, final, strict=True)), {})
    call.take_cotangents(o, d_o)
    # in the order of the plan's reverse carries
    back = [name for name, direction, _, _ in plan.plan.carries if direction == "reverse"]
    d_last = call.by_name(back, d_state)
    d_first = d_last
    for kernel in plan.backward:
        after = run.kernel(kernel, states if kernel.direction == "forward" else d_last)
        if after and kernel.direction == "reverse":
            d_first = after
    labels = ["initial_state" if len(back) == 1 else f"initial_state {name}" for name in back]
    gradients = {**call.gradients(), **dict(zip(labels, d_first, strict=True))}
    return KernelResults(o, dict(zip(names, final, strict=True)), gradients)


def must_be_exact(plan: KernelPlan) -> bool:
    return any(k.boundary is not None and k.boundary.exact for k in plan.backward)


@dataclass
class Call:
    """Memory: declared tensors, and what kernels stored, by (node or name, chunk)."""

    plan: KernelPlan
    tensors: Mapping[str, Tensor]
    consts: Mapping[str, float]
    chunk_size: int
    cotangents: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[tuple[int | str, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        timed = next((n for n in self.nodes if n.op == "input"), None)
        if timed is None:
            raise InternalError(f"plan {self.plan.plan.name} has no input")
        self.like = self.tensors[str(timed.attr("name"))]
        self.batch, self.length, self.heads = self.like.shape[:3]
        self.bounds = [
            (a, min(a + self.chunk_size, self.length)) for a in range(0, self.length, self.chunk_size)
        ]
        self.wide = {axis: self._size(axis) for axis in ("K", "V")}

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.plan.plan.nodes

    def _size(self, axis: str) -> int:
        for node in self.nodes:
            if node.op in ("input", "param") and axis in node.axes:
                return self.tensors[str(node.attr("name"))].shape[-1]
        raise InternalError(f"no input of plan {self.plan.plan.name} has the axis {axis}")

    def sizes(self, chunk: int) -> dict[str, int]:
        start, end = self.bounds[chunk]
        return {"t": end - start, "s": end - start, **self.wide}

    def zero_state(self) -> Tensor:
        return self.like.new_zeros(self.batch, self.heads, self.wide["K"], self.wide["V"])

    def by_name(self, names: Sequence[str], given: Tensor | Mapping[str, Tensor] | None) -> list[Tensor]:
        """The states of these names, zero where none is given."""
        zero = self.zero_state()
        known = {names[0]: given} if isinstance(given, Tensor) else given or {}
        return [known.get(name, zero) for name in names]

    def load(self, n: int, chunk: int) -> Tensor:
        """[B, H, *axes] of one chunk; raises ``InternalError`` for a value that nobody wrote."""
        node = self.nodes[n]
        match node.op:
            case "input" | "param":
                return self._part(self.tensors[str(node.attr("name"))], node, chunk)
            case "const":
                return self.like.new_tensor(self.consts[str(node.attr("name"))])
            case "cotangent":
                if not self.cotangents:
                    raise InternalError("a forward kernel reads the gradient of an output")
                return self._part(self.cotangents[str(node.attr("name"))], node, chunk)
            case _:
                if (n, chunk) not in self.stored:
                    raise InternalError(f"%{n} ({node.op}) of chunk {chunk} is read before it is written")
                return self.stored[n, chunk]

    def store(self, key: int | str, chunk: int, value: Tensor) -> None:
        if (key, chunk) in self.stored:
            raise InternalError(f"%{key} of chunk {chunk} is written twice")
        self.stored[key, chunk] = value

    @property
    def named(self) -> list[tuple[str, int]]:
        """The outputs and their nodes: what results there are but gradients of leaves."""
        leaves = {gradient_name(n) for n in self.nodes if n.op in ("input", "param")}
        return [(name, n) for name, n in self.plan.results if name not in leaves]

    def outputs(self) -> Any:
        return one_or_all([self.joined(n) for _, n in self.named])

    def take_cotangents(self, o: Any, d_o: Any) -> None:
        """The gradients of the outputs, zeros where none are given."""
        given = tuple(map(torch.zeros_like, each(o))) if d_o is None else each(d_o)
        self.cotangents = {name: d for (name, _), d in zip(self.named, given, strict=True)}

    def joined(self, n: int) -> Tensor:
        """[B, T, H, ...] of a token value that is a result; it may be a leaf, which nobody stores."""
        node = self.nodes[n]
        rest = [self.wide[a] for a in node.axes if a != "t"]
        if not self.bounds:
            return self.like.new_zeros(self.batch, 0, self.heads, *rest)
        chunks = [
            self.load(n, c).expand(self.batch, self.heads, end - start, *rest)
            for c, (start, end) in enumerate(self.bounds)
        ]
        return torch.cat([x.transpose(1, 2) for x in chunks], dim=1)

    def gradients(self) -> dict[str, Tensor]:
        """The results of the backward, summed over chunks and batch for params, rows put together."""
        leaves = {gradient_name(n): n for n in self.nodes if n.op in ("input", "param")}
        found: dict[str, Tensor] = {}
        for result, n in self.plan.results:
            leaf = leaves.get(result)
            if leaf is None:
                continue
            name, row = str(leaf.attr("name")), leaf.attr("row")
            whole = found.setdefault(name, torch.zeros_like(self.tensors[name]))
            if leaf.op == "input":
                part = whole if row is None else whole.select(3, int(str(row)))
                part.copy_(self.joined(n))
                continue
            part = whole if row is None else whole.select(1, int(str(row)))
            for chunk in range(len(self.bounds)):
                part += self.load(n, chunk).expand(self.batch, self.heads, *part.shape[1:]).sum(0)
        return found

    def _part(self, tensor: Tensor, node: Node, chunk: int) -> Tensor:
        """[B, T, H, (n,) D] -> [B, H, C, D] of one chunk; a param is [1, H, D]."""
        row = dict(node.attrs).get("row")
        if node.op == "param":
            return (tensor if row is None else tensor.select(1, int(str(row))))[None]
        start, end = self.bounds[chunk]
        rows = tensor if row is None else tensor.select(3, int(str(row)))
        return rows[:, start:end].transpose(1, 2)


@dataclass(frozen=True)
class Run:
    """Runs kernels on the memory of a call."""

    call: Call
    exact: bool
    segment: int
    blocks: int

    def kernel(
        self,
        kernel: Kernel,
        states: Sequence[Tensor],
        span: range | None = None,
        wide: Mapping[str, int] | None = None,
    ) -> list[Tensor]:
        """All programs of a kernel; what a walk hands on from its last chunk, nothing of a prep.

        ``span``: the chunks that a walk goes over, None for all; ``wide``: K and V where the states are not
        those of the call.
        """
        call = self.call
        chunks = range(len(call.bounds))
        if kernel.family == "prep":
            for chunk in chunks:
                values: Values = {n: call.load(n, chunk) for n in kernel.loads}
                self.body(kernel, values, call.sizes(chunk))
                for n in kernel.stores:
                    call.store(n, chunk, _tensor(values[n]))
            return []
        split = kernel.split
        if split is None:
            raise InternalError(f"the walk {kernel.name} has no split axis")
        after = []
        parts: list[dict[tuple[int | str, int], Tensor]] = []
        span, wide = chunks if span is None else span, wide or call.wide
        for low, count in _blocks(wide[split], self.blocks):
            block = _Block(self, kernel, split, low, count, span, wide)
            after.append(block.walk([state.narrow(_STATE_DIM[split], low, count) for state in states]))
            parts.append(block.stored)
        shared = shares(call.nodes, kernel)
        for key, chunk in parts[0]:
            axes = _axes(call.nodes, key, split)
            pieces = [p[key, chunk] for p in parts]
            if split in axes:
                whole = torch.cat(pieces, axes.index(split) - len(axes))
            elif key in shared:
                whole = torch.stack(pieces).sum(0)
            else:  # every block has the same value: the first one writes it
                whole = pieces[0]
            call.store(key if isinstance(key, int) else f"{key}_{split}", chunk, whole)
        return [torch.cat(pieces, dim=_STATE_DIM[split]) for pieces in zip(*after, strict=True)]

    def body(self, kernel: Kernel, values: Values, sizes: Mapping[str, int]) -> None:
        nodes = self.call.nodes
        for n in kernel.body:
            node = nodes[n]
            args = [self._operand(kernel, values, n, a) for a in node.args]
            values[n] = apply_lowered(node, args, [nodes[a].axes for a in node.args], sizes)

    def _operand(self, kernel: Kernel, values: Values, n: int, a: int) -> Tensor | tuple[Tensor, ...]:
        node = self.call.nodes[a]
        if node.op == "number":
            return self.call.like.new_tensor(float(str(node.attr("value"))))
        if a not in values:
            raise InternalError(f"{kernel.name} computes %{n} from %{a} ({node.op}), which it does not have")
        return values[a]


@dataclass
class _Block:
    """One program of a walk, for every sequence and head at once: entries low .. low + count of an axis."""

    run: Run
    kernel: Kernel
    split: str
    low: int
    count: int
    span: range
    wide: Mapping[str, int]
    stored: dict[tuple[int | str, int], Tensor] = field(default_factory=dict)
    carried: Tensor | None = None
    """h = sum S o dS at the boundary that the walk has come to: what the boundary term is carried by."""

    def walk(self, states: list[Tensor]) -> list[Tensor]:
        call, kernel = self.run.call, self.kernel
        if not kernel.carries:
            raise InternalError(f"the walk {kernel.name} has no carry")
        for chunk in self.span if kernel.direction == "forward" else reversed(self.span):
            values: Values = {n: self._cut(n, call.load(n, chunk)) for n in kernel.loads}
            values |= {leaf: state for (leaf, _), state in zip(kernel.carries, states, strict=True)}
            sizes = {**call.sizes(chunk), **self.wide, self.split: self.count}
            self.run.body(kernel, values, sizes)
            for n in kernel.stores:
                self.stored[n, chunk] = _tensor(values[n])
            boundary = kernel.boundary
            if isinstance(boundary, BoundaryProducts):
                self._products(boundary, values, chunk)
            elif boundary:
                self._boundary(boundary, values, states[0], chunk)
            states = [self._next(values, after, sizes) for _, after in kernel.carries]
            keeps = isinstance(boundary, Boundary) and kernel.direction == boundary.keeper
            if keeps and self._mark_after(chunk):
                self.stored["marks", chunk] = states[0]
        return states

    def _next(self, values: Values, after: int, sizes: Mapping[str, int]) -> Tensor:
        node, like = self.run.call.nodes[after], self.run.call.like
        if node.op == "number":
            values[after] = like.new_tensor(float(str(node.attr("value"))))
        return expand(_tensor(values[after]), node.axes, ("K", "V"), sizes)

    def _cut(self, n: int, value: Tensor) -> Tensor:
        axes = self.run.call.nodes[n].axes
        if self.split not in axes:
            return value
        return value.narrow(axes.index(self.split) - len(axes), self.low, self.count)

    # -- the boundary term ------------------------------------------------------------------------------
    def _mark_after(self, chunk: int) -> bool:
        """Whether the state that the earlier walk has after a chunk is kept."""
        if self.run.exact:
            return False
        if self.kernel.boundary and self.kernel.boundary.keeper == "forward":
            return self._ends_segment(chunk)
        return (chunk - self.span.start) % self.run.segment == 0

    def _ends_segment(self, chunk: int) -> bool:
        return chunk == self.span[-1] or (chunk + 1 - self.span.start) % self.run.segment == 0

    def _products(self, boundary: BoundaryProducts, values: Values, chunk: int) -> None:
        """The earlier walk keeps its values, the later multiplies."""
        if self.kernel.direction == boundary.keeper:
            for n in boundary.kept:
                self.stored[f"marks_{n}", chunk] = _tensor(values[n])
            return
        over = _STATE_DIM["V" if boundary.axis == "K" else "K"]
        mine, theirs = (2, 1) if boundary.keeper == "forward" else (1, 2)
        for term in boundary.terms:
            kept = self._kept(f"marks_{term[theirs]}", chunk)
            self.stored[term[0], chunk] = (kept * _tensor(values[term[mine]])).sum(over)

    def _boundary(self, boundary: Boundary, values: Values, state: Tensor, chunk: int) -> None:
        """``state`` is the one before the chunk in the direction of the walk: S_0, or dS_C."""
        call, exact = self.run.call, self.run.exact
        over = _STATE_DIM["V" if boundary.axis == "K" else "K"]
        direction = self.kernel.direction
        assert direction is not None
        taken = _tensor(values[boundary.cotangent]) if direction == "reverse" else state
        pairs = _token_sum(values, boundary.pairs(direction))
        if direction == boundary.keeper:
            if exact:
                self.stored["marks", chunk] = taken
            else:
                self.stored["norms", chunk] = taken.square().sum(over).sqrt()
                self.stored["moved", chunk] = pairs
            return
        total = align(_tensor(values[boundary.total]), call.nodes[boundary.total].axes, (boundary.axis,))
        decayed = taken
        for n in boundary.others:
            decayed = decayed * align(_tensor(values[n]), call.nodes[n].axes, ("K", "V"))
        if exact:
            self.stored[boundary.node, chunk] = total * (self._kept("marks", chunk) * decayed).sum(over)
            return
        begins = self._ends_segment(chunk)
        if direction == "forward":
            begins = (chunk - self.span.start) % self.run.segment == 0
        if begins:
            self.carried = (self._kept("marks", chunk) * state).sum(over)
        if self.carried is None:
            raise InternalError(f"{self.kernel.name} carries a boundary term that no chunk began")
        limit = total * self._kept("norms", chunk) * decayed.square().sum(over).sqrt()
        bound = (self.carried - pairs).clamp(-limit, limit)
        self.stored[boundary.node, chunk] = bound
        self.carried = bound + self._kept("moved", chunk)

    def _kept(self, name: str, chunk: int) -> Tensor:
        """This block's part of what the earlier walk recorded."""
        stored = self.run.call.stored
        if (f"{name}_{self.split}", chunk) not in stored:
            raise InternalError(f"{self.kernel.name} reads {name} of chunk {chunk}, which no walk recorded")
        value = stored[f"{name}_{self.split}", chunk]
        return value.narrow(_STATE_DIM[self.split] if name.startswith("marks") else -1, self.low, self.count)


def _token_sum(values: Values, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """[.., D]: the sum over tokens of x o dx over the pairs."""
    products = [_tensor(values[x]) * _tensor(values[dx]) for x, dx in pairs]
    return torch.stack([p.sum(-2) for p in products]).sum(0)


def _axes(nodes: Sequence[Node], key: int | str, split: str) -> tuple[str, ...]:
    if isinstance(key, int):
        return nodes[key].axes
    return ("K", "V") if key.startswith("marks") else (split,)


def _blocks(size: int, count: int) -> list[tuple[int, int]]:
    """(first entry, entries) of at most ``count`` blocks of an axis."""
    each = max(1, -(-size // count))
    return [(low, min(each, size - low)) for low in range(0, size, each)]


def _tensor(value: Tensor | tuple[Tensor, ...]) -> Tensor:
    if not isinstance(value, Tensor):
        raise InternalError("a value of several results is used through its picks only")
    return value
