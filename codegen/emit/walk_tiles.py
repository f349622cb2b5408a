"""Tiles of a walk by tensor descriptors, beside the loads by pointers that stand for them elsewhere.

A descriptor has the axes [sequence of the batch, head, token, channel], or [chunk, head, token, token],
whatever the order in memory. A box is one of each of the first two, so that tokens and channels beyond the
ends are zero by the bounds that the hardware looks at, as they are by the masks of the pointers. It knows
nothing of sequences packed into a batch of one: there boxes take whole chunks, and pointers the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from linalg_dsl.codegen.emit.kernel_text import DescribedTile, Memory
from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.schedule.kernel_plan import Direction
from linalg_dsl.planner.ops import Axes

CONSTANT = "TMA"
"""The constexpr that tells both ways apart."""
PARTS = "PARTS"
"""The constexpr that says how many loops a walk has: 2 where only whole chunks are loaded by boxes."""
WHOLE: Mapping[Direction, str] = {"forward": "part == 0", "reverse": f"part == {PARTS} - 1"}
"""Which of the loops has the whole chunks; where there is one only, that one."""
RESERVED = (CONSTANT, PARTS, "part", "turn", "begin", "end", "i_b", "i_row", "i_start_row")


@dataclass
class WalkTiles:
    """Those of one walk; ``add`` notes a load by its name in the kernel."""

    names: Names
    direction: Direction
    described: dict[str, DescribedTile] = field(default_factory=dict)
    loads: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        axes: Axes,
        memory: Memory,
        lengths: Mapping[str, str],
        split: str | None,
        turned: bool,
    ) -> None:
        """Notes a load of a tile with these axes; ``lengths``: of an axis the extent in the tile."""
        kind, tensor = "".join(axes), memory.argument
        tile = self.described.get(tensor)
        if tile is None:
            tile = DescribedTile(self.names.unique(f"tile_{tensor}"), tensor, kind)
            self.described[tensor] = tile
        if kind == "ts":
            place = "i_ch.to(tl.int32), i_h, 0, 0"
        else:
            head = f"i_h // {memory.ratio}" if memory.ratio else "i_h"
            if memory.rows > 1:
                head = f"({head}) * {memory.rows} + {memory.row}"
            column = "i_block * BLOCK" if split == axes[1] else "0"
            place = f"i_b, {head}, i_row, {column}"
        text = f"tl.reshape({tile.parameter}.load([{place}]), (C, {lengths[axes[1]]}))"
        self.loads[name] = f"tl.trans({text})" if turned else text

    @property
    def whole(self) -> str:
        """Which of the loops has the whole chunks."""
        return WHOLE[self.direction]

    @property
    def turn(self) -> str:
        """How many rounds the first of two loops has; wrong offsets can make a length negative."""
        whole = "tl.maximum(length, 0) // C"
        return whole if self.direction == "forward" else f"chunks - {whole}"

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(tile.parameter for tile in self.described.values())

    def before(self) -> tuple[str, ...]:
        """Lines before the loop: the sequence of the batch, and the token of it, at which the walk begins."""
        rows = next((t.parameter for t in self.described.values() if t.axes != "ts"), None)
        if rows is None:
            return ()
        return (
            f"if {CONSTANT}:",
            f"    i_b = (start // {rows}.shape[2]).to(tl.int32)",
            f"    i_start_row = (start % {rows}.shape[2]).to(tl.int32)",
        )

    def around(self, lines: Sequence[str]) -> list[str]:
        """The lines of a round, before them all its copies, which then count as one; pointers else."""
        copied = f"{CONSTANT} and {self.whole}"
        have: list[str] = []
        body: list[str] = []
        for line in lines:
            found = re.match(r"(b_\w+) = tl\.load\(", line)
            if found is None or found[1] not in self.loads:
                body.append(line)
                continue
            have.append(found[1])
            body += [f"if not ({copied}):", f"    {line}"]
        if not have:
            return body
        row = ["    i_row = i_start_row + i_c * C"] if any("i_row" in self.loads[n] for n in have) else []
        return [f"if {copied}:", *row, *(f"    {n} = {self.loads[n]}" for n in have), *body]
