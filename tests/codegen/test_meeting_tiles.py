"""Tiles that hold rows and columns at once, and the products that give all derivatives of their scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linalg_dsl.codegen.schedule.meeting_tiles import (
    meeting_products,
    meeting_tiles,
    source_of_column,
    source_of_row,
)

CASES: dict[str, tuple[list[int], list[int], list[tuple[int, int]]]] = {
    "one of each": ([1], [2], [(0, 0)]),
    "a row that is the column": ([2, 1], [2], [(0, 0), (1, 0)]),
    "two of each": ([1, 2], [3, 4], [(0, 0), (0, 1), (1, 0), (1, 1)]),
    "two of each, not all pairs": ([1, 2], [3, 4], [(0, 0), (0, 1), (1, 1)]),
    "more rows than columns": ([1, 2, 3], [4, 2], [(i, j) for i in range(3) for j in range(2)]),
    "more columns than rows": ([1], [2, 3, 4], [(0, 0), (0, 1), (0, 2)]),
    "a pair twice": ([1, 2], [3], [(0, 0), (0, 0), (1, 0)]),
}


@pytest.mark.parametrize("case", CASES)
def test_tiles_hold_every_row_and_column_and_few_more(case: str) -> None:
    rows, cols, pairs = CASES[case]
    tiles = meeting_tiles(rows, cols, pairs)
    assert len(tiles) == max(len(rows), len(cols))
    assert {t.row for t in tiles} == set(range(len(rows)))
    assert {t.col for t in tiles} == set(range(len(cols)))
    assert tiles[source_of_row(tiles, rows, cols, 0)].row == 0
    assert tiles[source_of_column(tiles, rows, cols, 0)].col == 0


def test_a_row_that_is_the_column_is_the_tile_to_take_it_of() -> None:
    rows, cols, pairs = CASES["a row that is the column"]
    tiles = meeting_tiles(rows, cols, pairs)
    own = tiles[source_of_column(tiles, rows, cols, 0)]
    assert (own.row, own.col) == (0, 0)


@pytest.mark.parametrize("moves", ["all", "rows", "columns"])
@pytest.mark.parametrize("case", CASES)
def test_products_of_tiles_are_the_derivatives(case: str, moves: str) -> None:
    """At one level, tokens 2, 3 against 0, 1: dx = A y in second blocks, dy = A^T x in first ones."""
    rows, cols, pairs = CASES[case]
    generator = torch.Generator().manual_seed(len(case))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    values = {n: draw(4, 3) for n in (*rows, *cols)}
    second = torch.tensor([False, False, True, True])[:, None]
    meet = second & ~second.T
    a = [draw(4, 4) for _ in pairs]
    tiles = meeting_tiles(rows, cols, pairs)
    row_moves, col_moves = [moves != "columns"] * len(rows), [moves != "rows"] * len(cols)
    products = meeting_products(tiles, rows, cols, pairs, row_moves, col_moves)
    whole = [
        torch.where(
            second,
            values[rows[t.row]] if t.row is not None else torch.zeros(4, 3).double(),
            values[cols[t.col]] if t.col is not None else torch.zeros(4, 3).double(),
        )
        for t in tiles
    ]
    dx = [torch.zeros(4, 3).double() for _ in rows]
    dy = [torch.zeros(4, 3).double() for _ in cols]
    for p in products:
        matrix = sum((torch.where(meet, a[n], 0.0) for n in p.lower), torch.zeros(4, 4).double())
        matrix = matrix + sum((torch.where(meet, a[n], 0.0).T for n in p.upper), torch.zeros(4, 4).double())
        step, target = matrix @ whole[p.source], tiles[p.target]
        if p.lower:
            assert target.row is not None
            dx[target.row] += torch.where(second, step, 0.0)
        if p.upper:
            assert target.col is not None
            dy[target.col] += torch.where(second, 0.0, step)
    want_x = [torch.zeros(4, 3).double() for _ in rows]
    want_y = [torch.zeros(4, 3).double() for _ in cols]
    for n, (i, j) in enumerate(pairs):
        matrix = torch.where(meet, a[n], 0.0)
        want_x[i] += matrix @ values[cols[j]] * row_moves[i]
        want_y[j] += matrix.T @ values[rows[i]] * col_moves[j]
    torch.testing.assert_close(dx, want_x)
    torch.testing.assert_close(dy, want_y)


def test_two_rows_and_two_columns_take_four_products_instead_of_eight() -> None:
    rows, cols, pairs = CASES["two of each"]
    tiles = meeting_tiles(rows, cols, pairs)
    assert len(meeting_products(tiles, rows, cols, pairs, [True, True], [True, True])) == 4
