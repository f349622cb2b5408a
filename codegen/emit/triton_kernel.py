"""One kernel of a plan as text: its loads, statements and stores, in the template of its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from linalg_dsl.codegen.emit.kernel_lines import (
    ALWAYS,
    UNIT,
    looking_always,
    taken_apart,
    through_products,
    turned_axes,
    uses,
    without_unused,
)
from linalg_dsl.codegen.emit.kernel_text import KernelText, Memory, PrepText, StateText, WalkText
from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.prep_blocks import (
    Phase,
    joint_last,
    phases,
    short_of_registers,
    summed_axes,
    taken_in,
)
from linalg_dsl.codegen.emit.render import render
from linalg_dsl.codegen.emit.trace import Values, values_of
from linalg_dsl.codegen.emit.triton_boundary import BoundaryText, ProductsText, boundary_suffix
from linalg_dsl.codegen.emit.triton_statements import Statements, Tile, zero_wanted
from linalg_dsl.codegen.emit.triton_transform import TransformText
from linalg_dsl.codegen.emit.walk_tiles import CONSTANT, PARTS, WalkTiles
from linalg_dsl.codegen.emit.walk_tiles import RESERVED as TILE_NAMES
from linalg_dsl.codegen.schedule.alone import lone_transform
from linalg_dsl.codegen.schedule.descriptors import is_tile
from linalg_dsl.codegen.schedule.kernel_plan import (
    Boundary,
    BoundaryProducts,
    Kernel,
    KernelPlan,
    is_transform,
    tile_kinds,
)
from linalg_dsl.codegen.schedule.traces import leaves_trace
from linalg_dsl.codegen.schedule.two_level import Start
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.plan import Node

_RESERVED = (
    "C", "K", "V", "H", "KP", "VP", "KB", "VB", "K_BLOCKS", "V_BLOCKS", "BLOCK", "BLOCKS", "LEVELS", "DOT",
    "PRECISION", "SOLVE", "SUMS", "STEEP", "LOOK", "SAVE", "EXACT", "STAGES", "ORDERED", "STEP",
    "HAS_FIRST", "WANT_LAST", "p_first", "p_last", "seq_start", "chunk_start", "chunk_seq", "seq_order",
    "i_block", "i_h", "i_n", "i_c", "i_ch", "i_step", "i_first",
    "o_r", "i_pairs", "o_pairs", "b_system", "b_transform", "b_half_step", "b_meeting",
    "start", "length", "first_chunk", "chunks", "i_k", "i_v", "o_t", "o_k", "o_v", "o_s", "m_t", "m_k",
    "m_v", "m_s", "b_s", "m_level", "level", "p_starts", "p_norms", "p_marks", "p_ends", "b_h", "b_bound",
    "b_decayed_state", "b_limit", "b_one", "first_mark", "i_share", "parity_sign", "softplus", "tanh",
    "expm1", "sign",
    "step", "power", "pairs_decay", "span_sum", "row_sums", "token_sums", "tokens_within",
    "anchored_intervals", "meeting_blocks", "blocks_meet", "m_meet", "m_second", "m_between",
    "m_outside", "widened", "selected_sums", "running_sums", "bounded", "solve_dot", "o_apart",
    "is_seen", "has_nan", "has_lost", "has_late_nan", "has_spread", "one_sided_product", "product_among",
    "finite_numbers", "finite_product", "lost_tokens",
    "bad_columns", "finite_entries", "spoilt_by", "finite_gate", *TILE_NAMES,
)  # fmt: skip


class KernelPrinter:
    """Prints one kernel of ``plan``; ``memory`` tells where leaves, buffers and results lie.

    ``state_dims``: the order in which the caller's states have their axes. ``in_one_tile``: chunks are short
    enough for the transform of many erases to be one tile. ``start``: the state of a walk that is given none.
    ``stepped``: a chunk may have fewer tokens, STEP, than its tiles have rows. ``described``: a walk has both
    loads, by descriptors and by pointers.
    """

    def __init__(
        self,
        plan: KernelPlan,
        kernel: Kernel,
        memory: Mapping[int, Memory],
        title: str,
        state_dims: Axes = ("K", "V"),
        in_one_tile: bool = True,
        start: Start = "zeros",
        nan_exact: bool = False,
        stepped: bool = False,
        described: bool = False,
    ) -> None:
        self.state_dims = state_dims
        self.start = start
        self.step = "STEP" if stepped else "C"
        self.plan = plan
        self.nodes = plan.plan.nodes
        self.kernel = kernel
        self.memory = memory
        self.name = f"{title}_{kernel.name}"
        names = Names(reserved=_RESERVED)
        self.names = names
        self.phases = phases(self.nodes, kernel) if kernel.family == "prep" else None
        self.blocks = lone_transform(self.nodes, kernel) if in_one_tile else 0
        self.out = Statements(
            self.nodes,
            self._blocks(),
            names,
            needs_zero=self._needs_zero(),
            turned=turned_axes(self.nodes, kernel),
            nan_exact=nan_exact,
            apart=taken_apart(self.nodes, kernel),
            traced=leaves_trace(self.nodes, kernel) if kernel.boundary is None else frozenset(),
            wide=frozenset(
                b.node for b in plan.buffers if b.element == "float32" and is_transform(self.nodes, b.node)
            ),
        )
        self.tiles = WalkTiles(names, kernel.direction) if described and kernel.direction else None
        self.pointers: dict[str, str] = {}
        self.scalars: dict[str, str] = {}  # the launcher's name of every number, by the kernel's
        self.ratios: dict[str, None] = {}
        self.shared: dict[str, None] = {}
        self.before: list[str] = []
        self.rows: dict[str, str] = {}

    def run(self) -> KernelText:
        kernel = self.kernel
        if kernel.family == "walk":
            text = self._walk()
        else:
            body = without_unused(self._prep())
            self.out.lines = body
            text = render(
                "prep.py.jinja",
                PrepText(self.name, self._doc(), tuple(self.pointers), tuple(self.scalars), self._bounds(),
                      self._constants(), self._offsets(), self.step, tuple(body)),
            )  # fmt: skip
        return KernelText(
            self.name, kernel, text, tuple(self.pointers.values()), tuple(self.scalars.values()),
            self._constants(), frozenset(self.out.library), tile_kinds(self.nodes, kernel),
            self._values(), tuple(self.tiles.described.values()) if self.tiles else (),
        )  # fmt: skip

    def _values(self) -> Values:
        found = values_of(self.plan.plan, self.out.text)
        if isinstance(self.kernel.boundary, Boundary):
            found |= dict.fromkeys(("b_h", "b_bound"), (self.plan.plan, self.kernel.boundary.node))
        return found

    def _prep(self) -> list[str]:
        """The lines of a prep, those of row numbers where the tokens are known."""
        if self.blocks > 1:
            tile = TransformText(
                self.out, self.kernel, self.step, lambda n: self.pointer(self.memory[n].argument), self._load
            )
            lines = tile.lines()
            return [*lines[:3], *self._row_lines(), *lines[3:]]
        body = self._body() if self.phases is None else self._blocked_body(self.phases)
        return [*self._row_lines(), *body]

    # -- families -------------------------------------------------------------------------------------
    def _walk(self) -> str:
        kernel = self.kernel
        if not kernel.carries:
            raise InternalError("a walk without a carry")
        labels = ["s"] if len(kernel.carries) == 1 else [self.nodes[leaf].label for leaf, _ in kernel.carries]
        states = [
            StateText("b_s" if label == "s" else self.names.unique(f"b_{label}"), "" if i == 1 else f"_{i}")
            for i, label in enumerate(labels, 1)
        ]
        for (leaf, _), state in zip(kernel.carries, states, strict=True):
            self.out.given(leaf, state.name)
        body = self._body()
        lines = [*body]
        term = self._boundary()
        if term:
            lines = term.around(lines)
        lines += self._handed_on([state.name for state in states])
        if term:
            lines += term.behind()
        lines = self._widened(lines)
        lines = without_unused([*self._row_lines(), *lines], frozenset(state.name for state in states))
        careful = looking_always(lines, self.out.cleaned) if any(ALWAYS in line for line in lines) else []
        if careful:
            self.out.library |= {"has_lost"}
        if self.tiles:
            lines = self.tiles.around(lines)
            self.before += self.tiles.before()
        self.out.lines = lines
        shape = ", ".join(self._blocks()[a].length for a in self.out.tile(("K", "V")))
        return render(
            "walk.py.jinja",
            WalkText(
                name=self.name,
                doc=self._doc(),
                pointers=tuple(self.pointers),
                scalars=tuple(self.scalars),
                bounds=self._bounds(),
                constants=self._constants(),
                offsets=self._offsets(),
                states=tuple(states),
                start=self._start(shape),
                state_offset=self.out.state_offset(self.state_dims),
                state_mask=self.out.mask(("K", "V")),
                before_loop=tuple(self.before),
                tiles=self.tiles.parameters if self.tiles else (),
                whole=self.tiles.whole if self.tiles else "",
                turn=self.tiles.turn if self.tiles else "",
                chunk_index="i_step" if kernel.direction == "forward" else "chunks - 1 - i_step",
                step=self.step,
                body=tuple(lines),
                careful=tuple(careful),
            ),
        )

    def _widened(self, lines: list[str]) -> list[str]:
        """The lines, tiles that no product takes loaded as if one did; not a gate's, which can be -inf."""
        rows: list[str] = []
        columns: list[str] = []
        other = {
            a for n in self.kernel.body if self.nodes[n].op not in ("add", "mul") for a in self.nodes[n].args
        }
        for n in self.kernel.loads:
            axes = self.nodes[n].axes
            if len(axes) == 2 and "s" not in axes and "t" in axes and n in self.out.raw and n not in other:
                (rows if self.out.tile(axes)[0] == "t" else columns).append(self.out.text[n])
        again = None
        if self.out.nan_exact:
            loads = {self.out.text[n]: load for n, load in self.out.again.items()}
            again = {name: (self.names.unique(f"{name}_wide"), loads[name]) for name in (*rows, *columns)}
        traced = {self.out.text[n] for n in self.kernel.loads if n in self.out.traced}
        lines = through_products(lines, rows, columns, again, traced)
        if any(UNIT in line for line in lines):
            self.out.library |= {"widened", "has_spread"} if again else {"widened"}
            self.before.append(f"{UNIT} = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0).to(DOT)")
        return lines

    def _handed_on(self, names: Sequence[str]) -> list[str]:
        """The states take their next values, none of which may be a state that is overwritten first."""
        nodes, carries = self.nodes, self.kernel.carries
        values = [
            f"tl.zeros_like({name})" if nodes[after].op == "number" else self.out.value(after)
            for name, (_, after) in zip(names, carries, strict=True)
        ]
        if any(value in names and value != name for name, value in zip(names, values, strict=True)):
            fresh = [self.names.unique(f"{name}_next") for name in names]
            before = [f"{new} = {value}" for new, value in zip(fresh, values, strict=True)]
            return [*before, *(f"{name} = {new}" for name, new in zip(names, fresh, strict=True))]
        return [f"{name} = {value}" for name, value in zip(names, values, strict=True)]

    def _start(self, shape: str) -> str:
        """The state of a walk that is given none."""
        match self.start:
            case "zeros":
                return f"tl.zeros(({shape}), dtype=tl.float32)"
            case "ones":
                return f"tl.full(({shape}), 1.0, dtype=tl.float32)"
            case "identity":
                first, second = (a.lower() for a in self.out.tile(("K", "V")))
                return f"tl.where(o_{first}[:, None] == o_{second}[None, :], 1.0, 0.0)"

    def _body(self) -> list[str]:
        """Loads where first used, statements in the order of the plan's demand, stores at once."""
        out, kernel = self.out, self.kernel
        pending = set(kernel.loads)
        stores = set(kernel.stores)

        def fetch(n: int) -> None:
            if n in pending:
                pending.remove(n)
                self._load(n)

        done: set[int] = set()
        for n in kernel.body:
            for a in self.nodes[n].args:
                fetch(a)
            out.compute(n)
            done.add(n)
            if n in stores:
                self._store(n)
        for n in sorted(pending):
            fetch(n)
        for n in stores - done:
            raise InternalError(f"%{n} is stored by {kernel.name} but not computed there")
        return out.lines

    def _blocked_body(self, found: tuple[Phase, ...]) -> list[str]:
        """Phase after phase: what has no wide axis, then a loop over the blocks of each."""
        out, nodes = self.out, self.nodes
        stores = set(self.kernel.stores)
        leaves = set(self.kernel.loads)
        lines: list[str] = []
        have: set[int] = set()

        def form(n: int, loaded: set[int]) -> None:
            for a in nodes[n].args:
                if a in leaves and a not in loaded:
                    loaded.add(a)
                    self._load(a)

        def small(wanted: Sequence[int]) -> None:
            for n in wanted:
                form(n, have)
                out.compute(n)
                if n in stores:
                    self._store(n)

        for phase in found:
            first, later = self._for_loops(phase)
            out.lines = []
            for n in later:  # their loads are on the way while the loops run
                for a in nodes[n].args:
                    if a in leaves and a not in have:
                        have.add(a)
                        self._load(a)
            small(first)
            lines += out.lines
            for loop in phase.loops:
                axis, inside = loop.axis, joint_last(nodes, loop.inside)
                out.lines = []
                for n in inside:  # operands without this axis are loaded once, before the loop
                    for a in nodes[n].args:
                        if a in leaves and a not in have and axis not in nodes[a].axes:
                            have.add(a)
                            self._load(a)
                lines += out.lines
                out.lines, out.first = [], []
                inner = set(have)
                out.in_loop = True
                for n in inside:
                    form(n, inner)
                    if nodes[n].op == "decay_adjoints":
                        out.taken_in |= taken_in(nodes, self.kernel, n, out.text)
                    if axis in summed_axes(nodes, n):
                        out.accumulate(n)
                    else:
                        out.compute(n)
                        if n in stores:
                            self._store(n)
                out.in_loop = False
                low = axis.lower()
                blocks = f"range({axis}_BLOCKS)"
                if any(short_of_registers(nodes[n]) for n in inside):  # what all blocks share is formed anew
                    blocks = f"tl.range({axis}_BLOCKS, disable_licm=True)"
                lines += [
                    *out.first,
                    f"for i_{low} in {blocks}:",
                    f"    o_{low} = i_{low} * {axis}B + tl.arange(0, {axis}B)",
                    f"    m_{low} = o_{low} < {axis}",
                    *(f"    {line}" for line in out.lines),
                ]
                out.lines = []
                for n in inside:
                    if axis in summed_axes(nodes, n):
                        read = any(n in nodes[user].args for user in self.kernel.body)
                        if read and leaves.intersection(nodes[n].args):
                            out.settle(n)
                        if n in stores:
                            self._store(n)
                small(later)
                later = []
                for n in loop.behind:
                    out.compute(n)
                    if n in stores:
                        self._store(n)
                lines += out.lines
            out.lines = []
            small(later)
            lines += out.lines
        out.lines = lines
        return lines

    def _solved_last(self, wanted: Sequence[int]) -> list[int]:
        """The values, those that wait for a triangular system last: the others need not live through it."""
        late: set[int] = set()
        for n in wanted:
            if self.nodes[n].op == "ut_transform" or late & set(self.nodes[n].args):
                late.add(n)
        return [*(n for n in wanted if n not in late), *(n for n in wanted if n in late)]

    def _for_loops(self, phase: Phase) -> tuple[list[int], list[int]]:
        """What of a phase its loops need, and the rest, which can wait: loops begin by waiting for memory."""
        if not phase.loops:
            return self._solved_last(phase.before), []
        wanted: set[int] = set()
        todo = [n for loop in phase.loops for n in loop.inside]
        while todo:
            n = todo.pop()
            if n not in wanted:
                wanted.add(n)
                todo.extend(self.nodes[n].args)
        return [n for n in phase.before if n in wanted], [n for n in phase.before if n not in wanted]

    # -- memory ---------------------------------------------------------------------------------------
    def _load(self, n: int) -> None:
        node, memory = self.nodes[n], self.memory[n]
        out = self.out
        if node.op == "const":
            name = self.names.unique(memory.argument)
            self.scalars[name] = memory.argument
            out.given(n, name)
            return
        pointer = self.pointer(memory.argument)
        name = self.names.unique(f"b_{node.label or f'x_{n}'}")
        if memory.shares:
            out.lines += self._sum_of_shares(name, pointer, memory)
            out.loaded(n, name, converted=True)
            return
        at, mask = self._address(node, memory)
        where = f", mask={mask}, other=0.0" if mask else ""
        load = f"tl.load({pointer}{at}{where})"
        line = f"{name} = {load}"
        if self.kernel.family == "walk":
            out.again[n] = load
        if self.tiles and is_tile(self.nodes, n) and not memory.by_chunks:
            lengths = {a: tile.length for a, tile in self._blocks().items()}
            turned = out.tile(node.axes) != node.axes
            self.tiles.add(name, node.axes, memory, lengths, self.kernel.split, turned)
        per_head = node.op == "param" and self.kernel.family == "walk"
        (self.before if per_head else out.lines).append(line)
        out.loaded(n, name, converted=memory.float32)

    def _sum_of_shares(self, name: str, pointer: str, memory: Memory) -> list[str]:
        """What every block of a walk has left of a sum, added up in the order of the blocks."""
        count = str(memory.shares)
        self.shared[count] = None
        place = f"{pointer} + ((i_ch * H + i_h) * {count} + i_share) * C + o_t"
        return [
            f"{name} = tl.zeros((C,), dtype=tl.float32)",
            f"for i_share in tl.static_range({count}):",
            f"    {name} += tl.load({place})",
        ]

    def _store(self, n: int) -> None:
        node, memory = self.nodes[n], self.memory[n]
        pointer = self.pointer(memory.argument)
        if memory.shares:
            place = f"{pointer} + ((i_ch * H + i_h) * BLOCKS + i_block) * C + o_t"
            self.out.lines.append(f"tl.store({place}, {self._zero_on_padding(n)})")
            return
        at, mask = self._address(node, memory)
        split = self.kernel.split
        if split and split not in node.axes:
            mask = f"{mask} & (i_block == 0)" if mask else "i_block == 0"
        value = self._zero_on_padding(n) if memory.by_chunks else self.out.value(n)
        value = f"{value}.to({pointer}.dtype.element_ty)"
        if not node.axes:
            line = f"tl.store({pointer}{at}, {value})"
        else:
            line = f"tl.store({pointer}{at}, {value}{f', mask={mask}' if mask else ''})"
        if memory.saved_only:
            self.out.lines += ["if SAVE:", f"    {line}"]
        else:
            self.out.lines.append(line)

    def _zero_on_padding(self, n: int) -> str:
        value = self.out.value(n)
        return value if n in self.out.zero else f"tl.where(m_t, {value}, 0.0)"

    def pointer(self, argument: str) -> str:
        """The kernel's name of one of the launcher's tensors."""
        for name, tensor in self.pointers.items():
            if tensor == argument:
                return name
        name = self.names.unique(f"p_{argument}")
        self.pointers[name] = argument
        return name

    def _address(self, node: Node, memory: Memory) -> tuple[str, str]:
        """(offset text, mask text) of a tile; offsets are 64-bit, since tokens are."""
        heads, head = "H", "i_h"
        if memory.ratio:
            self.ratios[memory.ratio] = None
            heads, head = f"(H // {memory.ratio})", f"i_h // {memory.ratio}"
        axes = node.axes
        if axes == ("s",) or memory.by_chunks:
            return " + (i_ch * H + i_h) * C + o_t", ""
        if axes == ("t", "s"):
            return " + (i_ch * H + i_h) * (C * C) + o_t[:, None] * C + o_t[None, :]", ""
        wide = axes[-1] if axes and axes[-1] != "t" else None
        offset = f"o_{wide.lower()}" if wide else ""
        if "t" in axes:
            row = self._row(heads, head, memory)
            step = heads if memory.rows == 1 else f"{heads} * {memory.rows}"
            if wide is None:
                return f" + {row} + {self._step(memory, step, '')}", "m_t"
            down, across = "[:, None]", "[None, :]"
            if self.out.tile(axes) != axes:
                down, across = across, down
            place = f"o_t{down} * {self._step(memory, step, wide)} + {offset}{across}"
            return f" + {row} * {wide} + ({place})", self.out.mask(axes)
        place = f"({head})" if node.op == "param" else f"(i_ch * {heads} + {head})"
        if memory.rows > 1:
            place = f"({place} * {memory.rows} + {memory.row})"
        return (f" + {place} * {wide} + {offset}", self.out.mask(axes)) if wide else (f" + {place}", "")

    def _row(self, heads: str, head: str, memory: Memory) -> str:
        """The name of the row of a chunk's first token in a tensor.

        It is one 64-bit number, and the steps from it are the same for every chunk: no address of a tile is
        multiplied out in 64 bits, chunk after chunk.
        """
        first, number = f"i_first * {heads} + {head}", ""
        if memory.rows > 1:
            first, number = f"({first}) * {memory.rows} + {memory.row}", f"_{memory.row}"
        of = (f"_{memory.argument}{number}" if memory.ratio else number) or "_token"
        return self._named(first, f"r{of}")

    def _step(self, memory: Memory, rows: str, wide: str) -> str:
        """The name of the steps of a chunk's tokens in rows, or of one step in numbers of an axis ``wide``.

        The latter is one number, made before any tile: of (o_t * H) * V in its place ptxas 12.8 and 13.0 were
        seen to make wrong addresses, with the H << 8 of another tensor for the H << 3 that they factor out.
        """
        of = f"_{memory.argument}" if memory.ratio else "_token"
        if not wide:
            return self._named(f"o_t * {rows}", f"t{of}")
        return self._named(f"{rows} * {wide}", f"step{of}" if memory.ratio else f"step_token_{wide.lower()}")

    def _named(self, expression: str, wanted: str) -> str:
        if expression not in self.rows:
            self.rows[expression] = self.names.unique(wanted)
        return self.rows[expression]

    def _row_lines(self) -> list[str]:
        return [f"{name} = {expression}" for expression, name in self.rows.items()]

    def _boundary(self) -> BoundaryText | ProductsText | None:
        boundary, direction = self.kernel.boundary, self.kernel.direction
        if boundary is None or direction is None:
            return None
        if isinstance(boundary, BoundaryProducts):
            results = [self.memory[n].argument for n in boundary.nodes]
            return ProductsText(boundary, direction, self.out, self.pointer, results)
        result = self.memory[boundary.node].argument
        suffix = boundary_suffix(self.plan, boundary)
        return BoundaryText(boundary, direction, self.out, self.pointer, self.before, "b_s", result, suffix)

    # -- tiles ----------------------------------------------------------------------------------------
    def _blocks(self) -> dict[str, Tile]:
        rows = f"{self.blocks} * C" if self.blocks > 1 else "C"
        out = {"t": Tile(rows, "m_t"), "s": Tile("C", "m_t")}
        for axis in ("K", "V"):
            length = "BLOCK" if self.kernel.split == axis else f"{axis}P"
            if self.phases is not None:
                length = f"{axis}B"
            out[axis] = Tile(length, f"m_{axis.lower()}")
        return out

    def _offsets(self) -> tuple[str, ...]:
        lines = []
        for axis in ("K", "V") if self.phases is None else ():
            name, length = axis.lower(), self._blocks()[axis].length
            base = "i_block * BLOCK + " if self.kernel.split == axis else ""
            # without a ragged block there is nothing to compare, and the compiler drops the mask
            whole = f"tl.full(({length},), True, tl.int1) if {axis} % {length} == 0"
            lines += [
                f"o_{name} = {base}tl.arange(0, {length})",
                f"m_{name} = {whole} else o_{name} < {axis}",
            ]
        return tuple(lines)

    def _bounds(self) -> tuple[str, ...]:
        """Loop bounds that are run-time numbers: unrolled, such a loop spills."""
        text = "\n".join(self.out.lines)
        return tuple(bound for bound in ("LEVELS", "K_BLOCKS", "V_BLOCKS") if uses(text, bound))

    def _constants(self) -> tuple[str, ...]:
        used = "\n".join((*self.out.lines, *self.before))
        blocks = ("KP", "VP") if self.phases is None else ("KB", "VB")
        shape = ["K", "V", "C", *(b for b in blocks if self.phases is None or uses(used, b))]
        if self.kernel.family == "walk":
            shape = [
                "K",
                "V",
                "VP" if self.kernel.split == "K" else "KP",
                "C",
                "BLOCK",
                "BLOCKS",
                "STAGES",
                "ORDERED",
            ]
        choices = ("DOT", "PRECISION", "SOLVE", "SUMS", "STEEP", "LOOK", "SAVE")
        optional = [c for c in choices if uses(used, c)]
        optional += ["STEP"] if self.step == "STEP" else []
        optional += ["EXACT"] if isinstance(self.kernel.boundary, Boundary) else []
        optional += [CONSTANT, PARTS] if self.tiles and self.tiles.described else []
        return (*shape, *optional, *self.ratios, *self.shared)

    def _needs_zero(self) -> frozenset[int]:
        boundary = self.kernel.boundary
        extra = boundary.pair_values if isinstance(boundary, Boundary) else ()
        return zero_wanted(self.nodes) | frozenset(extra)

    def _doc(self) -> str:
        if self.kernel.family == "prep":
            return "One chunk of one head: what needs no state."
        owned = "K" if self.kernel.split == "V" else "V"
        order = "first to last" if self.kernel.direction == "forward" else "last to first"
        return f"One sequence, head and block of {self.kernel.split}: all of {owned}, chunks from {order}."
