"""The tile functions of generated kernels, each against its meaning in float64 PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from module_files import module_of_text
from torch import Tensor

from linalg_dsl.codegen.emit.render import template_text
from linalg_dsl.planner import evaluate_ops

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = """

@triton.jit
def elementwise(x, y, FN: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    b = tl.load(x + o)
    if FN == "softplus":
        b = softplus(b)
    elif FN == "tanh":
        b = tanh(b)
    elif FN == "expm1":
        b = expm1(b)
    elif FN == "sign":
        b = sign(b)
    elif FN == "step":
        b = step(b)
    elif FN == "square_root":
        b = power(b, 0.5)
    else:
        b = power(b, -2.0)
    tl.store(y + o, b)


@triton.jit
def decays(w, y, C: tl.constexpr, INCLUSIVE: tl.constexpr, EXCLUSIVE: tl.constexpr):
    o = tl.arange(0, C)
    b = pairs_decay(tl.load(w + o), C, tl.float32, INCLUSIVE, EXCLUSIVE)
    tl.store(y + o[:, None] * C + o[None, :], b)


@triton.jit
def spans(p, y, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    o = tl.arange(0, C)
    tl.store(y + o, span_sum(tl.load(p + o[:, None] * C + o[None, :]), C, tl.float32, "ieee", EXCLUSIVE))


@triton.jit
def rows(w, y, C: tl.constexpr, AFTER: tl.constexpr, STRICT: tl.constexpr):
    o = tl.arange(0, C)
    tl.store(y + o, row_sums(tl.load(w + o), C, AFTER, STRICT))


@triton.jit
def columns(
    w, y, C: tl.constexpr, AFTER: tl.constexpr, STRICT: tl.constexpr, TURNED: tl.constexpr, DOT: tl.constexpr
):
    t, d = tl.arange(0, C), tl.arange(0, 16)
    at = t[None, :] * 16 + d[:, None] if TURNED else t[:, None] * 16 + d[None, :]
    among = tokens_within(C, AFTER, STRICT)
    tl.store(y + at, token_sums(tl.load(w + at), among, TURNED, DOT, "ieee"))


@triton.jit
def both_ways(y, level, C: tl.constexpr):
    o = tl.arange(0, C)
    tl.store(y + o[:, None] * C + o[None, :], tl.where(blocks_meet(level, C), 1.0, 0.0))


@triton.jit
def product(
    w, y, C: tl.constexpr, BACK: tl.constexpr, STRICT: tl.constexpr, TURNED: tl.constexpr, LOOK: tl.constexpr
):  # fmt: skip
    o = tl.arange(0, C)
    inside = o[:, None] > o[None, :] if STRICT else o[:, None] >= o[None, :]
    a = tl.where(inside, 1.0, 0.0)
    d = tl.arange(0, 16)
    at = o[None, :] * 16 + d[:, None] if TURNED else o[:, None] * 16 + d[None, :]
    z = tl.load(w + at)
    if TURNED:
        r = tl.dot(z, a if BACK else tl.trans(a), input_precision="ieee")
    else:
        r = tl.dot(tl.trans(a) if BACK else a, z, input_precision="ieee")
    if has_late_nan(r, C, TURNED, BACK, LOOK):
        r = one_sided_product(a, z, C, TURNED, BACK, STRICT, "ieee")
    tl.store(y + at, r)


@triton.jit
def inverse_spoilt(w, y, C: tl.constexpr):
    o = tl.arange(0, C)
    at = o[:, None] * C + o[None, :]
    n = tl.load(w + at)
    whole = tl.where(o[:, None] >= o[None, :], 1.0, 0.0)
    tl.store(y + at, tl.where(finite_entries(n) == n, 0.0, 1.0) + spoilt_by(whole, bad_columns(n, o), o))


@triton.jit
def intervals(y, level, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    o = tl.arange(0, C)
    tl.store(y + o[:, None] * C + o[None, :], anchored_intervals(level, C, EXCLUSIVE))


@triton.jit
def meeting(y, level, C: tl.constexpr):
    o = tl.arange(0, C)
    tl.store(y + o[:, None] * C + o[None, :], tl.where(meeting_blocks(level, C), 1.0, 0.0))
"""
CHUNKS = (16, 64)
READS = {"inclusive": (True, False), "exclusive": (False, True), "decayed": (False, False)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    text = template_text("tile_library.py") + KERNELS
    return module_of_text(tmp_path_factory.mktemp("tiles"), "tile_functions", text)


def run(kernel: Any, given: Tensor | None, shape: tuple[int, ...], *numbers: int, **constants: Any) -> Tensor:
    """The float32 result of one program."""
    out = torch.empty(shape, dtype=torch.float32, device=DEVICE)
    inputs = () if given is None else (given.float().contiguous().to(DEVICE),)
    kernel[(1,)](*inputs, out, *numbers, **constants)
    return out.cpu().double()


def log_decays(C: int, *more: int) -> Tensor:
    """Mild ones, hard ones and resets, as float32 holds them."""
    generator = torch.Generator().manual_seed(C)
    mild = -torch.rand(C, *more, generator=generator)
    pick = torch.rand(C, *more, generator=generator)
    hard = torch.where(pick < 0.1, -torch.inf, torch.where(pick < 0.2, -60.0, mild))
    return torch.where(pick > 0.8, 0.0, hard).double()


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "softplus": (evaluate_ops.UNARY["softplus"], -80, 80),
    "tanh": (torch.tanh, -20, 20),
    "expm1": (torch.expm1, -80, 0),
    "sign": (torch.sign, -2, 2),
    "step": (evaluate_ops.UNARY["heaviside"], -2, 2),
    "square_root": (lambda x: x**0.5, 0, 50),
    "inverse_square": (lambda x: x**-2, 0.1, 50),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_their_digits_near_zero_and_far_away(name: str, library: ModuleType) -> None:
    meaning, low, high = FUNCTIONS[name]
    small = torch.logspace(-8, 0, 62, dtype=torch.float64)
    near = torch.cat([small, -small, torch.zeros(1)]).clamp(low, high)
    x = torch.cat([near, torch.linspace(low, high, 256 - near.shape[0])]).float().double()
    got = run(library.elementwise, x, (256,), FN=name, N=256)
    torch.testing.assert_close(got, meaning(x), rtol=5e-6, atol=1e-38)


@pytest.mark.parametrize("C", CHUNKS)
@pytest.mark.parametrize("read", READS)
def test_decays_of_pairs_are_those_of_the_plan_resets_included(
    read: str, C: int, library: ModuleType
) -> None:
    w = log_decays(C)
    inclusive, exclusive = READS[read]
    got = run(library.decays, w, (C, C), C=C, INCLUSIVE=inclusive, EXCLUSIVE=exclusive)
    want = evaluate_ops.pair_decay(w[:, None], read).squeeze(-1)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-38)
    assert torch.equal(got.triu(0 if read != "inclusive" else 1), torch.zeros(C, C).double())


@pytest.mark.parametrize("C", CHUNKS)
@pytest.mark.parametrize("read", READS)
def test_sums_over_spans_are_those_of_the_plan(read: str, C: int, library: ModuleType) -> None:
    p = torch.randn(C, C, generator=torch.Generator().manual_seed(1)).double().tril(-1)
    got = run(library.spans, p, (C,), C=C, EXCLUSIVE=read == "exclusive")
    want = evaluate_ops.sum_over_spans(p[..., None], read).squeeze(-1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("C", CHUNKS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_sums_over_tokens(turned: bool, after: bool, strict: bool, C: int, library: ModuleType) -> None:
    w = log_decays(C, 16)
    sums = evaluate_ops.sum_after(w, 0) if after else evaluate_ops.sum_before(w, 0)
    want = sums if strict else sums + w
    rows = run(library.rows, w[:, 3], (C,), C=C, AFTER=after, STRICT=strict)
    torch.testing.assert_close(rows, want[:, 3], rtol=1e-5, atol=1e-5)
    # a product needs finite operands: what is -inf is -1e30 there, and its exponential zero as well
    flags = {"AFTER": after, "STRICT": strict, "TURNED": turned, "DOT": tl.float32}
    columns = run(library.columns, w.clamp(min=-1e30), (C, 16), C=C, **flags)
    torch.testing.assert_close(columns.exp(), want.exp(), rtol=1e-5, atol=1e-5)
    finite = want.isfinite()
    torch.testing.assert_close(columns[finite], want[finite], rtol=1e-5, atol=1e-5)
    assert (columns[~finite] <= -1e30 * (1 - 1e-6)).all()


@pytest.mark.parametrize("C", CHUNKS)
def test_blocks_meet_in_either_order(C: int, library: ModuleType) -> None:
    for level in range(C.bit_length() - 1):
        met = run(library.meeting, None, (C, C), level, C=C)
        assert torch.equal(run(library.both_ways, None, (C, C), level, C=C), met + met.T)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("look", ["rows", "flat", "always"])
def test_products_with_a_triangle_keep_what_is_not_finite_to_one_side(
    look: str, strict: bool, back: bool, turned: bool, library: ModuleType
) -> None:
    z = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).double()
    a = torch.ones(16, 16).double().tril(-1 if strict else 0)
    want = (a.T if back else a) @ z
    z[5, 2], z[9, 2], z[7, 4] = float("nan"), float("inf"), -float("inf")
    got = run(library.product, z, (16, 16), C=16, BACK=back, STRICT=strict, TURNED=turned, LOOK=look)
    rows = torch.arange(16)
    for column in range(16):
        first, last = {2: (5, 9), 4: (7, 7)}.get(column, (16, -1))
        spoilt = (rows < last + (not strict)) if back else (rows >= first + strict)
        assert torch.equal(~got[:, column].isfinite(), spoilt)
        torch.testing.assert_close(got[~spoilt, column], want[~spoilt, column], rtol=1e-5, atol=1e-5)


def test_an_inverse_is_spoilt_where_an_entry_goes_into_it(library: ModuleType) -> None:
    n = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).double()
    n[9, 4], n[3, 12] = (
        float("inf"),
        float("nan"),
    )  # one below the diagonal, one above, which counts for nothing
    got = run(library.inverse_spoilt, n, (16, 16), C=16)
    t = torch.arange(16)
    assert torch.equal(got.isnan(), (t[:, None] >= 9) & (t[None, :] <= 4))


@pytest.mark.parametrize("C", CHUNKS)
def test_every_pair_meets_at_one_level(C: int, library: ModuleType) -> None:
    levels = C.bit_length() - 1
    met = torch.stack([run(library.meeting, None, (C, C), level, C=C) for level in range(levels)])
    assert torch.equal(met.sum(0), torch.ones(C, C).double().tril(-1))


@pytest.mark.parametrize("C", CHUNKS)
@pytest.mark.parametrize("exclusive", [False, True])
def test_two_factors_of_a_pair_make_its_interval_and_none_looks_ahead(
    exclusive: bool, C: int, library: ModuleType
) -> None:
    """Where t and s meet, row t and row s of the intervals are disjoint, and together s+1 .. t (or t-1)."""
    token = torch.arange(C)
    for level in range(C.bit_length() - 1):
        inside = run(library.intervals, None, (C, C), level, C=C, EXCLUSIVE=exclusive)
        plain = run(library.intervals, None, (C, C), level, C=C, EXCLUSIVE=False)
        meet = run(library.meeting, None, (C, C), level, C=C)
        for t, s in meet.nonzero().tolist():
            both = inside[t] + plain[s]
            last = t - 1 if exclusive else t
            assert torch.equal(both, ((token > s) & (token <= last)).double()), (level, t, s)
