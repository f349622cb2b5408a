"""A chunk plan as mathematics: one equation per named value, in the order of computation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from linalg_dsl.algebra.expr import RESET
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.cost import shared_nodes
from linalg_dsl.planner.ops import OPS, OTHER
from linalg_dsl.planner.plan import ChunkPlan, Node

_SUM, _PRODUCT, _ATOM = range(3)
"""How tightly a text binds: sums and negatives, products of either kind, everything else."""
_PAIRS = {"inclusive": "t←s | s≤t", "exclusive": "t−1←s | s<t", "decayed": "t←s | s<t"}
_SPANS = {"inclusive": "Σ_{s<τ≤t}", "exclusive": "Σ_{s<τ<t}", "decayed": "Σ_{s<τ≤t}"}
_GATE_SUMS = {"from_start": "Σ_{t≥τ}", "from_start_exclusive": "Σ_{t>τ}", "to_end": "Σ_{s<τ}"}
_DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_CHEAP = ("from_start", "to_end", "pairs_decay", "scale_state", "pick")

LEGEND: tuple[tuple[str, str], ...] = (
    ("Λ[", "Λ[t←s] = exp({w}_{{s+1}} + … + {w}_t), the decay from s to t; C: the chunk's end, 0: its start"),
    ("∘", "∘ multiplies elementwise; a value without an axis is the same along it"),
    ("tril", "tril keeps s ≤ t, tril₋ keeps s < t"),
    ("⟩[", "⟨X, Y⟩[t←s] is the score Σ_i X[t,i] Y[s,i] Λ[t←s, i], 0 outside the pairs named"),
    ("R[", "R[t←s] = exp({rho}_{{s+1}} + … + {rho}_t), the decay along the other axis"),
    ("⟩ᴿ", "⟨…⟩ᴿ has R for Λ"),
    ("σ[", "σ[t←0](x) is the product of the signs of x_1 to x_t, 0 counting as +"),
    ("log_size", "log_size(x) = log(max(|x|, 1e-15))"),
    ("⟩_τ", "⟨A, X, Y⟩_τ[t←s] is the sum of A[t,s] X[t] Y[s] Λ[t←s] over the pairs whose interval holds τ"),
    ("Σ_{", "Σ_{{…}} at token τ: the sum over the tokens, or pairs of tokens, named"),
    ("Σ_K", "Σ_K, Σ_V, Σ_t sum over that axis"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Equation:
    """``left = right``; a note stands behind it. ``node``: the plan's node that it computes, if any."""

    left: str
    right: str
    note: str = ""
    node: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.left} = {self.right}" + (f"    ({self.note})" if self.note else "")


def equation_data(found: Sequence[Equation]) -> list[dict[str, str]]:
    """Equations as plain data."""
    return [{"left": e.left, "right": e.right, "note": e.note} for e in found]


def equations(plan: ChunkPlan, forward: ChunkPlan | None = None) -> tuple[Equation, ...]:
    """The equations of a plan. With ``forward``, what that plan computes is referred to by name only."""
    if forward is None:
        return Writer(plan, {}, {}).run()
    first = Writer(forward, {}, {})
    first.run()
    return Writer(plan, shared_nodes(plan, forward), first.names).run()


def legend(lines: Sequence[Equation], plan: ChunkPlan) -> tuple[str, ...]:
    """An explanation of each notation that the equations use."""
    text = "\n".join(map(str, lines))
    of_states = numbered_decays(plan)
    others = (w for w in log_decays(plan) if w not in of_states)
    first, second = (*(plan.nodes[w].label for w in others), "w", "w")[:2]
    own = [(sign, plan.nodes[w].label) for w, sign in of_states.items() if f"{sign}[" in text]
    return (
        *(
            f"{sign}[t←s] = exp({w}_{{s+1}} + … + {w}_t), the decay of one state from s to t"
            for sign, w in own
        ),
        *(meaning.format(w=first, rho=second) for sign, meaning in LEGEND if sign in text),
    )


def log_decays(plan: ChunkPlan) -> tuple[int, ...]:
    """The log decays of a plan, in the order of computation: the second acts on the other axis."""
    return tuple(sorted({n.args[-1] for n in plan.nodes if OPS[n.op].kind == "decay"}))


