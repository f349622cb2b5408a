"""Turns what the grammar says about a bad line into a mistake that a person can act on."""

from __future__ import annotations

import re
from typing import Any

from linalg_dsl.language.lines import KEYWORDS, Line, Source
from linalg_dsl.language.mistakes import Mistakes, nearest

_SLIPS: tuple[tuple[str, str, str], ...] = (
    (r"\\[A-Za-z]+", "TeX commands are not read", "write the sign itself: `α` or `alpha`, `ᵀ` or `^T`, `⊙`"),
    (r":=|<-|←|\+=|-=|\*=", "an equation has a plain `=`", "write `S_t = ...` in full"),
    (r"==", "an equation has a single `=`", "write `x_t = ...`"),
    (r"\*\*", "a power is written `^`", "write `x^2`"),
    (r"[‖∥]", "bars are not read", "write `l2norm(x)` for a normalised vector, `sqrt(xᵀ x)` for a norm"),
    (r"[<⟨]", "angle brackets are not read", "write `xᵀ y` or `dot(x, y)` for an inner product"),
    (r"∑", "sums are not read", "over the rows of two [n, D] inputs the sum is their product, `k_tᵀ v_t`"),
    (r"\|", "bars are not read", "write `abs(x)`, or `l2norm(x)` for a normalised vector"),
    (r"\$", "dollar signs are not read", "write the formula alone"),
    (r"⊗", "the outer product has no sign", "write `k_t v_tᵀ` or `outer(k_t, v_t)`"),
    (
        r"×",
        "this product sign is not read",
        "write `⊙` for the elementwise product, nothing for the matrix product",
    ),
    (r"⁻¹", "a negative superscript is not read", "write `x^(-1)`; there are no inverses of matrices"),
    (r"[′'’]", "primes are not read", "write `ᵀ` or `^T` for a transpose, and no prime in a name"),
    (r"\{", "braces hold an index or an exponent", "group with parentheses"),
    (r"\.[0-9]", "a number begins with a digit", "write `0.5`"),
    (r";", "statements end with their line", "write one statement a line"),
)
"""Pattern at the place of the fault, what is wrong, what to do."""

_WORDS = {
    "REF": "a name", "NAME": "a name", "NUMBER": "a number", "LPAR": "`(`", "RPAR": "`)`", "LSQB": "`[`",
    "RSQB": "`]`", "SIGN": "a sign", "MULTIPLY": "a product sign", "EQUAL": "`=`", "COLON": "`:`",
    "COMMA": "`,`", "FUNCTION": "a function", "$END": "the end of the line",
}  # fmt: skip


def describe(err: Any, source: Source, line: Line, mistakes: Mistakes) -> None:
    """Adds the mistake that a lark ``UnexpectedInput`` stands for."""
    text = source.text[line.start : line.end]
    token = getattr(err, "token", None)
    at = getattr(token, "start_pos", None) if token is not None and token.type != "$END" else None
    if token is None:
        at = err.pos_in_stream
    if at is None:
        at = len(re.sub(r"#[^\n]*\Z", "", text).rstrip())
    word = str(token) if token is not None and token.type != "$END" else text[at : at + 1]
    where = source.span(line.start + at, line.start + at + max(1, len(word)))
    if _unknown_declaration(source, line, text, mistakes):
        return
    for pattern, message, hint in _SLIPS:
        for found in re.finditer(pattern, text):
            if found.start() - 1 <= at <= found.start() + 1:
                spot = source.span(line.start + found.start(), line.start + found.end())
                mistakes.add("E101", message, spot, hint)
                return
    opened = _open_bracket(text[:at])
    if word in (")", "]", "}") and not opened:
        mistakes.add("E102", f"this `{word}` closes nothing", where, "remove it, or open it before")
        return
    if word in (")", "]", "}") and not line.keyword and _CLOSES[word] != opened:
        mistakes.add("E102", f"this `{word}` does not close `{opened}`", where, "brackets close in pairs")
        return
    if not line.keyword and not re.search("=", text):
        hint = "declarations begin with input, param, const, state or output; an equation has a `=`"
        if re.match(r"[-+\u2212*/·@⊙∘]", text):
            hint = "a line goes on in the next one only inside brackets: put them around the whole"
        mistakes.add("E101", "neither a declaration nor an equation", source.span(line.start, line.end), hint)
        return
    expected = _expected(err)
    if not word.strip():
        what = "the line ends too early"
        hint = f"expected {expected or 'more'}; a line goes on in the next one only inside brackets"
    else:
        what, hint = f"unexpected `{word[:40]}`", f"expected {expected}"
    mistakes.add("E101", what, where, hint if expected or not word.strip() else None)


_CLOSES = {")": "(", "]": "[", "}": "{"}


def _open_bracket(text: str) -> str:
    """The innermost bracket that is open at the end of a text."""
    opened: list[str] = []
    for char in re.sub(r"#[^\n]*", "", text):
        if char in "([{":
            opened.append(char)
        elif char in ")]}" and opened:
            opened.pop()
    return opened[-1] if opened else ""


def _unknown_declaration(source: Source, line: Line, text: str, mistakes: Mistakes) -> bool:
    """``inputs q : [K]``: the first word should have been a keyword."""
    found = re.match(r"([^\W\d_]+)\s+[^\W\d]\w*(?:\s*,\s*\w+)*\s*(?::|\Z|=\s*\S)", text)
    if line.keyword or not found or found.group(1) in KEYWORDS:
        return False
    close = nearest(found.group(1), KEYWORDS)
    if close is None:
        return False
    spot = source.span(line.start, line.start + len(found.group(1)))
    mistakes.add("E101", f"unknown declaration `{found.group(1)}`", spot, f"did you mean `{close}`?")
    return True


def _expected(err: Any) -> str:
    """What could stand there, in words; empty where that is nearly everything."""
    names = (
        getattr(err, "accepts", None) or getattr(err, "expected", None) or getattr(err, "allowed", None) or ()
    )
    words = [w for name, w in _WORDS.items() if name in names]
    words = list(dict.fromkeys(words))
    if not words or len(words) > 6:
        return ""
    return ", ".join(words[:-1]) + (" or " if len(words) > 1 else "") + words[-1]
