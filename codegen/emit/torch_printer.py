"""Plan nodes as PyTorch statements: one chunk of the forward or backward, one line per value.

A value with axes (a, b, ...) is a tensor [B, H, a, b, ...] (a per-head one [1, H, ...]); numbers and
consts are Python floats. Elementwise values that are used once and have no name of their own are
written inside the line that uses them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.torch_solve import SolvePrinter, Systems
from linalg_dsl.codegen.emit.torch_text import (
    ATOM,
    POWER,
    Text,
    add,
    call,
    dim,
    joined,
    matmul,
    method,
    mul,
    number,
    renamed,
    transposed,
)
from linalg_dsl.codegen.emit.trace import Values, values_of
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import FLOOR, Axes
from linalg_dsl.planner.plan import ChunkPlan, Node

_INLINE_LIMIT = 80
_LINE_LIMIT = 102
_SHORT = 16
_INLINE_OPS = frozenset(
    {
        "add",
        "mul",
        "unary",
        "sum",
        "read",
        "apply",
        "apply_t",
        "from_start",
        "to_end",
        "write",
        "contract",
        "score",
        "mask",
        "span_sum",
        "gate_sum",
        "decay_apply",
        "pair_gate",
        "boundary_gate",
        "signs",
        "sign_total",
        "scale_state",
        "compose",
        "swap",
        "weigh",
        "boundary_product",
    }
)
_PREFIX = {
    "score": "scores", "decayed_score": "scores", "mask": "scores", "pairs_decay": "decay", "read": "y",
    "apply": "y", "apply_t": "y", "write": "outer", "scale_state": "kept", "from_start": "since_start",
    "to_end": "until_end", "span_sum": "d_gate", "gate_sum": "d_gate", "pair_gate": "d_gate",
    "boundary_gate": "d_gate", "contract": "y", "swap": "turned", "decay_apply": "y", "sum": "total",
    "amax": "top", "compose": "decay", "weigh": "kept", "boundary_product": "d_gate",
}  # fmt: skip
_METHODS = {
    "exp": "exp", "log": "log", "sigmoid": "sigmoid", "tanh": "tanh", "relu": "relu", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "abs": "abs", "sign": "sign", "reciprocal": "reciprocal",
}  # fmt: skip
_FUNCTIONAL = {"logsigmoid", "silu", "elu"}


class ChunkPrinter:
    """Prints the nodes that ``roots`` need, in plan order.

    ``leaves`` gives the identifiers of inputs, params, consts, carries and cotangents by (op, name), a
    reverse carry under "carry_reverse";
    ``like`` is the identifier of a tensor [B, H, K, V] whose type and device new tensors take; ``row_counts``
    says how many rows an input has. After
    ``run``, ``lines`` holds the statements, ``used`` the helper functions they call and ``sizes`` which of
    the sizes K, V they mention.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        leaves: Mapping[tuple[str, str], str],
        names: Names,
        like: str,
        row_counts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.plan = plan
        self.leaves = leaves
        self.names = names
        self.like = like
        self.lines: list[str] = []
        self.row_counts = row_counts
        self.used: set[str] = set()
        self.sizes: set[str] = set()
        self._given: frozenset[int] = frozenset()
        self._text: dict[int, Text] = {}
        self._solve = SolvePrinter(self)
        self._solved: dict[int, list[Text]] = {}
        self._uses: dict[int, int] = {}

    def run(self, roots: Iterable[int], short: Collection[int] = ()) -> list[Text]:
        """The texts of ``roots``, all of them names, numbers or parts of arguments; ``short`` ones may be
        short expressions."""
        wanted = list(roots)
        live = self.plan.live(wanted, self._given) - self._given
        for i in live:
            node = self.plan.nodes[i]
            weight = 2 if node.op in ("solve", "solve_t") else 1  # a solve mentions its operands repeatedly
            for a in node.args:
                self._uses[a] = self._uses.get(a, 0) + weight
        rows = self._rows(live)
        for i in sorted(live - self._given):
            node = self.plan.nodes[i]
            if i in rows:
                self._unbind(rows[i])
                continue
            if node.op in ("solve", "solve_t"):
                labels = {
                    int(str(n.attr("index"))): n.label
                    for n in (self.plan.nodes[k] for k in live)
                    if n.op == "pick" and n.args == (i,)
                }
                self._solved[i] = self._solve.run(node, self._args(node), labels)
                continue
            text = self._print(node)
            keep = text.scalar or text.code.isidentifier()
            if i in short:
                keep |= i not in self._uses and len(text.code) <= _SHORT
            else:
                keep |= i not in wanted and self._inlined(i, node, text)
            self._text[i] = text if keep else self._assign(node, text)
        return [self._text[i] for i in wanted]

    def give(self, values: Mapping[int, Text], systems: Systems) -> None:
        """Values that the statements find made, and the systems of solves among them."""
        self._given = frozenset(values)
        self._text |= values
        self._solve.systems |= systems

    @property
    def systems(self) -> Systems:
        """The triangular systems of all solves, by the texts that they are made of."""
        return self._solve.systems

    def values(self) -> Values:
        """What the names of the function stand for; of a solve, what nothing else uses stands for it all."""
        found = values_of(self.plan, {i: text.code for i, text in self._text.items()})
        for i, solved in self._solved.items():
            found |= {t.code: (self.plan, i) for t in solved if t.code.isidentifier() and t.code not in found}
        return found

    # -- statements ---------------------------------------------------------------------------
    def _rows(self, live: Collection[int]) -> dict[int, tuple[int, ...]]:
        """The rows of inputs of which all are used, each with all of its input in order."""
        found: dict[str, dict[int, int]] = {}
        for i in live:
            node = self.plan.nodes[i]
            row = dict(node.attrs).get("row")
            if row is not None and node.op in ("input", "param"):
                found.setdefault(str(node.attr("name")), {})[int(str(row))] = i
        whole = (rows for name, rows in found.items() if len(rows) == self.row_counts.get(name, 0) > 1)
        return {i: tuple(rows[j] for j in sorted(rows)) for rows in whole for i in rows.values()}

    def _unbind(self, rows: tuple[int, ...]) -> None:
        if rows[0] in self._text:
            return
        node = self.plan.nodes[rows[0]]
        made = [self.names.unique(self.plan.nodes[i].label or "row") for i in rows]
        dim = -1 - sum(a in ("K", "V") for a in node.axes)
        source = self.leaves[node.op, str(node.attr("name"))]
        self.lines.append(f"{', '.join(made)} = {source}.unbind({dim})")
        for i, name in zip(rows, made, strict=True):
            self._text[i] = Text(name, ATOM, self.plan.nodes[i].axes)

    def _assign(self, node: Node, text: Text) -> Text:
        return self.let(node.label or _PREFIX.get(node.op, "x"), text)

    def let(self, wanted: str, text: Text) -> Text:
        if text.scalar or text.code.isidentifier():
            return text
        name = self.names.unique(wanted)
        self.lines.append(f"{name} = {text.code}")
        return Text(name, ATOM, text.axes)

    def _inlined(self, i: int, node: Node, text: Text) -> bool:
        if node.label or node.op not in _INLINE_OPS:
            return False
        return self._uses.get(i, 0) <= 1 and len(text.code) <= _INLINE_LIMIT

    # -- one node -----------------------------------------------------------------------------
    def _print(self, node: Node) -> Text:
        attrs = dict(node.attrs)
        text = self._value(node, self._args(node), attrs)
        limit = _LINE_LIMIT - max(len(node.label), 4)
        while len(text.code) > limit and self._name_longest(node):
            text = self._value(node, self._args(node), attrs)
        if text.axes != node.axes and not text.scalar:
            raise InternalError(f"{node.op} printed with axes {text.axes}, planned with {node.axes}")
        return text

    def _args(self, node: Node) -> list[Text]:
        return [self._text[a] for a in node.args if a in self._text]

    def _name_longest(self, node: Node) -> bool:
        """Takes the longest operand that stands inline out of the line; False where there is none."""
        inline = [a for a in node.args if a in self._text and len(self._text[a].code) > _LINE_LIMIT // 4]
        inline = [a for a in inline if not self._text[a].code.isidentifier()]
        if not inline:
            return False
        longest = max(inline, key=lambda a: len(self._text[a].code))
        self._text[longest] = self._assign(self.plan.nodes[longest], self._text[longest])
        return True

    def _value(self, node: Node, args: list[Text], attrs: Mapping[str, object]) -> Text:
        match node.op:
            case "number":
                return number(float(str(attrs["value"])))
            case "const":
                return Text(self.leaves["const", str(attrs["name"])], ATOM, (), None, True)
            case "input" | "param" | "carry" | "cotangent":
                return self._leaf(node, attrs)
            case "add":
                return add(args[0], args[1])
            case "mul":
                return mul(args[0], args[1])
            case "unary":
                return self._unary(str(attrs["fn"]), args[0], attrs.get("exponent"))
            case "maximum" | "minimum":
                return self._extremum(node.op, args[0], args[1])
            case "compare":
                self.used.add("step")
                axes = joined(args[0], args[1])
                return call("step", self._tensor(args[0]).fit(axes), args[1].fit(axes), axes=axes)
            case "sum" | "amax":
                axis = str(attrs["axis"])
                return method(args[0], node.op, str(dim(args[0].axes, axis)), axes=node.axes)
            case "tokens":
                return self._repeated(args[0], "t", node.axes)
            case "expand":
                return self._repeated(args[0], str(attrs["axis"]), node.axes)
            case _:
                return self._chunk_op(node, args, attrs)

    def _chunk_op(self, node: Node, args: list[Text], attrs: Mapping[str, object]) -> Text:
        axes = node.axes
        read = f'"{attrs.get("read")}"'
        match node.op:
            case "score" if len(args[0].axes) == 1:
                return mul(args[0], renamed(args[1], ("s",)))
            case "apply" | "apply_t" if len(args[1].axes) == 1:
                turned = node.op == "apply_t"
                product = mul(args[0], args[1] if turned else renamed(args[1], ("s",)))
                return method(product, "sum", "-2" if turned else "-1", axes=axes)
            case "compose":
                sides = zip(args, (attrs["left"], attrs["right"]), strict=True)
                a, b = (transposed(x) if turned else x for x, turned in sides)
                return matmul(a, b, axes)
            case "swap":
                return renamed(args[0], axes)
            case "weigh":
                return mul(args[1], args[0])
            case "boundary_product":
                product = mul(args[0], args[1])
                other = next(a for a in product.axes if a not in axes)
                return method(product, "sum", str(dim(product.axes, other)), axes=axes)
            case "score":
                return matmul(args[0], transposed(args[1]), axes)
            case "apply":
                return matmul(args[0], args[1], axes)
            case "apply_t":
                return matmul(transposed(args[0]), args[1], axes)
            case "read":
                return matmul(args[0], args[1] if attrs["con"] == "K" else transposed(args[1]), axes)
            case "write":
                return matmul(transposed(args[0]), args[1], axes)
            case "mask":
                return method(args[0], "tril", *([] if attrs["read"] == "inclusive" else ["-1"]))
            case "pairs_decay":
                return self.helper("pair_decay", args[0], read, axes=axes)
            case "from_start":
                at = str(dim(args[0].axes, "t"))
                if attrs["exclusive"]:
                    return method(self.helper("before", args[0], at, axes=axes), "exp")
                return method(method(args[0], "cumsum", at), "exp")
            case "to_end":
                return method(self.helper("after", args[0], str(dim(args[0].axes, "t")), axes=axes), "exp")
            case "scale_state":
                return mul(self._whole_chunk(args[1]), args[0])
            case "boundary_gate":
                product = mul(args[0], args[1])
                other = next(a for a in product.axes if a not in axes)
                summed = method(product, "sum", str(dim(product.axes, other)), axes=axes)
                return mul(self._whole_chunk(args[2]), summed)
            case "signs":
                side, at = self.helper("side", args[0], axes=axes), str(dim(axes, "t"))
                if attrs["exclusive"]:
                    side = self.helper("shifted", side, at, axes=axes)
                return method(side, "cumprod", at)
            case "sign_total":
                side = self.helper("side", args[0], axes=args[0].axes)
                return method(side, "prod", str(dim(args[0].axes, "t")), axes=axes)
            case "decayed_score":
                return self.helper("decayed_score", *args, read, axes=axes)
            case "decay_apply":
                name = "decay_apply_t" if attrs["transposed"] else "decay_apply"
                return self.helper(name, *args, read, axes=axes)
            case "pair_gate":
                return self.helper("pair_gate", *args, read, axes=axes)
            case "span_sum":
                return self.helper("span_sum", args[0], read, axes=axes)
            case "gate_sum":
                kind = {"from_start": "since", "from_start_exclusive": "after", "to_end": "before"}[
                    str(attrs["kind"])
                ]
                return self.helper(kind, args[0], str(dim(args[0].axes, "t")), axes=axes)
            case "pick":
                return self._solved[node.args[0]][int(str(attrs["index"]))]
            case _:
                raise InternalError(f"no PyTorch statement for op {node.op}")

    def helper(self, name: str, *args: Text | str, axes: Axes) -> Text:
        self.used.add(name)
        return call(name, *args, axes=axes)

    def _leaf(self, node: Node, attrs: Mapping[str, object]) -> Text:
        kind = "carry_reverse" if attrs.get("direction") == "reverse" else node.op
        name = self.leaves[kind, str(attrs["name"])]
        row = attrs.get("row")
        if row is None:
            return Text(name, ATOM, node.axes)
        rest = ", :" if node.axes and node.axes[-1] in ("K", "V") else ""
        return Text(f"{name}[..., {row}{rest}]", ATOM, node.axes)

    def _whole_chunk(self, w: Text) -> Text:
        """The decay over the whole chunk: () or its wide axis."""
        axes = tuple(a for a in w.axes if a != "t")
        return method(method(w, "sum", str(dim(w.axes, "t")), axes=axes), "exp")

    # -- elementwise --------------------------------------------------------------------------
    def _unary(self, fn: str, x: Text, exponent: object) -> Text:
        x = self._tensor(x)
        match fn:
            case _ if fn in _METHODS:
                return method(x, _METHODS[fn])
            case _ if fn in _FUNCTIONAL:
                return call(f"torch.nn.functional.{fn}", x, axes=x.axes)
            case "softplus":
                # torch's own softplus drops the log beyond a threshold of 20
                inner = mul(number(-1.0), x)
                return mul(number(-1.0), call("torch.nn.functional.logsigmoid", inner, axes=x.axes))
            case "heaviside":
                self.used.add("step")
                return call("step", x, "0.0", axes=x.axes)
            case "side":
                return self.helper("side", x, axes=x.axes)
            case "log_size":
                return method(method(method(x, "abs"), "clamp", f"min={FLOOR}"), "log")
            case "pow":
                return Text(f"{x.at(ATOM)} ** {number(float(str(exponent))).at(POWER)}", POWER, x.axes)
            case _:
                raise InternalError(f"no PyTorch function for {fn}")

    def _extremum(self, op: str, a: Text, b: Text) -> Text:
        if a.scalar:
            a, b = b, a
        axes = joined(a, b)
        if b.scalar:
            return method(self._tensor(a), "clamp", f"{'min' if op == 'maximum' else 'max'}={b.code}")
        return call(f"torch.{op}", a.fit(axes), b.fit(axes), axes=axes)

    def _tensor(self, x: Text) -> Text:
        """A Python float as a per-head tensor, for functions that take tensors only."""
        return Text(f"{self.like}.new_full((1, 1), {x.code})", ATOM) if x.scalar else x

    def _repeated(self, x: Text, axis: str, axes: Axes) -> Text:
        """A value repeated along an axis that it lacks."""
        self.used.add("repeat")
        size = self._size(axis)
        return call("repeat", self._tensor(x), str(dim(axes, axis)), size, axes=axes)

    def _size(self, axis: str) -> str:
        if axis == "t":
            return next(f"{name}.shape[2]" for (op, _), name in self.leaves.items() if op == "input")
        self.sizes.add(axis)
        return axis
