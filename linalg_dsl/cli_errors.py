"""What ``linalg-dsl explain-error`` prints: what a code means, with a wrong and a right example."""

from __future__ import annotations

import textwrap
from typing import Any

from linalg_dsl.errors import ArgumentError, DslError
from linalg_dsl.language.code_examples import EXAMPLES, Example
from linalg_dsl.language.codes import EXPLANATIONS, explain
from linalg_dsl.planner.classes import NO_CHUNK_FORM


def overview() -> tuple[str, list[dict[str, Any]]]:
    """Every code with the first sentence of its explanation."""
    rows = [{"code": c, "means": explain(c).partition(". ")[0].rstrip(".")} for c in sorted(EXPLANATIONS)]
    return "\n".join(f"{r['code']}  {r['means']}" for r in rows), rows


def error_page(code: str) -> tuple[str, dict[str, Any]]:
    """The text and the same as data. Raises ArgumentError for a code that does not exist."""
    name = code.upper()
    if name not in EXPLANATIONS:
        known = ", ".join(sorted(EXPLANATIONS))
        raise ArgumentError(f"there is no code {code!r}; the codes are {known}")
    example = EXAMPLES[name]
    message = message_of(example)
    parts = [textwrap.fill(f"{name}: {explain(name)}", 100), f"wrong:\n\n{_indented(example.wrong)}"]
    if message:
        parts.append(f"which is answered with\n\n{_indented(message)}")
    if name in NO_CHUNK_FORM:
        parts.append(
            "No chunk form is no mistake: where it can, it runs token after token, and a warning says why."
        )
    parts.append(f"right:\n\n{_indented(example.right)}")
    data = {
        "code": name,
        "explanation": explain(name),
        "wrong": example.wrong,
        "message": message,
        "right": example.right,
    }
    return "\n\n".join(parts), data


def message_of(example: Example) -> str:
    """What the wrong example is answered with; empty for Python, which is shown and not run."""
    if example.kind == "python":
        return ""
    from linalg_dsl.language.parser import parse

    try:
        spec = parse(example.wrong)
        from linalg_dsl.planner.canonical import canonicalise
        from linalg_dsl.planner.split import split

        stages = split(spec)
        for stage in stages.stages if not stages.is_whole else ():
            canonicalise(stage.spec)
        canonicalise(spec)
    except DslError as error:
        return str(error)
    return ""


def _indented(text: str) -> str:
    return textwrap.indent(text.rstrip(), "    ")
