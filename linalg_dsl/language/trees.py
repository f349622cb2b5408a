"""Reads the trees of one statement: names, numbers, ranges and expressions → syntax nodes."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

from linalg_dsl.errors import InternalError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.lines import Source
from linalg_dsl.language.mistakes import Mistakes
from linalg_dsl.language.names import LONGEST, fold, is_name
from linalg_dsl.language.spec import Interval
from linalg_dsl.source import Span

Token = Any
"""lark's ``Token`` and ``Tree``; lark itself is imported in ``parser.py`` alone."""
Tree = Any
MOST_DIGITS = 40
LARGEST_EXPONENT = 60

_INDEX = re.compile(r"t\s*(?:([-+\u2212])\s*([0-9]{1,4}))?\s*(?:,\s*(\w+))?\Z")
_ROW = re.compile(r"\w+\Z")


class Refused(Exception):
    """The statement has a mistake that is already noted."""


class TreeReader:
    def __init__(self, source: Source, mistakes: Mistakes) -> None:
        self.source = source
        self.mistakes = mistakes
        self.base = 0
        """Offset of the statement being read; lark counts from its start."""

    def refuse(self, code: str, message: str, span: Span | None, hint: str | None = None) -> None:
        self.mistakes.add(code, message, span, hint)

    def span(self, start: int, end: int) -> Span:
        return self.source.span(self.base + start, self.base + end)

    def token_span(self, token: Token) -> Span:
        return self.span(_int(token.start_pos), _int(token.end_pos))

    def interval(self, tree: Tree) -> Interval:
        opening, low, high, closing = tree.children
        return interval(self.bound(low), self.bound(high), opening == "(", closing == ")")

    def bound(self, tree: Tree) -> float:
        sign, values = 1, []
        for token in tree.children:
            match token:
                case None:
                    continue
                case _ if token.type == "SIGN":
                    sign = 1 if token == "+" else -1
                case _ if token.type == "NUMBER":
                    values.append(self.number(token))
                case _ if token.type == "INFINITY" or str(token) == "inf":
                    return sign * float("inf")
                case _:
                    self.refuse("E101", f"a bound is a number or inf, not `{token}`", self.token_span(token))
                    raise Refused
        if len(values) == 2 and values[1] == 0:
            self.refuse("E105", "division by zero", self.tree_span(tree))
            raise Refused
        return sign * float(values[0] / values[1] if len(values) == 2 else values[0])

    # -- names and numbers --------------------------------------------------------------------
    def name(self, token: Token) -> str:
        name = fold(str(token))
        if not is_name(name):
            hint = f"letters, digits and underscores, at most {LONGEST}"
            self.refuse("E104", f"`{_short(name)}` is not a name", self.token_span(token), hint)
            raise Refused
        return name

    def number(self, token: Token) -> Fraction:
        mantissa, _, exponent = str(token).lower().partition("e")
        if len(mantissa) > MOST_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > LARGEST_EXPONENT:
            hint = f"at most {MOST_DIGITS} digits, exponents up to {LARGEST_EXPONENT}"
            self.refuse(
                "E105", f"the number {_short(str(token))} is out of bounds", self.token_span(token), hint
            )
            raise Refused
        return Fraction(str(token))

    def ref(self, token: Token) -> syn.Ref:
        """A name with its index: the one in brackets, or a final ``_t``."""
        span = self.token_span(token)
        word, opening, inner = _split_index(str(token))
        index: syn.Index | None = None
        if opening == "\u209c":
            index = syn.Index(-1 if inner else 0)
        elif opening:
            index = self.index(inner, word, span)
        elif word.endswith("_t"):
            word, index = word[:-2], syn.Index(0)
        name = fold(word)
        if not is_name(name):
            hint = f"letters, digits and underscores, at most {LONGEST}"
            self.refuse("E104", f"`{_short(name)}` is not a name", span, hint)
            raise Refused
        return syn.Ref(name, index, span)

    def index(self, inner: str, word: str, span: Span) -> syn.Index:
        text = inner.strip()
        if _ROW.match(text) and text != "t" and not word.endswith("_t"):
            return syn.Index(None, _row(text))
        found = _INDEX.match(text)
        if not found:
            word = word.removesuffix("_t")
            hint = f"write {word}_t, {word}_{{t-1}}, or {word}_{{t,1}} for a row"
            self.refuse("E103", f"`{text}` is not an index", span, hint)
            raise Refused
        sign, steps, row = found.groups()
        return syn.Index(int(steps or 0) * (1 if sign == "+" else -1), _row(row) if row else None)

    # -- expressions --------------------------------------------------------------------------
    def expr(self, tree: Any) -> syn.Node:
        if hasattr(tree, "type"):
            return self.leaf(tree)
        kids = tree.children
        match str(tree.data):
            case "expr":
                return self.total(kids)
            case "term":
                return self.expr(kids[0]) if len(kids) == 1 else self.signed(kids)
            case "signed":
                return self.signed(kids)
            case "product":
                return self.chain(kids)
            case "power":
                return self.power(kids)
            case "group":
                inner = self.expr(kids[1])
                inner.span = self.tree_span(tree)
                return inner
            case "call":
                function, args = kids[0], kids[2:-1]
                given = tuple(self.expr(a) for a in args if a is not None)
                name = "diag" if function == "Diag" else str(function)
                return syn.Apply(name, given, self.tree_span(tree))
            case other:
                raise InternalError(f"unknown rule {other}")

    def leaf(self, token: Token) -> syn.Node:
        if token.type == "NUMBER":
            return syn.Num(self.number(token), self.token_span(token))
        return self.ref(token)

    def total(self, kids: list[Any]) -> syn.Node:
        terms = [self.expr(kids[0])]
        for sign, term in zip(kids[1::2], kids[2::2], strict=True):
            node = self.expr(term)
            if sign != "+":
                node = syn.Minus(node, _cover(self.token_span(sign), node.span))
            terms.append(node)
        if len(terms) == 1:
            return terms[0]
        return syn.Total(tuple(terms), _cover(terms[0].span, terms[-1].span))

    def signed(self, kids: list[Any]) -> syn.Node:
        node = self.expr(kids[1])
        if kids[0] == "+":
            return node
        return syn.Minus(node, _cover(self.token_span(kids[0]), node.span))

    def chain(self, kids: list[Any]) -> syn.Node:
        first = self.expr(kids[0])
        rest: list[tuple[syn.ProductSign, syn.Node]] = []
        sign: syn.ProductSign = ""
        for before, kid in pairwise(kids):
            if getattr(kid, "type", "") == "MULTIPLY":
                sign = _SIGNS[str(kid)]
                continue
            if _is_number(before) and _is_number(kid):
                span = self.tree_span(before).cover(self.tree_span(kid))
                self.refuse("E106", "two numbers side by side", span, "write `*` or one number")
                raise Refused
            rest.append((sign, self.expr(kid)))
            sign = ""
        if not rest:
            return first
        return syn.Chain(first, tuple(rest), _cover(first.span, rest[-1][1].span))

    def power(self, kids: list[Any]) -> syn.Node:
        node = self.expr(kids[0])
        raised = False
        for suffix in kids[1:]:
            mark = suffix.children[0]
            span = _cover(node.span, self.tree_span(suffix))
            if getattr(mark, "type", "") == "TRANSPOSE":
                if isinstance(node, syn.Num):
                    hint = "there is no vector of ones: for `(a_t 1ᵀ) ⊙ S_{t-1}` write `diag(a_t) S_{t-1}`"
                    self.refuse("E106", "a number has no transpose", span, hint)
                    raise Refused
                if isinstance(node, syn.Transposed) and not raised:
                    node = node.arg
                else:
                    node = syn.Transposed(node, span)
                raised = False
                continue
            if raised:
                self.refuse("E106", "a power of a power", span, "write (x^y)^z or x^(y^z)")
                raise Refused
            node, raised = syn.Raised(node, self.exponent(mark), span), True
        return node

    def exponent(self, mark: Any) -> syn.Node:
        if getattr(mark, "type", "") == "SUPERSCRIPT":
            return syn.Num(Fraction(2 if mark == "\u00b2" else 3), self.token_span(mark))
        kids = mark.children
        if str(mark.data) == "braced" or len(kids) == 1:
            return self.expr(kids[0])
        return self.signed(kids)

    def tree_span(self, tree: Any) -> Span:
        """From the first to the last token below a tree."""
        tokens = [tree] if hasattr(tree, "type") else list(tree.scan_values(lambda t: hasattr(t, "type")))
        return self.token_span(tokens[0]).cover(self.token_span(tokens[-1]))


