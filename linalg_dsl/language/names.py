"""Names: which are reserved, how they are folded, and how they are spelled in ASCII."""

from __future__ import annotations

import unicodedata

from linalg_dsl.algebra.expr import FUNCTIONS

RESERVED = frozenset(FUNCTIONS) | {"diag", "Diag", "outer", "I", "K", "V", "T", "t", "inf"}
DIMENSIONS = ("K", "V")
LONGEST = 64


def fold(word: str) -> str:
    """The name a word stands for: NFKC, so that ``𝑘`` and ``k``, ``k₁`` and ``k1`` are one name."""
    return unicodedata.normalize("NFKC", word)


def is_name(name: str) -> bool:
    return name.isidentifier() and len(name) <= LONGEST and not name.startswith("_")


def free_name(wanted: str, taken: set[str]) -> str:
    """``wanted``, or with the first number from 2 that is free; it is ``taken`` then."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


def ascii_name(name: str) -> str:
    """The ASCII spelling: Greek letters by their names, ``k̂`` as ``k_hat``, others by code point.

    Different names may share one spelling (``α`` and ``alpha``); a spec never holds two such names.
    """
    parts = [_ascii_letter(c) for c in unicodedata.normalize("NFKD", name)]
    return "".join(parts)


_MARKS = {
    "\u0302": "_hat", "\u0303": "_tilde", "\u0304": "_bar", "\u0305": "_bar", "\u0307": "_dot",
    "\u0308": "_ddot", "\u030c": "_check", "\u0306": "_breve", "\u20d7": "_vec",
}  # fmt: skip


def _ascii_letter(char: str) -> str:
    if char.isascii():
        return char
    if char in _MARKS:
        return _MARKS[char]
    words = unicodedata.name(char, "").split()
    if words[:1] == ["GREEK"] and "LETTER" in words:
        spelled = words[words.index("LETTER") + 1 :]
        if spelled[0] == "FINAL":
            spelled = spelled[1:]
        letter = {"LAMDA": "lambda"}.get(spelled[0], spelled[0].lower())
        return letter.capitalize() if "CAPITAL" in words else letter
    return f"_u{ord(char):x}"
