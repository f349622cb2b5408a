"""The page: what a recurrence is, what was derived from it, what it costs, and its code, in one file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from importlib.resources import files

from linalg_dsl.language.mathml import to_mathml
from linalg_dsl.planner.stages import Stages
from linalg_dsl.report import sections
from linalg_dsl.report.costs import costs
from linalg_dsl.report.figures import dataflow, kernels
from linalg_dsl.report.listing import code
from linalg_dsl.report.markup import Markup, join, tag
from linalg_dsl.report.parts import Part

_SECTIONS = (
    ("line", "The line"),
    ("form", "Rewrites"),
    ("equations", "Equations"),
    ("dataflow", "Dataflow"),
    ("kernels", "Kernels"),
    ("costs", "Costs"),
    ("stability", "Stability"),
    ("code", "Code"),
)


def make_page(steps: Stages, verdict: str, parts: Sequence[Part]) -> str:
    """A whole HTML document, well-formed as XML too, that refers to nothing outside itself."""
    spec = steps.spec
    whole = steps.is_whole
    body: list[Markup] = [
        tag(
            "header", tag("h1", spec.name), *(tag("p", line) for line in spec.doc.split("\n\n") if line),
            tag("p", verdict.removeprefix(f"{spec.name}: "), class_="verdict"),
        )
    ]  # fmt: skip
    body.append(_navigation(steps, whole))
    main: list[str] = []
    if not whole:
        main += [
            tag("h2", "The line", id="line"), tag("pre", str(spec), class_="text"),
            tag("h2", "One stage after the other", id="steps"),
            tag("pre", "\n".join(x for step in steps.steps for x in step.headline), class_="text"),
        ]  # fmt: skip
    for i, (part, stage) in enumerate(zip(parts, steps.stages, strict=True), 1):
        prefix = f"s{i}"
        if not whole:
            axes = ", ".join(f"{a} is {b} of {spec.name}" for a, b in stage.axes if a != b)
            main.append(tag("h1", f"Stage {i} of {len(parts)}: {stage.spec.name}", class_="stage", id=prefix))
            main.append(
                tag(
                    "p",
                    part.explanation.verdict.removeprefix(f"{stage.spec.name}: "),
                    f" ({axes})" if axes else "",
                    class_="verdict",
                )
            )
        main.append(_stage(part, prefix))
    body.append(tag("main", *main))
    return document(f"{spec.name}: derivation, kernels, costs", *body)


def document(title: str, *body: Markup) -> str:
    """A whole page around a body."""
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup((files("linalg_dsl.report") / "page.css").read_text(encoding="utf-8"))),
    )
    footer = tag("footer", f"Made by linalg_dsl {version('linalg_dsl')}.")
    html = tag("html", tag("head", head), tag("body", *body, footer), lang="en")
    return f"<!DOCTYPE html>\n{html}\n"


def _navigation(steps: Stages, whole: bool) -> Markup:
    if whole:
        links = [tag("li", tag("a", title, href=f"#s1-{key}")) for key, title in _SECTIONS]
    else:
        links = [tag("li", tag("a", "The line", href="#line")), tag("li", tag("a", "Steps", href="#steps"))]
        links += [
            tag("li", tag("a", stage.spec.name, href=f"#s{i}")) for i, stage in enumerate(steps.stages, 1)
        ]
    return tag("nav", tag("ol", *links))


def _stage(part: Part, prefix: str) -> Markup:
    made = {
        "line": sections.the_line(part, prefix),
        "form": sections.rewrites(part),
        "equations": sections.equations(part, prefix),
        "dataflow": dataflow(part, prefix),
        "kernels": kernels(part, prefix),
        "costs": costs(part),
        "stability": sections.stability(part),
        "code": code(part, prefix),
    }
    return tag(
        "section", *(join(tag("h2", title, id=f"{prefix}-{key}"), made[key]) for key, title in _SECTIONS)
    )


def snippet(lines: Sequence[tuple[str, str]], title: str) -> str:
    """A few equations for a notebook's cell."""
    rows = "".join(f"<div>{to_mathml(f'{left} = {right}')}</div>" for left, right in lines)
    return f'<div><strong>{escape(title)}</strong><div style="line-height:2">{rows}</div></div>'
