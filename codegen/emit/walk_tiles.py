"""Tiles of a walk by tensor descriptors, beside the loads by pointers that stand for them where there are none.

A descriptor has the axes [sequence of the batch, head, token, channel], or [chunk, head, token, token], whatever
the order in memory: a box is one of the first two each, so that tokens and channels beyond the ends are zero by
the bounds that the hardware looks at, as they are by the masks of the pointers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from linalg_dsl.codegen.emit.names import Names

CONSTANT = "TMA"
"""The constexpr that tells both ways apart."""
RESERVED = (CONSTANT, "i_b", "i_row", "i_start_row")


@dataclass(frozen=True, slots=True)
class DescribedTile:
    """A descriptor as a kernel's argument: of which of the launcher's tensors, axes "tK", "tV" or "ts"."""

    parameter: str
    tensor: str
    axes: str


@dataclass
class WalkTiles:
    """Those of one walk; ``add`` notes a load by its name in the kernel."""

    names: Names
    described: dict[str, DescribedTile] = field(default_factory=dict)
    loads: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, tensor: str, axes: str, head: str, column: str, shape: str, turned: bool) -> None:
        """``head``: which of the descriptor's; ``column``: the first channel; ``shape``: tokens x columns."""
        tile = self.described.get(tensor)
        if tile is None:
            tile = DescribedTile(self.names.unique(f"tile_{tensor}"), tensor, axes)
            self.described[tensor] = tile
        place = f"i_ch.to(tl.int32), {head}, 0, 0" if axes == "ts" else f"i_b, {head}, i_row, {column}"
        text = f"tl.reshape({tile.parameter}.load([{place}]), ({shape}))"
        self.loads[name] = f"tl.trans({text})" if turned else text

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
        have: list[str] = []
        body: list[str] = []
        for line in lines:
            found = re.match(r"(b_\w+) = tl\.load\(", line)
            if found is None or found[1] not in self.loads:
                body.append(line)
                continue
            have.append(found[1])
            body += [f"if not {CONSTANT}:", f"    {line}"]
        if not have:
            return body
        row = ["    i_row = i_start_row + i_c * C"] if any("i_row" in self.loads[n] for n in have) else []
        return [f"if {CONSTANT}:", *row, *(f"    {n} = {self.loads[n]}" for n in have), *body]
