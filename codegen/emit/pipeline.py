"""The steps of a recurrence of several stages as one function that calls the stages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from linalg_dsl.algebra.expr import Symbol
from linalg_dsl.algebra.traverse import symbols
from linalg_dsl.codegen.emit.names import Names, ascii_text
from linalg_dsl.codegen.emit.render import functions_of, render, template_text
from linalg_dsl.codegen.emit.signature import (
    equations,
    given_outputs,
    literal,
    output_like,
    tuple_text,
)
from linalg_dsl.codegen.emit.token_text import token_text
from linalg_dsl.planner.stages import ONES, PerToken, Shift, Stage, Stages, Step, TokenStep

_LOCALS = (
    "stages", "tensors", "initials", "numbers", "cu_seqlens", "want", "heads", "run",
    "INPUTS", "CARRIED", "NUMBERS",
)  # fmt: skip


WIDTH = 100


@dataclass(frozen=True, slots=True)
class TokenFunction:
    """One step on tokens."""

    function: str
    arguments: tuple[str, ...]
    doc: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What templates/pipeline.py.jinja asks for."""

    title: str
    count: str
    version: str
    equations: tuple[str, ...]
    listing: tuple[str, ...]
    input_names: str
    carried: str
    number_names: str
    token_steps: tuple[TokenFunction, ...]
    inputs: str
    initials: str
    numbers: str
    head_counts: str
    before: tuple[str, ...]
    lines: tuple[str, ...]
    output: str
    finals: str
    helpers: tuple[str, ...]


def emit_pipeline(stages: Stages) -> str:
    """The text of a module with ``run``; it depends on nothing but the stages and this package's version."""
    return _Emitter(stages).run()


