"""The catalogue's entries as functions: signature and documentation come from the .rec file."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.ops.catalogue import catalogue_text

if TYPE_CHECKING:
    from linalg_dsl.ops.op import CompiledOp

_OPTIONS: dict[str, object] = {
    "initial_state": None,
    "output_final_state": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "max_seqlen": None,
    "slots": None,
    "state_positions": None,
}


class CatalogueFunction:
    """A recurrence of the catalogue, called like the op that it compiles to.

    ``spec`` is what it was compiled from and ``op()`` the compiled op itself, with its plan, source,
    export and check. A call takes the tensors in declaration order or by name, consts by name, and the
    options of every op: initial_state, output_final_state, cu_seqlens.
    """

    def __init__(self, name: str, text: str) -> None:
        self.spec: RecurrenceSpec = parse(text, origin=f"{name}.rec")
        self.text = text
        self.__name__ = self.__qualname__ = name
        self.__module__ = "linalg_dsl.ops"
        self.__doc__ = _documentation(self.spec, text)
        self.__signature__ = _signature(self.spec)

    def op(self, backend: str = "auto") -> CompiledOp:
        """The compiled op; the same object for the same backend."""
        return _compiled(self.__name__, backend)

    def __call__(self, *tensors: Any, backend: str = "auto", **arguments: Any) -> Any:
        return self.op(backend)(*tensors, **arguments)

    def step(self, *tensors: Any, backend: str = "auto", **arguments: Any) -> Any:
        """One or a few tokens of many sequences: ``CompiledOp.step``."""
        return self.op(backend).step(*tensors, **arguments)

    def __repr__(self) -> str:
        return f"<linalg_dsl.ops.{self.__name__}{self.__signature__}>"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return catalogue_function, (self.__name__,)


@cache
def catalogue_function(name: str) -> CatalogueFunction:
    """The function of one entry. Raises ArgumentError for a name that is not in the catalogue."""
    return CatalogueFunction(name, catalogue_text(name))


@cache
def _compiled(name: str, backend: str) -> CompiledOp:
    # ready-made ops stand on the public face, as a user's own would
    import linalg_dsl

    return linalg_dsl.compile(catalogue_function(name).spec, backend=backend)


def _signature(spec: RecurrenceSpec) -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(i.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for i in spec.inputs]
    parameters += [inspect.Parameter(name, keyword, default=value) for name, value in _OPTIONS.items()]
    parameters.append(inspect.Parameter("backend", keyword, default="auto"))
    parameters += [inspect.Parameter(c.name, keyword, default=None) for c in spec.consts]
    return inspect.Signature(parameters)


def _documentation(spec: RecurrenceSpec, text: str) -> str:
    body = text.split(f"recurrence {spec.name}", 1)[-1].strip()
    arguments = "\n".join(f"    {i.name}: {_layout(i)}" for i in spec.inputs)
    carried = "\n".join(f"    {name}: {layout}" for name, layout in _carried(spec).items())
    several = " (a named tuple)" if len(spec.carried) > 1 else ""
    return (
        f"{spec.doc}\n\n{_indented(body)}\n\nArguments:\n{arguments}\n\nState{several}:\n{carried}\n\n"
        "Returns o, or (o, final state) with output_final_state=True. Consts may be given by name."
    )


def _carried(spec: RecurrenceSpec) -> dict[str, str]:
    """The layout of everything that goes from one call to the next."""
    dims = [*(s.dims for s in spec.states), *(i.dims for i in spec.shifted)]
    return {n: f"[{', '.join(('N', 'H', *map(str, d)))}]" for n, d in zip(spec.carried, dims, strict=True)}


def _layout(decl: Input) -> str:
    lead = ("B", "T", "H") if decl.timed else ("H",)
    kind = {"log_gate": ", log decay, at most 0 unless declared", "gate": ", a decay"}.get(decl.kind, "")
    unit = ", of norm at most 1" if decl.unit else ""
    return f"[{', '.join((*lead, *map(str, decl.dims)))}]{kind}{unit}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
