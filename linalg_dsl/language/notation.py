"""The tree of a formula as this package prints it; LaTeX and MathML are written from it.

Expressions (``show_expr``) and equations of plans (``equations``) are printed in one notation. ``read`` gives
its tree, and ``str`` of the tree is the printed text again: nothing is lost, and nothing is printed twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
    "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
)  # fmt: skip
LETTERS = dict(zip(GREEK, "αβγδεζηθικλμνξπρστυφχψω", strict=True))
"""Greek letters by their names."""
SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
_CLOSING = {"(": ")", "[": "]", "⟨": "⟩", "{": "}", "|": "|"}
_ACCENTED = re.compile(r".[\u0300-\u036f]?")
_LETTER = r"[^\W\d_₀₁₂₃₄₅₆₇₈₉ᵀ]"
_TOKEN = re.compile(
    rf"""(?P<number>\d+(?:\.(?!\.)\d+)?(?:e[-+]?\d+)?)
      | (?P<sum>(?:Σ|max)_(?=\{{ | [^\W_]+\()|Σ_(?=[KV](?!\w)))
      | (?P<interval>(?:Λ|R|σ)(?=[₀₁₂₃₄₅₆₇₈₉]*\[))
      | (?P<score>d?G\^[BQ])
      | (?P<braces>_\{{)
      | (?P<row>_[tC0](?![^\W\d_]))
      | (?P<power>\^(?:\(|(?P<exponent>\w+)))
      | (?P<digits>[₀₁₂₃₄₅₆₇₈₉]+|₋|ₜ)
      | (?P<turned>ᵀ)
      | (?P<closed>⟩(?P<over>(?:_τ)?ᴿ?)(?P<pairs>\[)?)
      | (?P<word>{_LETTER}(?:_*(?:[^\W_₀₁₂₃₄₅₆₇₈₉ᵀ]|[\u0300-\u036f]))*)
      | (?P<space>\ +)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Atom:
    """A name, a number, a sign, the d of a gradient, or the space between two factors."""

    kind: Literal["name", "number", "sign", "differential", "space"]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Group:
    """Something in brackets of any kind."""

    opening: str
    body: Row
    closing: str

    def __str__(self) -> str:
        return f"{self.opening}{self.body}{self.closing}"


@dataclass(frozen=True, slots=True)
class Script:
    """``base`` with an index or exponent; ``marks`` is what the printed text has around ``body``.

    ``big``: the index of a sum, which names its range.
    """

    base: Item
    kind: Literal["sub", "sup"]
    body: Row
    marks: tuple[str, str] = ("", "")
    big: bool = False

    def __str__(self) -> str:
        return f"{self.base}{self.marks[0]}{self.body}{self.marks[1]}"


@dataclass(frozen=True, slots=True)
class Row:
    """Items side by side."""

    items: tuple[Item, ...]

    def __str__(self) -> str:
        return "".join(map(str, self.items))

    def terms(self) -> tuple[Row, ...]:
        """The terms of the sum that the row is, each after the first with its sign."""
        cuts = [
            i
            for i, item in enumerate(self.items)
            if isinstance(item, Atom) and item.text in "+-−" and i > 0 and str(self.items[i - 1]) == " "
        ]
        bounds = [0, *cuts, len(self.items)]
        return tuple(Row(self.items[a:b]) for a, b in pairwise(bounds))


Item = Atom | Group | Script | Row


def read(text: str) -> Row:
    """The tree of a printed formula: ``str(read(text)) == text``."""
    return _Reader(text).row(lambda: False)


def sign(text: str) -> Atom:
    return Atom("sign", text)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.inside_pairs = False

    def row(self, ends: Callable[[], bool]) -> Row:
        items: list[Item] = []
        while self.at < len(self.text) and not ends():
            found = _TOKEN.match(self.text, self.at)
            assert found is not None  # the last alternative takes any character
            self.at = found.end()
            self._take(found, items)
        return Row(tuple(items))

    def _take(self, found: re.Match[str], items: list[Item]) -> None:
        text, kind = found[0], found.lastgroup
        if found["closed"]:
            items.append(sign(text))  # no partner
            return
        match kind:
            case "number" | "space":
                items.append(Atom(kind, text))
            case "sum":
                base = sign("Σ") if text == "Σ_" else Atom("name", "max")
                if self.text[self.at] == "{":
                    self.at += 1
                    body, marks = self._until("}"), ("_{", "}")
                else:
                    axis = re.compile(r"[^\W_]+").match(self.text, self.at)
                    assert axis is not None
                    self.at = axis.end()
                    body, marks = Row((Atom("name", axis[0]),)), ("_", "")
                items.append(Script(base, "sub", body, marks, big=True))
            case "interval":
                decay: Item = Atom("name", text)
                digits = self.text[self.at : self.text.index("[", self.at)]
                if digits:  # one of several decays
                    decay = Script(decay, "sub", Row((Atom("number", digits),)))
                self.at += len(digits) + 1
                items.append(Script(decay, "sub", self._pairs(), ("[", "]")))
            case "score":
                if text[0] == "d":
                    items.append(Atom("differential", "d"))
                items.append(Script(Atom("name", "G"), "sup", Row((Atom("name", text[-1]),)), ("^", "")))
            case "braces":
                self._attach(items, "sub", self._until("}"), ("_{", "}"))
            case "row":
                self._attach(items, "sub", read(text[1]), ("_", ""))
            case "power" if found["exponent"]:
                self._attach(items, "sup", read(found["exponent"]), ("^", ""))
            case "power":
                self._attach(items, "sup", self._until(")"), ("^(", ")"))
            case "digits":
                self._attach(items, "sub", Row((Atom("number" if text[0] in SUBSCRIPTS else "sign", text),)))
            case "turned":
                self._attach(items, "sup", Row((sign(text),)))
            case "word":
                items += _word(text)
            case _:
                self._bracket(text, items)

    def _bracket(self, text: str, items: list[Item]) -> None:
        if text == "⟨":
            body = self.row(lambda: self.text[self.at] == "⟩")
            found = _TOKEN.match(self.text, self.at)
            if found is None or not found["closed"]:
                items += [sign(text), *body.items]
                return
            self.at = found.end()
            item: Item = Group("⟨", body, "⟩")
            if over := found["over"]:
                item = Script(item, "sup", Row((Atom("name", over),)))
            if found["pairs"]:
                item = Script(item, "sub", self._pairs(), ("[", "]"))
            items.append(item)
            return
        closing = _CLOSING.get(text)
        if closing is None or (text == "|" and self.inside_pairs):
            items.append(sign(text))
            return
        start = self.at
        body = self.row(lambda: self.text[self.at] == closing)
        if self.at >= len(self.text):  # no partner: a sign like any other
            self.at = start
            items.append(sign(text))
            return
        self.at += 1
        items.append(Group(text, body, closing))

    def _pairs(self) -> Row:
        """The pairs of tokens that an interval of decay names, up to its bracket."""
        self.inside_pairs = True
        body = self._until("]")
        self.inside_pairs = False
        return body

    def _until(self, closing: str) -> Row:
        body = self.row(lambda: self.text[self.at] == closing)
        self.at += 1
        return body

    def _attach(
        self, items: list[Item], kind: Literal["sub", "sup"], body: Row, marks: tuple[str, str] = ("", "")
    ) -> None:
        base = items.pop() if items else Row(())
        items.append(Script(base, kind, body, marks))


def _word(word: str) -> list[Item]:
    """An identifier, with its time index and the d of a gradient split off: beta_t, k_tilde_t, dZ, diag."""
    base, index = (word[:-2], word[-1]) if word.endswith(("_t", "_C")) else (word, "")
    items: list[Item] = []
    if len(base) > 1 and base[0] == "d":
        rest = base[1:]
        if rest in GREEK or _ACCENTED.fullmatch(rest) or rest[0].isupper():
            items.append(Atom("differential", "d"))
            base = rest
    name: Item = Atom("name", base)
    items.append(Script(name, "sub", Row((Atom("name", index),)), ("_", "")) if index else name)
    return items
