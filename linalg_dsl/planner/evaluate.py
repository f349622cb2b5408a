"""Runs plans in PyTorch: one chunk, or a whole sequence chunk by chunk, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.adjoint import gradient_name
from linalg_dsl.planner.evaluate_ops import apply_op, apply_solve, expand
from linalg_dsl.planner.outputs import each, one_or_all
from linalg_dsl.planner.plan import ChunkPlan, Node

LeafKey = tuple[str, str, str | int | None]
"""(op, name, row of an input, or direction of a carry, or None)."""
LEAVES = ("input", "param", "const", "carry", "cotangent")


def leaf_key(node: Node) -> LeafKey:
    """What identifies the value of a leaf: ("input", "k", None), ("carry", "S", "forward") ..."""
    attrs = dict(node.attrs)
    extra = attrs.get("direction") if node.op == "carry" else attrs.get("row")
    return (node.op, str(attrs["name"]), extra if isinstance(extra, str) else _row(extra))


@dataclass(frozen=True)
class ChunkValues:
    """What a chunk gives: outputs by name, next carries by (state, direction), and every node."""

    outputs: dict[str, Tensor]
    carries: dict[tuple[str, str], Tensor]
    nodes: tuple[Tensor | tuple[Tensor, ...], ...]


def run_chunk(
    plan: ChunkPlan, values: Mapping[LeafKey, Tensor], sizes: Mapping[str, int] | None = None
) -> ChunkValues:
    """Evaluates a plan for one chunk.

    ``values`` has a tensor ``[*batch, *axes]`` for each leaf (numbers excepted), in one floating dtype;
    batch dimensions may be anything that broadcasts. ``sizes`` gives those axes (t, K, V) that no leaf has.
    Raises ``InternalError`` for a missing leaf or one
    whose size differs from that of the same axis elsewhere.
    """
    sizes = _sizes(plan, values, sizes or {})
    some = next(iter(values.values()))
    results: list[Tensor | tuple[Tensor, ...]] = []
    for node in plan.nodes:
        if node.op == "number":
            value = torch.tensor(float(str(node.attr("value"))), dtype=some.dtype, device=some.device)
            results.append(value)
        elif node.op == "eye":
            results.append(torch.eye(sizes[node.axes[0]], dtype=some.dtype, device=some.device))
        elif node.op in LEAVES:
            results.append(values[leaf_key(node)])
        elif node.op == "pick":
            results.append(results[node.args[0]][int(str(node.attr("index")))])
        else:
            args = [_tensor(results[a]) for a in node.args]
            axes = [plan.nodes[a].axes for a in node.args]
            apply = apply_solve if node.op in ("solve", "solve_t") else apply_op
            results.append(apply(node, args, axes, sizes))

    def whole(i: int, like: int | None = None) -> Tensor:
        node = plan.nodes[i]
        want = node.axes if like is None else plan.nodes[like].axes
        return expand(_tensor(results[i]), node.axes, want, sizes)

    return ChunkValues(
        {name: whole(i) for name, i in plan.outputs},
        {(name, direction): whole(after, leaf) for name, direction, leaf, after in plan.carries},
        tuple(results),
    )


def run_plan(
    forward: ChunkPlan,
    tensors: Mapping[str, Tensor | float],
    initial_state: Tensor | Mapping[str, Tensor] | None = None,
    chunk_size: int = 64,
) -> tuple[Any, Any]:
    """(o [B, T, H, V], final state [B, H, K, V]) of a forward plan; of several outputs a tuple.

    Of several states there are as many final ones, by name. ``tensors`` by name: inputs [B, T, H, ...],
    params [H, ...], consts numbers. Everything is computed in the tensors' dtype. The last
    chunk may be shorter than ``chunk_size``.
    """
    sequence = ChunkSequence(forward, tensors, chunk_size)
    outputs, states = sequence.forward(sequence.initial(initial_state))
    last = states[-1]
    o = one_or_all([sequence.join(outputs, name) for name, _ in forward.outputs])
    return o, last if len(last) > 1 else next(iter(last.values()))


def run_backward(
    backward: ChunkPlan,
    forward: ChunkPlan,
    tensors: Mapping[str, Tensor | float],
    initial_state: Tensor | Mapping[str, Tensor] | None = None,
    chunk_size: int = 64,
    d_o: Any = None,
    d_state: Tensor | Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The gradients by name, and the initial state's as ``"initial_state"``, of several each as
    ``"initial_state S"``.

    ``d_o`` and ``d_state``: gradients of output (of several a tuple) and final state, None for zero. A
    gradient has the shape of its tensor; a tensor that nothing depends on is absent.
    """
    sequence = ChunkSequence(forward, tensors, chunk_size)
    names = [name for name, _, _, _ in forward.carries]
    _, states = sequence.forward(sequence.initial(initial_state))
    given = {names[0]: d_state} if isinstance(d_state, Tensor) else dict(d_state or {})
    d_states = {name: given.get(name, torch.zeros_like(states[-1][name])) for name in names}
    if d_o is None:
        d_o = tuple(sequence.zeros(forward.nodes[i]) for _, i in forward.outputs)
    grads = _Gradients(sequence)
    for index in reversed(range(len(sequence.bounds))):
        values = sequence.leaves(backward, index)
        for name in names:
            values[("carry", name, "forward")] = states[index][name]
            values[("carry", name, "reverse")] = d_states[name]
        for (output, _), d in zip(forward.outputs, each(d_o), strict=True):
            values[("cotangent", output, None)] = sequence.cut(d, index)
        chunk = run_chunk(backward, values, sequence.sizes(index))
        d_states = {name: chunk.carries[(name, "reverse")] for name in names}
        grads.add(index, chunk.outputs)
    if len(names) == 1:
        return {**grads.found, "initial_state": d_states[names[0]]}
    return {**grads.found, **{f"initial_state {name}": d for name, d in d_states.items()}}


