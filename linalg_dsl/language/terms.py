"""The meaning of an expression: syntax → algebra, with shapes checked and linearity followed.

``I`` has no size of its own: it is the number 1, marked, until a square matrix stands beside it in a
sum (then it becomes ``Identity``) or anything in a product. What is built of states knows where they meet
other than in a sum, so that the place where an update stops being linear is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Expr, Shape, ShapeError, show_shape
from linalg_dsl.errors import InternalError
from linalg_dsl.language import syntax as syn
from linalg_dsl.language.mistakes import Mistakes
from linalg_dsl.language.values import Value, join, meet, span_of
from linalg_dsl.source import Span

DEEPEST = 100
LARGEST = 4_000
LARGEST_POWER = 64
_BITS = 4_096


class _Clash(Exception):
    """Two operands do not fit: code, message, hint, and the two."""

    def __init__(self, code: str, message: str, hint: str | None = None, pair: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
        self.pair = pair


class _Refused(Exception):
    """Already reported, or unknown for a reason that is already reported."""


class Evaluator:
    """Evaluates syntax with ``lookup`` for names (None: that name's mistake is reported)."""

    def __init__(self, lookup: Callable[[syn.Ref], Value | None], mistakes: Mistakes) -> None:
        self.lookup = lookup
        self.mistakes = mistakes

    def __call__(self, node: syn.Node) -> Value | None:
        """The value, or None where a mistake was reported."""
        if node.depth > DEEPEST or node.size > LARGEST:
            what = "nested too deep" if node.depth > DEEPEST else f"larger than {LARGEST} terms"
            self.refuse("E107", f"the expression is {what}", node.span, "split the recurrence up")
            return None
        try:
            return self.value(node)
        except _Refused:
            return None

    def refuse(self, code: str, message: str, span: Span | None, hint: str | None = None) -> None:
        self.mistakes.add(code, message, span, hint)

    def value(self, node: syn.Node) -> Value:
        match node:
            case syn.Num(value):
                out = Value(ex.Number(value, span=node.span))
            case syn.Ref():
                found = self.lookup(node)
                if found is None:
                    raise _Refused
                out = found
            case syn.Minus(arg):
                inner = self.value(arg)
                out = replace(inner, expr=ex.negate(inner.expr))
            case syn.Total(terms):
                out = self.total(node, self.all(terms))
            case syn.Chain():
                out = self.chain(node)
            case syn.Raised(base, exponent):
                out = self.power(node, *self.all((base, exponent)))
            case syn.Transposed(arg):
                inner = self.value(arg)
                out = replace(inner, expr=ex.transpose(inner.expr), depth=inner.depth + 1)
            case syn.Apply(function, args):
                out = self.apply(node, function, self.all(args))
            case _:
                raise InternalError(f"unknown syntax node {type(node).__name__}")
        return self.bounded(node, out)

    def all(self, nodes: Sequence[syn.Node]) -> list[Value]:
        """Every operand, so that the mistakes of all of them are reported."""
        values = []
        for node in nodes:
            try:
                values.append(self.value(node))
            except _Refused:
                continue
        if len(values) != len(nodes):
            raise _Refused
        return values

    def bounded(self, node: syn.Node, value: Value) -> Value:
        if value.depth > DEEPEST or value.size > LARGEST:
            what = "nests too deep" if value.depth > DEEPEST else f"has more than {LARGEST} terms"
            self.refuse("E107", f"with its bindings substituted this {what}", node.span)
            raise _Refused
        number = _coefficient(value.expr)
        if number and not Fraction(1, 10**60) <= abs(number) <= 10**60:
            self.refuse("E105", "a number out of bounds (1e-60 to 1e60)", node.span)
            raise _Refused
        return replace(value, expr=ex.with_span(value.expr, node.span))

    def numbers(self, node: syn.Node, values: Sequence[Value]) -> None:
        """Refuses exact arithmetic that would grow without bound."""
        if sum(_bits(_coefficient(v.expr)) for v in values) > _BITS:
            self.refuse("E105", "arithmetic with too many long numbers", node.span)
            raise _Refused

    # -- sums ---------------------------------------------------------------------------------
    def total(self, node: syn.Total, values: list[Value]) -> Value:
        self.numbers(node, values)
        shaped = [(v, t) for v, t in zip(values, node.terms, strict=True) if not v.expr.is_scalar]
        for value, term in shaped[1:]:
            if value.shape != shaped[0][0].shape:
                self.clash_in_sum(node, shaped[0], (value, term))
        units = [t for v, t in zip(values, node.terms, strict=True) if v.unit]
        if units and shaped and not ex.is_square(shaped[0][0].shape):
            what = show_shape(shaped[0][0].shape)
            self.refuse("E309", f"I is a square matrix and cannot be added to {what}", units[0].span)
            raise _Refused
        return join(ex.add(v.expr for v in values), values, unit=bool(units) and not shaped)

    def clash_in_sum(
        self, node: syn.Node, first: tuple[Value, syn.Node], second: tuple[Value, syn.Node]
    ) -> None:
        one, two = first[0].shape, second[0].shape
        hint = None
        if one == (two[1], two[0]):
            hint = "one of the two needs a transpose ᵀ"
        elif any(1 in x and ex.is_square(y) and y[0] in x for x, y in ((one, two), (two, one))):
            hint = "a vector added to a matrix: did you mean diag(...)?"
        self.mistakes.add(
            "E301",
            f"cannot add {show_shape(one)} and {show_shape(two)}",
            second[1].span or node.span,
            hint,
            ((f"this is {show_shape(one)}", first[1].span),),
        )
        raise _Refused

    # -- products -----------------------------------------------------------------------------
    def chain(self, node: syn.Chain) -> Value:
        nodes = [node.first, *(f for _, f in node.rest)]
        negative = False
        bare: list[syn.Node] = []
        for factor in nodes:  # -(a + b) c is -((a + b) c), in either front
            while isinstance(factor, syn.Minus):
                factor, negative = factor.arg, not negative
            bare.append(factor)
        values = self.all(bare)
        self.numbers(node, values)
        signs = [s for s, _ in node.rest]
        try:
            out = fold(signs, values)
        except _Clash as clash:
            self.clash_in_chain(node, nodes, signs, values, clash)
            raise _Refused from None
        return replace(out, expr=ex.negate(out.expr)) if negative else out

    def clash_in_chain(
        self,
        node: syn.Chain,
        nodes: list[syn.Node],
        signs: list[syn.ProductSign],
        values: list[Value],
        clash: _Clash,
    ) -> None:
        at = clash.pair[1]
        x, y = _text(nodes[:at]) or "x", _text(nodes[at : at + 1]) or "y"
        once = x if x.startswith("(") and at == 1 else f"({x})"
        hint = clash.hint.replace("{(x)}", once).replace("{x}", x).replace("{y}", y) if clash.hint else None
        regrouped = other_grouping(signs, values)
        if regrouped and (text := _written(nodes, *regrouped)):
            hint = f"products are read from left to right; did you mean `{text}`?"
        left = [n.span for n in nodes[:at]]
        before = left[0].cover(left[-1]) if left and left[0] and left[-1] else None
        shape = _shape_up_to(signs, values, at)
        related = ((f"this is {show_shape(shape)}", before),) if shape else ()
        self.mistakes.add(clash.code, str(clash), nodes[at].span or node.span, hint, related)

    def power(self, node: syn.Raised, base: Value, exponent: Value) -> Value:
        if base.unit or exponent.unit:
            self.refuse("E309", "I cannot stand in a power", node.span)
            raise _Refused
        match base.expr, exponent.expr:
            case _, ex.Number(n) if abs(n) > LARGEST_POWER:
                self.refuse("E105", f"an exponent beyond {LARGEST_POWER}", node.exponent.span)
                raise _Refused
            case ex.Number(x), ex.Number(n) if (x == 0 and n < 0) or (x < 0 and n.denominator != 1):
                self.refuse("E105", "this power has no value", node.span)
                raise _Refused
        try:
            out = ex.power(base.expr, exponent.expr)
        except ShapeError as err:
            below = isinstance(exponent.expr, ex.Number) and exponent.expr.value < 0
            hint = "matrices have no inverses here, in updates or reads: a solve has no chunk form"
            self.refuse("E306", str(err), node.span, hint if below else "for the transpose write ^T")
            raise _Refused from None
        if exponent.expr == ex.ONE:
            return base
        value = join(out, (base, exponent))
        return meet(value, value.states, value.states, node.span, "^")

    # -- functions ----------------------------------------------------------------------------
    def apply(self, node: syn.Apply, function: str, args: list[Value]) -> Value:
        if any(a.unit for a in args):
            self.refuse("E309", f"I cannot be an argument of {function}", node.span)
            raise _Refused
        given = [a.expr for a in args]
        try:
            match function:
                case "diag":
                    if len(given) != 1:
                        raise ShapeError(f"diag takes 1 argument, got {len(given)}")
                    out = ex.diag(given[0])
                case "outer":
                    if len(given) != 2:
                        raise ShapeError(f"outer takes 2 arguments, got {len(given)}")
                    out = ex.outer(*given)
                case _:
                    out = ex.call(function, given)
        except ShapeError as err:
            hint = None
            if function not in ("diag", "outer") and any(
                ex.is_square(a.shape) and 1 not in a.shape for a in args
            ):
                hint = "there are no functions of matrices; one of a vector's elements is `diag(f(x))`"
            if any(not a.expr.is_scalar and a.shape[0] == 1 for a in args):
                hint = "a row is a transposed vector: remove the ᵀ"
            self.refuse("E305", str(err), node.span, hint)
            raise _Refused from None
        value = join(out, args)
        match function:
            case "diag" | "sum":
                return value
            case "outer" | "dot":
                return meet(value, args[0].states, args[1].states, node.span)
            case _:
                return meet(value, value.states, value.states, node.span, function)


def fold(signs: Sequence[syn.ProductSign], values: Sequence[Value]) -> Value:
    """A chain of products from left to right; raises ``_Clash``."""
    run, shape = [values[0]], values[0].shape
    for i, (sign, right) in enumerate(zip(signs, values[1:], strict=True), 1):
        scales = ex.SCALAR in (shape, right.shape)
        matrix = sign == "" or (scales and sign != "/")
        if matrix:
            shape = _product(shape, right.shape, i)
            if sign == "⊙" and (right.unit or any(v.unit for v in run)):
                raise _Clash("E309", "I has no elementwise product; write diag(...)", None, (i - 1, i))
            run.append(right)
            continue
        if sign == "*":
            raise _Clash(
                "E303",
                f"`*` between {show_shape(shape)} and {show_shape(right.shape)} can mean two things",
                _instead_of_star(shape, right.shape),
                (i - 1, i),
            )
        left = _matrix_product(run)
        run = [_divide(left, right, i) if sign == "/" else _elementwise(left, right, i)]
        if run[0].depth > DEEPEST:
            raise _Clash("E107", "too many quotients in one product", "split it up", (i - 1, i))
        shape = run[0].shape
    return _matrix_product(run)


def _product(left: Shape, right: Shape, at: int) -> Shape:
    if left == ex.SCALAR:
        return right
    if right == ex.SCALAR:
        return left
    if left[1] == right[0]:
        return (left[0], right[1])
    hints = []
    if left[1] == 1 and right[1] == 1:
        hints.append("the outer product is `{x} {y}ᵀ`")
        if left[0] == right[0]:
            hints.append("the inner product `{x}ᵀ {y}`, the elementwise product `{x} ⊙ {y}`")
    elif left[0] == 1 and right[0] == 1:
        hints.append("both are rows: a vector is a column, without ᵀ")
    elif left[0] == 1 and right[1] == 1:
        hints.append("vectors are columns, and the transpose of an outer product stands on its right: `x yᵀ`")
    elif left[1] == 1 and left[0] == right[0]:
        hints.append("to scale the rows of a matrix write `diag{(x)} {y}`, for the product `{x}ᵀ {y}`")
    elif left[0] == right[0] and left[0] != 1:
        hints.append("the left one needs a transpose ᵀ")
    elif left[1] == right[1] and left[1] != 1:
        hints.append("the right one needs a transpose ᵀ")
    message = f"cannot multiply {show_shape(left)} by {show_shape(right)}"
    raise _Clash("E302", message, ", ".join(hints) or None, (at - 1, at))


def _matrix_product(run: Sequence[Value]) -> Value:
    if len(run) == 1:
        return run[0]
    out = ex.mul(v.expr for v in run)
    unit = out.is_scalar and all(v.expr.is_scalar for v in run) and any(v.unit for v in run)
    value = join(out, run, unit=unit)
    before = run[0].states
    for right in run[1:]:
        value = meet(value, before, right.states, span_of(run))
        before |= right.states
    return value


def _divide(left: Value, right: Value, at: int) -> Value:
    if right.unit:
        raise _Clash("E309", "a matrix cannot be a denominator", None, (at - 1, at))
    try:
        out = ex.divide(left.expr, right.expr)
    except ShapeError as err:
        raise _Clash("E306", str(err), "a quotient is elementwise, or by a scalar", (at - 1, at)) from None
    except ZeroDivisionError:
        raise _Clash("E105", "division by zero", None, (at - 1, at)) from None
    if ex.is_square(left.shape) and not right.expr.is_scalar:
        raise _Clash("E306", "cannot divide by a square matrix", None, (at - 1, at))
    value = join(out, (left, right), unit=left.unit and right.expr.is_scalar)
    return meet(value, value.states, right.states, span_of((left, right)), "/")


def _instead_of_star(left: Shape, right: Shape) -> str:
    """What may be meant by `*`: between two vectors of one shape the matrix product is not."""
    if left == right and 1 in left:
        return "write `⊙` (or `.*`) for the elementwise product, `dot(x, y)` or `outer(x, y)` for the others"
    return "write `@` for the matrix product, `⊙` for the elementwise one"


def _elementwise(left: Value, right: Value, at: int) -> Value:
    try:
        out = ex.hadamard((left.expr, right.expr))
    except ShapeError:
        one, two = left.shape, right.shape
        hint = None
        if (one[1] == 1 and two[0] == one[0]) or (two[1] == 1 and one[0] == two[0]):
            hint = "to scale the rows of a matrix write `diag{(x)} {y}`"
        elif one == (two[1], two[0]):
            hint = "one of the two needs a transpose ᵀ"
        message = f"an elementwise product of {show_shape(one)} and {show_shape(two)}"
        raise _Clash("E304", message, hint, (at - 1, at)) from None
    value = join(out, (left, right))
    if isinstance(left.expr, ex.Hadamard):  # flat: one more factor nests no deeper
        value = replace(value, depth=max(left.depth, 1 + right.depth))
    return meet(value, left.states, right.states, span_of((left, right)))


def other_grouping(signs: Sequence[syn.ProductSign], values: Sequence[Value]) -> tuple[int, int] | None:
    """Operands i..j that, in parentheses, make the chain fit."""
    n = len(values)
    if n > 8:
        return None
    for i in range(1, n):
        for j in range(n - 1, i, -1):
            try:
                inner = fold(signs[i:j], values[i : j + 1])
                fold([*signs[:i], *signs[j:]], [*values[:i], inner, *values[j + 1 :]])
            except _Clash:
                continue
            return i, j
    return None


def _shape_up_to(signs: Sequence[syn.ProductSign], values: Sequence[Value], at: int) -> Shape | None:
    try:
        return fold(signs[: at - 1], values[:at]).shape
    except _Clash:
        return None


def _text(nodes: Sequence[syn.Node]) -> str:
    """The source text of neighbouring operands, if it is short and known."""
    first, last = nodes[0].span, nodes[-1].span
    if not (first and last):
        return ""
    text = " ".join(first.text[first.start : last.end].split())
    return text if len(text) <= 40 else ""


def _written(nodes: Sequence[syn.Node], i: int, j: int) -> str:
    """The source text of a chain with operands i..j in parentheses."""
    first, last, start, end = nodes[0].span, nodes[-1].span, nodes[i].span, nodes[j].span
    if not (first and last and start and end):
        return ""
    text = first.text
    inner = text[start.start : end.end]
    return " ".join(f"{text[first.start : start.start]}({inner}){text[end.end : last.end]}".split())


def _coefficient(expr: Expr) -> Fraction:
    match expr:
        case ex.Number(value) | ex.Product((ex.Number(value), *_)):
            return value
        case _:
            return Fraction(0)


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()
