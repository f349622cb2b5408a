"""Every name in a generated kernel is bound before it is used, on every path: of the whole catalogue."""

from __future__ import annotations

import pytest
from catalogue_sets import IN_DEPTH
from name_order import unbound_names

import linalg_dsl
from linalg_dsl.language.parser import parse
from linalg_dsl.ops import catalogue_names
from linalg_dsl.ops.catalogue import catalogue_text

pytestmark = pytest.mark.filterwarnings("ignore:.* has no chunk form:UserWarning")

IN_LOOP = """
@triton.jit
def kernel(p, n, SAVE: tl.constexpr):
    b_sum = 0.0
    for i in range(n):
        b_x = tl.load(p + i)
        b_sum += b_x
    {}
"""


@pytest.mark.parametrize("name", catalogue_names())
def test_names_are_bound_before_they_are_used(name: str) -> None:
    op = linalg_dsl.compile(parse(catalogue_text(name), f"{name}.rec"))
    texts = [op.source("module", backend="triton"), op.source("step", backend="triton")]
    assert [unbound_names(text) for text in texts] == [[], []]


@pytest.mark.parametrize("name", IN_DEPTH)
def test_names_are_bound_in_kernels_of_two_levels(name: str) -> None:
    op = linalg_dsl.compile(parse(catalogue_text(name), f"{name}.rec"), schedule="two_level")
    assert unbound_names(op.source("module", backend="triton")) == []


@pytest.mark.parametrize(
    ("behind", "unbound"),
    [
        ("tl.store(p, b_sum)", []),
        ("tl.store(p, b_x)", ["b_x"]),
        ("for j in range(n):\n        tl.store(p + j, b_x)", ["b_x"]),
        ("for j in range(n):\n        tl.store(p, b_y)\n        b_y = 1.0", ["b_y"]),
        ("if n > 0:\n        b_y = 1.0\n    tl.store(p, b_y)", ["b_y"]),
        ("if n > 0:\n        b_y = 1.0\n    else:\n        b_y = 2.0\n    tl.store(p, b_y)", []),
        ("if n > 0:\n        return\n    tl.store(p, b_sum)", []),
        ("if SAVE:\n        b_y = 1.0\n    if SAVE:\n        tl.store(p, b_y)", []),
        ("if not SAVE:\n        b_y = 1.0\n    if SAVE:\n        tl.store(p, b_y)", ["b_y"]),
        ("b_y += 1.0", ["b_y"]),
    ],
)
def test_the_check_knows_loops_branches_and_switches(behind: str, unbound: list[str]) -> None:
    source = "import triton\nimport triton.language as tl\n" + IN_LOOP.format(behind)
    assert [found.split(": ")[1] for found in unbound_names(source)] == unbound
