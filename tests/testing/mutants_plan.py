"""Faults of chunk plans, before any code is made of them, and of what stands around an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from mutant import Mutant, PlanEdit
from torch import Tensor

from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.plan import ChunkPlan, Node


class NoSuchNode(AssertionError):
    """The plan has no node that the fault is about."""


def _find(plan: ChunkPlan, op: str, **attrs: Any) -> list[int]:
    found = [
        i
        for i, n in enumerate(plan.nodes)
        if n.op == op and all(dict(n.attrs).get(k) == v for k, v in attrs.items())
    ]
    if not found:
        raise NoSuchNode(f"{plan.name} has no {op} {attrs}")
    return found


def _redirected(plan: ChunkPlan, old: int, new: int) -> ChunkPlan:
    """What used node ``old`` uses ``new``."""
    nodes = tuple(
        n if i == new else replace(n, args=tuple(new if a == old else a for a in n.args))
        for i, n in enumerate(plan.nodes)
    )
    carries = tuple((s, d, leaf, new if after == old else after) for s, d, leaf, after in plan.carries)
    outputs = tuple((name, new if at == old else at) for name, at in plan.outputs)
    return replace(plan, nodes=nodes, carries=carries, outputs=outputs)


def skipping(op: str, operand: int = 0, which: int = 0, **attrs: Any) -> PlanEdit:
    """An op is left out: what used it uses one of its operands."""

    def edit(plan: ChunkPlan) -> ChunkPlan:
        at = _find(plan, op, **attrs)[which]
        return _redirected(plan, at, plan.nodes[at].args[operand])

    return edit


def term_lost(output: str, keep: int) -> PlanEdit:
    """The last sum that makes a result is one of its two terms."""

    def edit(plan: ChunkPlan) -> ChunkPlan:
        at = dict(plan.outputs)[output]
        if plan.nodes[at].op != "add":
            raise NoSuchNode(f"{output} of {plan.name} is no sum")
        outputs = tuple((n, plan.nodes[at].args[keep] if n == output else i) for n, i in plan.outputs)
        return replace(plan, outputs=outputs)

    return edit


def changed(op: str, change: Callable[[Node], Node], **attrs: Any) -> PlanEdit:
    """Every such node is another."""

    def edit(plan: ChunkPlan) -> ChunkPlan:
        some = set(_find(plan, op, **attrs))
        nodes = tuple(change(n) if i in some else n for i, n in enumerate(plan.nodes))
        if nodes == plan.nodes:
            raise NoSuchNode(f"{op} of {plan.name} stays as it is")
        return replace(plan, nodes=nodes)

    return edit


def with_attr(op: str, name: str, value: Any, **attrs: Any) -> PlanEdit:
    return changed(
        op, lambda n: replace(n, attrs=tuple(sorted({**dict(n.attrs), name: value}.items()))), **attrs
    )


def carry_lost(direction: str, keep: int) -> PlanEdit:
    """The sum that a state is handed on as is one of its two terms."""

    def edit(plan: ChunkPlan) -> ChunkPlan:
        for _, way, _, after in plan.carries:
            if way == direction and plan.nodes[after].op == "add":
                return _redirected(plan, after, plan.nodes[after].args[keep])
        raise NoSuchNode(f"{plan.name} hands on no sum ({direction})")

    return edit


def _unstrided(op: CompiledOp) -> Callable[..., Any]:
    def of(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and not x.is_contiguous():
            return torch.as_strided(
                x, x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset()
            )
        return x

    return lambda **given: op(**{n: of(x) for n, x in given.items()})


def _half_batches(op: CompiledOp) -> Callable[..., Any]:
    """Detaches what comes in with the first tensor when nothing else needs a gradient."""

    def call(**given: Any) -> Any:
        leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
        alone = len(leaves) == 1
        return op(
            **{
                n: x * 0.5 + x.detach() * 0.5 if alone and isinstance(x, Tensor) and x.requires_grad else x
                for n, x in given.items()
            }
        )

    return call


def _warm(op: CompiledOp) -> Callable[..., Any]:
    """The state of the last call is taken up where none is given."""
    kept: dict[str, Any] = {}

    def call(**given: Any) -> Any:
        first = next(x for x in given.values() if isinstance(x, Tensor))
        if given.get("initial_state") is None and given.get("cu_seqlens") is None and "last" in kept:
            last = kept["last"]
            H = max(x.shape[2] for x in given.values() if isinstance(x, Tensor) and x.dim() > 2)
            sizes = (first.shape[0], H, given["k"].shape[-1], given["v"].shape[-1])
            if tuple(last.shape) == sizes and last.dtype == (
                torch.float64 if first.dtype == torch.float64 else torch.float32
            ):
                given["initial_state"] = last
        found = op(**given)
        if isinstance(found, tuple):
            kept["last"] = found[1].detach()
        return found

    return call


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "lost_gradient_path",
        "gated_delta_rule",
        "torch",
        "the gradient of keys lacks the path through the erases' scores",
        backward=term_lost("d_k", 0),
    ),
    Mutant(
        "gate_gradient_without_its_boundary",
        "gla",
        "torch",
        "the gradient of gates lacks what a chunk's decay does to its state",
        backward=skipping("add", 1, -1),
    ),
    Mutant(
        "state_not_decayed",
        "gla",
        "torch",
        "a state passes a chunk without its decay",
        forward=skipping("scale_state"),
    ),
    Mutant(
        "gate_sum_of_the_other_side",
        "gated_delta_rule",
        "torch",
        "sums of gate gradients from the start are taken to the end",
        backward=with_attr("gate_sum", "kind", "to_end", kind="from_start"),
    ),
    Mutant(
        "inclusive_span",
        "rwkv6",
        "torch",
        "gradients of pairs of an exclusive read count the gate of the token itself",
        backward=with_attr("pair_gate", "read", "decayed", read="exclusive"),
    ),
    Mutant(
        "exclusive_start",
        "rwkv6",
        "torch",
        "a read before the update decays what the state held by the token's own gate",
        forward=with_attr("from_start", "exclusive", False, exclusive=True),
    ),
    Mutant(
        "score_the_other_way_round",
        "linear_attention",
        "torch",
        "rows and columns of a score are exchanged",
        forward=changed("score", lambda n: replace(n, args=n.args[::-1])),
    ),
    Mutant(
        "transposed_product_backwards",
        "delta_rule",
        "torch",
        "a product of the backward is not transposed",
        backward=changed("apply_t", lambda n: replace(n, op="apply")),
    ),
    Mutant(
        "erase_forgotten_by_the_state",
        "gated_delta_rule",
        "torch",
        "the gradient of a state lacks what later tokens erased from it",
        backward=carry_lost("reverse", 0),
    ),
    Mutant(
        "strength_with_the_wrong_sign",
        "kda",
        "torch",
        "what is erased is added",
        forward=changed("number", lambda n: replace(n, attrs=(("value", 1.0),)), value=-1.0),
    ),
    Mutant(
        "strides_ignored",
        "gla",
        "torch",
        "tensors that are not contiguous are read as if they were",
        call=_unstrided,
    ),
    Mutant(
        "half_a_gradient_alone",
        "simple_gla",
        "torch",
        "a gradient that is asked for alone is half of what it is",
        call=_half_batches,
    ),
    Mutant(
        "state_kept_between_calls",
        "linear_attention",
        "torch",
        "a call without an initial state goes on from the last call's final state",
        call=_warm,
    ),
    Mutant(
        "lost_gradient_path_in_kernels",
        "simple_gla",
        "triton",
        "the gradient of queries lacks the path through the state",
        backward=term_lost("d_q", 0),
    ),
    Mutant(
        "gradient_state_not_decayed",
        "gated_delta_rule",
        "triton",
        "the gradient of a state passes a chunk without its decay",
        backward=skipping("scale_state", which=-1),
    ),
    Mutant(
        "mask_of_a_gradient_lost",
        "delta_rule",
        "triton",
        "the gradient of a strict score is not masked",
        backward=skipping("mask"),
    ),
)
