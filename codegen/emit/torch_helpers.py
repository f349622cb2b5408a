"""The functions that generated PyTorch modules import, and that exported files hold."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterable

from linalg_dsl.codegen.emit.render import functions_of, template_text

LIBRARY = "linalg_dsl.templates.torch_library"
WIDTH = 100


def library_import(names: Iterable[str]) -> str:
    """The statements that import torch and these functions of the library."""
    wrapped = textwrap.wrap(", ".join(sorted(set(names))), WIDTH - 4)
    lines = [f"    {line}" for line in wrapped]
    return "\n".join(["import torch", "", f"from {LIBRARY} import (", *lines, ")"])


def helper_sources(used: Iterable[str]) -> tuple[str, ...]:
    """The sources of functions of the library and of those they call, in the library's order."""
    need: set[str] = set()
    todo = list(used)
    while todo:
        name = todo.pop()
        if name not in need:
            need.add(name)
            todo.extend(_calls()[name])
    return tuple(source for name, source in _library().items() if name in need)


def inlined(text: str) -> str:
    """A generated module with the library's functions in it instead of their import."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module == LIBRARY:
            lines = text.splitlines()
            head, rest = lines[: node.lineno - 1], lines[node.end_lineno :]
            sources = helper_sources(alias.name for alias in node.names)
            return "\n".join([*head, *rest]).rstrip() + "\n\n\n" + "\n\n\n".join(sources) + "\n"
    return text


@functools.cache
def _library() -> dict[str, str]:
    return functions_of(template_text("torch_library.py"))


@functools.cache
def _calls() -> dict[str, frozenset[str]]:
    """Which functions of the library each of them mentions."""
    return {
        name: frozenset(n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name))
        & set(_library())
        for name, source in _library().items()
    }