class ChunkSequence:
    """The tensors of one call, cut into chunks."""

    def __init__(self, plan: ChunkPlan, tensors: Mapping[str, Tensor | float], chunk_size: int) -> None:
        self.plan = plan
        self.tensors = tensors
        timed = next((n for n in plan.nodes if n.op == "input"), None)
        if timed is None:
            raise InternalError(f"plan {plan.name} has no input")
        first = tensors[str(timed.attr("name"))]
        assert isinstance(first, Tensor)
        self.like = first
        self.batch, self.length, self.heads = first.shape[:3]
        self.bounds = [(a, min(a + chunk_size, self.length)) for a in range(0, self.length, chunk_size)]

    def size(self, axis: str) -> int:
        """The size of K or V."""
        for node in self.plan.nodes:
            if node.op in ("input", "param") and axis in node.axes:
                tensor = self.tensors[str(node.attr("name"))]
                assert isinstance(tensor, Tensor)
                return tensor.shape[-1]
        raise InternalError(f"no input of plan {self.plan.name} has the axis {axis}")

    def sizes(self, index: int) -> dict[str, int]:
        start, end = self.bounds[index]
        big = {a for n in self.plan.nodes if n.op in ("input", "param") for a in n.axes} & {"K", "V"}
        return {"t": end - start, **{axis: self.size(axis) for axis in sorted(big)}}

    def initial(self, given: Tensor | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        states: dict[str, Tensor] = {}
        for name, _, leaf, _ in self.plan.carries:
            if given is None:
                axes = self.plan.nodes[leaf].axes
                states[name] = self.like.new_zeros(self.batch, self.heads, *map(self.size, axes))
            else:
                states[name] = given if isinstance(given, Tensor) else given[name]
        return states

    def forward(self, states: dict[str, Tensor]) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Outputs of each chunk, and the states at every chunk boundary."""
        boundary, outputs = [states], []
        for index in range(len(self.bounds)):
            values = self.leaves(self.plan, index)
            for name, state in boundary[-1].items():
                values[("carry", name, "forward")] = state
            chunk = run_chunk(self.plan, values, self.sizes(index))
            outputs.append(chunk.outputs)
            boundary.append({name: chunk.carries[(name, "forward")] for name in states})
        return outputs, boundary

    def cut(self, x: Tensor, index: int) -> Tensor:
        """[B, T, H, ...] -> [B, H, C, ...]."""
        start, end = self.bounds[index]
        return x[:, start:end].transpose(1, 2)

    def leaves(self, plan: ChunkPlan, index: int) -> dict[LeafKey, Tensor]:
        """The declared inputs, params and consts of one chunk."""
        values: dict[LeafKey, Tensor] = {}
        for node in plan.nodes:
            if node.op not in ("input", "param", "const"):
                continue
            key = leaf_key(node)
            tensor = self.tensors[key[1]]
            if not isinstance(tensor, Tensor):
                values[key] = self.like.new_tensor(tensor)
                continue
            values[key] = self.chunk_of(tensor, node, index)
        return values

    def chunk_of(self, tensor: Tensor, node: Node, index: int) -> Tensor:
        """The part of a declared tensor, or of its gradient, that is the value of a leaf in one chunk."""
        row = leaf_key(node)[2]
        if row is not None:
            tensor = tensor.select(3 if node.op == "input" else 1, int(row))
        return self.cut(tensor, index) if node.op == "input" else tensor

    def zeros(self, node: Node) -> Tensor:
        rest = [self.size(a) for a in node.axes if a != "t"]
        return self.like.new_zeros(self.batch, self.length, self.heads, *rest)

    def join(self, chunks: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
        """[B, H, C, ...] of each chunk -> [B, T, H, ...]."""
        node = self.plan.nodes[dict(self.plan.outputs)[name]]
        if not chunks:
            return self.zeros(node)
        whole = [c[name].expand(self.batch, self.heads, *c[name].shape[-len(node.axes) :]) for c in chunks]
        return torch.cat([x.transpose(1, 2) for x in whole], dim=1)


class _Gradients:
    """Collects the gradients of chunks into tensors of the shapes of what was given."""

    def __init__(self, sequence: ChunkSequence) -> None:
        self.sequence = sequence
        self.leaves = {gradient_name(n): n for n in sequence.plan.nodes if n.op in ("input", "param")}
        self.found: dict[str, Tensor] = {}

    def add(self, index: int, outputs: Mapping[str, Tensor]) -> None:
        for output, value in outputs.items():
            leaf = self.leaves[output]
            name = str(leaf.attr("name"))
            whole = self.found.get(name)
            if whole is None:
                tensor = self.sequence.tensors[name]
                assert isinstance(tensor, Tensor)
                whole = self.found[name] = torch.zeros_like(tensor)
            part = self.sequence.chunk_of(whole, leaf, index)
            if leaf.op == "input":
                part.copy_(value)
            else:
                batch = (self.sequence.batch, self.sequence.heads)
                part += value.expand(*batch, *part.shape[1:]).sum(0)


def _sizes(plan: ChunkPlan, values: Mapping[LeafKey, Tensor], known: Mapping[str, int]) -> dict[str, int]:
    sizes = dict(known)
    if "t" in sizes:
        sizes["s"] = sizes["t"]
    for node in plan.nodes:
        if node.op not in LEAVES:
            continue
        key = leaf_key(node)
        if key not in values:
            raise InternalError(f"plan {plan.name} needs a value for {key}")
        shape = values[key].shape[values[key].dim() - len(node.axes) :]
        for axis, size in zip(node.axes, shape, strict=True):
            for same in ("t", "s") if axis in ("t", "s") else (axis,):
                if sizes.setdefault(same, size) != size:
                    raise InternalError(f"{key} has {size} along {axis}, another leaf {sizes[same]}")
    return sizes


def _tensor(value: Tensor | tuple[Tensor, ...]) -> Tensor:
    if not isinstance(value, Tensor):
        raise InternalError("a solve is used through its picks only")
    return value


def _row(value: object) -> int | None:
    return None if value is None else int(str(value))
