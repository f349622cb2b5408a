"""What a pattern of wrong numbers usually comes from: hypotheses tried on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from linalg_dsl.testing.cases import Case
from linalg_dsl.testing.oracle import Oracle
from linalg_dsl.testing.subject import Subject


def likely_cause(subject: Subject, case: Case, oracle: Oracle, results: Mapping[str, Tensor]) -> str:
    """One sentence."""
    return "unknown"
