"""The Python front: a function on symbols is run once, and what it returns is the recurrence.

    @recurrence
    def linear_attention(S, q: K, k: K, v: V):
        S = S + outer(k, v)
        return S, S.T @ q

The function receives S_{t-1}. What it returns first is S_t: wherever the output uses that very
object, it reads S_t, and wherever it uses the argument, it reads S_{t-1}. Values, not source text, are
looked at, so the function may live in a notebook, be generated, or call others. Further states are
parameters annotated with ``State(...)`` and are returned in the order of parameters, before the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any

from linalg_dsl.errors import DslError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.functions import (
    abs,
    clamp,
    diag,
    dot,
    elu,
    exp,
    l2norm,
    log,
    logsigmoid,
    max,
    min,
    outer,
    prev,
    relu,
    rsqrt,
    sigmoid,
    sign,
    silu,
    softmax,
    softplus,
    sqrt,
    substeps,
    sum,
    tanh,
)
from linalg_dsl.language.kinds import (
    Gate,
    I,
    K,
    Kind,
    LogGate,
    Matrix,
    Param,
    Scalar,
    Scalars,
    State,
    StateKind,
    V,
    Vectors,
    kind_of,
)
from linalg_dsl.language.mistakes import Mistakes
from linalg_dsl.language.names import is_name
from linalg_dsl.language.resolve import resolve
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.language.substeps import LOOPS, Traversal
from linalg_dsl.language.tracing import Traced, lift, whole_function
from linalg_dsl.language.updates import Updates
from linalg_dsl.source import Span

__all__ = [
    "Gate", "I", "K", "LogGate", "Matrix", "Param", "PythonRecurrence", "Scalar", "Scalars", "State", "V",
    "Vectors", "abs", "clamp", "diag", "dot", "elu", "exp", "l2norm", "log", "logsigmoid", "max", "min",
    "outer", "prev", "recurrence", "relu", "rsqrt", "sigmoid", "sign", "silu", "softmax", "softplus", "sqrt",
    "substeps", "sum", "tanh",
]  # fmt: skip


class PythonRecurrence:
    """A function under ``@recurrence``. ``spec`` traces it at first use and may raise ``DslError``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "recurrence")
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__

    @cached_property
    def spec(self) -> RecurrenceSpec:
        return _Tracer(self.function).spec()

    def __str__(self) -> str:
        return str(self.spec)


def recurrence(function: Callable[..., Any]) -> PythonRecurrence:
    """Makes a recurrence of a function ``f(S, inputs...) -> (S, output)`` on symbols.

    With further states, ``f(S, n: State(K), inputs...) -> (S, n, output)``.
    """
    if not callable(function):
        raise TypeError(f"recurrence takes a function, got {type(function).__name__}")
    return PythonRecurrence(function)


