"""Layers and small models from recurrences: ``Mixer``, ``LM``, and the attention layers of hybrids.

Reached as ``ld.nn``; everything is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linalg_dsl.nn.attention import Attention as Attention
    from linalg_dsl.nn.attention import AttentionState as AttentionState
    from linalg_dsl.nn.cache import Cache as Cache
    from linalg_dsl.nn.conv import ShortConvolution as ShortConvolution
    from linalg_dsl.nn.lm import LM as LM
    from linalg_dsl.nn.lm import LMOutput as LMOutput
    from linalg_dsl.nn.mixer import Mixer as Mixer
    from linalg_dsl.nn.mixer import MixerState as MixerState
    from linalg_dsl.nn.pattern import parse_pattern as parse_pattern

_HOME = {
    "Attention": "linalg_dsl.nn.attention",
    "AttentionState": "linalg_dsl.nn.attention",
    "Cache": "linalg_dsl.nn.cache",
    "LM": "linalg_dsl.nn.lm",
    "LMOutput": "linalg_dsl.nn.lm",
    "Mixer": "linalg_dsl.nn.mixer",
    "MixerState": "linalg_dsl.nn.mixer",
    "ShortConvolution": "linalg_dsl.nn.conv",
    "parse_pattern": "linalg_dsl.nn.pattern",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
