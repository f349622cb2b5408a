"""The boundary term of a gate gradient in the two walks that form it (see ``Boundary``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linalg_dsl.codegen.emit.triton_statements import NAN, Statements
from linalg_dsl.codegen.schedule.kernel_plan import SEGMENT, Boundary, BoundaryProducts, Direction, KernelPlan


class BoundaryText:
    """The lines of one walk around those of its body.

    ``pointer`` gives the kernel's name of one of the launcher's tensors, ``before`` collects lines that stand
    before the loop, ``state`` is the name of the state before the chunk, ``result`` the tensor of the term.
    """

    def __init__(
        self,
        boundary: Boundary,
        direction: Direction,
        out: Statements,
        pointer: Callable[[str], str],
        before: list[str],
        state: str,
        result: str,
        suffix: str,
    ) -> None:
        self.boundary, self.direction, self.out = boundary, direction, out
        self.pointer, self.before, self.result, self.suffix = pointer, before, result, suffix
        self.state = self.taken = state
        self.keeps = direction == boundary.keeper
        self.later = False
        """Whether what is multiplied is known only after the body: signs or other decays of the chunk."""
        axis = boundary.axis
        self.over = out.tile(("K", "V")).index("V" if axis == "K" else "K")
        self.tokens = out.tile(("t", axis)).index("t")
        self.mask = f"m_{axis.lower()}"
        self.place = f" + (i_ch * H + i_h) * {axis} + o_{axis.lower()}"

    def around(self, lines: list[str]) -> list[str]:
        """The body with what comes before and after it."""
        boundary = self.boundary
        if self.direction == "reverse":
            self.taken = self.out.value(boundary.cotangent)
        self.later = self.taken != self.state or (not self.keeps and bool(boundary.others))
        first, last = (self._keep, self._record) if self.keeps else (self._take_up, self._form)
        before = first()
        after = last()
        return [*lines, *before, *after] if self.later else [*before, *lines, *after]

    def behind(self) -> list[str]:
        """After the step: the earlier walk keeps its state at every 8th boundary and where it ends."""
        if not self.keeps:
            return []
        self.before.append(f"first_mark = first_chunk // {SEGMENT} + i_n")
        condition = f"i_c % {SEGMENT} == 0"
        if self.direction == "forward":
            condition = f"(i_c + 1 == chunks) | ((i_c + 1) % {SEGMENT} == 0)"
        return [
            "if not EXACT:",
            f"    if {condition}:",
            f"        {self._kept(self._mark(), self.state)}",
        ]

    # -- the earlier walk -------------------------------------------------------------------------------
    def _keep(self) -> list[str]:
        """The state before the chunk, or its norms."""
        return [
            "if EXACT:",
            f"    {self._kept(self._every(), self.taken)}",
            "else:",
            f"    tl.store({self._norms()}, tl.sqrt({self._square(self.taken)}), mask={self.mask})",
        ]

    def _record(self) -> list[str]:
        sums = self._sums()
        return [
            "if not EXACT:",
            f"    tl.store({self._moved()}, tl.sum({sums}, {self.tokens}), mask={self.mask})",
        ]

    # -- the later walk ---------------------------------------------------------------------------------
    def _take_up(self) -> list[str]:
        self.before += [
            "b_h = tl.zeros((BLOCK,), dtype=tl.float32)",
            f"first_mark = first_chunk // {SEGMENT} + i_n",
        ]
        decayed, lines = self.taken, []
        if self.boundary.others:
            factors = " * ".join(self.out.value(n, ("K", "V")) for n in self.boundary.others)
            decayed = "b_decayed_state"
            lines = [f"{decayed} = {self.taken} * {factors}"]
        begins = f"(i_step == 0) | ((i_c + 1) % {SEGMENT} == 0)"
        if self.direction == "forward":
            begins = f"i_c % {SEGMENT} == 0"
        return [
            *lines,
            "if EXACT:",
            f"    b_h = tl.sum({_taken_up(self._every())} * {decayed}, {self.over})",
            "else:",
            f"    if {begins}:",
            f"        b_h = tl.sum({_taken_up(self._mark())} * {self.state}, {self.over})",
            f"    b_limit = tl.load({self._norms()}, mask={self.mask}, other=0.0) * "
            f"tl.sqrt({self._square(decayed)})",
        ]

    def _form(self) -> list[str]:
        sums, moved = self._sums(), self._moved()
        total = self.out.value(self.boundary.total)
        result = f"{self.pointer(self.result)}{self.place}"
        return [
            "if EXACT:",
            f"    tl.store({result}, {total} * b_h, mask={self.mask})",
            "else:",
            f"    b_limit = tl.where({total} <= 0, 0.0, b_limit * {total})",
            "    # Cauchy-Schwarz: without this bound no digit is right under strong gates",
            f"    b_bound = tl.maximum(b_h - tl.sum({sums}, {self.tokens}), -b_limit, {NAN})",
            f"    b_bound = tl.minimum(b_bound, b_limit, {NAN})",
            f"    tl.store({result}, b_bound, mask={self.mask})",
            f"    b_h = b_bound + tl.load({moved}, mask={self.mask}, other=0.0)",
        ]

    # -- memory -----------------------------------------------------------------------------------------
    def _every(self) -> str:
        place = f" + (i_ch * H + i_h) * K * V + {self.out.state_offset()}"
        return f"{self.pointer(f'marks{self.suffix}')}{place}"

    def _mark(self) -> str:
        place = f"((first_mark + i_c // {SEGMENT}) * H + i_h) * K * V"
        return f"{self.pointer(f'marks{self.suffix}')} + {place} + {self.out.state_offset()}"

    def _kept(self, place: str, state: str) -> str:
        """Kept as operands of products are: the term is a product of two states, one of them rounded."""
        return _keep(self.pointer(f"marks{self.suffix}"), place, state)

    def _norms(self) -> str:
        return f"{self.pointer(f'norms{self.suffix}')}{self.place}"

    def _moved(self) -> str:
        """What the step of the earlier walk adds to h."""
        return f"{self.pointer(f'{moved_name(self.boundary)}{self.suffix}')}{self.place}"

    # -- values -----------------------------------------------------------------------------------------
    def _square(self, state: str) -> str:
        return f"tl.sum({state} * {state}, {self.over})"

    def _sums(self) -> str:
        value, pairs = self.out.value, self.boundary.pairs(self.direction)
        return " + ".join(f"{value(x)} * {value(dx)}" for x, dx in pairs)


class ProductsText:
    """The boundary terms of coupled states in one of their two walks; ``results``: their tensors."""

    def __init__(
        self,
        boundary: BoundaryProducts,
        direction: Direction,
        out: Statements,
        pointer: Callable[[str], str],
        results: Sequence[str],
    ) -> None:
        self.boundary, self.direction, self.out = boundary, direction, out
        self.pointer, self.results = pointer, results
        axis = boundary.axis
        self.over = out.tile(("K", "V")).index("V" if axis == "K" else "K")
        self.mask = f"m_{axis.lower()}"
        self.place = f" + (i_ch * H + i_h) * {axis} + o_{axis.lower()}"

    def around(self, lines: list[str]) -> list[str]:
        """The body, and behind it, before the states are handed on, what is kept or multiplied."""
        kept = self.boundary.kept
        if self.direction == self.boundary.keeper:
            return [*lines, *(self._kept(n) for n in kept)]
        names = {n: f"b_mark_{i}" for i, n in enumerate(kept, 1)}
        loads = [f"{name} = {_taken_up(self._mark(n))}" for n, name in names.items()]
        products = []
        for (_, forward, reverse), result in zip(self.boundary.terms, self.results, strict=True):
            theirs, mine = (forward, reverse) if self.boundary.keeper == "forward" else (reverse, forward)
            value = f"tl.sum({names[theirs]} * {self.out.value(mine)}, {self.over})"
            products.append(f"tl.store({self.pointer(result)}{self.place}, {value}, mask={self.mask})")
        return [*lines, *loads, *products]

    def behind(self) -> list[str]:
        return []

    def _mark(self, n: int) -> str:
        name = mark_names(self.boundary)[n]
        return f"{self.pointer(name)} + (i_ch * H + i_h) * K * V + {self.out.state_offset()}"

    def _kept(self, n: int) -> str:
        return _keep(self.pointer(mark_names(self.boundary)[n]), self._mark(n), self.out.value(n))


def _keep(pointer: str, place: str, state: str) -> str:
    """A state in the dtype of the operands of products, as which the other walk takes it up."""
    return f"tl.store({place}, {state}.to({pointer}.dtype.element_ty), mask=m_s)"


def _taken_up(place: str) -> str:
    return f"tl.load({place}, mask=m_s, other=0.0).to(tl.float32)"


def mark_names(boundary: BoundaryProducts) -> dict[int, str]:
    """The tensors in which one walk keeps its states for the other."""
    return {n: f"marks_{boundary.axis.lower()}_{i}" for i, n in enumerate(boundary.kept, 1)}


def moved_name(boundary: Boundary) -> str:
    return "starts" if boundary.keeper == "forward" else "ends"


def boundary_suffix(plan: KernelPlan, boundary: Boundary) -> str:
    """What tells the tensors of one boundary term from those of another."""
    terms = {k.boundary for k in plan.backward if k.boundary}
    return f"_{boundary.axis.lower()}" if len(terms) > 1 else ""


def boundary_tensors(plan: KernelPlan) -> dict[str, str]:
    """How the launcher allocates what the walks of the boundary terms hand over."""
    out: dict[str, str] = {}
    for boundary in dict.fromkeys(k.boundary for k in plan.backward if k.boundary):
        if isinstance(boundary, BoundaryProducts):
            out |= dict.fromkeys(mark_names(boundary).values(), "call.marks()")
            continue
        suffix = boundary_suffix(plan, boundary)
        out[f"marks{suffix}"] = "call.marks()"
        for name in ("norms", moved_name(boundary)):
            out[f"{name}{suffix}"] = f'call.buffer("{boundary.axis}", False)'
    return out
