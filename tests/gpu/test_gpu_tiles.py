"""The tile functions' paths for bfloat16 operands, which the interpreter cannot run, against float64."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from module_files import module_of_text
from nan_in_functions import lost_nan
from torch import Tensor

from linalg_dsl.codegen.emit.render import template_text
from linalg_dsl.planner import evaluate_ops

pytestmark = pytest.mark.gpu
KERNELS = """

@triton.jit
def decays(w, y, C: tl.constexpr, INCLUSIVE: tl.constexpr, EXCLUSIVE: tl.constexpr):
    o = tl.arange(0, C)
    b = pairs_decay(tl.load(w + o), C, tl.bfloat16, INCLUSIVE, EXCLUSIVE)
    tl.store(y + o[:, None] * C + o[None, :], b)


@triton.jit
def spans(p, y, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    o = tl.arange(0, C)
    b = tl.load(p + o[:, None] * C + o[None, :])
    tl.store(y + o, span_sum(b, C, tl.bfloat16, "tf32", EXCLUSIVE))


@triton.jit
def sums(w, y, C: tl.constexpr, AFTER: tl.constexpr, STRICT: tl.constexpr):
    o = tl.arange(0, C)
    b = bounded(tl.load(w + o), tl.bfloat16)
    tl.store(y + o, tl.exp(running_sums(b, C, tl.bfloat16, AFTER, STRICT)))


@triton.jit
def wide(x, y, C: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    t = tl.arange(0, C)
    one = tl.where(t[:, None] == t[None, :], 1.0, 0.0).to(tl.bfloat16)
    o = t[:, None] * D + tl.arange(0, D)[None, :] if ROWS else t[None, :] * D + tl.arange(0, D)[:, None]
    b = tl.load(x + o)
    r = widened(b, one, tl.bfloat16, ROWS)
    if has_spread(r, b, C, tl.bfloat16, ROWS, "rows"):
        r = tl.load(x + o).to(tl.float32)
    tl.store(y + o, r)
"""
CHUNKS = (16, 32, 64)
READS = {"inclusive": (True, False), "exclusive": (False, True), "decayed": (False, False)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    text = template_text("tile_library.py") + KERNELS
    return module_of_text(tmp_path_factory.mktemp("tiles"), "tile_functions_gpu", text)


def log_decays(C: int) -> Tensor:
    """Mild ones, hard ones and resets."""
    generator = torch.Generator().manual_seed(C)
    pick = torch.rand(C, generator=generator)
    mild = -torch.rand(C, generator=generator)
    return torch.where(pick < 0.1, -torch.inf, torch.where(pick < 0.2, -60.0, mild))


@pytest.mark.parametrize("C", CHUNKS)
@pytest.mark.parametrize("read", READS)
def test_decays_of_pairs_with_resets(read: str, C: int, library: ModuleType) -> None:
    w = log_decays(C)
    out = torch.empty(C, C, device="cuda")
    library.decays[(1,)](w.cuda(), out, C, *READS[read])
    expected = evaluate_ops.pair_decay(w.double()[:, None], read).squeeze(-1)
    assert torch.isfinite(out).all()
    assert (out.cpu().double() - expected).abs().max() < 1e-3


@pytest.mark.parametrize("C", CHUNKS)
@pytest.mark.parametrize("after", [False, True])
def test_running_sums_with_resets(after: bool, C: int, library: ModuleType) -> None:
    w = log_decays(C)
    out = torch.empty(C, device="cuda")
    library.sums[(1,)](w.cuda(), out, C, after, after)
    rows = [w[t + 1 :] if after else w[: t + 1] for t in range(C)]
    expected = torch.stack([row.double().sum().exp() for row in rows])
    assert (out.cpu().double() - expected).abs().max() < 1e-3


@pytest.mark.parametrize("exclusive", [False, True])
def test_sums_over_spans(exclusive: bool, library: ModuleType) -> None:
    C = 32
    p = torch.randn(C, C, generator=torch.Generator().manual_seed(1)).tril(-1)
    out = torch.empty(C, device="cuda")
    library.spans[(1,)](p.cuda(), out, C, exclusive)
    expected = torch.stack([p[tau + 1 if exclusive else tau :, :tau].double().sum() for tau in range(C)])
    assert (out.cpu().double() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("rows", [False, True])
def test_a_product_with_one_is_exact(rows: bool, library: ModuleType) -> None:
    whole = torch.randn(32, 64, device="cuda").bfloat16()
    out = torch.empty(32, 64, device="cuda")
    for at, value in ((0, 0.0), (0, float("inf")), (31, float("inf")), (9, float("nan"))):
        x = whole.clone()
        x[at, 5] = value
        library.wide[(1,)](x, out, 32, 64, rows)
        assert torch.equal(out.nan_to_num(nan=9.0), x.float().nan_to_num(nan=9.0))


def test_functions_hand_nan_on_where_those_of_torch_do(tmp_path: Path) -> None:
    assert lost_nan(tmp_path, "cuda") == []
