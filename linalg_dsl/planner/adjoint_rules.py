"""One adjoint rule per op: the only place where a backward formula stands.

A rule gets the builder, the number of the node and the cotangents of its results (one, or for a solve one
per pick), and gives the cotangent of each operand. ``None`` is no cotangent. A cotangent may lack axes of
its value: it is then the same along them. Where it has more axes than the operand, the sweep sums over
them (the adjoint of broadcasting). What nothing needs is dropped when the plan is finished, so rules do
not look at what is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import FLOOR
from linalg_dsl.planner.plan import PlanBuilder


class Pick(NamedTuple):
    """A cotangent that belongs to one result of an operand with several: a pick of a solve."""

    entry: int
    cotangent: int


Contribution = int | Pick | None
Rule = Callable[[PlanBuilder, int, Sequence[int | None]], Sequence[Contribution]]


def _add(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    return (d, d)


def _mul(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    x, y = b.nodes[node].args
    return (b.mul(d, y), b.mul(d, x))


def _unary(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    slope = derivative(b, node)
    return (None if slope is None else b.mul(_one(cotangents), slope),)


def _maximum(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    """Equal operands share the cotangent."""
    d = _one(cotangents)
    x, y = b.nodes[node].args
    return (b.mul(d, b.binary("compare", x, y)), b.mul(d, b.binary("compare", y, x)))


def _minimum(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    in_maximum = _maximum(b, node, cotangents)
    return (in_maximum[1], in_maximum[0])


def _sum(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    return (_one(cotangents),)


def _amax(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    """A shift that cancels: a constant."""
    return (None,)


def _tokens(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    return (_one(cotangents),)


def _score(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    x, y = b.nodes[node].args
    return (b.apply(d, y), b.apply(d, x, transposed=True))


def _apply(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    a, z = b.nodes[node].args
    return (b.score(d, z), b.apply(a, d, transposed=True))


def _apply_t(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    a, z = b.nodes[node].args
    return (b.score(z, d), b.apply(a, d))


def _compose(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    """Of C = A B: dA = d B^T and dB = A^T d; what is taken transposed gets the transpose of that."""
    d = _one(cotangents)
    x, y = b.nodes[node].args
    left, right = (bool(b.nodes[node].attr(side)) for side in ("left", "right"))
    d_x = b.compose(y, d, right, True) if left else b.compose(d, y, False, not right)
    d_y = b.compose(d, x, True, left) if right else b.compose(x, d, not left, False)
    return (d_x, d_y)


def _read(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    x, state = b.nodes[node].args
    if b.nodes[node].attr("con") == "K":
        return (b.read(d, state, con="V"), b.write(x, d))
    return (b.read(d, state, con="K"), b.write(d, x))


def _write(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    x, z = b.nodes[node].args
    return (b.read(z, d, con="V"), b.read(x, d, con="K"))


def _contract(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    x, y = b.nodes[node].args
    return (_over_others(b, d, y, x), _over_others(b, d, x, y))


def _over_others(b: PlanBuilder, d: int, y: int, x: int) -> int:
    """d y, summed over the axes that x lacks: the first of them as one product."""
    others = [a for a in b.axes(y) if a not in b.axes(x)]
    return b.contract(d, y, others[0]) if others else b.mul(d, y)


def _swap(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    attrs = dict(b.nodes[node].attrs)
    return (b.swap(_one(cotangents), str(attrs["axis"]), str(attrs["other"])),)


def _first(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    return (b.first(_one(cotangents), str(b.nodes[node].attr("axis"))),)


def _mask(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    return (b.mask(_one(cotangents), _read_kind(b, node)),)


def _pairs_decay(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    # the interval of a pair s = t is empty, so an inclusive read counts the pairs of a decayed one
    read = "exclusive" if _read_kind(b, node) == "exclusive" else "decayed"
    return (b.span_sum(_scaled(b, node, _one(cotangents)), read),)


def _scaled(b: PlanBuilder, node: int, d: int) -> int:
    """node d; where d = x y and node x is a value already, that times y."""
    found = []
    if b.nodes[d].op == "mul":
        for x, y in (b.nodes[d].args, b.nodes[d].args[::-1]):
            for pair in ((x, node), (node, x)):
                if (product := b.find_product(*pair)) is not None:
                    found.append((product, y))
    if not found:
        return b.mul(node, d)
    return b.mul(*max(found))  # the score's own cotangent, which is wanted anyway


def _from_start(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    kind = "from_start_exclusive" if b.nodes[node].attr("exclusive") else "from_start"
    return (b.gate_sum(b.mul(node, _one(cotangents)), kind),)


def _to_end(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    return (b.gate_sum(b.mul(node, _one(cotangents)), "to_end"),)


def _scale_state(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    """The boundary term of the gate is the same for every token of the chunk."""
    d = _one(cotangents)
    state, w = b.nodes[node].args
    boundary = b.sum_to(b.boundary_gate(state, d, w), b.axes(w))
    return (b.scale_state(d, w), b.tokens(boundary))


def _weigh(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    state, a = b.nodes[node].args
    axis = str(b.nodes[node].attr("axis"))
    product = b.boundary_product(state, d, axis)
    return (b.weigh(d, a, axis), None if b.value_of(product) == 0 else b.sum(product, axis))


def _signs(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    """Signs are flat."""
    return (None,)


def _decayed_score(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    x, y, w = b.nodes[node].args
    read = _read_kind(b, node)
    return (
        b.decay_apply(d, y, w, read, transposed=False),
        b.decay_apply(d, x, w, read, transposed=True),
        b.pair_gate(d, x, y, w, read),
    )


def _decay_apply(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    d = _one(cotangents)
    a, z, w = b.nodes[node].args
    read, transposed = _read_kind(b, node), bool(b.nodes[node].attr("transposed"))
    x, y = (z, d) if transposed else (d, z)
    return (
        b.decayed_score(x, y, w, read),
        b.decay_apply(a, d, w, read, transposed=not transposed),
        b.pair_gate(a, x, y, w, read),
    )


def _solve(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    """One reversed solve; Y and X are the cotangents of W and R."""
    solve = b.nodes[node]
    m, r = int(str(solve.attr("m"))), int(str(solve.attr("r")))
    scores = [solve.args[i * m : (i + 1) * m] for i in range(r)]
    sigma = [solve.args[m * r + j * r : m * r + (j + 1) * r] for j in range(m)]
    w = solve.args[-1] if dict(solve.attrs).get("decayed") else None
    results = [b.add_node("pick", (node,), solve.axes, index=i) for i in range(m + r)]
    z, u = results[:m], [b.label(x, f"u_{i}") for i, x in enumerate(results[m:], 1)]
    given = [b.number(0) if d is None else d for d in cotangents]
    y, x = b.solve(scores, sigma, given[:m], given[m:], w, transposed=True)
    for i, d in enumerate(x, 1):
        b.label(d, f"d_u_{i}")
    d_sigma = [b.sum(b.mul(y[j], u[i]), solve.axes[-1]) for j in range(m) for i in range(r)]
    if w is None:
        d_scores = [b.mask(b.score(x[i], z[j]), "exclusive") for i in range(r) for j in range(m)]
        return (*d_scores, *d_sigma, *y, *x)
    d_scores = [b.decayed_score(x[i], z[j], w, "decayed") for i in range(r) for j in range(m)]
    d_w = [b.pair_gate(scores[i][j], x[i], z[j], w, "decayed") for i in range(r) for j in range(m)]
    return (*d_scores, *d_sigma, *y, *x, reduce(b.add, d_w))


def _pick(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> Sequence[Contribution]:
    return (Pick(int(str(b.nodes[node].attr("index"))), _one(cotangents)),)


RULES: Mapping[str, Rule] = {
    "add": _add,
    "mul": _mul,
    "unary": _unary,
    "maximum": _maximum,
    "minimum": _minimum,
    "sum": _sum,
    "amax": _amax,
    "tokens": _tokens,
    "expand": _tokens,
    "score": _score,
    "apply": _apply,
    "apply_t": _apply_t,
    "compose": _compose,
    "read": _read,
    "write": _write,
    "contract": _contract,
    "swap": _swap,
    "first": _first,
    "mask": _mask,
    "pairs_decay": _pairs_decay,
    "from_start": _from_start,
    "to_end": _to_end,
    "scale_state": _scale_state,
    "weigh": _weigh,
    "signs": _signs,
    "sign_total": _signs,
    "decayed_score": _decayed_score,
    "decay_apply": _decay_apply,
    "solve": _solve,
    "pick": _pick,
}


def derivative(b: PlanBuilder, node: int) -> int | None:
    """f'(x) of a unary node, from its own result where that is exact; None where f is flat.

    Written so that nothing cancels: 1 - sigmoid(x) stands as sigmoid(-x).
    """
    attrs = dict(b.nodes[node].attrs)
    (x,) = b.nodes[node].args
    match attrs["fn"]:
        case "exp":
            return node
        case "log":
            return b.unary("reciprocal", x)
        case "sigmoid":
            return b.mul(node, b.unary("sigmoid", b.negate(x)))
        case "logsigmoid":
            return b.unary("sigmoid", b.negate(x))
        case "softplus":
            return b.unary("sigmoid", x)
        case "tanh":
            rising = b.mul(b.number(2), x)
            both = b.mul(b.unary("sigmoid", rising), b.unary("sigmoid", b.negate(rising)))
            return b.mul(b.number(4), both)
        case "silu":
            inner = b.add(b.number(1), b.mul(x, b.unary("sigmoid", b.negate(x))))
            return b.mul(b.unary("sigmoid", x), inner)
        case "relu":
            return b.unary("heaviside", x)
        case "elu":
            return b.unary("exp", b.binary("minimum", x, b.number(0)))
        case "sqrt":
            return b.mul(b.number(0.5), b.unary("rsqrt", x))
        case "rsqrt":
            return b.mul(b.number(-0.5), b.mul(node, b.mul(node, node)))
        case "abs":
            return b.unary("sign", x)
        case "sign" | "heaviside" | "side":
            return None
        case "log_size":
            size = b.binary("maximum", b.unary("abs", x), b.number(FLOOR))
            return b.mul(b.unary("side", x), b.unary("reciprocal", size))
        case "reciprocal":
            return b.negate(b.mul(node, node))
        case "pow":
            exponent = float(str(attrs["exponent"]))
            if exponent in (0.0, 1.0):
                return b.number(exponent)
            power = x if exponent == 2 else b.unary("pow", x, exponent=exponent - 1)
            return b.mul(b.number(exponent), power)
        case fn:
            raise InternalError(f"no derivative for the function {fn!r}")


def _one(cotangents: Sequence[int | None]) -> int:
    (d,) = cotangents
    if d is None:
        raise InternalError("a rule needs a cotangent")
    return d


def _read_kind(b: PlanBuilder, node: int) -> str:
    return str(b.nodes[node].attr("read"))
