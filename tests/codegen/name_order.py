"""Names that a generated kernel uses where they need not be bound, found in its text without running it.

Python's interpreter of kernels does not see them all: a name first bound in a loop lives on behind it there,
with the last turn's value, while Triton's compiler ends it with the loop.
"""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Bound = frozenset[str]


def unbound_names(source: str) -> list[str]:
    """``function:line: name`` of every use in a jitted function that some path reaches unbound."""
    module = ast.parse(source)
    known = frozenset(dir(builtins)) | frozenset(_module_names(module))
    found = []
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            names = frozenset(a.arg for a in node.args.args)
            unbound: dict[ast.Name, None] = {}
            for values in _switches(node):
                paths = _Paths(values)
                paths.block(node.body, known | names)
                unbound |= dict.fromkeys(paths.unbound)
            found += [f"{node.name}:{use.lineno}: {use.id}" for use in unbound]
    return found


def _switches(function: ast.FunctionDef) -> Iterator[dict[str, bool]]:
    """Every choice of what is known at compilation and decides more than one ``if``, or a part of one."""
    parts = [ast.unparse(part) for n in _ifs(function.body) for part in _parts(n.test)]
    known = {a.arg for a in function.args.args if a.annotation and "constexpr" in ast.unparse(a.annotation)}
    known |= {
        name
        for n in ast.walk(function)
        if isinstance(n, ast.For) and "static_range" in ast.unparse(n.iter)
        for name in _stored(n.target)
    }
    several = [
        text
        for text in dict.fromkeys(parts)
        if parts.count(text) > 1
        and {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)} <= known
    ]
    for values in itertools.product((False, True), repeat=len(several)):
        yield dict(zip(several, values, strict=True))


def _parts(test: ast.expr) -> Iterator[ast.expr]:
    """What a test is made of by ``and`` and ``not``."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _parts(operand)
        case ast.BoolOp(op=ast.And(), values=values):
            for value in values:
                yield from _parts(value)
        case _:
            yield test


def _ifs(body: Sequence[ast.stmt]) -> Iterator[ast.If]:
    for node in body:
        if isinstance(node, ast.If):
            yield node
        if isinstance(node, (ast.If, ast.For, ast.While)):
            yield from _ifs([*node.body, *node.orelse])


def _module_names(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((a.asname or a.name).split(".")[0] for a in names)
            case ast.Assign():
                yield from _stored(node)


def _stored(node: ast.AST) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node]
    names = (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
    return (n.id for n in names if isinstance(n.ctx, ast.Store))


@dataclass
class _Paths:
    """Goes over statements in their order with the names that are bound on every path so far."""

    switches: dict[str, bool]
    unbound: list[ast.Name] = field(default_factory=list)

    def block(self, body: Sequence[ast.stmt], bound: Bound) -> Bound | None:
        """The names bound behind the statements; None where no path gets there."""
        for statement in body:
            after = self._statement(statement, bound)
            if after is None:
                return None
            bound = after
        return bound

    def _statement(self, node: ast.stmt, bound: Bound) -> Bound | None:
        match node:
            case ast.If(test=test, body=body, orelse=orelse) if (decided := self._decided(test)) is not None:
                return self.block(body if decided else orelse, bound)
            case ast.If(test=test, body=body, orelse=orelse):
                self._uses(test, bound)
                ways = [w for w in (self.block(body, bound), self.block(orelse, bound)) if w is not None]
                return frozenset.intersection(*ways) if ways else None
            case ast.For(target=target, iter=turns, body=body):
                self._uses(turns, bound)
                self.block(body, bound | frozenset(_stored(target)))
                return bound  # what a loop binds first ends with it
            case ast.While(test=test, body=body):
                self._uses(test, bound)
                self.block(body, bound)
                return bound
            case ast.Return():
                self._uses(node, bound)
                return None
            case ast.AugAssign(target=ast.Name(id=name) as target):
                self._uses(node.value, bound)
                self.unbound += [] if name in bound else [target]
                return bound | {name}
            case ast.Assign() | ast.AnnAssign() | ast.Expr() | ast.Pass() | ast.Assert():
                self._uses(node, bound)
                return bound | frozenset(_stored(node))
            case _:
                raise NotImplementedError(f"line {node.lineno}: {type(node).__name__} in a kernel")

    def _decided(self, test: ast.expr) -> bool | None:
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                found = self._decided(operand)
                return None if found is None else not found
            case ast.BoolOp(op=ast.And(), values=values):
                each = [self._decided(value) for value in values]
                return False if False in each else None if None in each else True
            case _:
                return self.switches.get(ast.unparse(test))

    def _uses(self, node: ast.AST, bound: Bound) -> None:
        self.unbound += [
            n
            for n in ast.walk(node)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id not in bound
        ]
