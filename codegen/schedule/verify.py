"""The rules of a kernel plan: what a kernel may read, compute and write, and what lies in memory between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from linalg_dsl.codegen.schedule.facts import BOUNDARY
from linalg_dsl.codegen.schedule.kernel_plan import BoundaryTerm, Kernel, KernelPlan, shares
from linalg_dsl.errors import InternalError
from linalg_dsl.planner.ops import contracted_axes
from linalg_dsl.planner.plan import Node

LEAVES = ("input", "param", "const", "cotangent")
"""What a call hands in; a number needs no load and a carry is the walk's own."""
STATE = ("K", "V")


def verify(plan: KernelPlan) -> None:
    """Raises ``InternalError`` naming the kernel or buffer and the first rule that it breaks.

    1. Kernels have distinct names. A prep has no direction, split, carry or boundary; a walk has a
       direction, a split axis, and all carries of the plan in that direction.
    2. A kernel loads, once each: leaves (gradients of outputs in the backward only), what an earlier kernel
       stored, and the boundary term after the walk that forms it.
    3. Every operand of a body is loaded, computed before it, a number, or a carry of the walk; no value is
       both loaded and computed, or computed twice; no body has a leaf or the boundary term.
    4. A walk contracts its split axis nowhere, since a program has one block of it; but for sums that it
       stores and does not use: shares, one per block, in a buffer that says so.
    5. A prep computes no state, and no kernel stores one: states stay on chip.
    6. What a kernel stores it has computed; no value is stored by two kernels.
    7. Everything that is loaded or computed is used: by a value of the same kernel, a store, the next value
       of a carry, or the boundary term.
    8. The results are the outputs of the plan. Outputs are stored by the forward and gradients by the
       backward, exactly once, unless they are leaves; there is a backward if and only if the plan hands a
       state's gradient back.
    9. Whatever else is stored, and the boundary term, has exactly one buffer, with the axes of its value and
       a name of its own, and a later kernel reads it.
    10. ``saved`` are exactly the buffers that the forward stores and the backward reads; ``only_saved`` those
       of them that no forward kernel reads.
    11. A boundary term is formed by two walks of the backward, one of each direction, which split its axis;
       the keeper comes first, and each has at hand what it multiplies. Of coupled states there are several.
    """
    _verify_names(plan)
    stored: set[int] = set()
    boundaries: list[Kernel] = []
    for kernel in (*plan.forward, *plan.backward):
        try:
            _verify_frame(plan, kernel)
            _verify_loads(plan, kernel, stored, boundaries)
            _verify_body(plan, kernel)
            _verify_stores(plan, kernel, stored)
            _verify_all_used(plan, kernel)
        except InternalError as fault:
            raise InternalError(
                f"kernel plan {plan.plan.name}, {kernel.name or 'a kernel'}: {fault}"
            ) from None
        stored |= set(kernel.stores)
        if kernel.boundary:
            boundaries.append(kernel)
    try:
        _verify_results(plan)
        _verify_buffers(plan, stored)
        _verify_boundaries(plan, boundaries)
    except InternalError as fault:
        raise InternalError(f"kernel plan {plan.plan.name}: {fault}") from None


# -- one kernel -----------------------------------------------------------------------------------------
def _verify_names(plan: KernelPlan) -> None:
    names = [k.name for k in (*plan.forward, *plan.backward)]
    twice = _twice(names)
    if twice or not all(names):
        raise InternalError(f"kernel plan {plan.plan.name}: kernel names {names} are not distinct")


def _verify_frame(plan: KernelPlan, kernel: Kernel) -> None:
    of_walk = (kernel.direction, kernel.split, kernel.carries or None)
    if kernel.family == "prep":
        if any(x is not None for x in (*of_walk, kernel.boundary)):
            raise InternalError("a prep with a direction, split, carry or boundary term")
        return
    if any(x is None for x in of_walk):
        raise InternalError("a walk without a direction, split axis or carry")
    if kernel.split not in STATE:
        raise InternalError(f"splits {kernel.split}, expected one of {', '.join(STATE)}")
    carries = tuple((leaf, after) for _, d, leaf, after in plan.plan.carries if d == kernel.direction)
    if kernel.carries != carries:
        raise InternalError(
            f"carries {kernel.carries}, one of which is no {kernel.direction} carry of the plan, or not all"
        )


