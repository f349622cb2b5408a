"""Chunk plans over indeterminates, entry by entry, each from the meaning of its op (``algebra.exact``)."""

from __future__ import annotations

from collections.abc import Mapping

from linalg_dsl.algebra.exact import Value, total
from linalg_dsl.algebra.expr import RESET
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.exact_step import Leaves, rational
from linalg_dsl.planner.ops import FLOOR, OTHER
from linalg_dsl.planner.plan import ChunkPlan, Node

Index = Mapping[str, int]
_ZERO = Value.number(0)


class PlanEntries:
    """Entries of nodes, each from the meaning of its op, kept once computed."""

    def __init__(self, plan: ChunkPlan, leaves: Leaves, sizes: Mapping[str, int]) -> None:
        self.plan = plan
        self.leaves = leaves
        self.sizes = sizes
        self.made: dict[tuple[int, tuple[int, ...]], Value] = {}

    def at(self, i: int, index: Index) -> Value:
        """The entry of node ``i``; axes that the node lacks are ignored."""
        node = self.plan.nodes[i]
        key = (i, tuple(index[a] for a in node.axes))
        if key not in self.made:
            self.made[key] = self._entry(node, dict(zip(node.axes, key[1], strict=True)))
        return self.made[key]

    def leaf_name(self, node: Node, index: Index) -> str:
        """The indeterminate that stands for an entry of a leaf; a state's is named as it is declared."""
        attrs = dict(node.attrs)
        name, row = str(attrs["name"]), attrs.get("row")
        declared = {s.name: tuple(map(str, s.dims)) for s in self.leaves.spec.states}
        place = [index[a] for a in (declared[name] if node.op == "carry" else node.axes)]
        if row is not None:
            place.insert(1 if node.op == "input" else 0, int(str(row)))
        if node.op == "carry":
            name = f"{name}_0" if attrs["direction"] == "forward" else f"d_{name}_C"
        return Leaves.place(f"d_{name}" if node.op == "cotangent" else name, *place)

    def _over(self, axis: str) -> range:
        return range(self.sizes[axis])

    def _entry(self, node: Node, index: dict[str, int]) -> Value:
        args, attrs = node.args, dict(node.attrs)

        def arg(k: int, **changed: int) -> Value:
            return self.at(args[k], {**index, **changed})

        match node.op:
            case "number":
                return Value.number(rational(float(str(attrs["value"]))))
            case "const":
                return self.leaves.const(str(attrs["name"]))
            case "input" | "param" | "carry" | "cotangent":
                name = str(attrs["name"])
                return Value.free(self.leaf_name(node, index), name in self.leaves.positive)
            case "add":
                return arg(0) + arg(1)
            case "mul":
                return arg(0) * arg(1)
            case "maximum" | "compare" if self._number(args[1]) in (RESET, FLOOR):
                return arg(0) if node.op == "maximum" else Value.number(1)  # indeterminates are finite
            case "maximum" | "minimum" | "compare":
                return Value.opaque(node.op, arg(0), arg(1))
            case "unary" if attrs["fn"] == "pow":
                return arg(0).power(rational(float(str(attrs["exponent"]))))
            case "unary":
                return arg(0).function(str(attrs["fn"]))
            case "sum":
                return total(arg(0, **{str(attrs["axis"]): j}) for j in self._over(str(attrs["axis"])))
            case "amax":
                axis = str(attrs["axis"])
                return Value.opaque("amax", *(arg(0, **{axis: j}) for j in self._over(axis)))
            case "tokens" | "expand":
                return arg(0)
            case "score" if len(self.plan.nodes[args[0]].axes) == 1:
                return arg(0) * arg(1, t=index["s"])
            case "compose":
                rows, columns = (("s", "t") if attrs[side] else ("t", "s") for side in ("left", "right"))
                return total(
                    arg(0, **{rows[0]: index["t"], rows[1]: j})
                    * arg(1, **{columns[0]: j, columns[1]: index["s"]})
                    for j in self._over("t")
                )
            case "swap":
                return self.at(args[0], {"t": index["s"]} if "s" in node.axes else {"s": index["t"]})
            case "weigh":
                return arg(0) * arg(1)
            case "boundary_product":
                axis = OTHER[node.axes[0]]
                return total(arg(0, **{axis: j}) * arg(1, **{axis: j}) for j in self._over(axis))
            case "score":
                d = self.plan.nodes[args[0]].axes[1]
                return total(arg(0, **{d: j}) * arg(1, t=index["s"], **{d: j}) for j in self._over(d))
            case "apply":
                return total(arg(0, s=s) * arg(1, t=s) for s in self._over("t"))
            case "apply_t":
                return total(arg(0, t=t, s=index["t"]) * arg(1, t=t) for t in self._over("t"))
            case "read":
                con = str(attrs["con"])
                return total(arg(0, **{con: j}) * arg(1, **{con: j}) for j in self._over(con))
            case "write":
                return total(arg(0, t=t) * arg(1, t=t) for t in self._over("t"))
            case "mask":
                return arg(0) if _holds(index, str(attrs["read"])) else _ZERO
            case "pairs_decay":
                return self._pair(args[0], index, str(attrs["read"]))
            case "decayed_score":
                axis = self.plan.nodes[args[0]].axes[1]
                return total(
                    arg(0, **{axis: j})
                    * arg(1, **{axis: j}, t=index["s"])
                    * self._pair(args[2], {**index, axis: j}, str(attrs["read"]))
                    for j in self._over(axis)
                )
            case "from_start":
                return self._decay(args[0], index, range(index["t"] + (0 if attrs["exclusive"] else 1)))
            case "to_end":
                return self._decay(args[0], index, range(index["t"] + 1, self.sizes["t"]))
            case "scale_state":
                return self._decay(args[1], index, self._over("t")) * arg(0)
            case "decay_apply":
                turned, read = bool(attrs["transposed"]), str(attrs["read"])
                made = []
                for other in self._over("t"):
                    pair = {"t": other, "s": index["t"]} if turned else {"t": index["t"], "s": other}
                    decay = self._pair(args[2], {**index, **pair}, read)
                    made.append(arg(0, **pair) * decay * arg(1, t=other))
                return total(made)
            case "boundary_gate":
                axis = OTHER[node.axes[0]]
                product = total(arg(0, **{axis: j}) * arg(1, **{axis: j}) for j in self._over(axis))
                return self._decay(args[2], index, self._over("t")) * product
            case "signs":
                return self._signs(args[0], index, range(index["t"] + (0 if attrs["exclusive"] else 1)))
            case "sign_total":
                return self._signs(args[0], index, self._over("t"))
            case "gate_sum":
                kind, at = str(attrs["kind"]), index["t"]
                first = {"from_start": at, "from_start_exclusive": at + 1, "to_end": 0}[kind]
                last = at if kind == "to_end" else self.sizes["t"]
                return total(arg(0, t=t) for t in range(first, last))
            case "span_sum":
                return total(arg(0, **pair) for pair in self._spans(index["t"], str(attrs["read"])))
            case "pair_gate":
                read = str(attrs["read"])
                return total(
                    arg(0, **pair)
                    * arg(1, t=pair["t"])
                    * arg(2, t=pair["s"])
                    * self._pair(args[3], {**index, **pair}, read)
                    for pair in self._spans(index["t"], read)
                )
            case "pick":
                solved = self._solved if self.plan.nodes[args[0]].op == "solve" else self._solved_reversed
                return solved(args[0], int(str(attrs["index"])), index)
            case op:
                raise InternalError(f"op {op!r} has no exact meaning")

    def _number(self, i: int) -> float | None:
        node = self.plan.nodes[i]
        return float(str(node.attr("value"))) if node.op == "number" else None

    def _spans(self, token: int, read: str) -> list[dict[str, int]]:
        """The pairs whose interval holds a token."""
        first = token + 1 if read == "exclusive" else token
        return [{"t": t, "s": s} for t in range(first, self.sizes["t"]) for s in range(token)]

    def _decay(self, w: int, index: Index, steps: range) -> Value:
        return total(self.at(w, {**index, "t": t}) for t in steps).exp()

    def _signs(self, x: int, index: Index, steps: range) -> Value:
        made = Value.number(1)
        for t in steps:
            made = made * self.at(x, {**index, "t": t}).function("side")
        return made

    def _pair(self, w: int, index: Index, read: str) -> Value:
        if not _holds(index, read):
            return _ZERO
        last = index["t"] - 1 if read == "exclusive" else index["t"]
        return self._decay(w, index, range(index["s"] + 1, last + 1))

    def _solved(self, solve: int, entry: int, index: Index) -> Value:
        """Z or U of a solve at one token, from the earlier tokens."""
        node = self.plan.nodes[solve]
        m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
        key = (-solve - 1, (entry, *(index[a] for a in node.axes)))
        if key in self.made:
            return self.made[key]
        given = self.at(node.args[2 * m * r + entry], index)
        if entry < m:
            terms = (
                self.at(node.args[m * r + entry * r + i], index) * self._solved(solve, m + i, index)
                for i in range(r)
            )
        else:
            terms = (
                self.at(node.args[(entry - m) * m + j], {**index, "s": s})
                * self._of_rows(node, {**index, "s": s})
                * self._solved(solve, j, {**index, "t": s})
                for j in range(m)
                for s in range(index["t"])
            )
        self.made[key] = given + total(terms)
        return self.made[key]

    def _solved_reversed(self, solve: int, entry: int, index: Index) -> Value:
        """Y or X of a reversed solve at one token, from the later tokens."""
        node = self.plan.nodes[solve]
        m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
        key = (-solve - 1, (entry, *(index[a] for a in node.axes)))
        if key in self.made:
            return self.made[key]
        given = self.at(node.args[2 * m * r + entry], index)
        if entry < m:
            terms = [
                self.at(node.args[i * m + entry], {**index, "t": t, "s": index["t"]})
                * self._of_rows(node, {**index, "t": t, "s": index["t"]})
                * self._solved_reversed(solve, m + i, {**index, "t": t})
                for i in range(r)
                for t in range(index["t"] + 1, self.sizes["t"])
            ]
        else:
            terms = [
                self.at(node.args[m * r + j * r + entry - m], index) * self._solved_reversed(solve, j, index)
                for j in range(m)
            ]
        self.made[key] = given + total(terms)
        return self.made[key]

    def _of_rows(self, solve: Node, index: Index) -> Value:
        """The decay by which a solve multiplies its scores, column by column of its rows."""
        decayed = dict(solve.attrs).get("decayed")
        return self._pair(solve.args[-1], index, "decayed") if decayed else Value.number(1)


def _holds(index: Index, read: str) -> bool:
    return index["s"] <= index["t"] if read == "inclusive" else index["s"] < index["t"]
