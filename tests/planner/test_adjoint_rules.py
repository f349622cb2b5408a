"""Every adjoint rule against finite differences in float64, operand by operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from linalg_dsl.planner import adjoint_rules
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.adjoint_rules import RULES, derivative
from linalg_dsl.planner.evaluate import LeafKey, run_chunk
from linalg_dsl.planner.ops import OPS, UNARY_FUNCTIONS, Axes
from linalg_dsl.planner.plan import ChunkPlan, PlanBuilder

SIZES = {"t": 6, "s": 6, "K": 3, "L": 3, "V": 4}
TK: Axes
TV: Axes
TS: Axes
KV: Axes
TK, TV, TS, KV = ("t", "K"), ("t", "V"), ("t", "s"), ("K", "V")


@dataclass(frozen=True)
class Example:
    """One op between leaves: ``make`` adds it, ``operands`` are the leaves' axes by name.

    A leaf called ``w...`` is drawn as a log decay, ``s...`` in (0, 2), others normal.
    """

    name: str
    operands: Mapping[str, Axes]
    make: Callable[..., int | tuple[int, ...]]

    @property
    def op(self) -> str:
        return self.name.split()[0]

    @property
    def plan(self) -> ChunkPlan:
        b = PlanBuilder()
        leaves = [b.add_node("input", (), axes, n, name=n) for n, axes in self.operands.items()]
        made = self.make(b, *leaves)
        results = made if isinstance(made, tuple) else (made,)
        return b.finish(self.name, [], [(f"o{i}", r) for i, r in enumerate(results)])


def solved(m: int, r: int) -> Callable[..., tuple[int, ...]]:
    def make(b: PlanBuilder, *x: int) -> tuple[int, ...]:
        scores = [x[i * m : (i + 1) * m] for i in range(r)]
        sigma = [x[m * r + j * r : m * r + (j + 1) * r] for j in range(m)]
        rows = x[2 * m * r :]
        decayed = rows[m + r] if len(rows) > m + r else None
        z, u = b.solve(scores, sigma, rows[:m], rows[m : m + r], decayed)
        return (*z, *u)

    return make


def solve_operands(m: int, r: int, axes: Axes = TV) -> dict[str, Axes]:
    pairs = [(i, j) for i in range(r) for j in range(m)]
    names: dict[str, Axes] = {f"g{i}{j}": TS for i, j in pairs}
    names.update({f"x{j}{i}": ("t",) for j in range(m) for i in range(r)})
    names.update({f"y{j}": axes for j in range(m)})
    names.update({f"r{i}": axes for i in range(r)})
    return names


def of_zero_row(b: PlanBuilder, g: int, x: int, w: int, r: int) -> tuple[int, ...]:
    """A solve with m = 2, a zero row of W and constants in Sigma."""
    z, u = b.solve([[g, g]], [[b.number(0)], [b.number(1)]], [w, b.number(0)], [b.mul(x, r)])
    return (*z, *u)


EXAMPLES = [
    Example("add", {"x": TK, "y": TK}, PlanBuilder.add),
    Example("add of a scalar per token", {"x": TK, "y": ("t",)}, PlanBuilder.add),
    Example("add of a param", {"x": ("K",), "y": ("t",)}, PlanBuilder.add),
    Example("add of a token to a score", {"x": TS, "y": ("t",)}, PlanBuilder.add),
    Example("mul", {"x": TV, "y": TV}, PlanBuilder.mul),
    Example("mul of broadcast operands", {"x": ("t",), "y": ("K",)}, PlanBuilder.mul),
    Example("mul of a square", {"x": TV}, lambda b, x: b.mul(x, x)),
    Example("maximum", {"x": TK, "y": ("t",)}, lambda b, x, y: b.binary("maximum", x, y)),
    Example("minimum", {"x": TK, "y": ("K",)}, lambda b, x, y: b.binary("minimum", x, y)),
    Example("sum over K", {"x": TK}, lambda b, x: b.sum(x, "K")),
    Example("sum over t", {"x": TK}, lambda b, x: b.sum(x, "t")),
    Example("sum over s", {"x": TS}, lambda b, x: b.sum(x, "s")),
    Example("sum of a sum", {"x": TK}, lambda b, x: b.sum(b.sum(x, "K"), "t")),
    Example("sum and its operand", {"x": TV}, lambda b, x: b.mul(b.sum(b.add(x, x), "V"), x)),
    Example("sum of a broadcast sum", {"x": TK, "y": ("t",)}, lambda b, x, y: b.sum(b.add(x, y), "K")),
    Example(
        "amax cancels",
        {"x": TK},
        lambda b, x: b.mul(
            e := b.unary("exp", b.add(x, b.negate(b.amax(x, "K")))), b.unary("reciprocal", b.sum(e, "K"))
        ),
    ),
    Example("tokens", {"x": ("K",)}, PlanBuilder.tokens),
    Example("expand", {"x": ("t",)}, lambda b, x: b.expand(x, TK)),
    Example("expand of a param", {"x": ()}, lambda b, x: b.expand(x, KV)),
    Example("score", {"x": TK, "y": TK}, PlanBuilder.score),
    Example("apply", {"a": TS, "z": TV}, PlanBuilder.apply),
    Example("apply_t", {"a": TS, "z": TV}, lambda b, a, z: b.apply(a, z, transposed=True)),
    Example("score of one number per token", {"x": ("t",), "y": ("t",)}, PlanBuilder.score),
    Example("apply to one number per token", {"a": TS, "z": ("t",)}, PlanBuilder.apply),
    Example("apply_t to one number per token", {"a": TS, "z": ("t",)}, lambda b, a, z: b.apply(a, z, True)),
    *(
        Example(
            f"compose {'left' if left else ''} {'right' if right else ''}",
            {"x": TS, "y": TS},
            lambda b, x, y, left=left, right=right: b.compose(x, y, left, right),
        )
        for left in (False, True)
        for right in (False, True)
    ),
    Example("read over K", {"x": TK, "y": KV}, lambda b, x, y: b.read(x, y, "K")),
    Example("read over V", {"x": TV, "y": KV}, lambda b, x, y: b.read(x, y, "V")),
    Example("write", {"x": TK, "z": TV}, PlanBuilder.write),
    Example("contract", {"x": ("K",), "y": ("K",)}, lambda b, x, y: b.contract(x, y, "K")),
    Example("contract with a matrix", {"x": ("V",), "y": KV}, lambda b, x, y: b.contract(x, y, "V")),
    Example(
        "contract of matrices", {"x": ("K", "L"), "y": ("L", "V")}, lambda b, x, y: b.contract(x, y, "L")
    ),
    Example("swap of a name", {"x": KV}, lambda b, x: b.swap(x, "K", "L")),
    Example("swap of rows and columns", {"x": ("K", "L")}, lambda b, x: b.swap(x, "L", "K")),
    Example("swap of tokens and columns", {"x": ("t",)}, lambda b, x: b.swap(x, "t", "s")),
    Example("first", {"x": KV}, lambda b, x: b.first(x, "V")),
    *(
        Example(f"mask {read}", {"a": TS}, lambda b, a, read=read: b.mask(a, read))
        for read in ("inclusive", "exclusive")
    ),
    *(
        Example(f"pairs_decay {read}", {"w": ("t",)}, lambda b, w, read=read: b.pairs_decay(w, read))
        for read in ("inclusive", "exclusive", "decayed")
    ),
    *(
        Example(f"from_start {axes} {exclusive}", {"w": axes}, lambda b, w, e=exclusive: b.from_start(w, e))
        for axes in (("t",), TK, TV)
        for exclusive in (False, True)
    ),
    Example("to_end scalar", {"w": ("t",)}, PlanBuilder.to_end),
    Example("to_end channel", {"w": TK}, PlanBuilder.to_end),
    Example("to_end value channel", {"w": TV}, PlanBuilder.to_end),
    Example("scale_state scalar", {"y": KV, "w": ("t",)}, PlanBuilder.scale_state),
    Example("scale_state channel", {"y": KV, "w": TK}, PlanBuilder.scale_state),
    Example("scale_state value channel", {"y": KV, "w": TV}, PlanBuilder.scale_state),
    *(
        Example(f"weigh {axis}", {"y": KV, "a": ()}, lambda b, y, a, axis=axis: b.weigh(y, a, axis))
        for axis in KV
    ),
    *(
        Example(f"signs {axes} {e}", {"x": axes, "y": axes}, lambda b, x, y, e=e: b.mul(b.signs(x, e), y))
        for axes in (("t",), TK, TV)
        for e in (False, True)
    ),
    Example("sign_total scalar", {"x": ("t",), "y": KV}, lambda b, x, y: b.mul(b.sign_total(x), y)),
    Example("sign_total channel", {"x": TV, "y": KV}, lambda b, x, y: b.mul(b.sign_total(x), y)),
    *(
        Example(
            f"decayed_score {read} {axes}",
            {"x": axes, "y": axes, "w": axes},
            lambda b, x, y, w, read=read: b.decayed_score(x, y, w, read),
        )
        for read in ("inclusive", "exclusive", "decayed")
        for axes in (TK, TV)
    ),
    *(
        Example(
            f"decay_apply {read} {'transposed' if turned else ''} {axes}",
            {"a": TS, "z": axes, "w": axes},
            lambda b, a, z, w, read=read, turned=turned: b.decay_apply(a, z, w, read, turned),
        )
        for read in ("inclusive", "exclusive", "decayed")
        for turned in (False, True)
        for axes in (TK, TV)
    ),
    *(
        Example(f"solve {m} {r}", solve_operands(m, r), solved(m, r))
        for m, r in ((1, 1), (2, 1), (2, 2), (3, 2))
    ),
    *(
        Example(f"solve {m} {r} decayed {axes}", solve_operands(m, r, axes) | {"w": axes}, solved(m, r))
        for m, r, axes in ((1, 1, TV), (2, 1, TK), (2, 2, TV))
    ),
    Example("solve with constants", {"g": TS, "x": ("t",), "y": TV, "r": TV}, of_zero_row),
    Example("pick", solve_operands(1, 1), lambda b, *x: solved(1, 1)(b, *x)[1]),
]  # fmt: skip
POSITIVE = ("log", "log_size", "sqrt", "rsqrt", "reciprocal", "pow")
UNARY_EXAMPLES = [
    Example(f"unary {fn}", {"s" if fn in POSITIVE else "x": TK},
            lambda b, x, fn=fn: b.unary(fn, x, **({"exponent": -0.7} if fn == "pow" else {})))
    for fn in UNARY_FUNCTIONS
] + [
    Example("unary pow 2", {"x": TK}, lambda b, x: b.unary("pow", x, exponent=2.0)),
    Example("unary pow 0", {"x": TK}, lambda b, x: b.unary("pow", x, exponent=0.0)),
    Example("unary pow 3", {"x": TK}, lambda b, x: b.unary("pow", x, exponent=3.0)),
]  # fmt: skip


def values(example: Example, gates: str) -> dict[LeafKey, Tensor]:
    generator = torch.Generator().manual_seed(11)
    drawn: dict[LeafKey, Tensor] = {}
    for name, axes in example.operands.items():
        x = torch.randn(2, *(SIZES[a] for a in axes), generator=generator, dtype=torch.float64)
        if name.startswith("w"):
            x = -torch.nn.functional.softplus(x)
            if gates == "strong" and x.dim() > 1:
                for position, gate in ((1, 0.0), (2, -1e-7), (3, -60.0)):
                    x[:, position] = gate
        elif name.startswith("s"):
            x = 0.1 + 2 * torch.sigmoid(x)
        drawn[("input", name, None)] = x
    return drawn


def gradient_faults(example: Example, gates: str, step: float = 1e-5) -> dict[str, float]:
    """By operand: the relative error of the backward plan's gradient against central differences."""
    plan, given = example.plan, values(example, gates)
    reverse = backward(plan)
    weights = {n: torch.randn_like(x) for n, x in run_chunk(plan, given, SIZES).outputs.items()}
    cotangents: dict[LeafKey, Tensor] = {("cotangent", n, None): x for n, x in weights.items()}
    got = run_chunk(reverse, {**given, **cotangents}, SIZES).outputs if reverse.outputs else {}

    def loss(changed: dict[LeafKey, Tensor]) -> float:
        outputs = run_chunk(plan, changed, SIZES).outputs
        return sum(float((weights[n] * x).sum()) for n, x in outputs.items())

    faults = {}
    for name in example.operands:
        key = ("input", name, None)
        gradient = torch.zeros_like(given[key])
        for index in range(gradient.numel()):
            moved = [given[key].clone() for _ in range(2)]
            for x, sign in zip(moved, (1, -1), strict=True):
                x.view(-1)[index] += sign * step
            gradient.view(-1)[index] = (loss({**given, key: moved[0]}) - loss({**given, key: moved[1]})) / (
                2 * step
            )
        found = got.get(f"d_{name}")
        found = torch.zeros_like(gradient) if found is None else found
        faults[name] = float((found - gradient).abs().max() / max(1.0, float(gradient.abs().max())))
    return faults


