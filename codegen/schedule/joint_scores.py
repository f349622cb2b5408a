"""Decay ops of one gate, computed together.

All scores with the same log decay w share the walk over block pairs and its exponentials: one factor per
row and level, whatever the number of scores. Their derivatives do so too, and are summed where they are
made; decayed products of the forward are such derivatives as well. Ops are taken together where no kernel has
to wait for that: those of the forward, those that the update of a cotangent needs, and the rest of the
backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from linalg_dsl.planner.plan import ChunkPlan, Node

MOST_SCORES = 10
"""So many [C, C] sums leave room for the tiles that they are made of."""
JOINT = ("decayed_score", "decay_apply", "pair_gate")
_Stage = Literal["forward", "update", "rest"]
_Key = tuple[str, int, _Stage, bool]


@dataclass
class JointOp:
    """One ``decayed_scores`` or ``decay_adjoints``: distinct rows (x with its read), columns y, wanted pairs.

    ``terms``: node -> the result that it is a term of; of scores the number of its pair, of derivatives
    dx_i is i, dy_j rows + j, dw rows + cols; ``cotangents`` has their A for each pair. In the rest of the
    backward all terms of one result are parts of the cotangent of one value (an x, a y, or w), so reverse
    mode adds them up and uses nothing but their sum: one of them may stand for all, and the others for zero.
    ``same``: rows i that are column j as well; by the same argument dx_i is part of dy_j there.
    """

    op: str
    w: int
    rows: list[tuple[int, str]] = field(default_factory=list)
    cols: list[int] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    cotangents: list[int] = field(default_factory=list)
    terms: dict[int, int] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)

    def attrs(self) -> dict[str, str | int]:
        found: dict[str, str | int] = {
            "rows": len(self.rows),
            "cols": len(self.cols),
            "reads": ",".join(read for _, read in self.rows),
            "pairs": ",".join(f"{i}-{j}" for i, j in self.pairs),
        }
        if self.same:
            found["same"] = ",".join(f"{i}-{j}" for i, j in self.same.items())
        return found

    def stand_in(self, result: int) -> int:
        """The last term of a result: it stands for all of them."""
        return max(n for n, found in self.terms.items() if found == result)


@dataclass
class _Form:
    """One form sum A_ts x_t y_s Lambda, and the nodes that are derivatives of it; -1: not known.

    ``own``: the factor that is a place of its own, since nothing is summed with it: "x", "y", or neither.
    """

    read: str
    a: int = -1
    x: int = -1
    y: int = -1
    own: str = ""
    nodes: list[int] = field(default_factory=list)

    def takes(self, other: _Form) -> bool:
        """Whether both can be one form."""
        if (self.a, self.read) != (other.a, other.read) or self.own or other.own:
            return False
        return all(-1 in (p, q) or p == q for p, q in ((self.x, other.x), (self.y, other.y)))


class _Groups:
    """Forms that are computed together, such that no group waits for itself or has too many sums at once."""

    def __init__(self) -> None:
        self.forms: list[list[_Form]] = []
        self.keys: list[_Key] = []
        self.needs: list[set[int]] = []

    def add(self, key: _Key, form: _Form, needs: Iterable[int]) -> int:
        before = self._all_before(needs)
        for g, known in enumerate(self.keys):
            if known == key and g not in before and self._has_room(g, form):
                break
        else:
            g = len(self.keys)
            self.keys.append(key)
            self.forms.append([])
            self.needs.append(set())
        self.needs[g] |= before
        for other in self.forms[g]:
            if other.takes(form):
                other.x, other.y = max(other.x, form.x), max(other.y, form.y)
                other.nodes += form.nodes
                return g
        self.forms[g].append(form)
        return g

    def _has_room(self, g: int, form: _Form) -> bool:
        """Scores stay in registers until all blocks of their axis are summed up."""
        forms = self.forms[g]
        return (
            self.keys[g][0] != "decayed_scores"
            or len(forms) < MOST_SCORES
            or any(x.takes(form) for x in forms)
        )

    def _all_before(self, groups: Iterable[int]) -> set[int]:
        found: set[int] = set()
        todo = list(groups)
        while todo:
            g = todo.pop()
            if g not in found:
                found.add(g)
                todo.extend(self.needs[g])
        return found


def joint_ops(plan: ChunkPlan, forward: int) -> Mapping[int, JointOp]:
    """The joint op of every decay op of a plan whose first ``forward`` nodes are the forward's."""
    groups = _Groups()
    needs: list[set[int]] = []
    carried = _carried(plan)
    updates = plan.live(after for _, direction, _, after in plan.carries if direction == "reverse")
    for n, node in enumerate(plan.nodes):
        behind = {g for a in node.args for g in needs[a]}
        if node.op in JOINT:
            stage: _Stage = "forward" if n < forward else "update" if n in updates else "rest"
            op = "decayed_scores" if node.op == "decayed_score" else "decay_adjoints"
            key = (op, node.args[-1], stage, carried[n] and stage != "rest")
            behind = {groups.add(key, _form(n, node, stage), behind)}
        needs.append(behind)
    found: dict[int, JointOp] = {}
    for (op, w, stage, _), forms in zip(groups.keys, groups.forms, strict=True):
        whole = _joined(plan, op, w, forms)
        if op == "decay_adjoints" and stage == "rest":
            _merge_rows(whole)
        found |= dict.fromkeys(whole.terms, whole)
    return found


