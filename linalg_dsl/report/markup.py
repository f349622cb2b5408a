"""Elements of a page that is well-formed both as HTML and as XML."""

from __future__ import annotations

from html import escape

VOID = frozenset({"meta", "br", "img", "path", "rect", "line", "circle", "stop", "use"})
"""Elements without content: closed in place, as SVG's may be."""


class Markup(str):
    """Text that is markup already; any other text is escaped where it is put in."""

    __slots__ = ()


def text(content: str) -> Markup:
    return content if isinstance(content, Markup) else Markup(escape(content, quote=False))


def tag(element: str, *children: str, **attributes: str | float | None) -> Markup:
    """``tag("a", "x < y", href="#e1")``; ``class_`` is class, ``_`` in a name is ``-``, None is left out."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if element in VOID:
        if any(children):
            raise ValueError(f"<{element}> takes no content")
        return Markup(f"<{element}{named} />")
    return Markup(f"<{element}{named}>{''.join(map(text, children))}</{element}>")


def join(*pieces: str) -> Markup:
    return Markup("".join(map(text, pieces)))
