"""Exact values: sums of monomials with rational coefficients over free and compound atoms.

An atom is an indeterminate (an entry of an input) or a function of a value: exp of a monomial, log of a
value, a value raised to a power that cannot be multiplied out, any other function by name. Exponents are
rational. The laws of exponentials hold by construction: exp(a + b) = exp(a) exp(b), log(exp(a)) = a,
exp(c log(x)) = x^c, sigmoid(x) = 1 / (1 + exp(-x)), softplus(x) = log(1 + exp(x)),
tanh(x) = 2 sigmoid(2x) - 1, |x| = side(x) x and side(x)^2 = 1 (side is the sign; indeterminates are not 0),
exp(log_size(x)) = |x|. So two expressions that are equal by these laws and by those of a commutative ring
get values whose difference ``is_zero`` finds to
vanish: a proof, not a test at points. Logs and broken powers assume what is declared: gates are positive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import gcd, lcm
from weakref import WeakValueDictionary

from linalg_dsl.algebra.expr import RESET

Term = frozenset[tuple["Atom", Fraction]]
"""A monomial: atoms with their exponents, none of them 0."""
ONE: Term = frozenset()
Number = int | Fraction


class Atom:
    """``kind``: free (``key`` its name), exp, log, base (the value itself) or the name of a function.

    ``key`` of the others is the value, or values, that they are a function of. ``positive`` atoms may be
    taken to any power. Equal ones are one object (``_atom``).
    """

    __slots__ = ("__weakref__", "key", "kind", "positive")

    def __init__(self, kind: str, key: object, positive: bool) -> None:
        self.kind = kind
        self.key = key
        self.positive = positive

    def __str__(self) -> str:
        match self.key:
            case str() as name:
                return name
            case frozenset() as term:
                return f"{self.kind}({Value({term: Fraction(1)})})"
            case tuple() as values:
                return f"{self.kind}({', '.join(map(str, values))})"
            case key:
                return f"({key})" if self.kind == "base" else f"{self.kind}({key})"


_atoms: WeakValueDictionary[tuple[str, object, bool], Atom] = WeakValueDictionary()


def _atom(kind: str, key: object, positive: bool = False) -> Atom:
    found = _atoms.get((kind, key, positive))
    if found is None:
        found = _atoms[kind, key, positive] = Atom(kind, key, positive)
    return found


class Value:
    """A sum of monomials; immutable, compares by its terms."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Term, Fraction]) -> None:
        self.terms = {term: c for term, c in terms.items() if c}
        self._hash: int | None = None

    # -- construction -------------------------------------------------------------------------
    @staticmethod
    def number(value: Number) -> Value:
        return Value({ONE: Fraction(value)})

    @staticmethod
    def free(name: str, positive: bool = False) -> Value:
        return _of(_atom("free", name, positive))

    @staticmethod
    def opaque(kind: str, *of: Value) -> Value:
        """A function of several values of which nothing is known."""
        return _of(_atom(kind, of))

    # -- ring ---------------------------------------------------------------------------------
    def __add__(self, other: Value | Number) -> Value:
        return total((self, _value(other)))

    def __mul__(self, other: Value | Number) -> Value:
        other = _value(other)
        terms: dict[Term, Fraction] = {}
        for s, a in self.terms.items():
            for t, c in other.terms.items():
                term = _times(s, t)
                terms[term] = terms.get(term, Fraction(0)) + a * c
        return Value(terms)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Value:
        return Value({t: -c for t, c in self.terms.items()})

    def __sub__(self, other: Value | Number) -> Value:
        return self + -_value(other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.terms.items()))
        return self._hash

    def __str__(self) -> str:
        return " + ".join(sorted(_show(term, c) for term, c in self.terms.items())) or "0"

    # -- functions ----------------------------------------------------------------------------
    def power(self, exponent: Number) -> Value:
        """x^e. A monomial goes factor by factor where that is right, a sum by its common factor first."""
        exponent = Fraction(exponent)
        if exponent.denominator == 1 and exponent >= 0:
            result = Value.number(1)
            for _ in range(int(exponent)):
                result = result * self
            return result
        if not self.terms:
            raise ZeroDivisionError("0 to a negative or broken power")
        common, c = _common(self)
        rest = self * Value({_inverse(common): 1 / c})
        outside = Value.number(1)
        kept: list[tuple[Atom, Fraction]] = []
        for atom, e in common:
            if exponent.denominator == 1 or atom.positive:
                outside = outside * _monomial((atom, e * exponent))
            else:
                kept.append((atom, e))
        if exponent.denominator == 1:
            outside = outside * c ** int(exponent)
        else:
            rest = rest * c
        rest = rest * _monomial(*kept)
        if rest == Value.number(1):
            return outside
        return outside * _monomial((_atom("base", rest, True), exponent))

    def exp(self) -> Value:
        """The product over terms: exp(c x) is the atom exp(x) to the power c; of a reset it is 0."""
        if float(self.terms.get(ONE, 0)) <= RESET:
            return Value.number(0)
        result = Value.number(1)
        for term, c in self.terms.items():
            inner = _inside_log(term)
            if inner is not None:
                result = result * inner.power(c)
            else:
                result = result * _monomial((_atom("exp", term, True), c))
        return result

    def log(self) -> Value:
        """log of a positive monomial is a sum; of anything else an atom."""
        if len(self.terms) == 1:
            ((term, c),) = self.terms.items()
            if c > 0 and all(a.positive for a, _ in term):
                result = Value.number(0) if c == 1 else _of(_atom("log", Value.number(c)))
                for atom, e in term:
                    result = result + _log_of(atom) * e
                return result
        return _of(_atom("log", self))

    def function(self, name: str) -> Value:
        """Any elementwise function of the language, by name."""
        match name:
            case "exp":
                return self.exp()
            case "log":
                return self.log()
            case "sigmoid":
                return (Value.number(1) + (-self).exp()).power(-1)
            case "softplus":
                return (Value.number(1) + self.exp()).log()
            case "logsigmoid":
                return -(Value.number(1) + (-self).exp()).log()
            case "silu":
                return self * self.function("sigmoid")
            case "tanh":
                return (self * 2).function("sigmoid") * 2 - 1
            case "sqrt":
                return self.power(Fraction(1, 2))
            case "rsqrt":
                return self.power(Fraction(-1, 2))
            case "reciprocal":
                return self.power(-1)
            case "side" | "sign":
                return self._side()
            case "abs":
                return self * self._side()
            case _:
                return _of(_atom(name, self))

    def _side(self) -> Value:
        """The sign of a value other than 0: of a monomial the product of those of its factors."""
        if len(self.terms) != 1:
            return _of(_atom("side", self))
        ((term, c),) = self.terms.items()
        found = Value.number(1 if c > 0 else -1)
        for atom, e in term:
            if atom.kind == "side":
                found = found * _of(atom)
            elif not atom.positive and atom.kind != "relu" and e % 2:
                found = found * _of(_atom("side", _of(atom)))
        return found

    def derivative(self, name: str) -> Value:
        """With respect to the free atom of that name; the maximum of a vector counts as a constant."""
        slopes: dict[Atom, Value] = {}
        parts = []
        for term, c in self.terms.items():
            for one, e in term:
                if one not in slopes:
                    slopes[one] = _slope(one, name)
                if slopes[one].terms:
                    rest = _monomial(*((a, f - 1 if a is one else f) for a, f in term))
                    parts.append(rest * slopes[one] * (c * e))
        return total(parts)

    def is_zero(self) -> bool:
        """Whether the value vanishes: powers of sums are multiplied out over a common denominator."""
        value = self
        while value.terms:
            bases = {a for t in value.terms for a, _ in t if a.kind == "base"}
            uncleared = next((a for a in bases if _whole_part(value, a) is not None), None)
            if uncleared is None:
                return False
            value = _cleared(value, uncleared)
        return True


