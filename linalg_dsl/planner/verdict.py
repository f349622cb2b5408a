"""What became of a line: class, rewrites, canonical form, chunk equations, costs, stability."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linalg_dsl.language.latex import to_latex
from linalg_dsl.language.printer import show_expr
from linalg_dsl.planner.canonical import classify
from linalg_dsl.planner.cost import decode_flops, flops, state_bytes, traffic
from linalg_dsl.planner.equations import Equation, equation_data, equations, legend
from linalg_dsl.planner.form import CanonicalRecurrence, Recurrence
from linalg_dsl.planner.graph import dependence, serial_depth
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.precision import precision
from linalg_dsl.planner.prove import prove
from linalg_dsl.planner.stability import decay_is_at_most_one, log_decay_bound, solve_is_bounded
from linalg_dsl.planner.verdict_form import form_equations, form_line, missed, size_line, takes_size

WIDTH = 100
_FIXED_SPACE = "\N{NO-BREAK SPACE}"
DEFAULT_SIZE = 128
DEFAULT_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one call; None where they are not given."""

    B: int | None = None
    T: int | None = None
    H: int | None = None
    K: int | None = None
    V: int | None = None
    chunk: int = DEFAULT_CHUNK


@dataclass(frozen=True)
class Explanation:
    """Prints itself; ``to_latex`` gives the mathematics as a LaTeX fragment (needs amsmath)."""

    canonical: CanonicalRecurrence
    forward: ChunkPlan
    backward: ChunkPlan
    shape: Shape
    schedule: tuple[str, ...] = ()
    with_proof: bool = True

    @property
    def recurrence(self) -> Recurrence:
        return self.canonical.recurrences[0]

    @property
    def verdict(self) -> str:
        """The class and what it compiles to, in one line."""
        rec = self.recurrence
        how = "chunk kernels"
        if any(d.kind == "channel" for d in rec.decays):
            how += ", anchored blocks"
        if rec.r:
            how += ", unit-triangular solve (UT transform)"
        return f"{self.canonical.spec.name}: {classify(rec)} → {how}"

    @property
    def line(self) -> tuple[str, ...]:
        """The equations as the user wrote them."""
        spec = self.canonical.spec
        written = spec.written or (*spec.updates, *spec.outputs)
        return tuple(f"{e.target}_t = {show_expr(e.value)}" for e in written)

    @property
    def form(self) -> tuple[Equation, ...]:
        """The slots of form (1)."""
        return form_equations(self.canonical)

    @property
    def missed(self) -> tuple[str, ...]:
        """Why no faster class is taken."""
        return missed(self.canonical)

    @property
    def forward_equations(self) -> tuple[Equation, ...]:
        return equations(self.forward)

    @property
    def backward_equations(self) -> tuple[Equation, ...]:
        return equations(self.backward, self.forward)

    @property
    def order(self) -> tuple[str, ...]:
        """Which values wait for which walk over the chunks."""
        depth = serial_depth(self.forward)
        walk = f", {depth} products one behind the other" if depth else ""
        waits = {
            (): "for all chunks at once",
            ("forward",): f"chunk after chunk{walk}",
            ("reverse",): "from the last chunk to the first",
            ("forward", "reverse"): "where both states, or values that waited for either, are at hand",
        }
        found: dict[tuple[str, ...], list[str]] = {key: [] for key in waits}
        for plan, lines in ((self.forward, self.forward_equations), (self.backward, self.backward_equations)):
            directions = dependence(plan)
            for e in lines:
                if e.node is not None:
                    found[tuple(sorted(directions[e.node]))].append(e.left)
        return tuple(f"{waits[key]}: {', '.join(names)}" for key, names in found.items() if names)

    @property
    def costs(self) -> tuple[str, ...]:
        return _costs(self)

    @property
    def stability(self) -> tuple[str, ...]:
        return _stability(self.canonical)

    @property
    def precision(self) -> tuple[str, ...]:
        """How the plan is carried out so that its digits last, and why (``planner.precision``)."""
        return precision(self.canonical).reasons

    @property
    def proof(self) -> tuple[str, ...]:
        """Exact proofs at small sizes; empty where they are not asked for."""
        if not self.with_proof or not self.canonical.spec.updates:
            return ()
        rec = self.recurrence
        # the number of monomials grows fast with the erases, and with further gates beside them
        further = bool(rec.decay.signed) + len(rec.states) - 1
        rank = (rec.r or len(rec.states) > 2) and rec.r + (rec.value_decay.kind != "none") + further
        with_gradients = prove(self.canonical, 3 if rank <= 2 else 2, 1, 1, self.forward, self.backward)
        wider = prove(self.canonical, 2 if rank <= 3 else 1, 2, 2 if rank <= 2 else 1, self.forward)
        return (str(with_gradients), str(wider))

    def __str__(self) -> str:
        made = [*self.forward_equations, *self.backward_equations]
        rewrites = [
            line
            for i, r in enumerate(self.canonical.rewrites, 1)
            for line in (
                f"{i}. {r.rule}" + (f": {r.reason}" if r.reason else ""),
                f"   {r.before}",
                f"   → {r.after}",
            )
        ]
        sections = [
            ("the line", self.line),
            ("rewrites", rewrites or ["none needed: the line is in form (1) as it stands"]),
            (f"form (1): {',  '.join(form_line(self.canonical))}", [equation_text(e) for e in self.form]),
            ("one chunk, rows are tokens", [equation_text(e) for e in self.forward_equations]),
            ("its gradients", [equation_text(e) for e in self.backward_equations]),
            ("in this order", self.order),
            ("where", legend(made, self.forward)),
            ("why no faster class", self.missed),
            ("proof", self.proof),
            ("costs", self.costs),
            ("stability", self.stability),
            ("precision", self.precision),
            ("schedule", self.schedule),
        ]
        parts = [self.verdict]
        for title, lines in sections:
            if lines:
                parts.append("\n".join([title, *(wrapped(line) for line in lines)]))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """What is printed, as plain data: the keys are the same for every recurrence and every version."""
        return {
            "name": self.canonical.spec.name,
            "class": classify(self.recurrence),
            "verdict": self.verdict,
            "line": list(self.line),
            "rewrites": [
                {"rule": r.rule, "before": r.before, "after": r.after, "reason": r.reason}
                for r in self.canonical.rewrites
            ],
            "form": equation_data(self.form),
            "forward": equation_data(self.forward_equations),
            "backward": equation_data(self.backward_equations),
            "order": list(self.order),
            "missed": list(self.missed),
            "proof": list(self.proof),
            "costs": list(self.costs),
            "stability": list(self.stability),
            "precision": list(self.precision),
            "schedule": list(self.schedule),
        }

    def to_latex(self) -> str:
        """The line, form (1) and the chunk equations, one ``align*`` each."""
        groups = [
            ("The line", [_as_equation(line) for line in self.line]),
            ("Form (1)", [_as_equation(form_line(self.canonical)[0]), *self.form]),
            ("One chunk", self.forward_equations),
            ("Its gradients", self.backward_equations),
        ]
        parts = []
        for title, lines in groups:
            rows = " \\\\\n".join(f"  {to_latex(e.left)} &= {to_latex(e.right)}" for e in lines)
            parts.append(f"\\paragraph{{{title}.}}\n\\begin{{align*}}\n{rows}\n\\end{{align*}}")
        return "\n".join(parts) + "\n"


