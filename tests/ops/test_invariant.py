"""With invariant=True a sequence has the same bits alone and in a packed row; kernels, interpreted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from runtime_cases import KERNELS, call, inputs_of, op_of, random_like, with_gradients

BOUNDS = [0, 0, 5, 24, 25]


@pytest.mark.parametrize("name", KERNELS)
def test_a_packed_sequence_has_the_bits_of_the_sequence_alone(name: str) -> None:
    op = op_of(name, backend="triton", chunk_size=16, invariant=True)
    timed = [d.timed for d in op.spec.inputs]
    tensors, states = inputs_of(op, 1, BOUNDS[-1], 1, 5, 3, N=len(BOUNDS) - 1)
    offsets = torch.tensor(BOUNDS)
    weights = random_like(call(op.reference, tensors, states, cu_seqlens=offsets, dtype=torch.float32))
    results, grads = with_gradients(op, tensors, states, weights, cu_seqlens=offsets)
    for n, (begin, end) in enumerate(pairwise(BOUNDS)):
        rows = slice(n, n + 1)
        own = [x[:, begin:end] if t else x for x, t in zip(tensors, timed, strict=True)]
        cut = [weights[0][:, begin:end], *(w[rows] for w in weights[1:])]
        alone, d_alone = with_gradients(op, own, [s[rows] for s in states], cut)
        assert torch.equal(alone[0], results[0][:, begin:end])
        assert all(torch.equal(a, r[rows]) for a, r in zip(alone[1:], results[1:], strict=True))
        for i, d in enumerate(d_alone):
            if i >= len(timed):
                assert torch.equal(d, grads[i][rows])
            elif timed[i]:
                assert torch.equal(d, grads[i][:, begin:end]), op.spec.inputs[i].name


@pytest.mark.parametrize("name", ["gla", "value_erase", "own_scan"])
def test_only_the_invariant_plan_is_the_same_for_every_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a launch is compiled for, on a card of 132 multiprocessors, for a small and a large call."""
    for invariant in (True, False):
        op = op_of(name, backend="triton", invariant=invariant)
        module = op.operator("triton").module
        seen: list[set[str]] = []

        def launch(self: Any, kernel: Any, *given: Any, seen: list[set[str]] = seen) -> None:
            _, _, _, _, ratios, more, warps, stages = given
            seen[-1].add(f"{kernel.__name__} {self.constants(kernel, ratios, more)} {warps} {stages}")

        monkeypatch.setattr(module, "device_limits", lambda device: (132, 232448, False))
        monkeypatch.setattr(module.Call, "launch", launch)
        for B, T, H in ((1, 20, 1), (16, 40, 64), (3, 65, 7), (2, 128, 3)):
            seen.append(set())
            like = inputs_of(op, 1, 1, 1, 64, 64)[0]
            tensors = tuple(
                x.expand(B, T, H, *x.shape[3:]) if d.timed else x.expand(H, *x.shape[1:])
                for x, d in zip(like, op.spec.inputs, strict=True)
            )
            consts = (1.0,) * len(module.CONSTS)
            firsts = tuple(torch.zeros(B, H, 64, 64) for _ in module.STATES)
            o, finals, kept = module.forward(tensors, firsts, consts, None, True, True)
            module.backward(tensors, firsts, consts, None, kept, o, finals)
        assert len(seen[0]) > 1
        assert (seen[0] == seen[1] == seen[2] == seen[3]) == invariant