def numbered_decays(plan: ChunkPlan) -> dict[int, str]:
    """The decays per token of a plan of coupled states, Λ₁, Λ₂, …; none of one state."""
    if sum(direction == "forward" for _, direction, _, _ in plan.carries) < 2:
        return {}
    scalars = [w for w in log_decays(plan) if plan.nodes[w].axes == ("t",)]
    return {w: f"Λ{_subscript(i)}" for i, w in enumerate(scalars, 1)}


class Writer:
    """``known``: nodes of an earlier plan, by this plan's numbers; ``names``: their names there."""

    def __init__(self, plan: ChunkPlan, known: Mapping[int, int], names: Mapping[int, str]) -> None:
        self.plan = plan
        self.known = known
        self.taken = set(names.values())
        self.uses = [0] * len(plan.nodes)
        for node in plan.nodes:
            for a in node.args:
                self.uses[a] += 1
        self.names = {i: names[j] for i, j in known.items() if j in names}
        self.single = not any(
            re.fullmatch(r"[lbwzuq]_[2-9]|g_[bq](.[2-9]|[2-9].)", n.label) for n in plan.nodes
        )
        self.lines: list[Equation] = []
        self.numbered = numbered_decays(plan)
        self.second = [w for w in log_decays(plan) if w not in self.numbered][1:]

    def run(self) -> tuple[Equation, ...]:
        plan = self.plan
        outputs = {i: name for name, i in reversed(plan.outputs)}
        carried = {after: (name, direction) for name, direction, _, after in plan.carries}
        for i, node in enumerate(plan.nodes):
            name = self._name(i, node, outputs, carried)
            if name is None:
                continue
            if OPS[node.op].kind == "leaf":
                self.names[i] = name
            elif node.op == "pick":
                self.names.setdefault(i, name)
            else:
                if i not in self.known:
                    self.lines.append(Equation(name, self._text(i, _SUM), node=i))
                self.names[i] = name
        for name, i in plan.outputs:  # a value with several names, and leaves that are outputs
            shown = _pretty(name, self.single)
            if self.names.get(i) != shown and not any(e.left == shown for e in self.lines):
                self.lines.append(Equation(shown, self._text(i, _SUM), node=i))
        return tuple(self.lines)

    def _name(
        self, i: int, node: Node, outputs: dict[int, str], carried: dict[int, tuple[str, str]]
    ) -> str | None:
        """The name under which a value gets an equation of its own; None: it is written where it is used."""
        match node.op:
            case "carry":
                state = str(node.attr("name"))
                return f"{state}₀" if node.attr("direction") == "forward" else f"d{state}_C"
            case "number":
                return None
            case "input" | "param" | "const":
                row = dict(node.attrs).get("row")
                name = str(node.attr("name"))
                return name if row is None else f"{name}{_subscript(int(str(row)) + 1)}"
            case "cotangent":
                return _pretty(f"d_{node.attr('name')}", self.single)
            case "solve" | "solve_t":
                self._solve(i, node)
                return None
        if i in carried:
            state, direction = carried[i]
            return f"{state}_C" if direction == "forward" else f"d{state}₀"
        if i in outputs:
            return _pretty(outputs[i], self.single)
        if node.label:
            return _pretty(node.label, self.single)
        if self.uses[i] < 2 or i in self.known or not self._is_worth_a_name(node):
            return None
        letter = "A" if node.axes == ("t", "s") else "H" if node.axes == ("K", "V") else "x"
        count = next(k for k in itertools.count(1) if f"{letter}{_subscript(k)}" not in self.taken)
        self.taken.add(f"{letter}{_subscript(count)}")
        return f"{letter}{_subscript(count)}"

    def _is_worth_a_name(self, node: Node) -> bool:
        if node.op in _CHEAP:
            return False
        return node.op not in ("mul", "unary", "add") or any(
            OPS[self.plan.nodes[a].op].kind != "leaf" and self.plan.nodes[a].op not in _CHEAP
            for a in node.args
        )

    def _solve(self, i: int, node: Node) -> None:
        """The equations of all results at once, and their names."""
        m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
        labels = {
            int(str(n.attr("index"))): (j, n.label)
            for j, n in enumerate(self.plan.nodes)
            if n.op == "pick" and n.args == (i,)
        }
        first, second = ("z", "u") if node.op == "solve" else ("d_w", "d_u")
        names = []
        for index in range(m + r):
            j, label = labels.get(index, (-1, ""))
            letter = f"{first}_{index + 1}" if index < m else f"{second}_{index - m + 1}"
            names.append(_pretty(label or letter, self.single))
            self.names[j] = names[-1]
        if i in self.known:
            return
        args = node.args
        turned = node.op == "solve_t"
        for k in range(r):
            terms = (
                [] if self._is_zero(args[2 * m * r + m + k]) else [self._text(args[2 * m * r + m + k], _SUM)]
            )
            for j in range(m):
                if turned:
                    terms += self._weighted(args[m * r + j * r + k], names[j])
                elif not self._is_zero(args[k * m + j]):
                    terms.append(f"{self._score_of(node, args[k * m + j])} {names[j]}")
            self.lines.append(Equation(names[m + k], _plus(terms), node=i))
        for j in range(m):
            given = args[2 * m * r + j]
            terms = [] if self._is_zero(given) else [self._text(given, _SUM)]
            for k in range(r):
                if not turned:
                    terms += self._weighted(args[m * r + j * r + k], names[m + k])
                elif not self._is_zero(args[k * m + j]):
                    terms.append(f"{self._score_of(node, args[k * m + j])}ᵀ {names[m + k]}")
            note = ""
            if j == m - 1:
                note = (
                    "solved from the last token"
                    if turned
                    else "solved from the first token: the scores are strict"
                )
            self.lines.append(Equation(names[j], _plus(terms), note, i))

    def _score_of(self, solve: Node, score: int) -> str:
        """The score by which a solve multiplies rows, with the decay of their columns if they have one."""
        text = self._text(score, _ATOM)
        if not dict(solve.attrs).get("decayed"):
            return text
        return f"({text} ∘ {self._decay(solve.args[-1])}[{_PAIRS['decayed']}])"

    def _decay(self, w: int) -> str:
        return self.numbered.get(w) or ("R" if w in self.second else "Λ")

    def _weighted(self, coefficient: int, rows: str) -> list[str]:
        """Sigma_ji U_i, with constants folded."""
        value = self._value(coefficient)
        if value is None:
            text = self._text(coefficient, _SUM)
            return [f"{text if _is_one_term(text) else self._factor(coefficient)} ∘ {rows}"]
        if value == 0:
            return []
        return [rows if value == 1 else f"−{rows}" if value == -1 else f"{_number(value)} {rows}"]

    # -- terms ----------------------------------------------------------------------------------
    def _value(self, i: int) -> float | None:
        node = self.plan.nodes[i]
        return float(str(node.attr("value"))) if node.op == "number" else None

    def _is_zero(self, i: int) -> bool:
        return self._value(i) == 0

    def _text(self, i: int, level: int) -> str:
        if i in self.names:
            return self.names[i]
        text, binds = self._term(self.plan.nodes[i])
        return text if binds >= level else f"({text})"

    def _term(self, node: Node) -> tuple[str, int]:
        args, attrs = node.args, dict(node.attrs)

        def arg(k: int, level: int = _ATOM) -> str:
            return self._text(args[k], level)

        read = str(attrs.get("read"))
        decay = self._decay(args[-1]) if args else "Λ"
        scored = "ᴿ" if decay == "R" else ""
        match node.op:
            case "number":
                value = float(str(attrs["value"]))
                return _number(value), _SUM if value < 0 else _ATOM
            case "add":
                return _plus([arg(0, _SUM), arg(1, _SUM)]), _SUM
            case "mul":
                return self._product(args)
            case "unary":
                return _function(str(attrs["fn"]), attrs.get("exponent"), arg)
            case "maximum" | "minimum":
                return f"{node.op[:3]}({arg(0, _SUM)}, {arg(1, _SUM)})", _ATOM
            case "compare":
                return f"[{arg(0, _SUM)} > {arg(1, _SUM)}]", _ATOM
            case "sum" | "amax":
                return f"{'Σ' if node.op == 'sum' else 'max'}_{attrs['axis']}({arg(0, _SUM)})", _ATOM
            case "tokens" | "expand":
                return arg(0, _SUM), _PRODUCT if args[0] in self.names else self._term(
                    self.plan.nodes[args[0]]
                )[1]
            case "contract":
                return f"Σ_{attrs['axis']}({self._product(args)[0]})", _ATOM
            case "swap" if len(node.axes) == 2 and node.axes == self.plan.nodes[args[0]].axes:
                return f"{arg(0)}ᵀ", _ATOM
            case "swap" if len(node.axes) == 1 and "s" in node.axes:
                return f"{arg(0)}[s]", _ATOM
            case "swap" | "first":
                return arg(0, _SUM), _PRODUCT if args[0] in self.names else self._term(
                    self.plan.nodes[args[0]]
                )[1]
            case "eye":
                return "I", _ATOM
            case "score":
                return f"{arg(0)} {arg(1)}ᵀ", _PRODUCT
            case "compose":
                a, b = (f"{arg(k)}{'ᵀ' if attrs[side] else ''}" for k, side in ((0, "left"), (1, "right")))
                return f"{a} {b}", _PRODUCT
            case "weigh":
                return f"{arg(1)} {arg(0)}", _PRODUCT
            case "boundary_product":
                return f"Σ_{OTHER[node.axes[0]]}({arg(0, _PRODUCT)} ∘ {arg(1, _PRODUCT)})", _ATOM
            case "apply":
                return f"{arg(0)} {arg(1)}", _PRODUCT
            case "apply_t" | "write":
                return f"{arg(0)}ᵀ {arg(1)}", _PRODUCT
            case "read":
                return f"{arg(0)} {arg(1)}" + ("" if attrs["con"] == "K" else "ᵀ"), _PRODUCT
            case "mask":
                return f"tril{'' if read == 'inclusive' else '₋'}({arg(0, _SUM)})", _ATOM
            case "pairs_decay":
                return f"{decay}[{_PAIRS[read]}]", _ATOM
            case "from_start":
                return f"{decay}[t−1←0]" if attrs["exclusive"] else f"{decay}[t←0]", _ATOM
            case "to_end":
                return f"{decay}[C←s]", _ATOM
            case "scale_state":
                return f"{decay}[C←0] ∘ {arg(0, _PRODUCT)}", _PRODUCT
            case "boundary_gate":
                summed = OTHER[node.axes[0]]
                return f"{decay}[C←0] ∘ Σ_{summed}({arg(0, _PRODUCT)} ∘ {arg(1, _PRODUCT)})", _PRODUCT
            case "decayed_score":
                return f"⟨{arg(0, _SUM)}, {arg(1, _SUM)}⟩{scored}[{_PAIRS[read]}]", _ATOM
            case "decay_apply":
                turned = "ᵀ" if attrs["transposed"] else ""
                return f"({arg(0)} ∘ {decay}[{_PAIRS[read]}]){turned} {arg(1)}", _PRODUCT
            case "pair_gate":
                return f"⟨{arg(0, _SUM)}, {arg(1, _SUM)}, {arg(2, _SUM)}⟩_τ{scored}[{_PAIRS[read]}]", _ATOM
            case "signs":
                return f"σ[{'t−1←0' if attrs['exclusive'] else 't←0'}]({arg(0, _SUM)})", _ATOM
            case "sign_total":
                return f"σ[C←0]({arg(0, _SUM)})", _ATOM
            case "span_sum":
                return f"{_SPANS[read]}({arg(0, _SUM)})", _ATOM
            case "gate_sum":
                return f"{_GATE_SUMS[str(attrs['kind'])]}({arg(0, _SUM)})", _ATOM
            case op:
                raise InternalError(f"no text for op {op!r}")

    def _product(self, args: Sequence[int]) -> tuple[str, int]:
        """Numbers to the front; -1 is a sign; a factor 1/x is a division."""
        for k in (0, 1):
            value = self._value(args[k])
            other = args[1 - k]
            if value is not None and other not in self.names:
                inner, binds = self._term(self.plan.nodes[other])
                inner = inner if binds >= _PRODUCT or _is_one_term(inner) else f"({inner})"
            elif value is not None:
                inner = self.names[other]
            else:
                continue
            return _scaled(value, inner)
        for k in (1, 0):
            node = self.plan.nodes[args[k]]
            if args[k] not in self.names and node.op == "unary" and node.attr("fn") == "reciprocal":
                return f"{self._text(args[1 - k], _ATOM)} / {self._text(node.args[0], _ATOM)}", _PRODUCT
        (left, first), (right, second) = (_without_sign(self._factor(a)) for a in args)
        text = f"{left} ∘ {f'({right})' if right[0].isdigit() else right}"
        return (text, _PRODUCT) if first * second > 0 else (f"−{text}", _SUM)

    def _factor(self, i: int) -> str:
        """An operand of ∘: a plain elementwise product needs no parentheses of its own."""
        node = self.plan.nodes[i]
        if i in self.names or node.op not in ("mul", "scale_state"):
            return self._text(i, _ATOM)
        text, binds = self._term(node)
        plain = binds == _PRODUCT and "/" not in text and not text[0].isdigit()
        return text if plain else f"({text})"


