"""Edits of generated modules by their syntax trees: they find what they change whatever the formatting, and
an edit that changes nothing is an error."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from linalg_dsl.codegen.emit.torch_helpers import inlined

Bound = Mapping[str, ast.expr]
Edit = Callable[[ast.Module], int]
"""Changes a tree in place and says at how many places."""


class NothingToEdit(AssertionError):
    """An edit found nothing to change."""


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """The module after every edit; those of a PyTorch module with the library's functions in it."""
    tree = ast.parse(inlined(text))
    for edit in edits:
        before = ast.dump(tree)
        if not edit(tree) or ast.dump(tree) == before:
            raise NothingToEdit(f"{edit} changes nothing")
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def matches(pattern: ast.AST, node: ast.AST, bound: dict[str, ast.expr]) -> bool:
    """Whether a node has the form of a pattern, in which a name that begins with _ stands for any expression,
    the same one wherever it stands."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith("_"):
        if not isinstance(node, ast.expr):
            return False
        known = bound.setdefault(pattern.id, node)
        return ast.dump(known) == ast.dump(node)
    if type(pattern) is not type(node):
        return False
    for name, value in ast.iter_fields(pattern):
        if name in ("ctx", "type_comment", "kind"):
            continue
        other = getattr(node, name)
        values, others = (x if isinstance(x, list) else [x] for x in (value, other))
        if len(values) != len(others):
            return False
        for x, y in zip(values, others, strict=True):
            if isinstance(x, ast.AST):
                if not matches(x, y, bound):
                    return False
            elif x != y:
                return False
    return True


class _Fill(ast.NodeTransformer):
    def __init__(self, bound: Bound) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.bound.get(node.id, node)


def filled(result: str, bound: Bound) -> ast.expr:
    """An expression with what its wildcards stand for."""
    tree = ast.parse(result, mode="eval")
    return _Fill(bound).visit(tree).body  # type: ignore[no-any-return]


class _Rewriter(ast.NodeTransformer):
    def __init__(self, rule: Rewrite) -> None:
        self.rule, self.count = rule, 0
        self.pattern = ast.parse(rule.pattern, mode="eval").body

    def generic_visit(self, node: ast.AST) -> ast.AST:
        found = super().generic_visit(node)
        rule, bound = self.rule, dict[str, ast.expr]()
        if isinstance(found, ast.expr) and matches(self.pattern, found, bound):
            if isinstance(getattr(found, "ctx", None), ast.Store):
                return found
            if rule.when is not None and not rule.when({n: ast.unparse(x) for n, x in bound.items()}):
                return found
            if rule.first and self.count:
                return found
            self.count += 1
            return filled(rule.result, bound)
        return found


@dataclass(frozen=True)
class Rewrite:
    """Every expression of the form ``pattern``, in functions named as ``within`` says, becomes ``result``.

    ``when`` looks at the texts of what the wildcards stand for; ``first`` takes the first place only.
    """

    pattern: str
    result: str
    within: str = ""
    when: Callable[[Mapping[str, str]], bool] | None = None
    first: bool = False

    def __call__(self, tree: ast.Module) -> int:
        rewriter = _Rewriter(self)
        for function in functions(tree, self.within):
            # decorators and defaults stay
            function.body = [rewriter.visit(x) for x in function.body]
        return rewriter.count


def functions(tree: ast.AST, within: str = "") -> list[ast.FunctionDef]:
    """The functions of a module, methods too, whose names match, outermost only."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and re.search(within, node.name):
            found.append(node)
    inner = {id(n) for f in found for n in ast.walk(f) if n is not f}
    return [f for f in found if id(f) not in inner]


@dataclass(frozen=True)
class Never:
    """The ``if`` statements on this condition are never entered."""

    condition: str
    within: str = ""

    def __call__(self, tree: ast.Module) -> int:
        wanted = ast.dump(ast.parse(self.condition, mode="eval").body)
        count = 0
        for function in functions(tree, self.within):
            for node in ast.walk(function):
                if isinstance(node, ast.If) and ast.dump(node.test) == wanted:
                    node.test = ast.Constant(False)
                    count += 1
        return count


@dataclass(frozen=True)
class Assigned:
    """What is assigned to a name that matches ``target`` becomes ``result``, in which _value stands for it;
    only where the value matches ``pattern``, if there is one, whose wildcards may be used too."""

    target: str
    result: str
    within: str = ""
    pattern: str = "_value"
    first: bool = False

    def __call__(self, tree: ast.Module) -> int:
        pattern, count = ast.parse(self.pattern, mode="eval").body, 0
        for function in functions(tree, self.within):
            for node in ast.walk(function):
                if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                    continue
                bound: dict[str, ast.expr] = {}
                named = re.fullmatch(self.target, ast.unparse(node.targets[0]))
                if named and matches(pattern, node.value, bound) and not (self.first and count):
                    node.value = filled(self.result, {"_value": node.value, **bound})
                    count += 1
        return count


@dataclass(frozen=True)
class Begins:
    """Statements put at the beginning of functions whose names match."""

    within: str
    statements: str

    def __call__(self, tree: ast.Module) -> int:
        found = functions(tree, self.within)
        for function in found:
            at = 1 if ast.get_docstring(function) else 0
            function.body[at:at] = ast.parse(self.statements).body
        return len(found)


@dataclass(frozen=True)
class LoopBegins:
    """Statements put at the beginning of every loop over ``over`` in functions whose names match."""

    over: str
    statements: str
    within: str = ""

    def __call__(self, tree: ast.Module) -> int:
        pattern, count = ast.parse(self.over, mode="eval").body, 0
        for function in functions(tree, self.within):
            for node in ast.walk(function):
                if isinstance(node, ast.For) and matches(pattern, node.iter, {}):
                    node.body[0:0] = ast.parse(self.statements).body
                    count += 1
        return count


@dataclass(frozen=True)
class Module:
    """Statements put at the end of the module: what a name stands for there counts."""

    statements: str

    def __call__(self, tree: ast.Module) -> int:
        tree.body += ast.parse(self.statements).body
        return 1


@dataclass(frozen=True)
class Masks:
    """In the masks of loads or stores (``tl.load``, ``tl.store``), a name becomes what it stands for."""

    call: str
    name: str
    result: str
    within: str = ""

    def __call__(self, tree: ast.Module) -> int:
        count = 0
        for function in functions(tree, self.within):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == self.call:
                    for word in node.keywords:
                        if word.arg == "mask" and self.name in {
                            n.id for n in ast.walk(word.value) if isinstance(n, ast.Name)
                        }:
                            value = ast.parse(self.result, mode="eval").body
                            word.value = _Fill({self.name: value}).visit(word.value)
                            count += 1
        return count