def explain(
    canonical: CanonicalRecurrence,
    forward: ChunkPlan,
    backward: ChunkPlan,
    B: int | None = None,
    T: int | None = None,
    H: int | None = None,
    K: int | None = None,
    V: int | None = None,
    *,
    chunk_size: int | None = None,
    schedule: Sequence[str] = (),
    proof: bool = True,
) -> Explanation:
    """The explanation of a recurrence; sizes turn its costs into totals, ``schedule`` is quoted.

    ``proof``: prove the chunk form and its gradients at two small sizes when it is printed (a tenth of a
    second for most recurrences, some seconds for several erases or nonlinear preludes).
    """
    shape = Shape(B, T, H, K, V, chunk_size or DEFAULT_CHUNK)
    return Explanation(canonical, forward, backward, shape, tuple(schedule), proof)


def _as_equation(line: str) -> Equation:
    left, _, right = line.partition(" = ")
    return Equation(left, right)


def _costs(found: Explanation) -> tuple[str, ...]:
    shape, spec = found.shape, found.canonical.spec
    key, value, chunk = shape.K or DEFAULT_SIZE, shape.V or DEFAULT_SIZE, shape.chunk
    gates = frozenset(i.name for i in spec.inputs if i.kind != "plain")
    ahead = flops(found.forward, chunk, key, value)
    whole = flops(found.backward, chunk, key, value)
    saved = flops(found.backward, chunk, key, value, at_hand=found.forward)
    moved = traffic(found.forward, chunk, key, value, gates=gates)
    back = traffic(found.backward, chunk, key, value, gates=gates, saves_states=True)
    state = state_bytes(found.forward, key, value)
    lines = [
        f"per token and head, K = {key}, V = {value}, chunks of {chunk}; operands bf16, gates, states fp32",
        f"forward: {ahead}; {moved.total:,.0f} bytes; {ahead.total / moved.total:,.0f} FLOP per byte",
        f"backward: {saved}, with the forward's values at hand; {whole}, without; {back.total:,.0f} bytes",
        f"decode, one token: {decode_flops(found.forward, key, value) / 1000:,.3g}k FLOP; "
        f"{2 * state:,} bytes of state read and written",
        f"on chip: state {state / 1024:,.1f} KiB per head in fp32",
    ]
    if shape.B is not None and shape.T is not None and shape.H is not None:
        tokens = shape.B * shape.T * shape.H
        work = [_large(x.total * tokens / 1e9) for x in (ahead, whole)]
        bytes_ = [_large(x.total * tokens / 1e6) for x in (moved, back)]
        lines.append(
            f"for B = {shape.B}, T = {shape.T}, H = {shape.H}: {-(-shape.T // chunk)} chunks per sequence, "
            f"{shape.B * shape.H} sequences of one head; forward {work[0]} GFLOP and {bytes_[0]} MB, "
            f"backward {work[1]} GFLOP and {bytes_[1]} MB"
        )
    return tuple(lines)


