"""A generated module made a file of its own: the module, an autograd function, and one to call."""

from __future__ import annotations

import re
from dataclasses import dataclass

from linalg_dsl.algebra.expr import Call, Expr, Number, Power, Product, Quotient, Sum, Symbol
from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.render import render
from linalg_dsl.codegen.emit.signature import axis_source
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.spec import Input, RecurrenceSpec

_FUNCTIONS = {
    "exp": "math.exp({})", "log": "math.log({})", "sqrt": "math.sqrt({})", "tanh": "math.tanh({})",
    "rsqrt": "(1 / math.sqrt({}))", "sigmoid": "(1 / (1 + math.exp(-({}))))", "abs": "abs({})",
    "softplus": "math.log1p(math.exp({}))", "logsigmoid": "(-math.log1p(math.exp(-({}))))",
    "min": "min({})", "max": "max({})",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Standalone:
    """What templates/standalone.py.jinja asks for."""

    function: str
    arguments: tuple[str, ...]
    arguments_text: str
    layouts: tuple[str, ...]
    inputs: tuple[str, ...]
    const_lines: tuple[str, ...]
    run_time_consts: tuple[str, ...]
    states: tuple[str, ...]


def standalone_text(spec: RecurrenceSpec, module: str, consts: tuple[str, ...]) -> str:
    """The text of a file that imports torch (and triton) only and gives the same bits as the op.

    ``module`` is a generated module's text, ``consts`` its ``CONSTS``: those are keyword arguments here,
    but for the sizes K and V; all others are fixed in the text.
    """
    own = {"initial_state", "output_final_state", "cu_seqlens", "save", "State", "collections"}
    names = Names(reserved=_top_level(module) | own)
    function = names.unique(spec.name)
    local = {decl.name: names.unique(decl.name) for decl in spec.inputs}
    numbers = {c.name: names.unique(c.name) for c in spec.consts}
    lines = []
    for axis in ("K", "V"):
        if axis in consts or any(axis in _symbols(c.value) for c in spec.consts if c.name in consts):
            where, position = axis_source(spec, axis)
            numbers[axis] = names.unique(axis)
            lines.append(f"{numbers[axis]} = tensors[{where}].shape[{position}]")
    for const in _needed(spec, consts):
        name, value = numbers[const], _python(next(c.value for c in spec.consts if c.name == const), numbers)
        lines.append(
            f"{name} = {value} if {name} is None else {name}" if const in consts else f"{name} = {value}"
        )
    tail = render(
        "standalone.py.jinja",
        Standalone(
            function=function,
            arguments=(*local.values(), "*", *(f"{numbers[c]}=None" for c in consts if c not in ("K", "V"))),
            arguments_text=", ".join(local.values()),
            layouts=tuple(f"{local[d.name]}: {_layout(d)}" for d in spec.inputs),
            inputs=tuple(local.values()),
            const_lines=tuple(lines),
            run_time_consts=tuple(f"float({numbers[c]})" if c in ("K", "V") else numbers[c] for c in consts),
            states=state_fields(spec),
        ),
    )
    needed = [lib for lib in ("collections", "math") if f"{lib}." in tail]
    missing = [lib for lib in needed if not re.search(rf"^import {lib}$", module, re.M)]
    head = _importing(module, missing) if missing else module
    return head.rstrip("\n") + "\n" + tail.rstrip("\n") + "\n"


def _layout(decl: Input) -> str:
    lead = ("B", "T", "h") if decl.timed else ("h",)
    return f"[{', '.join([*lead, *map(str, decl.dims)])}]"


def _top_level(module: str) -> set[str]:
    """Names that the module defines."""
    return set(re.findall(r"^(?:def |class )?(\w+)(?:\(| =|:)", module, re.M))


def _importing(module: str, libraries: list[str]) -> str:
    """The module with these imports, each of the standard library, before its first."""
    lines = "".join(f"import {lib}\n" for lib in libraries)
    first = re.search(r"^import ", module, re.M)
    if first is None:
        raise InternalError("a module without imports")
    gap = "\n" if module[first.start() :].startswith("import torch") else ""
    return f"{module[: first.start()]}{lines}{gap}{module[first.start() :]}"


def state_fields(spec: RecurrenceSpec) -> tuple[str, ...]:
    """The names of the states as fields of a named tuple."""
    names = Names()
    return tuple(names.unique(s.name) for s in spec.states)


def _needed(spec: RecurrenceSpec, consts: tuple[str, ...]) -> list[str]:
    """The consts and those that their values use, in declaration order."""
    need = set(consts)
    for const in reversed(spec.consts):
        if const.name in need:
            need |= _symbols(const.value) & {c.name for c in spec.consts}
    return [c.name for c in spec.consts if c.name in need]


def _symbols(expr: Expr) -> set[str]:
    own = {expr.name} if isinstance(expr, Symbol) else set()
    return own.union(*(_symbols(c) for c in expr.children)) if expr.children else own


def _python(expr: Expr, names: dict[str, str]) -> str:
    match expr:
        case Number(value):
            whole = value.denominator == 1
            return f"({value.numerator})" if whole else f"({value.numerator} / {value.denominator})"
        case Symbol(name=name):
            return names[name]
        case Sum(terms):
            return f"({' + '.join(_python(t, names) for t in terms)})"
        case Product(factors):
            return f"({' * '.join(_python(f, names) for f in factors)})"
        case Quotient(numerator, denominator):
            return f"({_python(numerator, names)} / {_python(denominator, names)})"
        case Power(base, exponent):
            return f"({_python(base, names)} ** {_python(exponent, names)})"
        case Call("clamp", (x, low, high)):
            return f"min(max({_python(x, names)}, {_python(low, names)}), {_python(high, names)})"
        case Call(function, args) if function in _FUNCTIONS:
            return _FUNCTIONS[function].format(", ".join(_python(a, names) for a in args))
        case _:
            raise ArgumentError("export: the value of a const uses a function that plain Python lacks")
