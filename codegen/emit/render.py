"""Fills templates: what a template asks for and what it is given must match exactly."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.resources
from typing import TYPE_CHECKING

from linalg_dsl.errors import InternalError

if TYPE_CHECKING:
    import jinja2
    from _typeshed import DataclassInstance


def render(template: str, context: DataclassInstance) -> str:
    """The text of ``template`` with the fields of ``context`` filled in.

    Raises ``InternalError`` if a field is missing or never used: a template and its context class are
    written together.
    """
    fields = {f.name for f in dataclasses.fields(context)}
    wanted = template_variables(template)
    if wanted != fields:
        raise InternalError(
            f"template {template}: not given {sorted(wanted - fields)}, not used {sorted(fields - wanted)}"
        )
    values = {name: getattr(context, name) for name in fields}
    return _environment().get_template(template).render(values)


@functools.cache
def template_variables(template: str) -> frozenset[str]:
    """The free variables of a template and of those it includes."""
    import jinja2.meta

    tree = _environment().parse(template_text(template))
    found = set(jinja2.meta.find_undeclared_variables(tree))
    for part in jinja2.meta.find_referenced_templates(tree):
        if part is None:
            raise InternalError(f"template {template} includes a template by a computed name")
        found |= template_variables(part)
    return frozenset(found)


def template_text(template: str) -> str:
    """The source of a template; also what a cache key has to depend on."""
    return (importlib.resources.files("linalg_dsl.templates") / template).read_text(encoding="utf-8")


def functions_of(text: str) -> dict[str, str]:
    """The source of each function of a module, decorators included."""
    lines = text.splitlines()
    out = {}
    for item in ast.parse(text).body:
        if isinstance(item, ast.FunctionDef):
            first = min([item.lineno, *(d.lineno for d in item.decorator_list)])
            out[item.name] = "\n".join(lines[first - 1 : item.end_lineno])
    return out


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(template_text),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # the text is Python, not HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
