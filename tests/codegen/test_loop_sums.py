"""Sums of loads over blocks: one statement alone reads what a loop has summed up.

Up to Triton 3.7 the pass OptimizeThreadLocality asserts that, of reductions of tiles loaded in float32.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from test_kernel_vocabulary import kernels

import linalg_dsl as ld
from linalg_dsl.ops.catalogue import catalogue_text

pytest.importorskip("triton")


def sums_of_loads(loop: ast.For) -> Iterator[str]:
    """Names to which a loop adds a sum of a tile that it has loaded, whatever it is converted to."""
    loaded = {
        n.targets[0].id
        for n in ast.walk(loop)
        if isinstance(n, ast.Assign)
        and isinstance(n.targets[0], ast.Name)
        and "tl.load(" in ast.unparse(n.value)[:8]
    }
    for n in ast.walk(loop):
        if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name):
            text = ast.unparse(n.value).removeprefix("tl.sum(").split(",")[0].removesuffix(".to(tl.float32)")
            if ast.unparse(n.value).startswith("tl.sum(") and text in loaded:
                yield n.target.id


def read_often(text: str) -> list[tuple[str, str]]:
    """(kernel, sum) of those that more than one use reads before they are made anew."""
    found = []
    for kernel in kernels(text):
        for at, statement in enumerate(kernel.body):
            if not isinstance(statement, ast.For):
                continue
            for name in sums_of_loads(statement):
                uses = 0
                for later in kernel.body[at + 1 :]:
                    uses += sum(
                        isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
                        for n in ast.walk(later)
                    ) - ast.unparse(later).count(f"{name}.dtype")
                    if isinstance(later, ast.Assign) and ast.unparse(later.targets[0]) == name:
                        break
                if uses > 1:
                    found.append((kernel.name, name))
    return found


@pytest.mark.parametrize("name", ["rebased", "efla", "rwkv7", "kda"])
def test_what_a_loop_summed_up_is_read_once(name: str) -> None:
    text = ld.compile(catalogue_text(name), backend="triton").source(backend="triton")
    assert not read_often(text)
    if name == "rebased":  # its means are such sums, and both subtracted and kept
        assert "b_total_3 = tl.where(m_t, b_total_3, 0.0)" in text
        assert read_often(text.replace("    b_total_3 = tl.where(m_t, b_total_3, 0.0)\n", ""))