def total(values: Iterable[Value]) -> Value:
    """The sum of values."""
    terms: dict[Term, Fraction] = {}
    for value in values:
        for term, c in value.terms.items():
            terms[term] = terms[term] + c if term in terms else c
    return Value(terms)


def _value(x: Value | Number) -> Value:
    return x if isinstance(x, Value) else Value.number(x)


def _of(atom: Atom) -> Value:
    return _monomial((atom, Fraction(1)))


def _monomial(*factors: tuple[Atom, Fraction]) -> Value:
    return Value({_term(factors): Fraction(1)})


def _term(factors: Iterable[tuple[Atom, Fraction]]) -> Term:
    """The square of a sign is 1."""
    reduced = ((a, e % 2 if a.kind == "side" else e) for a, e in factors)
    return frozenset((a, e) for a, e in reduced if e)


def _times(s: Term, t: Term) -> Term:
    if not s or not t:
        return s or t
    exponents = dict(s)
    for atom, e in t:
        exponents[atom] = exponents.get(atom, Fraction(0)) + e
    return _term(exponents.items())


def _inverse(term: Term) -> Term:
    return _term((a, -e) for a, e in term)


def _common(value: Value) -> tuple[Term, Fraction]:
    """The greatest monomial that divides every term, and the positive content of the coefficients."""
    exponents: dict[Atom, Fraction] | None = None
    for term in value.terms:
        have = dict(term)
        if exponents is None:
            exponents = have
            continue
        for atom in set(exponents) | set(have):
            exponents[atom] = min(exponents.get(atom, Fraction(0)), have.get(atom, Fraction(0)))
    content = Fraction(
        gcd(*(c.numerator for c in value.terms.values())), lcm(*(c.denominator for c in value.terms.values()))
    )
    return frozenset((a, e) for a, e in (exponents or {}).items() if e), content


