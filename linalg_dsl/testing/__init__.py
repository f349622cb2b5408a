"""Property tests and numerics for kernels, generated here or not.

    from linalg_dsl import testing

    testing.assert_op_matches_reference(op)                    # the short way
    print(testing.run_properties(testing.Subject.of_op(op)))   # every property, within a minute
    mine = testing.Subject.of_callable(my_kernel, spec, initial_state=True, final_state=True)
    print(testing.run_properties(mine))                        # the same for foreign code

``PROPERTIES`` has every property by name; each is a function ``(subject, *, seed, examples, budget_s)``
that returns None or raises ``PropertyError``. ``specs``, ``shapes`` and ``inputs`` are hypothesis
strategies (``pip install 'linalg-dsl[testing]'``). See docs/testing.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from linalg_dsl.testing.cases import Case, Shape, make_case
from linalg_dsl.testing.extremes import Extremes
from linalg_dsl.testing.failures import Failure, NotApplicable, PropertyError
from linalg_dsl.testing.replay import load_case, save_case
from linalg_dsl.testing.run import (
    PROPERTIES,
    Outcome,
    Report,
    assert_op_matches_reference,
    run_one,
    run_properties,
)
from linalg_dsl.testing.subject import Subject

if TYPE_CHECKING:
    from linalg_dsl.testing.strategies import inputs as inputs
    from linalg_dsl.testing.strategies import shapes as shapes
    from linalg_dsl.testing.strategies import specs as specs

_STRATEGIES = ("specs", "shapes", "inputs")

__all__ = [
    "PROPERTIES",
    "Case",
    "Extremes",
    "Failure",
    "NotApplicable",
    "Outcome",
    "PropertyError",
    "Report",
    "Shape",
    "Subject",
    "assert_op_matches_reference",
    "inputs",
    "load_case",
    "make_case",
    "run_one",
    "run_properties",
    "save_case",
    "shapes",
    "specs",
]


def __getattr__(name: str) -> Any:
    if name not in _STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = importlib.import_module("linalg_dsl.testing.strategies")
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(
            f"linalg_dsl.testing.{name} is a hypothesis strategy: pip install 'linalg-dsl[testing]'"
        ) from None
    return getattr(found, name)
