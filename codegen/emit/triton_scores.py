"""Statements of the decayed scores of one gate, and of their derivatives: one loop over block levels.

At each level neighbouring blocks of tokens meet at an anchor, the boundary between them. One product with
a 0/1 matrix sums w between every row and its anchor (adding only), one exponential gives the row's factor:
rows of the second block are scaled for x, those of the first for y, and their products on the tensor
cores are the scores of the pairs that meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linalg_dsl.planner.plan import Node

if TYPE_CHECKING:
    from linalg_dsl.codegen.emit.triton_statements import Statements

_STRICT = {True: "strict", False: "whole"}


class JointScores:
    """Prints one ``decayed_scores`` or ``decay_adjoints`` node; its results go to ``out.picks``."""

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
        self.w = out.value(rest[-1])
        self.block = out.blocks[out.nodes[rest[-1]].axes[-1]].length
        self.exclusive = [read == "exclusive" for read in self.reads]
        """Whether the interval of a row ends before it: those rows have factors of their own."""
        self.kinds = sorted(set(self.exclusive))
        self.of_cols = self.kinds[0]
        self.wanted = {
            int(str(pick.attr("index"))) for pick in out.nodes if pick.op == "pick" and pick.args == (n,)
        }
        """The results that somebody picks."""

    def statements(self) -> list[str]:
        gate = self._name("w")
        self.out.library.add("finite_gate")
        lines = [f"{gate} = finite_gate({self.w})"]
        self.gate = gate
        return lines + (self._adjoints() if self.adjoint else self._scores())

    # -- forward --------------------------------------------------------------------------------------
    def _scores(self) -> list[str]:
        lines: list[str] = []
        results = []
        for number, (i, j) in enumerate(self.pairs):
            name = self._name("score", i, j)
            results.append(name)
            self.out.picks[self.n, number] = name
            start = self.out.first if self.blocked else lines
            start.append(f"{name} = tl.zeros((C, C), dtype=tl.float32)")
            if self.reads[i] == "inclusive":
                diagonal = f"tl.sum({self.x[i]} * {self.y[j]}, 1)[:, None]"
                lines.append(f"{name} += tl.where(o_t[:, None] == o_t[None, :], {diagonal}, 0.0)")
        body, _, rows, cols = self._level()
        for (i, j), name in zip(self.pairs, results, strict=True):
            product = f"tl.dot({rows[i]}, tl.trans({cols[j]}), input_precision=PRECISION)"
            body.append(f"{name} += tl.where(m_meet, {product}, 0.0)")
        return [*lines, "for level in range(LEVELS):", *(f"    {line}" for line in body)]

    # -- backward -------------------------------------------------------------------------------------
    def _adjoints(self) -> list[str]:
        lines = []
        dx = {i: self._name("dx", i) for i in range(len(self.x)) if self._moves(i)}
        dy = {j: self._name("dy", j) for j in range(len(self.y)) if self._moves(len(self.x) + j)}
        dw = self._name("dw")
        gate = len(self.x) + len(self.y) in self.wanted
        diagonal: dict[int, str] = {}
        for number, (i, _) in enumerate(self.pairs):
            if self.reads[i] == "inclusive":
                diagonal[number] = self._name("diagonal", number)
                entries = f"tl.where(o_t[:, None] == o_t[None, :], {self.a[number]}, 0.0)"
                lines.append(f"{diagonal[number]} = tl.sum({entries}, 1)")
        for axis, (names, others) in enumerate(((dx, self.y), (dy, self.x))):
            for at, name in names.items():
                terms = [
                    f"{diagonal[number]}[:, None] * {others[pair[1 - axis]]}"
                    for number, pair in enumerate(self.pairs)
                    if pair[axis] == at and number in diagonal
                ]
                if at + axis * len(self.x) in self.wanted:
                    self.out.picks[self.n, at + axis * len(self.x)] = name
                    lines.append(
                        f"{name} = {' + '.join(terms) or f'tl.zeros((C, {self.block}), dtype=tl.float32)'}"
                    )
        if gate:
            self.out.picks[self.n, len(self.x) + len(self.y)] = dw
            lines.append(f"{dw} = tl.zeros((C, {self.block}), dtype=tl.float32)")
        body, factors, rows, cols = self._level()
        part = []
        for number in range(len(self.pairs)):
            part.append(self._name("part", number))
            body.append(f"{part[number]} = tl.where(m_meet, {self.a[number]}, 0.0).to(DOT)")
        moved: dict[bool, list[str]] = {kind: [] for kind in self.kinds}
        for i, name in dx.items():
            terms = [
                self._without_later(part[k], cols[j], back=False)
                for k, (row, j) in enumerate(self.pairs) if row == i
            ]  # fmt: skip
            step = self._name("step_x", i)
            factor = factors[self.exclusive[i]]
            body.append(f"{step} = tl.where(m_second, {factor} * ({' + '.join(terms)}), 0.0)")
            if i in self.wanted:
                body.append(f"{name} += {step}")
            moved[self.exclusive[i]].append(f"{self.x[i]} * {step}")
        for j, name in dy.items():
            terms = [
                self._without_later(part[k], rows[i], back=True)
                for k, (i, col) in enumerate(self.pairs) if col == j
            ]  # fmt: skip
            step = self._name("step_y", j)
            factor = factors[self.of_cols]
            body.append(f"{step} = tl.where(m_second, 0.0, {factor} * ({' + '.join(terms)}))")
            if len(self.x) + j in self.wanted:
                body.append(f"{name} += {step}")
            moved[self.of_cols].append(f"{self.y[j]} * {step}")
        for kind, terms in moved.items() if gate else ():
            back = f"tl.trans(m_{_STRICT[kind]})"
            body.append(f"{dw} += tl.dot({back}, {' + '.join(terms)}, input_precision=SUMS)")
        return [*lines, "for level in range(LEVELS):", *(f"    {line}" for line in body)]

    def _without_later(self, part: str, factor: str, *, back: bool) -> str:
        """A product with the pairs that meet: the others are zero, and leave no trace, not of NaN either."""
        product = f"tl.dot({f'tl.trans({part})' if back else part}, {factor}, input_precision=PRECISION)"
        if not self.out.nan_exact:
            return product
        self.out.library.add("without_later")
        flags = f"TURNED=False, BACK={back}, STRICT=True, PRECISION=PRECISION"
        return f"without_later({product}, {part}, {factor}, C, {flags})"

    def _moves(self, result: int) -> bool:
        """Whether the derivative of a row or column is wanted, or is part of the gate's."""
        return result in self.wanted or len(self.x) + len(self.y) in self.wanted

    # -- shared ---------------------------------------------------------------------------------------
    def _level(self) -> tuple[list[str], dict[bool, str], list[str], list[str]]:
        """Statements of one level: masks, factors by kind of row, scaled rows and columns."""
        self.out.library |= {"anchored_intervals", "meeting_blocks"}
        body = ["m_meet = meeting_blocks(level, C)", "m_second = ((o_t >> level) & 1)[:, None] == 1"]
        factors = {}
        for kind in self.kinds:
            sums = f"m_{_STRICT[kind]}"
            factors[kind] = self._name(f"factor_{_STRICT[kind]}")
            body += [
                f"{sums} = anchored_intervals(level, C, EXCLUSIVE={kind})",
                f"{factors[kind]} = tl.exp(tl.dot({sums}, {self.gate}, input_precision=SUMS))",
            ]
        rows, cols = [], []
        for i, x in enumerate(self.x):
            rows.append(self._name("rows", i))
            body.append(f"{rows[i]} = tl.where(m_second, {x} * {factors[self.exclusive[i]]}, 0.0).to(DOT)")
        for j, y in enumerate(self.y):
            cols.append(self._name("cols", j))
            body.append(f"{cols[j]} = tl.where(m_second, 0.0, {y} * {factors[self.of_cols]}).to(DOT)")
        return body, factors, rows, cols

    def _name(self, what: str, *numbers: int) -> str:
        tail = "".join(str(n + 1) for n in numbers)
        return self.out.names.unique(f"b_{what}{f'_{tail}' if tail else ''}")
