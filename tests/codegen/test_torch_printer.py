"""Printed statements mean what the plan's nodes mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.torch_helpers import helper_sources
from linalg_dsl.codegen.emit.torch_printer import ChunkPrinter
from linalg_dsl.codegen.emit.torch_text import Text, add, matmul, mul, number, transposed
from linalg_dsl.planner.evaluate import LeafKey, run_chunk
from linalg_dsl.planner.ops import UNARY_FUNCTIONS, Axes
from linalg_dsl.planner.plan import PlanBuilder

SIZES = {"t": 5, "s": 5, "K": 3, "V": 2}
AXES: tuple[Axes, ...] = ((), ("t",), ("t", "K"), ("t", "V"), ("K",), ("t", "s"), ("K", "V"))


def _value(axes: Axes, seed: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand((2, 3, *(SIZES[a] for a in axes)), generator=generator, dtype=torch.float64)
    return low + (high - low) * unit


def _leaf(b: PlanBuilder, name: str, axes: Axes) -> int:
    return b.add_node("input", (), axes, name, name=name, row=None)


def _printed(b: PlanBuilder, result: int, values: dict[str, Tensor]) -> tuple[Any, Tensor]:
    """The value of the printed statements, and that of the plan's evaluator."""
    plan = b.finish("sample", [], [("out", result)])
    names = Names(reserved=("C", "K", "V", "S"))
    leaves = {("input", n): names.unique(n) for n in values}
    printer = ChunkPrinter(plan, leaves, names, like="S")
    (text,) = printer.run([plan.outputs[0][1]])
    scope: dict[str, Any] = {"torch": torch, "C": SIZES["t"], "K": SIZES["K"], "V": SIZES["V"]}
    scope |= {leaves["input", n]: x for n, x in values.items()}
    scope["S"] = torch.zeros(2, 3, SIZES["K"], SIZES["V"], dtype=torch.float64)
    exec("\n\n".join(helper_sources(printer.used)), scope)
    exec("\n".join(printer.lines), scope)
    keys: dict[LeafKey, Tensor] = {("input", n, None): x for n, x in values.items()}
    return eval(text.code, scope), run_chunk(plan, keys).outputs["out"]


def _agree(b: PlanBuilder, result: int, values: dict[str, Tensor]) -> None:
    got, want = _printed(b, result, values)
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64).expand_as(want), want, rtol=1e-12, atol=1e-12
    )


@given(st.data())
def test_elementwise_expressions_keep_their_meaning(data: st.DataObject) -> None:
    """Precedence, signs, folded numbers and broadcasting, over random expressions."""
    b = PlanBuilder()
    values = {f"x{i}": _value(axes, i) for i, axes in enumerate(AXES) if axes != ("t", "s")}
    nodes = [_leaf(b, f"x{i}", axes) for i, axes in enumerate(AXES) if axes != ("t", "s")]
    nodes += [b.number(-1), b.number(2.5), b.number(-3)]
    for _ in range(data.draw(st.integers(2, 10))):
        x, y = (nodes[data.draw(st.integers(0, len(nodes) - 1))] for _ in range(2))
        match data.draw(
            st.sampled_from(["add", "add", "mul", "mul", "negate", "square", "tanh", "maximum", "label"])
        ):
            case "add":
                nodes.append(b.add(x, y))
            case "mul":
                nodes.append(b.mul(x, y))
            case "negate":
                nodes.append(b.negate(x))
            case "square":
                nodes.append(b.unary("pow", b.unary("abs", x), exponent=1.5))
            case "tanh":
                nodes.append(b.unary("tanh", x))
            case "maximum":
                nodes.append(b.binary("maximum", x, y))
            case "label":
                b.label(x, "named")
    _agree(b, b.add(nodes[-1], nodes[0]), values)


@pytest.mark.parametrize("fn", [f for f in UNARY_FUNCTIONS if f != "pow"])
def test_every_function_is_printed(fn: str) -> None:
    low = 0.1 if fn in ("log", "sqrt", "rsqrt", "reciprocal") else -30.0
    b = PlanBuilder()
    x = _leaf(b, "x", ("t",))
    values = {"x": _value(("t",), 1, low, 30.0)}
    values["x"][0, 0, 0] = 1.0 if low > 0 else 0.0
    _agree(b, b.unary(fn, x), values)


@pytest.mark.parametrize("fn", ["exp", "softplus", "heaviside", "reciprocal"])
def test_functions_of_plain_numbers_become_tensors(fn: str) -> None:
    b = PlanBuilder()
    x = _leaf(b, "x", ("t",))
    _agree(b, b.add(x, b.unary(fn, b.number(0.5))), {"x": _value(("t",), 1)})


@pytest.mark.parametrize("op", ["maximum", "minimum", "compare"])
@pytest.mark.parametrize("order", ["tensor first", "number first", "tensors"])
def test_extrema_take_numbers_on_either_side(op: str, order: str) -> None:
    b = PlanBuilder()
    x, y, c = _leaf(b, "x", ("t", "K")), _leaf(b, "y", ("t",)), b.number(0.25)
    pair = {"tensor first": (x, c), "number first": (c, x), "tensors": (x, y)}[order]
    values = {"x": _value(("t", "K"), 1), "y": _value(("t",), 2)}
    values["x"][0, 0, 0, 0] = 0.25
    if order != "tensors":
        del values["y"]
    _agree(b, b.binary(op, *pair), values)


DECAY = (0.0, -1e-7, -0.3, -2.0, -60.0, -math.inf)