DECAYED = [e for e in EXAMPLES if any(n.startswith("w") for n in e.operands)]


@pytest.mark.parametrize(
    ("example", "gates"),
    [(e, "mild") for e in EXAMPLES] + [(e, "strong") for e in DECAYED],
    ids=lambda x: getattr(x, "name", x),
)
def test_rule_agrees_with_finite_differences(example: Example, gates: str) -> None:
    assert max(gradient_faults(example, gates).values()) < 1e-8


@pytest.mark.parametrize("example", UNARY_EXAMPLES, ids=lambda e: e.name)
def test_derivative_agrees_with_finite_differences(example: Example) -> None:
    assert max(gradient_faults(example, "mild").values()) < 1e-8


def test_every_differentiable_op_has_a_rule_and_an_example() -> None:
    differentiable = {
        n for n, info in OPS.items() if not info.backward_only and info.kind not in ("leaf", "lowered")
    }
    assert set(RULES) == differentiable
    assert {e.op for e in EXAMPLES + UNARY_EXAMPLES} == differentiable


FLAT = ("amax", "pick")
"""Ops whose rule hands on no plain cotangent: a constant, and the part of a solve."""


def is_one_op(example: Example) -> bool:
    """Whether the operands of the op are the leaves of the example, in their order."""
    node = next(n for n in example.plan.nodes if n.op == example.op)
    return node.args == tuple(range(len(example.operands)))