def _inside_log(term: Term) -> Value | None:
    """x if the monomial is log(x), |x| if it is log_size(x)."""
    if len(term) == 1:
        ((atom, e),) = term
        if atom.kind in ("log", "log_size") and e == 1 and isinstance(atom.key, Value):
            return atom.key if atom.kind == "log" else atom.key.function("abs")
    return None


def _log_of(atom: Atom) -> Value:
    match atom.kind, atom.key:
        case "exp", frozenset() as term:
            return Value({term: Fraction(1)})
        case "base", Value() as inner:
            return _of(_atom("log", inner))
        case _:
            return _of(_atom("log", _of(atom)))


def _slope(atom: Atom, name: str) -> Value:
    """The derivative of an atom."""
    match atom.kind, atom.key:
        case "free", key:
            return Value.number(1 if key == name else 0)
        case "exp", frozenset() as term:
            return Value({term: Fraction(1)}).derivative(name) * _of(atom)
        case (("log" | "log_size"), Value() as inner):
            slope = inner.derivative(name)
            return slope * inner.power(-1) if slope.terms else slope
        case "base", Value() as inner:
            return inner.derivative(name)
        case "relu", Value() as inner:
            return inner.derivative(name) * inner.function("heaviside")
        case "elu", Value() as inner:
            return inner.derivative(name) * Value.opaque("minimum", inner, Value.number(0)).exp()
        case ("maximum" | "minimum") as kind, (Value() as a, Value() as b):
            first, second = Value.opaque("compare", a, b), Value.opaque("compare", b, a)
            if kind == "minimum":
                first, second = second, first
            return a.derivative(name) * first + b.derivative(name) * second
        case (("side" | "heaviside" | "compare" | "amax"), _):
            return Value({})
        case kind, _:
            raise NotImplementedError(f"no derivative of {kind}")


def _whole_part(value: Value, atom: Atom) -> Fraction | None:
    """The least whole part of the exponents of ``atom`` if some term has another, else None."""
    parts = {e // 1 for e in (dict(t).get(atom, Fraction(0)) for t in value.terms)}
    return Fraction(min(parts)) if parts != {0} else None


def _cleared(value: Value, atom: Atom) -> Value:
    """Times the power of ``atom`` that makes its exponents 0 <= e, whole parts multiplied out."""
    least = _whole_part(value, atom)
    inner = atom.key
    assert least is not None
    assert isinstance(inner, Value)
    parts = []
    powers: dict[int, Value] = {}
    for term, c in value.terms.items():
        exponents = dict(term)
        e = exponents.pop(atom, Fraction(0)) - least
        whole = int(e // 1)
        rest = _monomial(*exponents.items(), (atom, e - whole))
        if whole not in powers:
            powers[whole] = inner.power(whole)
        parts.append(rest * c * powers[whole])
    return total(parts)


def _show(term: Term, c: Fraction) -> str:
    factors = [str(a) if e == 1 else f"{a}^{e}" for a, e in sorted(term, key=lambda f: str(f[0]))]
    return " ".join([str(c), *factors] if c != 1 or not factors else factors)
