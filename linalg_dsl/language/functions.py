"""The functions of the language, for the Python front; each takes symbols and numbers.

Some bear the names of builtins (abs, min, max, sum): import this module, not its names.
"""

from __future__ import annotations

from collections.abc import Iterator

from linalg_dsl.errors import DslError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.tracing import Operand, Traced, apply, place


def diag(x: Traced) -> Traced:
    """The square matrix with the vector x on its diagonal."""
    return apply("diag", x)


def outer(x: Traced, y: Traced) -> Traced:
    """x yᵀ."""
    return apply("outer", x, y)


def exp(x: Operand) -> Traced:
    return apply("exp", x)


def log(x: Operand) -> Traced:
    return apply("log", x)


def sigmoid(x: Operand) -> Traced:
    return apply("sigmoid", x)


def logsigmoid(x: Operand) -> Traced:
    return apply("logsigmoid", x)


def softplus(x: Operand) -> Traced:
    return apply("softplus", x)


def tanh(x: Operand) -> Traced:
    return apply("tanh", x)


def silu(x: Operand) -> Traced:
    return apply("silu", x)


def relu(x: Operand) -> Traced:
    return apply("relu", x)


def elu(x: Operand) -> Traced:
    return apply("elu", x)


def sqrt(x: Operand) -> Traced:
    return apply("sqrt", x)


def rsqrt(x: Operand) -> Traced:
    """1 / sqrt(x)."""
    return apply("rsqrt", x)


def abs(x: Operand) -> Traced:
    return apply("abs", x)


def sign(x: Operand) -> Traced:
    return apply("sign", x)


def min(x: Operand, y: Operand) -> Traced:
    """The smaller one, element by element."""
    return apply("min", x, y)


def max(x: Operand, y: Operand) -> Traced:
    """The larger one, element by element."""
    return apply("max", x, y)


def clamp(x: Operand, low: Operand, high: Operand) -> Traced:
    return apply("clamp", x, low, high)


def l2norm(x: Traced) -> Traced:
    """x / sqrt(x·x + 1e-6)."""
    return apply("l2norm", x)


def sum(x: Traced) -> Traced:
    """The sum of a vector's elements."""
    return apply("sum", x)


def dot(x: Traced, y: Traced) -> Traced:
    return apply("dot", x, y)


def softmax(x: Traced) -> Traced:
    """Over the elements of a vector."""
    return apply("softmax", x)


def prev(x: Traced) -> Traced:
    """x at the token before: ``prev(k)`` is k_{t-1}."""
    node = x.node if isinstance(x, Traced) else None
    if not isinstance(node, syn.Ref) or node.index is None:
        raise DslError.single("E902", "prev takes an input by its name", place(), "write `prev(k)`")
    return Traced(syn.Ref(node.name, syn.Index(node.index.time - 1, node.index.row), place()))


def substeps(count: str | int) -> Iterator[int]:
    """The substeps of one token: ``for j in substeps("n")``."""
    hint = "for a fixed small n write the steps out, with rows k[0], k[1]"
    raise DslError.single("E903", f"substeps({count!r}) are not supported yet", place(), hint)