MUTATIONS = [
    (e, position)
    for e in [*EXAMPLES, UNARY_EXAMPLES[0], UNARY_EXAMPLES[-1]]
    for position in range(len(e.operands))
    if e.op not in FLAT and len(e.operands) <= 6 and is_one_op(e)
]


@pytest.mark.parametrize(("example", "position"), MUTATIONS, ids=lambda x: getattr(x, "name", str(x)))
@pytest.mark.parametrize("fault", ["dropped", "halved"])
def test_a_broken_rule_operand_is_seen(
    example: Example, position: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = RULES[example.op]

    def broken(b: PlanBuilder, node: int, cotangents: object) -> list[object]:
        parts: list[object] = list(sound(b, node, cotangents))  # type: ignore[arg-type]
        part = parts[position]
        assert isinstance(part, int), "an operand of these examples has a cotangent"
        parts[position] = None if fault == "dropped" else b.mul(b.number(0.5), part)
        return parts

    monkeypatch.setattr(adjoint_rules, "RULES", {})  # nothing else may be in use
    monkeypatch.setattr("linalg_dsl.planner.adjoint.RULES", {**RULES, example.op: broken})
    assert max(gradient_faults(example, "mild").values()) > 1e-3


def test_flat_functions_have_no_derivative() -> None:
    b = PlanBuilder()
    x = b.add_node("input", (), ("t",), name="x")
    assert derivative(b, b.unary("sign", x)) is None
    assert derivative(b, b.unary("heaviside", x)) is None
    assert derivative(b, b.unary("side", x)) is None


def test_the_gradient_of_the_size_of_a_gate_is_that_of_its_logarithm_over_the_floored_gate() -> None:
    b = PlanBuilder()
    x = b.add_node("input", (), ("t",), name="x")
    slope = derivative(b, b.unary("log_size", x))
    assert slope is not None
    plan = b.finish("slope", [], [("o", slope)])
    points = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 0.5, -0.25], dtype=torch.float64)
    got = run_chunk(plan, {("input", "x", None): points}).outputs["o"]
    assert got.tolist() == pytest.approx([1e15, 1e15, 1e15, -1e15, 2.0, -4.0])


