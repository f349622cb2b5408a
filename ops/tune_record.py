"""What a tuning has found, in the cache directory: one file per recurrence, shape class, types and device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from linalg_dsl.codegen.cache import read_note, toolchain, write_note

_VERSION = 1
"""Of the format, and of what is tried."""


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """What of a call decides which sizes are fast: calls of one class share what was found for one of them.

    ``lanes``, sequences times heads, as the tables tell them apart; ``length``: the power of two at or below
    the tokens of a sequence; ``ratios``: how many heads share one of each tensor.
    """

    lanes: int
    length: int
    K: int
    V: int
    dtypes: tuple[str, ...]
    ratios: tuple[int, ...]
    packed: bool
    passes: str

    def __str__(self) -> str:
        packed = ", packed" if self.packed else ""
        return f"{self.lanes} lanes, T {self.length}, K {self.K}, V {self.V}, {self.passes}{packed}"


def length_class(length: int) -> int:
    return 1 << max(0, length.bit_length() - 1)


@dataclass
class Record:
    """``tried``: of every candidate by its text its milliseconds, or why it cannot be taken.

    ``best``: the options of the winner, None until the search has one; ``finished``: the whole neighbourhood
    was tried, else a further search goes on with what is left.
    """

    name: str
    about: dict[str, Any]
    tried: dict[str, float | str] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    default_ms: float | None = None
    best_ms: float | None = None
    finished: bool = False

    def save(self) -> None:
        """Puts it in place at once: a reader sees the old or the new one."""
        data = {
            "about": self.about, "tried": self.tried, "best": self.best, "default_ms": self.default_ms,
            "best_ms": self.best_ms, "finished": self.finished,
        }  # fmt: skip
        write_note(self.name, json.dumps(data, indent=1))


def load_record(plan: str, shape: ShapeClass, device: str) -> Record:
    """The record for a plan (the text of its modules), empty where there is none that can be read."""
    about: dict[str, Any] = {
        "format": _VERSION, "plan": hashlib.sha256(plan.encode()).hexdigest()[:16], "shape": str(shape),
        "dtypes": list(shape.dtypes), "heads": list(shape.ratios), "device": device,
        "versions": f"linalg_dsl {version('linalg_dsl')}, {toolchain()}",
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    record = Record(f"tuned_{key}", about)
    text = read_note(record.name)
    if text is None:
        return record
    try:
        data = json.loads(text)
        if data["about"] != json.loads(json.dumps(about)):
            return record
        record.tried = {str(k): v for k, v in data["tried"].items()}
        record.best, record.finished = data["best"], bool(data["finished"])
        record.default_ms, record.best_ms = data["default_ms"], data["best_ms"]
    except (ValueError, KeyError, AttributeError, TypeError):
        return Record(record.name, about)  # a file that something else wrote: the search begins anew
    return record


def dtype_names(tensors: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(x.dtype).removeprefix("torch.") for x in tensors)
