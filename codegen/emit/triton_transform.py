"""The transform of many erases as one tile: T = (I - G Sigma)^-1 with rows and columns block after block.

Row i C + t stands for erase i of token t. The blocks of G come from memory, where another kernel left them;
products of r C rows keep the tensor cores busy, where r x r products of C rows would not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from linalg_dsl.codegen.emit.triton_statements import Statements
from linalg_dsl.codegen.schedule.kernel_plan import Kernel


@dataclass(frozen=True, slots=True)
class TransformText:
    """The body of a prep with nothing but such a transform and its coefficients.

    ``step`` is how many tokens a chunk has, ``pointer`` gives the kernel's name of the tensor of a node,
    ``load`` emits the load of a node.
    """

    out: Statements
    kernel: Kernel
    step: str
    pointer: Callable[[int], str]
    load: Callable[[int], None]

    def lines(self) -> list[str]:
        """Statements; ``o_t`` and ``m_t`` then are of the rows, each token once for every erase."""
        out, nodes = self.out, self.out.nodes
        (n,) = [i for i in self.kernel.body if nodes[i].op == "ut_transform"]
        m, r = (int(str(nodes[n].attr(name))) for name in ("m", "r"))
        scores, sigma = nodes[n].args[: m * r], nodes[n].args[m * r :]
        rows = f"{whole_blocks(r)} * C"
        out.lines = [
            f"o_r = tl.arange(0, {rows})",
            "o_t = o_r % C",
            f"m_t = (o_t < length - (i_first - start)) & (o_t < {self.step})",
        ]
        taken = set(scores)
        for i in self.kernel.body:
            if i != n and nodes[i].op != "pick":
                for a in nodes[i].args:
                    self._load(a, taken)
                out.compute(i)
        out.lines += [
            "i_pairs = (i_ch * H + i_h) * (C * C)",
            "o_pairs = o_t[:, None] * C + o_t[None, :]",
            f"b_system = tl.zeros(({rows}, {rows}), dtype=tl.float32)",
        ]
        for i, j, k in product(range(r), range(m), range(r)):
            score, entry = scores[i * m + j], sigma[j * r + k]
            if not self._zero(score) and not self._zero(entry):
                self._load(entry, taken)
                where = f"(o_r // C == {i})[:, None] & (o_r // C == {k})[None, :]"
                block = f"tl.load({self.pointer(score)} + i_pairs + o_pairs, mask={where}, other=0.0)"
                value = f"{out.value(entry)}[None, :]" if nodes[entry].axes else out.value(entry)
                out.lines.append(f"b_system += {value} * {block}")
        out.library |= {"meeting_tokens", "bad_columns", "finite_entries", "spoilt_by"}
        out.lines += [
            "b_bad = bad_columns(b_system, o_t)",
            "b_system = finite_entries(b_system)",
            "b_transform = tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0)",
            "for level in range(LEVELS):",
            "    b_meeting = tl.where(meeting_tokens(level, o_t), b_system, 0.0)",
            "    b_half_step = tl.dot(b_meeting, b_transform, input_precision=SOLVE)",
            "    b_transform += tl.dot(b_transform, b_half_step, input_precision=SOLVE)",
            "b_transform = spoilt_by(b_transform, b_bad, o_t)",
        ]
        for pick in self.kernel.stores:
            i, k = divmod(int(str(nodes[pick].attr("index"))), r)
            where = f"(o_r // C == {i})[:, None] & (o_r // C == {k})[None, :]"
            pointer = self.pointer(pick)
            value = f"b_transform.to({pointer}.dtype.element_ty)"
            out.lines.append(f"tl.store({pointer} + i_pairs + o_pairs, {value}, mask={where})")
        return out.lines

    def _load(self, n: int, taken: set[int]) -> None:
        if n in self.kernel.loads and n not in taken:
            taken.add(n)
            self.load(n)

    def _zero(self, n: int) -> bool:
        node = self.out.nodes[n]
        return node.op == "number" and node.attr("value") == 0


def whole_blocks(count: int) -> int:
    """The power of two that holds so many blocks."""
    return 1 << (count - 1).bit_length()
