"""The text front: text → statements → syntax → ``RecurrenceSpec``.

Every line is parsed by itself, so one mistake does not hide the next; the tree that lark gives for a
line becomes the syntax nodes of ``syntax.py``, which the Python front builds too.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from linalg_dsl.errors import InternalError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.lines import Line, Source, cut
from linalg_dsl.language.mistakes import Mistakes, nearest
from linalg_dsl.language.names import fold
from linalg_dsl.language.resolve import resolve
from linalg_dsl.language.spec import Interval, RecurrenceSpec
from linalg_dsl.language.syntax_errors import describe
from linalg_dsl.language.trees import Refused, TreeReader, compare
from linalg_dsl.source import Span

if TYPE_CHECKING:
    from lark import Lark, Token, Tree

LONGEST_TEXT = 32_768

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


class _Reader(TreeReader):
    def document(self) -> syn.Document:
        lines = cut(self.source, self.mistakes)
        name, name_span = "", None
        statements: list[syn.Statement] = []
        within = -1
        """The indent of the loop that is open."""
        for line in lines:
            found = self.statement(line)
            if line.indent <= within:
                within = -1
            for one in found:
                if isinstance(one, syn.Document):
                    if name:
                        self.refuse(
                            "E205", "a second `recurrence` line", one.span, "one text, one recurrence"
                        )
                    name, name_span = one.name, one.span
                elif within < 0:
                    statements.append(one)
                elif isinstance(one, syn.Assign):
                    loop = statements[-1]
                    assert isinstance(loop, syn.Loop)
                    statements[-1] = replace(loop, body=(*loop.body, one))
                else:
                    what = "a loop" if isinstance(one, syn.Loop) else "a declaration"
                    self.refuse("E903", f"{what} inside a loop", one.span, "a loop holds equations alone")
            if line.keyword == "for" and found and within < 0:
                within = line.indent
        whole = self.source.span(0, 0)
        doc = self._doc(lines)
        return syn.Document(name or "recurrence", tuple(statements), doc, name_span or whole)

    def _doc(self, lines: list[Line]) -> str:
        """The comment lines above the first statement."""
        head = self.source.text[: lines[0].start] if lines else self.source.text
        comments = [x.strip("\ufeff \t\r") for x in head.split("\n")]
        return "\n".join(x[1:].removeprefix(" ") for x in comments if x.startswith("#"))

    def statement(self, line: Line) -> list[syn.Statement | syn.Document]:
        from lark.exceptions import UnexpectedInput

        self.base = line.start
        text = self.source.text[line.start : line.end]
        try:
            if line.keyword == "for":
                return [self.loop(text, line)]
            tree = _grammar().parse(text, start=_RULES[line.keyword])
            return self.convert(tree)
        except UnexpectedInput as err:
            describe(err, self.source, line, self.mistakes)
        except Refused:
            pass
        return []

    # -- statements ---------------------------------------------------------------------------
    def loop(self, text: str, line: Line) -> syn.Loop:
        """The head of a loop; after a mistake one that its body can stand in."""
        found = _LOOP.match(text.rstrip())
        span = self.source.span(line.start, line.start + len(text.split("#")[0].rstrip()))
        if not found:
            self.refuse("E101", "a loop of substeps reads `for j in 1..n:`", span)
            word = re.match(r"for\s+(\w+)", text)
            return syn.Loop(fold(word[1]) if word else "j", 1, 1, (), span)
        variable, low, high = (fold(word) for word in found.groups())
        return syn.Loop(variable, _bound(low), _bound(high), (), span)

    def convert(self, tree: Tree[Token]) -> list[syn.Statement | syn.Document]:
        kids = cast("list[Any]", tree.children)
        match str(tree.data):
            case "header":
                return [syn.Document(self.name(kids[0]), (), "", self.token_span(kids[0]))]
            case "inputs":
                names, tail = kids[-2], kids[-1]
                kind = replace(self.tail(tail), timed=len(kids) == 2)
                return [replace(kind, name=self.name(n), span=self.token_span(n)) for n in names.children]
            case "const":
                name, value = kids
                return [syn.ConstDecl(self.name(name), self.token_span(name), self.expr(value))]
            case "state":
                return [*self.states(kids)]
            case "output":
                return [syn.OutputDecl(self.name(kids[0]), self.token_span(kids[0]))]
            case "equation":
                target = self.ref(kids[0])
                value = self.expr(kids[1])
                return [syn.Assign(target.name, target.index, value, target.span)]
            case other:
                raise InternalError(f"unknown rule {other}")

    def states(self, kids: list[Any]) -> list[syn.StateDecl]:
        names, tail, start = kids
        dims: tuple[syn.DimName, ...] | None = None
        if tail is not None:
            kind = self.tail(tail)
            if kind.kind != "plain" or kind.range is not None or kind.unit:
                self.refuse(
                    "E108",
                    "a state is declared by its shape alone",
                    self.tree_span(names),
                    "write `state S : [K, V]`, and `= 0` for its start",
                )
                raise Refused
            dims = kind.dims
        value = 0.0 if start is None else self.bound(start)
        return [syn.StateDecl(self.name(n), self.token_span(n), dims, value) for n in names.children]

    def tail(self, tree: Tree[Token]) -> syn.InputDecl:
        """What stands after the colon, as a declaration without a name."""
        out = syn.InputDecl("", None)
        kids: list[Any] = list(tree.children)
        words: list[tuple[str, Span]] = []
        shaped = False
        while kids:
            item = kids.pop(0)
            span = self.tree_span(item)
            if getattr(item, "data", "") == "dims":
                if shaped:
                    self.refuse("E503", "a second shape", span)
                out, shaped = replace(out, dims=self.dims(item)), True
            elif hasattr(item, "data"):
                out = self.with_range(out, self.interval(item), span)
            elif item.type == "COMPARE":
                bound = kids.pop(0)
                span = span.cover(self.tree_span(bound))
                out = self.with_range(out, compare(str(item), self.bound(bound)), span)
            elif str(item) == "unit":
                if out.unit:
                    self.refuse("E503", "`unit` is given twice", span)
                out = replace(out, unit=True, unit_span=span)
            else:
                words.append((str(item), span))
        return self.with_kind(out, words, shaped)

    def with_kind(self, out: syn.InputDecl, words: list[tuple[str, Span]], shaped: bool) -> syn.InputDecl:
        match [w for w, _ in words]:
            case [] if shaped:
                return out
            case ["scalar"] if not shaped:
                return out
            case ["log", "gate"]:
                return replace(out, kind="log_gate")
            case ["gate"]:
                return replace(out, kind="gate")
            case []:
                colon = self.source.text.index(":", self.base)
                span, message = self.source.span(colon, colon + 1), "the kind is missing after the colon"
            case ["scalar"]:
                span, message = words[0][1], "a scalar has no shape"
            case found:
                strange = [(w, s) for w, s in words if w not in ("scalar", "log", "gate")] or words
                span = strange[0][1]
                message = f"unknown kind `{' '.join(found)}`"
        known = ("scalar", "gate", "log gate", "unit")
        close = nearest(words[0][0], known) if words else None
        hint = f"did you mean `{close}`? " if close and close != words[0][0] else ""
        if words and (len(words[0][0]) == 1 or words[0][0] == "vector"):
            hint = f"did you mean `[{words[0][0] if words[0][0] != 'vector' else 'K'}]`? "
        self.refuse("E108", message, span, hint + "kinds are [K], [V], [n, K], [n], scalar, log gate, gate")
        raise Refused

    def with_range(self, out: syn.InputDecl, interval: Interval, span: Span) -> syn.InputDecl:
        if out.range is not None:
            self.refuse("E503", "a second range", span, "write one, such as `in [0, 1)`")
        return replace(out, range=interval, range_span=span)

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
                    raise Refused
                out.append((int(token), span))
            else:
                out.append((fold(str(token)), span))
        return tuple(out)


def _bound(word: str) -> int | str:
    return int(word) if word.isascii() and word.isdigit() and len(word) < 6 else word
