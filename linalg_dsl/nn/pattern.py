"""Which layer stands where in a model: ``"delta*3 window(512) full@2,mid"``.

    pattern  = item+
    item     = name [ "(" argument ("," argument)* ")" ] [ "*" count ] [ "@" place ("," place)* ]
    argument = number | name "=" number
    place    = number (from 0; negative from the end) | "first" | "mid" | "last"

Items without places, in order, are one period, repeated until the model has its layers (without a number of
layers the model is one period). Items with places then take those layers: layer 0 is ``model.layers[0]``,
mid is layer n // 2. A name is ``full`` or ``window`` (softmax attention), a key of ``layers``, an entry of
the catalogue, a short name of ``SHORT``, or the path of a .rec file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORT = {
    "linear": "linear_attention",
    "delta": "delta_rule",
    "gdn": "gated_delta_rule",
    "gated_delta": "gated_delta_rule",
}
PLACES = ("first", "mid", "last")
OPTIONS = ("heads", "kv_heads", "head_dim", "value_dim", "conv")
"""What an argument by name may set besides the consts of a spec."""
MOST_LAYERS = 1024

_ITEM = re.compile(
    r"(?P<name>[^\s()*@,=]+)(?:\((?P<arguments>[^()]*)\))?(?:\*(?P<count>[^\s@*()]+))?(?:@(?P<places>[^\s@*()]+))?$"
)


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """One layer: attention (``spec`` None) over everything or a ``window``, or a recurrence.

    ``options`` are numbers given by name, the consts of the spec among them, sorted.
    """

    name: str
    spec: RecurrenceSpec | None = None
    window: int | None = None
    options: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        inner = [str(self.window)] if self.window is not None else []
        inner += [f"{n}={v:g}" for n, v in self.options]
        return f"{self.name}({', '.join(inner)})" if inner else self.name


@dataclass(frozen=True, slots=True)
class _Item:
    text: str
    choice: LayerChoice
    count: int
    places: tuple[str, ...]


def parse_pattern(
    pattern: str, num_layers: int | None = None, layers: Mapping[str, Any] | None = None
) -> tuple[LayerChoice, ...]:
    """The choice for every layer. ``layers`` gives specs, Python recurrences, texts or paths by name.

    Raises ``ArgumentError`` that quotes the item which is wrong and says what was expected.
    """
    items = [_item(text, layers or {}) for text in _split(pattern)]
    period = [i.choice for i in items if not i.places for _ in range(i.count)]
    if num_layers is None:
        num_layers = len(period)
    if not 1 <= num_layers <= MOST_LAYERS:
        raise ArgumentError(
            f"pattern {pattern!r}: "
            + (
                f"num_layers must be from 1 to {MOST_LAYERS}, got {num_layers}"
                if period
                else "it has no item without places, so num_layers must be given"
            )
        )
    chosen: list[LayerChoice | None] = [None] * num_layers
    if period:
        chosen = [period[i % len(period)] for i in range(num_layers)]
    taken: dict[int, str] = {}
    for item in items:
        for word in item.places:
            place = _place(word, num_layers, item.text)
            if place in taken and taken[place] != item.text:
                raise ArgumentError(f"pattern: {taken[place]!r} and {item.text!r} both take layer {place}")
            taken[place], chosen[place] = item.text, item.choice
    empty = [i for i, c in enumerate(chosen) if c is None]
    if empty:
        raise ArgumentError(f"pattern {pattern!r}: nothing says what layer {empty[0]} is")
    return tuple(c for c in chosen if c is not None)


def _split(pattern: str) -> list[str]:
    """Items, cut at spaces outside brackets."""
    if not isinstance(pattern, str) or not pattern.strip():
        raise ArgumentError(f"pattern must be a text such as 'delta*3 full', got {pattern!r}")
    if pattern.count("(") != pattern.count(")"):
        raise ArgumentError(f"pattern {pattern!r}: brackets do not match")
    return re.findall(r"(?:[^\s()]|\([^()]*\))+|[()]", pattern)


def _item(text: str, layers: Mapping[str, Any]) -> _Item:
    found = _ITEM.match(text)
    if found is None:
        raise ArgumentError(f"pattern: cannot read {text!r}; an item is name(arguments)*count@places")
    choice = _choice(found["name"], found["arguments"], layers, text)
    count, places = found["count"], found["places"]
    if count is not None and places is not None:
        raise ArgumentError(f"pattern: {text!r} has a count and places; the places say how many")
    if count is not None and (not count.isdecimal() or not 1 <= int(count) <= MOST_LAYERS):
        raise ArgumentError(f"pattern: {text!r}: a count is a whole number from 1, got {count!r}")
    return _Item(text, choice, int(count or 1), tuple(places.split(",")) if places else ())


def _place(word: str, layers: int, item: str) -> int:
    if word in PLACES:
        return (0, layers // 2, layers - 1)[PLACES.index(word)]
    if not re.fullmatch(r"-?\d+", word):
        raise ArgumentError(f"pattern: {item!r}: a place is a number, {', '.join(PLACES)}; got {word!r}")
    place = int(word) + (layers if word.startswith("-") else 0)
    if not 0 <= place < layers:
        raise ArgumentError(f"pattern: {item!r}: there is no layer {word}; layers are 0 to {layers - 1}")
    return place


def _choice(name: str, arguments: str | None, layers: Mapping[str, Any], item: str) -> LayerChoice:
    plain, named = _arguments(arguments, item)
    if name in layers:
        from linalg_dsl.nn.mixer import spec_of

        choice = LayerChoice(name, spec_of(layers[name]))
    elif name in ("full", "window"):
        choice = LayerChoice(name)
    else:
        choice = LayerChoice(name, _named_spec(name, layers, item))
    if name == "window" and choice.spec is None:
        if len(plain) != 1 or plain[0] != int(plain[0]) or plain[0] < 1:
            raise ArgumentError(f"pattern: {item!r}: window takes its size in tokens, such as window(512)")
        choice = replace(choice, window=int(plain[0]))
    elif plain:
        raise ArgumentError(f"pattern: {item!r}: {name} takes arguments by name only, got {plain[0]:g}")
    allowed = set(OPTIONS) - ({"value_dim"} if choice.spec is None else {"kv_heads"})
    consts = {c.name for c in choice.spec.consts} if choice.spec is not None else set()
    for key, value in named.items():
        if key not in allowed | consts:
            raise ArgumentError(
                f"pattern: {item!r}: {name} has no argument {key!r}; it takes "
                + ", ".join(sorted(allowed | consts))
            )
        if key not in consts and value != int(value):
            raise ArgumentError(f"pattern: {item!r}: {key} is a whole number, got {value:g}")
    return replace(choice, options=tuple(sorted(named.items())))


def _arguments(text: str | None, item: str) -> tuple[list[float], dict[str, float]]:
    plain: list[float] = []
    named: dict[str, float] = {}
    for part in (text or "").split(","):
        if not part.strip():
            if text is not None:
                raise ArgumentError(f"pattern: {item!r}: an empty argument")
            continue
        key, equals, number = (x.strip() for x in part.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ArgumentError(f"pattern: {item!r}: an argument is a number, got {number!r}")
        if not equals:
            plain.append(value)
        elif key in named:
            raise ArgumentError(f"pattern: {item!r}: {key} is given twice")
        else:
            named[key] = value
    return plain, named


def _named_spec(name: str, layers: Mapping[str, Any], item: str) -> RecurrenceSpec:
    from linalg_dsl.driver import read_spec
    from linalg_dsl.language.mistakes import nearest
    from linalg_dsl.ops.catalogue import catalogue_names
    from linalg_dsl.ops.catalogue_functions import catalogue_function

    if name.endswith(".rec"):
        if not Path(name).is_file():
            raise ArgumentError(f"pattern: {item!r}: there is no file {name}")
        return read_spec(Path(name))
    full = SHORT.get(name, name)
    if full in catalogue_names():
        return catalogue_function(full).spec
    known: Sequence[str] = ("full", "window", *SHORT, *layers, *catalogue_names())
    close = nearest(name, known)
    hint = (
        f"; did you mean {close}?"
        if close
        else "; names are full, window, the catalogue's, .rec files, and layers="
    )
    raise ArgumentError(f"pattern: {item!r}: there is no layer {name!r}{hint}")
