"""The rules of a chunk plan: arity, attributes and axes of every op, carries, picks, no dead nodes."""

from __future__ import annotations

from collections.abc import Mapping

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import OPS, UNARY_FUNCTIONS, Axes
from linalg_dsl.planner.plan import ChunkPlan, Node

ORDER = ("t", "s", "K", "V")
READS = ("inclusive", "exclusive", "decayed")
_WIDE: tuple[Axes, ...] = (("t", "K"), ("t", "V"))
_ARITY: Mapping[str, int] = {
    **dict.fromkeys(("input", "param", "const", "number", "carry", "cotangent"), 0),
    **dict.fromkeys(("unary", "sum", "amax", "tokens", "expand", "mask", "pairs_decay", "from_start"), 1),
    **dict.fromkeys(("to_end", "span_sum", "gate_sum", "signs", "sign_total", "pick", "swap"), 1),
    **dict.fromkeys(("add", "mul", "maximum", "minimum", "compare"), 2),
    **dict.fromkeys(("score", "apply", "apply_t", "read", "write", "scale_state"), 2),
    **dict.fromkeys(("compose", "weigh", "boundary_product"), 2),
    **dict.fromkeys(("decayed_score", "decay_apply", "boundary_gate"), 3),
    "pair_gate": 4,
}
_ATTRS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("input", "param"), frozenset({"name", "row"})),
    **dict.fromkeys(("const", "cotangent"), frozenset({"name"})),
    "number": frozenset({"value"}),
    "carry": frozenset({"name", "direction"}),
    **dict.fromkeys(("sum", "amax", "expand", "weigh", "boundary_product"), frozenset({"axis"})),
    "swap": frozenset({"axis", "other"}),
    "compose": frozenset({"left", "right"}),
    **dict.fromkeys(("mask", "pairs_decay", "decayed_score", "span_sum", "pair_gate"), frozenset({"read"})),
    "decay_apply": frozenset({"read", "transposed"}),
    "read": frozenset({"con"}),
    **dict.fromkeys(("from_start", "signs"), frozenset({"exclusive"})),
    "gate_sum": frozenset({"kind"}),
    **dict.fromkeys(("solve", "solve_t"), frozenset({"m", "r", "decayed"})),
    "pick": frozenset({"index"}),
}


def verify(plan: ChunkPlan) -> None:
    """Raises ``InternalError`` naming the first node that breaks a rule."""
    for i, node in enumerate(plan.nodes):
        try:
            _verify_node(plan, i, node)
        except InternalError as fault:
            raise InternalError(f"plan {plan.name}, node %{i} = {node.op}: {fault}") from None
    _verify_frame(plan)


def _verify_frame(plan: ChunkPlan) -> None:
    """What concerns the plan as a whole."""
    if len(set(plan.nodes)) != len(plan.nodes):
        raise InternalError(f"plan {plan.name} holds equal nodes twice")
    names = [name for name, _ in plan.outputs]
    if len(set(names)) != len(names):
        raise InternalError(f"plan {plan.name} has two outputs of one name: {', '.join(names)}")
    carried = {leaf for _, _, leaf, _ in plan.carries}
    for i, node in enumerate(plan.nodes):
        if node.op == "carry" and i not in carried:
            raise InternalError(f"plan {plan.name}: carry %{i} is handed nothing")
    dead = set(range(len(plan.nodes))) - plan.live([*plan.roots, *(leaf for _, _, leaf, _ in plan.carries)])
    if dead:
        raise InternalError(f"plan {plan.name}: nothing needs node %{min(dead)}")
    directions = set()
    for name, direction, leaf, after in plan.carries:
        given, result = plan.nodes[leaf], plan.nodes[after]
        if given.op != "carry" or (given.attr("name"), given.attr("direction")) != (name, direction):
            raise InternalError(f"plan {plan.name}: %{leaf} is not the {direction} carry of {name}")
        if result.axes != given.axes and result.op != "number":
            raise InternalError(f"plan {plan.name}: {name} has axes {given.axes}, its next {result.axes}")
        directions.add(direction)
    if not directions <= {"forward", "reverse"}:
        raise InternalError(f"plan {plan.name}: directions {sorted(directions)}")
    if "reverse" not in directions:
        late = [n.op for n in plan.nodes if n.op == "cotangent" or OPS[n.op].backward_only]
        if late:
            raise InternalError(f"plan {plan.name} is a forward plan and holds {late[0]}")


