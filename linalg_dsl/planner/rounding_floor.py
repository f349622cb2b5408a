"""What a short type costs, derived: the relative error of a chunk form with short operands and float32 sums.

Rounding to p significant bits moves a number x = m 2^e, 1 <= m < 2, by an error that is uniform up to half a
unit in the last place, 2^(e-p); with 1/m spread as of numbers of all sizes its root mean square is

    rho = 2^-p sqrt(3 / (8 ln 2)) / sqrt(3) = 2^-p 0.425          1.7e-3 for bfloat16, 2.1e-4 for float16

relative to x. An input of that type is not rounded; every other operand of a product is, once. A sum of many
products of independent terms has the relative error of its terms: of z = sum x_i y_i

    var(z) = var(x) + var(y) + rho^2 (operands that are no inputs as they stand)

so that errors add up in squares along the way from an input to a result, one rho^2 for every rounded operand
on it, and one more where the result itself is stored in the short type. Of a sum of different terms the
larger error counts, and a state carries the error of what is written to it. What this leaves out makes the
error smaller (T is the identity but for keys that are not orthogonal) or, where terms cancel, larger by their
size over that of their sum: that part is measured (``linalg_dsl.testing.floor``), not derived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from linalg_dsl.planner.ops import OPS
from linalg_dsl.planner.plan import ChunkPlan, Node

BITS = {"bfloat16": 8, "float16": 11}
"""Significant bits of the short types, the leading one among them."""
_PASSES = frozenset({"mask", "tokens", "expand", "pick", "swap", "first", "amax"})


def operand_error(dtype: str) -> float:
    """rho, the root mean square of a relative rounding error."""
    return float(2.0 ** -BITS[dtype] * math.sqrt(3 / (8 * math.log(2))) / math.sqrt(3))


def rounding_floor(forward: ChunkPlan, backward: ChunkPlan, dtype: str = "bfloat16") -> dict[str, float]:
    """The relative root mean square error of outputs, carried states and gradients by the names of the plans.

    A state after the chunk is ``final NAME``, the gradient of the one before it ``d_initial NAME``; they are
    float32. Raises ``KeyError`` for a type that is not short.
    """
    rho = operand_error(dtype)
    found: dict[str, float] = {}
    carried: dict[tuple[str, str], float] = {}
    for plan in (forward, backward):
        for _ in range(2):  # the second time with the error of what the first has written
            values = _variances(plan, carried)
            carried |= {(name, way): values[after] for name, way, _, after in plan.carries}
        found |= {name: rho * math.sqrt(values[n] + 1) for name, n in plan.outputs}
    for (name, way), variance in carried.items():
        found[f"{'final' if way == 'forward' else 'd_initial'} {name}"] = rho * math.sqrt(variance)
    return found


def _is_sign(node: Node) -> bool:
    return node.op == "number" and node.attr("value") in (1.0, -1.0)


def _variances(plan: ChunkPlan, carried: dict[tuple[str, str], float]) -> list[float]:
    """The squared error of every value, in units of rho."""
    values: list[float] = []
    whole: list[bool] = []
    for node in plan.nodes:
        variance, is_short = _of(node, values, whole, plan.nodes, carried)
        values.append(variance)
        whole.append(is_short)
    return values


def _of(
    node: Node,
    values: Sequence[float],
    whole: Sequence[bool],
    nodes: Sequence[Node],
    carried: dict[tuple[str, str], float],
) -> tuple[float, bool]:
    """(squared error, whether the value is a number of the short type as it stands)."""
    have = [values[a] for a in node.args]
    kind = OPS[node.op].kind
    match node.op:
        case "input" | "param" | "cotangent":
            return 0.0, True
        case "carry":
            return carried.get((str(node.attr("name")), str(node.attr("direction"))), 0.0), False
        case "add" | "maximum" | "minimum":
            return max(have), False
        case "mul":
            return sum(have), any(_is_sign(nodes[a]) for a in node.args) and any(whole[a] for a in node.args)
        case "solve" | "solve_t":
            # T of rounded scores, rounded itself, times rounded rows
            return max(have) + 2.0, False
        case _ if node.op in _PASSES:
            return max(have), all(whole[a] for a in node.args)
        case _ if kind == "matmul" or node.op in ("decayed_score", "decay_apply", "pair_gate"):
            scaled = node.op in ("decayed_score", "decay_apply", "pair_gate")
            operands = node.args[:-1] if scaled else node.args
            return sum(have) + sum(scaled or not whole[a] for a in operands), False
        case _:
            return sum(have), False
