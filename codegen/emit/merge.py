"""Several generated modules in one file: equal functions once, other names of one module made its own."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from linalg_dsl.errors import InternalError


@dataclass(frozen=True)
class Merged:
    """``imports`` and ``common`` come first, then one of ``sections`` for each module.

    ``names`` says what a name of each module is called now.
    """

    imports: str
    common: str
    sections: tuple[str, ...]
    names: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class _Statement:
    source: str
    defines: tuple[str, ...]
    uses: frozenset[str]


def merge(modules: Mapping[str, str]) -> Merged:
    """The texts of modules, each under the suffix that the names at its top get.

    A function stands in ``common``, under its own name, if the modules that define it agree on it and on
    all that it uses, to the letter.
    """
    parsed = [_statements(text) for text in modules.values()]
    shared = _shared([statements for _, statements in parsed])
    imports = dict.fromkeys(line for lines, _ in parsed for line in lines)
    common: dict[str, str] = {}
    sections, names = [], []
    for suffix, (_, statements) in zip(modules, parsed, strict=True):
        defined = {n for s in statements for n in s.defines}
        renamed = {n: n if n in shared else f"{n}{suffix}" for n in sorted(defined)}
        pieces = []
        for statement in statements:
            if set(statement.defines) <= shared:
                common.setdefault(statement.source, statement.source)
            else:
                pieces.append(_rename(statement.source, renamed))
        sections.append(_joined(pieces))
        names.append(renamed)
    return Merged(_import_block(imports), _joined(list(common)), tuple(sections), tuple(names))


def _statements(text: str) -> tuple[list[str], list[_Statement]]:
    """The imports of a module, and its other statements; what stands before the first is left out."""
    tree = ast.parse(text)
    lines = text.splitlines()
    imports: list[str] = []
    found: list[_Statement] = []
    for node in tree.body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)])
        source = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(source)
            continue
        uses = frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
        found.append(_Statement(source, _defined(node), uses))
    return imports, found


def _defined(node: ast.stmt) -> tuple[str, ...]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.Assign(targets=[ast.Name(id=name)]):
            return (name,)
        case _:
            raise InternalError(f"a generated module holds {type(node).__name__}")


def _shared(modules: Sequence[Sequence[_Statement]]) -> set[str]:
    """The functions that all modules which have them share, with everything that they use."""
    texts: dict[str, set[str]] = {}
    uses: dict[str, set[str]] = {}
    functions: set[str] = set()
    for statements in modules:
        own = {n for s in statements for n in s.defines}
        for statement in statements:
            for name in statement.defines:
                texts.setdefault(name, set()).add(statement.source)
                uses.setdefault(name, set()).update(statement.uses & own)
                if re.search(r"^(@|def )", statement.source):
                    functions.add(name)
    agreed = {n for n in functions if len(texts[n]) == 1}
    while True:
        fewer = {n for n in agreed if uses[n] <= agreed}
        if fewer == agreed:
            return agreed
        agreed = fewer


def _rename(source: str, names: Mapping[str, str]) -> str:
    """The statement with other names; attributes, and keywords of calls of attributes, are not names."""
    kept = _keywords(source)
    pieces: list[tuple[int, int, int, str]] = []
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if (
            token.type == tokenize.NAME
            and token.string in names
            and before != "."
            and token.start not in kept
        ):
            pieces.append((row, column, token.end[1], names[token.string]))
        elif token.type == tokenize.STRING and re.match(r"[rR]?[fF]", token.string):
            pieces.append((row, column, token.end[1], _rename_in_braces(token.string, names)))
        before = token.string
    lines = source.splitlines()
    for row, column, end, text in reversed(pieces):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + text + line[end:]
    return "\n".join(lines)


def _rename_in_braces(text: str, names: Mapping[str, str]) -> str:
    def inner(match: re.Match[str]) -> str:
        return re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda m: names.get(m.group(), m.group()), match.group())

    return re.sub(r"\{[^{}]*\}", inner, text)


def _keywords(source: str) -> set[tuple[int, int]]:
    """Where the keywords of calls of attributes stand: ``tl.load(p, mask=m)``."""
    return {
        (k.lineno, k.col_offset)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        for k in call.keywords
        if k.arg is not None
    }


def _import_block(lines: Mapping[str, None]) -> str:
    """The standard library's first."""
    own = sorted(n for n in lines if not re.match(r"(import|from) (torch|triton)", n))
    others = sorted(n for n in lines if n not in own)
    return "\n".join([*own, *([""] if own and others else []), *others])


def _joined(pieces: Sequence[str]) -> str:
    """Statements with two empty lines around functions and classes."""
    text, previous = "", ""
    for piece in pieces:
        apart = piece.startswith(("def ", "class ", "@")) or previous.startswith(("def ", "class ", "@"))
        text += ("\n\n\n" if apart else "\n") + piece if text else piece
        previous = piece
    return text
