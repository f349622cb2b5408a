"""The functions of the language, for the Python front; each takes symbols and numbers.

Some bear the names of builtins (abs, min, max, sum): import this module, not its names.
"""

from __future__ import annotations

from collections.abc import Iterator

from linalg_dsl.language import syntax as syn
from linalg_dsl.language.substeps import SubstepIndex, passes
from linalg_dsl.language.terms import DEEPEST
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
    """x at the token before: ``prev(k)`` is k_{t-1}. x is made of inputs, not of states."""
    if not isinstance(x, Traced):
        raise TypeError(f"prev takes symbols, got {type(x).__name__}")
    where = place()
    done: dict[int, syn.Node] = {}

    def walk(node: syn.Node) -> syn.Node:
        if id(node) not in done:
            match node:
                case syn.Ref(name, syn.Index(int(time), row)):
                    done[id(node)] = syn.Ref(name, syn.Index(time - 1, row), where)
                case _:
                    done[id(node)] = syn.rebuild(node, walk)
        return done[id(node)]

    return Traced(walk(x.node) if x.node.depth <= DEEPEST else x.node)


def substeps(count: str | int | Traced) -> Iterator[SubstepIndex]:
    """The substeps of one token, ``for j in substeps("n")``: n is a number or a const.

    The body makes the state from the state before; ``k[j]`` is the row of the substep. It is run on
    symbols, twice, however many substeps there are.
    """
    where = place()
    match count:
        case Traced(node=syn.Ref(name, None)):
            return passes(name, where)
        case str() | int() if not isinstance(count, bool):
            return passes(count, where)
    raise TypeError(f"substeps takes a number or the name of a const, got {count!r}")
