"""The sections of the page for one stage: the line and what was derived from it."""

from __future__ import annotations

from collections.abc import Sequence

from linalg_dsl.algebra.expr import Dim
from linalg_dsl.language.printer import show_expr, show_range
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.planner.equations import legend
from linalg_dsl.planner.verdict import Explanation
from linalg_dsl.planner.verdict_form import form_line
from linalg_dsl.report.markup import Markup, join, tag
from linalg_dsl.report.parts import Part
from linalg_dsl.report.text import equation, item, math, prose, row, split_line, table


def declarations(spec: RecurrenceSpec) -> Markup:
    """Every declared name with its layout and what is promised of it."""
    rows = [row((math(i.name), tag("code", _layout(i)), _promise(i))) for i in spec.inputs]
    rows += [
        row((math(c.name), math(show_expr(c.value)), "a number, fixed when it is compiled"))
        for c in spec.consts
    ]
    rows += [
        row(
            (
                math(s.name),
                tag("code", _listed("B", "H", *s.dims)),
                f"state, from {s.start:g}",
            )
        )
        for s in spec.states
    ]
    return table(("name", "layout", "promised"), rows)


def _layout(i: Input) -> str:
    return _listed(*(("B", "T", "H") if i.timed else ("H",)), *i.dims)


def _listed(*dims: Dim) -> str:
    return f"[{', '.join(map(str, dims))}]"


def _promise(i: Input) -> str:
    kind = {"plain": "", "log_gate": "log gate", "gate": "gate"}[i.kind]
    words = [kind, "unit" if i.unit else "", "param" if not i.timed else ""]
    if i.range.low is not None or i.range.high is not None:
        words.append(show_range(i.range))
    return ", ".join(w for w in words if w)


def the_line(part: Part, prefix: str) -> Markup:
    lines = [
        tag("li", tag("span", f"ℓ{i}", class_="no"), split_line(line), tag("span"), id=f"{prefix}-l{i}")
        for i, line in enumerate(part.explanation.line, 1)
    ]
    return join(tag("ol", *lines, class_="eqs"), declarations(part.spec))


def rewrites(part: Part) -> Markup:
    found = part.explanation
    if not isinstance(found, Explanation):
        return join(
            tag("p", "There is no chunk form, so this recurrence is computed token after token:"),
            tag("ul", *map(item, found.form.reasons)),
        )
    steps = [
        tag(
            "li", tag("strong", r.rule), prose(f": {r.reason}") if r.reason else "",
            tag("span", math(r.before), class_="step"), tag("span", "→ ", math(r.after), class_="step"),
        )
        for r in found.canonical.rewrites
    ]  # fmt: skip
    form = [
        tag("li", tag("span", class_="no"), equation(e.left, e.right), tag("span", e.note, class_="note"))
        for e in found.form
    ]
    return join(
        tag("ol", *steps, class_="rewrites")
        if steps
        else tag("p", "None needed: the line is in form (1) as it stands."),
        tag("h3", "Form (1): "),
        *(tag("p", split_line(line)) for line in form_line(found.canonical)),
        tag("ol", *form, class_="eqs"),
        *([tag("h3", "Why no faster class"), tag("ul", *map(item, found.missed))] if found.missed else []),
    )


def equations(part: Part, prefix: str) -> Markup:
    origins = part.origins
    in_kernels: dict[int, list[str]] = {}
    for launch in part.launches:
        for e in launch.equations:
            in_kernels.setdefault(e, []).append(launch.name)
    chunk = isinstance(part.explanation, Explanation)
    titles = ("One chunk, rows are tokens" if chunk else "One token", "Its gradients")
    halves = (range(origins.ahead), range(origins.ahead, len(origins.equations)))
    out: list[str] = []
    for title, numbers in zip(titles, halves, strict=True):
        rows = [_row(part, i, in_kernels.get(i, []) if chunk else None, prefix) for i in numbers]
        out += [tag("h3", title), tag("ol", *rows, class_="eqs")]
    meanings = legend(part.equations, part.explanation.forward)
    if meanings:
        out += [tag("h3", "Where"), tag("ul", *map(item, meanings), class_="soft")]
    if isinstance(part.explanation, Explanation):
        order = [_ordered(line) for line in part.explanation.order]
        out += [tag("h3", "In this order"), tag("ul", *order, class_="soft")]
    return join(*out)


def _ordered(line: str) -> Markup:
    """``when: name, name``, the names as mathematics."""
    when, _, names = line.rpartition(": ")
    shown = [part for name in names.split(", ") for part in (", ", math(name))]
    return tag("li", f"{when}: ", *shown[1:])


def _row(part: Part, i: int, kernels: Sequence[str] | None, prefix: str) -> Markup:
    """``kernels`` that form an equation; None where they are not told apart by it."""
    e = part.equations[i]
    chips = [tag("a", f"ℓ{n + 1}", href=f"#{prefix}-l{n + 1}", class_="chip") for n in part.origins.lines[i]]
    chips += [tag("a", name, href=f"#{prefix}-k-{name}", class_="chip") for name in kernels or ()]
    if kernels is not None and not kernels:  # it is only a step of another, which kernels form as a whole
        chips.append(tag("span", "within others", class_="note"))
    return tag(
        "li", tag("span", str(i + 1), class_="no"), equation(e.left, e.right, e.note),
        tag("span", *chips, class_="from"), id=f"{prefix}-e{i + 1}",
    )  # fmt: skip


def stability(part: Part) -> Markup:
    if isinstance(part.explanation, Explanation):
        found = part.explanation
        return tag("ul", *map(item, (*found.stability, *found.precision)))
    return tag(
        "p",
        "The equations of a token are computed one token after the other, as they stand: they are as stable "
        "as the line itself.",
    )
