"""Property tests and numerics for kernels, generated here or not.

    from linalg_dsl import testing

    testing.assert_op_matches_reference(op)                    # the short way
    print(testing.run_properties(testing.Subject.of_op(op)))   # every property, within a minute
    mine = testing.Subject.of_callable(my_kernel, spec, initial_state=True, final_state=True)
    print(testing.run_properties(mine))                        # the same for foreign code

``PROPERTIES`` has every property by name; each is a function ``(subject, *, seed, examples, budget_s)``
that returns None or raises ``PropertyError``. ``specs``, ``shapes`` and ``inputs`` are hypothesis
strategies (``pip install hypothesis``). See docs/testing.md.
"""

from __future__ import annotations

from linalg_dsl.testing.cases import Case, Shape, make_case
from linalg_dsl.testing.extremes import Extremes
from linalg_dsl.testing.failures import Failure, NotApplicable, PropertyError
from linalg_dsl.testing.run import PROPERTIES, Outcome, Report, run_one, run_properties
from linalg_dsl.testing.subject import Subject

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
    "make_case",
    "run_one",
    "run_properties",
]
