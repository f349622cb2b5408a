"""Lines of a kernel as text: what nothing uses, which names they mention; and how tiles are turned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from linalg_dsl.codegen.schedule.kernel_plan import Kernel
from linalg_dsl.planner.plan import Node

UNIT = "b_one"
"""The unit matrix of a walk, made before its loop."""
ALWAYS = 'LOOK == "always"'
"""When operands are cleaned unseen; a walk else looks at its state at the end (``leaves_trace``)."""


def turned_axes(nodes: Sequence[Node], kernel: Kernel) -> frozenset[str]:
    """The axes that stand first in their tiles: in a walk the split one, unless a sum over tokens wants rows,
    in a prep those with scores that decay per channel."""
    split = kernel.split
    if split is None:
        joint = (nodes[n] for n in kernel.body if nodes[n].op in ("decayed_scores", "decay_adjoints"))
        return frozenset(nodes[node.args[-1]].axes[-1] for node in joint)
    by_rows = ("from_start", "to_end", "gate_sum", "decayed_scores", "decay_adjoints", "decay_applies")
    if any(nodes[n].op in by_rows and split in nodes[n].axes for n in kernel.body):
        return frozenset()
    return frozenset((split,))


def taken_apart(nodes: Sequence[Node], kernel: Kernel) -> frozenset[int]:
    """Sums in a walk that nothing but a read of the state takes, times a number per token at most.

    Formed, such a sum would go through shared memory to be an operand, and a tile that nothing else takes
    through a product to be added: two products with tiles that lie there already are less.
    """
    found: set[int] = set()
    users: dict[int, list[int]] = {}
    for n in kernel.body:
        for a in nodes[n].args:
            users.setdefault(a, []).append(n)
    for n in kernel.body if kernel.family == "walk" else ():
        last = n
        while len(users.get(last, ())) == 1 and nodes[users[last][0]].op == "mul":
            last = users[last][0]
        ends = users.get(last, ())
        read = len(ends) == 1 and nodes[ends[0]].op == "read" and nodes[ends[0]].args[0] == last
        stored = {n, last} & set(kernel.stores)
        if nodes[n].op == "add" and len(nodes[n].axes) == 2 and read and not stored:
            found.add(n)
    return frozenset(found)


def without_unused(lines: list[str], states: frozenset[str] = frozenset()) -> list[str]:
    """The lines without values that no other line uses; names are unique, so text tells."""
    kept = list(lines)
    while True:
        used = Counter(word for line in kept for word in re.findall(r"\w+", line))
        alone = [
            i for i, line in enumerate(kept)
            if (found := re.match(r"\s*(b_\w+) = ", line)) and used[found[1]] == 1 and found[1] not in states
        ]  # fmt: skip
        if not alone:
            return kept
        kept = [line for i, line in enumerate(kept) if i not in set(alone)]


def through_products(
    lines: list[str],
    rows: Collection[str],
    columns: Collection[str],
    again: Mapping[str, tuple[str, str]] | None = None,
    traced: Collection[str] = (),
) -> list[str]:
    """The lines of a loop in which tiles of short numbers that no product takes come by one.

    ``rows`` and ``columns``: the names of tiles as they were loaded, with tokens as rows or as columns.
    ``again``, in kernels whose products are looked at for NaN: of each a name for its numbers in float32, and
    how it is loaded once more where that product took what is not finite to other tokens. It is another load,
    as one that is used without a product does not run ahead. ``traced``: those that need no look at once.
    """
    for names, first in ((rows, True), (columns, False)):
        for name in names:
            value = re.compile(rf"\b{name}\.to\(tl\.float32\)")
            at = next((i for i, line in enumerate(lines) if value.search(line)), None)
            if at is None or any(f"{name}.to(DOT)" in line for line in lines):
                continue
            product = f"widened({name}, {UNIT}, DOT, ROWS={first})"
            if again is None:
                lines = [value.sub(product, line) for line in lines]
                continue
            wide, load = again[name]
            if lines[at].startswith(" "):  # in a branch that other uses do not share
                at = 1 + next(i for i, line in enumerate(lines) if line.startswith(f"{name} = "))
            seen = f"has_spread({wide}, {name}, C, DOT, ROWS={first}, LOOK=LOOK)"
            lines = [
                *lines[:at],
                f"{wide} = {product}",
                f"if {ALWAYS if name in traced else seen}:",
                f"    {wide} = {load}.to(tl.float32)",
                *(value.sub(wide, line) for line in lines[at:]),
            ]
    return lines


def looking_always(lines: Sequence[str], cleaned: Mapping[str, tuple[str, str]]) -> list[str]:
    """The lines of a loop that takes it for granted that something is not finite.

    What stands in branches for then stands in place of what is formed else. ``cleaned``: products in two
    parts, the second added behind the sum that takes the first, if one does: the compiler begins a product
    with what it is added to, here as in the loop that does not look, and bits are the same.
    """
    out: list[str] = []
    inside: str | None = None
    before = 0
    for line in lines:
        bare = line.lstrip()
        indent = line[: len(line) - len(bare)]
        if inside is not None and len(indent) > len(inside):
            name = _assigned(bare)
            if before and _assigned(out[before - 1]) == name is not None:
                del out[before - 1]
                before = 0
            out.append(inside + (f"{name} = {cleaned[name][0]}" if name and name in cleaned else bare))
            continue
        inside, before = (indent if re.match(r"if .*\bLOOK\b.*:$", bare) else None), len(out)
        if inside is None:
            out.append(line)
    for name, (_, lost) in cleaned.items():
        at = next((i for i, line in enumerate(out) if _assigned(line) == name), None)
        if at is None:
            continue
        users = [i for i, line in enumerate(out) if i != at and re.search(rf"\b{name}\b", line)]
        total = (
            re.match(rf"(\w+) = (\w+ \+ {name}|{name} \+ \w+)$", out[users[0]]) if len(users) == 1 else None
        )
        place, to = (users[0], total[1]) if total else (at, name)
        out.insert(place + 1, f"{to} = {to} + {lost}")
    return out


def _assigned(line: str) -> str | None:
    found = re.match(r"\s*(\w+) = ", line)
    return found and found[1]


def uses(text: str, name: str) -> bool:
    """Whether a text mentions a name."""
    return re.search(rf"\b{name}\b", text) is not None
