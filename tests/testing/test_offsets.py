"""Offsets have 64 bits where it has to, in kernels of the catalogue; what has not is named."""

from __future__ import annotations

import pytest

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.testing.offsets import wrapping_offsets

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def copy(p_x, p_o, seq_start, H, D: tl.constexpr, C: tl.constexpr):
    i_n = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    start = tl.load(seq_start + i_n)
    length = (tl.load(seq_start + i_n + 1) - start).to(tl.int32)
    o_d = tl.arange(0, D)
    for i_c in tl.range((length + C - 1) // C):
        at = {offset}
        tl.store(p_o + at, tl.load(p_x + at))
"""


@pytest.mark.parametrize(
    ("offset", "why"),
    [
        ("((start + i_c * C) * H + i_h) * D + o_d", ""),
        ("(i_n.to(tl.int64) * H + i_h) * D + o_d", ""),
        ("((start.to(tl.int32) + i_c * C) * H + i_h) * D + o_d", "in 32 bits"),
        ("(i_n * H + i_h).to(tl.int64) * D + o_d", "i_n * H + i_h can be"),
        ("tl.load(p_x) + o_d", "nothing is known of it"),
    ],
)
def test_what_may_wrap_is_named(offset: str, why: str) -> None:
    found = wrapping_offsets(KERNEL.format(offset=offset))
    assert bool(found) == bool(why)
    assert all(why in str(f) and "copy, line" in str(f) for f in found)


@pytest.mark.parametrize("name", ["gla", "kda", "mdn", "mamba1", "rwkv4", "gated_oja"])
def test_no_kernel_of_these_entries_wraps(name: str) -> None:
    op = linalg_dsl.compile(getattr(ops, name).spec, backend="triton")
    for text in (*(s.module_text("triton") for s in op.stage_ops), op.source("step")):
        assert not wrapping_offsets(text)


def test_the_maps_of_two_levels_do_not_wrap() -> None:
    op = linalg_dsl.compile(ops.gated_delta_rule.spec, backend="triton", schedule="two_level")
    assert not wrapping_offsets(op.source("module"))