def _stability(canonical: CanonicalRecurrence) -> tuple[str, ...]:
    rec, spec = canonical.recurrences[0], canonical.spec
    decays = [d for d in rec.decays if d.kind != "none"]
    lines = []
    if rec.keeps_nothing:
        lines.append("the decay is 0: a token reads what the one before it has written, and nothing older")
    elif not decays:
        lines.append("no decay: no exponential is formed")
    elif decay_is_at_most_one(rec, spec):
        bound = log_decay_bound(rec, spec)
        least = f", and at least {-bound:g} per token" if bound is not None else "; −∞ is a reset"
        lines.append(
            "every exponent is a sum of log decays over an interval inside the chunk, formed by adding: "
            f"never positive, since log |D| ≤ 0 follows from the declaration{least}"
        )
    else:
        lines.append(
            "log |D| may be positive: exponents are sums over intervals inside the chunk, and grow as the "
            "recurrence does"
        )
    if any(takes_size(d) for d in decays):
        lines.append(size_line(decays))
    if rec.r and solve_is_bounded(rec, spec):
        lines.append(
            "every transition is a contraction: T = (I − Σ G^B)⁻¹ has |T[t,s]| ≤ |Σ_t| for s < t, whatever "
            f"the {'keys' if rec.axis == 'K' else 'values'}"
        )
    elif rec.r:
        lines.append(
            "no bound of T = (I − Σ G^B)⁻¹ follows from the declaration: it is as large as the recurrence"
        )
    if decays and not rec.keeps_nothing:
        lines.append(
            "inside a chunk gate gradients are one-sided sums: no cumulative sum is subtracted from another"
        )
    return tuple(lines)


def _large(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def equation_text(found: Equation) -> str:
    """Its text, which may be broken at the terms of its sum only."""
    depth, text = 0, ""
    whole = str(found)
    for i, char in enumerate(whole):
        depth += (char in "([⟨{") - (char in ")]⟩}")
        breaks = depth == 0 and whole[i + 1 : i + 3] in ("+ ", "− ")
        text += char if char != " " or breaks else _FIXED_SPACE
    return text


def wrapped(line: str) -> str:
    return textwrap.fill(
        line, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
    ).replace(_FIXED_SPACE, " ")  # fmt: skip
