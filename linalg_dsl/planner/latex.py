"""The mathematics that this package prints, as LaTeX: one translator for expressions and equations."""

from __future__ import annotations

import re
import unicodedata

_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
    "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
)  # fmt: skip
_LETTERS = dict(zip("αβγδεζηθικλμνξπρστυφχψω", _GREEK, strict=True))
_CAPITALS = {"Λ": r"\Lambda", "Σ": r"\Sigma", "Γ": r"\Gamma", "Δ": r"\Delta", "Θ": r"\Theta", "Φ": r"\Phi",
             "Ψ": r"\Psi", "Ω": r"\Omega", "Π": r"\Pi"}  # fmt: skip
_SIGNS = {
    "ᵀ": r"^{\top}", "⊙": r"\odot", "∘": r"\circ", "−": "-", "←": r"\leftarrow ", "≤": r"\le ",
    "≥": r"\ge ", "⟨": r"\langle ", "⟩": r"\rangle ", "→": r"\to ", "·": r"\cdot ", "…": r"\dots ",
    "∞": r"\infty ", "|": r",\,", "ₜ": "_{t}", "₋": "_{-}", "*": r"\cdot ",
}  # fmt: skip
_FUNCTIONS = {"exp": r"\exp", "log": r"\log", "tanh": r"\tanh", "min": r"\min", "max": r"\max"}
_HEADS = {
    "Λ": r"\Lambda", "R": "R", "σ": r"\sigma", "⟩": r"\rangle", "⟩_τ": r"\rangle^{\tau}",
    "⟩ᴿ": r"\rangle^{R}", "⟩_τᴿ": r"\rangle^{\tau,R}",
}  # fmt: skip
_ACCENTS = {
    "\u0300": "grave", "\u0301": "acute", "\u0302": "hat", "\u0303": "tilde", "\u0304": "bar",
    "\u0305": "bar", "\u0306": "breve", "\u0307": "dot", "\u0308": "ddot", "\u030c": "check",
}  # fmt: skip
_DIFFERENTIAL = r"\mathrm{d}"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
_TOKEN = re.compile(
    r"""(?P<interval>(?P<head>Λ|R|σ|⟩ᴿ?|⟩_τᴿ?)\[(?P<inside>[^\]]*)\])
      | (?P<sum>Σ_\{(?P<range>[^}]*)\} | Σ_(?P<axis>[KVt])(?=\())
      | (?P<score>(?P<dscore>d?)G\^(?P<side>[BQ])(?P<at>[₀₁₂₃₄₅₆₇₈₉]*))
      | (?P<index>_\{[^}]*\} | _[tC0](?![^\W\d_]))
      | (?P<power>\^\((?P<exponent>[^()]*)\))
      | (?P<digits>[₀₁₂₃₄₅₆₇₈₉]+)
      | (?P<word>[^\W\d_₀₁₂₃₄₅₆₇₈₉ᵀ](?:_*(?:[^\W_₀₁₂₃₄₅₆₇₈₉ᵀ]|[\u0300-\u036f]))*)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def to_latex(text: str) -> str:
    """Translates a formula as printed by ``show_expr`` or ``equations``; the result needs amsmath."""
    made = "".join(_translate(m) for m in _TOKEN.finditer(text.replace(" | ", "|")))
    return re.sub(r" +(?=[ _^,)}]|$)", "", made).strip()


def _translate(found: re.Match[str]) -> str:
    if found["interval"]:
        head = _HEADS[found["head"]]
        return f"{head}_{{{to_latex(found['inside'])}}}"
    if found["sum"]:
        return rf"\textstyle\sum_{{{to_latex(found['range'] or found['axis'])}}}"
    if found["score"]:
        name = f"{{G^{{{found['side']}}}{_digits(found['at'])}}}"  # braces: a transpose may follow
        return _DIFFERENTIAL + name if found["dscore"] else name
    if found["index"]:
        inside = found["index"][1:].strip("{}")
        return f"_{{{to_latex(inside)}}}"
    if found["power"]:
        return f"^{{{to_latex(found['exponent'])}}}"
    if found["digits"]:
        return _digits(found["digits"])
    if found["word"]:
        return _word(found["word"])
    return _SIGNS.get(found["other"], found["other"])


def _digits(subscripts: str) -> str:
    return "_{" + "".join(str(_SUBSCRIPTS.index(c)) for c in subscripts) + "}" if subscripts else ""


def _word(word: str) -> str:
    """An identifier, with its time index split off: beta_t, k_tilde_t, dZ, diag."""
    base, index = (word[:-2], "_{t}") if word.endswith("_t") else (word, "")
    base, index = (base[:-2], "_{C}") if base.endswith("_C") else (base, index)
    letters = unicodedata.normalize("NFD", base)
    if len(letters) == 2 and letters[1] in _ACCENTS:
        return rf"\{_ACCENTS[letters[1]]}{{{_word(letters[0]).strip()}}}{index}"
    if base in _FUNCTIONS:
        return _FUNCTIONS[base] + index
    if len(base) > 1 and base[0] == "d" and (base[1:] in _GREEK or len(base) == 2 or base[1].isupper()):
        return _DIFFERENTIAL + _word(base[1:]) + index
    if len(letters) == 3 and letters[0] == "d" and letters[2] in _ACCENTS:
        return _DIFFERENTIAL + _word(letters[1:]) + index
    if base in _GREEK:
        return f"\\{base} {index}"
    if base in _LETTERS:
        return f"\\{_LETTERS[base]} {index}"
    if base in _CAPITALS:
        return f"{_CAPITALS[base]} {index}"
    if len(base) == 1:
        return base + index
    escaped = base.replace("_", r"\_")
    return rf"\mathrm{{{escaped}}}{index}"
