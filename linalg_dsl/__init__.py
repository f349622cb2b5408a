"""linalg_dsl: one line of recurrence in, checked chunkwise kernels out.

    import linalg_dsl as ld

    op = ld.compile(text_or_path_or_function)
    o = op(q, k, v, ...)

Everything is imported at its first use, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linalg_dsl.driver import compile as compile
    from linalg_dsl.errors import ArgumentError as ArgumentError
    from linalg_dsl.errors import DslError as DslError
    from linalg_dsl.errors import InternalError as InternalError
    from linalg_dsl.language.parser import parse as parse
    from linalg_dsl.language.printer import show_spec as show_spec
    from linalg_dsl.language.spec import RecurrenceSpec as RecurrenceSpec

_LANGUAGE = (
    "recurrence", "K", "V", "I", "Vectors", "Scalar", "Scalars", "LogGate", "Gate", "Param", "State", "prev",
    "substeps",
    "outer", "diag", "exp", "log", "sigmoid", "logsigmoid", "softplus", "tanh", "silu", "relu", "elu", "sqrt",
    "rsqrt", "abs", "sign", "min", "max", "clamp", "sum", "dot", "l2norm", "softmax",
)  # fmt: skip
_HOME = {
    "compile": "linalg_dsl.driver",
    "parse": "linalg_dsl.language.parser",
    "show_spec": "linalg_dsl.language.printer",
    "RecurrenceSpec": "linalg_dsl.language.spec",
    "DslError": "linalg_dsl.errors",
    "ArgumentError": "linalg_dsl.errors",
    "InternalError": "linalg_dsl.errors",
    **dict.fromkeys(_LANGUAGE, "linalg_dsl.language.builder"),
}
_SUBPACKAGES = ("algebra", "language", "planner", "codegen", "ops")

__all__ = sorted(set(_HOME) - {"min", "max", "sum", "abs"})


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"linalg_dsl.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("linalg_dsl")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBPACKAGES})