_SIGNS: dict[str, syn.ProductSign] = {
    "*": "*", "/": "/", "@": "", "\u00b7": "", "\u22c5": "", "\u2299": "⊙", "\u2218": "⊙", ".*": "⊙",
}  # fmt: skip


def _is_number(tree: Any) -> bool:
    """Whether a factor is a number without parentheses or exponent."""
    kids: Any = getattr(tree, "children", ())
    return len(kids) == 1 and getattr(kids[0], "type", "") == "NUMBER"


def interval(low: float, high: float, low_open: bool, high_open: bool) -> Interval:
    """A range with infinite ends written as none."""
    lower = None if low == float("-inf") else low
    upper = None if high == float("inf") else high
    return Interval(lower, upper, low_open or lower is None, high_open or upper is None)


def compare(sign: str, value: float) -> Interval:
    inf = float("inf")
    match sign:
        case "<" | "<=" | "\u2264":
            return interval(-inf, value, True, sign == "<")
        case _:
            return interval(value, inf, sign == ">", True)


def _split_index(token: str) -> tuple[str, str, str]:
    """``S_{t-1}`` into the word, what opens the index, and the index."""
    for opening, closing in (("_{", "}"), ("_<", ">"), ("[", "]")):
        if opening in token and token.endswith(closing):
            word, _, inner = token.partition(opening)
            return word, opening, inner[:-1]
    if "\u209c" in token:
        word, _, inner = token.partition("\u209c")
        return word, "\u209c", inner
    return token, "", ""


def _cover(first: Span | None, last: Span | None) -> Span | None:
    return first.cover(last) if first and last else first or last


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _int(value: int | None) -> int:
    if value is None:
        raise InternalError("a token without a position")
    return value


def _row(text: str) -> int | str:
    """A number of a row, or a name for one."""
    return int(text) if text.isdigit() and text.isascii() else fold(text)
