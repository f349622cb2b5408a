"""The section with the generated code."""

from __future__ import annotations

from linalg_dsl.report.code import Function
from linalg_dsl.report.markup import Markup, join, tag
from linalg_dsl.report.parts import Part


def code(part: Part, prefix: str) -> Markup:
    out: list[str] = [
        tag("p", "The number before a statement is that of its equation, and leads there; from there a chip "
                 "leads to the line. Launchers, tables of block sizes and helpers are left out: ",
            tag("code", "op.source(…)"), " has the whole modules."),
    ]  # fmt: skip
    for backend, title in (("torch", "PyTorch"), ("triton", "Triton")):
        out.append(tag("h3", title))
        out += [
            _function(f, part, prefix, opened=backend == "torch" and i == 0)
            for i, f in enumerate(part.code[backend])
        ]
    return join(*out)


def _function(f: Function, part: Part, prefix: str, *, opened: bool) -> Markup:
    short = f.name.removeprefix(f"{part.spec.name}_")
    lines = []
    for line in f.lines:
        to: Markup = tag("span", class_="to")
        if line.equation is not None:
            n = line.equation + 1
            to = tag(
                "a", str(n), href=f"#{prefix}-e{n}", title=str(part.equations[line.equation]), class_="to"
            )
        lines.append(tag("span", to, line.text or " ", class_="ln"))
    numbers = ", ".join(str(e + 1) for e in f.equations)
    named = tag("span", f"equations {numbers}" if numbers else "", class_="note")
    return tag(
        "details", tag("summary", tag("code", f.name), " ", named),
        tag("pre", *lines), id=f"{prefix}-k-{short}", open="open" if opened else None,
    )  # fmt: skip
