"""Which [C, C] values of a plan are zero above the diagonal, and what has to be done so that they stay it.

Tokens above the diagonal are later ones. Multiplied by zero they leave no trace, unless they are NaN or
infinite: 0 * inf is NaN. So products with a triangle select, and products of a triangle with tiles are looked
at (templates/tile_library.py, ``without_later``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from linalg_dsl.planner.plan import Node

Triangle = Literal["whole", "strict"]
"""With the diagonal, or without."""


def triangle(nodes: Sequence[Node], n: int) -> Triangle | None:
    """What is known of the entries of a [C, C] value above its diagonal; None where nothing is."""
    node = nodes[n]
    if node.axes != ("t", "s"):
        return None
    match node.op:
        case "mask" | "pairs_decay":
            return _of_read(str(node.attr("read")))
        case "pick":
            return _of_pick(nodes[node.args[0]], int(str(node.attr("index"))))
        case "add" | "mul":
            found = [triangle(nodes, a) for a in node.args]
            if node.op == "mul":
                known = [f for f in found if f]
                return None if not known else "strict" if "strict" in known else "whole"
            if None in found:
                return None
            return "strict" if set(found) == {"strict"} else "whole"
        case "apply":
            found = [triangle(nodes, a) for a in node.args]
            return None if None in found else "strict" if "strict" in found else "whole"
        case "compose" if not node.attr("left") and not node.attr("right"):
            found = [triangle(nodes, a) for a in node.args]
            return None if None in found else "strict" if "strict" in found else "whole"
        case _:
            return None


def selected(kind: Triangle | None, value: str) -> str:
    """A [C, C] value, of a triangle with zeros above the diagonal whatever stands there."""
    if kind is None:
        return value
    return f"tl.where(o_t[:, None] {'>=' if kind == 'whole' else '>'} o_t[None, :], {value}, 0.0)"


def _of_read(read: str) -> Triangle:
    return "whole" if read == "inclusive" else "strict"


def _of_pick(source: Node, index: int) -> Triangle | None:
    attrs = dict(source.attrs)
    if source.op == "decayed_scores":
        row = int(str(attrs["pairs"]).split(",")[index].split("-")[0])
        return _of_read(str(attrs["reads"]).split(",")[row])
    if source.op == "ut_transform":
        i, k = divmod(index, int(str(attrs["r"])))
        return "whole" if i == k else "strict"
    return None
