"""Generated modules made a file of their own: the modules, autograd functions, and a function to call."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from linalg_dsl.algebra.expr import Call, Dim, Expr, Number, Power, Product, Quotient, Sum, Symbol
from linalg_dsl.algebra.traverse import symbols
from linalg_dsl.codegen.emit.merge import merge
from linalg_dsl.codegen.emit.names import Names, ascii_text
from linalg_dsl.codegen.emit.render import render
from linalg_dsl.codegen.emit.signature import axis_source, head_counts, tuple_text
from linalg_dsl.errors import ArgumentError, InternalError
from linalg_dsl.language.printer import show_float
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.planner.stages import Shift, Stage, Stages, TokenStep

_OWN = frozenset((
    "initial_state", "output_final_state", "cu_seqlens", "save", "State", "collections", "functools",
    "run_stage", "tensors", "given", "stages", "states", "o", "count", "heads", "kind", "starts",
    "state", "slots", "accepted", "keep", "views", "size", "start",
))  # fmt: skip
_FUNCTIONS = {
    "exp": "math.exp({})", "log": "math.log({})", "sqrt": "math.sqrt({})", "tanh": "math.tanh({})",
    "rsqrt": "(1 / math.sqrt({}))", "sigmoid": "(1 / (1 + math.exp(-({}))))", "abs": "abs({})",
    "softplus": "math.log1p(math.exp({}))", "logsigmoid": "(-math.log1p(math.exp(-({}))))",
    "min": "min({})", "max": "max({})",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Standalone:
    """What templates/standalone.py.jinja asks for."""

    recurrence: str
    states: str
    forward: str
    backward: str
    outputs: int


@dataclass(frozen=True, slots=True)
class StageCall:
    """One stage: its autograd function, and the text of the numbers that it takes."""

    recurrence: str
    consts: str


@dataclass(frozen=True, slots=True)
class StandaloneFunction:
    """What the functions of an exported file have in common: arguments, checks, and lines on them."""

    function: str
    arguments: tuple[str, ...]
    arguments_text: str
    layouts: tuple[str, ...]
    carried: tuple[str, ...]
    inputs: tuple[str, ...]
    lines: tuple[str, ...]
    starts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StandaloneCall(StandaloneFunction):
    """What templates/standalone_call.py.jinja asks for."""

    program: str
    stages: tuple[StageCall, ...]
    numbers: str
    several: bool


@dataclass(frozen=True, slots=True)
class StandaloneStep(StandaloneFunction):
    """What templates/standalone_step.py.jinja asks for."""

    head_counts: str
    views: tuple[str, ...]
    token: int
    step: str
    consts: str


@dataclass(frozen=True, slots=True)
class StageModule:
    """The generated module of a stage, and its ``CONSTS``."""

    stage: Stage
    text: str
    consts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepModule:
    """The generated module that decodes, its ``CONSTS``, and ``DecodeForm.parts``."""

    text: str
    consts: tuple[str, ...]
    parts: tuple[tuple[int | None, ...], ...]


def standalone_text(
    stages: Stages, modules: Sequence[StageModule], program: str | None, step: StepModule | None = None
) -> str:
    """The text of a file that imports torch (and triton) only and gives the same bits as the op.

    ``program`` is the module of the steps between several stages, ``step`` the one that decodes. The consts
    that modules take at each call are keyword arguments here, but for sizes; others are fixed in the text.
    """
    texts = [m.text for m in modules]
    if program is None and step is None:
        return _File(stages, modules, texts[0], ({},), None).text()
    named = {"": texts[0]}
    if program is not None:
        named = {"": program, **{f"_stage{i}": text for i, text in enumerate(texts, 1)}}
    if step is not None:  # the name of its kernel is that of the function to call
        kernels = re.findall(r"^@triton\.jit\(do_not_specialize=.*\ndef (\w+)\(", step.text, re.M)
        named["_step"] = (
            re.sub(rf"\b({'|'.join(kernels)})\b", r"\1_kernel", step.text) if kernels else step.text
        )
    merged = merge(named)
    head = [_heading(named[""]), merged.imports, merged.common, merged.sections[0]]
    for i, section in enumerate(merged.sections[1:], 1):
        title = "# -- a few tokens from states that are updated in place "
        if program is not None and i <= len(modules):
            title = f"# -- stage {i} of {len(modules)}: {ascii_text(modules[i - 1].stage.spec.name)} "
        head.append(f"{title:-<100}\n\n\n{section}")
    body = "\n\n\n".join(x.strip("\n") for x in head if x)
    of_stages = merged.names[:1] if program is None else merged.names[1 : len(modules) + 1]
    run = None if program is None else merged.names[0]["run"]
    last = None if step is None else (step, merged.names[-1]["step"])
    return _File(stages, modules, body, of_stages, run, last).text()


class _File:
    """``names``: what a name of each module is called in ``body``."""

    def __init__(
        self,
        stages: Stages,
        modules: Sequence[StageModule],
        body: str,
        names: Sequence[Mapping[str, str]],
        program: str | None,
        step: tuple[StepModule, str] | None = None,
    ) -> None:
        self.stages = stages
        self.step = step
        self.spec = spec = stages.spec
        self.modules = modules
        self.body = body
        self.names_in = names
        self.program = program
        own = Names(reserved=_top_level(body) | _OWN)
        every = [f"_Recurrence_stage{i}" for i in range(1, len(modules) + 1)] if program else ["_Recurrence"]
        self.recurrences = [own.unique(name) for name in every]
        self.function = own.unique(spec.name)
        self.local = {decl.name: own.unique(decl.name) for decl in spec.inputs}
        self.names = own
        self.sizes: dict[Dim, str] = {}
        self.lines: list[str] = []

    def text(self) -> str:
        spec = self.spec
        names = {c.name: self.names.unique(c.name) for c in spec.consts}
        given = self._const_lines(names, {c for m in self.modules for c in m.consts} | set(self._numbers()))
        calls = [self._call(m, r, names) for m, r in zip(self.modules, self.recurrences, strict=True)]
        numbers = [names.get(n) or f"float({self._size(n)})" for n in self._numbers()]
        starts = self._starts()
        classes = [
            render(
                "standalone.py.jinja",
                Standalone(
                    r,
                    n.get("STATES", "STATES"),
                    n.get("forward", "forward"),
                    n.get("backward", "backward"),
                    len(m.stage.results),
                ),
            ).rstrip("\n")
            for r, n, m in zip(self.recurrences, self.names_in, self.modules, strict=True)
        ]
        call = render(
            "standalone_call.py.jinja",
            StandaloneCall(
                function=self.function,
                arguments=(*self.local.values(), "*", *(f"{names[c]}=None" for c in given)),
                arguments_text=", ".join(self.local.values()),
                layouts=tuple(f"{self.local[d.name]}: {_layout(d)}" for d in spec.inputs),
                carried=state_fields(spec),
                inputs=tuple(self.local.values()),
                lines=tuple(self.lines),
                starts=starts,
                program=self.program or "",
                stages=tuple(calls),
                numbers=tuple_text(numbers),
                several=any(len(m.stage.results) > 1 for m in self.modules),
            ),
        ).rstrip("\n")
        tail = "\n".join([*classes, call, *self._step_call(names)])
        needed = [lib for lib in ("collections", "functools", "math") if f"{lib}." in tail]
        missing = [lib for lib in needed if not re.search(rf"^import {lib}$", self.body, re.M)]
        head = _importing(self.body, missing) if missing else self.body
        return head.rstrip("\n") + "\n" + tail + "\n"

    def _const_lines(self, names: dict[str, str], wanted: set[str]) -> list[str]:
        """Adds lines that give the wanted consts their values; gives those that may be arguments."""
        spec = self.spec
        given = [c.name for c in spec.consts if c.name in wanted]
        for const in _needed(spec, given):
            value = next(c.value for c in spec.consts if c.name == const)
            sizes = {str(d): self._size(d) for d in ("K", "V") if d in _symbols(value)}
            name, code = names[const], _python(value, names | sizes)
            chosen = f"{code} if {name} is None else {name}" if const in given else code
            self.lines.append(f"{name} = {chosen}")
        return given

    def _step_call(self, names: dict[str, str]) -> Sequence[str]:
        """The function that decodes, if it is wanted."""
        if self.step is None:
            return ()
        (module, step), spec = self.step, self.spec
        self.lines, self.sizes = [], {}
        given = self._const_lines(names, set(module.consts))
        consts = [names.get(c) or f"float({self._size(c)})" for c in module.consts]
        starts = []
        for dims, start in [
            *((s.dims, s.start) for s in spec.states),
            *((i.dims, 0.0) for i in spec.shifted),
        ]:
            sizes = ", ".join(["tensors[0].shape[0]", "heads", *(self._size(d) for d in dims)])
            starts.append(f"(({sizes}), {_start(start)})")
        rows = [(i, row) for i, own in enumerate(module.parts) for row in own]
        return (
            render(
                "standalone_step.py.jinja",
                StandaloneStep(
                    function=self.names.unique(f"{spec.name}_step"),
                    arguments=(*self.local.values(), "*", *(f"{names[c]}=None" for c in given)),
                    arguments_text=", ".join(self.local.values()),
                    layouts=tuple(f"{self.local[d.name]}: {_layout(d)}" for d in spec.inputs),
                    carried=state_fields(spec),
                    inputs=tuple(self.local.values()),
                    lines=tuple(self.lines),
                    head_counts=head_counts(spec),
                    starts=tuple(starts),
                    views=tuple(
                        f"states[{i}]" if row is None else f"states[{i}].select(2, {row})" for i, row in rows
                    ),
                    token=next(i for i, d in enumerate(spec.inputs) if d.timed),
                    step=step,
                    consts=tuple_text(consts),
                ),
            ).rstrip("\n"),
        )

    def _numbers(self) -> tuple[str, ...]:
        """The numbers of the steps between stages."""
        if self.program is None:
            return ()
        found = {s.name for t in self.stages.steps if isinstance(t, TokenStep) for s in symbols(t.value)}
        made = {i.name for i in self.spec.inputs}
        made |= {name for t in self.stages.steps if not isinstance(t, Shift) for name in t.made}
        listed = re.search(r"^NUMBERS = (\(.*\))$", self.body, re.M)
        order = ast.literal_eval(listed.group(1)) if listed else ()
        return tuple(n for n in order if n in found - made)

    def _call(self, module: StageModule, recurrence: str, names: Mapping[str, str]) -> StageCall:
        axes = dict(module.stage.axes)
        consts = [names[c] if c in names else f"float({self._size(axes.get(c, c))})" for c in module.consts]
        return StageCall(recurrence, tuple_text(consts))

    def _size(self, axis: Dim) -> str:
        """The name of an axis' size, which a line before tells."""
        if isinstance(axis, int):
            return str(axis)
        if axis not in self.sizes:
            where, position = axis_source(self.spec, axis)
            self.sizes[axis] = self.names.unique(axis)
            self.lines.append(f"{self.sizes[axis]} = tensors[{where}].shape[{position}]")
        return self.sizes[axis]

    def _starts(self) -> tuple[str, ...]:
        """Fills in states that do not start at 0."""
        spec = self.spec
        if all(s.start == 0 for s in spec.states):
            return ()
        token = next(i for i, d in enumerate(spec.inputs) if d.timed)
        made = []
        for state in spec.states:
            sizes = ", ".join(["count", "heads", *(self._size(d) for d in state.dims)])
            full = f"tensors[{token}].new_full(({sizes}), {_start(state.start)}, dtype=kind)"
            made.append(full if state.start else "None")
        made += ["None" for _ in spec.shifted]
        return (
            f"count = tensors[{token}].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1",
            f"heads = max([{head_counts(spec)}])",
            "kind = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32",
            f"starts = {tuple_text(made)}",
            "given = tuple(start if x is None else x for x, start in zip(given, starts))",
        )


def _start(value: float) -> str:
    return show_float(value) if math.isfinite(value) else f'float("{value}")'


def _heading(text: str) -> str:
    """The comments at the top of a module."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line)
    return "\n".join(lines)


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
    """The names of what is carried as fields of a named tuple, in ASCII."""
    names = Names()
    return tuple(names.unique(name) for name in spec.carried)


def _needed(spec: RecurrenceSpec, consts: Iterable[str]) -> list[str]:
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