def _verify_loads(plan: KernelPlan, kernel: Kernel, stored: set[int], boundaries: list[Kernel]) -> None:
    terms = [k.boundary for k in boundaries if k.boundary and k.direction != k.boundary.keeper]
    formed = {n for term in terms for n in term.nodes}
    if twice := _twice(kernel.loads):
        raise InternalError(f"loads %{twice[0]} twice")
    for n in kernel.loads:
        node = plan.plan.nodes[n]
        if node.op == "cotangent" and kernel in plan.forward:
            raise InternalError(f"the forward loads %{n}, the gradient of an output")
        if node.op not in LEAVES and n not in stored | formed:
            raise InternalError(f"loads %{n} ({node.op}), which no earlier kernel stores")


def _verify_body(plan: KernelPlan, kernel: Kernel) -> None:
    nodes = plan.plan.nodes
    have = set(kernel.loads)
    own = {leaf for leaf, _ in kernel.carries}
    for n in kernel.body:
        node = nodes[n]
        if n in have:
            raise InternalError(f"computes %{n} ({node.op}), which it has already")
        if node.op in (*LEAVES, "number", "carry", *BOUNDARY):
            raise InternalError(f"computes %{n} ({node.op}), which no kernel computes")
        for a in node.args:
            if a in shares(nodes, kernel):
                raise InternalError(f"uses its share %{a}, which is no whole sum")
            if a not in have and a not in own and nodes[a].op != "number":
                raise InternalError(f"computes %{n} ({node.op}) from %{a} ({nodes[a].op}), not at hand")
        if kernel.split in _contracted(nodes, node) and n not in shares(plan.plan.nodes, kernel):
            raise InternalError(f"%{n} ({node.op}) sums over {kernel.split}, of which a program has a block")
        if kernel.family == "prep" and node.axes == STATE:
            raise InternalError(f"a prep computes the state %{n} ({node.op})")
        have.add(n)


def _verify_stores(plan: KernelPlan, kernel: Kernel, stored: set[int]) -> None:
    if twice := _twice(kernel.stores):
        raise InternalError(f"stores %{twice[0]} twice")
    for n in kernel.stores:
        node = plan.plan.nodes[n]
        if n not in kernel.body:
            raise InternalError(f"stores %{n} ({node.op}), which it does not compute")
        if node.axes == STATE:
            raise InternalError(f"stores the state %{n} ({node.op})")
        if n in stored:
            raise InternalError(f"stores %{n} ({node.op}), which an earlier kernel stores")


def _verify_all_used(plan: KernelPlan, kernel: Kernel) -> None:
    used = {a for n in kernel.body for a in plan.plan.nodes[n].args} | set(kernel.stores)
    used |= set(_boundary_values(kernel))
    for leaf, after in kernel.carries:
        if after not in kernel.body and after != leaf and plan.plan.nodes[after].op != "number":
            raise InternalError(f"does not compute %{after}, the next value of its carry")
        used.add(after)
    for n in (*kernel.loads, *kernel.body):
        if n not in used:
            raise InternalError(f"nothing needs %{n} ({plan.plan.nodes[n].op})")


def _boundary_values(kernel: Kernel) -> Iterator[int]:
    """What the boundary term takes from a kernel."""
    if kernel.boundary and kernel.direction:
        yield from kernel.boundary.needs(kernel.direction)


# -- the whole ------------------------------------------------------------------------------------------
def _verify_results(plan: KernelPlan) -> None:
    if plan.results != plan.plan.outputs:
        raise InternalError(f"gives {_names(plan.results)}, the plan {_names(plan.plan.outputs)}")
    reverse = any(direction == "reverse" for _, direction, _, _ in plan.plan.carries)
    if reverse != bool(plan.backward):
        raise InternalError(
            "has no backward" if reverse else "has a backward, but the plan hands no gradient back"
        )
    for phase, kernels, gradients in (("forward", plan.forward, False), ("backward", plan.backward, True)):
        stored = {n for k in kernels for n in k.stores}
        for name, n in plan.results:
            leaf = plan.plan.nodes[n].op in (*LEAVES, "number")
            if name.startswith("d_") == gradients and not leaf and n not in stored:
                raise InternalError(f"no {phase} kernel stores the result {name}, %{n}")


