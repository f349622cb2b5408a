"""Plan nodes as Triton statements over tiles.

A value with axes ("t", "D") is a tile [C, D block], a score [C, C], a state [K block, V block]. Values
are float32; operands of products are cast to DOT, the dtype of the tensor cores. Values that stay zero
on padding (tokens past the end, columns past K or V) are known as such; the others are set to zero where
a product or a decay will use them, so nothing relies on 0 * x = 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from linalg_dsl.codegen.emit.kernel_lines import ALWAYS
from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.triangles import selected, triangle
from linalg_dsl.codegen.emit.triton_scores import JointScores
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import FLOOR, OPS, Axes
from linalg_dsl.planner.plan import Node

NAN = "propagate_nan=tl.PropagateNan.ALL"
"""What a maximum or a minimum is told so that NaN comes out of it, which a GPU drops else."""
TILE_FUNCTIONS = {
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sigmoid": "tl.sigmoid({0})",
    "logsigmoid": "-softplus(-{0})",
    "softplus": "softplus({0})",
    "tanh": "tanh({0})",
    "silu": "{0} * tl.sigmoid({0})",
    "relu": f"tl.maximum({{0}}, 0.0, {NAN})",
    "elu": "tl.where({0} > 0, {0}, expm1({0}))",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "1.0 / tl.sqrt({0})",
    "abs": "tl.abs({0})",
    "sign": "sign({0})",
    "reciprocal": "1.0 / {0}",
    "heaviside": "step({0})",
    "side": "tl.where({0} < 0, -1.0, 1.0)",
    "log_size": f"tl.log(tl.maximum(tl.abs({{0}}), {FLOOR!r}, {NAN}))",
}
ZERO_AT_ZERO = frozenset({"tanh", "silu", "relu", "elu", "sqrt", "abs", "sign"})
SINGULAR = frozenset({"reciprocal", "rsqrt", "sqrt", "log", "pow"})
"""Not finite somewhere: on padding they are set to zero at once, since 0 times inf is not 0."""
_LIBRARY = frozenset({"softplus", "tanh", "expm1", "sign", "step", "power"})
_PREFIX = {
    "score": "a", "decayed_score": "a", "mask": "a", "pairs_decay": "decay", "read": "y", "apply": "y",
    "apply_t": "y", "from_start": "since_start", "to_end": "until_end", "total": "decay_chunk",
    "write": "s_add",
    "signs": "signs", "sign_total": "sign_chunk", "span_sum": "dw", "gate_sum": "dw", "sum": "total",
    "ut_transform": "ut", "compose": "decay", "swap": "columns",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """Where an axis lies in this kernel: block length, offsets and the mask of what exists."""

    length: str
    mask: str


@dataclass
class Statements:
    """Collects the lines of one kernel body.

    ``blocks`` tells the tile of each axis in this kernel: a split axis is a block, the others are whole.
    """

    nodes: Sequence[Node]
    blocks: Mapping[str, Tile]
    names: Names
    lines: list[str] = field(default_factory=list)
    library: set[str] = field(default_factory=set)
    text: dict[int, str] = field(default_factory=dict)
    raw: set[int] = field(default_factory=set)
    """Values still in the dtype they were loaded in."""
    zero: set[int] = field(default_factory=set)
    """Values known to be zero on padding."""
    needs_zero: frozenset[int] = frozenset()
    turned: frozenset[str] = frozenset()
    """The axes that stand first in their tiles, those of tokens and of states: the one that a walk splits,
    and those that have a decay per channel in a prep.

    A product's first operand and its result then have the block's rows, 64 or more, where the tensor cores
    want 64; a chunk may be shorter. Its second operand is a tile as it was loaded.
    """
    nan_exact: bool = False
    """Whether products with triangles are looked at for what 0 times NaN leaves in them."""
    traced: frozenset[int] = frozenset()
    """Operands that need no look at once, as the state of a walk tells of them at its end."""
    wide: frozenset[int] = frozenset()
    """Triangles that lie in memory in float32: products with them take operands of 24 or 11 bits, not 8."""
    cleaned: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of products that the state tells of: without what is not finite, and NaN where that spoils them."""
    apart: frozenset[int] = frozenset()
    """Sums that a read takes term by term: their tiles then go into products as they lie in memory."""
    again: dict[int, str] = field(default_factory=dict)
    """How a tile is loaded that a loop over chunks has loaded before."""
    picks: dict[tuple[int, int], str] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)
    """Lines that belong before a loop over blocks: where its sums begin."""
    in_loop: bool = False
    """Whether the lines are those of a loop over blocks."""
    taken_in: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """Of picks of a joint op, terms that it begins with, and the sum of all, which is the pick then."""
    gates: dict[str, str] = field(default_factory=dict)
    """The names of log gates to base 2, by that of the gate."""

    def loaded(self, n: int, name: str, *, converted: bool) -> None:
        """A tile just loaded: zero where its mask is false; ``converted`` if it is float32 already."""
        self.text[n] = name
        self.zero.add(n)
        if not converted:
            self.raw.add(n)

    def given(self, n: int, name: str) -> None:
        """A float32 value that the template made: the state, a per-head param."""
        self.text[n] = name

    def compute(self, n: int) -> None:
        """Appends the statement of one node."""
        node = self.nodes[n]
        if n in self._taken_sums():
            return  # not any value with a text: a second loop over blocks forms its own anew
        if node.op == "ut_transform":
            self._ut_transform(n, node)
            return
        if node.op in ("decayed_scores", "decay_adjoints"):
            self.lines += JointScores(self, n, node).statements()
            return
        if node.op == "pick":
            self.text[n] = self.picks[node.args[0], _int(node, "index")]
            terms, last = self.taken_in.get(n, ((), n))
            self.text[last] = self.text[n]
            if all(a in self.zero for a in terms):
                self.zero |= {n, last}
            return
        expression, zero = self._expression(node)
        name = self.names.unique(f"b_{self._label(n)}")
        singular = node.op == "unary" and (node.attr("fn") in SINGULAR or self._below_maximum(node))
        if (n in self.needs_zero or singular) and not zero and self._padded(node.axes):
            expression, zero = f"tl.where({self.mask(node.axes)}, {expression}, 0.0)", True
        self.lines.append(f"{name} = {expression}")
        self.text[n] = name
        if zero:
            self.zero.add(n)
        self.lines += self._without_later(node, name)

    def _taken_sums(self) -> set[int]:
        """The sums that a pick of a joint op already is, since the op began with their other terms."""
        return {last for pick, (_, last) in self.taken_in.items() if last != pick}

    def accumulate(self, n: int) -> None:
        """Adds one block's share to a value that sums over an axis."""
        node = self.nodes[n]
        if node.op == "decayed_scores":
            self.lines += JointScores(self, n, node, blocked=True).statements()
            return
        expression, _ = self._expression(node)
        name = self.names.unique(f"b_{self._label(n)}")
        sizes = "".join(f"{self.blocks[a].length}, " for a in self.tile(node.axes))
        start = "float('-inf')" if node.op == "amax" else "0.0"
        self.first.append(f"{name} = " + (f"tl.full(({sizes}), {start}, tl.float32)" if sizes else start))
        if node.op == "amax":
            self.lines.append(f"{name} = tl.maximum({name}, {expression})")
        else:
            self.lines.append(f"{name} += {expression}")
            self.zero.add(n)  # every term is zero on padding
        self.text[n] = name

    def settle(self, n: int) -> None:
        """Behind the loop that summed up loaded numbers: all that reads the sum has it from one statement.

        Up to Triton 3.7 the pass OptimizeThreadLocality takes it for granted that one operation alone reads
        what a loop has reduced of loads, and compiles no other kernel. No bit changes.
        """
        node = self.nodes[n]
        if node.op in ("sum", "amax") and self._padded(node.axes):
            name = self.text[n]
            least = "float('-inf')" if node.op == "amax" else "0.0"  # what it is on padding
            self.lines.append(f"{name} = tl.where({self.mask(node.axes)}, {name}, {least})")

    # -- operands -----------------------------------------------------------------------------------
    def value(self, n: int, axes: Axes | None = None) -> str:
        """The operand in float32, indexed to broadcast over ``axes``."""
        node = self.nodes[n]
        if node.op == "number":
            return _number(node)
        text = self.text[n]
        if n in self.raw and node.op != "const":
            text = f"{text}.to(tl.float32)"
        if axes is None or node.axes == axes or not node.axes:
            return text
        return f"{text}[{', '.join(':' if a in node.axes else 'None' for a in self.tile(axes))}]"

    def tile(self, axes: Axes) -> Axes:
        """The axes of a value in the order of its tile."""
        if len(axes) == 2 and axes[1] in self.turned:
            return axes[::-1]
        return axes

    def operand(self, n: int) -> str:
        """The operand of a product."""
        return f"{self.text[n]}.to(DOT)"

    def mask(self, axes: Axes) -> str:
        parts = []
        for i, axis in enumerate(self.tile(axes)):
            index = "" if len(axes) == 1 else "[:, None]" if i == 0 else "[None, :]"
            parts.append(f"{self.blocks[axis].mask}{index}")
        return " & ".join(parts)

    def state_offset(self, dims: Axes = ("K", "V")) -> str:
        """Where the entries of a state's tile lie in a matrix in memory with these rows and columns."""
        first = self.tile(("K", "V"))[0]
        rows, columns = ("[:, None]", "[None, :]") if first == "K" else ("[None, :]", "[:, None]")
        if dims == ("V", "K"):
            return f"o_k{rows} + o_v{columns} * K"
        return f"o_k{rows} * V + o_v{columns}"

    def _padded(self, axes: Axes) -> bool:
        return bool(axes) and "s" not in axes

    def _label(self, n: int) -> str:
        node = self.nodes[n]
        return node.label or f"{_PREFIX.get(node.op, 'x')}_{n}"

    # -- expressions --------------------------------------------------------------------------------
    def _expression(self, node: Node) -> tuple[str, bool]:
        """The right-hand side, and whether it is zero on padding."""
        args, axes = node.args, node.axes
        zeros = [a in self.zero or self._is_zero_number(a) for a in args]
        # a value without an axis is not zero on that axis's padding
        whole = [
            z and (self.nodes[a].axes == axes or self._is_zero_number(a))
            for a, z in zip(args, zeros, strict=True)
        ]
        match node.op:
            case "add":
                return self._binary("+", node), all(whole)
            case "mul":
                return self._product(node), any(whole)
            case "maximum" | "minimum":
                a, b = (self.value(x, axes) for x in args)
                return f"tl.{node.op}({a}, {b}, {NAN})", all(whole)
            case "compare":
                a, b = (self.value(x, axes) for x in args)
                self.library.add("step")
                return f"step({a} - {b})", False
            case "unary":
                return self._unary(node), zeros[0] and node.attr("fn") in ZERO_AT_ZERO
            case "sum" | "amax":
                return self._reduce(node), False
            case "tokens" | "expand":
                shape = ", ".join(self.blocks[a].length for a in self.tile(axes))
                source = self.value(args[0], axes)
                if not self.nodes[args[0]].axes:
                    return f"tl.full(({shape},), 0.0, tl.float32) + {source}", False
                return f"tl.broadcast_to({source}, ({shape}))", False
            case "score" | "apply" | "apply_t" if len(self.nodes[args[1]].axes) == 1:
                return self._narrow(node), False
            case "compose":
                return self._compose(node), False
            case "swap":
                return self.value(args[0]), zeros[0]
            case "score":
                x, y = self.operand(args[0]), self.operand(args[1])
                if self.tile(self.nodes[args[0]].axes)[0] != "t":
                    return self._dot(f"tl.trans({x})", y), True
                return self._dot(x, f"tl.trans({y})"), True
            case "apply" | "apply_t":
                return self._apply(*args, transposed=node.op == "apply_t"), True
            case "read":
                return self._read(node), True
            case "write":
                return self._write(node), True
            case "mask":
                sign = ">=" if node.attr("read") == "inclusive" else ">"
                return f"tl.where(o_t[:, None] {sign} o_t[None, :], {self.value(args[0])}, 0.0)", True
            case _:
                return self._decay(node)

    def _decay(self, node: Node) -> tuple[str, bool]:
        args = [self.value(a) for a in node.args]
        wide = len(node.axes) == 2
        match node.op:
            case "pairs_decay":
                return self.call("pairs_decay", *args, "C", "DOT", *_read_flags(node)), True
            case "span_sum":
                exclusive = f"EXCLUSIVE={node.attr('read') == 'exclusive'}"
                return self.call("span_sum", *args, "C", "DOT", "SUMS", exclusive), False
            case "from_start" | "to_end":
                after = node.op == "to_end"
                strict = after or bool(node.attr("exclusive"))
                if not wide:
                    gate = self.call("bounded", args[0], "DOT")
                    return f"tl.exp({self._sums(node, gate, after=after, strict=strict)})", False
                gate = self.log2_gate(node.args[0])
                return f"tl.exp2({self._sums(node, gate, after=after, strict=strict)})", False
            case "total":
                of = self.nodes[node.args[0]].axes
                if len(of) == 1:
                    return f"tl.exp(tl.sum({args[0]}, 0))", False
                return f"tl.exp2(tl.sum({self.log2_gate(node.args[0])}, {self.tile(of).index('t')}))", False
            case "signs":
                negative = f"tl.where({args[0]} < 0, 1.0, 0.0)"
                count = self._sums(node, negative, after=False, strict=bool(node.attr("exclusive")))
                return self.call("parity_sign", count), False
            case "sign_total":
                negative = f"tl.where({args[0]} < 0, 1.0, 0.0)"
                tokens = self.tile(self.nodes[node.args[0]].axes).index("t")
                return self.call("parity_sign", f"tl.sum({negative}, {tokens})"), False
            case "gate_sum":
                after, strict = {
                    "from_start": (True, False),
                    "from_start_exclusive": (True, True),
                    "to_end": (False, True),
                }[str(node.attr("kind"))]
                return self._sums(node, args[0], after=after, strict=strict), False
            case _:
                raise InternalError(f"{node.op} has no statement: the plan is not lowered")

    def _product(self, node: Node) -> str:
        """Elementwise; above the diagonal zero whatever the other factor is there."""
        known = [triangle(self.nodes, a) for a in node.args]
        product = self._binary("*", node)
        if all(k or self.nodes[a].op == "number" for a, k in zip(node.args, known, strict=True)):
            return product
        return selected(next((k for k in known if k), None), product)

    def _without_later(self, node: Node, name: str) -> list[str]:
        """What a product with a triangle does so that later tokens leave no trace, not of NaN either."""
        plain = node.op == "compose" and not node.attr("left") and not node.attr("right")
        if not (plain or node.op in ("apply", "apply_t")) or len(self.nodes[node.args[1]].axes) == 1:
            return []
        kind = triangle(self.nodes, node.args[0])
        if kind is None or not self.nan_exact:
            return []
        turned = self.tile(self.nodes[node.args[1]].axes)[0] != "t"
        sides = f"TURNED={turned}, BACK={node.op == 'apply_t'}"
        lines, operands = [], []
        for n in node.args:
            plain = plain or node.args[0] in self.wide
            text = self.value(n) if plain else self.operand(n)
            if n in self.again and n == node.args[1]:  # once more, so that no other use is seen of the first
                copy = self.names.unique(f"{self.text[n]}_again")
                lines.append(f"    {copy} = {self.again[n]}")
                text = f"{copy}.to({'tl.float32' if plain else 'DOT'})"
            operands.append(text)
        strict = f"STRICT={kind == 'strict'}"
        look = ALWAYS
        if node.args[1] not in self.traced:
            look = self.call("has_late_nan", name, "C", sides, "LOOK=LOOK")
        else:
            product = self.call("finite_product", *operands, sides, "PRECISION=PRECISION")
            self.cleaned[name] = product, self.call("lost_tokens", operands[1], "C", sides, strict)
        call = self.call("one_sided_product", *operands, "C", sides, strict, "PRECISION=PRECISION")
        return [f"if {look}:", *lines, f"    {name} = {call}"]

    def _sums(self, node: Node, arg: str, *, after: bool, strict: bool) -> str:
        """Sums over the tokens up to, or from, each one; ``node`` tells the axes."""
        flags = (f"AFTER={after}", f"STRICT={strict}")
        if len(node.axes) < 2:
            return self.call("running_sums", arg, "C", "DOT", *flags)
        return self.token_sums(
            arg, self.call("tokens_within", "C", *flags), self.tile(node.axes) != node.axes
        )

    def token_sums(self, tile: str, among: str, turned: bool) -> str:
        """For every token the sum of a float32 tile over the tokens in its row of a [C, C] of 0 and 1."""
        return self.call("token_sums", tile, among, f"TURNED={turned}", "DOT=DOT", "SUMS=SUMS")

    def log2_gate(self, n: int) -> str:
        """A log gate per channel to base 2 and finite, since sums of it are products with 0 and 1."""
        value = self.value(n)
        if value not in self.gates:
            name = self.gates[value] = self.names.unique("b_log2_gate")
            self.lines += [
                "# to base 2, and finite where it is a reset: products with 0 and 1 sum it up",
                f"{name} = {self.call('finite_gate', value)} * 1.4426950408889634",
            ]
        return self.gates[value]

    def _narrow(self, node: Node) -> str:
        """A product with one number per token: it needs no tensor core, and no rounding."""
        a, z = (self.value(x) for x in node.args)
        match node.op:
            case "score":
                return f"{a}[:, None] * {z}[None, :]"
            case "apply":
                product, axis = f"{a} * {z}[None, :]", 1
            case _:
                product, axis = f"{a} * {z}[:, None]", 0
        return f"tl.sum({selected(triangle(self.nodes, node.args[0]), product)}, {axis})"

    def _compose(self, node: Node) -> str:
        """Decays times decays, of which other factors are made: in float32."""
        sides = zip(node.args, ("left", "right"), strict=True)
        a, b = (f"tl.trans({self.value(x)})" if node.attr(side) else self.value(x) for x, side in sides)
        return self._dot(a, b)

    def _apply(self, a: int, z: int, *, transposed: bool) -> str:
        taken = self.value if a in self.wide else self.operand
        scores, rows = taken(a), taken(z)
        if self.tile(self.nodes[z].axes)[0] != "t":
            return self._dot(rows, scores if transposed else f"tl.trans({scores})")
        return self._dot(f"tl.trans({scores})" if transposed else scores, rows)

    def _read(self, node: Node) -> str:
        """x S. Factors per token scale the product: fewer numbers, and x goes in as it was loaded."""
        x, state = node.args
        factors, x = self._token_factors(x)
        if terms := self._loaded_terms(x):
            reads = (self._times(of, self._read_tile(y, state, node), node.axes) for of, y in terms)
            read = " + ".join(reads)
            return self._times(factors, f"({read})", node.axes) if factors else read
        return self._times(factors, self._read_tile(x, state, node), node.axes)

    def _read_tile(self, x: int, state: int, node: Node) -> str:
        of_x, of_state = self.operand(x), self.operand(state)
        if self.tile(node.axes)[0] != "t":
            product = self._dot(of_state, f"tl.trans({of_x})")
        else:
            product = self._dot(of_x, of_state if node.attr("con") == "K" else f"tl.trans({of_state})")
        return product

    def _write(self, node: Node) -> str:
        """x^T z. Factors per token go to the operand whose axis the kernel splits."""
        x, z = node.args
        (of_x, bare_x), (of_z, bare_z) = self._token_factors(x), self._token_factors(z)
        if of_x and self.blocks["V"].length == "BLOCK":
            scaled = f"({self._times(of_x, self.value(z), self.nodes[z].axes)}).to(DOT)"
            return self._outer(self.operand(bare_x), scaled)
        if of_z and self.blocks["K"].length == "BLOCK":
            scaled = f"({self._times(of_z, self.value(x), self.nodes[x].axes)}).to(DOT)"
            return self._outer(scaled, self.operand(bare_z))
        return self._outer(self.operand(x), self.operand(z))

    def _times(self, factors: Sequence[int], text: str, axes: Axes) -> str:
        return " * ".join([*(self.value(f, axes) for f in factors), text])

    def _outer(self, x: str, z: str) -> str:
        """A state from the tiles of x [t, K] and z [t, V]."""
        if "V" in self.turned:
            return self._dot(z, x)
        if "K" in self.turned:
            return self._dot(x, z)
        return self._dot(f"tl.trans({x})", z)

    def _loaded_terms(self, n: int) -> list[tuple[tuple[int, ...], int]]:
        """(factors, tile) of both terms of a sum of tiles as they were loaded, if ``apart`` says so."""
        if n not in self.apart:
            return []
        terms = [self._token_factors(a) for a in self.nodes[n].args]
        return terms if all(x in self.raw for _, x in terms) else []

    def _token_factors(self, n: int) -> tuple[tuple[int, ...], int]:
        """(factors, x) where n is their product with x, each one number per token (or one in all) and x as
        it was loaded."""
        node = self.nodes[n]
        if n in self.raw or n in self.apart:
            return (), n
        if node.op == "mul":
            for f, x in (node.args, node.args[::-1]):
                known = f in self.text or self.nodes[f].op == "number"
                if (
                    len(self.nodes[f].axes) < 2
                    and self.nodes[f].axes in ((), ("t",))
                    and known
                    and self.nodes[x].axes == node.axes  # a param is no tile of tokens
                ):
                    more, bare = self._token_factors(x)
                    if bare in self.raw or bare in self.apart:
                        return (f, *more), bare
        return (), n

    def _binary(self, sign: str, node: Node) -> str:
        a, b = (self.value(x, node.axes) for x in node.args)
        return f"{a} {sign} {b}"

    def _unary(self, node: Node) -> str:
        fn = str(node.attr("fn"))
        arg = self.value(node.args[0])
        if fn == "pow":
            return self.call("power", arg, repr(node.attr("exponent")))
        template = TILE_FUNCTIONS[fn]
        self.library |= {name for name in _LIBRARY if f"{name}(" in template}
        return template.format(arg)

    def _below_maximum(self, node: Node) -> bool:
        """Whether this is exp(x - max x), as of a softmax: on padding nothing bounds it."""
        total = self.nodes[node.args[0]]
        parts = [self.nodes[a] for a in total.args] if total.op == "add" else []
        inner = [self.nodes[a].op for p in parts if p.op == "mul" for a in p.args]
        return node.attr("fn") == "exp" and "amax" in inner

    def _reduce(self, node: Node) -> str:
        source = self.nodes[node.args[0]]
        axis = self.tile(source.axes).index(str(node.attr("axis")))
        value = self.value(node.args[0])
        if node.op == "amax":
            return f"tl.max(tl.where({self.mask(source.axes)}, {value}, float('-inf')), {axis})"
        if node.args[0] not in self.zero and self._padded(source.axes):
            value = f"tl.where({self.mask(source.axes)}, {value}, 0.0)"
        return f"tl.sum({value}, {axis})"

    def _dot(self, a: str, b: str) -> str:
        return f"tl.dot({a}, {b}, input_precision=PRECISION)"

    def call(self, function: str, *args: str) -> str:
        self.library.add(function)
        return f"{function}({', '.join(args)})"

    def _is_zero_number(self, n: int) -> bool:
        return self.nodes[n].op == "number" and self.nodes[n].attr("value") == 0

    # -- ops with several results ---------------------------------------------------------------------
    def _ut_transform(self, n: int, node: Node) -> None:
        """(I - G Sigma)^-1 by masked doubling: X <- X + X (N o mask) X, one level of blocks at a time.

        The first level, of single tokens, needs no product; N is zero on its diagonal and above.
        """
        m, r = _int(node, "m"), _int(node, "r")
        scores = [node.args[i * m : (i + 1) * m] for i in range(r)]
        sigma = [node.args[r * m + j * r : r * m + (j + 1) * r] for j in range(m)]
        self.library.add("solve_dot")
        self.lines.append("o_apart = o_t[:, None] ^ o_t[None, :]")
        system: dict[tuple[int, int], str] = {}
        self.library |= {"bad_columns", "finite_entries", "spoilt_by"}
        bad = self.names.unique("b_bad")
        inverse: dict[tuple[int, int], str] = {}
        for i in range(r):
            for k in range(r):
                terms = [
                    t for j in range(m) if (t := self._scaled_columns(scores[i][j], sigma[j][k])) is not None
                ]
                first = "0.0"
                if terms:
                    system[i, k] = self.names.unique(f"b_n_{i + 1}{k + 1}")
                    found = f"bad_columns({system[i, k]}, o_t)"
                    self.lines += [
                        f"{system[i, k]} = {' + '.join(terms)}",
                        f"{bad} = {found if len(system) == 1 else f'tl.maximum({bad}, {found})'}",
                        f"{system[i, k]} = finite_entries({system[i, k]})",
                    ]
                    first = f"tl.where(o_apart == 1, {system[i, k]}, 0.0)"
                inverse[i, k] = self.names.unique(f"b_ut_{i + 1}{k + 1}")
                if i == k:
                    first = f"tl.where(o_apart == 0, 1.0, {first})"
                elif not terms:
                    first = "tl.zeros((C, C), dtype=tl.float32)"
                self.lines.append(f"{inverse[i, k]} = {first}")
        # neighbouring blocks of 2^level tokens meet where the numbers of two tokens differ in that bit first
        self.lines += ["for level in range(1, LEVELS):", "    m_level = (o_apart >> level) == 1"]
        step: dict[tuple[int, int], list[str]] = {}
        for i, k in system:
            masked = self.names.unique(f"b_level_{i + 1}{k + 1}")
            self.lines.append(f"    {masked} = tl.where(m_level, {system[i, k]}, 0.0)")
            for c in range(r):
                step.setdefault((i, c), []).append(_solve_dot(masked, inverse[k, c]))
        partial: dict[tuple[int, int], str] = {}
        for (i, c), terms in step.items():
            partial[i, c] = self.names.unique(f"b_half_{i + 1}{c + 1}")
            self.lines.append(f"    {partial[i, c]} = {' + '.join(terms)}")
        updates = {
            (a, c): [_solve_dot(inverse[a, i], partial[i, c]) for i in range(r) if (i, c) in partial]
            for a in range(r)
            for c in range(r)
        }
        fresh = {
            key: self.names.unique(f"b_add_{key[0] + 1}{key[1] + 1}")
            for key, terms in updates.items()
            if terms
        }
        self.lines += [f"    {fresh[key]} = {' + '.join(updates[key])}" for key in fresh]
        self.lines += [f"    {inverse[key]} += {fresh[key]}" for key in fresh]
        self.lines += [f"{x} = spoilt_by({x}, {bad}, o_t)" for x in inverse.values() if system]
        for i in range(r):
            for k in range(r):
                self.picks[n, i * r + k] = inverse[i, k]

    def _scaled_columns(self, score: int, sigma: int) -> str | None:
        """G with column s scaled by sigma_s; None where it is zero."""
        if self._is_zero_number(score) or self._is_zero_number(sigma):
            return None
        g = self.value(score)
        node = self.nodes[sigma]
        if node.op == "number":
            return g if node.attr("value") == 1 else f"{g} * {_number(node)}"
        return f"{g} * {self.value(sigma)}[None, :]" if node.axes else f"{g} * {self.value(sigma)}"


def _number(node: Node) -> str:
    text = repr(node.attr("value"))
    return f"float('{text}')" if "inf" in text else text


def _solve_dot(a: str, b: str) -> str:
    return f"solve_dot({a}, {b}, SOLVE)"


def _read_flags(node: Node) -> tuple[str, str]:
    read = node.attr("read")
    return f"INCLUSIVE={read == 'inclusive'}", f"EXCLUSIVE={read == 'exclusive'}"


def zero_wanted(nodes: Sequence[Node]) -> frozenset[int]:
    """The operands of products, decays and scores: what has to be zero on padding."""
    return frozenset(
        a
        for node in nodes
        if OPS[node.op].kind in ("matmul", "decay", "gate", "sign", "lowered", "solve")
        for a in node.args
    )


def _int(node: Node, name: str) -> int:
    value = node.attr(name)
    if not isinstance(value, int):
        raise InternalError(f"attr {name} of {node.op} is not an integer")
    return value
