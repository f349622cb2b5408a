"""Identifiers of generated code: ASCII, unique within one function, never a keyword."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Iterable

from linalg_dsl.language.names import free_name

_MARKS = {
    "COMBINING CIRCUMFLEX ACCENT": "hat",
    "COMBINING TILDE": "tilde",
    "COMBINING MACRON": "bar",
    "COMBINING OVERLINE": "bar",
    "COMBINING DOT ABOVE": "dot",
    "COMBINING DIAERESIS": "ddot",
    "COMBINING CARON": "check",
    "COMBINING RIGHT ARROW ABOVE": "vec",
}
_SIGNS = {
    "ᵀ": "^T", "⊤": "^T", "·": "*", "⊙": ".*", "∘": ".*", "−": "-", "≤": "<=", "≥": ">=",
    "∈": "in", "√": "sqrt", "→": "->", "←": "<-", "×": "x", "∞": "inf",
}  # fmt: skip

RESERVED = frozenset((
    *keyword.kwlist, *keyword.softkwlist,
    "torch", "Tensor", "triton", "tl", "math", "range", "len", "zip", "enumerate", "list", "tuple", "dict",
    "set", "int", "float", "bool", "str", "min", "max", "sum", "abs", "pow", "print", "slice", "type", "self",
))  # fmt: skip
"""Words that a name of a spec may not take in generated code: Python's, and what modules import."""


def ascii_identifier(name: str) -> str:
    """A Python identifier of ASCII letters that still reads like ``name``: α_1 is alpha_1, k̂ is k_hat."""
    pieces: list[str] = []
    for char in unicodedata.normalize("NFD", unicodedata.normalize("NFKC", name)):
        if char.isascii():
            pieces.append(char if char.isalnum() or char == "_" else "_")
        elif unicodedata.combining(char):
            words = unicodedata.name(char, "COMBINING MARK").lower().split()
            pieces.append(f"_{_MARKS.get(unicodedata.name(char, ''), words[1])}")
        else:
            pieces.append(_latin(char, after=pieces[-1] if pieces else ""))
    text = re.sub(r"__+", "_", "".join(pieces)) if not name.isascii() else "".join(pieces)
    if not text or text[0].isdigit():
        text = f"x{text}"
    return text


def ascii_text(text: str) -> str:
    """Mathematics for a comment of generated code, in ASCII."""
    return "".join(c if c.isascii() else _SIGNS.get(c) or ascii_identifier(c) for c in text)


class Names:
    """Hands out identifiers, each once: the wanted name, or with a number when it is taken."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = set(RESERVED) | set(reserved)

    def reserve(self, words: Iterable[str]) -> None:
        """Takes words that the text around uses."""
        self._taken |= set(words)

    def unique(self, wanted: str) -> str:
        return free_name(ascii_identifier(wanted), self._taken)


def _latin(char: str, after: str) -> str:
    """The letter's own name: GREEK SMALL LETTER ALPHA is alpha, a capital one Alpha."""
    words = unicodedata.name(char, "").split()
    if "LETTER" in words and words.index("LETTER") + 1 < len(words):
        rest = [w for w in words[words.index("LETTER") + 1 :] if w.isascii() and w.isalnum()]
        if rest:
            letter = rest[0].capitalize() if "CAPITAL" in words else rest[0].lower()
            return f"_{letter}" if after and after[-1].isalpha() else letter
    return f"u{ord(char):x}"
