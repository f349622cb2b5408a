"""Mathematics, prose and tables as markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from linalg_dsl.language.latex import to_latex
from linalg_dsl.language.mathml import to_mathml, to_mathml_terms
from linalg_dsl.report.markup import Markup, join, tag


def math(text: str) -> Markup:
    """A formula, its LaTeX as a hint for copying."""
    made = to_mathml(text)
    return Markup(made.replace("<math ", f'<math title="{escape(to_latex(text))}" ', 1))


def equation(left: str, right: str, note: str = "") -> Markup:
    """An equation that may be broken between the terms of its right-hand side."""
    head = to_mathml(f"{left} =")
    behind = [tag("span", f" ({note})", class_="note")] if note else []
    return tag("span", *(Markup(x) for x in (head, *to_mathml_terms(right))), *behind, class_="eq")


_FORMULA = re.compile(
    r"[^\W\d_]\w*?_(?:\{[^}]*\}|[tC0](?![^\Wᵀ]))ᵀ? | [ΛRσ][₀-₉]*\[[^\]]*\] | ⟨[^⟩]*⟩(?:_τ)?ᴿ?(?:\[[^\]]*\])?"
    r" | Σ_(?:\{[^}]*\}|[KVt](?!\w)) | tril₋ | d?G\^[BQ][₀-₉]* | [^\W\d_]+[₀-₉]+",
    re.VERBOSE,
)


def prose(text: str) -> Markup:
    """A sentence, the names and signs of formulas in it as mathematics."""
    out: list[str] = []
    at = 0
    for found in _FORMULA.finditer(text):
        out += [text[at : found.start()], math(found[0])]
        at = found.end()
    return join(*out, text[at:])


def split_line(line: str) -> Markup:
    left, _, right = line.partition(" = ")
    return equation(left, right)


def item(line: str) -> Markup:
    return tag("li", prose(line))


def table(head: Sequence[str], rows: Sequence[Markup], numbers: Iterable[int] = ()) -> Markup:
    """A table in a frame that scrolls; ``numbers``: the columns of numbers."""
    right = set(numbers)
    cells = [tag("th", text, class_="n" if i in right else None) for i, text in enumerate(head)]
    top = [tag("thead", tag("tr", *cells))] if any(head) else []
    return tag("div", tag("table", *top, tag("tbody", *rows)), class_="scroll")


def row(texts: Iterable[str], numbers: Iterable[int] = (), class_: str | None = None) -> Markup:
    right = set(numbers)
    cells = (tag("td", x, class_="n" if i in right else None) for i, x in enumerate(texts))
    return tag("tr", *cells, class_=class_)


def three(x: float) -> str:
    """A number with three digits that tell, and no exponent."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"