@pytest.mark.parametrize("fn", ["sigmoid", "logsigmoid", "softplus", "tanh", "silu", "elu"])
def test_derivative_keeps_its_digits_far_out(fn: str) -> None:
    b = PlanBuilder()
    x = b.add_node("input", (), ("t",), name="x")
    slope = derivative(b, b.unary(fn, x))
    assert slope is not None
    plan = b.finish("slope", [], [("o", slope)])
    points = torch.tensor([-30.0, -12.0, -3.0, 3.0, 12.0, 30.0])
    got = run_chunk(plan, {("input", "x", None): points}).outputs["o"].double()
    y = points.double()
    exact = {
        "sigmoid": torch.sigmoid(y) * torch.sigmoid(-y),
        "logsigmoid": torch.sigmoid(-y),
        "softplus": torch.sigmoid(y),
        "tanh": 1 / torch.cosh(y) ** 2,
        "silu": torch.sigmoid(y) * (1 + y * torch.sigmoid(-y)),
        "elu": y.clamp(max=0).exp(),
    }[fn]
    assert ((got - exact).abs() <= 2e-6 * exact.abs()).all()


def test_a_reset_gate_has_a_gradient_of_zero_and_nothing_else_is_lost() -> None:
    """-inf in a log decay: every gradient finite, the gate's own exactly 0."""
    for example in DECAYED:
        given = values(example, "mild")
        given[("input", "w", None)][:, 2] = -torch.inf
        plan = example.plan
        outputs = run_chunk(plan, given, SIZES).outputs
        assert all(torch.isfinite(x).all() for x in outputs.values()), example.name
        cotangents: dict[LeafKey, Tensor] = {
            ("cotangent", n, None): torch.ones_like(x) for n, x in outputs.items()
        }
        grads = run_chunk(backward(plan), {**given, **cotangents}, SIZES).outputs
        assert all(torch.isfinite(x).all() for x in grads.values()), example.name
        assert (grads["d_w"][:, 2] == 0).all(), example.name
