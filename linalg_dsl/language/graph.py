"""Strongly connected names: those that need each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def components(graph: Mapping[str, Collection[str]]) -> dict[str, int]:
    """A number per node, the same for two that reach each other; edges to other names are ignored.

    Kosaraju's two sweeps, without recursion: a text may hold thousands of names in a row.
    """
    order: list[str] = []
    seen: set[str] = set()
    for root in graph:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(graph[root]))]
        while stack:
            node, rest = stack[-1]
            following = next((n for n in rest if n in graph and n not in seen), None)
            if following is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(graph[following])))
    turned: dict[str, list[str]] = {name: [] for name in graph}
    for name, others in graph.items():
        for other in others:
            if other in turned:
                turned[other].append(name)
    number: dict[str, int] = {}
    for count, root in enumerate(reversed(order)):
        todo = [root]
        while todo:
            node = todo.pop()
            if node not in number:
                number[node] = count
                todo.extend(turned[node])
    return number
