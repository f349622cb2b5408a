"""The mathematics that this package prints, as presentation MathML: one writer for expressions and equations.

Only elements of MathML Core are used, which browsers draw by themselves.
"""

from __future__ import annotations

from html import escape

from linalg_dsl.language.notation import LETTERS, SUBSCRIPTS, Atom, Group, Item, Row, Script, read

_BINARY = frozenset("+-−*/·⊙∘=<>≤≥←→:")
_SHOWN = {"-": "−", "*": "·", "ᵀ": "⊤", "₋": "−", "ₜ": "t", "'": "′"}
_TIGHT = ' lspace="0" rspace="0"'
_GAP = '<mspace width="0.17em"/>'


def to_mathml(text: str) -> str:
    """A formula as printed by ``show_expr`` or ``equations``, as one inline ``<math>`` element."""
    return _math(_row(read(text)))


def to_mathml_terms(text: str) -> tuple[str, ...]:
    """The terms of a sum, an element each: a page can break lines between them."""
    return tuple(_math(_row(term, infix=i > 0)) for i, term in enumerate(read(text).terms()))


def _math(inside: str) -> str:
    return f'<math xmlns="http://www.w3.org/1998/Math/MathML">{inside}</math>'


def _row(row: Row, infix: bool = False) -> str:
    """``infix``: a sign at the beginning stands between this row and another."""
    items = row.items
    made = []
    for i, item in enumerate(items):
        before = items[i - 1] if i else None
        after = items[i + 1] if i + 1 < len(items) else None
        if isinstance(item, Atom) and item.kind == "space":
            made.append("" if _spaces_itself(before) or _spaces_itself(after) else _GAP)
        elif isinstance(item, Atom) and item.kind == "sign":
            left = next((x for x in reversed(items[:i]) if str(x) != " "), None)
            after_value = infix if left is None else not (isinstance(left, Atom) and left.kind == "sign")
            made.append(_sign(item.text, after_value))
        else:
            made.append(_item(item))
    return "".join(made)


def _spaces_itself(item: Item | None) -> bool:
    """Whether a sign brings the space around it."""
    return item is None or (
        isinstance(item, Atom) and item.kind == "sign" and item.text in {*_BINARY, ",", ";"}
    )


def _sign(text: str, infix: bool) -> str:
    shown = escape(_SHOWN.get(text, text))
    if text in ",;":
        return f'<mo separator="true">{shown}</mo>'
    if text not in _BINARY or not infix:
        form = ' form="prefix"' if text in "+-−" else ""
        return f"<mo{form}{_TIGHT}>{shown}</mo>"
    space = "0.12em" if text in "/:" else "0.22em"
    return f'<mo form="infix" lspace="{space}" rspace="{space}">{shown}</mo>'


def _item(item: Item) -> str:
    match item:
        case Row():
            return f"<mrow>{_row(item)}</mrow>"
        case Group(opening, body, closing):
            marks = (f'<mo stretchy="false"{_TIGHT}>{escape(c)}</mo>' for c in (opening, closing))
            return f"<mrow>{next(marks)}{_row(body)}{next(marks)}</mrow>"
        case Script(Script(base, "sub", below), "sup", above):
            return f"<msubsup>{_item(base)}{_inside(below)}{_inside(above)}</msubsup>"
        case Script(Script(base, "sup", above, _, False), "sub", below):
            return f"<msubsup>{_item(base)}{_inside(below)}{_inside(above)}</msubsup>"
        case Script(base, kind, body):
            return f"<m{kind}>{_item(base)}{_inside(body)}</m{kind}>"
        case Atom("differential", _):
            return '<mi mathvariant="normal">d</mi>'
        case Atom("name", text):
            return f"<mi>{escape(_name(text))}</mi>"
        case Atom("number", text):
            plain = "".join(str(SUBSCRIPTS.index(c)) if c in SUBSCRIPTS else c for c in text)
            return f"<mn>{plain}</mn>"
        case Atom("sign", text):
            return _sign(text, False)
        case _:
            return _GAP


def _inside(body: Row) -> str:
    """An index: one element, with no space around its signs, and a comma for the bar before a condition."""
    made = ('<mo separator="true">,</mo>' if str(i) == "|" else _item(i) for i in body.items if str(i) != " ")
    return f"<mrow>{''.join(made)}</mrow>"


def _name(text: str) -> str:
    return {"_τ": "τ", "_τᴿ": "τR", "ᴿ": "R"}.get(text) or LETTERS.get(text, text)