def _carried(plan: ChunkPlan) -> list[bool]:
    out: list[bool] = []
    for node in plan.nodes:
        out.append(node.op == "carry" or any(out[a] for a in node.args))
    return out


def _form(n: int, node: Node, stage: _Stage) -> _Form:
    attrs = dict(node.attrs)
    read = str(attrs["read"])
    match node.op:
        case "decayed_score":
            return _Form(read, x=node.args[0], y=node.args[1], nodes=[n])
        case "pair_gate":
            a, x, y, _ = node.args
            return _Form(read, a, x, y, nodes=[n])
        case _:
            a, z, _ = node.args
            own = stage != "rest"
            if attrs["transposed"]:
                return _Form(read, a, x=z, own="y" if own else "", nodes=[n])
            return _Form(read, a, y=z, own="x" if own else "", nodes=[n])


def _joined(plan: ChunkPlan, op: str, w: int, forms: list[_Form]) -> JointOp:
    """Where only one derivative is wanted the other factor may not be in the plan; any value of that shape
    does, since its derivative is not read."""
    out = JointOp(op, w)
    places = []
    for form in forms:
        x, y = (form.x if form.x >= 0 else form.y), (form.y if form.y >= 0 else form.x)
        if form.own == "x" or (x, form.read) not in out.rows:
            out.rows.append((x, form.read))
        if form.own == "y" or y not in out.cols:
            out.cols.append(y)
        i = len(out.rows) - 1 if form.own == "x" else out.rows.index((x, form.read))
        j = len(out.cols) - 1 if form.own == "y" else out.cols.index(y)
        places.append((i, j))
        if op == "decay_adjoints" or (i, j) not in out.pairs:
            out.pairs.append((i, j))
            out.cotangents.append(form.a)
    for form, (i, j) in zip(forms, places, strict=True):
        for n in form.nodes:
            out.terms[n] = _result(out, plan.nodes[n], i, j)
    return out


def _merge_rows(joint: JointOp) -> None:
    """Rows that are columns as well, unless they take longer intervals than other rows do."""
    short = any(read == "exclusive" for _, read in joint.rows)
    for i, (x, read) in enumerate(joint.rows):
        if x in joint.cols and short == (read == "exclusive"):
            joint.same[i] = joint.cols.index(x)
    count = len(joint.rows)
    for n, result in joint.terms.items():
        if result in joint.same:
            joint.terms[n] = count + joint.same[result]


def _result(joint: JointOp, node: Node, i: int, j: int) -> int:
    match node.op:
        case "decayed_score":
            return joint.pairs.index((i, j))
        case "pair_gate":
            return len(joint.rows) + len(joint.cols)
        case _:
            return len(joint.rows) + j if node.attr("transposed") else i