def _is_one_term(text: str) -> bool:
    """Whether a text is one term, with a sign perhaps, and no sum."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([⟨{") - (char in ")]⟩}")
        if depth == 0 and text[i : i + 3] in (" + ", " − "):
            return False
    return True


def _without_sign(factor: str) -> tuple[str, int]:
    """(x, -1) for a factor (−x) that is one term and no quotient, else (factor, 1)."""
    inner = factor[2:-1]
    if factor.startswith("(−") and factor.endswith(")") and _is_one_term(inner) and "/" not in inner:
        return inner, -1
    return factor, 1


def _scaled(value: float, text: str) -> tuple[str, int]:
    """A number times a product; two signs cancel."""
    if text.startswith("−"):
        value, text = -value, text[1:]
    if value in (1.0, -1.0):
        return (text, _PRODUCT) if value == 1 else (f"−{text}", _SUM)
    return f"{_number(value)} {text}", _PRODUCT if value > 0 else _SUM


def _function(fn: str, exponent: object, arg: Callable[..., str]) -> tuple[str, int]:
    match fn:
        case "reciprocal":
            return f"1 / {arg(0)}", _PRODUCT
        case "pow":
            power = _number(float(str(exponent)))
            return f"{arg(0)}^{power if power.isalnum() else f'({power})'}", _ATOM
        case "heaviside":
            return f"[{arg(0, _SUM)} > 0]", _ATOM
        case "side":
            return f"sign({arg(0, _SUM)})", _ATOM
        case _:
            return f"{fn}({arg(0, _SUM)})", _ATOM


def _plus(terms: Sequence[str]) -> str:
    text = terms[0] if terms else "0"
    for term in terms[1:]:
        text += f" − {term[1:]}" if term.startswith("−") else f" + {term}"
    return text


def _number(value: float) -> str:
    if value <= RESET:
        return "−∞"
    text = f"{value:g}" if value != int(value) else str(int(value))
    return text.replace("-", "−")


def _subscript(value: object) -> str:
    return str(value).translate(_DIGITS)


def _pretty(label: str, single: bool) -> str:
    """``z_1`` -> Z₁ (Z where there is one row), ``g_q11`` -> G^Q₁₁, ``d_k[0]`` -> dk₁, ``o`` -> o."""
    if label.startswith("d_"):
        return "d" + _pretty(label[2:], single)
    if found := re.fullmatch(r"([lbwzuq])_(\d+)", label):
        return found[1].upper() + ("" if single else _subscript(found[2]))
    if found := re.fullmatch(r"g_([bq])(\d+)", label):
        return f"G^{found[1].upper()}" + ("" if single else _subscript(found[2]))
    if found := re.fullmatch(r"(.+)\[(\d+)\]", label):
        return found[1] + _subscript(int(found[2]) + 1)  # rows count from 1, as in the language
    return label
