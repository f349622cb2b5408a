"""Back to text: ``show_expr`` writes mathematics, ``show_spec`` a text that ``parse`` reads again."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from linalg_dsl.algebra import expr as ex
from linalg_dsl.algebra.expr import Expr
from linalg_dsl.algebra.traverse import symbols, transform
from linalg_dsl.errors import InternalError
from linalg_dsl.language.inference import shown_by
from linalg_dsl.language.spec import Equation, Input, Interval, RecurrenceSpec, State

_SUM, _PRODUCT, _POSTFIX, _ATOM = range(4)
"""How tightly a piece of text binds; a piece is put in parentheses where more is asked for."""


def show_expr(expr: Expr) -> str:
    """An expression as in a paper: ``exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1}``."""
    return _show(expr)[0]


def _show(expr: Expr) -> tuple[str, int]:
    match expr:
        case ex.Number(value):
            return _number(value)
        case ex.Symbol():
            return _symbol(expr), _ATOM
        case ex.Identity():
            return "I", _ATOM
        case ex.Sum(terms):
            text = _show(terms[0])[0]
            for term in terms[1:]:
                piece = _show(term)[0]
                text += f" - {piece[1:]}" if piece.startswith("-") else f" + {piece}"
            return text, _SUM
        case ex.Product(factors):
            return _product(factors), _signed(factors)
        case ex.Hadamard(factors) if all(isinstance(f, ex.Transpose) for f in factors):
            return f"({show_expr(ex.transpose(expr))})ᵀ", _POSTFIX
        case ex.Hadamard(factors):
            return " ⊙ ".join(_at(f, _POSTFIX) for f in factors), _PRODUCT
        case ex.Quotient(numerator, denominator):
            return f"{_first(numerator)} / {_at(denominator, _POSTFIX)}", _PRODUCT
        case ex.Power(base, exponent):
            return f"{_at(base, _ATOM)}^{_exponent(exponent)}", _POSTFIX
        case ex.Transpose(arg):
            return f"{_at(arg, _ATOM)}ᵀ", _POSTFIX
        case ex.Diag(arg):
            return f"diag({show_expr(arg)})", _ATOM
        case ex.Call(function, args):
            return f"{function}({', '.join(show_expr(a) for a in args)})", _ATOM
        case ex.Iterate(name, index, count, start, body):
            before, step = f"{name}_t = {show_expr(start)}", f"{name}_t = {show_expr(body)}"
            return f"[{before}; for {index} in 1..{show_expr(count)}: {step}]", _ATOM
        case _:
            raise InternalError(f"no text for {type(expr).__name__}")


def _at(expr: Expr, level: int) -> str:
    text, binds = _show(expr)
    return text if binds >= level else f"({text})"


def _first(expr: Expr) -> str:
    """The first operand of a product sign: a product, but not an elementwise one, stands bare."""
    return _at(expr, _POSTFIX if isinstance(expr, ex.Hadamard) else _PRODUCT)


def _signed(factors: tuple[Expr, ...]) -> int:
    """A product with a minus binds like a sum."""
    match factors[0]:
        case ex.Number(value) if value < 0:
            return _SUM
        case _:
            return _PRODUCT


def _product(factors: tuple[Expr, ...]) -> str:
    sign, number, rest = "", "", factors
    match factors[0]:
        case ex.Number(value):
            sign = "-" if value < 0 else ""
            number = "" if abs(value) == 1 else _number(abs(value))[0] + " "
            rest = factors[1:]
    match rest:
        case (ex.Quotient(ex.Number(), denominator),) if number:
            return f"{sign}{number}/ {_at(denominator, _POSTFIX)}"
        case (ex.Quotient(numerator, denominator),):
            above = _at(numerator, _POSTFIX) if isinstance(numerator, ex.Quotient) else _first(numerator)
            return f"{sign}{number}{above} / {_at(denominator, _POSTFIX)}"
        case (ex.Hadamard() as hadamard,) if not number:
            return f"{sign}{_show(hadamard)[0]}"
    pieces = [_factor(f, first=i == 0 and not number) for i, f in enumerate(rest)]
    return sign + number + " ".join(pieces)


def _factor(expr: Expr, first: bool) -> str:
    text = _at(expr, _POSTFIX)
    return text if first or not text[0].isdigit() else f"({text})"


def _exponent(expr: Expr) -> str:
    match expr:
        case ex.Number(value) if value >= 0 and value.denominator == 1:
            return str(value)
        case _:
            return f"({show_expr(expr)})"


def _number(value: Fraction) -> tuple[str, int]:
    text = _decimal(abs(value))
    if text is None:
        text, binds = f"{abs(value.numerator)}/{value.denominator}", _PRODUCT
    else:
        binds = _ATOM
    return (f"-{text}", _SUM) if value < 0 else (text, binds)


def _decimal(value: Fraction) -> str | None:
    """A short exact decimal, or None: 1/2 is 0.5, 1e-06 stays so, 1/16 and 1/3 stay fractions."""
    if value.denominator == 1 and value < 10**16:
        return str(value.numerator)
    try:
        text = repr(float(value))
    except OverflowError:
        return None
    short = len(text) <= 4 or (value.denominator > 64 and len(text) <= 8)
    return text if short and Fraction(text) == value else None


def _symbol(symbol: ex.Symbol) -> str:
    row = "" if symbol.row is None else str(symbol.row if isinstance(symbol.row, str) else symbol.row + 1)
    if symbol.time is None:
        return f"{symbol.name}_{{{row}}}" if row else symbol.name
    time = "t" if symbol.time == 0 else f"t{symbol.time:+d}"
    if row:
        return f"{symbol.name}_{{{time},{row}}}"
    return f"{symbol.name}_t" if time == "t" else f"{symbol.name}_{{{time}}}"


# -- specs ------------------------------------------------------------------------------------
def show_spec(spec: RecurrenceSpec) -> str:
    """A text with ``parse(show_spec(spec)) == spec``."""
    lines = [f"# {line}".rstrip() for line in spec.doc.split("\n")] if spec.doc else []
    lines += [f"recurrence {spec.name}", ""]
    width = max((len(i.name) for i in spec.inputs), default=0)
    lines += [_input(i, width) for i in spec.inputs]
    lines += [f"const {c.name} = {show_expr(c.value)}" for c in spec.consts]
    lines += [_state(s) for s in spec.states if not _goes_without_saying(s, spec)]
    lines += [f"output {o.target}" for o in spec.outputs if o.target != "o"]
    lines.append("")
    written = spec.written or (*_feeding_order(spec), *spec.outputs)
    index = _index(spec)
    for equation in written:
        lines += _equation(equation.target, equation.value, index)
    return "\n".join(lines) + "\n"


def _index(spec: RecurrenceSpec) -> str:
    """A name for the index of loops that nothing else has."""
    taken = {*(i.name for i in spec.inputs), *(c.name for c in spec.consts), *(s.name for s in spec.states)}
    taken |= {e.target for e in (*spec.written, *spec.outputs)}
    return next(n for n in ("j", "i", "l", "m", *(f"j{i}" for i in range(1000))) if n not in taken)


def _equation(target: str, value: Expr, index: str) -> list[str]:
    """An equation as lines; a loop has its start above and its substep below."""
    if not isinstance(value, ex.Iterate):
        return [f"{target}_t = {show_expr(value)}"]
    lines = [] if _is_past(value.start, target) else _equation(target, value.start, index)

    def renamed(node: Expr) -> Expr:
        is_row = isinstance(node, ex.Symbol) and node.row == value.index
        return replace(node, row=index) if is_row else node  # type: ignore[call-arg]

    step = show_expr(transform(value.body, renamed))
    return [*lines, f"for {index} in 1..{show_expr(value.count)}:", f"    {target}_t = {step}"]


def _is_past(expr: Expr, state: str) -> bool:
    return isinstance(expr, ex.Symbol) and (expr.name, expr.time) == (state, -1)


def _feeding_order(spec: RecurrenceSpec) -> list[Equation]:
    """The updates so that each stands below those whose results it uses."""
    left, placed = list(spec.updates), list[Equation]()
    while left:
        waiting = {e.target for e in left}
        ready = next((e for e in left if not _present(e.value) & (waiting - {e.target})), None)
        if ready is None:
            raise InternalError(f"{spec.name}: states need each other's present")
        left.remove(ready)
        placed.append(ready)
    return placed


def _present(expr: Expr) -> set[str]:
    return {s.name for s in symbols(expr) if s.time == 0}


_DEFAULT_RANGE = {
    "plain": Interval(),
    "log_gate": Interval(None, 0.0, True, False),
    "gate": Interval(0.0, 1.0, True, False),
}


def default_range(kind: str) -> Interval:
    """The range of an input that declares none."""
    return _DEFAULT_RANGE[kind]


def _input(declared: Input, width: int) -> str:
    words = {"plain": [], "log_gate": ["log gate"], "gate": ["gate"]}[declared.kind]
    if declared.dims:
        words.append(f"[{', '.join(map(str, declared.dims))}]")
    elif declared.kind == "plain":
        words.append("scalar")
    if declared.unit:
        words.append("unit")
    if declared.range != default_range(declared.kind):
        words.append(show_range(declared.range))
    keyword = "input" if declared.timed else "param"
    return f"{keyword} {declared.name:<{width}} : {' '.join(words)}"


def _goes_without_saying(state: State, spec: RecurrenceSpec) -> bool:
    """Whether a text without a declaration of the state means the same."""
    if len(spec.states) > 1 or (state.dims, state.start) != (("K", "V"), 0.0):
        return False
    return all(shown_by(e.value, state.name) == state.dims for e in spec.updates)


def _state(state: State) -> str:
    start = "" if state.start == 0 else f" = {show_float(state.start)}"
    shape = f"[{', '.join(map(str, state.dims))}]" if state.dims else "scalar"
    return f"state {state.name} : {shape}{start}"


def show_range(interval: Interval) -> str:
    """``in (0, 2)``, ``>= 0``, ``< 1``, ``in (-inf, inf)``."""
    low, high = interval.low, interval.high
    if low is None and high is not None:
        return f"{'<' if interval.high_open else '<='} {show_float(high)}"
    if high is None and low is not None:
        return f"{'>' if interval.low_open else '>='} {show_float(low)}"
    opening, closing = "(" if interval.low_open else "[", ")" if interval.high_open else "]"
    ends = ("-inf" if low is None else show_float(low), "inf" if high is None else show_float(high))
    return f"in {opening}{ends[0]}, {ends[1]}{closing}"


def show_float(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e16 else repr(value)