class _Tracer:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.mistakes = Mistakes()
        self.span: Span | None = whole_function(function)
        self.statements: list[syn.Statement] = []
        self.symbols: dict[str, Traced] = {}
        self.states: list[str] = []

    def spec(self) -> RecurrenceSpec:
        name = getattr(self.function, "__name__", "")
        if not is_name(name):
            self.mistakes.add("E104", f"`{name}` is not a name", self.span, "give the function a name")
        parameters = list(inspect.signature(self.function).parameters.values())
        annotations = self.annotations()
        for position, parameter in enumerate(parameters):
            self.parameter(parameter, annotations.get(parameter.name, inspect.Parameter.empty), position)
        if not self.states:
            self.mistakes.add(
                "E404", "the function has no state", self.span, "its first parameter is S_{t-1}"
            )
        self.mistakes.raise_if_any()
        positional = [self.symbols[p.name] for p in parameters if p.kind is not p.KEYWORD_ONLY]
        by_name = {p.name: self.symbols[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}
        loops: list[Traversal] = []
        token = LOOPS.set(loops)
        try:
            returned = self.function(*positional, **by_name)
        finally:
            LOOPS.reset(token)
        self.equations(returned, loops)
        doc = inspect.getdoc(self.function) or ""
        return resolve(syn.Document(name, tuple(self.statements), doc, self.span), self.mistakes)

    def annotations(self) -> dict[str, Any]:
        """Annotations as objects, also where the module postpones them."""
        try:
            return inspect.get_annotations(self.function, eval_str=True)
        except (NameError, AttributeError, SyntaxError, TypeError) as err:
            hint = "names in annotations are looked up in the function's module"
            raise DslError.single("E411", f"an annotation cannot be read: {err}", self.span, hint) from err

    def parameter(self, parameter: inspect.Parameter, annotation: Any, position: int) -> None:
        name, none = parameter.name, inspect.Parameter.empty
        add = self.mistakes.add
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            add("E411", f"`*{name}` is no input of a recurrence", self.span, "name every input")
            return
        kind = kind_of(annotation)
        if parameter.default is not none:
            value = lift(parameter.default)
            if kind is not None or annotation is not none:
                add(
                    "E411",
                    f"`{name}` has an annotation and a default",
                    self.span,
                    "a default makes it a const",
                )
            elif value is None:
                add("E409", f"the default of `{name}` is no number", self.span, "such as `scale=1 / sqrt(K)`")
            else:
                self.statements.append(syn.ConstDecl(name, self.span, value))
                self.symbols[name] = Traced(syn.Ref(name, None))
        elif isinstance(annotation, StateKind) or (annotation is none and position == 0):
            carried = annotation if isinstance(annotation, StateKind) else StateKind()
            dims = None if carried.dims is None else tuple((d, self.span) for d in carried.dims)
            self.statements.append(syn.StateDecl(name, self.span, dims, carried.start))
            self.symbols[name] = Traced(syn.Ref(name, syn.Index(-1)))
            self.states.append(name)
        elif kind is None:
            what = "no annotation" if annotation is none else f"the annotation {annotation!r}"
            hint = (
                "annotate inputs with K, V, Vectors, Scalar, LogGate, Gate or Param; a default makes a const"
            )
            add("E411", f"`{name}` has {what}", self.span, hint)
        else:
            self.input(name, kind)

    def input(self, name: str, kind: Kind) -> None:
        dims: tuple[syn.DimName, ...] = tuple((d, self.span) for d in kind.dims)
        self.statements.append(
            syn.InputDecl(
                name, self.span, dims, kind.gate, kind.range, self.span, kind.has_unit, self.span, kind.timed
            )
        )
        self.symbols[name] = Traced(syn.Ref(name, syn.Index(0) if kind.timed else None))

    def equations(self, returned: Any, loops: list[Traversal]) -> None:
        """The updates and the output from what the function returned."""
        wanted = len(self.states) + 1
        if not isinstance(returned, tuple) or len(returned) != wanted:
            got = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
            states = ", ".join(self.states)
            raise DslError.single("E410", f"returns {got}", self.span, f"return ({states}, output)")
        nodes = [lift(value) for value in returned]
        for node, value in zip(nodes, returned, strict=True):
            if node is None:
                raise DslError.single("E410", f"returns {type(value).__name__}, not a symbol", self.span)
        *updates, output = [n for n in nodes if n is not None]
        for loop in loops:
            if loop.is_open:
                hint = "its body may not leave it by `break` or `return`"
                raise DslError.single("E903", "a loop of substeps that does not end", loop.span, hint)
        index = next(n for n in ("j", "i", "l", *(f"j{i}" for i in range(1000))) if n not in self.symbols)
        present = Updates(dict(zip(self.states, updates, strict=True)), loops, index)
        self.statements += present.statements()
        target = next(n for n in ("o", "y", "out", "output_value") if n not in self.symbols)
        self.statements.append(syn.OutputDecl(target, self.span))
        read = present.output(output)
        self.statements.append(syn.Assign(target, syn.Index(0), read, output.span or self.span))
