"""A text as input, and the step loop in segments."""

from __future__ import annotations

import pytest
import torch

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.reference import reference
from linalg_dsl.ops.text_run import SEGMENT, embedded_text, step_loop


def test_the_same_byte_is_the_same_token() -> None:
    spec = parse(catalogue_text("gated_delta_rule"))
    x = embedded_text(spec, b"abca", 2, 4, 3, dtype=torch.float32)
    assert x["k"].shape == (1, 4, 2, 4)
    assert torch.equal(x["k"][:, 0], x["k"][:, 3])
    assert not torch.equal(x["k"][:, 0], x["k"][:, 1])
    with pytest.raises(ArgumentError, match="empty"):
        embedded_text(spec, b"", 2, 4, 3, dtype=torch.float32)


@pytest.mark.parametrize("name", ["retnet", "gated_delta_rule", "gsa"])
def test_segments_give_what_one_long_loop_gives(name: str) -> None:
    spec = parse(catalogue_text(name))
    text = bytes(range(97, 123)) * (2 * SEGMENT // 26 + 1)
    x = embedded_text(spec, text, 2, 4, 3, dtype=torch.float64)
    leaves = {n: z.clone().requires_grad_() for n, z in x.items()}
    o, last = reference(spec, leaves, output_final_state=True)
    states = [last] if isinstance(last, torch.Tensor) else list(last)
    d_o, d_states = torch.randn_like(o), [torch.randn_like(x) for x in states]
    want = torch.autograd.grad([o, *states], list(leaves.values()), [d_o, *d_states])
    told: list[int] = []
    run = step_loop(spec, x, d_o, d_states, progress=told.append)
    torch.testing.assert_close(run.o, o)
    for state, expected in zip(run.states, states, strict=True):
        torch.testing.assert_close(state, expected)
    for got, d in zip(run.gradients.values(), want, strict=True):
        torch.testing.assert_close(got, d)
    assert sum(told) == 2 * len(text)