def _verify_node(plan: ChunkPlan, i: int, node: Node) -> None:
    if node.op not in OPS:
        raise InternalError("unknown op")
    if any(not 0 <= a < i for a in node.args):
        raise InternalError("an operand does not come before its use")
    _verify_attrs(node)
    if tuple(sorted(node.axes, key=ORDER.index)) != node.axes or len(set(node.axes)) != len(node.axes):
        raise InternalError(f"axes {node.axes} are not in the order {ORDER}")
    operands = [plan.nodes[a] for a in node.args]
    if node.op in ("solve", "solve_t"):
        _verify_solve(node, operands)
        return
    if node.op not in _ARITY:
        raise InternalError("is no op of a chunk plan: the schedule makes it")
    arity = _ARITY[node.op]
    if len(operands) != arity:
        raise InternalError(f"takes {arity} operands, got {len(operands)}")
    if node.op == "pick":
        _verify_pick(node, operands[0])
        return
    if any(x.op in ("solve", "solve_t") for x in operands):
        raise InternalError("uses a solve without a pick")
    expected = _result_axes(node, [x.axes for x in operands])
    if node.axes != expected:
        raise InternalError(f"has axes {node.axes}, expected {expected}")


def _verify_attrs(node: Node) -> None:
    attrs = dict(node.attrs)
    if node.op == "unary":
        expected = frozenset({"fn", "exponent"} if attrs.get("fn") == "pow" else {"fn"})
        if attrs.get("fn") not in UNARY_FUNCTIONS:
            raise InternalError(f"unknown function {attrs.get('fn')!r}")
    else:
        expected = _ATTRS.get(node.op, frozenset())
    optional = {"row", "decayed"}
    if attrs.keys() - optional != expected - optional or not attrs.keys() <= expected:
        raise InternalError(f"has attributes {sorted(attrs)}, expected {sorted(expected)}")
    allowed: Mapping[str, tuple[object, ...]] = {
        "read": READS[:2] if node.op == "mask" else READS,
        "con": ("K", "V"),
        "axis": ("K", "V") if node.op in ("expand", "weigh", "boundary_product") else ORDER,
        "left": (False, True),
        "right": (False, True),
        "direction": ("forward", "reverse"),
        "exclusive": (False, True),
        "transposed": (False, True),
        "decayed": (True,),
        "kind": ("from_start", "from_start_exclusive", "to_end"),
    }
    for name, values in allowed.items():
        if name in attrs and attrs[name] not in values:
            raise InternalError(f"has {name} = {attrs[name]!r}, expected one of {values}")


