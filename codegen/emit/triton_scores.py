"""Statements of the decayed scores of one gate, and of their derivatives: one loop over block levels.

At each level neighbouring blocks of tokens meet at an anchor, the boundary between them. A product with a
0/1 matrix sums w between every token and its anchor (adding only), one exponential gives the token's factor.
Tokens of the second block count as rows x, those of the first as columns y, so one tile holds both
(``codegen/schedule/meeting_tiles.py``); products of such tiles are the scores, and products with the
cotangents where blocks meet the derivatives. Tiles stand with the channels first where the kernel has them
so: then they are the operands that tensor cores take from registers, and the [C, C] matrices those from
memory on chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from linalg_dsl.codegen.schedule.meeting_tiles import (
    MeetingProduct,
    meeting_products,
    meeting_tiles,
    source_of_column,
    source_of_row,
)
from linalg_dsl.planner.plan import Node

if TYPE_CHECKING:
    from linalg_dsl.codegen.emit.triton_statements import Statements

Sums = dict[int | None, str]
"""The names of sums over the levels, by the number of a row or column."""


class JointScores:
    """Prints one ``decayed_scores`` or ``decay_adjoints`` node; its results go to ``out.picks``.

    Where rows of both kinds, with intervals up to a token and up to the one before, stand beside each other,
    all take the shorter interval, and x of the longer is multiplied by the token's own decay beforehand.
    """

    def __init__(self, out: Statements, n: int, node: Node, *, blocked: bool = False) -> None:
        self.out, self.n, self.blocked = out, n, blocked
        attrs = dict(node.attrs)
        rows, cols = int(str(attrs["rows"])), int(str(attrs["cols"]))
        self.reads = str(attrs["reads"]).split(",")
        self.pairs = [(int(p.split("-")[0]), int(p.split("-")[1])) for p in str(attrs["pairs"]).split(",")]
        args = list(node.args)
        self.adjoint = node.op == "decay_adjoints"
        self.a = [out.value(i) for i in args[: len(self.pairs)]] if self.adjoint else []
        rest = args[len(self.a) :]
        self.x = [out.value(i) for i in rest[:rows]]
        self.y = [out.value(i) for i in rest[rows : rows + cols]]
        self.w = rest[-1]
        axes = out.nodes[self.w].axes
        self.turned = out.tile(axes) != axes
        block = out.blocks[axes[-1]].length
        self.shape = f"({block}, C)" if self.turned else f"(C, {block})"
        self.exclusive = "exclusive" in self.reads
        """Whether all intervals of rows end before their token."""
        self.lifted = [self.exclusive and read != "exclusive" for read in self.reads]
        """Rows that are multiplied by their token's own decay beforehand."""
        self.wanted = {
            int(str(pick.attr("index"))) for pick in out.nodes if pick.op == "pick" and pick.args == (n,)
        }
        """The results that somebody picks."""
        taken = {
            int(str(out.nodes[pick].attr("index"))): terms
            for pick, (terms, _) in out.taken_in.items()
            if out.nodes[pick].args == (n,)
        }
        self.behind, alone = self._summed_behind(taken.get(rows + cols, ()))
        """What the gate's derivative sums from each token on, beside what the scores make of it."""
        self.begins: dict[int, list[str]] = {
            index: [out.value(a) for a in terms] for index, terms in taken.items()
        } | {rows + cols: alone}
        """What a result begins with."""
        self.same = {
            int(p.split("-")[0]): int(p.split("-")[1]) for p in str(attrs.get("same", "")).split(",") if p
        }
        """Rows whose derivative is part of a column's."""
        row_ids = [-1 - i if up else rest[i] for i, up in enumerate(self.lifted)]
        self.ids = (row_ids, rest[rows : rows + cols])
        self.tiles = meeting_tiles(*self.ids, self.pairs)

    def statements(self) -> list[str]:
        self.gate = self.out.log2_gate(self.w)
        self.rows = list(self.x)
        self.lift: list[str] = []
        """Statements that make the rows of levels."""
        if any(self.lifted):
            self.own = self._name("own_decay")
            self.lift.append(f"{self.own} = tl.exp2({self.gate})")
            for i, x in enumerate(self.x):
                if self.lifted[i]:
                    self.rows[i] = self._name("lifted", i)
                    self.lift.append(f"{self.rows[i]} = {x} * {self.own}")
        return self._adjoints() if self.adjoint else self._scores()

    # -- forward --------------------------------------------------------------------------------------
    def _scores(self) -> list[str]:
        """Scores anchored at the start of the chunk where no decay up to the row is too steep for that.

        A steep row takes level after level: later ones overwrite the pairs that do not meet at earlier ones,
        from the diagonal outwards. Which way a row goes depends on no later token, and the levels are passed
        over where no row needs them.
        """
        rows, cols = self.ids
        of_row = {i: source_of_row(self.tiles, rows, cols, i) for i, _ in self.pairs}
        of_col = {j: source_of_column(self.tiles, rows, cols, j) for _, j in self.pairs}
        lines, row_factors, col_factor, steep = self._from_start()
        m_steep = self._name("steep_rows")
        near = {i: self._name("near_row", i) for i in of_row}
        far = {j: self._name("near_col", j) for j in of_col}
        lines += [f"{name} = ({self.x[i]} * {row_factors[i]}).to(DOT)" for i, name in near.items()]
        lines += [f"{name} = ({self.y[j]} * {col_factor}).to(DOT)" for j, name in far.items()]
        earlier = f"tl.where(o_t[None, :] <= o_t[:, None], {steep}[None, :], 0)"
        instead = [*self.lift, f"{m_steep} = (tl.sum({earlier}, 1) > 0)[:, None]"]
        behind: list[str] = []
        parts: list[str] = []
        for number, (i, j) in enumerate(self.pairs):
            part, name = self._name("part", i, j), self._name("score", i, j)
            parts.append(part)
            self.out.picks[self.n, number] = name
            alone = "0.0"
            if self.reads[i] == "inclusive":
                alone = self._outer(f"({self.x[i]}).to(DOT)", f"({self.y[j]}).to(DOT)")
            lines.append(f"{part} = {self._outer(near[i], far[j])}")
            instead.append(f"{part} = tl.where({m_steep}, {alone}, {part})")
            inside = f"tl.where(o_t[:, None] {self._sign(i)} o_t[None, :], {part}, 0.0)"
            if self.blocked:
                self.out.first.append(f"{name} = tl.zeros((C, C), dtype=tl.float32)")
                behind.append(f"{name} += {inside}")
            else:
                behind.append(f"{name} = {inside}")
        body = self._factor()
        scaled = {}
        for c, tile in enumerate(self.tiles):
            row = tile.row if c in of_row.values() else None
            col = tile.col if c in of_col.values() else None
            scaled[c] = self._name("scaled", c)
            body.append(f"{scaled[c]} = (({self._both(row, col)}) * {self.factor}).to(DOT)")
        body.append(f"m_outside = ((o_t >> level)[:, None] != (o_t >> level)[None, :]) & {m_steep}")
        for (i, j), part in zip(self.pairs, parts, strict=True):
            product = self._outer(scaled[of_row[i]], scaled[of_col[j]])
            body.append(f"{part} = tl.where(m_outside, {product}, {part})")
        instead += self._levels(body)
        return [*lines, f"if tl.max({steep}, 0) > 0:", *(f"    {line}" for line in instead), *behind]

    def _sign(self, row: int) -> str:
        return ">=" if self.reads[row] == "inclusive" else ">"

    def _from_start(self) -> tuple[list[str], list[str], str, str]:
        """Statements of the factors of every row and of columns with the start of the chunk as the anchor,
        and of the tokens ([C], 1 or 0) up to which some channel has decayed, or grown, by over 2^STEEP."""
        sums = {kind: self._name("from_start") for kind in sorted({self.exclusive, False})}
        within = self.out.call("tokens_within", "C", "AFTER=False", f"STRICT={self.exclusive}")
        lines = [f"{sums[self.exclusive]} = {self.out.token_sums(self.gate, within, self.turned)}"]
        if self.exclusive:
            lines.append(f"{sums[False]} = {sums[True]} + {self.gate}")
        decays = {
            kind: self._name("near_decay") for kind in sums if kind == self.exclusive or any(self.lifted)
        }
        down, steep = self._name("near_growth"), self._name("steep")
        lines += [
            *(f"{name} = tl.exp2({sums[kind]})" for kind, name in decays.items()),
            f"{down} = tl.exp2(tl.minimum(-{sums[False]}, STEEP))",
            f"{steep} = tl.max(tl.where(tl.abs({sums[False]}) > STEEP, 1, 0), {0 if self.turned else 1})",
        ]
        return lines, [decays[self.exclusive and not up] for up in self.lifted], down, steep

    # -- backward -------------------------------------------------------------------------------------
    def _adjoints(self) -> list[str]:
        """Derivatives level after level, or anchored at the start of the chunk where no decay is too steep.

        Without the gate's derivative they may be part of an output, which depends on no later token and so
        does not choose. The gate's derivative at one anchor is a sum of x o dx - y o dy over the tokens from
        each one on; both are made of the same rounded operands, so what cancels does so but for float32.
        """
        out, count = self.out, len(self.x)
        gate = count + len(self.y) in self.wanted
        products = meeting_products(
            self.tiles, *self.ids, self.pairs,
            [gate or i in self.wanted or i in self.same for i in range(count)],
            [gate or count + j in self.wanted for j in range(len(self.y))],
        )  # fmt: skip
        before: list[str] = []
        if gate:
            matrices = [self._triangle(before, number) for number in range(len(self.pairs))]
        else:
            matrices = [self._matrix(before, number, p) for number, p in enumerate(products)]
        lines, ends, dx, dy, whole = self._sums(before)
        if out.in_loop:
            out.first += before
        else:
            lines = before + lines
        dw, behind, lifted = "", "", {i for i in dx if i is not None and self.lifted[i]}
        given = {i: name for i, name in dx.items() if i not in lifted} | whole
        diagonal: list[str] = []
        if gate:
            dw = self._name("dw")
            out.picks[self.n, count + len(self.y)] = dw
            begin = " + ".join(self.begins.get(count + len(self.y), ()))
            lines.append(f"{dw} = {begin or f'tl.zeros({self.shape}, dtype=tl.float32)'}")
            ends = [*(f"{dw} += {self.rows[i]} * {dx[i]}" for i in sorted(lifted)), *ends]
            if self.behind:
                lines.append(f"{(behind := self._name('behind'))} = {' + '.join(self.behind)}")
            diagonal = self._diagonal(matrices, given, dy)
        levels = [
            *diagonal,
            *self.lift,
            *(f"{dx[i]} = tl.zeros({self.shape}, dtype=tl.float32)" for i in dx if i in lifted),
            *self._levels(self._level(products, matrices, dx, dy, dw)),
            *ends,
        ]
        if not gate:
            return [*lines, *levels]
        anchored, row_factors, col_factor, steep = self._from_start()
        near, total = self._near(matrices, given, dy, dw, behind, row_factors, col_factor)
        among = self.out.call("tokens_within", "C", "AFTER=True", f"STRICT={self.exclusive}")
        last = f"{dw} += {self.out.token_sums(total, among, self.turned)}"
        return [
            *lines, *anchored, f"if tl.max({steep}, 0) > 0:", *(f"    {line}" for line in levels),
            "else:", *(f"    {line}" for line in near), last if behind else f"    {last}",
        ]  # fmt: skip

    def _summed_behind(self, terms: Sequence[int]) -> tuple[list[str], list[str]]:
        """Of terms of the gate's derivative, what is summed over the tokens behind each one as products of
        scores are, so that one sum serves all; and what stands beside that sum."""
        behind: list[str] = []
        alone: list[str] = []
        for n in terms:
            node = self.out.nodes[n]
            kind = node.attr("kind") if node.op == "gate_sum" else None
            whole = kind == "from_start"
            if whole or (kind == "from_start_exclusive" and self.exclusive):
                behind.append(self.out.value(node.args[0]))
                alone += behind[-1:] if whole and self.exclusive else []  # its own token beside those behind
            else:
                alone.append(self.out.value(n))
        return behind, alone

    def _level(
        self, products: Sequence[MeetingProduct], matrices: Sequence[str], dx: Sums, dy: Sums, dw: str
    ) -> list[str]:
        """Statements of one level; ``dw`` is empty where the gate's derivative is not wanted."""
        body = self._factor()
        self.out.library.add("blocks_meet")
        body.append("m_meet = blocks_meet(level, C)")
        both, scaled, parts = {}, {}, []
        for c, tile in enumerate(self.tiles):
            source = [p for p in products if p.source == c]
            if not source and not dw:
                continue
            both[c], scaled[c] = self._name("both", c), self._name("scaled", c)
            row = tile.row if dw or any(p.upper for p in source) else None
            col = tile.col if dw or any(p.lower for p in source) else None
            body.append(f"{both[c]} = {self._both(row, col)}")
            if source:
                body.append(f"{scaled[c]} = ({both[c]} * {self.factor}).to(DOT)")
        for number, matrix in enumerate(matrices):
            parts.append(self._name("part", number))
            body.append(f"{parts[-1]} = tl.where(m_meet, {matrix}, 0.0).to(DOT)")
        moved = ""
        for c, tile in enumerate(self.tiles):
            here = [(number, p) for number, p in enumerate(products) if p.target == c]
            if not here:
                continue
            step = self._name("step", c)
            if dw:  # a matrix of a pair stands below the diagonal: as it is for rows, transposed for columns
                terms = [self._among(parts[n], scaled[p.source], ">") for _, p in here for n in p.lower]
                upper = [(parts[n], scaled[p.source]) for _, p in here for n in p.upper]
                terms += [self._among(part, tile, "<", back=True) for part, tile in upper]
            else:
                side = {(True, False): ">", (False, True): "<"}
                terms = [
                    self._among(parts[n], scaled[p.source], side.get((bool(p.lower), bool(p.upper)), ""))
                    for n, p in here
                ]
            body.append(f"{step} = {self.factor} * ({' + '.join(terms)})")
            body += self._add(step, dx.get(tile.row), dy.get(tile.col), [p for _, p in here])
            if dw:
                begin = f"{moved} += " if moved else f"{(moved := self._name('moved'))} = "
                body.append(f"{begin}{both[c]} * {step}")
        if dw:
            body.append(f"{dw} += {self.out.token_sums(moved, 'tl.trans(m_between)', self.turned)}")
        return body

    def _near(
        self, matrices: Sequence[str], dx: Sums, dy: Sums, dw: str, behind: str, row_factors: Sequence[str],
        col_factor: str,
    ) -> tuple[list[str], str]:  # fmt: skip
        """All pairs of the chunk at once, those of a token with itself too, anchored at its start; and what
        dw has to sum behind each token, which is added to ``behind`` where that is not empty."""
        rows = [(x, self._name("near_row", i), row_factors[i]) for i, x in enumerate(self.x)]
        cols = [(y, self._name("near_col", j), col_factor) for j, y in enumerate(self.y)]
        lines = [f"{near} = ({value} * {factor}).to(DOT)" for value, near, factor in (*rows, *cols)]
        moved, with_own = (
            behind or self._name("moved"),
            self._name("moved_with_own") if self.exclusive else "",
        )
        known = {behind} - {""}

        def add(name: str, sign: str, term: str) -> str:
            """At once, so that no product waits for the others."""
            begin = f"{name} {sign}= " if name in known else f"{name} = {'-' if sign == '-' else ''}"
            known.add(name)
            return f"{begin}{term}"

        def derivative(what: str, at: int, sums: Sums, terms: list[tuple[int, str]]) -> None:
            """``terms``: the numbers of pairs, and the tiles that their cotangents meet."""
            _, near, factor = (rows if what == "row" else cols)[at]
            back, step = what == "col", self._name(f"step_{what}", at)
            total = " + ".join(self._apply(matrices[number], tile, back=back) for number, tile in terms)
            lines.append(f"{step} = {total}")
            lines.extend(self._one_sided(step, matrices, terms, back=back))
            if at in sums:
                lines.append(f"{sums[at]} += {factor} * {step}")
            whole = back or self.lifted[at]
            name = with_own if whole and with_own else moved
            lines.append(add(name, "-" if back else "+", f"{near}.to(tl.float32) * {step}"))

        pairs = list(enumerate(self.pairs))
        for i in range(len(rows)):
            derivative("row", i, dx, [(number, cols[col][1]) for number, (row, col) in pairs if row == i])
        for j in range(len(cols)):
            derivative("col", j, dy, [(number, rows[row][1]) for number, (row, col) in pairs if col == j])
        if with_own:
            lines.append(f"{dw} += {with_own}")
            lines += [f"{behind} += {with_own}"] if behind else []
        return lines, f"{moved} + {with_own}" if with_own and not behind else moved

    def _triangle(self, before: list[str], number: int) -> str:
        """The [C, C] cotangents of a pair where its scores are: one operand for rows and, transposed, for
        columns."""
        name = self._name("cotangents", number)
        sign = self._sign(self.pairs[number][0])
        before.append(f"{name} = tl.where(o_t[:, None] {sign} o_t[None, :], {self.a[number]}, 0.0).to(DOT)")
        return name

    def _diagonal(self, matrices: Sequence[str], dx: Sums, dy: Sums) -> list[str]:
        """What pairs of a token with itself add, as no two blocks that meet have them.

        A product brings the factors of tokens to all channels: they lie as sums over other products do then,
        and no tile has to be laid out as the cotangents are.
        """
        lines: list[str] = []
        for number, (i, j) in enumerate(self.pairs):
            if self.reads[i] != "inclusive" or not (i in dx or j in dy):
                continue
            entries = f"tl.where(o_t[:, None] == o_t[None, :], {matrices[number]}, 0.0).to(DOT)"
            name = self._name("diagonal", number)
            lines.append(f"{name} = {self._apply(entries, f'tl.full({self.shape}, 1.0, DOT)')}")
            lines += [f"{dx[i]} += {name} * {self.y[j]}"] if i in dx else []
            lines += [f"{dy[j]} += {name} * {self.x[i]}"] if j in dy else []
        return lines

    def _matrix(self, before: list[str], number: int, product: MeetingProduct) -> str:
        """The [C, C] cotangents of a product, below and above the diagonal."""
        name = self._name("cotangents", number)
        lower = " + ".join(self.a[n] for n in product.lower)
        upper = f"tl.trans({' + '.join(self.a[n] for n in product.upper)})"
        match product.lower, product.upper:
            case _, ():
                chosen = f"tl.where(o_t[:, None] > o_t[None, :], {lower}, 0.0)"
            case (), _:
                chosen = f"tl.where(o_t[:, None] < o_t[None, :], {upper}, 0.0)"
            case _:
                chosen = f"tl.where(o_t[:, None] > o_t[None, :], {lower}, {upper})"
        before.append(f"{name} = ({chosen}).to(DOT)")
        return name

    def _sums(self, before: list[str]) -> tuple[list[str], list[str], Sums, Sums, Sums]:
        """Where dx and dy begin, with what the diagonal adds (its decay is 1), and lines behind the levels;
        the names of the sums over the levels, by row and column, and of dx where a lifted row has another.
        """
        count = len(self.x)
        gate = count + len(self.y) in self.wanted
        diagonal: dict[int, str] = {}
        for number, (i, _) in enumerate(self.pairs):
            if self.reads[i] == "inclusive" and not gate:
                diagonal[number] = self._name("diagonal", number)
                entries = f"tl.where(o_t[:, None] == o_t[None, :], {self.a[number]}, 0.0)"
                before.append(f"{diagonal[number]} = tl.sum({entries}, {0 if self.turned else 1})")
        line = "[None, :]" if self.turned else "[:, None]"
        terms: dict[tuple[str, int], list[str]] = {}
        for number, name in diagonal.items():
            i, j = self.pairs[number]
            terms.setdefault(("x", i), []).append(f"{name}{line} * {self.y[j]}")
            terms.setdefault(("y", j), []).append(f"{name}{line} * {self.x[i]}")
        zeros = f"tl.zeros({self.shape}, dtype=tl.float32)"
        lines: list[str] = []
        ends: list[str] = []
        dx: Sums = {}
        dy: Sums = {}
        wholes: Sums = {}
        for j in range(len(self.y)):
            if count + j in self.wanted:
                dy[j] = self._name("dy", j)
                self.out.picks[self.n, count + j] = dy[j]
                alike = [i for i, of in self.same.items() if of == j]
                start = [*self.begins.get(count + j, ()), *terms.get(("y", j), ())]
                start += [t for i in alike for t in terms.get(("x", i), ())]
                lines.append(f"{dy[j]} = {' + '.join(start) or zeros}")
                dx |= dict.fromkeys(alike, dy[j])
        for i in range(count):
            if self.lifted[i] and (i in self.wanted or gate):
                dx[i] = self._name("d_lifted", i)
            if i not in self.wanted:
                continue
            whole = self._name("dx", i)
            self.out.picks[self.n, i] = whole
            start = [*self.begins.get(i, ()), *terms.get(("x", i), ())]
            lines.append(f"{whole} = {' + '.join(start) or zeros}")
            if self.lifted[i]:
                wholes[i] = whole
                ends.append(f"{whole} += {self.own} * {dx[i]}")
            else:
                dx[i] = whole
        return lines, ends, dx, dy, wholes

    @staticmethod
    def _add(step: str, dx: str | None, dy: str | None, here: Sequence[MeetingProduct]) -> list[str]:
        """What a level adds to the sums: to dx in second blocks, to dy in first ones."""
        to_x = dx is not None and any(p.lower for p in here)
        to_y = dy is not None and any(p.upper for p in here)
        if to_x and to_y and dx == dy:
            return [f"{dx} += {step}"]
        return [
            *([f"{dx} += tl.where(m_second, {step}, 0.0)"] if to_x else []),
            *([f"{dy} += tl.where(m_second, 0.0, {step})"] if to_y else []),
        ]

    # -- shared ---------------------------------------------------------------------------------------
    def _factor(self) -> list[str]:
        """Statements of one level: which tokens are in second blocks, and the factor of every token."""
        self.out.library.add("anchored_intervals")
        self.factor = self._name("factor")
        across = "[None, :]" if self.turned else "[:, None]"
        return [
            f"m_second = ((o_t >> level) & 1){across} == 1",
            f"m_between = anchored_intervals(level, C, EXCLUSIVE={self.exclusive})",
            f"{self.factor} = tl.exp2({self.out.token_sums(self.gate, 'm_between', self.turned)})",
        ]

    @staticmethod
    def _levels(body: list[str]) -> list[str]:
        """The loop over levels, with a run-time bound; no statement that nothing uses."""
        if not any("m_second" in line for line in body[1:]):
            body = body[1:]
        return ["for level in range(LEVELS):", *(f"    {line}" for line in body)]

    def _both(self, row: int | None, col: int | None) -> str:
        """x of a row in second blocks beside y of a column in first ones."""
        if row is None or col is None:
            return self.rows[row] if row is not None else self.y[col or 0]
        if self.ids[0][row] == self.ids[1][col]:
            return self.y[col]
        return f"tl.where(m_second, {self.rows[row]}, {self.y[col]})"

    def _outer(self, rows: str, cols: str) -> str:
        """[C, C] from the tiles of rows and columns."""
        if self.turned:
            return f"tl.dot(tl.trans({rows}), {cols}, input_precision=PRECISION)"
        return f"tl.dot({rows}, tl.trans({cols}), input_precision=PRECISION)"

    def _apply(self, matrix: str, tile: str, *, back: bool = False) -> str:
        """The tile with its tokens summed as the rows of a [C, C] matrix say; as its columns if ``back``."""
        if self.turned:
            return f"tl.dot({tile}, {matrix if back else f'tl.trans({matrix})'}, input_precision=PRECISION)"
        return f"tl.dot({f'tl.trans({matrix})' if back else matrix}, {tile}, input_precision=PRECISION)"

    def _one_sided(
        self, total: str, matrices: Sequence[str], terms: Sequence[tuple[int, str]], *, back: bool
    ) -> list[str]:
        """What a sum of products with the triangles of pairs does where it has NaN; ``back``: transposed."""
        if not self.out.nan_exact:
            return []
        products = []
        for number, tile in terms:
            strict = self.reads[self.pairs[number][0]] != "inclusive"
            flags = (f"TURNED={self.turned}", f"BACK={back}", f"STRICT={strict}", "PRECISION=PRECISION")
            products.append(self.out.call("one_sided_product", matrices[number], tile, "C", *flags))
        self.out.library.add("has_nan")
        return [f"if has_nan({total}, LOOK):", f"    {total} = {' + '.join(products)}"]

    def _among(self, part: str, tile: str, side: str = "", *, back: bool = False) -> str:
        """``_apply`` of the pairs that meet at a level, of which no other pair sees a NaN; ``side``: the sign
        between the tokens of those pairs, where one comes first in all."""
        if not self.out.nan_exact:
            return self._apply(part, tile, back=back)
        among = f"m_meet & (o_t[:, None] {side} o_t[None, :])" if side else "m_meet"
        flags = (f"TURNED={self.turned}", "PRECISION=PRECISION", "LOOK=LOOK")
        return self.out.call("product_among", f"tl.trans({part})" if back else part, tile, among, *flags)

    def _name(self, what: str, *numbers: int) -> str:
        tail = "".join(str(n + 1) for n in numbers)
        return self.out.names.unique(f"b_{what}{f'_{tail}' if tail else ''}")
