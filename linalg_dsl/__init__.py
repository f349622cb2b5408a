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
    from linalg_dsl.language.builder import Gate as Gate
    from linalg_dsl.language.builder import I as I
    from linalg_dsl.language.builder import K as K
    from linalg_dsl.language.builder import LogGate as LogGate
    from linalg_dsl.language.builder import Matrix as Matrix
    from linalg_dsl.language.builder import Param as Param
    from linalg_dsl.language.builder import Scalar as Scalar
    from linalg_dsl.language.builder import Scalars as Scalars
    from linalg_dsl.language.builder import State as State
    from linalg_dsl.language.builder import V as V
    from linalg_dsl.language.builder import Vectors as Vectors
    from linalg_dsl.language.builder import abs as abs
    from linalg_dsl.language.builder import clamp as clamp
    from linalg_dsl.language.builder import diag as diag
    from linalg_dsl.language.builder import dot as dot
    from linalg_dsl.language.builder import elu as elu
    from linalg_dsl.language.builder import exp as exp
    from linalg_dsl.language.builder import l2norm as l2norm
    from linalg_dsl.language.builder import log as log
    from linalg_dsl.language.builder import logsigmoid as logsigmoid
    from linalg_dsl.language.builder import max as max
    from linalg_dsl.language.builder import min as min
    from linalg_dsl.language.builder import outer as outer
    from linalg_dsl.language.builder import prev as prev
    from linalg_dsl.language.builder import recurrence as recurrence
    from linalg_dsl.language.builder import relu as relu
    from linalg_dsl.language.builder import rsqrt as rsqrt
    from linalg_dsl.language.builder import sigmoid as sigmoid
    from linalg_dsl.language.builder import sign as sign
    from linalg_dsl.language.builder import silu as silu
    from linalg_dsl.language.builder import softmax as softmax
    from linalg_dsl.language.builder import softplus as softplus
    from linalg_dsl.language.builder import sqrt as sqrt
    from linalg_dsl.language.builder import substeps as substeps
    from linalg_dsl.language.builder import sum as sum
    from linalg_dsl.language.builder import tanh as tanh
    from linalg_dsl.language.parser import parse as parse
    from linalg_dsl.language.printer import show_spec as show_spec
    from linalg_dsl.language.spec import RecurrenceSpec as RecurrenceSpec
    from linalg_dsl.study.table import sweep as sweep

_LANGUAGE = (
    "recurrence", "K", "V", "I", "Vectors", "Matrix", "Scalar", "Scalars", "LogGate", "Gate", "Param",
    "State", "prev", "substeps",
    "outer", "diag", "exp", "log", "sigmoid", "logsigmoid", "softplus", "tanh", "silu", "relu", "elu", "sqrt",
    "rsqrt", "abs", "sign", "min", "max", "clamp", "sum", "dot", "l2norm", "softmax",
)  # fmt: skip
_HOME = {
    "compile": "linalg_dsl.driver",
    "parse": "linalg_dsl.language.parser",
    "show_spec": "linalg_dsl.language.printer",
    "RecurrenceSpec": "linalg_dsl.language.spec",
    "sweep": "linalg_dsl.study.table",
    "DslError": "linalg_dsl.errors",
    "ArgumentError": "linalg_dsl.errors",
    "InternalError": "linalg_dsl.errors",
    **dict.fromkeys(_LANGUAGE, "linalg_dsl.language.builder"),
}
_SUBPACKAGES = ("algebra", "language", "planner", "codegen", "ops", "nn", "study", "testing")

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
