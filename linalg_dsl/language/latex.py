"""The mathematics that this package prints, as LaTeX: one writer for expressions and equations."""

from __future__ import annotations

import re
import unicodedata

from linalg_dsl.language.notation import GREEK, LETTERS, SUBSCRIPTS, Atom, Group, Item, Row, Script, read

_NAMES = {letter: name for name, letter in LETTERS.items()}
_CAPITALS = {"Λ": r"\Lambda", "Σ": r"\Sigma", "Γ": r"\Gamma", "Δ": r"\Delta", "Θ": r"\Theta", "Φ": r"\Phi",
             "Ψ": r"\Psi", "Ω": r"\Omega", "Π": r"\Pi"}  # fmt: skip
_SIGNS = {
    "ᵀ": r"\top", "⊙": r"\odot", "∘": r"\circ", "−": "-", "←": r"\leftarrow ", "≤": r"\le ",
    "≥": r"\ge ", "⟨": r"\langle ", "⟩": r"\rangle ", "→": r"\to ", "·": r"\cdot ", "…": r"\dots ",
    "∞": r"\infty ", "|": r",\,", "ₜ": "t", "₋": "-", "*": r"\cdot ", "Σ": r"\textstyle\sum",
}  # fmt: skip
_BRACKETS = {"⟨": r"\langle ", "⟩": r"\rangle", "{": r"\{", "}": r"\}", "|": r"\vert "}
_FUNCTIONS = {"exp": r"\exp", "log": r"\log", "tanh": r"\tanh", "min": r"\min", "max": r"\max"}
_OVER = {"_τ": r"\tau", "ᴿ": "R", "_τᴿ": r"\tau,R"}
_ACCENTS = {
    "\u0300": "grave", "\u0301": "acute", "\u0302": "hat", "\u0303": "tilde", "\u0304": "bar",
    "\u0305": "bar", "\u0306": "breve", "\u0307": "dot", "\u0308": "ddot", "\u030c": "check",
}  # fmt: skip


def to_latex(text: str) -> str:
    """Translates a formula as printed by ``show_expr`` or ``equations``; the result needs amsmath."""
    return _tidied(_row(read(text)))


def _tidied(made: str) -> str:
    return re.sub(r" +(?=[ _^,)}]|$)", "", made).strip()


def _row(row: Row) -> str:
    return "".join(map(_item, row.items))


def _item(item: Item) -> str:
    match item:
        case Row():
            return _row(item)
        case Group(opening, body, closing):
            return f"{_BRACKETS.get(opening, opening)}{_row(body)}{_BRACKETS.get(closing, closing)}"
        case Script(base, kind, body):
            inside = _tidied(_row(body).replace(r" ,\, ", r",\,"))
            mark = "_" if kind == "sub" else "^"
            before = _item(base)
            if isinstance(base, Script) and (base.kind == kind or isinstance(base.base, Script)):
                before = f"{{{before}}}"  # a second index of one kind needs a group of its own
            return f"{before}{mark}{{{inside}}}"
        case Atom("differential", _):
            return r"\mathrm{d}"
        case Atom("name", text):
            return _OVER.get(text) or _name(text)
        case Atom("number", text):
            return "".join(str(SUBSCRIPTS.index(c)) if c in SUBSCRIPTS else c for c in text)
        case Atom("sign", text):
            return _SIGNS.get(text, text)
        case _:
            return str(item)


def _name(base: str) -> str:
    letters = unicodedata.normalize("NFD", base)
    if len(letters) == 2 and letters[1] in _ACCENTS:
        return rf"\{_ACCENTS[letters[1]]}{{{_name(letters[0]).strip()}}}"
    if base in _FUNCTIONS:
        return _FUNCTIONS[base]
    if base in GREEK:
        return f"\\{base} "
    if base in _NAMES:
        return f"\\{_NAMES[base]} "
    if base in _CAPITALS:
        return f"{_CAPITALS[base]} "
    if len(base) == 1:
        return base
    escaped = base.replace("_", r"\_")
    return rf"\mathrm{{{escaped}}}"
