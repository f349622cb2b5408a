"""A part of a generated module: one function with everything that it calls."""

from __future__ import annotations

import ast

from linalg_dsl.errors import InternalError


def part_of(text: str, root: str) -> str:
    """The module's head, the function ``root`` and all that it uses, in their order in the module.

    What counts as a head: comments before the first statement, imports, and assignments that are used.
    """
    tree = ast.parse(text)
    lines = text.splitlines()
    statements: dict[str, ast.stmt] = {}
    for node in tree.body:
        for name in _defined(node):
            statements[name] = node
    if root not in statements:
        raise InternalError(f"the generated module has no {root}")
    need: set[str] = set()
    todo = [root]
    while todo:
        name = todo.pop()
        if name in statements and name not in need:
            need.add(name)
            todo.extend(n.id for n in ast.walk(statements[name]) if isinstance(n, ast.Name))
    kept = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom)) or need & set(_defined(n))]
    first = tree.body[0].lineno - 1 if tree.body else len(lines)
    pieces = ["\n".join(lines[:first]).rstrip()]
    previous: ast.stmt | None = None
    for node in kept:
        source = "\n".join(lines[_start(node) - 1 : node.end_lineno])
        apart = isinstance(node, ast.FunctionDef) or isinstance(previous, ast.FunctionDef)
        pieces.append(("\n\n" if apart else "\n" if type(node) is not type(previous) else "") + source)
        previous = node
    return "\n".join(pieces).lstrip("\n") + "\n"


def _defined(node: ast.stmt) -> tuple[str, ...]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.Assign(targets=targets):
            return tuple(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
        case _:
            return ()


def _start(node: ast.stmt) -> int:
    """The first line, decorators included."""
    decorators = node.decorator_list if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
    return min([node.lineno, *(d.lineno for d in decorators)])
