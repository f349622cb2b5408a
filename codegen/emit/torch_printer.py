"""Plan nodes as PyTorch statements: one chunk of the forward or backward, one line per value.

A value with axes (a, b, ...) is a tensor [B, H, a, b, ...] (a per-head one [1, H, ...]); numbers and
consts are Python floats. Elementwise values that are used once and have no name of their own are
written inside the line that uses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import FLOOR, Axes, ordered
from linalg_dsl.planner.plan import ChunkPlan, Node

SUM, PRODUCT, NEGATION, POWER, ATOM = range(5)
"""Precedence of Python's operators; ``*`` and ``@`` share one level and group to the left."""

_INLINE_LIMIT = 72
_LINE_LIMIT = 88
_INLINE_OPS = frozenset(
    {"add", "mul", "unary", "sum", "read", "apply", "apply_t", "from_start", "to_end", "write"} | {"contract"}
)
_PREFIX = {
    "score": "scores", "decayed_score": "scores", "mask": "scores", "pairs_decay": "decay", "read": "y",
    "apply": "y", "apply_t": "y", "write": "outer", "scale_state": "kept", "from_start": "since_start",
    "to_end": "until_end", "span_sum": "d_gate", "gate_sum": "d_gate", "pair_gate": "d_gate",
    "boundary_gate": "d_gate", "contract": "y", "swap": "turned", "decay_apply": "y", "sum": "total",
    "amax": "top",
}  # fmt: skip
_METHODS = {
    "exp": "exp", "log": "log", "sigmoid": "sigmoid", "tanh": "tanh", "relu": "relu", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "abs": "abs", "sign": "sign", "reciprocal": "reciprocal",
}  # fmt: skip
_FUNCTIONAL = {"logsigmoid", "silu", "elu"}


@dataclass(frozen=True, slots=True)
class Text:
    """A printed expression with its precedence, the axes of its value, and the number it is, if one.

    ``scalar`` says that the value is a Python float.
    """

    code: str
    level: int = ATOM
    axes: Axes = ()
    number: float | None = None
    scalar: bool = False

    def at(self, level: int) -> str:
        """In parentheses where an operator of ``level`` would tear it apart."""
        return self.code if self.level >= level else f"({self.code})"

    def fit(self, axes: Axes, level: int = SUM) -> str:
        """Indexed so that it broadcasts against a value with ``axes``."""
        if self.scalar or self.axes == axes:
            return self.at(level)
        index = [":" if a in self.axes else "None" for a in ordered((*axes, *self.axes))]
        while index and index[0] == ":":
            del index[0]
        return f"{self.at(ATOM)}[..., {', '.join(index)}]" if index else self.at(level)


def number(value: float) -> Text:
    text = repr(value)
    return Text(text, NEGATION if text.startswith("-") else ATOM, (), value, True)


ZERO = number(0.0)


def add(a: Text, b: Text) -> Text:
    if a.number == 0:
        return b
    if b.number == 0:
        return a
    axes = _joined(a, b)
    scalar = a.scalar and b.scalar
    if b.code.startswith("-") and b.level == NEGATION:
        inner = Text(b.code[1:], POWER, b.axes, None, b.scalar)
        return Text(f"{a.fit(axes)} - {inner.fit(axes, PRODUCT)}", SUM, axes, None, scalar)
    return Text(f"{a.fit(axes)} + {b.fit(axes, PRODUCT)}", SUM, axes, None, scalar)


def mul(a: Text, b: Text) -> Text:
    for x, y in ((a, b), (b, a)):
        if x.number == 0:
            return x
        if x.number == 1:
            return y
        if x.number == -1:
            return Text(f"-{y.at(POWER)}", NEGATION, y.axes, None, y.scalar)
    axes = _joined(a, b)
    code = f"{a.fit(axes, PRODUCT)} * {b.fit(axes, NEGATION)}"
    return Text(code, PRODUCT, axes, None, a.scalar and b.scalar)


def matmul(a: Text, b: Text, axes: Axes) -> Text:
    return Text(f"{a.at(PRODUCT)} @ {b.at(NEGATION)}", PRODUCT, axes)


def transposed(a: Text) -> Text:
    return Text(f"{a.at(ATOM)}.mT", ATOM, (*a.axes[:-2], a.axes[-1], a.axes[-2]))


def call(function: str, *args: Text | str, axes: Axes = ()) -> Text:
    return Text(f"{function}({', '.join(a if isinstance(a, str) else a.code for a in args)})", ATOM, axes)