def _verify_buffers(plan: KernelPlan, stored: set[int]) -> None:
    terms = {n for k in plan.backward if k.boundary for n in k.boundary.nodes}
    expected = (stored - {n for _, n in plan.results}) | terms
    found = [b.node for b in plan.buffers]
    if twice := _twice(found):
        raise InternalError(f"two buffers for %{twice[0]}")
    if odd := expected ^ set(found):
        n = min(odd)
        raise InternalError(f"%{n} has {'no buffer' if n in expected else 'a buffer that nobody stores'}")
    if twice := _twice([*(name for name, _ in plan.results), *(b.name for b in plan.buffers)]):
        raise InternalError(f"two results or buffers named {twice[0]}")
    ahead = {n for k in plan.forward for n in k.stores}
    read_ahead = {n for k in plan.forward for n in k.loads}
    read_back = {n for k in plan.backward for n in k.loads}
    for b in plan.buffers:
        if b.axes != plan.plan.nodes[b.node].axes:
            raise InternalError(
                f"buffer {b.name} has axes {b.axes}, its value {plan.plan.nodes[b.node].axes}"
            )
        if b.node not in read_ahead | read_back:
            raise InternalError(f"nobody reads buffer {b.name}")
        by_blocks = any(b.node in shares(plan.plan.nodes, k) for k in (*plan.forward, *plan.backward))
        if b.shares != by_blocks:
            raise InternalError(
                f"buffer {b.name} holds {'' if by_blocks else 'no '}shares, its flag says otherwise"
            )
        saved = b.node in ahead and b.node in read_back
        if b.saved != saved:
            raise InternalError(f"buffer {b.name} is {'' if saved else 'not '}saved, its flag says otherwise")
        if b.only_saved != (saved and b.node not in read_ahead):
            raise InternalError(
                f"buffer {b.name}: only_saved is {b.only_saved}, and the forward reads otherwise"
            )


def _verify_boundaries(plan: KernelPlan, walks: list[Kernel]) -> None:
    sites = [i for i, n in enumerate(plan.plan.nodes) if n.op in BOUNDARY]
    for axis in STATE:
        pair = [k for k in walks if k.boundary and k.boundary.axis == axis]
        if not pair:
            continue  # then none is read either, by rule 2
        boundary = _same(pair)
        other = "reverse" if boundary.keeper == "forward" else "forward"
        kinds = [(k.direction, k.split, k in plan.backward) for k in pair]
        if kinds != [(boundary.keeper, axis, True), (other, axis, True)]:
            raise InternalError(
                f"a boundary term takes a {boundary.keeper} and then a {other} walk, {axis}-split, "
                "of the backward"
            )
        for n in boundary.nodes:
            if n not in sites:
                raise InternalError(f"the boundary term %{n} is no boundary_gate or boundary_product")
        for walk in pair:
            for n in _boundary_values(walk):
                if n not in (*walk.loads, *walk.body, *(leaf for leaf, _ in walk.carries)):
                    raise InternalError(
                        f"{walk.name} does not have %{n}, of which the boundary term is formed"
                    )


def _same(walks: Iterable[Kernel]) -> BoundaryTerm:
    found = {k.boundary for k in walks if k.boundary}
    if len(found) != 1:
        raise InternalError("the two walks of the boundary term form different ones")
    return found.pop()


def _contracted(nodes: tuple[Node, ...], node: Node) -> frozenset[str]:
    return contracted_axes(node.op, tuple(nodes[a].axes for a in node.args), dict(node.attrs))


def _twice(items: Iterable[int | str]) -> list[int | str]:
    """The items that come more than once."""
    seen: set[int | str] = set()
    return [x for x in items if x in seen or seen.add(x)]  # type: ignore[func-returns-value]


def _names(results: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} = %{n}" for name, n in results)