class _Emitter:
    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.spec = spec = stages.spec
        library = functions_of(template_text("pipeline_library.py"))
        self.library = library
        names = self.names = Names(reserved=(*_LOCALS, *library))
        self.values = {i.name: names.unique(i.name) for i in spec.inputs}
        self.timed = {i.name for i in spec.inputs if i.timed}
        self.axes = {i.name: len(i.dims) for i in spec.inputs}
        self.initials = {n: names.unique(f"{n}_first") for n in spec.carried}
        used = dict.fromkeys(
            s.name
            for t in stages.steps
            if isinstance(t, TokenStep)
            for s in symbols(t.value)
            if s.name not in self.values and s.time is None
        )
        made = {t.name for t in stages.steps if isinstance(t, TokenStep) and not t.timed}
        self.numbers = {n: names.unique(n) for n in used if n not in made}
        self.finals: dict[str, str] = {}
        self.token_functions: list[TokenFunction] = []

    def run(self) -> str:
        spec = self.spec
        lines = [line for step in self.stages.steps for line in self._step(step)]
        output = self.values[self.stages.output]
        if not any(isinstance(s, Stage) and s.results == (self.stages.output,) for s in self.stages.steps):
            like = list(self.values.values())[output_like(spec)]
            output = f"{output}.to({like}.dtype)"
        if len(self.stages.stages) > 1:
            output = f"spread({output}, heads, 2)"
        finals = [self.finals[n] for n in spec.carried]
        before: tuple[str, ...] = ()
        if self.stages.reverse:
            before = self._turned_around()
            output = f"{output}.flip(1)"
            finals = [f"turned({x}, cu_seqlens)" for x in finals]
        functions = (line for f in self.token_functions for line in f.lines)
        text = "\n".join([*before, *lines, output, *finals, *functions])
        heads = [f"{self.values[i.name]}.shape[{2 if i.timed else 0}]" for i in spec.inputs]
        count = len(self.stages.stages)
        return render(
            "pipeline.py.jinja",
            Pipeline(
                title=ascii_text(spec.name),
                count="one stage" if count == 1 else f"{count} stages",
                version=version("linalg_dsl"),
                equations=equations(spec),
                listing=self._listing(),
                input_names=literal(i.name for i in spec.inputs),
                carried=literal(spec.carried),
                number_names=literal(self.numbers),
                token_steps=tuple(self.token_functions),
                inputs=", ".join(self.values[i.name] for i in spec.inputs),
                initials=", ".join(self.initials.values()),
                numbers=", ".join(self.numbers.values()),
                head_counts=", ".join(["1", *heads]),
                before=before,
                lines=tuple(piece for line in lines for piece in _wrapped(line)),
                output=output,
                finals=", ".join(finals),
                helpers=self._helpers(text),
            ),
        )

    def _turned_around(self) -> tuple[str, ...]:
        """The tokens of every sequence from the last to the first: those of all, and the sequences too."""
        timed = [self.values[i.name] for i in self.spec.inputs if i.timed]
        return (
            *(f"{x} = {x}.flip(1)" for x in timed),
            *(f"{x} = turned({x}, cu_seqlens)" for x in self.initials.values()),
            f"cu_seqlens = None if cu_seqlens is None else {timed[0]}.shape[1] - cu_seqlens.flip(0)",
        )

    # -- steps --------------------------------------------------------------------------------------
    def _step(self, step: Step) -> Sequence[str]:
        match step:
            case Shift():
                return self._shift(step)
            case TokenStep():
                return [self._token_step(step)]
            case PerToken():
                return [self._per_token(step)]
            case Stage():
                return self._stage(step)

    def _shift(self, step: Shift) -> Sequence[str]:
        of, first = self.values[step.of], self.initials[step.first]
        name = self._made(step.name, True, self.axes[step.of])
        start = f'float("{step.start}")' if step.start in (float("inf"), -float("inf")) else repr(step.start)
        lines = [f"{name} = shift({of}, {first}, {start}, heads, cu_seqlens)"]
        if step.carries:
            last = self.finals[step.first] = self.names.unique(f"{step.of}_last")
            lines.append(f"{last} = last_token({of}, {first}, heads, cu_seqlens) if want else None")
        return lines

    def _stage(self, step: Stage) -> Sequence[str]:
        number = self.stages.stages.index(step)
        some = next(iter(self.values.values()))
        given = [f"one({some})" if a == ONES else self.values[a] for a in step.arguments]
        first = next(i for i, a in enumerate(step.arguments) if a in self.timed)
        column = step.column
        before: list[str] = []
        after: list[str] = []
        initials = tuple_text(
            f"column({self.initials[n]})" if column else self.initials[n] for n in step.states
        )
        want, offsets = "want" if step.keeps else "False", "cu_seqlens"
        if not {i.name for i in self.spec.inputs} <= {*step.arguments}:  # else the largest count is there
            counts = tuple_text(
                f"{self.values[a]}.shape[{2 if a in self.timed else 0}]"
                for a in dict.fromkeys(step.arguments)
                if a != ONES
            )
            own = f"stage_heads(heads, {counts})"
            given[first] = f"spread({given[first]}, {own}, 2)"
        made = []
        for result, equation in zip(step.results, step.spec.outputs, strict=True):
            dims = tuple(d for d in equation.value.shape if d not in (1, column))
            made.append(name := self._made(result, True, len(dims)))
            if column in equation.value.shape:
                after.append(f"{name} = {name}[..., 0]")
        lasts = "_"
        if step.keeps:
            names = [self.names.unique(f"{n}_last") for n in step.states]
            self.finals |= dict(zip(step.states, names, strict=True))
            lasts = tuple_text(names)
            after += [f"{x} = {x}[..., 0] if want else None" for x in names if column]
            if len(self.stages.stages) > 1:  # where the inputs of a stage share heads, so do its states
                after += [f"{x} = spread({x}, heads, 1) if want else None" for x in names]
        if step.layouts:
            rows = next(i for i, layout in enumerate(step.layouts) if layout == "rows")
            count = self.names.unique("substeps")
            before = [f"{count} = {self.values[step.arguments[rows]]}.shape[3]"]
            like = self.values[step.arguments[first]]
            for i, layout in enumerate(step.layouts):
                x = given[i]
                if step.arguments[i] not in self.timed and layout != "param":
                    x = f"per_token({x}, {like})"
                match layout:
                    case "rows":
                        given[i] = f"by_rows({x})"
                    case "repeat":
                        given[i] = f"repeated({x}, {count})"
                    case "param":
                        pass
                    case fill:
                        given[i] = f"at_first({x}, {count}, {float(fill)!r})"
            offsets = f"None if cu_seqlens is None else cu_seqlens * {count}"
            after += [f"{name} = {name}[:, {count} - 1 :: {count}]" for name in made]
        call = f"stages[{number}]({tuple_text(given)}, {initials}, {offsets}, {want})"
        return [*before, f"{given_outputs(made)}, {lasts} = {call}", *after]

    def _per_token(self, step: PerToken) -> str:
        of, axes = self.values[step.of], self.axes[step.of]
        like = next(self.values[i.name] for i in self.spec.inputs if i.timed)
        return f"{self._made(step.name, True, axes)} = per_token(wide({of}, heads, 0), {like})"

    def _token_step(self, step: TokenStep) -> str:
        """The call of a function of its own, whose arguments are the values in the expression."""
        used = dict.fromkeys(s.name for s in symbols(step.value))
        local = Names(reserved=("heads", *self.library))
        names = {n: local.unique(n) for n in used}
        numbers = [n for n in used if n in self.numbers]

        def name_of(symbol: Symbol) -> str:
            text, name = names[symbol.name], symbol.name
            if name in self.numbers:
                return text
            if symbol.row is not None:
                text = (
                    f"{text}[..., {symbol.row}, :]" if self.axes[name] == 2 else f"{text}[..., {symbol.row}]"
                )
            missing = 2 - (self.axes[name] - (symbol.row is not None))
            return text + (f"[..., {', '.join(['None'] * missing)}]" if missing else "")

        value = token_text(step.value, name_of)
        if not step.timed:
            value = f"per_head({value}, heads)"
        missing = 2 - len(step.dims)
        value += f"[..., {', '.join(['0'] * missing)}]" if missing else ""
        made = self._made(step.name, step.timed, len(step.dims))
        function = self.names.unique(f"{self.spec.name}_{step.name}")
        arguments = [*names.values(), *(() if step.timed else ("heads",))]
        doc = ascii_text(str(step)).replace("\\", "\\\\")
        self.token_functions.append(TokenFunction(function, tuple(arguments), doc, _returned(value)))
        like = next(self.values[i.name] for i in self.spec.inputs)
        given = [
            f"number({self.numbers[n]}, {like})"
            if n in numbers
            else f"wide({self.values[n]}, heads, {2 if n in self.timed else 0})"
            for n in used
        ]
        return f"{made} = {function}({', '.join([*given, *(() if step.timed else ('heads',))])})"

    def _made(self, name: str, timed: bool, axes: int) -> str:
        self.values[name] = self.names.unique(name)
        self.axes[name] = axes
        if timed:
            self.timed.add(name)
        return self.values[name]

    # -- text ---------------------------------------------------------------------------------------
    def _listing(self) -> tuple[str, ...]:
        return tuple(ascii_text(line) for line in self.stages.headline)

    def _helpers(self, text: str) -> tuple[str, ...]:
        """The library's functions that the text calls, and those that these call."""
        used: set[str] = set()
        todo = [text]
        while todo:
            code = todo.pop()
            found = {n for n in self.library if re.search(rf"\b{n}\(", code)} - used
            used |= found
            todo += [self.library[n].split("\n", 1)[1] for n in found]
        return tuple(code for n, code in self.library.items() if n in used)


def _returned(value: str) -> tuple[str, ...]:
    """A return statement, in parentheses where it is long."""
    if len(value) + len("return ") <= WIDTH:
        return (f"return {value}",)
    parts = textwrap.wrap(value, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return ("return (", *(f"    {part}" for part in parts), ")")


def _wrapped(line: str) -> list[str]:
    """A statement on several lines where it is long: broken inside of its last call."""
    if len(line) <= WIDTH:
        return [line]
    head, _, rest = line.partition("(" if "= stages" not in line else "](")
    opening = "(" if "= stages" not in line else "]("
    return [
        head + opening,
        *(
            f"    {part}"
            for part in textwrap.wrap(
                rest.removesuffix(")"), WIDTH - 4, break_long_words=False, break_on_hyphens=False
            )
        ),
        ")",
    ]
