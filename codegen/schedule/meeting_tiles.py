"""Which tiles and products carry out a joint op of decayed scores, level by level of neighbouring blocks.

At a level every token stands in the first or the second of two blocks that meet. Rows x count in second
blocks only and columns y in first ones only, so one tile holds both: x of the second blocks beside y of the
first. A product of such a tile with a [C, C] matrix that is zero but where the two blocks meet gives, in its
second blocks, what the pairs with y add to dx, and in its first blocks what those with x add to dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MeetingTile:
    """``row``: the x whose second blocks it holds; ``col``: the y whose first blocks it holds, if any."""

    row: int | None
    col: int | None


@dataclass(frozen=True, slots=True)
class MeetingProduct:
    """A tile times a matrix, added to another: ``lower`` and ``upper`` number the pairs of the matrix.

    The sum of the A of pairs ``lower`` stands below the diagonal and takes y of the source to dx of the
    target, the transposed sum of ``upper`` above it and takes x of the source to dy of the target.
    """

    source: int
    target: int
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()


def meeting_tiles(rows: Sequence[int], cols: Sequence[int], pairs: Sequence[Pair]) -> tuple[MeetingTile, ...]:
    """Tiles with every row and column that stands in a pair, as few as there are; ``rows`` and ``cols`` name
    the values, so that a row that is a column as well shares its tile with itself."""
    match = _matching(pairs, len(rows), len(cols))
    tiles = [MeetingTile(i, j) for i, j in sorted(match.items())]
    for i, j in sorted(pairs, key=lambda p: (rows[p[0]] != cols[p[1]], p)):
        if all(tile.row != i for tile in tiles) or all(tile.col != j for tile in tiles):
            tiles.append(MeetingTile(i, j))
    return tuple(tiles)


def source_of_column(tiles: Sequence[MeetingTile], rows: Sequence[int], cols: Sequence[int], j: int) -> int:
    """The tile to take a column of, one that needs no choosing between two values where there is such."""
    found = [c for c, tile in enumerate(tiles) if tile.col == j]
    return min(found, key=lambda c: _two_values(tiles[c], rows, cols))


def source_of_row(tiles: Sequence[MeetingTile], rows: Sequence[int], cols: Sequence[int], i: int) -> int:
    """The tile to take a row of."""
    found = [c for c, tile in enumerate(tiles) if tile.row == i]
    return min(found, key=lambda c: _two_values(tiles[c], rows, cols))


def meeting_products(
    tiles: Sequence[MeetingTile],
    rows: Sequence[int],
    cols: Sequence[int],
    pairs: Sequence[Pair],
    row_moves: Sequence[bool],
    col_moves: Sequence[bool],
) -> tuple[MeetingProduct, ...]:
    """The products that give dx of every row that moves and dy of every column that does."""
    lower: dict[Pair, tuple[int, ...]] = {}
    upper: dict[Pair, tuple[int, ...]] = {}
    for number, (i, j) in enumerate(pairs):
        own = [c for c, tile in enumerate(tiles) if (tile.row, tile.col) == (i, j)]
        of_row = own[0] if own else source_of_row(tiles, rows, cols, i)
        of_col = own[0] if own else source_of_column(tiles, rows, cols, j)
        if row_moves[i]:
            lower[of_col, of_row] = (*lower.get((of_col, of_row), ()), number)
        if col_moves[j]:
            upper[of_row, of_col] = (*upper.get((of_row, of_col), ()), number)
    return tuple(
        MeetingProduct(source, target, lower.get((source, target), ()), upper.get((source, target), ()))
        for source, target in sorted({*lower, *upper}, key=lambda p: (p[1], p[0]))
    )


def _two_values(tile: MeetingTile, rows: Sequence[int], cols: Sequence[int]) -> bool:
    return tile.row is not None and tile.col is not None and rows[tile.row] != cols[tile.col]


def _matching(pairs: Sequence[Pair], rows: int, cols: int) -> dict[int, int]:
    """The column of every row in a largest matching, by augmenting paths."""
    of_col: dict[int, int] = {}

    def free(i: int, seen: set[int]) -> bool:
        for row, j in pairs:
            if row == i and j not in seen:
                seen.add(j)
                if j not in of_col or free(of_col[j], seen):
                    of_col[j] = i
                    return True
        return False

    for i in range(rows):
        free(i, set())
    return {i: j for j, i in of_col.items()}
