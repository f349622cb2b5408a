"""The text front: text → statements → syntax → ``RecurrenceSpec``.

Every line is parsed by itself, so one mistake does not hide the next; the tree that lark gives for a
line becomes the syntax nodes of ``syntax.py``, which the Python front builds too.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from linalg_dsl.errors import InternalError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.lines import Line, Source, cut
from linalg_dsl.language.mistakes import Mistakes, nearest
from linalg_dsl.language.names import LONGEST, fold, is_name
from linalg_dsl.language.resolve import resolve
from linalg_dsl.language.spec import Interval, RecurrenceSpec
from linalg_dsl.language.syntax_errors import describe
from linalg_dsl.source import Span

if TYPE_CHECKING:
    from lark import Lark, Token, Tree

LONGEST_TEXT = 32_768
MOST_DIGITS = 40
LARGEST_EXPONENT = 60

_RULES = {
    "recurrence": "header",
    "input": "inputs",
    "param": "inputs",
    "const": "const",
    "state": "state",
    "output": "output",
    "": "equation",
}
_LOOP = re.compile(r"for\s+(\w+)\s+in\s+(\w+)\s*\.\.\s*(\w+)\s*:\s*(?:#.*)?\Z", re.DOTALL)
_INDEX = re.compile(r"t\s*(?:([-+\u2212])\s*([0-9]{1,4}))?\s*(?:,\s*(\w+))?\Z")


def parse(text: str, origin: str = "<text>") -> RecurrenceSpec:
    """Reads a recurrence; raises ``DslError`` with every mistake found."""
    mistakes = Mistakes()
    document = parse_document(text, origin, mistakes)
    return resolve(document, mistakes)


def parse_document(text: str, origin: str, mistakes: Mistakes) -> syn.Document:
    """The syntax of a text; statements with mistakes are reported and left out."""
    source = Source(text, origin)
    if len(text) > LONGEST_TEXT:
        mistakes.add(
            "E107",
            f"the text has {len(text)} characters, more than {LONGEST_TEXT}",
            source.span(0, 0),
            "one text holds one recurrence",
        )
        mistakes.raise_if_any()
    return _Reader(source, mistakes).document()


@lru_cache(maxsize=1)
def _grammar() -> Lark:
    from lark import Lark

    text = files("linalg_dsl.language").joinpath("grammar.lark").read_text(encoding="utf-8")
    return Lark(text, parser="lalr", lexer="contextual", start=sorted(set(_RULES.values())))


class _Refused(Exception):
    """The statement has a mistake that is already noted."""


class _Reader:
    def __init__(self, source: Source, mistakes: Mistakes) -> None:
        self.source = source
        self.mistakes = mistakes
        self.base = 0
        """Offset of the statement being read; lark counts from its start."""

    def document(self) -> syn.Document:
        lines = cut(self.source, self.mistakes)
        name, name_span = "", None
        statements: list[syn.Statement] = []
        loop: tuple[Line, syn.Loop] | None = None
        for line in lines:
            found = self.statement(line)
            if loop and line.indent <= loop[0].indent:
                loop = None
            for one in found:
                match one:
                    case syn.Document():
                        if name:
                            self.refuse(
                                "E205", "a second `recurrence` line", one.span, "one text, one recurrence"
                            )
                        name, name_span = one.name, one.span
                    case syn.Loop() if loop is None:
                        loop = (line, one)
                        statements.append(one)
                    case syn.Assign() if loop is not None:
                        pass  # its syntax is checked; loops are refused as a whole by resolve
                    case _:
                        statements.append(one)
        whole = self.source.span(0, 0)
        doc = self._doc(lines)
        return syn.Document(name or "recurrence", tuple(statements), doc, name_span or whole)

    def _doc(self, lines: list[Line]) -> str:
        """The comment lines above the first statement."""
        head = self.source.text[: lines[0].start] if lines else self.source.text
        comments = [x.strip("\ufeff \t\r") for x in head.split("\n")]
        return "\n".join(x[1:].removeprefix(" ") for x in comments if x.startswith("#"))

    def refuse(self, code: str, message: str, span: Span | None, hint: str | None = None) -> None:
        self.mistakes.add(code, message, span, hint)

    def statement(self, line: Line) -> list[syn.Statement | syn.Document]:
        from lark.exceptions import UnexpectedInput

        self.base = line.start
        text = self.source.text[line.start : line.end]
        try:
            if line.keyword == "for":
                return [self.loop(text, line)]
            tree = _grammar().parse(text, start=_RULES[line.keyword])
            return self.convert(cast("Tree[Token]", tree))
        except UnexpectedInput as err:
            describe(err, self.source, line, self.mistakes)
        except _Refused:
            pass
        return []

    def span(self, start: int, end: int) -> Span:
        return self.source.span(self.base + start, self.base + end)

    def token_span(self, token: Token) -> Span:
        return self.span(_int(token.start_pos), _int(token.end_pos))

    # -- statements ---------------------------------------------------------------------------
    def loop(self, text: str, line: Line) -> syn.Loop:
        found = _LOOP.match(text.rstrip())
        if not found:
            self.refuse(
                "E101",
                "a loop of substeps reads `for j in 1..n:`",
                self.source.span(line.start, line.end),
            )
            raise _Refused
        variable, low, high = found.groups()
        return syn.Loop(fold(variable), low, high, (), self.source.span(line.start, line.end))

    def convert(self, tree: Tree[Token]) -> list[syn.Statement | syn.Document]:
        kids = cast("list[Any]", tree.children)
        match str(tree.data):
            case "header":
                return [syn.Document(self.name(kids[0]), (), "", self.token_span(kids[0]))]
            case "inputs":
                timed = kids[0].type != "PARAM" if hasattr(kids[0], "type") else True
                names, tail = kids[-2], kids[-1]
                kind = self.tail(tail)
                return [
                    syn.InputDecl(name=self.name(n), span=self.token_span(n), timed=timed, **kind)
                    for n in names.children
                ]
            case "const":
                name, value = kids
                return [syn.ConstDecl(self.name(name), self.token_span(name), self.expr(value))]
            case "state":
                return [self.state(kids)]
            case "output":
                return [syn.OutputDecl(self.name(kids[0]), self.token_span(kids[0]))]
            case "equation":
                target = self.ref(kids[0])
                value = self.expr(kids[1])
                return [syn.Assign(target.name, target.index, value, target.span)]
            case other:
                raise InternalError(f"unknown rule {other}")

    def state(self, kids: list[Any]) -> syn.StateDecl:
        name, tail, start = kids
        dims: tuple[syn.DimName, ...] = (("K", None), ("V", None))
        if tail is not None:
            kind = self.tail(tail)
            if kind["kind"] != "plain" or kind["range"] is not None or kind["unit"]:
                self.refuse(
                    "E108",
                    "a state is declared by its shape alone",
                    self.token_span(name),
                    "write `state S : [K, V]`, and `= 0` for its start",
                )
                raise _Refused
            dims = kind["dims"]
        value = 0.0 if start is None else self.bound(start)
        return syn.StateDecl(self.name(name), self.token_span(name), dims, value)

    def tail(self, tree: Tree[Token]) -> dict[str, Any]:
        """What stands after the colon, as the fields of an ``InputDecl``."""
        out: dict[str, Any] = {
            "dims": (), "kind": "plain", "range": None, "range_span": None, "unit": False, "unit_span": None,
        }  # fmt: skip
        kids = cast("list[Any]", list(tree.children))
        words: list[tuple[str, Span]] = []
        shaped = False
        while kids:
            item = kids.pop(0)
            if hasattr(item, "data"):
                if str(item.data) == "dims":
                    if shaped:
                        self.refuse("E503", "a second shape", self.tree_span(item))
                    out["dims"], shaped = self.dims(item), True
                else:
                    self.set_range(out, self.interval(item), self.tree_span(item))
            elif item.type == "COMPARE":
                bound = kids.pop(0)
                span = self.token_span(item).cover(self.tree_span(bound))
                self.set_range(out, _compare(str(item), self.bound(bound)), span)
            elif str(item) == "unit":
                if out["unit"]:
                    self.refuse("E503", "`unit` is given twice", self.token_span(item))
                out["unit"], out["unit_span"] = True, self.token_span(item)
            else:
                words.append((str(item), self.token_span(item)))
        self.kind(out, words, shaped, tree)
        return out

    def kind(
        self, out: dict[str, Any], words: list[tuple[str, Span]], shaped: bool, tree: Tree[Token]
    ) -> None:
        match [w for w, _ in words]:
            case [] if shaped:
                return
            case ["scalar"] if not shaped:
                return
            case ["log", "gate"]:
                out["kind"] = "log_gate"
                return
            case ["gate"]:
                out["kind"] = "gate"
                return
            case []:
                span, message = self.source.span(self.base, self.base), "the kind is missing after the colon"
            case ["scalar"]:
                span, message = words[0][1], "a scalar has no shape"
            case found:
                strange = [(w, s) for w, s in words if w not in ("scalar", "log", "gate")] or words
                span = strange[0][1]
                message = f"unknown kind `{' '.join(found)}`"
        known = ("scalar", "gate", "log gate", "unit")
        close = nearest(words[0][0], known) if words else None
        hint = f"did you mean `{close}`? " if close and close != words[0][0] else ""
        self.refuse("E108", message, span, hint + "kinds are [K], [V], [n, K], [n], scalar, log gate, gate")
        raise _Refused

    def set_range(self, out: dict[str, Any], interval: Interval, span: Span) -> None:
        if out["range"] is not None:
            self.refuse("E503", "a second range", span, "write one, such as `in [0, 1)`")
        out["range"], out["range_span"] = interval, span

    def dims(self, tree: Tree[Token]) -> tuple[syn.DimName, ...]:
        out: list[syn.DimName] = []
        for token in cast(
            "list[Token]", [x for x in tree.children if getattr(x, "type", "") in ("NAME", "NUMBER")]
        ):
            span = self.token_span(token)
            if token.type == "NUMBER":
                if not str(token).isdigit() or len(token) > 4:
                    self.refuse(
                        "E208", f"`{token}` is no dimension", span, "K, V, a const, or a small whole number"
                    )
                    raise _Refused
                out.append((int(token), span))
            else:
                out.append((fold(str(token)), span))
        return tuple(out)

    def interval(self, tree: Tree[Token]) -> Interval:
        opening, low, high, closing = cast("list[Any]", tree.children)
        return interval(self.bound(low), self.bound(high), opening == "(", closing == ")")

    def bound(self, tree: Tree[Token]) -> float:
        sign, values = 1, []
        for token in cast("list[Token]", tree.children):
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
                    raise _Refused
        if len(values) == 2 and values[1] == 0:
            self.refuse("E105", "division by zero", self.tree_span(tree))
            raise _Refused
        return sign * float(values[0] / values[1] if len(values) == 2 else values[0])

    # -- names and numbers --------------------------------------------------------------------
    def name(self, token: Token) -> str:
        name = fold(str(token))
        if not is_name(name):
            hint = f"letters, digits and underscores, at most {LONGEST}"
            self.refuse("E104", f"`{_short(name)}` is not a name", self.token_span(token), hint)
            raise _Refused
        return name

    def number(self, token: Token) -> Fraction:
        mantissa, _, exponent = str(token).lower().partition("e")
        if len(mantissa) > MOST_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > LARGEST_EXPONENT:
            hint = f"at most {MOST_DIGITS} digits, exponents up to {LARGEST_EXPONENT}"
            self.refuse(
                "E105", f"the number {_short(str(token))} is out of bounds", self.token_span(token), hint
            )
            raise _Refused
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
            raise _Refused
        return syn.Ref(name, index, span)

    def index(self, inner: str, word: str, span: Span) -> syn.Index:
        found = _INDEX.match(inner.strip())
        if not found:
            hint = f"write {word}_t, {word}_{{t-1}}, or {word}_{{t,1}} for a row"
            self.refuse("E103", f"`{inner.strip()}` is not an index", span, hint)
            raise _Refused
        sign, steps, row = found.groups()
        time = int(steps or 0) * (1 if sign == "+" else -1)
        return syn.Index(time, int(row) if row and row.isdigit() and row.isascii() else row)

    # -- expressions --------------------------------------------------------------------------
    def expr(self, tree: Any) -> syn.Node:
        if hasattr(tree, "type"):
            return self.leaf(tree)
        kids = cast("list[Any]", tree.children)
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
                return syn.Apply(str(function), given, self.tree_span(tree))
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
        for kid in kids[1:]:
            if getattr(kid, "type", "") == "MULTIPLY":
                sign = _SIGNS[str(kid)]
                continue
            factor = self.expr(kid)
            before = rest[-1][1] if rest else first
            if sign == "" and isinstance(before, syn.Num) and isinstance(factor, syn.Num):
                self.refuse(
                    "E106",
                    "two numbers side by side",
                    _cover(before.span, factor.span),
                    "write `*` or one number",
                )
                raise _Refused
            rest.append((sign, factor))
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
                if isinstance(node, syn.Transposed) and not raised:
                    node = node.arg
                else:
                    node = syn.Transposed(node, span)
                raised = False
                continue
            if raised:
                self.refuse("E106", "a power of a power", span, "write (x^y)^z or x^(y^z)")
                raise _Refused
            node, raised = syn.Raised(node, self.exponent(mark), span), True
        return node

    def exponent(self, mark: Any) -> syn.Node:
        if getattr(mark, "type", "") == "SUPERSCRIPT":
            return syn.Num(Fraction(2 if mark == "\u00b2" else 3), self.token_span(mark))
        kids = cast("list[Any]", mark.children)
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


def interval(low: float, high: float, low_open: bool, high_open: bool) -> Interval:
    """A range with infinite ends written as none."""
    lower = None if low == float("-inf") else low
    upper = None if high == float("inf") else high
    return Interval(lower, upper, low_open or lower is None, high_open or upper is None)


def _compare(sign: str, value: float) -> Interval:
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
