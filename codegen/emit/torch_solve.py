"""The unit-triangular solve as PyTorch statements: substitution, or T where each column has its own decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.torch_text import ATOM, ZERO, Text, matmul, mul, total, transposed
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import Axes
from linalg_dsl.planner.plan import Node

PAIRS: Axes = ("t", "s")
_ROW_LIMIT = 44
"""A matrix of blocks that is longer is written row by row."""


class Statements(Protocol):
    """Where statements go; ``let`` gives a value a name, ``helper`` calls a function of the module."""

    names: Names
    lines: list[str]
    used: set[str]

    def let(self, wanted: str, text: Text) -> Text: ...

    def helper(self, name: str, *args: Text | str, axes: Axes) -> Text: ...


Blocks = Sequence[Sequence[Text]]
Systems = Mapping[tuple[str, ...], Text]
"""G Sigma by the texts of G and Sigma."""


class SolvePrinter:
    """What a solve and its adjoint share is written once: the system G Sigma, its inverse."""

    def __init__(self, out: Statements) -> None:
        self.out = out
        self.systems: dict[tuple[str, ...], Text] = {}
        self._inverses: dict[tuple[str, ...], list[list[Text]]] = {}

    def run(self, node: Node, args: Sequence[Text], labels: Mapping[int, str]) -> list[Text]:
        """Z_1..Z_m, U_1..U_r of a solve, Y and X of a reversed one; ``labels`` are those of its picks."""
        m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
        reverse = node.op == "solve_t"
        w = args[-1] if dict(node.attrs).get("decayed") else None
        G = [args[i * m : (i + 1) * m] for i in range(r)]
        S = [args[m * r + j * r : m * r + (j + 1) * r] for j in range(m)]
        rows = args[2 * m * r :]
        first, second = rows[:m], rows[m : m + r]

        def applied(scores: Text, rows: Text) -> Text:
            return self._applied(scores, rows, w, "decayed", reverse)

        if reverse:
            right = [total([second[i], *(mul(S[j][i], first[j]) for j in range(m))]) for i in range(r)]
        else:
            right = [total([second[i], *(applied(G[i][j], first[j]) for j in range(m))]) for i in range(r)]
        names = [labels.get(m + k) or f"{'x' if reverse else 'u'}_{k + 1}" for k in range(r)]
        inner = self._solved(G, S, right, names, reverse, w, node.axes)
        if reverse:
            outer = [total([first[j], *(applied(G[i][j], inner[i]) for i in range(r))]) for j in range(m)]
        else:
            outer = [total([first[j], *(mul(S[j][i], inner[i]) for i in range(r))]) for j in range(m)]
        picks = [self.out.let(labels.get(k) or "z", x) if k in labels else x for k, x in enumerate(outer)]
        found = [*picks, *inner]
        if any(x.axes != node.axes and not x.scalar for x in found):
            raise InternalError(f"a row of a solve without axes {', '.join(node.axes)}")
        return found

    def _applied(self, scores: Text, rows: Text, w: Text | None, read: str, turned: bool) -> Text:
        """Scores, or their transpose, times rows; with a log decay of the columns of rows."""
        if scores.number == 0 or rows.number == 0:
            return ZERO
        if w is not None:
            name = "decay_apply_t" if turned else "decay_apply"
            return self.out.helper(name, scores, rows, w, f'"{read}"', axes=rows.axes)
        return matmul(transposed(scores) if turned and not scores.scalar else scores, rows, rows.axes)

    def _solved(
        self,
        G: Blocks,
        S: Blocks,
        right: list[Text],
        names: list[str],
        reverse: bool,
        w: Text | None,
        axes: Axes,
    ) -> list[Text]:
        out = self.out
        if w is not None:
            return self._by_inverse(self._inverse(G, S), right, names, reverse, w)
        system = self._system(G, S)
        if system.number == 0:
            return [out.let(n, x) for n, x in zip(names, right, strict=True)]
        function = "substitute_reversed" if reverse else "substitute"
        if len(right) == 1:
            return [out.let(names[0], out.helper(function, system, right[0], axes=axes))]
        out.used |= {function, "by_token"}
        while sum(len(x.code) for x in right) > _ROW_LIMIT:
            longest = max(range(len(right)), key=lambda i: len(right[i].code))
            if right[longest].code.isidentifier():
                break
            right[longest] = out.let("right", right[longest])
        made = [out.names.unique(n) for n in names]
        rows = ", ".join(x.code for x in right)
        out.lines.append(f"{', '.join(made)} = by_token({function}, {system.code}, [{rows}])")
        return [Text(n, ATOM, axes) for n in made]

    def _by_inverse(
        self, inverse: Blocks, right: list[Text], names: list[str], reverse: bool, w: Text
    ) -> list[Text]:
        """T is made once, and applied to each column with its decay."""
        r = range(len(right))
        right = [self.out.let("right", x) for x in right]
        found = []
        for i in r:
            blocks = [inverse[k][i] if reverse else inverse[i][k] for k in r]
            terms = [self._applied(b, right[k], w, "inclusive", reverse) for k, b in enumerate(blocks)]
            found.append(self.out.let(names[i], total(terms)))
        return found

    def _inverse(self, G: Blocks, S: Blocks) -> list[list[Text]]:
        """The r x r blocks of T = (I - G Sigma)^-1."""
        key = _key(G, S)
        if key not in self._inverses:
            out, system, r = self.out, self._system(G, S), range(len(G))
            if len(r) == 1:
                one = out.let("ut", out.helper("inverse", system, axes=PAIRS))
                self._inverses[key] = [[one]]
            else:
                out.used |= {"inverse", "blocks"}
                made = [[out.names.unique(f"ut_{i + 1}{k + 1}") for k in r] for i in r]
                names = ", ".join(f"({', '.join(row)})" for row in made)
                out.lines.append(f"{names} = blocks(inverse({system.code}), {len(r)})")
                self._inverses[key] = [[Text(n, ATOM, PAIRS) for n in row] for row in made]
        return self._inverses[key]

    def _system(self, G: Blocks, S: Blocks) -> Text:
        """G Sigma: one matrix [C r, C r] in the order of tokens."""
        key = _key(G, S)
        if key not in self.systems:
            if len(G) == 1:
                found = total(mul(g, _of_columns(row[0])) for g, row in zip(G[0], S, strict=True))
                self.systems[key] = self.out.let("system", found)
            else:
                self.systems[key] = self._interleaved(G, S)
        return self.systems[key]

    def _interleaved(self, G: Blocks, S: Blocks) -> Text:
        some = next((g.code for row in G for g in row if not g.scalar), None)
        if some is None:
            return ZERO
        scores = [[f"torch.zeros_like({some})" if g.scalar else g.code for g in row] for row in G]
        sigma = [[x.fit(("t",)) for x in row] for row in S]
        blocks = (self._matrix("scores", scores), self._matrix("sigma", sigma))
        return self.out.let("system", self.out.helper("interleave", *blocks, axes=PAIRS))

    def _matrix(self, name: str, blocks: Sequence[Sequence[str]]) -> str:
        rows = [f"[{', '.join(row)}]" for row in blocks]
        if sum(map(len, rows)) > _ROW_LIMIT:
            rows = [self.out.let(f"{name}_of_row", Text(row, axes=PAIRS)).code for row in rows]
            return self.out.let(name, Text(f"[{', '.join(rows)}]", axes=PAIRS)).code
        return f"[{', '.join(rows)}]"


def _key(G: Blocks, S: Blocks) -> tuple[str, ...]:
    return tuple(x.code for blocks in (G, S) for row in blocks for x in row)


def _of_columns(coefficient: Text) -> Text:
    """A coefficient of token s, beside scores [t,s]."""
    if coefficient.axes == ("t",):
        return Text(f"{coefficient.at(ATOM)}[..., None, :]", ATOM, PAIRS)
    return coefficient