def method(a: Text, name: str, *args: str, axes: Axes | None = None) -> Text:
    return Text(f"{a.at(ATOM)}.{name}({', '.join(args)})", ATOM, a.axes if axes is None else axes)


class ChunkPrinter:
    """Prints the nodes that ``roots`` need, in plan order.

    ``leaves`` gives the identifiers of inputs, params, consts, carries and cotangents by (op, name), a
    reverse carry under "carry_reverse";
    ``like`` is the identifier of a tensor [B, H, K, V] whose type and device new tensors take. After
    ``run``, ``lines`` holds the statements, ``used`` the helper functions they call and ``sizes`` which of
    the sizes C, K, V they mention.
    """

    def __init__(
        self, plan: ChunkPlan, leaves: Mapping[tuple[str, str], str], names: Names, like: str
    ) -> None:
        self.plan = plan
        self.leaves = leaves
        self.names = names
        self.like = like
        self.lines: list[str] = []
        self.used: set[str] = set()
        self.sizes: set[str] = set()
        self._text: dict[int, Text] = {}
        self._systems: dict[tuple[tuple[int, ...], tuple[int, ...]], list[list[Text]]] = {}
        self._wholes: dict[tuple[str, ...], Text] = {}
        self._inverses: dict[tuple[str, ...], list[list[Text]]] = {}
        self._solved: dict[int, list[Text]] = {}
        self._uses: dict[int, int] = {}

    def run(self, roots: Iterable[int]) -> list[Text]:
        """The texts of ``roots``, all of them names, numbers or parts of arguments."""
        wanted = list(roots)
        live = self.plan.live(wanted)
        for i in live:
            node = self.plan.nodes[i]
            weight = 2 if node.op in ("solve", "solve_t") else 1  # a solve mentions its operands repeatedly
            for a in node.args:
                self._uses[a] = self._uses.get(a, 0) + weight
        for i in sorted(live):
            node = self.plan.nodes[i]
            if node.op in ("solve", "solve_t"):
                self._solve(i, node, live)
                continue
            text = self._print(node)
            keep = (
                text.scalar or text.code.isidentifier() or (i not in wanted and self._inlined(i, node, text))
            )
            self._text[i] = text if keep else self._assign(node, text)
        return [self._text[i] for i in wanted]

    # -- statements ---------------------------------------------------------------------------
    def _assign(self, node: Node, text: Text) -> Text:
        return self._let(node.label or _PREFIX.get(node.op, "x"), text)

    def _let(self, wanted: str, text: Text) -> Text:
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
        while len(text.code) > _LINE_LIMIT and self._name_longest(node):
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
                axes = _joined(args[0], args[1])
                return call("step", self._tensor(args[0]).fit(axes), args[1].fit(axes), axes=axes)
            case "sum" | "amax":
                axis = str(attrs["axis"])
                return method(args[0], node.op, str(_dim(args[0].axes, axis)), axes=node.axes)
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
                return self._helper("pair_decay", args[0], read, axes=axes)
            case "from_start":
                dim = str(_dim(args[0].axes, "t"))
                total = (
                    self._helper("before", args[0], dim, axes=axes)
                    if attrs["exclusive"]
                    else method(args[0], "cumsum", dim)
                )
                return method(total, "exp")
            case "to_end":
                return method(self._helper("after", args[0], str(_dim(args[0].axes, "t")), axes=axes), "exp")
            case "scale_state":
                return mul(self._whole_chunk(args[1]), args[0])
            case "boundary_gate":
                product = mul(args[0], args[1])
                other = next(a for a in product.axes if a not in axes)
                total = method(product, "sum", str(_dim(product.axes, other)), axes=axes)
                return mul(self._whole_chunk(args[2]), total)
            case "signs":
                side, dim = self._helper("side", args[0], axes=axes), str(_dim(axes, "t"))
                if attrs["exclusive"]:
                    side = self._helper("shifted", side, dim, axes=axes)
                return method(side, "cumprod", dim)
            case "sign_total":
                side = self._helper("side", args[0], axes=args[0].axes)
                return method(side, "prod", str(_dim(args[0].axes, "t")), axes=axes)
            case "decayed_score":
                return self._helper("decayed_score", *args, read, axes=axes)
            case "decay_apply":
                name = "decay_apply_t" if attrs["transposed"] else "decay_apply"
                return self._helper(name, *args, read, axes=axes)
            case "pair_gate":
                return self._helper("pair_gate", *args, read, axes=axes)
            case "span_sum":
                return self._helper("span_sum", args[0], read, axes=axes)
            case "gate_sum":
                kind = {"from_start": "since", "from_start_exclusive": "after", "to_end": "before"}[
                    str(attrs["kind"])
                ]
                return self._helper(kind, args[0], str(_dim(args[0].axes, "t")), axes=axes)
            case "pick":
                return self._solved[node.args[0]][int(str(attrs["index"]))]
            case _:
                raise InternalError(f"no PyTorch statement for op {node.op}")

    def _helper(self, name: str, *args: Text | str, axes: Axes) -> Text:
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
        return method(method(w, "sum", str(_dim(w.axes, "t")), axes=axes), "exp")

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
                return self._helper("side", x, axes=x.axes)
            case "log_size":
                return method(method(method(x, "abs"), "clamp", f"min={FLOOR}"), "log")
            case "pow":
                return Text(f"{x.at(ATOM)} ** {number(float(str(exponent))).at(POWER)}", POWER, x.axes)
            case _:
                raise InternalError(f"no PyTorch function for {fn}")

    def _extremum(self, op: str, a: Text, b: Text) -> Text:
        if a.scalar:
            a, b = b, a
        axes = _joined(a, b)
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
        return call("repeat", self._tensor(x), str(_dim(axes, axis)), size, axes=axes)

    def _size(self, axis: str) -> str:
        size = {"t": "C", "K": "K", "V": "V"}[axis]
        self.sizes.add(size)
        return size

    # -- the unit-triangular solve --------------------------------------------------------------
    def _solve(self, i: int, node: Node, live: frozenset[int]) -> None:
        """Substitutes for the r rows U (solve) or X (solve_t); the m rows follow from them."""
        m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
        scores, sigma = node.args[: r * m], node.args[r * m : 2 * r * m]
        rest = [self._text[a] for a in node.args[2 * r * m :]]
        w = rest.pop() if dict(node.attrs).get("decayed") else None
        system = self._system(scores, sigma, m, r)
        G = [[self._text[scores[i * m + j]] for j in range(m)] for i in range(r)]
        S = [[self._text[sigma[j * r + i]] for i in range(r)] for j in range(m)]
        axes: Axes = node.axes
        reverse = node.op == "solve_t"
        first, second = rest[:m], rest[m:]
        labels = {
            int(str(n.attr("index"))): n.label
            for n in (self.plan.nodes[k] for k in live)
            if n.op == "pick" and n.args == (i,)
        }

        def applied(scores: Text, rows: Text) -> Text:
            return self._applied(scores, rows, w, "decayed", reverse)

        if reverse:
            right = [_total([second[i], *(mul(S[j][i], first[j]) for j in range(m))]) for i in range(r)]
        else:
            right = [_total([second[i], *(applied(G[i][j], first[j]) for j in range(m))]) for i in range(r)]
        names = [labels.get(m + k) or f"{'x' if reverse else 'u'}_{k + 1}" for k in range(r)]
        inner = self._substitute(system, right, names, reverse, w, axes)
        if reverse:
            outer = [_total([first[j], *(applied(G[i][j], inner[i]) for i in range(r))]) for j in range(m)]
        else:
            outer = [_total([first[j], *(mul(S[j][i], inner[i]) for i in range(r))]) for j in range(m)]
        picks = [self._let(labels.get(k) or "z", x) if k in labels else x for k, x in enumerate(outer)]
        self._solved[i] = [*picks, *inner]
        if any(x.axes != axes and not x.scalar for x in self._solved[i]):
            raise InternalError(f"a row of a solve without axes {', '.join(axes)}")

    def _applied(self, scores: Text, rows: Text, w: Text | None, read: str, turned: bool) -> Text:
        """Scores, or their transpose, times rows; with a log decay of the columns of rows."""
        if scores.number == 0 or rows.number == 0:
            return ZERO
        if w is not None:
            name = "decay_apply_t" if turned else "decay_apply"
            return self._helper(name, scores, rows, w, f'"{read}"', axes=rows.axes)
        return matmul(transposed(scores) if turned and not scores.scalar else scores, rows, rows.axes)

    def _system(self, scores: tuple[int, ...], sigma: tuple[int, ...], m: int, r: int) -> list[list[Text]]:
        """The r x r blocks of G Sigma, [t,s] each, shared by a solve and its adjoint."""
        key = (scores, sigma)
        if key not in self._systems:
            self._systems[key] = [
                [
                    self._let(
                        "system",
                        _total(
                            _columns(self._text[scores[i * m + j]], self._text[sigma[j * r + k]])
                            for j in range(m)
                        ),
                    )
                    for k in range(r)
                ]
                for i in range(r)
            ]
        return self._systems[key]

    def _substitute(
        self,
        system: list[list[Text]],
        right: list[Text],
        names: list[str],
        reverse: bool,
        w: Text | None,
        axes: Axes,
    ) -> list[Text]:
        known = [b for row in system for b in row if b.number != 0]
        if not known:
            return [self._let(n, x) for n, x in zip(names, right, strict=True)]
        if w is not None:
            return self._by_inverse(system, right, names, reverse, w)
        helper = "substitute_reversed" if reverse else "substitute"
        if len(right) == 1:
            self.used.add(helper)
            return [self._let(names[0], call(helper, system[0][0], right[0], axes=axes))]
        self.used |= {helper, "interleave", "by_token"}
        whole = self._interleaved(system)
        if sum(len(x.code) for x in right) > _LINE_LIMIT // 2:
            right = [self._let("right", x) for x in right]
        made = [self.names.unique(n) for n in names]
        rows = ", ".join(x.code for x in right)
        self.lines.append(f"{', '.join(made)} = by_token({helper}, {whole.code}, [{rows}])")
        return [Text(n, ATOM, axes) for n in made]

    def _by_inverse(
        self, system: list[list[Text]], right: list[Text], names: list[str], reverse: bool, w: Text
    ) -> list[Text]:
        """With a decay of the columns of rows: T is made once, and applied to each column with its decay."""
        inverse = self._inverse(system)
        r = range(len(right))
        right = [self._let("right", x) for x in right]
        found = []
        for i in r:
            blocks = [inverse[k][i] if reverse else inverse[i][k] for k in r]
            terms = [self._applied(b, right[k], w, "inclusive", reverse) for k, b in enumerate(blocks)]
            found.append(self._let(names[i], _total(terms)))
        return found

    def _inverse(self, system: list[list[Text]]) -> list[list[Text]]:
        """The r x r blocks of T = (I - G Sigma)^-1, shared by a solve and its adjoint."""
        key = tuple(b.code for row in system for b in row)
        if key not in self._inverses:
            r = range(len(system))
            if len(r) == 1:
                one = self._let("ut", self._helper("inverse", system[0][0], axes=("t", "s")))
                self._inverses[key] = [[one]]
            else:
                self.used |= {"interleave", "inverse", "blocks"}
                whole = self._interleaved(system)
                made = [[self.names.unique(f"ut_{i + 1}{k + 1}") for k in r] for i in r]
                names = ", ".join(f"({', '.join(row)})" for row in made)
                self.lines.append(f"{names} = blocks(inverse({whole.code}), {len(r)})")
                self._inverses[key] = [[Text(n, ATOM, ("t", "s")) for n in row] for row in made]
        return self._inverses[key]

    def _interleaved(self, system: list[list[Text]]) -> Text:
        """The blocks as one matrix, shared by a solve and its adjoint."""
        key = tuple(b.code for row in system for b in row)
        if key not in self._wholes:
            some = next(b.code for row in system for b in row if b.number != 0)
            zero = f"torch.zeros_like({some})"
            rows = [", ".join(zero if b.number == 0 else b.code for b in row) for row in system]
            if sum(map(len, rows)) > _LINE_LIMIT:
                rows = [f"*{self._let('row', Text(f'[{row}]')).code}" for row in rows]
            blocks = ", ".join(f"[{row}]" for row in rows)
            self._wholes[key] = self._let("systems", call("interleave", f"[{blocks}]", axes=("t", "s")))
        return self._wholes[key]


def _joined(a: Text, b: Text) -> Axes:
    return ordered((*a.axes, *b.axes))


def _dim(axes: Axes, axis: str) -> int:
    return axes.index(axis) - len(axes)


def _total(terms: Iterable[Text]) -> Text:
    total = ZERO
    for term in terms:
        total = add(total, term)
    return total


def _columns(scores: Text, coefficient: Text) -> Text:
    """[t,s] scores times the coefficient of token s."""
    if coefficient.axes == ("t",):
        coefficient = Text(f"{coefficient.at(ATOM)}[..., None, :]", ATOM, ("t", "s"))
    return mul(scores, coefficient)
