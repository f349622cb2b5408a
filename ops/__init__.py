"""Compiled recurrences as torch ops, the step-by-step reference, and the catalogue.

Every entry of the catalogue is a function of this package, compiled at its first use:
``linalg_dsl.ops.gated_delta_rule(q, k, v, g, beta)``. ``catalogue_names()`` lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linalg_dsl.ops.catalogue import catalogue_names

if TYPE_CHECKING:
    from linalg_dsl.ops.catalogue_functions import CatalogueFunction

__all__ = ["catalogue_names"]


def __getattr__(name: str) -> CatalogueFunction:
    if name not in catalogue_names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from linalg_dsl.ops.catalogue_functions import catalogue_function

    return catalogue_function(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *catalogue_names()})