def _result_axes(node: Node, axes: list[Axes]) -> Axes:
    """The axes that the op gives for these operands; raises where it cannot take them."""
    attrs = dict(node.attrs)
    match node.op:
        case "input":
            return _one_of(node.axes, ("t",), ("t", "K"), ("t", "V"))
        case "param":
            return _one_of(node.axes, (), ("K",), ("V",))
        case "const" | "number":
            return ()
        case "carry" | "cotangent":
            return node.axes
        case "add" | "mul" | "maximum" | "minimum" | "compare":
            have = {a for x in axes for a in x}
            if "s" in have and have & {"K", "V"}:
                raise InternalError(f"cannot broadcast {axes[0]} with {axes[1]}")
            return tuple(a for a in ORDER if a in have)
        case "unary":
            return axes[0]
        case "sum" | "amax":
            if attrs["axis"] not in axes[0]:
                raise InternalError(f"the operand {axes[0]} has no axis {attrs['axis']}")
            return tuple(a for a in axes[0] if a != attrs["axis"])
        case "tokens" | "expand":
            new = "t" if node.op == "tokens" else str(attrs["axis"])
            if new in axes[0]:
                raise InternalError(f"the operand {axes[0]} has the axis {new} already")
            return tuple(a for a in ORDER if a == new or a in axes[0])
        case "score":
            _one_of(axes[0], *_WIDE, ("t",))
            _expect(axes[1], axes[0])
            return ("t", "s")
        case "apply" | "apply_t":
            _expect(axes[0], ("t", "s"))
            return _one_of(axes[1], *_WIDE, ("t",))
        case "compose":
            _expect(axes[0], ("t", "s"))
            _expect(axes[1], ("t", "s"))
            return ("t", "s")
        case "swap":
            if {attrs["axis"], attrs["other"]} != {"t", "s"}:
                raise InternalError(f"swaps {attrs['axis']} and {attrs['other']}, expected t and s")
            return ("t",) if _one_of(axes[0], ("t",), ("s",)) == ("s",) else ("s",)
        case "read":
            con = str(attrs["con"])
            _expect(axes[0], ("t", con))
            _expect(axes[1], ("K", "V"))
            return ("t", "V" if con == "K" else "K")
        case "write":
            _expect(axes[0], ("t", "K"))
            _expect(axes[1], ("t", "V"))
            return ("K", "V")
        case "mask":
            return _one_of(axes[0], ("t", "s"))
        case "pairs_decay":
            _expect(axes[0], ("t",))
            return ("t", "s")
        case "from_start" | "to_end" | "gate_sum" | "signs":
            return _one_of(axes[0], ("t",), *_WIDE)
        case "sign_total":
            return _one_of(axes[0], ("t",), *_WIDE)[1:]
        case "scale_state":
            _expect(axes[0], ("K", "V"))
            _one_of(axes[1], ("t",), *_WIDE)
            return ("K", "V")
        case "weigh":
            _expect(axes[0], ("K", "V"))
            _expect(axes[1], ())
            return ("K", "V")
        case "boundary_product":
            _expect(axes[0], ("K", "V"))
            _expect(axes[1], ("K", "V"))
            return (str(attrs["axis"]),)
        case "decayed_score":
            _one_of(axes[0], *_WIDE)
            for have_axes in axes[1:]:
                _expect(have_axes, axes[0])
            return ("t", "s")
        case "decay_apply":
            _expect(axes[0], ("t", "s"))
            _one_of(axes[1], *_WIDE)
            _expect(axes[2], axes[1])
            return axes[1]
        case "span_sum":
            _expect(axes[0], ("t", "s"))
            return ("t",)
        case "pair_gate":
            _expect(axes[0], ("t", "s"))
            _one_of(axes[1], *_WIDE)
            for have_axes in axes[2:]:
                _expect(have_axes, axes[1])
            return axes[1]
        case "boundary_gate":
            _expect(axes[0], ("K", "V"))
            _expect(axes[1], ("K", "V"))
            return _one_of(axes[2], ("t",), *_WIDE)[1:] or ("K",)
        case _:
            raise InternalError("no rule for this op in a plan")


def _verify_solve(node: Node, operands: list[Node]) -> None:
    m, r = int(str(node.attr("m"))), int(str(node.attr("r")))
    count = 2 * m * r + m + r + (1 if dict(node.attrs).get("decayed") else 0)
    if m < 1 or r < 1 or len(operands) != count:
        raise InternalError(f"takes {count} operands for m {m}, r {r}, got {len(operands)}")
    _one_of(node.axes, *_WIDE)
    for i, operand in enumerate(operands):
        if operand.op == "number" and i < 2 * m * r + m + r:
            continue
        if i < m * r:
            _expect(operand.axes, ("t", "s"))
        elif i < 2 * m * r:
            _one_of(operand.axes, ("t",), ())
        else:
            _expect(operand.axes, node.axes)


def _verify_pick(node: Node, solve: Node) -> None:
    if solve.op not in ("solve", "solve_t"):
        raise InternalError(f"picks from {solve.op}, expected a solve")
    results = int(str(solve.attr("m"))) + int(str(solve.attr("r")))
    if not 0 <= int(str(node.attr("index"))) < results:
        raise InternalError(f"picks entry {node.attr('index')} of {results}")
    _expect(node.axes, solve.axes)


def _expect(have: Axes, want: Axes) -> None:
    if have != want:
        raise InternalError(f"has or takes axes {have}, expected {want}")


def _one_of(have: Axes, *allowed: Axes) -> Axes:
    if have not in allowed:
        raise InternalError(f"has or takes axes {have}, expected one of {allowed}")
    return have
