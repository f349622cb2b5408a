"""Decayed scores of one gate, computed together.

All scores with the same log decay w share the walk over block pairs and its exponentials: one factor per
row and level, whatever the number of scores. Their derivatives do so too, and are summed where they are
made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from linalg_dsl.planner.plan import ChunkPlan


@dataclass
class ScoreGroup:
    """The scores of one w: distinct rows (x with its read), columns y, and which pairs are wanted."""

    w: int
    rows: list[tuple[int, str]] = field(default_factory=list)
    cols: list[int] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    cotangents: list[int] = field(default_factory=list)

    def add(self, x: int, y: int, read: str, cotangent: int = -1) -> None:
        if (x, read) not in self.rows:
            self.rows.append((x, read))
        if y not in self.cols:
            self.cols.append(y)
        pair = (self.rows.index((x, read)), self.cols.index(y))
        if cotangent >= 0 or pair not in self.pairs:
            self.pairs.append(pair)
            self.cotangents.append(cotangent)

    def attrs(self) -> dict[str, str | int]:
        return {
            "rows": len(self.rows),
            "cols": len(self.cols),
            "reads": ",".join(read for _, read in self.rows),
            "pairs": ",".join(f"{i}-{j}" for i, j in self.pairs),
        }


def score_groups(plan: ChunkPlan) -> dict[int, ScoreGroup]:
    """The decayed scores of a plan by their w."""
    groups: dict[int, ScoreGroup] = {}
    for node in plan.nodes:
        if node.op == "decayed_score":
            x, y, w = node.args
            groups.setdefault(w, ScoreGroup(w)).add(x, y, str(node.attr("read")))
    return groups


@dataclass(frozen=True, slots=True)
class AdjointGroup:
    """Derivatives of the scores of one w. ``terms``: node -> the result that it is a term of.

    All terms of one result are parts of the cotangent of one value (an x, a y, or w), so reverse mode adds
    them up and uses nothing but their sum: one of them may stand for all, and the others for zero.
    """

    scores: ScoreGroup
    terms: Mapping[int, int]


def adjoint_groups(plan: ChunkPlan) -> dict[int, AdjointGroup]:
    """The derivatives of decayed scores by their w: result dx_i is i, dy_j rows + j, dw rows + cols."""
    scored = _score_factors(plan)
    groups: dict[int, ScoreGroup] = {}
    for (a, w, read), (x, y) in scored.items():
        groups.setdefault(w, ScoreGroup(w)).add(x, y, read, a)
    out = {}
    for w, group in groups.items():
        terms: dict[int, int] = {}
        for n, node in enumerate(plan.nodes):
            if node.op not in ("decay_apply", "pair_gate") or node.args[-1] != w:
                continue
            read = str(node.attr("read"))
            x, y = scored[node.args[0], w, read]
            if node.op == "pair_gate":
                terms[n] = len(group.rows) + len(group.cols)
            elif node.attr("transposed"):
                terms[n] = len(group.rows) + group.cols.index(y)
            else:
                terms[n] = group.rows.index((x, read))
        out[w] = AdjointGroup(group, terms)
    return out


def _score_factors(plan: ChunkPlan) -> dict[tuple[int, int, str], tuple[int, int]]:
    """For each (A, w, read) of a decayed score's derivatives: the score's x and y.

    Where only one derivative is wanted the other factor is not in the plan; any value of that shape does,
    since its derivative is not read.
    """
    found: dict[tuple[int, int, str], dict[str, int]] = {}
    for node in plan.nodes:
        if node.op == "pair_gate":
            a, x, y, w = node.args
            found.setdefault((a, w, str(node.attr("read"))), {}).update(x=x, y=y)
        elif node.op == "decay_apply":
            a, z, w = node.args
            side = "x" if node.attr("transposed") else "y"
            found.setdefault((a, w, str(node.attr("read"))), {}).setdefault(side, z)
    return {key: (xy.get("x", xy.get("y", -1)), xy.get("y", xy.get("x", -1))) for key, xy in found.items()}
