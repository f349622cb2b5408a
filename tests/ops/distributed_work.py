"""What each of two processes does in tests/ops/test_distributed.py: DTensor, DDP, FSDP2 over gloo."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_cases import inputs_of, op_of, with_gradients, worst
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.op import CompiledOp

NAMES = ("mixed_reads", "looking_back")


def main(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, batch in itertools.product(NAMES, (True, False)):
        sharded_is_whole(op_of(name, backend="torch"), mesh, batch)
    packed_over_heads(mesh)
    compiled(mesh)
    wrong_placements(mesh)
    trained_in_parallel(rank, mesh)
    dist.destroy_process_group()


def placed(op: CompiledOp, tensors: list[Tensor], states: list[Tensor], mesh: DeviceMesh, batch: bool) -> Any:
    """The same tensors, sharded over the batch (three rows on two ranks) or over the heads."""
    kinds: list[Any] = [
        (Shard(0) if d.timed else Replicate()) if batch else Shard(2 if d.timed else 0)
        for d in op.spec.inputs
    ]
    ends = [distribute_tensor(x, mesh, [Shard(0 if batch else 1)]) for x in states]
    return [distribute_tensor(x, mesh, [k]) for x, k in zip(tensors, kinds, strict=True)], ends


def sharded_is_whole(op: CompiledOp, mesh: DeviceMesh, batch: bool) -> None:
    tensors, states = inputs_of(op, 3, 20, 4, 5, 3, dtype=torch.float64)
    wanted, d_wanted = with_gradients(op, tensors, states)
    own, ends = placed(op, tensors, states, mesh, batch)
    weights = distribute(wanted_like(wanted), mesh)
    results, grads = with_gradients(op, own, ends, weights)
    assert all(isinstance(x, DTensor) for x in (*results, *grads))
    assert results[0].placements == (Shard(0 if batch else 2),)  # type: ignore[attr-defined]
    whole = [x.full_tensor() for x in (*results, *grads)]  # type: ignore[attr-defined]
    assert worst(whole, [*wanted, *d_wanted]) < 1e-11


def wanted_like(results: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]


def distribute(tensors: list[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    return [distribute_tensor(x, mesh, [Replicate()]) for x in tensors]


def packed_over_heads(mesh: DeviceMesh) -> None:
    """Also: one head that all share stays on every rank, whose parts of its gradient are added."""
    op = op_of("gated_delta_rule", backend="torch")
    offsets = torch.tensor([0, 0, 7, 20])
    tensors, states = inputs_of(op, 1, 20, 4, 5, 3, N=3, dtype=torch.float64, heads={"q": 1, "k": 2})
    wanted, d_wanted = with_gradients(op, tensors, states, cu_seqlens=offsets)
    kinds = [Replicate(), Replicate(), Shard(2), Shard(2), Shard(2)]
    own: list[Tensor] = [distribute_tensor(x, mesh, [k]) for x, k in zip(tensors, kinds, strict=True)]
    weights = distribute(wanted_like(wanted), mesh)
    results, grads = with_gradients(op, own, distribute(states, mesh), weights, cu_seqlens=offsets)
    whole = [x.full_tensor() for x in (*results, *grads)]  # type: ignore[attr-defined]
    assert worst(whole, [*wanted, *d_wanted]) < 1e-11


def compiled(mesh: DeviceMesh) -> None:
    op = op_of("gated_delta_rule", backend="torch")
    tensors, states = inputs_of(op, 4, 20, 4, 5, 3)
    own, ends = placed(op, tensors, states, mesh, True)
    fast = torch.compile(op, fullgraph=True, backend="aot_eager")
    weights = distribute(wanted_like(with_gradients(op, tensors, states)[0]), mesh)
    results, grads = with_gradients(op, own, ends, weights)
    again, d_again = with_gradients(fast, own, ends, weights)
    for a, b in zip([*results, *grads], [*again, *d_again], strict=True):
        assert torch.equal(a.to_local(), b.to_local())  # type: ignore[attr-defined]


def wrong_placements(mesh: DeviceMesh) -> None:
    op = op_of("simple_gla", backend="torch")
    q, k, v, g = inputs_of(op, 2, 20, 4, 5, 3)[0]

    def refused(message: str, *kinds: Any, **options: Any) -> None:
        own = [
            x if kind is None else distribute_tensor(x, mesh, [kind])
            for x, kind in zip((q, k, v, g), kinds, strict=True)
        ]
        with pytest.raises(ArgumentError, match=message):
            op(*own, **options)

    refused("k has the placement S.* expected a shard over the batch or the heads", *[Shard(0), Shard(1)] * 2)
    refused("v has the placement S", Shard(2), Shard(2), Shard(3), Shard(2))
    refused("splits the batch of q and the heads of k", Shard(0), Shard(2), Replicate(), Replicate())
    refused("g is a plain tensor, expected a DTensor", Shard(0), Shard(0), Shard(0), None)
    q, k, v, g = inputs_of(op, 2, 20, 3, 5, 3)[0]
    refused("q has 3 heads, which do not divide over 2 shards", *[Shard(2)] * 4)
    q, k, v, g = inputs_of(op, 1, 20, 2, 5, 3)[0]
    refused("the batch is one row", *[Shard(0)] * 4, cu_seqlens=torch.tensor([0, 20]))


class Mixer(nn.Module):
    """A layer whose decays are parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.op = op_of("rwkv6", backend="torch")
        self.project = nn.Linear(8, 4 * 8)
        self.bonus = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, w = self.project(x).unflatten(-1, (4, 2, 4)).unbind(2)
        o: Tensor = self.op(q, k, v, -nn.functional.softplus(w), self.bonus)
        return o.flatten(2)


def trained_in_parallel(rank: int, mesh: DeviceMesh) -> None:
    """Each rank has half of the batch; the gradients are those of the whole batch in one process."""
    x = torch.randn(4, 20, 8, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(7)
    whole = Mixer()
    whole(x).square().mean().backward()
    wanted = [p.grad for p in whole.parameters() if p.grad is not None]
    assert len(wanted) == 3
    part = x[2 * rank : 2 * rank + 2]
    for parallel in (nn.parallel.DistributedDataParallel, lambda m: fully_shard(m, mesh=mesh)):
        torch.manual_seed(7)
        model: Any = parallel(Mixer())
        model(part).square().mean().backward()
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        assert worst(grads, wanted) < 1e-5


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