def _gates(axes: Axes, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3, tokens, *(SIZES[a] for a in axes[1:]))
    return torch.tensor(DECAY, dtype=torch.float64)[torch.randint(len(DECAY), shape, generator=generator)]


def _decay_node(b: PlanBuilder, op: str, read: str) -> int:
    w, g, a = _leaf(b, "w", ("t", "K")), _leaf(b, "g", ("t",)), _leaf(b, "a", ("t", "s"))
    x, y = _leaf(b, "x", ("t", "K")), _leaf(b, "y", ("t", "K"))
    match op:
        case "decayed_score":
            return b.decayed_score(x, y, w, read)
        case "decay_apply":
            return b.decay_apply(a, y, w, read, transposed=False)
        case "decay_apply transposed":
            return b.decay_apply(a, x, w, read, transposed=True)
        case "pair_gate":
            return b.pair_gate(a, x, y, w, read)
        case "pairs_decay":
            return b.pairs_decay(g, read)
        case "span_sum":
            return b.span_sum(a, read)
        case "mask":
            return b.mask(a, read)
        case _:
            return b.mul(b.from_start(w, read == "exclusive"), b.to_end(w))


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 37])
@pytest.mark.parametrize("read", ["inclusive", "exclusive", "decayed"])
@pytest.mark.parametrize(
    "op",
    [
        "decayed_score",
        "decay_apply",
        "decay_apply transposed",
        "pair_gate",
        "pairs_decay",
        "span_sum",
        "mask",
        "ends",
    ],
)
def test_decays_by_halves_are_those_of_every_pair(
    tokens: int, read: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "t", tokens)
    monkeypatch.setitem(SIZES, "s", tokens)
    b = PlanBuilder()
    result = _decay_node(b, op, read)
    values = {"x": _value(("t", "K"), 1), "y": _value(("t", "K"), 2), "a": _value(("t", "s"), 3)}
    values |= {"w": _gates(("t", "K"), tokens, 4), "g": _gates(("t",), tokens, 5)}
    plan = b.finish("decays", [], [("out", result)])
    used = {str(n.attr("name")) for n in plan.nodes if n.op == "input"}
    _agree(b, result, {n: x for n, x in values.items() if n in used})


@pytest.mark.parametrize("kind", ["from_start", "from_start_exclusive", "to_end"])
@pytest.mark.parametrize("axes", [("t",), ("t", "K")])
def test_gate_sums(kind: str, axes: Axes) -> None:
    b = PlanBuilder()
    _agree(b, b.gate_sum(_leaf(b, "p", axes), kind), {"p": _value(axes, 1)})


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("constants", [False, True])
def test_solves_of_several_rows_with_constants(m: int, r: int, reverse: bool, constants: bool) -> None:
    b = PlanBuilder()
    values: dict[str, Tensor] = {}

    def leaf(name: str, axes: Axes) -> int:
        values[name] = _value(axes, len(values))
        return _leaf(b, name, axes)

    scores = [[b.mask(leaf(f"G{i}{j}", ("t", "s")), "exclusive") for j in range(m)] for i in range(r)]
    sigma = [[leaf(f"c{j}{i}", ("t",)) for i in range(r)] for j in range(m)]
    first = [leaf(f"W{j}", ("t", "V")) for j in range(m)]
    second = [leaf(f"R{i}", ("t", "V")) for i in range(r)]
    if constants:
        sigma = [[b.number(float(i == j)) for i in range(r)] for j in range(m)]
        first[0] = b.number(0)
        scores[0][0] = b.number(0) if m > 1 else scores[0][0]
    z, u = b.solve(scores, sigma, first, second, transposed=reverse)
    total = z[0]
    for i, x in enumerate((*z[1:], *u), 2):
        total = b.add(total, b.mul(b.number(i), x))
    plan = b.finish("solve", [], [("out", total)])
    used = {str(n.attr("name")) for n in plan.nodes if n.op == "input"}
    _agree(b, total, {n: x for n, x in values.items() if n in used})


def test_products_of_products_are_parenthesised() -> None:
    x, y = Text("x", axes=("t", "K")), Text("S", axes=("K", "V"))
    product = matmul(x, y, ("t", "V"))
    assert mul(number(2.0), product).code == "2.0 * (x @ S)"
    assert mul(product, number(2.0)).code == "x @ S * 2.0"
    assert add(product, mul(number(-1.0), Text("z", axes=("t", "V")))).code == "x @ S - z"
    assert transposed(add(x, x)).code == "(x + x).mT"


def test_helpers_come_with_those_they_call() -> None:
    text = "\n".join(helper_sources(["pair_gate"]))
    assert "def channel_decay" in text
    assert "def pair_decay" in text
    assert "def substitute" not in text


def test_long_lines_are_broken_at_their_longest_operand() -> None:
    b = PlanBuilder()
    values = {f"a_rather_long_name_{i}": _value(("t", "K"), i) for i in range(12)}
    total = b.number(0)
    for i, name in enumerate(values):
        x = b.mul(_leaf(b, name, ("t", "K")), b.number(1.5 + i))
        total = b.add(total, b.unary("tanh", x))
    plan = b.finish("long", [], [("out", total)])
    printer = ChunkPrinter(plan, {("input", n): n for n in values}, Names(reserved=values), like="S")
    printer.run([plan.outputs[0][1]])
    assert len(printer.lines) > 1
    assert max(map(len, printer.lines)) <= 110
    _agree(b, total, values)
